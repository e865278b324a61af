"""A forward that a checkpoint recomputes has to find the sequence in the order of the first time.

The backward belongs to the first forward, but the tensors that it gets are the second one's. If the
layout was another one by then, gradients would be wrong in silence. So it is noted in which order a
logsumexp lies, for as long as its memory lives; compiled graphs hand on the same memory. Hooks that
copy what autograd saves get past this.
"""

from __future__ import annotations

import threading
import weakref

from torch import Tensor

from cp_dispatch.errors import ContextParallelError

_orders: dict[int, tuple[weakref.ref, str]] = {}
# Against a storage that goes while another takes its id, also on this thread.
_lock = threading.RLock()


def note(logsumexp: Tensor, layout: str) -> None:
    """A forward in the order of a layout (a balancer's text) gave this."""
    storage = logsumexp.untyped_storage()
    key = id(storage)

    def forget(reference):
        with _lock:
            if _orders.get(key, (None,))[0] is reference:
                del _orders[key]

    with _lock:
        _orders[key] = weakref.ref(storage, forget), layout


def check(logsumexp: Tensor, layout: str) -> None:
    """Raise ContextParallelError where a forward in another order than the backward's gave this."""
    storage = logsumexp.untyped_storage()
    reference, found = _orders.get(id(storage), (None, layout))
    if found == layout or reference() is not storage:
        return
    raise ContextParallelError(
        "a checkpoint recomputed attention in another order of the sequence than its forward had: "
        f"{_name(found)} instead of {_name(layout)}. Run the backward under the same "
        "enabled(layout=...) as the forward, inside the same block."
    )


def _name(layout: str) -> str:
    return layout or "natural order (layout=None)"
