"""Splits kernel calls that exceed a CUDA grid, or that would take too much memory, into parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from cp_dispatch.errors import ContextParallelError

if TYPE_CHECKING:
    from cp_dispatch.backends.base import Backend

#: Queries times keys, over all heads, from which on the start and end of a kernel call cost little.
#: With half the memory for a call, a gather by cuDNN on 4 H200s took 2.5% longer, forward and
#: backward, at 8k tokens each, where calls are shorter than this, and 0.3% at 32k.
LONG_PART = 2**31


class Part(NamedTuple):
    """Batch rows or key heads ``[start, start + length)`` of ``dim``, and ``groups`` times as many
    of tensors with the query's heads."""

    dim: int
    start: int
    length: int
    groups: int


def cut(part: Part, query: Tensor, key: Tensor, value: Tensor, *like_query: Tensor | None):
    """The part's heads or batch rows of each tensor; dims of 1, as masks have, stay."""

    def narrow(tensor, groups):
        if tensor is None or tensor.size(part.dim) == 1:
            return tensor
        rows = slice(part.start * groups, (part.start + part.length) * groups)
        return tensor[rows] if part.dim == 0 else tensor[:, rows]

    key, value = narrow(key, 1), narrow(value, 1)
    query, *like_query = (narrow(x, part.groups) for x in (query, *like_query))
    return query, key, value, *like_query


def parts_of(backend: Backend, query: Tensor, key: Tensor) -> list[Part] | None:
    """How to split a call that is larger than a CUDA grid: along the batch, then along heads."""
    limit = backend.largest_grid
    if limit is None or (query.size(0) <= limit and query.size(1) <= limit):
        return None
    if query.size(0) > limit:
        return [Part(0, i, limit, 1) for i in range(0, query.size(0), limit)]
    groups = query.size(1) // key.size(1)
    if groups > limit:
        raise ContextParallelError(
            f"{backend.name} supports at most {limit} query heads per key head, got {groups}; "
            "allow the math kernel"
        )
    step = limit // groups
    return [Part(1, i, step, groups) for i in range(0, key.size(1), step)]


def few_heads(backend: Backend, query: Tensor, key: Tensor, value: Tensor) -> list[Part] | None:
    """How to split a backward of grouped heads whose kernel would take too much memory."""
    groups, heads = query.size(1) // max(1, key.size(1)), key.size(1)
    largest = backend.largest_workspace
    if largest is None or groups < 2:
        return None
    size = groups * (key.numel() + value.numel()) * key.element_size() + 4 * query.numel()
    if size <= largest // 2:  # as of most calls
        return None

    def step(most: int) -> int:
        fitting = (n for n in range(heads, 1, -1) if heads % n == 0 and size * n <= heads * most)
        return next(fitting, 1)

    pairs = query.size(0) * query.size(1) * query.size(2) * key.size(2)
    found = step(largest // 2)
    if pairs * found < heads * LONG_PART:
        found = step(largest)
    if found == heads:
        return None
    return [Part(1, i, found, groups) for i in range(0, heads, found)]
