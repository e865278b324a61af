"""Formats plans as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cp_dispatch.planning.collectives import (
    backward_transfers,
    blocks,
    extra_bytes,
    forward_transfers,
)

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan


def describe(plan: Plan) -> str:
    """A plan in words, for people."""
    given = "\n".join("    " + line for line in plan.call.splitlines())
    why = [f"  - {reason}" for reason in plan.reasons]
    against = [
        f"  not {name}: {'; '.join(reasons)}" for name, reasons in plan.backends_refused.items()
    ]
    if plan.handler == "refused":
        head = "cp_dispatch does not support this scaled_dot_product_attention call."
        why = ["  refused because:", *("  " + line for line in why)]
        return "\n".join([head, "  given:", given, *why, *against])
    if plan.handler == "stock":
        return "\n".join(["handled by unmodified torch", given, *why])
    over = "" if plan.schedule == "local" else f" over {plan.world_size} ranks"
    head = f"handled by cp_dispatch: {plan.schedule}{over}, {plan.backend} kernel"
    if plan.schedule == "hybrid":
        groups = plan.world_size // plan.head_ranks
        head += (
            f"\n  heads among {plan.head_ranks} consecutive ranks, {plan.across} across the "
            f"{groups} groups"
        )
    if plan.backward_schedule:
        head += f"\n  backward: {plan.backward_schedule}"
    if plan.layout is not None:
        layout = [f"  in the layout of {line}" for line in plan.layout.explain().splitlines()[:1]]
        head = "\n".join([head, *layout])
    return "\n".join([head, given, *_costs(plan), *_times(plan), *why, *against])


def _costs(plan: Plan) -> list[str]:
    mib = 2**20
    lines = []
    kinds = set()
    if plan.schedule != "local":
        lines.append("  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)")
        for rank in _shown(plan.world_size):
            if rank is None:
                lines.append("   ...")
                continue
            computed, there_are = blocks(plan, rank)
            line = f"  {rank:4d}  {computed:15d}/{there_are - computed:<7d}"
            for transfers in (forward_transfers(plan, rank), backward_transfers(plan, rank)):
                sent = sum(transfer.bytes for transfer in transfers) / mib
                line += f"  {sent:12.3f} ({len(transfers):5d})"
                kinds |= {transfer.collective for transfer in transfers}
            lines.append(line)
    if kinds - {"all_to_all"}:
        lines.append("  sent: for gathers and sums, what a rank contributes, counted once")
    forward, backward = (size / mib for size in extra_bytes(plan))
    lines.append(f"  extra memory: about {forward:.3f} MiB forward, {backward:.3f} MiB backward")
    return lines


def _times(plan: Plan) -> list[str]:
    """Predicted times of every schedule, the fastest forward and backward first."""
    if not plan.predictions:
        return []
    lines = ["  predicted, ms           forward  backward"]
    for name, forward, backward in sorted(plan.predictions, key=lambda x: x[1] + x[2]):
        mark = " <- this" if name == plan.op_schedule else ""
        lines.append(f"    {name:20s} {forward * 1e3:8.3f}  {backward * 1e3:8.3f}{mark}")
    return lines


def _shown(world_size: int) -> list[int | None]:
    """The ranks that a table shows; None stands for those left out."""
    if world_size <= 16:
        return list(range(world_size))
    return [*range(4), None, *range(world_size - 4, world_size)]
