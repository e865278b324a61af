"""Refuses to recompute checkpoints where attention would not be what it was in their forward.

A checkpoint runs its function again in the backward. If a ``context_parallel`` block has ended by
then, or another layout applies, attention in the second run stays within a shard or goes by another
order of the sequence, and gradients would be silently wrong: checkpoints with
``use_reentrant=True`` do not check what they recompute, and others notice it only if the tensors
that autograd saves differ in shape or number. So while cp_dispatch is on, the function of a
checkpoint remembers two things of its first run:

- whether attention on plain tensors used the block around; compiled graphs tell by their guards on
  the block. Outside the block no code of ours would run, so this is checked before the second run;
  whether the second run uses a block that the first one did not use, at its calls.
- in which orders kernels ran. Only if the layout around has changed, each kernel of the second run
  is checked before it communicates. What a selective checkpoint has saved runs no kernel.

Modules in the style ``ContextParallel`` have their own blocks and, uncompiled, their own check.
Checkpoints by other functions than torch's are not known here.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from cp_dispatch._compat import CheckpointFrameInit, ReentrantForward, recompute_in_forward
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs.recomputed import in_another_order

_replaced: list[ReentrantForward | CheckpointFrameInit] = []


class _Thread(threading.local):
    def __init__(self):
        self.first: list[_Recomputed] = []  # first runs that this thread is in, by a call of ours
        self.frames: list[weakref.ref] = []  # of checkpoints that may be in their first run
        self.second: list[_SecondRun] = []  # those that are checked
        self.repeats: list[bool] = []  # for each second run, whether it needs no check


_thread = _Thread()


def install(current_options: Callable, plain_context: Callable) -> None:
    """Wrap the functions of checkpoints, until :func:`remove`.

    ``current_options()`` returns the :class:`~cp_dispatch.options.Options` in effect in this
    thread, ``plain_context()`` the :class:`~cp_dispatch.plain_tensors.context.PlainContext`, each
    None without one.
    """
    if _replaced:
        return
    _replaced.extend((ReentrantForward(), CheckpointFrameInit()))
    reentrant, frames = _replaced
    forward_of_theirs, init_of_theirs = reentrant.get(), frames.get()

    def forward(ctx, function, *args):
        return forward_of_theirs(ctx, _RunTwice(function, current_options, plain_context), *args)

    def init(frame, recompute, *args):
        init_of_theirs(frame, _Recomputed(recompute, current_options, plain_context), *args)
        _first_runs()
        _thread.frames.append(weakref.ref(frame))

    reentrant.put(forward)
    frames.put(init)


def remove() -> None:
    """Put back what :func:`install` replaced."""
    while _replaced:
        _replaced.pop().restore()


def attended(context, by_order: bool = False) -> None:
    """Record that a call of attention, or a graph with one, runs in this block. ``by_order``: it
    depends on the order of the sequence.

    Raises:
        ContextParallelError: if it depends on that, in the second run of a checkpoint whose first
            one was not in the block.
    """
    if context is None or context.world_size == 1:
        return
    for run in _first_runs():
        run.note_block(context)
    if by_order:
        for run in _thread.second:
            run.check_block(context)


def attends_in(layout: str, *lengths: int) -> None:
    """A kernel for which the order matters is about to run in that of a layout (a balancer's text),
    for whole sequences of these lengths.

    Raises:
        ContextParallelError: in the second run of a checkpoint whose first one had another order.
    """
    thread = _thread
    if not (thread.first or thread.frames or thread.second):
        return
    order = layout, *lengths
    for run in thread.first if not thread.frames else _first_runs():
        run.note_order(order)
    for run in thread.second:
        run.check(order)


def repeats() -> bool:
    """Whether this thread is in the second run of a checkpoint, with the same orders around as in
    the first one."""
    return bool(_thread.repeats) and _thread.repeats[-1]


def _first_runs() -> list[_Recomputed]:
    """Of the checkpoints that this thread is in. Forgets the frames of all others."""
    runs, frames = [*_thread.first], []
    for reference in _thread.frames:
        frame = reference()
        recomputed = None if frame is None else recompute_in_forward(frame)
        if recomputed is not None:
            runs.append(recomputed)
            frames.append(reference)
    _thread.frames = frames
    return runs


class _Settings(NamedTuple):
    """What applies to attention in a thread, see :func:`install`."""

    options: object | None
    block: object | None

    @property
    def orders(self) -> tuple:
        """What has to be the same in both runs; the schedule may differ."""
        order = None if self.options is None else self.options.order
        return order, _order(self.block)

    def are(self, others: _Settings) -> bool:
        """Whether no scope or block has begun in between."""
        return self.options is others.options and self.block is others.block


class _Recomputed:
    """What a checkpoint calls in its backward."""

    def __init__(self, function, current_options, plain_context):
        self._function = function
        self._current_options, self._plain_context = current_options, plain_context
        #: That of the block around, if attention ran in it.
        self.block_order = None
        self._around = self.settings()
        #: The orders in which kernels ran: under the options and in the block around, and inside
        #: scopes and blocks of the function.
        self.outside: set[tuple] = set()
        self.inside: set[tuple] = set()

    def settings(self) -> _Settings:
        return _Settings(self._current_options(), self._plain_context())

    def note_block(self, block) -> None:
        if block is self._around.block:
            self.block_order = _order(block)

    def note_order(self, order: tuple) -> None:
        (self.outside if self.settings().are(self._around) else self.inside).add(order)

    def __call__(self, *args):
        now = self.settings()
        if self.block_order is not None and self.block_order != _order(now.block):
            raise ContextParallelError(
                "a checkpoint is recomputed outside the context_parallel block in which it ran, "
                "where attention would stay within a shard. Run the backward inside the block"
            )
        if now.orders == self._around.orders:
            with _noted(_thread.repeats, True):
                return self._function(*args)
        if self._around.options is not None and now.options is None:
            # Torch's own kernels would run, and take the order for the natural one.
            for layout, *_ in self.outside:
                if layout:
                    raise in_another_order("", layout)
        with _noted(_thread.repeats, False), _noted(_thread.second, _SecondRun(self, now)):
            return self._function(*args)


class _RunTwice(_Recomputed):
    """The function of a checkpoint that calls the same one in its forward."""

    _has_run = False

    def __call__(self, *args):
        if self._has_run:
            return super().__call__(*args)
        try:
            with _noted(_thread.first, self):
                return self._function(*args)
        finally:
            self._has_run = True


class _SecondRun:
    """A second run while the order around differs from that of the first."""

    def __init__(self, first: _Recomputed, around: _Settings):
        self._first, self._around = first, around

    def check_block(self, block) -> None:
        if block is self._around.block and self._first.block_order is None:
            raise ContextParallelError(
                "a checkpoint that ran outside the context_parallel block is recomputed inside it, "
                "where plain tensors are shards. Run its forward inside the block, or its backward "
                "outside"
            )

    def check(self, order: tuple) -> None:
        first, allowed = self._first, self._first.outside
        if not allowed or not first.settings().are(self._around):
            allowed = allowed | first.inside
        if order not in allowed:
            raise in_another_order(order[0], *sorted({layout for layout, *_ in allowed}))


@contextlib.contextmanager
def _noted(runs: list, run):
    runs.append(run)
    try:
        yield
    finally:
        runs.pop()


def _order(block):
    return None if block is None else (block.mesh, block.balancer)
