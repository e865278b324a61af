"""Packs the query heads of one key head into rows of one head, ``(B, Hkv, S * groups, D)``.

A backward kernel computes separate dK and dV for every query head and sums them afterwards, which
takes as much memory as keys and values for all query heads. Without a mask, rows of different heads
can be treated alike. Packed, a key head's gradient is a single sum; the price is copies of the
tensors with the queries' rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cp_dispatch.native.merge import token_major
from cp_dispatch.native.rows import copy_rows

#: Bytes that packing must save to be worth its copies. On an H100, with 4 query heads for each of 8
#: key heads of 128 and 7 times as many keys as queries, cuDNN's backward took 6% longer packed with
#: 1,024 queries (48 MiB saved), 1% with 4,096 and 5% less time with 16,384.
LEAST_SAVED = 2**26


def saved_bytes(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Bytes that packing saves in a backward of ``query (B, H, Sq, D)`` over ``key`` and ``value
    (B, Hkv, Sk, D)``: dK and dV of every query head, minus copies of query, output and both
    gradients."""
    batch, heads, rows, dim = query.shape
    if heads == key.size(1):
        return 0
    row = batch * heads * (dim + value.size(-1)) * query.element_size()
    return (key.size(2) - 2 * rows) * row


def packed(tensors: Sequence[Tensor], key_heads: int) -> list[Tensor]:
    """``(B, H, S, ...)`` as contiguous ``(B, Hkv, S * groups, ...)``."""
    rows = [x.unflatten(1, (key_heads, -1)).transpose(2, 3) for x in tensors]
    found = [x.new_empty(x.shape) for x in rows]
    copy_rows(found, rows, None, [0] * len(rows), False)
    return [x.flatten(2, 3) for x in found]


def unpacked(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`packed`: ``(B, H, S, D)``, token-major."""
    batch, key_heads, rows, dim = tensor.shape
    groups = heads // key_heads
    result = token_major(batch, heads, rows // groups, dim, like=tensor)
    rows_first = tensor.unflatten(2, (-1, groups)).transpose(2, 3)
    copy_rows([result.unflatten(1, (key_heads, groups))], [rows_first], None, [0], False)
    return result
