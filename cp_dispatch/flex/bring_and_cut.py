"""``flex_bring_and_cut``: ``flex_bring`` and ``flex_cut`` in one op, for calls without gradients.

For short kernels the host is the limit, and calling an op takes it about as long as what the op
does for a known mask. With gradients they stay two ops: the backward needs only the cut mask of the
two, and a checkpoint that repeats ``flex_cut`` to get it should not send keys.
"""

from __future__ import annotations

from torch import Tensor

from cp_dispatch.flex.mask_job import known_of
from cp_dispatch.flex.ops import (
    MASK,
    bring,
    bring_fake,
    check_rows,
    cut_fake,
    define,
    tell_order,
)

# The arguments and results are those of flex_bring, and of flex_cut for all keys.
SCHEMA = (
    f"flex_bring_and_cut(Tensor key, Tensor value, {MASK}, bool fill, bool order)"
    " -> (Tensor, Tensor)"
)


def _flex_bring_and_cut(key: Tensor, value: Tensor, *args) -> tuple[Tensor, Tensor]:
    mask, fill, order = args[:-2], args[-2], args[-1]
    tell_order(mask)
    known = known_of(mask, key.device)
    if known.exchange is None:
        known.find_exchange(mask, key.device, lambda job: check_rows(job, key))
    keys = bring(known.exchange, key, value, mask, fill)
    # Not a copy, as it is only read: inductor does not reuse integers that our ops return (see
    # :func:`cp_dispatch.graphs.order.keep_order`).
    return keys, known.cut(mask, -1, order)


def _flex_bring_and_cut_fake(key, value, *args) -> tuple[Tensor, Tensor]:
    *mask, fill, order = args
    return bring_fake(key, value, *mask, fill, False), cut_fake(*mask, -1, order)


define((SCHEMA,), (_flex_bring_and_cut,), (_flex_bring_and_cut_fake,))
