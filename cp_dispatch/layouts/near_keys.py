"""Guesses from its work which keys a block of queries needs, and what has to travel for them.

Under a causal mask of documents or windows, a block with the work of n key blocks needs itself and
the n - 1 blocks before it. A document begins where work falls, or rises by more than one key block.
If a block has more work than its document has blocks before it, for example if rows attend all of
their document, it is assumed to need the keys after it too. For other masks the guess is wrong,
which costs only traffic: what is sent is read from the mask itself.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

# Twice the pairs of a document's first block of rows, in pairs of such a block with one of keys.
_FIRST_PAIRS = 1.05

#: Runs of blocks [start, stop).
Runs = tuple[tuple[int, int], ...]


class NearKeys:
    """The guess for one sequence: block i needs the blocks ``first[i]`` to ``last[i]``."""

    def __init__(self, work: Sequence[float]):
        self._work = work
        unit, counted = _key_block(work)
        #: What a key block adds to the work of a query block.
        self.unit = unit
        blocks = range(len(work))
        # Blocks that end one document and begin another. Where work counts key blocks and not
        # pairs, these look like any other's.
        self._shared = set() if counted else _shared_blocks(work, unit)
        edges = {i for i in blocks[1:] if not 0 <= work[i] - work[i - 1] <= unit}
        # The document that begins in a shared block has that one before its first of its own.
        starts = {0, *(i + (i in self._shared) for i in edges)} - {len(work)}
        self._starts = frozenset(starts)
        self.documents: Runs = tuple(itertools.pairwise([*sorted(starts), len(work)]))
        self._sets: dict[tuple[int, int], tuple[int, int]] = {}
        self.first: list[int] = []
        self.last: list[int] = []
        for at in range(len(self.documents)):
            self._guess(at)
        reach = [0, *itertools.accumulate(self.last, max)]
        #: Keys that travel where block i and the one before it go to different ranks.
        self.cut = [i - self.first[i] + max(reach[i] - i + 1, 0) if i else 0 for i in blocks]

    def _guess(self, at: int) -> None:
        """``first`` and ``last`` of a document's blocks: as many key blocks as the work says, those
        before the block, and what is left behind it; none of them far outside of the document."""
        documents, size = self.documents, len(self._work)
        start, stop = documents[at]
        before, after = documents[max(at - 1, 0)], documents[min(at + 1, len(documents) - 1)]
        for block in range(start, stop):
            work = self._work[block]
            # Of numbers that differ too much for floats there is no quotient.
            is_few = work < self.unit * size
            count = max(math.ceil(work / self.unit), 1) if is_few else size
            # Documents may share a block with their neighbours.
            low, high = start - 1, stop + 1
            if count > high - low:  # it is such a block, with rows that attend whole documents
                low, high = before[0] - 1, after[1] + 1
            first = max(block - count + 1, low, 0)
            if block in self._shared:
                first = min(first, self.first[-1])
            self.first.append(first)
            self.last.append(max(block, min(first + count, high, size) - 1))

    def join(self, runs: Iterable[tuple[int, int]]) -> Runs:
        """Ascending, and those that touch within a document as one."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(runs):
            if joined and joined[-1][1] == start and start not in self._starts:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        return tuple(joined)

    def sets(self, runs: Runs) -> tuple[int, int]:
        """The blocks of runs and those that they need, as bits."""
        own = need = 0
        for run in runs:
            found = self._sets.get(run)  # most are whole documents, again and again
            if found is None:
                start, stop = run
                # Every block needs itself, so what a run needs has no gaps.
                last, first = max(self.last[start:stop]), min(self.first[start:stop])
                found = (1 << stop) - (1 << start), (2 << last) - (1 << first)
                self._sets[run] = found
            own |= found[0]
            need |= found[1]
        return own, need


class Traffic:
    """How many key blocks ranks send and get, if they own these runs of blocks."""

    def __init__(self, keys: NearKeys, owned: Sequence[Runs]):
        self._keys = keys
        own, need = zip(*map(keys.sets, owned), strict=True)
        self._own, self._need = list(own), list(need)
        ranks = range(len(owned))
        self._moves = [[self._count(taker, owner) for owner in ranks] for taker in ranks]
        self.got = [sum(row) for row in self._moves]
        self.sent = [sum(column) for column in zip(*self._moves, strict=True)]

    @property
    def price(self) -> tuple[int, int]:
        """The most that a rank sends or gets, and what all of them get."""
        return max(*self.got, *self.sent), sum(self.got)

    def give(self, owned: dict[int, Runs]) -> None:
        """Let ranks own other runs from now on."""
        for rank, runs in owned.items():
            self._own[rank], self._need[rank] = self._keys.sets(runs)
        for taker, (row, need) in enumerate(zip(self._moves, self._need, strict=True)):
            for owner in range(len(row)) if taker in owned else owned:
                # As _count, of which the call would be the most.
                count = (need & self._own[owner]).bit_count() if taker != owner else 0
                more = count - row[owner]
                if more:
                    row[owner] = count
                    self.got[taker] += more
                    self.sent[owner] += more

    def _count(self, taker: int, owner: int) -> int:
        return (self._need[taker] & self._own[owner]).bit_count() if taker != owner else 0


def _shared_blocks(work: Sequence[float], unit: float) -> set[int]:
    """Blocks with a document's last rows, which may be few, and the first ones of the next: work
    falls, and is more than that of first rows alone."""
    shared: set[int] = set()
    for i in range(1, len(work)):
        falls = work[i] < work[i - 1] and i - 1 not in shared
        if falls and 2 * work[i] > _FIRST_PAIRS * unit:
            shared.add(i)
    return shared


def _key_block(work: Sequence[float]) -> tuple[float, bool]:
    """What a key block adds to the work of a query block, and whether work counts such blocks."""
    if all(isinstance(x, int) for x in work):
        common = math.gcd(*work)
        if max(work) <= common * len(work):  # perhaps those of several heads
            return common or 1, True
    rises = Counter(b - a for a, b in itertools.pairwise(work) if b > a)
    # Within causal documents each block has a key block more than the one before it.
    return max(rises, key=lambda rise: (rises[rise], -rise), default=max(work) or 1), False
