"""What models of transformers do with positions and keys by themselves, as their config says.

Inside a block they know this rank's shard alone, and some go by its length or by places in it, in
silence, whatever positions and masks they are given.
"""

from __future__ import annotations

_AS_DTENSORS = (
    "give the model DTensors and cp_dispatch.enable() instead, inside "
    "torch.distributed.tensor.experimental.implicit_replication()"
)
# In the names of kinds of layers that have states or convolutions along the sequence, alone or
# ("hybrid") beside attention.
_MIXERS = "linear", "mamba", "conv", "recurrent", "hybrid"


def wrong_in_a_shard(config, total: int, longest: list[int]) -> str | None:
    """Why a model would be wrong on shards of ``total`` positions, where each rank is given
    positions below ``longest``, and what to do."""
    return (
        _mixers(config)
        or _rotary(config, longest)
        or _temperature(config, total)
        or _indexer(config)
    )


def by_longest(config) -> bool:
    """Whether rotary frequencies depend on the longest position."""
    kinds = [rope.get("rope_type") for rope in _ropes(config)]
    return any(isinstance(x, str) and ("dynamic" in x or x == "longrope") for x in kinds)


def _mixers(config) -> str | None:
    """Jamba, Qwen3-Next and the like: attention in some layers alone."""
    found = sorted(x for x in _kinds(config) if any(word in x for word in _MIXERS))
    if not found:
        return None
    return (
        f"layers of this model mix positions in other ways than attention, {found} in its config, "
        "and would do so within this rank's shard alone; run it whole, outside of the block (where "
        "these layers go over ranks by themselves, pass masks that are ready, of which nothing is "
        "asked here)"
    )


def _rotary(config, longest: list[int]) -> str | None:
    """Frequencies that each rank would choose by its own longest position."""
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
                f"rope_type={kind!r} takes other frequencies beyond {limit} positions, and each "
                f"rank would choose by what it holds, {longest}; {_AS_DTENSORS}; or make it with "
                "rope_parameters that do not go by the length"
            )
    return None


def _differ(rope: dict, *names: str) -> bool:
    return any(rope.get(f"short_{name}") != rope.get(f"long_{name}") for name in names)


def _temperature(config, total: int) -> str | None:
    """Llama 4 counts positions for its queries from 0, in layers without rotary embeddings."""
    floor = getattr(config, "floor_scale", None)
    tuned = getattr(config, "attn_temperature_tuning", False)
    if not tuned or floor is None or total < floor:
        return None
    if all(getattr(config, "no_rope_layers", None) or [0]):
        return None
    return (
        "attn_temperature_tuning goes by positions that the model counts from 0 in each shard, "
        f"which is wrong from {floor} on (floor_scale); {_AS_DTENSORS}, without a layout and of "
        "one sequence; or make it with attn_temperature_tuning=False"
    )


def _indexer(config) -> str | None:
    """DeepSeek V3.2 and Qwen4-Exp choose each query's keys by scores of all of them, MiniMax M3
    blocks."""
    names = ["index_topk", "indexer_budget"]
    if "minimax_m3_sparse" in _kinds(config):  # its config has a number of blocks without them too
        names = ["index_topk_blocks"]
    name = next((name for name in names if getattr(config, name, None) is not None), None)
    if name is None:
        return None
    return (
        f"an indexer chooses the keys that are attended ({name}), and would know this rank's "
        f"alone; {_AS_DTENSORS}, without a layout"
    )


def _kinds(config) -> set[str]:
    """Of layers, as the config names them."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return {x for x in kinds or () if isinstance(x, str)}


def _ropes(config) -> list[dict]:
    """One, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]
