"""From torch's dispatcher to an op: is this call ours, and which op is it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import get_unwrapped, is_functorch_wrapped_tensor
from cp_dispatch.call import Call
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.normalize import four_dims, like_query
from cp_dispatch.ops import forward_op
from cp_dispatch.options import Options
from cp_dispatch.plan import make_plan


def involves_dtensor(query, key, value, attn_mask) -> bool:
    """Whether any argument is a DTensor. Every plain call pays for this, so it is short."""
    for tensor in (query, key, value, attn_mask):
        if type(tensor) is torch.Tensor:
            # Under torch.func transforms a DTensor hides in a wrapper.
            if is_functorch_wrapped_tensor(tensor):
                _refuse_functorch(tensor)
        elif isinstance(tensor, DTensor):
            return True
    return False


def attend(
    options: Options,
    query,
    key,
    value,
    attn_mask,
    dropout_p,
    is_causal,
    scale,
    enable_gqa,
):
    """Run a call that involves a DTensor, or return NotImplemented to leave it to torch.

    Raises:
        ContextParallelError: the call is not supported; nothing was sent.
    """
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    call = four_dims(call)
    plan = make_plan(options, call)
    if plan.handler == "stock":
        return NotImplemented
    if plan.handler == "refused":
        raise plan.error()
    output, _ = forward_op(plan.backend)(
        call.query, call.key, call.value, call.attn_mask, is_causal, scale,
        call.query.shape[2], call.key.shape[2],
        plan.schedule if plan.schedule != "local" else "ring", _group_name(query, plan.mesh_dim),
    )  # fmt: skip
    output = output if output.dtype is query.dtype else output.to(query.dtype)
    return like_query(output, query)


def _group_name(query: DTensor, mesh_dim: int | None) -> str:
    """The process group of the ranks that share the sequence, "" if none do."""
    mesh = query.device_mesh
    # A rank outside the mesh takes no part, and has no group.
    if mesh_dim is None or mesh.get_coordinate() is None:
        return ""
    return mesh.get_group(mesh_dim).group_name


def _refuse_functorch(tensor) -> None:
    inner = tensor
    while is_functorch_wrapped_tensor(inner):
        inner = get_unwrapped(inner)
    if isinstance(inner, DTensor):
        raise ContextParallelError(
            "cp_dispatch does not support DTensors under torch.func transforms (vmap, grad, "
            "jvp). Given: scaled_dot_product_attention on a DTensor inside a transform. "
            "Supported: autograd. Use torch.autograd.grad, or cp_dispatch.disable()."
        )
