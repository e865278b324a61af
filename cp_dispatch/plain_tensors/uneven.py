"""Shards that may be of different lengths on the ranks of a ``context_parallel`` block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import all_gather_single
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import chunk

UNEVEN_IN_A_TRACE = (
    "the length of a buffer, or the balancer's, is not a multiple of the number of ranks, so ranks "
    "have to exchange their lengths, which torch.compile cannot trace; pad the sequence"
)


def told_by_ranks(mesh: DeviceMesh, numbers: Sequence[int | Tensor]) -> list[list[int]]:
    """For each of the numbers, those of all ranks; a collective."""
    known = [0 if isinstance(x, Tensor) else int(x) for x in numbers]
    sent = torch.tensor(known, dtype=torch.int64, device=mesh.device_type)
    for i, x in enumerate(numbers):
        if isinstance(x, Tensor):  # the host waits only once, for the result
            sent[i] = x
    received = sent.new_empty(mesh.size() * len(numbers))
    all_gather_single(received, sent, group=mesh.get_group())
    return received.view(mesh.size(), len(numbers)).t().tolist()


def not_chunks(rows: list[int]) -> str | None:
    """Why these numbers of rows of the ranks are not supported, None if they are."""
    shares = [span.length for span in chunk(Span(0, sum(rows)), len(rows))]
    if rows == shares:
        return None
    return (
        f"the ranks hold {rows} rows, but torch.chunk gives them {shares} of {sum(rows)}; shard "
        "with cp_dispatch.shard or as buffers"
    )
