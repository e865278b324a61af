"""Refuses calls on DTensors under ``torch.func`` transforms, which have no rules for them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import get_unwrapped, is_functorch_wrapped_tensor
from cp_dispatch.agreement import tell_refusal
from cp_dispatch.errors import ContextParallelError


def hidden_mesh(tensors):
    """The mesh of a DTensor among these or inside their wrappers, None without one."""
    mesh = None
    for tensor in tensors:
        while isinstance(tensor, torch.Tensor) and is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
    return mesh


def refuse_transforms(tensors, name: str, wrapped: bool = False) -> None:
    """Refuse a DTensor in or beside a wrapper of a torch.func transform; with ``wrapped``, any
    DTensor.

    Raises:
        ContextParallelError: if there is one.
    """
    mesh = hidden_mesh(tensors)
    wrapped = wrapped or any(
        isinstance(x, torch.Tensor) and is_functorch_wrapped_tensor(x) for x in tensors
    )
    if wrapped and mesh is not None:
        error = ContextParallelError(
            "cp_dispatch does not support DTensors under torch.func transforms (vmap, "
            f"grad, jvp). Given: {name} on a DTensor inside a transform. Supported: autograd. "
            "Use torch.autograd.grad, or cp_dispatch.disable()."
        )
        tell_refusal(mesh, error)
        raise error
