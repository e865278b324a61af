"""Checks the order of a block mask that holds only one rank's rows.

The tensors of such a mask do not show its order, and in a different order it would be taken for a
mask of other rows. So masks that were made here are recognized by the storage of one of their
lists. Copies are not recognized, nor are lists that were written into.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from cp_dispatch.by_need.ownership import Ownership, ownership
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import from_text
from cp_dispatch.planning.layout_rules import named

_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def note_order(kv_num: Tensor, queries: Ownership) -> None:
    """Record that a mask with this list was made for the ranks that own ``queries``."""
    if not kv_num.is_inference():  # inference tensors have no version counter
        _made[kv_num.untyped_storage()] = kv_num._version, queries


def check_order(kv_num: Tensor, queries: Ownership) -> None:
    """Refuse a mask that is known to have its rows in a different order than the call's
    ``queries``.

    Raises:
        ContextParallelError: on all ranks, because all make their masks in the same way.
    """
    version, made = _made.get(kv_num.untyped_storage(), (None, None))
    if made is None or kv_num.is_inference() or version != kv_num._version:
        return
    # The lanes of all batch rows; a rank may have only some of them.
    wanted = ownership(queries.length, queries.ring_shape, queries.layout)
    if made != wanted and made.spans_of_all != wanted.spans_of_all:
        raise ContextParallelError(
            f"block_mask has one rank's rows of {_words(made)}, but the call's rows are of "
            f"{_words(wanted)}. Make the mask while the call's layout is enabled, or pass that "
            "layout to cp_dispatch.create_cp_block_mask or cp_dispatch.shard."
        )


def _words(owned: Ownership) -> str:
    if owned.layout:
        return f"the layout {named(from_text(owned.layout))}"
    return f"natural order, {owned.length} positions on {owned.world_size} ranks"
