"""The tuple in which the higher-order op takes a block mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cp_dispatch.flex.cut import Blocks

# What stands between the lists of blocks and the block sizes, if anything, is an order of writes
# for one backend's deterministic backward (torch 2.13); it holds for the mask as it was given.
_LISTS = slice(2, 10)


@dataclass(frozen=True)
class MaskTuple:
    """``(query length, key length, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices,
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices, ..., query block size, key block
    size, mask_mod)``."""

    given: tuple

    @property
    def lengths(self) -> tuple[Any, Any]:
        return self.given[0], self.given[1]

    @property
    def lists(self) -> Blocks:
        return Blocks(*self.given[_LISTS])

    @property
    def block_size(self) -> tuple[int, int]:
        return int(self.given[-3]), int(self.given[-2])

    @property
    def mask_mod(self):
        return self.given[-1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The lists of key blocks, from which the others follow."""
        return self.given[2:6]

    def of_rows(self, rows, blocks: Blocks, mask_mod) -> tuple:
        """The tuple for some rows of queries and all keys."""
        between = (None,) * (len(self.given) - 13)
        return (rows, self.given[1], *blocks, *between, *self.given[-3:-1], mask_mod)
