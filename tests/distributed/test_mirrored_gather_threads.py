"""Which rank computes which rows in a gather in natural order, and when it sends results to
others."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import cp_dispatch
from cp_dispatch.backends.cpu_flash import CpuFlash
from cp_dispatch.planning import decide
from cp_dispatch.schedules import SCHEDULES
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.half_swap import Swap
from cp_dispatch.schedules.key_shares import KeyShares
from cp_dispatch.schedules.mirrored_gather import shares_of, slots_before
from tests.distributed.calls import only
from tests.distributed.reference import Problem, check, exact, one_device
from tests.distributed.rooms import Rooms
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.threads import run_threads

RANKS, HALF = 4, 4
SHARD = 2 * HALF


def pairs(spans, keys, causal) -> set[tuple[int, int]]:
    rows, columns = ([span.position + i for span in x for i in range(span.length)]
                     for x in (spans, keys))  # fmt: skip
    return {(r, c) for i, r in enumerate(rows) for j, c in enumerate(columns)
            if j <= i or not causal}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("world_size", range(2, 10))
def test_every_pair_is_computed_once_and_all_have_as_many(world_size, backward):
    length, found, work = 2 * HALF * world_size, [], []
    geometry = SCHEDULES["mirrored_gather"].geometry(length, length, (world_size,), True, None)
    for rank in range(world_size):
        shares = shares_of(geometry, rank, backward)
        computed = [
            pairs(tile.query_spans, tile.key_spans, tile.causal)
            for tile in (*shares.home, *shares.late, *shares.mirrors, *shares.own)
        ]
        found += computed
        work.append(sum(map(len, computed)))
        for tile in (*shares.mirrors, *shares.own):
            # The keys of others that are seen are among those that arrive, starting with the first.
            seen = {key // (2 * HALF) for _, key in pairs(tile.query_spans, tile.key_spans, False)}
            slots = {owner for owner in range(world_size) if slots_before(geometry, rank, owner)}
            assert tile.key_start == 0 and seen <= slots
        shards = {key // (2 * HALF) for x in computed for _, key in x}
        plan = SimpleNamespace(geometry=geometry, world_size=world_size)
        assert SCHEDULES["mirrored_gather"].blocks(plan, rank) == (len(shards), world_size)
        if 2 * rank == world_size - 1:  # one tile of all its rows, and no rank to share them with
            assert len(shares.own) == 1 and not shares.mirrors
        mirror = shares_of(geometry, world_size - 1 - rank, backward)
        assert [x.query_spans for x in shares.given] == [x.query_spans for x in mirror.mirrors]
    assert len(set(work)) == 1
    assert sum(map(len, found)) == length * (length + 1) // 2
    assert set().union(*found) == {(r, c) for r in range(length) for c in range(r + 1)}


@pytest.fixture
def log(monkeypatch):
    """What each rank sends and computes in a forward and a backward, in order."""
    found = {rank: [] for rank in range(RANKS)}
    made, start = Swap.__init__, KeyShares.start
    forward, backward = CpuFlash.forward, CpuFlash.backward

    def moves(self, ring, tensors, first, count, sends, comes):
        found[ring.rank].append(("send" if sends else "", "take" if comes else ""))
        made(self, ring, tensors, first, count, sends, comes)

    def shares(self, *args):
        found[dist.get_rank()].append("dK, dV")
        start(self, *args)

    def note(query, key, causal):
        sizes = query.size(1), query.size(2), key.size(2)
        found[dist.get_rank()].append((*sizes, "causal") if causal else sizes)

    def computes(self, query, key, value, mask, causal, *args):
        note(query, key, causal)
        return forward(self, query, key, value, mask, causal, *args)

    def computes_back(self, grad, query, key, value, out, lse, mask, causal, *args):
        note(query, key, causal)
        return backward(self, grad, query, key, value, out, lse, mask, causal, *args)

    monkeypatch.setattr(Swap, "__init__", moves)
    monkeypatch.setattr(KeyShares, "start", shares)
    monkeypatch.setattr(CpuFlash, "forward", computes)
    monkeypatch.setattr(CpuFlash, "backward", computes_back)
    problem = Problem(batch=1, heads=2, length=SHARD * RANKS, dim=8, causal=True)

    def body(rank):
        mesh = init_device_mesh("cpu", (RANKS,))
        inputs = [distribute(x, mesh, [Shard(2)]).requires_grad_() for x in problem.tensors()[:3]]
        with cp_dispatch.enabled(schedule="gather"):
            output = problem.attend(*inputs)
            found[rank].append("backward")
            torch.autograd.grad(output, inputs, output.detach())

    run_threads(RANKS, body)
    return found


def test_what_moves_is_hidden_and_nobody_sends_what_is_not_computed(log):
    """Each rank still has a kernel to run when it sends."""
    send, take, both = ("send", ""), ("", "take"), ("send", "take")
    home, diagonal, full = (
        (2, SHARD, SHARD, "causal"), (2, HALF, HALF, "causal"), (2, HALF, HALF)
    )  # fmt: skip

    def gathered(shards):
        return 2, HALF, shards * SHARD

    assert {rank: x[: x.index("backward")] for rank, x in log.items()} == {
        0: [take, full, diagonal, gathered(3), send, diagonal],
        1: [both, home, gathered(2), both, gathered(1)],
        2: [both, home, gathered(1), both, gathered(2)],
        3: [send, home, take, gathered(3)],
    }
    half = (1, *home[1:])  # one of the two heads
    last = ["dK, dV", half]
    assert {rank: x[x.index("backward") + 1 :] for rank, x in log.items()} == {
        0: [take, half, gathered(3), send, *last],
        1: [both, half, gathered(2), both, gathered(1), *last],
        2: [both, half, gathered(1), both, gathered(2), *last],
        3: [send, half, take, gathered(3), *last],
    }


def test_a_swap_holds_nothing_that_nobody_reads():
    """Neither what it has sent, nor, after the release, what has arrived."""

    def body(rank):
        ring = Ring.of(dist.group.WORLD, torch.device("cpu"))
        given = torch.full((1, SHARD, 2, 8), float(rank)).transpose(1, 2)
        swap, sent = Swap(ring, (given,), HALF, HALF), weakref.ref(given)
        del given
        assert sent() is None
        (rows,) = swap.wait()
        assert rows.unique().item() == 1 - rank
        came = weakref.ref(rows._base)
        del rows
        swap.release()
        assert came() is None

    run_threads(2, body)


def test_rooms_are_shared_with_a_gather_that_balances_nothing(monkeypatch):
    """Of the same shards, of which ranks then need different ones."""
    rooms = Rooms(monkeypatch)
    monkeypatch.setattr(
        decide, "choose", lambda plan, wish, *_: replace(
            plan, schedule="gather" if wish == "auto" else "mirrored_gather"
        )
    )  # fmt: skip
    monkeypatch.setattr(decide, "_plans", {})
    problem = Problem(batch=1, heads=2, length=SHARD * RANKS, dim=8, causal=True)
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")

    def body(rank):
        mesh = init_device_mesh("cpu", (RANKS,))
        for wish in ("auto", "gather", "auto"):
            with cp_dispatch.enabled(schedule=wish):
                check(run_sharded(problem, tensors, mesh), want, alone)

    with only("cpu_flash"):
        run_threads(RANKS, body)
    rooms.assert_all_was_read()
