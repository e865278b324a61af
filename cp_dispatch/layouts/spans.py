"""Runs of consecutive positions, and how ``Shard`` deals them to ranks in natural order."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Consecutive global positions ``[position, position + length)``."""

    position: int
    length: int


def chunk_spans(length: int, ring_shape: tuple[int, ...]) -> tuple[tuple[Span, ...], ...]:
    """Spans of every rank in the natural order that ``Shard`` gives.

    ``torch.chunk``'s rule, so the last ranks may own less or nothing. ``ring_shape`` holds the
    sizes of the mesh dims over which the sequence is sharded; with several, each chunk of the
    first is chunked again over the next.
    """
    chunks = [Span(0, int(length))]
    for size in ring_shape:
        chunks = [part for whole in chunks for part in chunk(whole, size)]
    return tuple((part,) if part.length else () for part in chunks)


def append(spans: list[Span], start: int, length: int) -> None:
    """Append a run; joined with the last one if it continues that."""
    if not length:
        return
    if spans and sum(spans[-1]) == start:
        spans[-1] = Span(spans[-1].position, spans[-1].length + length)
    else:
        spans.append(Span(start, length))


def chunk(span: Span, count: int) -> list[Span]:
    """The spans of ``torch.chunk``, the last ones possibly short or empty."""
    size = -(-span.length // count)
    starts = [min(i * size, span.length) for i in range(count + 1)]
    return [
        Span(span.position + start, stop - start)
        for start, stop in zip(starts, starts[1:], strict=False)
    ]
