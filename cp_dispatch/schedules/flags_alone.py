"""Completes the flags of a call that failed on this rank, so that the other ranks do not hang.

Where ranks write to each other's rooms (:mod:`mailbox`), each rank waits for flags of the others,
even of a rank that has left the call halfway, for example out of memory. So that rank goes through
the schedule again: on meta tensors, which take no memory, with a kernel that computes nothing, and
with mailboxes that skip the steps from before the error and then only raise and take flags, without
copying. The other ranks get garbage, this rank raises its error, and no stale flag is left for the
next call.

So the flags of a call are defined only by its schedule. They must depend on shapes, not on the
contents of tensors. Collectives are not completed; they end with the process group.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.native.merge import plain_batch, token_major
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.mailbox import OPENED, PUSHED

_log = logging.getLogger("cp_dispatch")


def finish(job: Job, method: Callable, tensors: Sequence[Tensor], *rest) -> None:
    """Complete the flags that other ranks wait for, after ``method(job, *tensors, *rest)``, a
    schedule's forward or backward, has raised an error on this rank."""
    if job.ring is None or not job.ring.may_push:
        return
    ring = _Ring(job.ring)
    try:
        try:
            _replay(replace(job, ring=ring), method, tensors, rest)
        finally:
            ring.wait()
    except Exception:  # for example if the GPU is lost; the call's own error is the one to raise
        _log.exception("after an error in attention: the other ranks may wait for this one")


def _replay(job: Job, method: Callable, tensors: Sequence[Tensor], rest) -> None:
    own = replace(
        job, backend=_NoKernel(job.backend), dropout=None,
        mask=None if job.mask is None else _without_memory(job.mask),
    )  # fmt: skip
    # What a schedule refuses, it refuses on every rank, and here too.
    with torch.no_grad(), contextlib.suppress(ContextParallelError):
        method(own, *(_padded(job, _without_memory(x)) for x in tensors), *rest)


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _padded(job: Job, x: Tensor) -> Tensor:
    return job.backend.pad(plain_batch(x)) if x.dim() == 4 else x


class _Ring(Ring):
    """A ring in which only flags move."""

    may_push = True

    def __init__(self, ring: Ring):
        self.rank, self.world_size = ring.rank, ring.world_size
        self.stream = None
        self._ring, self._boxes = ring, {}
        self._done = Counter(ring.steps)
        ring.steps.clear()

    @property
    def group(self):
        return self._ring.group

    def mailbox(self, name: str, size: int) -> _Box | None:
        box = self._ring.mailbox(name, size)
        if box is None:
            return None
        # By name, because the call may have started with a smaller box.
        own = self._boxes.setdefault(name, _Box(name, self._done))
        own.box, own.rank = box, self.rank
        return own

    def wait(self, mark=None) -> None:
        """Let the current stream wait for the stream of the flags, because copies that began before
        the error may read memory that is freed now."""
        for own in self._boxes.values():
            own.box.wait()

    def _all_to_all(self, send, receive, outgoing, incoming) -> _Done:
        return _Done()

    def start_all_gather(self, send, receive) -> _Done:
        return _Done()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.world_size, *tensor.shape))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


class _Done:
    def wait(self) -> None:
        pass


class _Box:
    """Like :class:`~cp_dispatch.schedules.mailbox.Mailbox`, but only raises and takes the flags
    that ``box`` has not yet raised and taken in this call."""

    is_current = True

    def __init__(self, name: str, done: Counter):
        self._name, self._done = name, done
        self.views: dict = {}

    def _is_due(self, step: int) -> bool:
        done = self._done[self._name, step]
        self._done[self._name, step] = max(0, done - 1)
        return not done

    def open(self, peers=None) -> None:
        if self._is_due(OPENED):
            self.box.open(peers)

    def push(self, targets, sources, peers=None, coming=None, ready_at_open=False) -> None:
        if self._is_due(PUSHED):
            self.box.push([], [], peers, coming)

    def push_rows(
        self, sources, moves, ready_at_open=False, opens=False, peers=None, then_wait=False,
        opens_too=None,
    ) -> None:  # fmt: skip
        if opens_too is not None:
            opens_too.open()
        opens = opens and self._is_due(OPENED)
        if self._is_due(PUSHED):
            self.box.push_rows([], [], opens=opens, peers=peers)

    def push_heads(self, sources, numbers, then_wait=False) -> None:
        self.push_rows(sources, [], opens=True)

    def numbers(self, moves, opens=()) -> None:
        pass

    def address(self, rank: int, offset: int) -> int:
        return 0

    def at(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    def move(self, *_) -> list[int]:
        return []

    def wait(self) -> None:
        self.box.wait()

    def release(self) -> None:
        self.box.release()

    def forget_many(self) -> None:
        pass

    let_go = forget_many


class _NoKernel:
    """Like a :class:`~cp_dispatch.backends.Backend`, but returns results without computing them."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_) -> tuple[Tensor, Tensor]:
        dtype, lse_dtype = (
            x(query.dtype) for x in (self._backend.output_dtype, self._backend.logsumexp_dtype)
        )
        out = token_major(*query.shape[:3], value.size(3), like=query, dtype=dtype)
        return out, query.new_empty(query.shape[:3], dtype=lse_dtype)

    prefix_forward = forward

    def backward(self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest):
        dtype = self._backend.gradient_dtype(query.dtype)
        grads = (token_major(*x.shape, like=x, dtype=dtype) for x in (query, key, value))
        return *grads, query.new_empty((*query.shape[:3], key.size(2)), dtype=dtype)

    def prefix_backward(self, *tensors) -> tuple[Tensor, ...]:
        return self.backward(*tensors)[:3]
