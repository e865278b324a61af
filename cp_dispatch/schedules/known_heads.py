"""Repeats earlier calls that exchange heads with only the few ops that they need.

Like :mod:`known_call`, for calls of one stage where all ranks have the same number of heads. One
message brings this rank's heads of all rows, one kernel computes, and one message brings back all
heads of this rank's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cp_dispatch.native.merge import token_major
from cp_dispatch.native.rows import copy_rows
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.known_call import Known
from cp_dispatch.schedules.mailbox import Mailbox, on_default_stream
from cp_dispatch.schedules.pushed_heads import are_thin, as_heads, goes_as_it_is, packed_heads


class KnownHeads(Known):
    """Known calls of :class:`~cp_dispatch.schedules.heads.Heads`; ``team_of(job, query, key, value,
    backward)`` returns the team of a call."""

    def __init__(self, team_of: Callable, job: Job):
        super().__init__(job)
        self._team_of = team_of

    def learn_forward(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """See :class:`~cp_dispatch.schedules.known_call.Known`."""
        backend, tensors = self._job.backend, (query, key, value)
        outgoing = (query, False), (key, True), (value, True)
        home = (
            (backend.output_dtype(query.dtype), value.size(3), False),
            (backend.logsumexp_dtype(query.dtype), 1, False),
        )
        self._learn(0, _Forward, tensors, tensors, outgoing, home)

    def learn_backward(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        logsumexp: Tensor,
    ) -> None:  # fmt: skip
        """See :class:`~cp_dispatch.schedules.known_call.Known`; of a backward with gradients of
        keys."""
        tensors = grad_output, query, key, value, output, logsumexp
        rows = query, grad_output, output, logsumexp
        outgoing = *((x, False) for x in rows), (key, True), (value, True)
        inputs = (query, False), (key, True), (value, True)
        home = [(x.dtype, x.size(3), of_key) for x, of_key in inputs]
        self._learn(1, _Backward, tensors, (query, key, value), outgoing, home)

    def _learn(self, index: int, kind: type[_Way], tensors, inputs, outgoing, home) -> None:
        """``outgoing``: ``(tensor, whether it has the keys' heads)`` of the data sent out;
        ``home``: ``(dtype, dim, whether it has the keys' heads)`` of the data sent back."""
        if not self._may_learn(index, tensors):
            return
        way = box = None
        if self._are_plain([x for x in tensors if x.dim() == 4]):
            there = [(x.dtype, 1 if x.dim() == 3 else x.size(3), k) for x, k in outgoing]
            found = self._team_of(self._job, *inputs, index == 1).only_messages(there, home)
            if found is not None:
                way, box = kind(self._job, *found, [x for x, _ in outgoing], inputs), found[1]
        self._keep(index, tensors, way, box)


class _Way:
    """What a forward and a backward have in common.

    Args:
        is_causal, box, out, home, parts: what
            :meth:`~cp_dispatch.schedules.head_team.Team.only_messages` returns.
        outgoing: tensors ``(B, H, S, dim)`` of the kind that is sent out.
        inputs: query, key and value of this kind.
    """

    def __init__(
        self, job: Job, is_causal: bool, box: Mailbox, out, home, parts, outgoing, inputs
    ):  # fmt: skip
        self._backend, self._scale, self._is_causal = job.backend, job.scale, is_causal
        self._box, self._home, self._parts = box, home, parts
        here = on_default_stream(outgoing[0].device)
        packed = (False,) * len(parts) if here else are_thin(parts, outgoing)
        self._numbers, self._own = out.numbers(box, packed), out.own(box)
        self._go_as_they_are = not any(packed) and all(map(goes_as_it_is, outgoing))
        whole = (False,) * len(home.parts)
        self._numbers_home, self._came = home.numbers(box, whole), home.own(box)
        self._return_as_they_are: bool | None = None
        self._push = functools.partial(box.push_heads, then_wait=True)
        if here:
            self._push = box.push_heads_here
        self._here = here
        # Only shapes and strides of results are kept, so they need no memory.
        results = self._results_of(*(torch.empty_like(x, device="meta") for x in inputs))
        self._results = [(x.shape, x.stride(), x.dtype) for x in results]
        whole = (x.unsqueeze(-1) if x.dim() == 3 else x for x in results)
        views = [x.unflatten(1, (len(y), -1)).transpose(0, 1)
                 for x, y in zip(whole, self._came, strict=True)]  # fmt: skip
        self._views, self._dims = [(x.shape, x.stride()) for x in views], [2] * len(views)

    def _results_of(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Tensors like the results of a call."""
        raise NotImplementedError

    @property
    def is_current(self) -> bool:
        """Whether the room is still in use."""
        return self._box.is_current

    def _send(self, *tensors: Tensor) -> None:
        """Send, and let the current stream wait for this rank's heads."""
        if not self._go_as_they_are:
            tensors, _ = packed_heads(self._parts, tensors, True)
        self._push(tensors, self._numbers)

    def _send_home(self, *pieces: Tensor) -> None:
        """Send back own heads of all rows, ``(B, heads, S, dim)`` or ``(B, heads, S)``. The push
        waits until the data that came out has been read."""
        parts = self._home.parts
        if self._return_as_they_are is None:  # a kernel returns the same strides at every call
            self._return_as_they_are = all(
                x.dtype is part.dtype and goes_as_it_is(x)
                for x, part in zip(pieces, parts, strict=True)
            )
        if not self._return_as_they_are:
            pieces = [as_heads(x.to(part.dtype)) for x, part in zip(pieces, parts, strict=True)]
        self._push(pieces, self._numbers_home)

    def _collect(self, like: Tensor) -> tuple[Tensor, ...]:
        """All heads of own rows. Call it when the tensors sent back have been freed, to reuse their
        memory."""
        results = [
            like.new_empty_strided(shape, stride, dtype=dtype)
            for shape, stride, dtype in self._results
        ]
        targets = [x.as_strided(*how) for x, how in zip(results, self._views, strict=True)]
        copy_rows(targets, self._came, None, self._dims, False)
        if not self._here:
            self._box.release()
        return tuple(results)


class _Forward(_Way):
    def _results_of(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        shape, (dtype, lse_dtype) = query.shape[:3], (part.dtype for part in self._home.parts)
        output = token_major(*shape, value.size(3), like=query, dtype=dtype)
        return output, query.new_empty(shape, dtype=lse_dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        self._send(query, key, value)
        out, lse = self._backend.forward(*self._own, None, self._is_causal, self._scale)
        self._send_home(out, lse)
        del out, lse
        return self._collect(query)


class _Backward(_Way):
    def __init__(self, *how):
        super().__init__(*how)
        query, grad_output, output, logsumexp, key, value = self._own
        self._own = grad_output, query, key, value, output, logsumexp.squeeze(-1)

    def _results_of(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        return [token_major(*x.shape, like=x) for x in (query, key, value)]

    def __call__(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        logsumexp: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self._send(query, grad_output, output, logsumexp, key, value)
        dq, dk, dv, _ = self._backend.backward(*self._own, None, self._is_causal, self._scale)
        self._send_home(dq, dk, dv)
        del dq, dk, dv
        return self._collect(query)
