"""Checks what a checkpoint recomputes: its order of the sequence, and in-place writes.

A checkpoint's backward was built by the first forward, but gets the tensors of the second one. If
the layout has changed in between, gradients would be silently wrong. So the storage of a logsumexp
carries a note of the order of its rows; compiled graphs pass the same storage on. Where autograd
saves nothing, or hooks copy what it saves, :mod:`cp_dispatch.graphs.checkpoints` finds the change.

In-place writes into an output of attention must be found too, since the backward reads the output.
Autograd checks the versions of the tensors that it saved, but not of those that hooks keep, as in
checkpoints. So the storage of an output carries a witness of its version. A copy that hooks made
has none, and then the output may be written into.

A plain mask that the user writes into is a different case: its version is not that of the DTensor
around it, which is the one that autograd checks.
"""

from __future__ import annotations

import weakref

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import local_tensor, version_witness
from cp_dispatch.errors import ContextParallelError

_LONGEST = 120  # characters of a layout in an error


def note(logsumexp: Tensor, layout: str) -> None:
    """Record that a forward in the order of a layout (a balancer's text) returned this."""
    # Torch keeps the attributes of a storage for as long as its memory lives.
    logsumexp.untyped_storage().cp_dispatch_layout = layout


def is_ours(logsumexp: Tensor) -> bool:
    """Whether :func:`note` has recorded something about this."""
    return hasattr(logsumexp.untyped_storage(), "cp_dispatch_layout")


def check(logsumexp: Tensor, layout: str) -> None:
    """Raise ContextParallelError if a forward in a different order than the backward's returned
    this."""
    found = getattr(logsumexp.untyped_storage(), "cp_dispatch_layout", layout)
    if found != layout:
        raise in_another_order(found, layout)


def in_another_order(found: str, *wanted: str) -> ContextParallelError:
    """The error for attention that was recomputed in the order of a layout, instead of that of one
    of the layouts of its forward."""
    names = " or ".join(map(_name, wanted)) or "what ran without cp_dispatch"
    return ContextParallelError(
        "a checkpoint recomputed attention in a different order of the sequence than its "
        f"forward: {_name(found)} instead of {names}. Run the backward under the same "
        "enabled(layout=...) as the forward, inside the same block."
    )


def watch(output: Tensor) -> None:
    """Record the version of a tensor that attention returns."""
    storage = _storage(output)
    if storage is not None:
        storage.cp_dispatch_witness = version_witness(output)


def check_unwritten(output: Tensor) -> None:
    """Like autograd's check of saved tensors, for an output that was at version 0."""
    storage = _storage(output)
    # Not in a variable: tools that print a frame's locals would read data that is not there.
    version = getattr(getattr(storage, "cp_dispatch_witness", None), "_version", 0)
    if version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            "operation: the output of scaled_dot_product_attention, of shape "
            f"{list(output.shape)}, is at version {version}; expected version 0 instead"
        )


def version_of_local(mask: Tensor | None) -> tuple | None:
    """A weak reference to this rank's tensor in a DTensor, and its version."""
    if not _is_plain_dtensor(mask) or local_tensor(mask).is_inference():
        return None
    return weakref.ref(local_tensor(mask)), local_tensor(mask)._version


def check_unwritten_mask(mask: Tensor | None, before: tuple | None) -> None:
    """Like autograd's check of saved tensors, for the mask as it was ``before``. A mask that a
    checkpoint recomputed or that hooks copied is a different tensor, and is not checked."""
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


def _storage(tensor: Tensor) -> UntypedStorage | None:
    """The memory of a DTensor or a plain tensor; None in traces and in inference mode."""
    local = local_tensor(tensor) if type(tensor) is DTensor else tensor
    return local.untyped_storage() if type(local) is Tensor and not tensor.is_inference() else None


def _is_plain_dtensor(tensor: Tensor | None) -> bool:
    return type(tensor) is DTensor and type(local_tensor(tensor)) is Tensor


def _name(layout: str) -> str:
    if len(layout) > _LONGEST:  # that of blocks has the work of each
        return layout[:_LONGEST] + "..."
    return layout or "natural order (layout=None)"
