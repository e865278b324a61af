"""Calls by heads that were made before, by the few ops that are left of them.

As :mod:`known_call`, for calls of one stage where every rank has as many heads: a message with own
heads of all rows comes, one kernel computes, and a message with all heads of own rows comes home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from cp_dispatch.merge import to_token_major, token_major
from cp_dispatch.rows import copy_rows
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.known_call import Known
from cp_dispatch.schedules.mailbox import on_default_stream
from cp_dispatch.schedules.pushed_heads import are_thin, as_rows, prepared


class KnownHeads(Known):
    """Of :class:`~cp_dispatch.schedules.heads.Heads`; ``team_of(job, query, key, value, backward)``
    says how its calls go."""

    def __init__(self, team_of: Callable, job: Job):
        super().__init__(job)
        self._team_of = team_of

    def learn_forward(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """See :class:`~cp_dispatch.schedules.known_call.Known`."""
        self._learn(0, _Forward, query, key, value)

    def learn_backward(self, *tensors: Tensor) -> None:
        """See :class:`~cp_dispatch.schedules.known_call.Known`; of a backward with gradients of
        keys."""
        self._learn(1, _Backward, *tensors)

    def _learn(self, index: int, kind: type[_Way], *tensors: Tensor) -> None:
        if not self._may_learn(index, tensors):
            return
        way = None
        if self._are_plain([x for x in tensors if x.dim() == 4]):
            way = kind(self._job, self._team_of, *tensors)
        if way is not None and not way.is_all:
            way = None
        self._keep(index, tensors, way, None if way is None else way.box)


class _Way:
    """What a forward and a backward have in common. ``is_all`` tells whether it is all of a call,
    in one room.

    Args:
        team: see :class:`KnownHeads`.
        outgoing: ``(tensor, whether it has the keys' heads)`` of what goes out.
        home: ``(dtype, dim, whether it has the keys' heads)`` of what comes home.
    """

    def __init__(self, job: Job, team, outgoing, home):
        self._backend, self._scale = job.backend, job.scale
        there = [(x.dtype, x.size(3), of_key) for x, of_key in outgoing]
        found = team.only_messages(there, home)
        self.is_all = found is not None and found[1][0] is found[2][0] and found[2][1].is_even
        if not self.is_all:
            return
        self._is_causal, (self.box, self._out, self._parts), (_, self._home, _) = found
        thin = are_thin(self._parts, [x for x, _ in outgoing])
        whole = (False,) * len(home)
        self._numbers, self._own = self._out.numbers(self.box, thin), self._out.own(self.box)
        self._numbers_home, self._whole = self._home.numbers(self.box, whole), whole
        self._came = self._home.own(self.box)
        self._here = on_default_stream(outgoing[0][0].device)

    @property
    def is_current(self) -> bool:
        """Whether the room still is one."""
        return self.box.is_current

    def _send(self, *tensors: Tensor) -> None:
        """Until the heads of this rank are there."""
        self._push(self._out.sources(*prepared(self._parts, tensors)), self._numbers)

    def _bring_home(self, pieces: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Own heads of all rows, ``(B, heads, S, dim)`` or ``(B, heads, S)``; into own rows. The
        push waits until what came out has been read."""
        rows = [x if x.dim() == 3 else as_rows(x) for x in pieces]
        self._push(self._home.sources(rows, self._whole), self._numbers_home)
        targets = [x.unflatten(1, (x.size(1) // y.size(2), -1)).transpose(0, 1)
                   for x, y in zip(results, self._came, strict=True)]  # fmt: skip
        copy_rows(targets, self._came, None, [2] * len(targets), False)
        if not self._here:
            self.box.release()

    def _push(self, sources: list[Tensor], numbers: list[int]) -> None:
        if self._here:
            self.box.push_rows_here(sources, numbers)
        else:
            self.box.push_rows(sources, numbers, opens=True, then_wait=True)


class _Forward(_Way):
    def __init__(self, job: Job, team_of: Callable, query: Tensor, key: Tensor, value: Tensor):
        self._dtype = job.backend.output_dtype(query.dtype)
        self._lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        outgoing = (query, False), (key, True), (value, True)
        home = (self._dtype, value.size(3), False), (self._lse_dtype, 1, False)
        super().__init__(job, team_of(job, query, key, value, False), outgoing, home)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._send(query, key, value)
        out, lse = self._backend.forward(*self._own, None, self._is_causal, self._scale)
        pieces = to_token_major(out, self._dtype), lse.to(self._lse_dtype).contiguous()
        output = token_major(*query.shape[:3], value.size(3), like=query, dtype=self._dtype)
        logsumexp = query.new_empty(query.shape[:3], dtype=self._lse_dtype)
        self._bring_home(pieces, (output, logsumexp.unsqueeze(-1)))
        return output, logsumexp


class _Backward(_Way):
    def __init__(
        self, job: Job, team_of: Callable, grad_output: Tensor, query: Tensor, key: Tensor,
        value: Tensor, output: Tensor, logsumexp: Tensor,
    ):  # fmt: skip
        rows = query, grad_output, output, logsumexp.unsqueeze(-1)
        outgoing = *((x, False) for x in rows), (key, True), (value, True)
        home = [(x.dtype, x.size(3), x is not query) for x in (query, key, value)]
        super().__init__(job, team_of(job, query, key, value, True), outgoing, home)

    def __call__(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        logsumexp: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self._send(query, grad_output, output, logsumexp.unsqueeze(-1), key, value)
        q, go, out, lse, k, v = self._own
        dq, dk, dv, _ = self._backend.backward(
            go, q, k, v, out, lse.squeeze(-1), None, self._is_causal, self._scale
        )
        pieces = to_token_major(dq, query.dtype), dk.to(key.dtype), dv.to(value.dtype)
        results = [token_major(*x.shape, like=x) for x in (query, key, value)]
        self._bring_home(pieces, results)
        return tuple(results)
