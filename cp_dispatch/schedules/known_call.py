"""Calls of ``one_call`` that were made before, by the few ops that are left of them.

Where shards are so short that the host's time is all that counts, most of it goes to finding out
what follows from shapes and strides alone: which rooms, which rows go where, which views of what
comes. A second call with tensors of the same kind needs none of that: a push of the keys, the
kernel, and in a backward a push of the shares and a sum.

Rooms are as they were found at the first call, which all ranks made together. Nothing here makes
one; where one has been replaced, or a CUDA graph is captured, a call goes the whole way. What one
rank sends by a known call and another by the whole way is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch._compat import current_raw_stream
from cp_dispatch.merge import to_token_major, token_major
from cp_dispatch.parts import way_to_add
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.key_shares import KeyShares
from cp_dispatch.schedules.mailbox import Mailbox, rows_for
from cp_dispatch.schedules.prefix_keys import PushedPrefixes, prefix_keys
from cp_dispatch.schedules.prefix_plan import gradient_parcels, prefixes_of


class KnownCalls:
    """The forward and the backward of one job, for tensors of the kind that came last."""

    def __init__(self, job: Job):
        self._job = job
        self._kinds: list[list | None] = [None, None]
        self._ways: list = [None, None]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
        """Output and logsumexp of query, key and value; None where the call has to go the whole
        way, after which :meth:`learn_forward` may know it."""
        way = self._way(0, tensors)
        return None if way is None else way(*tensors)

    def backward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """dQ, dK and dV of grad_output, query, key, value, output and logsumexp, likewise."""
        way = self._way(1, tensors)
        return None if way is None else way(*tensors)

    def learn_forward(self, *tensors: Tensor) -> None:
        """After a call that went the whole way, and has made the rooms."""
        if not self._may_learn(0, tensors):
            return
        query, key, value = tensors
        keys = self._prefixes(query, key, value)
        way = None if keys is None else _Forward(self._job, keys, query)
        self._keep(0, tensors, way, None if keys is None else keys.box)

    def learn_backward(self, *tensors: Tensor) -> None:
        """As :meth:`learn_forward`, after a backward with gradients of keys."""
        if not self._may_learn(1, tensors):
            return
        _, query, key, value, *_ = tensors
        way = box = None
        keys = self._prefixes(*tensors[:4])
        if keys is not None:
            job, dtype = self._job, self._job.backend.gradient_dtype(key.dtype)
            sums = KeyShares(key, value, job.geometry, job.ring, dtype, gradient_parcels)
            box = sums.box
            way = None if box is None else _Backward(job, keys, query, sums)
        self._keep(1, tensors, way, box)

    def _may_learn(self, index: int, tensors: Sequence[Tensor]) -> bool:
        if _is_captured(tensors[0]):
            return False
        # Not again what cannot be known.
        return self._ways[index] is not None or self._kinds[index] != _kind(tensors)

    def _prefixes(self, *tensors: Tensor) -> PushedPrefixes | None:
        """Where keys come, if kernels take the tensors as they are and peers write to rooms."""
        *_, key, value = tensors
        pad = self._job.backend.pad
        if any(0 in x.shape or pad(x) is not x for x in tensors):
            return None
        found = prefix_keys(key, value, self._job.geometry, self._job.ring)
        return found if isinstance(found, PushedPrefixes) else None

    def _keep(self, index: int, tensors: Sequence[Tensor], way, box: Mailbox | None) -> None:
        self._kinds[index], self._ways[index] = _kind(tensors), None
        if way is not None:
            # In the room, so that nobody holds one that another took the place of.
            box.forget_many()
            box.views["known call", self, index] = way
            self._ways[index] = weakref.ref(way)

    def _way(self, index: int, tensors: Sequence[Tensor]):
        reference = self._ways[index]
        way = None if reference is None else reference()
        if (
            way is None
            or not way.is_current
            or self._kinds[index] != _kind(tensors)
            or _is_captured(tensors[0])
        ):
            return None
        return way


def _is_captured(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _kind(tensors: Sequence[Tensor]) -> list:
    """Of tensors that follow one another on the same stream."""
    kind: list = [current_raw_stream(tensors[0].device)]
    for x in tensors:
        kind += (x.shape, x.stride(), x.dtype)
    return kind


class _Forward:
    def __init__(self, job: Job, keys: PushedPrefixes, query: Tensor):
        self._backend, self._scale = job.backend, job.scale
        self._box, self._moves, self._own = keys.box, keys.moves, keys.own
        self._prefixes = prefixes_of(job.geometry, job.rank) if job.geometry.causal else None
        self._lengths = None
        if self._prefixes is not None:
            self._lengths = job.backend.prefix_lengths(query.size(0), self._prefixes, query.device)
        self._dtype = job.backend.output_dtype(query.dtype)
        self._lse_dtype = job.backend.logsumexp_dtype(query.dtype)

    @property
    def is_current(self) -> bool:
        return self._box.is_current

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._box.push_rows(rows_for((key, value)), self._moves, opens=True, then_wait=True)
        if self._prefixes is None:
            out, lse = self._backend.forward(query, *self._own, None, False, self._scale)
        else:
            out, lse = self._backend.prefix_forward(
                query, *self._own, self._prefixes, self._scale, self._lengths
            )
        self._box.release()
        return to_token_major(out, self._dtype), lse.to(self._lse_dtype).contiguous()


class _Backward(_Forward):
    def __init__(self, job: Job, keys: PushedPrefixes, query: Tensor, sums: KeyShares):
        super().__init__(job, keys, query)
        self._room, self._sent = sums.box, sums.moves(0, 1)
        self._arrived, self._home = sums.coming(), len(sums.own)
        self._places = sums.places(self._arrived)
        self._add = None

    @property
    def is_current(self) -> bool:
        return self._box.is_current and self._room.is_current

    def __call__(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *results: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, room = self._box, self._room
        keys.push_rows(
            rows_for((key, value)), self._moves, opens=True, then_wait=True, opens_too=room
        )
        try:
            inputs = grad_output, query, *self._own, *results
            if self._prefixes is None:
                dq, dk, dv, _ = self._backend.backward(*inputs, None, False, self._scale)
            else:
                dq, dk, dv = self._backend.prefix_backward(
                    *inputs, self._prefixes, self._scale, self._lengths
                )
        except BaseException:
            # No rank may wait for this one's shares, nor a flag stay raised for the next call.
            room.push_rows([], [], then_wait=True)
            raise
        # The box of keys has the same stream, which waits here until they were read.
        room.push_rows(rows_for((dk, dv)), self._sent, then_wait=True)
        totals = token_major(*key.shape, like=key), token_major(*value.shape, like=value)
        own = (dk,) * self._home, (dv,) * self._home
        flat = [*own[0], *(x.dk for x in self._arrived), *own[1], *(x.dv for x in self._arrived)]
        if self._add is None:
            self._add, self._pieces = way_to_add(flat, totals, self._places)
        self._add(flat, self._pieces, totals)
        room.release()
        return to_token_major(dq, query.dtype), *totals
