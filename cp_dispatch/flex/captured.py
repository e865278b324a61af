"""Prepares tensors that the mods capture for the kernel, and computes their gradients.

The kernel gets them whole and in natural order. A plain tensor, like a replicated DTensor, is the
same on every rank. A sharded DTensor is gathered; if it is sharded over the ranks that share the
sequence, it is in the layout's order and is put into natural order. A gradient is the sum over all
ranks that hold different parts of the queries, with the placements of the tensor. In a model of
plain shards, the gradient of a plain tensor is each rank's share of the sum, like those of the
model's parameters, which FSDP and DDP reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx import GraphModule

from cp_dispatch._compat import is_fake, is_tracing, local_tensor, trace_gradients
from cp_dispatch.backends import wide_dtype
from cp_dispatch.flex.plan import FlexPlan
from cp_dispatch.layouts import Balancer

_ARGUMENTS = 5  # of a score_mod, before what it captures: score, b, h, q_idx, kv_idx


def for_kernel(buffers: tuple, plan: FlexPlan, part) -> tuple:
    """Plain tensors on this rank; ints stay as they are."""
    return tuple(_whole(x, plan, part) if isinstance(x, DTensor) else x for x in buffers)


def _whole(buffer: DTensor, plan: FlexPlan, part) -> Tensor:
    placed = [Replicate()] * buffer.device_mesh.ndim
    whole = _detached(buffer)
    if list(buffer.placements) != placed:
        whole = whole.redistribute(placements=placed)
    whole = local_tensor(whole)
    dim = sequence_dim(buffer, plan)
    if dim is not None:
        whole = _ordered(whole, dim, plan.layout, -1, part)
    # The local kernel's backward reads this; in a trace torch looks at the graph instead.
    if buffer.requires_grad and not is_tracing():
        whole = whole.detach().requires_grad_()
    return whole


def _detached(x: DTensor) -> DTensor:
    if not torch.is_inference_mode_enabled():
        return x.detach()
    # This does not make a view of a DTensor from outside inference mode.
    return DTensor.from_local(
        local_tensor(x), x.device_mesh, x.placements, run_check=False, shape=x.shape,
        stride=x.stride(),
    )  # fmt: skip


def sequence_dim(buffer: DTensor, plan: FlexPlan) -> int | None:
    """The dim of a captured tensor that is in the layout's order, None if there is none."""
    if plan.layout is None:
        return None
    dims = {
        p.dim
        for i, p in enumerate(buffer.placements)
        if i in plan.mesh_dims and isinstance(p, Shard)
    }
    return dims.pop() if dims else None


def _ordered(x: Tensor, dim: int, layout: Balancer, which: int, part) -> Tensor:
    """Reorder to natural order (``which`` -1) or to the layout's (-2), in all batch rows."""
    every_row = [0, layout.rows, *part[2:]]
    order = torch.ops.cp_dispatch.flex_order(x, layout.text, which, every_row, layout.seq_len)
    if order.size(0) == 1:
        return x.index_select(dim, order[0])
    shape = [1] * x.ndim
    shape[0], shape[dim] = order.shape
    return x.take_along_dim(order.long().view(shape), dim)


def gradients_of_mod(joint_graph, score_mod, query: Tensor, buffers: tuple):
    """``joint_graph``, the gradients of ``score_mod``; traced again if torch left tensors without
    data in it.

    An uncompiled forward traces it inside the saved-tensor hooks of a surrounding checkpoint, which
    save tensors of the trace and return different ones. Gradients would be garbage, as they are
    with torch on one device.
    """
    if is_tracing() or not isinstance(joint_graph, GraphModule):
        return joint_graph
    if not any(map(is_fake, joint_graph.buffers())):
        return joint_graph
    return trace_gradients(score_mod, query, buffers)


def have_gradients(joint_graph, count: int) -> list[bool]:
    """Which captured tensors have gradients in ``score_mod``'s backward.

    It determines the sums over ranks, because it is the same on all of them, also on ranks without
    rows and in a trace, where torch up to 2.13 announces a gradient for every tensor and returns
    None later.
    """
    if not isinstance(joint_graph, GraphModule):
        return [True] * count
    (output,) = joint_graph.graph.find_nodes(op="output")
    return [x is not None for x in output.args[0][_ARGUMENTS:]]


def gradient(
    grad: Tensor | None, buffer, query: DTensor, plan: FlexPlan, part, of_shards: bool
) -> Tensor | None:
    """The gradient of a captured tensor from this rank's share of it."""
    if grad is None or not isinstance(buffer, Tensor):
        return None
    if of_shards and not isinstance(buffer, DTensor):
        return grad.to(buffer.dtype)
    mesh = query.device_mesh
    shares = [Partial() if isinstance(p, Shard) else Replicate() for p in query.placements]
    wide = grad.to(wide_dtype(grad.dtype)) if grad.is_floating_point() else grad
    if isinstance(buffer, DTensor):
        dim = sequence_dim(buffer, plan)
        if dim is not None:
            wide = _ordered(wide, dim, plan.layout, -2, part)
        placed = [Replicate() if isinstance(p, Partial) else p for p in buffer.placements]
    else:
        placed = [Replicate()] * mesh.ndim
    summed = DTensor.from_local(wide, mesh, shares, run_check=False).redistribute(placements=placed)
    summed = summed.to(buffer.dtype)
    return summed if isinstance(buffer, DTensor) else local_tensor(summed)
