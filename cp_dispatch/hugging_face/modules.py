"""Attention of transformers: what is refused, and the window of a module."""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import forward_pre_hooks
from cp_dispatch.errors import ContextParallelError

#: Why other attention than ``F.scaled_dot_product_attention`` is refused, and what to do.
SHARD_ALONE = (
    "only F.scaled_dot_product_attention attends over all ranks, other attention would see only "
    "this rank's shard; use attn_implementation='sdpa', for example by "
    "model.set_attn_implementation('sdpa'), and call models whose sequence is not sharded outside "
    "it"
)

# Functions that make masks for other kinds of attention, and why they are refused.
_REFUSED = {
    "eager_mask": SHARD_ALONE,
    "flash_attention_mask": SHARD_ALONE,
    "flex_attention_mask": "a BlockMask that the model makes would cover only this rank's shard; "
    "use attn_implementation='sdpa', or make the BlockMask of the whole sequence, pass it among "
    "the buffers, and to the model as attention_mask",
}
_UNKNOWN = (
    "a function that cp_dispatch does not know would make masks of this rank's shard; register "
    "transformers.masking_utils.sdpa_mask for it if it calls F.scaled_dot_product_attention"
)


def why_refused(kind: str, maker, masking_utils) -> str | None:
    """Why the attention with this name, whose masks ``maker`` makes, is refused; None if it is
    SDPA."""
    if kind == "sdpa":
        return None
    if "/" in kind:  # a kernel from the hub, whatever makes its masks
        return SHARD_ALONE
    if maker is getattr(masking_utils, "sdpa_mask", None):
        return None
    known = (why for name, why in _REFUSED.items() if maker is getattr(masking_utils, name, None))
    return next(known, _UNKNOWN)


def drops_masks(model) -> bool:
    """Whether Accelerate's hooks for context parallelism replace the masks of this model's
    attention by ``is_causal=True``."""
    if not isinstance(model, torch.nn.Module):
        return False
    names = (getattr(hook, "__qualname__", "") for hook in forward_pre_hooks(model))
    return any(name.startswith("_attach_context_parallel_hooks.") for name in names)


def check_implementation(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a module of transformers whose attention would stay within a shard."""
    # A layer has no config, but its attention has.
    for part in (module,) if hasattr(module, "config") else module.modules():
        kind = getattr(getattr(part, "config", None), "_attn_implementation", None)
        local = isinstance(kind, str) and (
            kind.startswith(("eager", "flash_attention")) or "/" in kind  # a kernel from the hub
        )
        if mesh.size() > 1 and local:
            raise ContextParallelError(
                f"attn_implementation={kind!r} of {type(part).__name__} is refused in "
                f"ContextParallel over {mesh.size()} ranks: {SHARD_ALONE}"
            )


def sliding_window(module: torch.nn.Module) -> int | None:
    """The sliding window or chunk length of an attention module of transformers, or of the
    attention inside a layer, None if there is none. None for a whole model, whose layers may
    differ: it makes its masks inside."""
    window = _said_window(module)
    models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    if window is not None or any(isinstance(part, models) for part in module.modules()):
        return window
    inside = [_said_window(part) for part in module.modules()]
    return min((x for x in inside if x is not None), default=None)


def _said_window(module: torch.nn.Module) -> int | None:
    config = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    # A config with kinds of layers does not say which kind this one is; the module itself does or,
    # in Llama 4, its index among the layers.
    whole = config if kinds is None else None
    window = getattr(module, "sliding_window", getattr(whole, "sliding_window", None))
    known = kinds is not None and isinstance(layer, int) and 0 <= layer < len(kinds)
    if known and kinds[layer] == "chunked_attention":
        window = getattr(config, "attention_chunk_size", None)
    return window if isinstance(window, int) else None
