"""``PerDocumentHeadTail``: head-tail order within each of several packed documents."""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts.balancer import Balancer, causal_pairs, head_tail, positive_int
from cp_dispatch.layouts.spans import Span

DocLengths = Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class PerDocumentHeadTail(Balancer):
    """Each rank owns a piece from the front and the matching piece from the back of every document.

    ::

        documents of 8 and 4, W = 2      0 0 1 1 1 1 0 0 | 0 1 1 0

    WLB-LLM (arXiv:2503.17924) shards documents the same way; the treatment of lengths that are not
    divisible is ours.

    If the length of every document is a multiple of 2W, each rank has exactly the mean work under a
    mask that is causal within documents. Other lengths are neither padded nor refused. Of L rows
    each rank takes floor(L / W). Each remaining row goes to the rank that is furthest behind its
    ``torch.chunk`` share of all rows so far; on a tie, to the one with the least work. After the
    last document every rank has exactly its share. In each document the rank with the most work so
    far picks first, because an odd number of rows costs less close to the start. :meth:`explain`
    lists the documents that are not a multiple of 2W long, :attr:`document_rows` has all shares.

    Args:
        doc_lengths: lengths of the documents in order: one sequence for all batch rows, or one per
            batch row, all with the same total S.
        world_size: number of ranks, W.

    Raises:
        ContextParallelError: if a number is not a positive int, or if the totals of rows differ.
    """

    doc_lengths: DocLengths
    world_size: int

    def __post_init__(self):
        object.__setattr__(self, "doc_lengths", document_rows(self.doc_lengths))
        object.__setattr__(self, "world_size", positive_int(self.world_size, "world_size"))

    def __str__(self) -> str:
        """A short form for messages, since there may be thousands of documents."""
        count = sum(map(len, self.doc_lengths))
        if count <= 8:
            return repr(self)
        rows = f" in {self.rows} batch rows" if self.rows > 1 else ""
        return f"PerDocumentHeadTail({count} documents{rows}, world_size={self.world_size})"

    @property
    def rows(self) -> int:
        """1 if all batch rows have the same documents, else the batch size."""
        return len(self.doc_lengths)

    @functools.cached_property
    def seq_len(self) -> int:
        """Positions of the whole sequence."""
        return sum(self.doc_lengths[0])

    @functools.cached_property
    def document_rows(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """``[batch row][document][rank]``: how many rows of a document a rank owns."""
        return tuple(map(tuple, self._shares_of_documents()))

    def _shares_of_documents(self) -> Iterator[Iterator[tuple[int, ...]]]:
        for documents in self._documents():
            yield (tuple(sum(s.length for s in spans) for spans in dealt) for dealt in documents)

    def _arguments(self) -> list:
        return [self.doc_lengths, self.world_size]

    def _documents(self) -> Iterator[Iterator[list[list[Span]]]]:
        """``[batch row][document][rank]`` -> spans, to be read in this order."""
        # One after the other: 1,000 documents on 64 ranks would be 200,000 objects at a time, for
        # which Python collects garbage again and again.
        work = [0] * self.world_size
        return (self._deal(lengths, work) for lengths in self.doc_lengths)

    def _deal(self, lengths: Sequence[int], work: list[int]) -> Iterator[list[list[Span]]]:
        """Spans of every rank, document by document; adds to the ranks' work."""
        ranks = range(self.world_size)
        given = [0] * self.world_size
        start = 0
        for length in lengths:
            counts = self._shares(length, start, given, work)
            order = sorted(ranks, key=lambda rank: (-work[rank], rank))
            dealt = head_tail(Span(start, length), [counts[rank] for rank in order])
            owned = dict(zip(order, dealt, strict=True))
            for rank in ranks:
                given[rank] += counts[rank]
                for position, size in owned[rank]:
                    first = position - start
                    work[rank] += causal_pairs(first + size) - causal_pairs(first)
            start += length
            yield [owned[rank] for rank in ranks]

    def _shares(self, length: int, start: int, given: list[int], work: list[int]) -> list[int]:
        """How many rows of a document each rank takes."""
        shares, ranks = self.shard_lengths, range(self.world_size)
        rows = [length * share // self.seq_len for share in shares]

        def need(rank: int) -> tuple:
            # How far ahead of its share of all rows so far, in units of 1 / S.
            ahead = (given[rank] + rows[rank]) * self.seq_len - (start + length) * shares[rank]
            return ahead, work[rank], rank

        # While rows remain, the ranks in total are behind, so the one furthest behind is behind. No
        # rank is ever a whole row ahead, so none gets more than its share of the sequence.
        waiting = [need(rank) for rank in ranks]
        heapq.heapify(waiting)
        for _ in range(length - sum(rows)):
            rank = waiting[0][-1]
            rows[rank] += 1
            heapq.heapreplace(waiting, need(rank))
        return rows

    def _assign(self):
        rows = []
        for documents in self._documents():
            rows.append([[] for _ in range(self.world_size)])
            for dealt in documents:
                for own, spans in zip(rows[-1], dealt, strict=True):
                    own += spans
        return rows

    def _work_before(self, row: int, position: int) -> int:
        return self._pairs[row].before(position)

    @functools.cached_property
    def _pairs(self) -> list[DocumentPairs]:
        return [DocumentPairs(lengths) for lengths in self.doc_lengths]

    def _notes(self) -> list[str]:
        pieces, shown = 2 * self.world_size, 5
        notes = (
            f"row {row}, document {i}: {sum(counts)} positions are not a multiple of 2 x "
            f"{self.world_size} ranks, which own {', '.join(map(str, counts))}"
            for row, documents in enumerate(self._shares_of_documents())
            for i, counts in enumerate(documents)
            if sum(counts) % pieces
        )
        count = sum(length % pieces > 0 for lengths in self.doc_lengths for length in lengths)
        more = [f"... and {count - shown} more"] if count > shown else []
        return [*itertools.islice(notes, shown), *more]


class DocumentPairs:
    """(query, key) pairs of the rows of one sequence, causal within documents."""

    def __init__(self, lengths: Sequence[int]):
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._before = list(itertools.accumulate(map(causal_pairs, lengths), initial=0))

    def before(self, position: int) -> int:
        """Pairs of all rows before ``position``."""
        document = bisect.bisect_right(self._starts, position) - 1
        return self._before[document] + causal_pairs(position - self._starts[document])


def document_rows(doc_lengths: DocLengths) -> tuple[tuple[int, ...], ...]:
    """Document lengths per batch row; a single row if all are the same.

    Raises:
        ContextParallelError: if a length is not a positive int, or if the totals of rows differ.
    """
    given = doc_lengths.tolist() if hasattr(doc_lengths, "tolist") else doc_lengths
    if not isinstance(given, Iterable):
        raise ContextParallelError(f"doc_lengths must be a sequence of ints, got {given!r}")
    given = [x.tolist() if hasattr(x, "tolist") else x for x in given]
    if given[:1] == [0]:
        raise ContextParallelError(
            f"doc_lengths must be lengths of at least 1, got {given!r}; if these are cumulative "
            "lengths, pass their differences, cu_seq.diff()"
        )
    if not given or any(isinstance(x, (list, tuple)) and not x for x in given):
        raise ContextParallelError(f"doc_lengths must hold at least one document, got {given!r}")
    nested = [isinstance(x, Sequence) for x in given]
    if any(nested) and not all(nested):
        raise ContextParallelError(
            f"doc_lengths must be ints, or one sequence of ints per batch row, got {given!r}"
        )
    rows = tuple(
        tuple(positive_int(length, f"doc_lengths[{i}][{j}]" if all(nested) else f"doc_lengths[{j}]")
              for j, length in enumerate(row))
        for i, row in enumerate(given if all(nested) else [given])
    )  # fmt: skip
    totals = [sum(row) for row in rows]
    if len(set(totals)) > 1:
        raise ContextParallelError(
            f"the documents of every batch row must add up to the same length, got totals {totals}"
        )
    return rows[:1] if len(set(rows)) == 1 else rows
