"""Own copies and a pull from other ranks' rooms as one op, with numbers that are worked out once.

For the same keys an op gets tensors of the same shapes and strides again and again. Only their
addresses differ, so the numbers are made from *stand-ins*, without memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.by_need.selector import Indexed, Pairs
from cp_dispatch.schedules.copy_ops import copies_of

#: A copy costs some microseconds. If a rank would need more copies than this, a collective moves
#: the rows, and kernels put them in place.
MOST_RUNS = 64


class Here(NamedTuple):
    """Copies and the pull after them as one op of the default stream, which takes the tensors of a
    call and these."""

    rooms: list[Tensor]
    numbers: Tensor


def stand_in(x: Tensor) -> Tensor:
    """A meta tensor with the same shape, strides and dtype, and its own storage."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def here_of(box, pairs: Pairs, targets, sources, given: Sequence[Tensor]) -> Here | None:
    """Copies of ``pairs``, then a pull; None if some are by an index."""
    if any(isinstance(x, Indexed) for pair in pairs for x in pair):
        return None
    there = zip(targets, sources, strict=True)
    pairs, there = ([pair for pair in some if pair[0].numel()] for some in (pairs, there))
    rooms = {id(x.untyped_storage()): x for pair in [*pairs, *there] for x in pair}
    for x in given:
        rooms.pop(id(x.untyped_storage()), None)
    numbers = (copies_of(some, [*given, *rooms.values()]) for some in (pairs, there))
    return Here(list(rooms.values()), box.pull_numbers(*numbers))
