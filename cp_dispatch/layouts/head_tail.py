"""``HeadTail``: a rank owns a piece from the front of the sequence and one from the back."""

from __future__ import annotations

from dataclasses import dataclass

from cp_dispatch.layouts.balancer import Balancer, causal_pairs, head_tail, positive_int
from cp_dispatch.layouts.spans import Span


@dataclass(frozen=True, eq=False)
class HeadTail(Balancer):
    """Rank r owns a piece from the front and the matching piece from the back.

    ::

        2W pieces, W = 4      0 1 2 3 4 5 6 7
        owner                 0 1 2 3 3 2 1 0

    This is the layout of Llama 3's context parallelism (arXiv:2407.21783, section 3.3.2) and of the
    zigzag ring. Striped Attention (arXiv:2311.09431) was the first to balance causal attention by
    permuting the sequence.

    If S is a multiple of 2W, each rank has exactly the mean work under a causal mask. Any other S
    is not padded: rank r takes its ``torch.chunk`` share, the larger half from the front and the
    smaller from the back. With c = ceil(S / W) rows on a full rank, the imbalance is then below
    (c W / S) (1 + 1 / c). The first factor is the cost of ``torch.chunk``'s uneven shares in any
    layout.

    Args:
        seq_len: positions of the whole sequence, S.
        world_size: number of ranks, W.

    Raises:
        ContextParallelError: if one of them is not a positive int.
    """

    seq_len: int
    world_size: int

    def __post_init__(self):
        object.__setattr__(self, "seq_len", positive_int(self.seq_len, "seq_len"))
        object.__setattr__(self, "world_size", positive_int(self.world_size, "world_size"))

    def _arguments(self) -> list:
        return [self.seq_len, self.world_size]

    def _assign(self):
        return [head_tail(Span(0, self.seq_len), self.shard_lengths)]

    def _work_before(self, row: int, position: int) -> int:
        return causal_pairs(position)

    def _notes(self) -> list[str]:
        pieces = 2 * self.world_size
        if self.seq_len % pieces == 0:
            return []
        return [
            f"{self.seq_len} positions are not a multiple of 2 x {self.world_size} ranks: odd "
            "shares take one more row from the front; nothing is padded"
        ]
