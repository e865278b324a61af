"""Blocks of the sequence, dealt out by the work that each of them is."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts.balancer import Balancer, positive_int
from cp_dispatch.layouts.deal_blocks import deal_rows
from cp_dispatch.layouts.documents import DocLengths, DocumentPairs, document_rows
from cp_dispatch.layouts.spans import Span

_DEFAULT_BLOCK_SIZE = 128
# Sums of more would be no floats.
_MOST_WORK = 1e200


@dataclass(frozen=True, eq=False, init=False, repr=False)
class BlockBalanced(Balancer):
    """The same number of blocks for every rank, chosen so that the work comes out even.

    For masks that no head-tail order balances. Blocks are dealt out from the heaviest down, each
    to the rank with the least work that has room (sorted greedy; MagiAttention, arXiv:2505.13211,
    balances blocks of its masks like that). Then the heaviest rank swaps blocks with others for as
    long as that helps. Where head-tail by whole blocks is at least as good, it is taken instead.
    The result depends on the numbers alone. Blocks stay whole, so few of them per rank cannot
    always be balanced; with 64 per rank, causal masks and packed documents come within 0.01%.

    Args:
        work_or_block_mask: work of each block of query rows, as numbers: one sequence for all
            rows of the batch, or one per row. Or a torch ``BlockMask``: the work of a query block
            is the number of its key blocks, of all heads together; read on the host, which waits
            for the GPU.
        world_size: number of ranks W, which must divide the number of blocks.
        block_size: rows per block; by default that of the ``BlockMask``, or 128.
        near: let ranks need few keys of each other, at the price of work within 1% of the mean:
            natural order where that is balanced, else whole documents, cut where it costs little
            (see Note [Near blocks]). For masks near the diagonal, such as documents and windows.
            Which keys blocks need is guessed from their work, well for causal documents and
            windows; a wrong guess costs traffic only. Takes some 30 ms for 1,024 blocks of
            documents on 4 ranks, half a second for 4,096 on 64.

    Raises:
        ContextParallelError: where ranks do not divide the blocks, or blocks the sequence, and for
            work that is no number of at least 0, one for each block.
    """

    block_work: tuple[tuple[float, ...], ...]
    world_size: int
    block_size: int
    near: bool

    def __init__(
        self, work_or_block_mask, world_size: int, block_size: int | None = None, near: bool = False
    ):
        work = work_or_block_mask
        if hasattr(work, "kv_num_blocks"):
            work, block_size = _mask_work(work, block_size)
        elif block_size is None:
            block_size = _DEFAULT_BLOCK_SIZE
        object.__setattr__(self, "block_work", _work_rows(work))
        object.__setattr__(self, "world_size", positive_int(world_size, "world_size"))
        object.__setattr__(self, "block_size", positive_int(block_size, "block_size"))
        object.__setattr__(self, "near", bool(near))
        if self.blocks % self.world_size:
            raise ContextParallelError(
                f"{self.blocks} blocks of {self.block_size} positions cannot be shared equally by "
                f"{self.world_size} ranks. Make the sequence a multiple of {self.world_size} x "
                f"{self.block_size} = {self.world_size * self.block_size} positions long, or give "
                "a smaller block_size"
            )

    @classmethod
    def from_documents(
        cls, doc_lengths: DocLengths, world_size: int, block_size: int = _DEFAULT_BLOCK_SIZE,
        near: bool = False,
    ) -> BlockBalanced:  # fmt: skip
        """Work per block in (query, key) pairs, causal within documents.

        ``doc_lengths`` is that of :class:`~cp_dispatch.layouts.PerDocumentHeadTail`; ``[S]`` is
        one causal sequence. ``near`` as above; ranks of packed documents then need few keys of
        each other.

        Raises:
            ContextParallelError: also where ``block_size`` does not divide the sequence.
        """
        rows = document_rows(doc_lengths)
        length, block_size = sum(rows[0]), positive_int(block_size, "block_size")
        if length % block_size:
            each = positive_int(world_size, "world_size") * block_size
            raise ContextParallelError(
                f"{length} positions are no whole blocks of {block_size}. Make the sequence a "
                f"multiple of {world_size} x {block_size} = {each} positions long, by a last "
                "document of padding, or give a smaller block_size"
            )
        work = []
        for lengths in rows:
            pairs = DocumentPairs(lengths)
            before = [pairs.before(edge) for edge in range(0, length + 1, block_size)]
            work.append([b - a for a, b in itertools.pairwise(before)])
        return cls(work, world_size, block_size, near)

    @property
    def blocks(self) -> int:
        """Number of blocks of the whole sequence."""
        return len(self.block_work[0])

    @property
    def seq_len(self) -> int:
        """Positions of the whole sequence."""
        return self.blocks * self.block_size

    @property
    def rows(self) -> int:
        """1 if all rows of the batch have the same work, else the batch size."""
        return len(self.block_work)

    def __repr__(self) -> str:
        rows = f", {self.rows} batch rows" if self.rows > 1 else ""
        return (
            f"BlockBalanced({self.blocks} blocks of {self.block_size}{rows}, "
            f"world_size={self.world_size}, work {self._digest})"
        )

    @functools.cached_property
    def _digest(self) -> str:
        # Keys of caches of compiled graphs are made of representations.
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    def owned_blocks(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """For each of :attr:`rows`, the blocks that ``rank`` owns, ascending."""
        size = self.block_size
        return tuple(
            tuple(
                block
                for position, length in spans
                for block in range(position // size, (position + length) // size)
            )
            for spans in self.spans(rank)
        )

    def _arguments(self) -> list:
        return [self.block_work, self.world_size, self.block_size, *([True] if self.near else [])]

    def _assign(self):
        size = self.block_size
        owned = deal_rows(self.block_work, self.world_size, self.near)
        return [[[Span(block * size, size) for block in blocks] for blocks in row] for row in owned]

    def _work_before(self, row: int, position: int):
        return self._before[row][position // self.block_size]

    @functools.cached_property
    def _before(self) -> list[list]:
        return [list(itertools.accumulate(work, initial=0)) for work in self.block_work]


def _mask_work(mask, block_size: int | None) -> tuple[list[list[int]], int]:
    """Work per batch row and query block of a ``BlockMask``, and its block size."""
    own = mask.BLOCK_SIZE[0]
    if block_size not in (None, own):
        raise ContextParallelError(
            f"block_size={block_size} is not that of the BlockMask, {own}; leave it out"
        )
    counts = mask.kv_num_blocks
    if mask.full_kv_num_blocks is not None:
        counts = counts + mask.full_kv_num_blocks
    length, rows = mask.seq_lengths[0], counts.shape[-1]
    if length % own:
        raise ContextParallelError(
            f"the {length} query positions of the BlockMask are not a multiple of its block size "
            f"{own}"
        )
    if length != rows * own:
        raise ContextParallelError(
            f"the BlockMask has {rows} rows of blocks, its length {length} and block size {own} "
            f"make {length // own}; give that of the whole sequence, not one rank's rows"
        )
    return counts.sum(dim=1).tolist(), own


def _work_rows(work) -> tuple[tuple[float, ...], ...]:
    """The given numbers per batch row, one row where all are alike."""
    given = work.tolist() if hasattr(work, "tolist") else work
    if not isinstance(given, Iterable):
        raise ContextParallelError(
            f"work must be a BlockMask or one number per block, got {given!r}; of causal documents "
            "BlockBalanced.from_documents makes it"
        )
    given = [x.tolist() if hasattr(x, "tolist") else x for x in given]
    nested = [isinstance(x, Sequence) for x in given]
    rows = given if given and all(nested) else [given]
    if not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise ContextParallelError(
            "work must be one number per block, for all batch rows or for each, as many in every "
            f"row; got rows of {[len(row) for row in rows]}"
        )
    rows = tuple(tuple(_work_number(x, i) for i, x in enumerate(row)) for row in rows)
    return rows[:1] if len(set(rows)) == 1 else rows


def _work_number(value, block: int) -> int | float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < _MOST_WORK:
        raise ContextParallelError(
            f"the work of block {block} must be >= 0 and below {_MOST_WORK}, got {value!r}"
        )
    return int(value) if number.is_integer() else number
