"""Shards that may be of different lengths on the ranks of a ``context_parallel`` block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import all_gather_single
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import chunk

UNEVEN_IN_A_TRACE = (
    "the length of a buffer, or the balancer's, is not a multiple of the number of ranks, so ranks "
    "have to exchange their lengths, which torch.compile cannot trace; pad the sequence"
)


def told_by_ranks(mesh: DeviceMesh, numbers: Sequence[int]) -> list[list[int]]:
    """For each of the numbers, those of all ranks; a collective."""
    sent = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    received = sent.new_empty(mesh.size() * len(numbers))
    all_gather_single(received, sent, group=mesh.get_group())
    return received.view(mesh.size(), -1).t().tolist()


def not_chunks(rows: list[int]) -> str | None:
    """Why these numbers of rows of the ranks are not supported, None if they are."""
    shares = [span.length for span in chunk(Span(0, sum(rows)), len(rows))]
    if rows == shares:
        return None
    return (
        f"the ranks hold {rows} rows, but torch.chunk gives them {shares} of {sum(rows)}; shard "
        "with cp_dispatch.shard or as buffers"
    )
