"""Refuses to recompute reentrant checkpoints outside the ``context_parallel`` block they ran in.

A checkpoint with ``use_reentrant=True`` runs its function without gradients, and again in the
backward. If the ``context_parallel`` block has ended by then, attention in the second run stays
within a shard. Other checkpoints notice that the saved tensors differ; this kind does not check,
and gradients would be silently wrong. So while a block is on, the function of such a checkpoint
remembers whether its attention used the block around. Compiled graphs tell by their guards on the
block. Modules in the style ``ContextParallel`` have their own blocks and their own check.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cp_dispatch._compat import ReentrantForward
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.plain_tensors.context import PlainContext

_forward: list[ReentrantForward] = []  # while it is replaced
_thread = threading.local()


def install(plain_context: Callable[[], PlainContext | None]) -> None:
    """Wrap the forward of reentrant checkpoints, until :func:`remove`."""
    if _forward:
        return
    _forward.append(ReentrantForward())
    theirs = _forward[0].get()

    def forward(ctx, function, *args):
        return theirs(ctx, _Recomputed(function, plain_context), *args)

    _forward[0].put(forward)


def remove() -> None:
    """Put the forward of reentrant checkpoints back."""
    while _forward:
        _forward.pop().restore()


def attended(context: PlainContext | None) -> None:
    """Record that a call of attention, or a graph with one, runs in this block."""
    if context is not None and context.world_size > 1:
        for blocks in getattr(_thread, "running", ()):
            blocks.append(context)


class _Recomputed:
    """A checkpoint's function, which runs first and is recomputed later."""

    def __init__(self, function, plain_context: Callable[[], PlainContext | None]):
        self._function, self._plain_context = function, plain_context
        self._has_run, self._order = False, None

    def __call__(self, *args):
        block = self._plain_context()
        if self._has_run:
            if self._order is not None and self._order != _order(block):
                raise ContextParallelError(
                    "a checkpoint with use_reentrant=True is recomputed outside the "
                    "context_parallel block in which it ran, where attention would stay within a "
                    "shard. Run the backward inside the block"
                )
            return self._function(*args)
        if not hasattr(_thread, "running"):
            _thread.running = []
        blocks: list[PlainContext] = []
        _thread.running.append(blocks)
        try:
            return self._function(*args)
        finally:
            _thread.running.pop()
            self._has_run = True
            if any(other is block for other in blocks):
                self._order = _order(block)


def _order(block: PlainContext | None):
    """What has to be the same in both runs; the schedule may differ."""
    return None if block is None else (block.mesh, block.balancer)
