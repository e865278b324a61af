"""The head-exchange schedules: a rank computes some heads over all rows, not all heads over some.

After Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509). In a group of U ranks one all-to-all
takes query, key and value from ``S/U rows x H heads`` to ``S rows x H/U heads``. Kernels then see
the whole sequence of the group, with no hops, no merge and equal work under a causal mask. Another
all-to-all takes the output back. The backward moves its inputs again, and keeps only the tensors
that autograd saves anyway.

- ``ulysses``: the group is all ranks, and a kernel call is what one device would do.
- ``hybrid``: the group is U consecutive ranks. The sequence of each share of the heads is still
  divided over W/U groups; the ranks with that share attend to it by a ring ("USP" of Fang and Zhao,
  arXiv:2405.07719)::

      W = 4, U = 2        rank 0       rank 1       rank 2       rank 3
      its rows            0            1            2            3
      computes with       rows 0 1     rows 0 1     rows 2 3     rows 2 3
                          even heads   odd heads    even heads   odd heads
      ring                even         odd          even         odd

If shards are long enough and ranks have several key heads to themselves, heads are exchanged in
stages: while one stage is computed, the next one arrives and the previous one goes back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from cp_dispatch.backends.base import repeat_heads
from cp_dispatch.layouts import Geometry, RowGeometry, Span, laid_out
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules import head_costs
from cp_dispatch.schedules.gradients import mask_gradient
from cp_dispatch.schedules.head_shares import Share, grouped
from cp_dispatch.schedules.head_team import Team
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.known_heads import KnownHeads


class Heads:
    """A schedule, see :mod:`cp_dispatch.schedules`.

    ``ranks`` consecutive ranks share heads, all of them for None; ``across``, ``"ring"`` or
    ``"mirrored_ring"`` in ``SCHEDULES``, is the schedule among the groups.
    """

    def __init__(self, ranks: int | None = None, across_name: str = "", across=None):
        self.ranks, self.across_name, self.across = ranks, across_name, across

    #: Who owns which rows, before and after the exchange.
    geometry = staticmethod(laid_out)

    def coarse(self, geometry: Geometry | RowGeometry) -> Geometry | RowGeometry:
        """The geometry across the groups, or in the only group."""
        if self.across_name == "mirrored_ring":
            length = sum(map(geometry.query_length, range(geometry.world_size)))
            shape = (geometry.world_size // self.ranks,)
            return self.across.geometry(length, length, shape, geometry.causal, None)
        return grouped(geometry, self.ranks or geometry.world_size)

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        team = Team(self, job, query, key, value, backward=False)

        def compute(stage: Sequence[Share], q: Tensor, k: Tensor, v: Tensor):
            outs, lses = [], []
            for segment, own in team.segments(stage):
                parts = _heads(q, segment.query), _heads(k, segment.key), _heads(v, segment.key)
                out, lse = team.schedule.forward(own, *parts)
                outs.append(out)
                lses.append(lse.unsqueeze(-1))
            return [[(outs, False), (lses, False)]]

        output = logsumexp = None
        for (going,) in team.run("heads", (query,), (key, value), compute):
            if output is None:  # not earlier, when most messages are in transit
                dtype = job.backend.output_dtype(query.dtype)
                output = token_major(*query.shape[:3], value.size(-1), like=query, dtype=dtype)
                dtype = job.backend.logsumexp_dtype(query.dtype)
                logsumexp = query.new_empty((*query.shape[:3], 1), dtype=dtype)
            going.wait(output, logsumexp)
        return output, logsumexp.squeeze(-1)

    def backward(
        self,
        job: Job,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        key_grad: bool,
        mask_grad: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As :func:`cp_dispatch.schedules.ring.backward`."""
        team = Team(self, job, query, key, value, backward=True)
        grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None

        def compute(stage: Sequence[Share], q, go, out, lse, k, v):
            of_query, of_key, of_value = [], [], []
            for segment, own in team.segments(stage):
                rows = (_heads(x, segment.query) for x in (go, q, out, lse))
                go_, q_, out_, lse_ = rows
                k_, v_ = _heads(k, segment.key), _heads(v, segment.key)
                groups = q_.size(1) // max(1, k_.size(1)) if team.repeats_keys else 1
                k_, v_ = repeat_heads(k_, groups), repeat_heads(v_, groups)
                dq, dk, dv, dmask = team.schedule.backward(
                    own, go_, q_, k_, v_, out_, lse_.squeeze(-1), key_grad, mask_grad
                )
                if groups > 1 and key_grad:
                    dk, dv = (
                        x.unflatten(1, (-1, groups)).sum(2, dtype=team.key_grad_dtype)
                        for x in (dk, dv)
                    )
                of_query.append(dq)
                of_key.append(dk)
                of_value.append(dv)
                if mask_grad:
                    team.own_mask(grad_mask, stage, segment).add_(dmask)
            rows, keys = [(of_query, False)], [(of_key, True), (of_value, True)]
            if not key_grad:
                return [rows]
            return [rows + keys] if team.joins else [rows, keys]

        dq = dk = dv = None
        of_rows = query, grad_output, output, logsumexp.unsqueeze(-1)
        for going in team.run("heads_backward", of_rows, (key, value), compute):
            if dq is None:
                dq = token_major(*query.shape, like=query)
                dk, dv = (
                    token_major(*x.shape, like=x, dtype=team.key_grad_dtype) if key_grad else None
                    for x in (key, value)
                )
            results = [(dq, dk, dv)] if len(going) == 1 and key_grad else [(dq,), (dk, dv)]
            for message, into in zip(going, results, strict=False):  # no gradients of keys: one
                message.wait(*into)
        if not key_grad:
            return dq, None, None, grad_mask
        if team.key_grad_dtype is not key.dtype:
            narrow = (token_major(*x.shape, like=x) for x in (key, value))
            dk, dv = (x.copy_(total) for x, total in zip(narrow, (dk, dv), strict=True))
        return dq, dk, dv, grad_mask

    def messages(self, plan, rank: int, backward: bool) -> head_costs.Messages:
        """The messages of a rank for a plan with this schedule."""
        return head_costs.Messages(self, plan, rank, backward)

    @property
    def KnownCalls(self):  # noqa: N802  as modules name theirs
        """See :mod:`cp_dispatch.schedules.known_heads`. A hybrid, which consists of two schedules,
        has no known calls."""
        return None if self.ranks else functools.partial(KnownHeads, functools.partial(Team, self))

    transfers = head_costs.transfers
    extra_bytes = head_costs.extra_bytes
    blocks = head_costs.blocks


def _heads(tensor: Tensor, heads: Span) -> Tensor:
    if heads.length == tensor.size(1):
        return tensor
    return tensor[:, heads.position : heads.position + heads.length]
