"""Which backend torch would take for one rank's shards."""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch

from cp_dispatch._compat import (
    disable_current_modes,
    fused_sdp_choice,
    sdp_priority_order,
)
from cp_dispatch.backends import BACKENDS

# What torch's choice returns when no backend that is switched on fits.
_NONE_FITS = -1


class Mask(NamedTuple):
    """What torch's choice depends on in a mask: ``shape`` is that of one hop's part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


def _needs_math(mask: Mask | None, dtype: torch.dtype, dropout_p: float) -> tuple[str, ...]:
    """Why only our math backend can do it, if so."""
    reasons = []
    if dropout_p > 0.0:
        reasons.append("math: the coins of dropout belong to (query, key) pairs, not to a kernel")
    if mask is not None and mask.needs_grad:
        reasons.append("math: only it gives the gradient of a bias")
    if mask is not None and mask.dtype not in (torch.bool, dtype):
        reasons.append(f"math: only it takes a {mask.dtype} bias beside {dtype}")
    return tuple(reasons)


def sdp_flags() -> tuple:
    """The switches that torch's choice listens to."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        sdp_priority_order(),
        torch.are_deterministic_algorithms_enabled(),
    )


def choose_backend(
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device_type: str,
    is_causal: bool,
    enable_gqa: bool,
    needs_grad: bool,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
) -> tuple[str | None, tuple[str, ...]]:
    """Name of the backend for local ``(query, key, value)`` shapes.

    If no backend that is switched on fits: None, and torch's reasons against each.

    Torch is asked with its own function, so ``sdpa_kernel(...)``, the ``torch.backends.cuda``
    flags and the priority order mean what they mean on one device. The shapes are those of the
    largest shard, equal on all ranks, so that all ranks choose alike.

    Tiles are square where they are causal, so a causal call between different lengths may use
    kernels that refuse it on one device. A backend that takes no grouped heads is given
    repeated ones, as torch does for its math kernel, if nothing else is switched on.
    """
    query, key, value = shapes
    square = query[2] == key[2]
    device = torch.cuda.current_device() if device_type == "cuda" else 0
    is_causal = is_causal and square
    only_math = _needs_math(mask, dtype, dropout_p)
    if only_math:
        on = torch.backends.cuda.math_sdp_enabled()
        return ("math", only_math) if on else (None, (*only_math, "and math is switched off"))
    where = (dtype, device_type, device, is_causal, mask)
    choice, reasons = _choice(query, key, value, *where, enable_gqa, needs_grad, sdp_flags())
    if choice == _NONE_FITS and key[1] != query[1]:
        key, value = ((x[0], query[1], *x[2:]) for x in (key, value))
        choice, reasons = _choice(query, key, value, *where, False, needs_grad, sdp_flags())
    for name, backend in BACKENDS.items():
        if backend.sdp_backend.value == choice and device_type in backend.devices:
            return name, ()
    return None, reasons


@functools.lru_cache(maxsize=512)
def _choice(
    query,
    key,
    value,
    dtype,
    device_type,
    device,
    is_causal,
    mask,
    enable_gqa,
    needs_grad,
    flags,
) -> tuple[int, tuple[str, ...]]:
    """Torch's choice and, where nothing fits, what torch says of every backend."""
    # Real tensors that hold one row: torch's choice looks at metadata only, but answers "math"
    # for every fake CUDA tensor; shards may be traced, or empty on some rank.
    with (
        disable_current_modes(),
        torch.enable_grad(),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        tensors = [
            torch.empty(
                shape[3],
                dtype=dtype,
                device=torch.device(device_type, device),
                requires_grad=needs_grad,
            ).expand(shape)
            for shape in (query, key, value)
        ]
        attn_mask = None
        try:
            if mask is not None:
                row = torch.empty(mask.shape[-1], dtype=mask.dtype, device=tensors[0].device)
                attn_mask = row.expand(mask.shape)
            choice = fused_sdp_choice(*tensors, attn_mask, 0.0, is_causal, enable_gqa=enable_gqa)
        except RuntimeError as error:
            said_of_it = (
                str(warning.message).split(" (Triggered internally")[0] for warning in said
            )
            return _NONE_FITS, (*said_of_it, str(error).splitlines()[0])
    return int(choice), ()
