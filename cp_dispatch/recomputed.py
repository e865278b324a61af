"""A forward that a checkpoint recomputes has to find the sequence in the order of the first time.

The backward belongs to the first forward, but the tensors that it gets are the second one's. If the
layout was another one by then, gradients would be wrong in silence. So the memory of a logsumexp
bears a note of the order in which it lies; compiled graphs hand on the same memory. Hooks that copy
what autograd saves get past this.

Nor may it write into what attention returned, where the backward reads that. Autograd checks the
versions of what it saved, but not where hooks have it, as in checkpoints. So the memory of an
output bears a witness of its version; what hooks have copied has none: the output may be written
to.

A plain mask that the user writes into has another version than the DTensor around it, which
autograd looks at.
"""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import local_tensor, version_witness
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


def watch(output: Tensor) -> None:
    """Note at what version a DTensor is that attention returns; a plain tensor's would keep its own
    memory alive."""
    if _is_plain_dtensor(output):
        local_tensor(output).untyped_storage().cp_dispatch_witness = version_witness(output)


def check_unwritten(output: Tensor) -> None:
    """As autograd's check of what it saved, of an output that was at version 0."""
    if not _is_plain_dtensor(output):
        return
    storage = local_tensor(output).untyped_storage()
    # Not in a variable: what prints a frame's locals would read data that is not there.
    version = getattr(getattr(storage, "cp_dispatch_witness", None), "_version", 0)
    if version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            "operation: the output of scaled_dot_product_attention, of shape "
            f"{list(output.shape)}, is at version {version}; expected version 0 instead"
        )


def version_of_local(mask: Tensor | None) -> tuple | None:
    """This rank's tensor in a DTensor, weakly, and its version."""
    if not _is_plain_dtensor(mask) or local_tensor(mask).is_inference():
        return None
    return weakref.ref(local_tensor(mask)), local_tensor(mask)._version


def check_unwritten_mask(mask: Tensor | None, before: tuple | None) -> None:
    """As autograd's check of what it saved, of what was ``before`` in the mask. What a checkpoint
    has made anew, or hooks have copied, is another tensor and not checked."""
    if before is None or not _is_plain_dtensor(mask):
        return
    local, version = local_tensor(mask), before[1]
    if before[0]() is local and local._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            "operation: the attn_mask of scaled_dot_product_attention, of shape "
            f"{list(mask.shape)}, is at version {local._version}; expected version {version} "
            "instead"
        )


def _is_plain_dtensor(tensor: Tensor | None) -> bool:
    return type(tensor) is DTensor and type(local_tensor(tensor)) is Tensor


def _name(layout: str) -> str:
    return layout or "natural order (layout=None)"
