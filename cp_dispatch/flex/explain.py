"""``explain_flex()``: what a ``flex_attention`` call would do, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from cp_dispatch.by_need.here import MOST_RUNS
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.call import FlexCall, global_shape
from cp_dispatch.flex.local import LocalFlex
from cp_dispatch.flex.mask_job import MaskJob
from cp_dispatch.flex.mask_tuple import MaskTuple, no_mask
from cp_dispatch.flex.needs import everything, most_runs, moves, rows_sent
from cp_dispatch.flex.plain import no_columns_of_all_keys, no_order, on_dtensors
from cp_dispatch.flex.plan import FlexPlan, make_plan
from cp_dispatch.options import Options
from cp_dispatch.plain_tensors.context import PlainContext, rows_of_ranks, words
from cp_dispatch.planning.transport import puller


@torch.no_grad()
def explain_flex(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None = None
) -> FlexPlan:
    """Explain what ``flex_attention(query, key, value, block_mask=block_mask)`` would do, without
    running it.

    Reads the block mask to find how many rows of keys each rank would send. Computes nothing and
    does not communicate.

    Args:
        query, key, value: ``(B, H, Sq, D)``, ``(B, Hkv, Sk, D)``, ``(B, Hkv, Sk, Dv)``, any dtype:
            DTensors or, inside a :func:`cp_dispatch.context_parallel` block, this rank's shards.
        block_mask: a torch ``BlockMask`` for the whole sequence, this rank's rows of one
            (:func:`cp_dispatch.create_cp_block_mask`), or None. A mask of this rank's rows does not
            show which keys other ranks need; the plan then leaves out the rows that ranks send.
            Inside a block a mask for the whole sequence stands for its rows, which are what the
            call itself takes there (make the mask one of the buffers); the plan says so.

    Returns:
        A :class:`FlexPlan`; print it for a readable report. For a call that would raise, it holds
        all the reasons.
    """
    from cp_dispatch.toggle import current_options, plain_context

    mask = no_mask(query, key) if block_mask is None else MaskTuple(block_mask.as_tuple())
    call = FlexCall(query, key, value, mask)
    if not any(isinstance(x, DTensor) for x in call.tensors.values()):
        context = plain_context()
        if context is not None and context.world_size > 1:
            return _explain_shards(context, call)
        why = "no argument is a DTensor, and no block of context_parallel is on in this thread"
        return FlexPlan("stock", reasons=(why,), call=call.describe())
    options = current_options()
    if options is None:
        reasons = ("cp_dispatch is not enabled, and torch refuses DTensors",)
        return FlexPlan("stock", reasons=reasons, call=call.describe())
    return _explain(options, call)


def _explain_shards(context: PlainContext, call: FlexCall) -> FlexPlan:
    """The plan for plain tensors, which inside ``context_parallel`` are this rank's shards."""
    tensors = tuple(call.tensors.values())
    assumed: list[str] = []
    # A key and its value are alike on every rank.
    queries, keys = (
        sum(rows_of_ranks(context, call.tensors[name].shape[2], name, assumed))
        for name in ("query", "key")
    )
    described = words(context, call)
    reason = no_order(context, queries, keys) or no_columns_of_all_keys(call.mask.given, keys)
    if reason:
        return FlexPlan("refused", reasons=(reason, *assumed), call=described)
    lengths = [queries, keys, keys]
    own = [call.tensors[name].shape[2] for name in ("query", "key")]
    if call.is_masked and list(map(int, call.mask.lengths)) != own:
        assumed.append(
            "flex_attention itself refuses this block_mask, which is not for this rank's shards: "
            "make it one of the buffers of context_parallel, which has been assumed here"
        )
    wrapped, mask, layout = on_dtensors(context, tensors, call.mask.given, lengths)
    plan = _explain(Options(context.schedule, layout), FlexCall(*wrapped, MaskTuple(mask)))
    return dataclasses.replace(plan, reasons=(*plan.reasons, *assumed), call=described)


def _explain(options: Options, call: FlexCall) -> FlexPlan:
    plan = dataclasses.replace(make_plan(options, call), call=call.describe())
    if torchs := tuple(_torchs_refusals(call)):
        before = plan.reasons if plan.handler == "refused" else ()
        return dataclasses.replace(plan, handler="refused", reasons=(*before, *torchs))
    if plan.handler == "refused" or plan.schedule not in ("exchange", "gather", "ring"):
        return plan
    local = LocalFlex(call, plan)
    try:
        arguments = local.mask_arguments
    except ContextParallelError as error:
        return dataclasses.replace(plan, handler="refused", reasons=(str(error),))
    job = MaskJob(*arguments)
    if job.whole:
        needs = everything(job.queries, job.keys)
    elif job.local_rows:
        # What other ranks need is in their masks, and asking for it would communicate.
        unknown = "what ranks send is unknown before the call: block_mask has only own rows"
        return dataclasses.replace(plan, reasons=(*plan.reasons, unknown))
    else:
        needs = job.needs()
    runs = most_runs(moves(needs, job.keys), plan.groups == job.keys.lanes == 1)
    moved, may_gather = _moved(plan, call.query, runs)
    ranks = range(plan.world_size)
    rows = tuple(rows_sent(needs, job.keys, rank, may_gather) for rank in ranks)
    return dataclasses.replace(plan, rows_sent=rows, reasons=(*plan.reasons, *moved))


def _torchs_refusals(call: FlexCall) -> Iterator[str]:
    """Reasons for which ``flex_attention`` itself raises, before it calls the op."""
    if any(x.ndim != 4 for x in call.tensors.values()):
        return
    query, key, _ = (global_shape(x) for x in call.tensors.values())
    rows = int(call.mask.lists.kv_num.shape[0])
    if query[3] != key[3]:
        yield f"head dims differ: query {query[3]}, key {key[3]}"
    if not key[1] or query[1] % key[1]:
        yield f"query's {query[1]} heads are not a multiple of key's {key[1]}"
    if query[0] != key[0] and not (call.is_masked and key[0] == 1 and rows == query[0]):
        yield (
            f"query has {query[0]} batch rows, key {key[0]}; expand key and value to the query's "
            "(torch accepts 1 only with a block_mask that has the query's batch size)"
        )
    lengths = tuple(map(int, call.mask.lengths))
    if call.is_masked and lengths != (query[2], key[2]):
        yield (
            f"block_mask is for {lengths[0]} queries and {lengths[1]} keys, but query and key have "
            f"{query[2]} and {key[2]}; make it for these lengths"
        )


def _moved(plan: FlexPlan, query: DTensor, runs: int) -> tuple[tuple[str, ...], bool]:
    """What carries keys and gradients, in words, and whether all keys may be gathered if ranks need
    most of them."""
    if plan.schedule == "ring" or plan.world_size == 1:
        return (), plan.schedule != "ring"
    words, pulls = puller(query.device_mesh, plan.mesh_dims, lambda: runs, MOST_RUNS)
    return words, not pulls
