"""``varlen_attn`` on DTensors: runs the op for a call, and defines the op's rules for DTensors.

The rules unwrap DTensors, run the op on this rank's shards, and wrap the results. They run below
autograd, in traces too. If key and value are replicated where the query is sharded, they are cut;
if they are ``Partial()``, they are reduced. Their gradients are then sharded like the query.
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch._compat import is_tracing, local_tensor
from cp_dispatch.agreement import agree, debug_is_on
from cp_dispatch.by_need.kept import Kept
from cp_dispatch.by_need.ownership import rank_at
from cp_dispatch.graphs.compile_cache import note_groups
from cp_dispatch.graphs.order import keep_in_graph, stay_in_backward, warn_of_no_rows
from cp_dispatch.groups import ring_group_name
from cp_dispatch.options import Options
from cp_dispatch.varlen.call import VarlenCall
from cp_dispatch.varlen.job import job_of
from cp_dispatch.varlen.ops import BACKWARD, FORWARD, STARTS, library
from cp_dispatch.varlen.plan import VarlenPlan, known_plan
from cp_dispatch.varlen.refusal import placements_of_keys

_copies = Kept()


def attend(options: Options, call: VarlenCall) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``(T, H, D)`` and logsumexp ``(H, T)`` as DTensors placed like the query, and a
    placeholder for the random state that torch's op returns.

    Raises:
        ContextParallelError: if the call is not supported or, in debug mode, if the ranks' calls
            differ; nothing was computed.
    """
    if debug_is_on():
        check_agreement(options, call)
    plan = known_plan(options, call)
    if plan.handler == "refused":
        raise dataclasses.replace(plan, call=call.describe()).error()
    output, logsumexp = FORWARD(*call.tensors.values(), *arguments(options, call, plan))
    state = torch.empty(2, dtype=torch.uint64, device=local_tensor(call.query).device)
    return output, logsumexp, state


def arguments(options: Options, call: VarlenCall, plan: VarlenPlan) -> tuple:
    """The arguments of the op after query, key and value."""
    mesh = call.query.device_mesh
    coordinate = mesh.get_coordinate() or (0,) * mesh.ndim
    rank = rank_at([coordinate[dim] for dim in plan.mesh_dims], plan.ring_shape)
    group_name = ring_group_name(mesh, plan.mesh_dims)
    if is_tracing():
        warn_of_no_rows(call.tensors.values())
        note_groups(call.query, group_name, options)
        for x in call.tensors.values():
            int(local_tensor(x).shape[0])  # a guard that holds; one on a DTensor's length may not
    return (
        *call.starts.values(), list(call.window), call.scale, call.query.shape[0],
        call.key.shape[0], False, call.num_splits, list(plan.ring_shape), rank, group_name,
        "" if plan.layout is None else plan.layout.text,
    )  # fmt: skip


def check_agreement(options: Options, call: VarlenCall) -> None:
    """Compares the documents too, because every rank derives from them what the others send."""
    found = [
        hashlib.sha256(str(x.tolist()).encode()).hexdigest()[:16]
        for x in local_starts(*call.starts.values())
        if isinstance(x, Tensor)
    ]
    wanted = [getattr(x, "requires_grad", None) for x in call.tensors.values()]
    lines = [call.describe(), f"{options}", f"gradients wanted: {wanted}", f"documents: {found}"]
    text = "\n".join("    " + line for part in lines for line in part.splitlines())
    agree("varlen_attn", text, [*call.tensors.values(), *call.starts.values()])


def local_starts(*starts: Tensor) -> list[Tensor]:
    """Plain tensors; DTensors are the same on every rank."""
    return [_copy(x) if isinstance(x, DTensor) else x for x in starts]


def _copy(starts: DTensor) -> Tensor:
    """A copy of a DTensor's current contents. Writes to a DTensor increase its own version but not
    that of the tensor inside, by which documents are cached."""
    inside = local_tensor(starts)
    if is_tracing():  # the graph, which sees no versions, makes a copy at each run
        return STARTS(inside)

    def copy() -> Tensor:
        with torch.inference_mode(False):
            return inside.clone()

    return _copies.get((starts, inside), "starts", copy)


def _placed(x: DTensor, placements) -> Tensor:
    """This rank's part under other placements."""
    if tuple(x.placements) != tuple(placements):
        x = x.detach().redistribute(placements=placements)
    return local_tensor(x)


@torch.no_grad()
def _forward(cls, func, types, args=(), kwargs=None):
    query, key, value, cu_seq_q, cu_seq_k, *options = args
    wanted = placements_of_keys(query.placements)
    if query.device_mesh.get_coordinate() is None:
        return _outside(query, query.shape), _outside(query, _of_rows(query), transposed=True)
    starts = local_starts(cu_seq_q, cu_seq_k)
    if not is_tracing() and not tuple(key.placements) == tuple(value.placements) == wanted:
        # Refuse documents, if necessary, before keys are summed.
        window, _, *rest, rank, _, layout = options
        job_of(local_tensor(query).device, *starts, window, *rest, rank, layout)
    output, logsumexp = FORWARD(
        local_tensor(query), _placed(key, wanted), _placed(value, wanted), *starts, *options
    )
    keep_in_graph(output, (query, key))
    return _wrap(output, query, query.shape), _wrap(logsumexp, query, _of_rows(query), True)


@torch.no_grad()
def _backward(cls, func, types, args=(), kwargs=None):
    grad_output, query, key, value, output, logsumexp, cu_seq_q, cu_seq_k, *options = args
    wanted = placements_of_keys(query.placements)
    if query.device_mesh.get_coordinate() is None:
        return tuple(_outside(x, x.shape) for x in (query, key, value))
    grads = BACKWARD(
        _placed(grad_output, query.placements), local_tensor(query), _placed(key, wanted),
        _placed(value, wanted), local_tensor(output), local_tensor(logsumexp),
        *local_starts(cu_seq_q, cu_seq_k), *options,
    )  # fmt: skip
    stay_in_backward(BACKWARD)
    keep_in_graph(grads[0], (query, key), backward=True)
    shapes = [x.shape if options[-1] else (0, *x.shape[1:]) for x in (key, value)]
    return tuple(
        _wrap(grad, query, shape) for grad, shape in zip(grads, (query.shape, *shapes), strict=True)
    )


def _of_rows(query: DTensor) -> tuple:
    return query.shape[1], query.shape[0]


def _wrap(local: Tensor, like: DTensor, shape, transposed: bool = False) -> DTensor:
    """A dense result of this rank, placed like the query; ``transposed``: with heads first."""
    placements = placements_of_keys(like.placements)
    if transposed:
        placements = [Shard(1 - p.dim) if isinstance(p, Shard) else p for p in placements]
    return DTensor.from_local(
        local.contiguous(), like.device_mesh, placements, run_check=False,
        shape=torch.Size(shape), stride=_strides(shape),
    )  # fmt: skip


def _outside(like: DTensor, shape, transposed: bool = False) -> DTensor:
    """The result on a rank outside the mesh."""
    return _wrap(local_tensor(like).new_empty(0), like, shape, transposed)


def _strides(shape) -> tuple:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


for _op, _rule in ((FORWARD, _forward), (BACKWARD, _backward)):
    torch.library.register_torch_dispatch(_op.name(), DTensor, _rule, lib=library)
