"""Repeats earlier calls that exchange heads with only the few ops that they need.

Like :mod:`known_call`, for calls of one stage where all ranks have the same number of heads. One
message brings this rank's heads of all rows, one kernel computes, and one message brings back all
heads of this rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cp_dispatch.merge import to_token_major, token_major
from cp_dispatch.rows import copy_rows
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
                way, box = kind(self._job, *found, [x for x, _ in outgoing]), found[1]
        self._keep(index, tensors, way, box)


class _Way:
    """What a forward and a backward have in common.

    Args:
        is_causal, box, out, home, parts: what :meth:`Team.only_messages` returns.
        outgoing: tensors ``(B, H, S, dim)`` of the kind that is sent out.
    """

    def __init__(self, job: Job, is_causal: bool, box: Mailbox, out, home, parts, outgoing):
        self._backend, self._scale, self._is_causal = job.backend, job.scale, is_causal
        self._box, self._home, self._parts = box, home, parts
        here = on_default_stream(outgoing[0].device)
        packed = (False,) * len(parts) if here else are_thin(parts, outgoing)
        self._numbers, self._own = out.numbers(box, packed), out.own(box)
        self._go_as_they_are = not any(packed) and all(map(goes_as_it_is, outgoing))
        whole = (False,) * len(home.parts)
        self._numbers_home, self._came = home.numbers(box, whole), home.own(box)
        self._results, self._releases = None, not here

    @property
    def is_current(self) -> bool:
        """Whether the room is still in use."""
        return self._box.is_current

    def _send(self, *tensors: Tensor) -> None:
        """Send, and let the current stream wait for this rank's heads."""
        if not self._go_as_they_are:
            tensors, _ = packed_heads(self._parts, tensors, True)
        self._box.push_heads(tensors, self._numbers, True)

    def _send_home(self, *pieces: Tensor) -> None:
        """Send back own heads of all rows, ``(B, heads, S, dim)`` or ``(B, heads, S)``. The push
        waits until the data that came out has been read."""
        self._box.push_heads([as_heads(x) for x in pieces], self._numbers_home, True)

    def _collect(self, *results: Tensor) -> None:
        """Write all heads of own rows into ``results``, which are allocated after the tensors sent
        back were freed and so reuse their memory."""
        if self._results is None:
            whole = [x.unsqueeze(-1) if x.dim() == 3 else x for x in results]
            views = [x.unflatten(1, (len(y), -1)).transpose(0, 1)
                     for x, y in zip(whole, self._came, strict=True)]  # fmt: skip
            self._results = [(x.shape, x.stride()) for x in views]
        targets = [x.as_strided(*how) for x, how in zip(results, self._results, strict=True)]
        copy_rows(targets, self._came, None, [2] * len(targets), False)
        if self._releases:
            self._box.release()


class _Forward(_Way):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._send(query, key, value)
        out, lse = self._backend.forward(*self._own, None, self._is_causal, self._scale)
        dtype, lse_dtype = (part.dtype for part in self._home.parts)
        self._send_home(to_token_major(out, dtype), lse.to(lse_dtype))
        del out, lse
        output = token_major(*query.shape[:3], value.size(3), like=query, dtype=dtype)
        logsumexp = query.new_empty(query.shape[:3], dtype=lse_dtype)
        self._collect(output, logsumexp)
        return output, logsumexp


class _Backward(_Way):
    def __call__(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        logsumexp: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self._send(query, grad_output, output, logsumexp, key, value)
        q, go, out, lse, k, v = self._own
        dq, dk, dv, _ = self._backend.backward(
            go, q, k, v, out, lse.squeeze(-1), None, self._is_causal, self._scale
        )
        self._send_home(to_token_major(dq, query.dtype), dk.to(key.dtype), dv.to(value.dtype))
        del dq, dk, dv
        results = tuple(token_major(*x.shape, like=x) for x in (query, key, value))
        self._collect(*results)
        return results
