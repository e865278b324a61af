"""Where keys and gradients of a ring arrive in the rooms of copy engines."""

from types import SimpleNamespace
from unittest import mock

import torch

from cp_dispatch.layouts import natural
from cp_dispatch.schedules.pair import Pair
from cp_dispatch.schedules.pushed_ring import _Hops


def test_views_of_a_room_are_made_once():
    """Each takes the host as long as a small op, and rooms never move."""
    box = mock.Mock(views={})
    box.at = lambda rank, offset, numel, dtype: torch.empty(numel, dtype=dtype)
    job = SimpleNamespace(geometry=natural(12, 12, (3,), False), rank=0)

    def hops(dtype=torch.float32, dim=8, batch=1) -> _Hops:
        key, value = torch.empty(batch, 2, 4, dim, dtype=dtype), torch.empty(batch, 2, 4, 8)
        return _Hops(job, box, Pair(key, value))

    found, rows = hops().room(1, 1, 4), hops().room(1, 1, 4, as_rows=True)
    assert hops().room(1, 1, 4) is found and hops().room(1, 3, 4) is found
    assert [x.shape for x in found] == [(1, 2, 4, 8)] * 2
    assert [x.shape for x in rows] == [(1, 4, 2, 8)] * 2
    others = [
        hops().room(2, 1, 4), hops().room(1, 2, 4), hops().room(1, 1, 3),
        hops(torch.bfloat16).room(1, 1, 4), hops(dim=16).room(1, 1, 4), hops(batch=2).room(1, 1, 4),
    ]  # fmt: skip
    assert len({id(x) for x in (found, rows, *others)}) == 8
