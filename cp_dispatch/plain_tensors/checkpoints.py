"""Refuses to recompute checkpoints outside the ``context_parallel`` block they ran in.

A checkpoint runs its function again in the backward. If the ``context_parallel`` block has ended by
then, attention in the second run stays within a shard, and gradients would be silently wrong:
checkpoints with ``use_reentrant=True`` do not check what they recompute, and others notice it only
if the tensors that autograd saves differ in shape or number, which those of compiled graphs need
not. So while a block is on, the function of a checkpoint remembers whether its attention used the
block around. Compiled graphs tell by their guards on the block. Modules in the style
``ContextParallel`` have their own blocks and their own check.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from cp_dispatch._compat import CheckpointFrameInit, ReentrantForward, recompute_in_forward
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.plain_tensors.context import PlainContext

_replaced: list[ReentrantForward | CheckpointFrameInit] = []
_thread = threading.local()


def install(plain_context: Callable[[], PlainContext | None]) -> None:
    """Wrap the functions of checkpoints, until :func:`remove`."""
    if _replaced:
        return
    _replaced.extend((ReentrantForward(), CheckpointFrameInit()))
    reentrant, frames = _replaced
    forward_of_theirs, init_of_theirs = reentrant.get(), frames.get()

    def forward(ctx, function, *args):
        return forward_of_theirs(ctx, _RunTwice(function, plain_context), *args)

    def init(frame, recompute, *args):
        init_of_theirs(frame, _Recomputed(recompute, plain_context), *args)
        _thread.frames = [*_in_forward(), weakref.ref(frame)]

    reentrant.put(forward)
    frames.put(init)


def remove() -> None:
    """Put back what :func:`install` replaced."""
    while _replaced:
        _replaced.pop().restore()


def attended(context: PlainContext | None) -> None:
    """Record that a call of attention, or a graph with one, runs in this block."""
    if context is None or context.world_size == 1:
        return
    for recomputed in getattr(_thread, "running", ()):
        recomputed.note(context)
    for reference in _in_forward():
        recompute_in_forward(reference()).note(context)


def _in_forward() -> list[weakref.ref]:
    """The frames of checkpoints with ``use_reentrant=False`` whose first run this thread is in."""

    def is_one(frame) -> bool:
        return frame is not None and recompute_in_forward(frame) is not None

    return [reference for reference in getattr(_thread, "frames", ()) if is_one(reference())]


class _Recomputed:
    """What a checkpoint calls in its backward."""

    def __init__(self, function, plain_context: Callable[[], PlainContext | None]):
        self._function, self._plain_context = function, plain_context
        self._block, self._order = plain_context(), None

    def note(self, block: PlainContext) -> None:
        if block is self._block:
            self._order = _order(block)

    def __call__(self, *args):
        if self._order is not None and self._order != _order(self._plain_context()):
            raise ContextParallelError(
                "a checkpoint is recomputed outside the context_parallel block in which it ran, "
                "where attention would stay within a shard. Run the backward inside the block"
            )
        return self._function(*args)


class _RunTwice(_Recomputed):
    """The function of a checkpoint that calls the same one in its forward."""

    _has_run = False

    def __call__(self, *args):
        if self._has_run:
            return super().__call__(*args)
        if not hasattr(_thread, "running"):
            _thread.running = []
        _thread.running.append(self)
        try:
            return self._function(*args)
        finally:
            _thread.running.pop()
            self._has_run = True


def _order(block: PlainContext | None):
    """What has to be the same in both runs; the schedule may differ."""
    return None if block is None else (block.mesh, block.balancer)
