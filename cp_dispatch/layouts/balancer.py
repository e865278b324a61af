"""``Balancer``, the base class of balancers: derives everything from the spans of each rank.

Note [Balancers]
~~~~~~~~~~~~~~~~
Under a causal mask, row i of the score matrix costs i + 1, so in natural order the last of W ranks
has nearly twice the mean work. A *balancer* says which positions each rank owns instead::

    natural order, W = 2      0 0 0 0 1 1 1 1
    HeadTail(8, 2)            0 0 1 1 1 1 0 0

A balancer changes which rows a rank owns, never how many: rank r owns as many as ``torch.chunk``
gives it, because DTensor's ``Shard`` relies on that. Within a rank, rows are in ascending order, so
they form a few runs of consecutive positions (:class:`~cp_dispatch.layouts.spans.Span`). The
*permuted* sequence is the concatenation of the ranks' rows:
``permuted[b, i] = natural[b, indices[b, i]]``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
from collections.abc import Sequence

import torch

from cp_dispatch._compat import disable_current_modes, in_fake_mode
from cp_dispatch.bounded import ByWeight
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts.spans import Span, chunk
from cp_dispatch.native.permute import inverse_permutation, span_indices

Spans = tuple[Span, ...]


class Balancer:
    """Which rank owns which positions, for one sequence length and one number of ranks.

    Balancers are values: two are equal if their :attr:`text` is equal; they are hashable, and are
    pickled as that text, in which :func:`from_text` finds direct subclasses only, by their names. A
    subclass is a dataclass with ``frozen=True, eq=False`` that defines ``_arguments``, ``_assign``
    and ``_work_before``. See Note [Balancers].
    """

    #: Positions of the whole sequence.
    seq_len: int
    #: Ranks that share it.
    world_size: int
    #: 1 if all batch rows share one layout, else the batch size.
    rows: int = 1

    def _arguments(self) -> list:
        """What :attr:`text` holds, in the order of the constructor's arguments."""
        raise NotImplementedError

    def _assign(self) -> Sequence[Sequence[Sequence[Span]]]:
        """``[row][rank]`` -> spans in any order, ``shard_lengths[rank]`` positions in total."""
        raise NotImplementedError

    def _work_before(self, row: int, position: int):
        """Total work of the positions of a row before ``position``."""
        raise NotImplementedError

    # -- The layout -------------------------------------------------------------------------

    @functools.cached_property
    def shard_lengths(self) -> tuple[int, ...]:
        """Rows of each rank, as ``torch.chunk`` deals them; the last may have fewer or none."""
        return tuple(span.length for span in chunk(Span(0, self.seq_len), self.world_size))

    def spans(self, rank: int) -> tuple[Spans, ...]:
        """For each of :attr:`rows`, the spans of positions that ``rank`` owns, ascending."""
        return self._spans[check_rank(rank, self.world_size)]

    @property
    def _spans(self) -> tuple[tuple[Spans, ...], ...]:
        return _assigned(type(self), self.outline)

    @functools.cached_property
    def indices(self) -> torch.Tensor:
        """``(rows, S)`` int64 on CPU: ``permuted[b, i] = natural[b, indices[b, i]]``.

        Made once; do not modify it.
        """
        with _plain_tensors():
            rows = range(self.rows)
            return torch.stack([span_indices([x for r in self._spans for x in r[i]]) for i in rows])

    @functools.cached_property
    def inverse(self) -> torch.Tensor:
        """``(rows, S)`` int64 on CPU: ``natural[b, i] = permuted[b, inverse[b, i]]``.

        Made once; do not modify it.
        """
        with _plain_tensors():
            return inverse_permutation(self.indices, check=False)

    def positions(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """``(rows, local length)`` int64: the original positions of a rank's rows, for RoPE.

        A new tensor on ``device``, by default the CPU.
        """
        start = sum(self.shard_lengths[: check_rank(rank, self.world_size)])
        indices = in_fake_mode(self.indices)
        return indices[:, start : start + self.shard_lengths[rank]].to(device, copy=True)

    # -- How well it balances ---------------------------------------------------------------

    def work(self, rank: int) -> float:
        """Work of a rank, summed over :attr:`rows`: (query, key) pairs, or the given work."""
        return self._work(self.spans(rank))

    def imbalance(self) -> float:
        """The largest work of a rank divided by the mean. 1.0 is perfect."""
        return max_over_mean([self.work(rank) for rank in range(self.world_size)])

    def natural_work(self, rank: int) -> float:
        """The work that ``rank`` would have in natural order."""
        chunks = chunk(Span(0, self.seq_len), self.world_size)
        own = chunks[check_rank(rank, self.world_size)]
        return self._work([(own,)] * self.rows)

    def natural_imbalance(self) -> float:
        """:meth:`imbalance` of the same work in natural order."""
        return max_over_mean([self.natural_work(rank) for rank in range(self.world_size)])

    def _work(self, rows):
        return sum(
            self._work_before(row, position + length) - self._work_before(row, position)
            for row, spans in enumerate(rows)
            for position, length in spans
        )

    def explain(self) -> str:
        """A short report: work per rank, imbalance, and lengths that were not divisible."""
        work = [self.work(rank) for rank in range(self.world_size)]
        lines = [
            f"{type(self).__name__}: {self.seq_len} positions on {self.world_size} ranks, "
            f"rows per rank {_counts(self.shard_lengths)}",
            f"imbalance {max_over_mean(work):.4f} (natural order {self.natural_imbalance():.4f}), "
            f"work per rank {min(work):,} to {max(work):,}",
        ]
        return "\n".join(lines + self._notes())

    def _notes(self) -> list[str]:
        return []

    # -- As a value -------------------------------------------------------------------------

    @functools.cached_property
    def text(self) -> str:
        """Compact JSON such as ``["HeadTail",4096,4]``, read back by :func:`from_text`."""
        return json.dumps([type(self).__name__, *self._arguments()], separators=(",", ":"))

    def __eq__(self, other) -> bool:
        return self.text == other.text if isinstance(other, Balancer) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self):
        return from_text, (self.text,)

    @property
    def outline(self) -> Balancer:
        """An equal balancer without indices, for caches: the indices of 4 rows of 131,072 positions
        take 8 MiB, and every step may bring a new layout."""
        return self._outline or self

    @functools.cached_property
    def _outline(self) -> Balancer | None:
        outline = object.__new__(type(self))
        # Copied, because another thread may be adding cached properties.
        found = vars(self).copy().items()
        kept = {name: x for name, x in found if name not in ("indices", "inverse")}
        vars(outline).update(kept, _outline=None)
        return outline


def _make_spans(kind: type, balancer: Balancer) -> tuple[tuple[Spans, ...], ...]:
    """``[rank][row]``"""
    rows = balancer._assign()
    return tuple(tuple(coalesce(row[rank]) for row in rows) for rank in range(balancer.world_size))


# Once for a balancer and those that ops read from its text. Not with the balancer, which plans and
# options keep: 1,000 documents on 64 ranks are 130,000 spans of about 100 bytes, and every step may
# bring a new layout.
_assigned = ByWeight(
    _make_spans, lambda found: 1 + sum(len(x) for own in found for x in own), 2**20
)


@functools.lru_cache(maxsize=32)  # a balancer may have made indices of all positions
def from_text(text: str) -> Balancer:
    """The balancer with this :attr:`Balancer.text`.

    Raises:
        ContextParallelError: if it is not the text of a balancer.
    """
    kinds = {kind.__name__: kind for kind in Balancer.__subclasses__()}
    try:
        name, *arguments = json.loads(text)
        kind = kinds[name]
        balancer = kind(*arguments)
    except (ValueError, TypeError, KeyError) as error:
        known = ", ".join(sorted(kinds))
        raise ContextParallelError(
            f"{text[:100]!r} is not the text of a balancer, [name, arguments...] with a name of "
            f"{known}"
        ) from error
    return balancer


@contextlib.contextmanager
def _plain_tensors():
    """Make ordinary tensors even in fake or inference mode, since cached ones are used anywhere."""
    with disable_current_modes(), torch.inference_mode(False):
        yield


def coalesce(spans: Sequence[Span]) -> Spans:
    """The same positions in ascending order, in as few spans as possible."""
    merged: list[Span] = []
    for span in sorted(span for span in spans if span.length):
        if merged and merged[-1].position + merged[-1].length == span.position:
            merged[-1] = Span(merged[-1].position, merged[-1].length + span.length)
        else:
            merged.append(span)
    return tuple(merged)


def head_tail(span: Span, counts: Sequence[int]) -> list[list[Span]]:
    """Deal a span out, in order, to owners that each take half their count from each end.

    An odd count takes the extra row from the head. ``counts`` add up to the span's length.
    """
    head, tail = span.position, span.position + span.length
    dealt = []
    for count in counts:
        front, back = -(-count // 2), count // 2
        dealt.append([Span(head, front), Span(tail - back, back)])
        head, tail = head + front, tail - back
    return dealt


def causal_pairs(length: int) -> int:
    """(query, key) pairs of the first ``length`` rows under a causal mask."""
    return length * (length + 1) // 2


def max_over_mean(work: Sequence) -> float:
    """Imbalance of the ranks' work; 1.0 if there is no work at all."""
    total = sum(work)
    return max(work) * len(work) / total if total else 1.0


def positive_int(value, name: str) -> int:
    """``value`` as an int of at least 1."""
    number = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass
    if number is None or number < 1:
        raise ContextParallelError(f"{name} must be a positive int, got {value!r}")
    return number


def check_rank(rank: int, world_size: int) -> int:
    """``rank``, if it is in range."""
    if not 0 <= rank < world_size:
        raise ContextParallelError(f"rank must be in 0..{world_size - 1}, got {rank}")
    return rank


def _counts(lengths: Sequence[int]) -> str:
    groups = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
    return " + ".join(f"{n} x {length}" for length, n in groups)
