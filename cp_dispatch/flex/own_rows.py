"""In which order lie the rows of a mask that holds one rank's alone.

Its tensors do not tell, and in another order it would be taken for a mask of other rows. So those
that were made here are known by the memory of a list. Copies of them are not known, nor is what was
written over.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from cp_dispatch.by_need.ownership import Ownership, ownership
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layout_rules import named
from cp_dispatch.layouts import from_text

_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def note_order(kv_num: Tensor, queries: Ownership) -> None:
    """Note that a mask with this list was made for a rank of those that own ``queries``."""
    if not kv_num.is_inference():  # whose versions nobody counts
        _made[kv_num.untyped_storage()] = kv_num._version, queries


def check_order(kv_num: Tensor, queries: Ownership) -> None:
    """Refuse a mask that is known to be of rows in another order than the call's ``queries``.

    Raises:
        ContextParallelError: on all ranks, which make their masks alike.
    """
    version, made = _made.get(kv_num.untyped_storage(), (None, None))
    if made is None or kv_num.is_inference() or version != kv_num._version:
        return
    # The lanes of all batch rows, of which a rank may have some.
    wanted = ownership(queries.length, queries.ring_shape, queries.layout)
    if made != wanted and made.spans_of_all != wanted.spans_of_all:
        raise ContextParallelError(
            f"block_mask has one rank's rows of {_words(made)}; the call's rows are of "
            f"{_words(wanted)}. Make the mask where the call's layout is enabled, or give that as "
            "layout to cp_dispatch.create_cp_block_mask or cp_dispatch.shard."
        )


def _words(owned: Ownership) -> str:
    if owned.layout:
        return f"the layout {named(from_text(owned.layout))}"
    return f"natural order, {owned.length} positions on {owned.world_size} ranks"
