"""A forward that a checkpoint recomputes has to find the sequence in the order of the first time.

The backward belongs to the first forward, but the tensors that it gets are the second one's. If the
layout was another one by then, gradients would be wrong in silence. So the memory of a logsumexp
bears a note of the order in which it lies; compiled graphs hand on the same memory. Hooks that copy
what autograd saves get past this.
"""

from __future__ import annotations

from torch import Tensor

from cp_dispatch.errors import ContextParallelError


def note(logsumexp: Tensor, layout: str) -> None:
    """A forward in the order of a layout (a balancer's text) gave this."""
    # Torch keeps the attributes of a storage for as long as its memory, whoever holds that.
    logsumexp.untyped_storage().cp_dispatch_layout = layout


def check(logsumexp: Tensor, layout: str) -> None:
    """Raise ContextParallelError where a forward in another order than the backward's gave this."""
    found = getattr(logsumexp.untyped_storage(), "cp_dispatch_layout", layout)
    if found != layout:
        raise ContextParallelError(
            "a checkpoint recomputed attention in another order of the sequence than its forward "
            f"had: {_name(found)} instead of {_name(layout)}. Run the backward under the same "
            "enabled(layout=...) as the forward, inside the same block."
        )


def _name(layout: str) -> str:
    return layout or "natural order (layout=None)"
