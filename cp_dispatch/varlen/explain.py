"""``explain_varlen()``: what a ``varlen_attn`` call would do, without running it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_dispatch.by_need.here import MOST_RUNS
from cp_dispatch.by_need.ownership import ownership
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.plain_tensors.context import PlainContext, rows_of_ranks, words
from cp_dispatch.planning.transport import puller, redistributed
from cp_dispatch.varlen.call import VarlenCall
from cp_dispatch.varlen.job import documents_of
from cp_dispatch.varlen.plain import check_form, plan_of
from cp_dispatch.varlen.plan import VarlenPlan, make_plan
from cp_dispatch.varlen.refusal import placements_of_keys
from cp_dispatch.varlen.rule import local_starts
from cp_dispatch.varlen.traffic import most_runs, needs_of, rows_given, table_of


@torch.no_grad()
def explain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> VarlenPlan:
    """Explain what ``varlen_attn`` would do with these arguments, without running it.

    Reads the lengths of the documents, for which the host waits for the device, to find how many
    rows of keys each rank would send. Computes nothing and does not communicate.

    Args:
        query, key, value: DTensors ``(T, H, D)``, ``(M, Hkv, D)``, ``(M, Hkv, D)``, any dtype;
            inside ``context_parallel`` this rank's shards.
        cu_seq_q, cu_seq_k: ``(documents + 1,)`` int32, cumulative lengths of the whole sequence.
        window_size: ``(left, right)``; -1 means no limit on that side.

    Returns:
        A :class:`VarlenPlan`; print it for a readable report. For a call that would raise, it holds
        all the reasons.
    """
    from cp_dispatch.toggle import current_options, plain_context

    call = VarlenCall(query, key, value, cu_seq_q, cu_seq_k, window_size=window_size)
    described = call.describe()
    given = (*call.tensors.values(), *call.starts.values())
    if not any(isinstance(x, DTensor) for x in given):
        context = plain_context()
        if context is not None and context.world_size > 1:
            return _explain_shards(context, call)
        why = "no argument is a DTensor, and no block of context_parallel is on in this thread"
        return VarlenPlan("stock", reasons=(why,), call=described)
    options = current_options()
    if options is None:
        reasons = ("cp_dispatch is not enabled, and torch has no rule for DTensors",)
        return VarlenPlan("stock", reasons=reasons, call=described)
    plan = dataclasses.replace(make_plan(options, call), call=described)
    if plan.handler == "refused":
        return plan
    lengths = int(query.shape[0]), int(key.shape[0])
    plan = _with_rows(plan, call, query.device_mesh, lengths, False)
    if plan.handler == "refused":
        return plan
    wanted = [placements_of_keys(query.placements)] * 2
    before = redistributed({"key": key, "value": value}, wanted)
    return dataclasses.replace(plan, reasons=(*plan.reasons, *before))


def _explain_shards(context: PlainContext, call: VarlenCall) -> VarlenPlan:
    """The plan for this rank's shards inside ``context_parallel``."""
    assumed: list[str] = []
    described = words(context, call)
    try:
        check_form(context, call)
        lengths = (
            _length(context, call.query, call.cu_seq_q, "query", assumed),
            _length(context, call.key, call.cu_seq_k, "key", assumed),
        )
        plan = plan_of(context, call, lengths)
    except ContextParallelError as error:
        return VarlenPlan("refused", reasons=(str(error),), call=described)
    plan = dataclasses.replace(plan, reasons=(*plan.reasons, *assumed), call=described)
    if plan.handler == "refused":
        return plan
    return _with_rows(plan, call, context.mesh, lengths, True)


def _length(context: PlainContext, x: Tensor, starts: Tensor, name: str, assumed: list[str]) -> int:
    """The length of the whole sequence. If this rank cannot know it, that of the documents, which
    have to fill it, where that fits."""
    own, ranks = int(x.shape[0]), context.world_size
    if not context.uneven:
        return own * ranks
    unsure: list[str] = []
    found = sum(rows_of_ranks(context, own, name, unsure))
    if unsure and isinstance(starts, Tensor) and starts.ndim == 1 and len(starts):
        end = max(0, int(starts[-1]))
        if chunk(Span(0, end), ranks)[context.mesh.get_local_rank()].length == own:
            return end
    assumed += unsure
    return found


def _with_rows(
    plan: VarlenPlan, call: VarlenCall, mesh: DeviceMesh, lengths: tuple[int, int], covered: bool
) -> VarlenPlan:
    """The plan with the rows that each rank sends, or with the reasons to refuse the documents."""
    documents = documents_of(*local_starts(call.cu_seq_q, call.cu_seq_k))
    reasons = documents.reasons(call.window, *lengths, covered)
    if reasons:
        return dataclasses.replace(plan, handler="refused", reasons=tuple(reasons))
    layout = "" if plan.layout is None else plan.layout.text
    owned = [ownership(n, plan.ring_shape, layout) for n in lengths]
    try:
        rows = rows_given(documents, call.window, *owned)
    except ContextParallelError as error:
        return dataclasses.replace(plan, handler="refused", reasons=(str(error),))
    moved: tuple[str, ...] = ()
    if any(rows):

        def runs() -> int:
            return most_runs(table_of(needs_of(documents, call.window, owned[0]).keys, owned[1]))

        moved, _ = puller(mesh, plan.mesh_dims, runs, MOST_RUNS)
    return dataclasses.replace(plan, rows_sent=rows, reasons=(*plan.reasons, *moved))
