"""``MaskTuple``: access to the tuple as which the higher-order op takes a block mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from cp_dispatch.flex.cut import Blocks

# Between the lists of blocks and the block sizes there may be an order of writes for one backend's
# deterministic backward (torch 2.13). It applies only to the mask as it was given.
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
        """The lists of key blocks, from which the other lists follow."""
        return self.given[2:6]

    def of_rows(self, rows, blocks: Blocks, mask_mod, keys=None) -> tuple:
        """The tuple for some query rows, and all keys or the given number of keys."""
        between = (None,) * (len(self.given) - 13)
        keys = self.given[1] if keys is None else keys
        return (rows, keys, *blocks, *between, *self.given[-3:-1], mask_mod)


def no_mask(query: Tensor, key: Tensor) -> MaskTuple:
    """One block that covers all scores, which is how torch represents a call without a block
    mask."""
    ones = torch.ones((1, 1, 1), dtype=torch.int32)
    zeros = torch.zeros((1, 1, 1, 1), dtype=torch.int32)
    lists = ones, zeros, None, None, ones, zeros, None, None
    side = 2**30
    return MaskTuple((query.shape[2], key.shape[2], *lists, side, side, noop_mask))
