"""Refuses models of transformers that, by their config, depend on the shard's length or positions.

Inside a block a model knows only this rank's shard. Some models silently use its length or indices
within it, whatever positions and masks they are given.
"""

from __future__ import annotations

_AS_DTENSORS = (
    "use DTensors and cp_dispatch.enable() instead, inside "
    "torch.distributed.tensor.experimental.implicit_replication()"
)
# Parts of the names of layers that have states or convolutions along the sequence, alone or
# ("hybrid") beside attention.
_MIXERS = "linear", "mamba", "conv", "recurrent", "hybrid"


def wrong_in_a_shard(config, total: int, longest: list[int]) -> str | None:
    """Why a model would be wrong on shards of ``total`` positions, if each rank is given positions
    below its entry of ``longest``, and what to do; None if it would be right."""
    return (
        _mixers(config)
        or _rotary(config, longest)
        or _temperature(config, total)
        or _indexer(config)
    )


def wrong_in_a_layout(config, total: int) -> str | None:
    """Why a model would be wrong on DTensors of ``total`` positions in a layout, whatever positions
    it is given, and what to do; None if it would be right."""
    if not _scales_by_position(config, total):
        return None
    return (
        "attn_temperature_tuning uses positions that the model counts itself, in natural order, "
        f"which is wrong from position {config.floor_scale} on (floor_scale); use layout=None, or "
        "make the model with attn_temperature_tuning=False"
    )


def by_longest(config) -> bool:
    """Whether rotary frequencies depend on the longest position."""
    kinds = [rope.get("rope_type") for rope in _ropes(config)]
    return any(isinstance(x, str) and ("dynamic" in x or x == "longrope") for x in kinds)


def _mixers(config) -> str | None:
    """Jamba, Qwen3-Next and the like: only some layers have attention."""
    found = sorted(x for x in _kinds(config) if any(word in x for word in _MIXERS))
    if not found:
        return None
    return (
        f"layers of this model mix positions in other ways than attention ({found} in its config), "
        "and would do so only within this rank's shard; run the model on whole sequences, outside "
        "the block (if these layers handle sharded sequences by themselves, pass prebuilt masks, "
        "which are not checked here)"
    )


def _rotary(config, longest: list[int]) -> str | None:
    """Rotary frequencies that each rank would choose by its own longest position."""
    for rope in _ropes(config):
        kind, limit, apart = rope.get("rope_type"), None, False
        if kind == "longrope" and _differ(rope, "factor", "mscale"):  # PhiMoE has the second
            limit = rope.get("original_max_position_embeddings")
            apart = limit is not None and len({n > limit for n in longest}) > 1
        elif isinstance(kind, str) and "dynamic" in kind:
            limit = getattr(config, "max_position_embeddings", None)
            apart = limit is not None and max(longest) > limit and len(set(longest)) > 1
        if apart:
            return (
                f"rope_type={kind!r} uses different frequencies beyond {limit} positions, and each "
                f"rank would choose by what it holds, {longest}; {_AS_DTENSORS}; or make the model "
                "with rope_parameters that do not depend on the length"
            )
    return None


def _differ(rope: dict, *names: str) -> bool:
    return any(rope.get(f"short_{name}") != rope.get(f"long_{name}") for name in names)


def _temperature(config, total: int) -> str | None:
    if not _scales_by_position(config, total):
        return None
    return (
        "attn_temperature_tuning uses positions that the model counts from 0 in each shard, which "
        f"is wrong from position {config.floor_scale} on (floor_scale); {_AS_DTENSORS}, without a "
        "layout and with a single sequence; or make the model with attn_temperature_tuning=False"
    )


def _scales_by_position(config, total: int) -> bool:
    """Llama 4 counts positions for its queries from 0, in layers without rotary embeddings."""
    floor = getattr(config, "floor_scale", None)
    tuned = getattr(config, "attn_temperature_tuning", False)
    if not tuned or floor is None or total < floor:
        return False
    return not all(getattr(config, "no_rope_layers", None) or [0])


def _indexer(config) -> str | None:
    """DeepSeek V3.2 and Qwen4-Exp choose each query's keys by the scores of all keys, MiniMax M3
    blocks of them."""
    names = ["index_topk", "indexer_budget"]
    if "minimax_m3_sparse" in _kinds(config):  # its config has a number of blocks without them too
        names = ["index_topk_blocks"]
    name = next((name for name in names if getattr(config, name, None) is not None), None)
    if name is None:
        return None
    return (
        f"an indexer chooses the keys that are attended ({name}), and would know only this rank's "
        f"keys; {_AS_DTENSORS}, without a layout"
    )


def _kinds(config) -> set[str]:
    """Kinds of layers, by their names in the config."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return {x for x in kinds or () if isinstance(x, str)}


def _ropes(config) -> list[dict]:
    """The config's RoPE parameters: one dict, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]
