"""Gathers of one group of key heads after another, for calls in which the keys of all heads take
too much memory."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from cp_dispatch import HeadTail
from cp_dispatch.planning import decide, settle
from cp_dispatch.planning.collectives import blocks
from cp_dispatch.schedules.head_groups import groups_for
from tests.distributed.calls import only
from tests.distributed.permuted import balancers, run_permuted
from tests.distributed.recorder import Recorder
from tests.distributed.reference import Mask, Problem, check, exact, one_device, rounding
from tests.distributed.rooms import Rooms
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.test_communication import shard_bytes, traffic
from tests.distributed.threads import run_threads


def limit(monkeypatch, problem: Problem, groups: int) -> None:
    """Allow memory for the keys of one of ``groups`` groups, and no more."""
    size = shard_bytes(problem, problem.length)
    monkeypatch.setattr(settle, "LARGEST", -(-size // groups))


def judge(problem, world_size, kernel="cpu_flash", kind=None, where=None) -> None:
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, kernel)
    floors, few = rounding(problem, tensors)
    balancer = balancers(problem.length, world_size, problem.batch)[kind] if kind else None

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (world_size,))
        if balancer is not None:
            got = run_permuted(problem, balancer, mesh, schedule="gather", mask_placements=where)
        else:
            with cp_dispatch.enabled(schedule="gather"):
                got = run_sharded(problem, tensors, mesh, mask_placements=where)
        check(got, want, alone, floors=floors, few=few)

    with only(kernel):
        run_threads(world_size, rank_body)


@pytest.mark.parametrize("transport", ["rooms", "collectives"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", [None, "head-tail"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [2, 4])
def test_right(monkeypatch, groups, causal, kind, world_size, transport):
    rooms = Rooms(monkeypatch) if transport == "rooms" else None
    problem = Problem(batch=2, heads=8, key_heads=4, length=24 * world_size, dim=16, causal=causal)
    limit(monkeypatch, problem, groups)
    judge(problem, world_size, kind=kind)
    if rooms is not None:
        assert "keys" in rooms.used
        rooms.assert_all_was_read()


@pytest.mark.parametrize("mask, where", [
    (Mask("bhqk"), None), (Mask("b11k"), [Replicate()]), (Mask("1hqk", None), [Replicate()]),
    (Mask("1hqk", None, needs_grad=True), [Replicate()]),
    (Mask("11qk", None, needs_grad=True), [Shard(2)]),
], ids=str)  # fmt: skip
def test_masks_and_their_gradients(monkeypatch, mask, where):
    problem = Problem(batch=2, heads=4, key_heads=2, length=48, dim=16, mask=mask)
    limit(monkeypatch, problem, 2)
    judge(problem, 4, "math", where=where)


@pytest.mark.parametrize("transport", ["rooms", "collectives"])
@pytest.mark.parametrize("causal, mask, where", [
    (True, None, None), (False, None, None),
    (False, Mask("1hqk", None, needs_grad=True), [Replicate(), Shard(1)]),
], ids=["causal", "full", "mask"])  # fmt: skip
@pytest.mark.parametrize("heads", [4, 5, 7])
def test_heads_that_tensor_parallel_ranks_do_not_share_evenly(
    monkeypatch, heads, causal, mask, where, transport
):
    """Of 3 ranks the last one has fewer heads than the others, or none, so there are no groups of
    equal size."""
    rooms = Rooms(monkeypatch) if transport == "rooms" else None
    problem = Problem(batch=2, heads=heads, length=48, dim=16, causal=causal, mask=mask)
    tensors, kernel = problem.tensors(), "math" if mask else "cpu_flash"
    want, alone = exact(problem, tensors), one_device(problem, tensors, kernel)
    floors, few = rounding(problem, tensors)
    monkeypatch.setattr(settle, "LARGEST", 1)  # as many groups as heads
    monkeypatch.setattr(decide, "_plans", {})

    def rank_body(rank):
        mesh, places = init_device_mesh("cpu", (2, 3)), [Shard(2), Shard(1)]
        with cp_dispatch.enabled(schedule="gather"):
            inputs = [distribute(x, mesh, places) for x in tensors[:3]]
            plan = cp_dispatch.explain(*inputs, is_causal=causal)
            assert plan.head_groups == -(-heads // 3)
            got = run_sharded(problem, tensors, mesh, places, mask_placements=where)
        check(got, want, alone, floors=floors, few=few)

    with only(kernel):
        run_threads(6, rank_body)
    if rooms is not None:
        rooms.assert_all_was_read()


def test_dropout_drops_the_same_pairs(monkeypatch):
    # Ranks in threads share a generator; processes draw one seed because each has its own.
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(1234))
    problem = Problem(heads=4, key_heads=2, length=48, dim=8, causal=True, dtype=torch.float64)
    limit(monkeypatch, problem, 2)

    def rank_body(rank):
        mesh, results = init_device_mesh("cpu", (4,)), []
        for schedule in ("natural_ring", "gather"):
            inputs = [
                distribute(x, mesh, [Shard(2)]).requires_grad_() for x in problem.tensors()[:3]
            ]
            how = {"dropout_p": 0.4, "is_causal": True, "enable_gqa": True}
            with cp_dispatch.enabled(schedule=schedule):
                plan = cp_dispatch.explain(*inputs, **how)
                assert plan.head_groups == (2 if schedule == "gather" else 1)
                output = torch.nn.functional.scaled_dot_product_attention(*inputs, **how)
            grads = torch.autograd.grad(output, inputs, output.detach())
            results.append([x.full_tensor() for x in (output, *grads)])
        for ring, grouped in zip(*results, strict=True):
            torch.testing.assert_close(grouped, ring)

    run_threads(4, rank_body)


@pytest.mark.parametrize("causal, head_tail", [(True, False), (True, True), (False, False)])
def test_as_many_bytes_in_more_messages(monkeypatch, causal, head_tail):
    problem = Problem(batch=2, heads=8, key_heads=4, length=64, dim=16, causal=causal)
    layout = HeadTail(64, 4) if head_tail else None
    recorder = Recorder(monkeypatch)
    with only("cpu_flash"):
        whole = traffic(recorder, problem, 4, schedule="gather", layout=layout)
        limit(monkeypatch, problem, 4)
        decide._plans.clear()
        parts = traffic(recorder, problem, 4, schedule="gather", layout=layout)
    for rank, (one, four) in enumerate(zip(whole, parts, strict=True)):
        plan = four[2]
        assert plan.head_groups == 4 and one[2].head_groups == 1
        assert "4 groups of key heads" in str(plan)
        assert blocks(plan, rank) == blocks(one[2], rank)
        for way in (0, 1):
            assert len(four[way].collectives) == 4 * len(one[way].collectives)
            assert sum(four[way].gathered) == sum(one[way].gathered)
            assert sum(four[way].sent) == sum(one[way].sent)
            told = [x.bytes for x in plan.transfers(rank)[way] if x.collective == "all_to_all"]
            assert sorted(told) == sorted(four[way].sent)
        assert plan.extra_bytes()[1] < one[2].extra_bytes()[1]


def test_fewest_groups_that_fit():
    assert groups_for(8, 1000, 1000) == 1
    assert groups_for(8, 1001, 1000) == 2
    assert groups_for(6, 2500, 1000) == 3
    assert groups_for(5, 2500, 1000) == 5
    assert groups_for(1, 2500, 1000) == 1
