"""Which backend torch would take for one rank's shards."""

from __future__ import annotations

import functools

import torch
from torch.nn.attention import SDPBackend

from cp_dispatch._compat import (
    FakeTensorMode,
    disable_current_modes,
    fused_sdp_choice,
    sdp_priority_order,
)
from cp_dispatch.backends import BACKENDS

# What torch's choice returns when no backend that is switched on fits.
_NONE_FITS = -1


def choose_backend(
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device_type: str,
    is_causal: bool,
    enable_gqa: bool,
    needs_grad: bool,
) -> str | None:
    """Name of the backend for local ``(query, key, value)`` shapes, None if torch has none.

    Torch is asked with its own function, so ``sdpa_kernel(...)``, the ``torch.backends.cuda``
    flags and the priority order mean what they mean on one device. The shapes are those of the
    largest shard, equal on all ranks, so that all ranks choose alike.

    Tiles are square where they are causal, so a causal call between different lengths may use
    kernels that refuse it on one device. A backend that takes no grouped heads is given
    repeated ones, as torch does for its math kernel, if nothing else is switched on.
    """
    query, key, value = shapes
    square = query[2] == key[2]
    flags = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        sdp_priority_order(),
        torch.are_deterministic_algorithms_enabled(),
    )
    device = torch.cuda.current_device() if device_type == "cuda" else 0
    choice = _choice(
        query, key, value, dtype, device_type, device, is_causal and square, enable_gqa,
        needs_grad, flags,
    )  # fmt: skip
    if choice == _NONE_FITS and key[1] != query[1]:
        key, value = ((x[0], query[1], *x[2:]) for x in (key, value))
        choice = _choice(
            query, key, value, dtype, device_type, device, is_causal and square, False,
            needs_grad, flags,
        )  # fmt: skip
    if choice == _NONE_FITS:
        return None
    sdp_backend = SDPBackend(choice)
    for name, backend in BACKENDS.items():
        if backend.sdp_backend == sdp_backend and device_type in backend.devices:
            return name
    return None


@functools.lru_cache(maxsize=512)
def _choice(
    query, key, value, dtype, device_type, device, is_causal, enable_gqa, needs_grad, flags
) -> int:
    # Fake tensors: torch's choice looks at metadata only, and shards may be traced or empty.
    with disable_current_modes(), FakeTensorMode():
        tensors = [
            torch.empty(
                shape[0], shape[2], shape[1], shape[3],
                dtype=dtype, device=torch.device(device_type, device), requires_grad=needs_grad,
            ).transpose(1, 2)
            for shape in (query, key, value)
        ]  # fmt: skip
        try:
            return int(
                fused_sdp_choice(*tensors, None, 0.0, is_causal, enable_gqa=enable_gqa)
            )
        except RuntimeError:
            # Torch raises where no backend fits, after warning of every reason.
            return _NONE_FITS
