"""Reasons why backends were not chosen, for ``explain()`` and for errors."""

from __future__ import annotations

import warnings

import torch
from torch.nn.attention import SDPBackend

from cp_dispatch._compat import disable_current_modes
from cp_dispatch.backends import BACKENDS, Backend
from cp_dispatch.planning.choose import LocalCall, local_tensors

_SWITCHES = {
    SDPBackend.FLASH_ATTENTION: "flash_sdp_enabled",
    SDPBackend.EFFICIENT_ATTENTION: "mem_efficient_sdp_enabled",
    SDPBackend.CUDNN_ATTENTION: "cudnn_sdp_enabled",
    SDPBackend.MATH: "math_sdp_enabled",
}
# Torch's own checks on CUDA, which give reasons. There are none for CPU or for math.
_CHECKS = {
    SDPBackend.FLASH_ATTENTION: "can_use_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "can_use_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "can_use_cudnn_attention",
}


def reasons_against(local: LocalCall, chosen: str | None) -> dict[str, tuple[str, ...]]:
    """For each backend but the chosen one, why it does not run this call."""
    return {
        name: tuple(_reasons(backend, local, chosen))
        for name, backend in BACKENDS.items()
        if name != chosen
    }


def _reasons(backend: Backend, local: LocalCall, chosen: str | None):
    if local.device_type not in backend.devices:
        yield f"it is a kernel for {', '.join(backend.devices)}"
        return
    found = False
    for reason in (*_switch(backend), *_ours(backend, local), *_torchs(backend, local)):
        found = True
        yield reason
    if not found:
        yield f"it would work; torch prefers {chosen}" if chosen else "torch does not choose it"


def _switch(backend: Backend):
    switch = _SWITCHES.get(backend.sdp_backend)
    if switch and not getattr(torch.backends.cuda, switch)():
        yield f"it is switched off (torch.backends.cuda.{switch}())"


def _ours(backend: Backend, local: LocalCall):
    mask = local.mask
    if local.dropout_p > 0.0 and not backend.takes_dropout:
        yield "its dropout cannot be drawn by (query, key) pair, independently of the sharding"
    if mask is not None and mask.needs_grad and not backend.mask_gradient:
        yield "it does not compute the gradient of a bias"
    others = mask is not None and mask.dtype not in (torch.bool, local.dtype)
    if others and not backend.takes_any_bias:
        yield f"it does not support a {mask.dtype} bias with {local.dtype} inputs"
    query, _, value = local.shapes
    if backend.one_head_dim and query[3] != value[3]:
        yield f"it needs value's head dim ({value[3]}) to be the query's ({query[3]})"


def _torchs(backend: Backend, local: LocalCall) -> list[str]:
    """The reasons that torch's check of a CUDA kernel gives."""
    check = _CHECKS.get(backend.sdp_backend)
    if check is None or local.device_type != "cuda":
        return []
    cuda = torch.backends.cuda
    with disable_current_modes(), torch.enable_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        query, key, value, mask = local_tensors(local)
        params = cuda.SDPAParams(
            query, key, value, mask, 0.0, local.is_causal_square, local.enable_gqa
        )
        if getattr(cuda, check)(params, debug=True):
            return []
    return [str(warning.message).split(" (Triggered internally")[0] for warning in said]
