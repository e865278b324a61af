"""Chooses the backend that torch itself would choose for one rank's shards."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch._compat import (
    disable_current_modes,
    fused_sdp_choice,
    sdp_priority_order,
    sdp_switches,
)
from cp_dispatch.backends import BACKENDS

# What torch's choice returns if no enabled backend supports the call.
_NONE_FITS = -1


class Mask(NamedTuple):
    """The properties of a mask that torch's choice depends on; ``shape`` is that of one hop's
    part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class LocalCall:
    """One rank's part of a call, with what the choice of a backend depends on.

    ``shapes`` are ``(B, H, Sq, D)``, ``(B, Hkv, Sk, D)``, ``(B, Hkv, Sk, Dv)`` of the largest
    shard. They are the same on all ranks, so all ranks make the same choice.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device_type: str
    is_causal: bool = False
    enable_gqa: bool = False
    needs_grad: bool = False
    mask: Mask | None = None
    dropout_p: float = 0.0

    @property
    def is_causal_square(self) -> bool:
        """Whether torch is asked for a causal kernel. Causal tiles are square, so a causal call
        between different lengths may use kernels that refuse it on one device."""
        return self.is_causal and self.shapes[0][2] == self.shapes[1][2]

    @property
    def has_single_key(self) -> bool:
        """Whether the largest shard of keys is a single key."""
        return self.shapes[1][2] == 1

    def of_two(self) -> LocalCall:
        """The same call with two keys and at least two rows."""
        rows = max(2, self.shapes[0][2])
        lengths = rows, 2, 2
        shapes = tuple(
            (*shape[:2], length, shape[3])
            for shape, length in zip(self.shapes, lengths, strict=True)
        )
        mask = self.mask
        if mask is not None:
            mask = mask._replace(shape=(*mask.shape[:2], rows, 2))
        return replace(self, shapes=shapes, mask=mask)


def sdp_flags() -> tuple:
    """The switches that torch's choice depends on."""
    switches = [is_on() for is_on in sdp_switches]
    return *switches, sdp_priority_order(), torch.are_deterministic_algorithms_enabled()


def choose_backend(local: LocalCall) -> tuple[str | None, tuple[str, ...]]:
    """Name of the backend, None if no backend supports the call, and any reasons of our own.

    Torch's own function makes the choice, so ``sdpa_kernel(...)``, the ``torch.backends.cuda``
    flags and the priority order mean what they mean on one device. If only backends that do not
    support grouped heads are enabled, they get repeated heads, as torch does for its math kernel.
    """
    only_math = _needs_math(local)
    if only_math:
        return ("math" if torch.backends.cuda.math_sdp_enabled() else None), only_math
    query, *rest = local.shapes
    device = torch.cuda.current_device() if local.device_type == "cuda" else 0
    choice = _choice(local, device, sdp_flags())
    if choice == _NONE_FITS and rest[0][1] != query[1]:
        repeated = ((x[0], query[1], *x[2:]) for x in rest)
        local = replace(local, shapes=(query, *repeated), enable_gqa=False)
        choice = _choice(local, device, sdp_flags())
    if choice == _NONE_FITS and local.has_single_key:
        # The only length that torch keeps from a kernel (cuDNN). Backends support it, and the user
        # did not choose it: only the shard has a single key.
        choice = _choice(local.of_two(), device, sdp_flags())
    for name, backend in BACKENDS.items():
        if backend.sdp_backend.value == choice and local.device_type in backend.devices:
            return name, ()
    return None, ()


def _needs_math(local: LocalCall) -> tuple[str, ...]:
    """Reasons why only our math backend can run the call, if any."""
    reasons = []
    mask = local.mask
    if local.dropout_p > 0.0:
        reasons.append(
            "math: only it draws dropout by (query, key) pair, independently of the sharding"
        )
    if mask is not None and mask.needs_grad:
        reasons.append("math: only it computes the gradient of a bias")
    if mask is not None and mask.dtype not in (torch.bool, local.dtype):
        reasons.append(f"math: only it supports a {mask.dtype} bias with {local.dtype} inputs")
    return tuple(reasons)


def local_tensors(local: LocalCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask of a local call, as real tensors that hold one row each.

    Torch's choice depends only on metadata, but is "math" for every fake CUDA tensor. The shards
    themselves may be traced, or empty on some rank.
    """
    tensors = [
        torch.empty(
            shape[3], dtype=local.dtype, device=local.device_type, requires_grad=local.needs_grad
        ).expand(shape)
        for shape in local.shapes
    ]
    mask = local.mask
    if mask is None:
        return *tensors, None
    row = torch.empty(mask.shape[-1], dtype=mask.dtype, device=local.device_type)
    return *tensors, row.expand(mask.shape)


@functools.lru_cache(maxsize=512)
def _choice(local: LocalCall, device: int, flags: tuple) -> int:
    """Torch's choice. It depends on ``device`` and ``flags`` too, which are here for the cache."""
    with disable_current_modes(), torch.enable_grad(), warnings.catch_warnings():
        # Torch warns of every reason before it raises; why_not.py collects them.
        warnings.simplefilter("ignore")
        query, key, value, mask = local_tensors(local)
        try:
            return int(
                fused_sdp_choice(
                    query,
                    key,
                    value,
                    mask,
                    0.0,
                    local.is_causal_square,
                    enable_gqa=local.enable_gqa,
                )  # fmt: skip
            )
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError:
            return _NONE_FITS
