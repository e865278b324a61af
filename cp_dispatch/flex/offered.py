"""The rows of its shard that an owner of keys offers to other ranks: those that at least one rank
needs."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import accumulate

from cp_dispatch.flex.needs import Move
from cp_dispatch.layouts import Span


class Offered:
    """The rows of ``moves`` to other ranks, one run after the other in ascending order."""

    def __init__(self, moves: Iterable[Move]):
        runs: list[list[int]] = []
        for start, length in sorted(run for move in moves for run in move.shard):
            if runs and start <= runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], start + length)
            else:
                runs.append([start, start + length])
        #: Runs in the owner's shard.
        self.spans = tuple(Span(start, stop - start) for start, stop in runs)
        self._starts = [span.position for span in self.spans]
        *self._places, self.rows = accumulate((span.length for span in self.spans), initial=0)

    def place(self, row: int) -> int:
        """The place of a row of the shard among the offered rows, of which it must be one."""
        run = bisect.bisect(self._starts, row) - 1
        return self._places[run] + row - self._starts[run]
