"""What a FlexAttention call would do, without doing it."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.call import FlexCall
from cp_dispatch.flex.local import LocalFlex
from cp_dispatch.flex.mask_job import MaskJob
from cp_dispatch.flex.mask_tuple import MaskTuple, no_mask
from cp_dispatch.flex.needs import everything, most_runs, moves, rows_sent
from cp_dispatch.flex.plan import FlexPlan, in_words, make_plan
from cp_dispatch.flex.pulled import MOST_RUNS
from cp_dispatch.transport import NOT_REACHED, UNKNOWN, reaches_all


@torch.no_grad()
def explain_flex(query: DTensor, key: DTensor, value: DTensor, block_mask=None) -> FlexPlan:
    """What ``flex_attention(query, key, value, block_mask=block_mask)`` would do here and now.

    Looks at the block mask, so it says how many rows of keys each rank would send. Computes
    nothing, does not communicate.

    Args:
        query, key, value: ``(B, H, Sq, D)``, ``(B, Hkv, Sk, D)``, ``(B, Hkv, Sk, Dv)``, any dtype.
        block_mask: a torch ``BlockMask`` for the whole sequence, this rank's rows of one
            (:func:`cp_dispatch.create_cp_block_mask`), or None. Of own rows nobody knows what
            others need, and the plan does not say how many rows each rank sends.

    Returns:
        A :class:`FlexPlan`, which prints well; of a call that would raise, one with all the
        reasons.
    """
    from cp_dispatch.toggle import current_options

    mask = no_mask(query, key) if block_mask is None else MaskTuple(block_mask.as_tuple())
    call = FlexCall(query, key, value, mask)
    if not any(isinstance(x, DTensor) for x in call.tensors.values()):
        return FlexPlan("stock", reasons=("no argument is a DTensor",), call=call.describe())
    options = current_options()
    if options is None:
        reasons = ("cp_dispatch is not enabled, and torch refuses DTensors",)
        return FlexPlan("stock", reasons=reasons, call=call.describe())
    plan = in_words(make_plan(options, call), call)
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
        # What other ranks need is in their masks, and asking them would be to communicate.
        return plan
    else:
        needs = job.needs()
    runs = most_runs(moves(needs, job.keys), plan.groups == job.keys.lanes == 1)
    moved, may_gather = _moved(plan, query, runs)
    ranks = range(plan.world_size)
    rows = tuple(rows_sent(needs, job.keys, rank, may_gather) for rank in ranks)
    return dataclasses.replace(plan, rows_sent=rows, reasons=(*plan.reasons, *moved))


def _moved(plan: FlexPlan, query: DTensor, runs: int) -> tuple[tuple[str, ...], bool]:
    """What carries keys and gradients, in words, and whether it may gather all of them where most
    are needed."""
    if plan.schedule == "ring" or plan.world_size == 1:
        return (), plan.schedule != "ring"
    if query.device_mesh.device_type != "cuda":
        return (), True
    reaches = reaches_all(query.device_mesh, plan.mesh_dims)
    if not reaches:
        return (UNKNOWN if reaches is None else NOT_REACHED,), True
    if runs > MOST_RUNS:
        words = (
            f"moved by NCCL: some rank needs {runs} runs of rows, copy engines up to {MOST_RUNS}"
        )
        return (words,), True
    return ("moved by copy engines where rooms of 1 GiB suffice, else by NCCL",), False
