"""A forward by one schedule and its backward by another, as "auto" selects on GPUs."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import cp_dispatch
from cp_dispatch import HeadTail
from cp_dispatch.planning import decide
from cp_dispatch.planning.planner import of_two
from cp_dispatch.planning.settle import settle
from tests.distributed.calls import only
from tests.distributed.permuted import run_permuted
from tests.distributed.recorder import Recorder
from tests.distributed.reference import Problem, check, exact, one_device
from tests.distributed.rooms import Rooms
from tests.distributed.sharded import SEQUENCE, distribute
from tests.distributed.threads import run_threads


@pytest.fixture(autouse=True)
def two(monkeypatch):
    """Select two schedules, for which "auto" needs constants of a GPU."""

    def choose(plan, *_):
        return of_two(*(settle(plan, wish, "cuda") for wish in ("gather", "ulysses")))

    monkeypatch.setattr(decide, "choose", choose)
    monkeypatch.setattr(decide, "_plans", {})


class Case:
    def __init__(self, world_size: int, heads: int = 4, key_heads: int = 2, **how):
        self.problem = Problem(
            batch=2, heads=heads, key_heads=key_heads, length=16 * world_size, dim=16,
            **{"causal": True} | how,
        )  # fmt: skip
        self.tensors = self.problem.tensors()
        self.want = exact(self.problem, self.tensors)
        self.alone = one_device(self.problem, self.tensors, "cpu_flash")

    def inputs(self, mesh, needs=(True,) * 3):
        *inputs, grad = (distribute(x, mesh, SEQUENCE) for x in self.tensors)
        return [x.requires_grad_(n) for x, n in zip(inputs, needs, strict=True)], grad

    def run(self, world_size: int, body) -> list:
        def on_rank(rank: int):
            return body(init_device_mesh("cpu", (world_size,)))

        with only("cpu_flash"), cp_dispatch.enabled():
            return run_threads(world_size, on_rank)


@pytest.mark.parametrize("rooms", [False, True], ids=["collectives", "rooms"])
@pytest.mark.parametrize("heads, key_heads", [(4, 2), (8, 1), (5, 5)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_again_and_again(monkeypatch, world_size, heads, key_heads, rooms):
    """Also without the op, from the second call on, and for some gradients alone."""
    found = Rooms(monkeypatch) if rooms else None
    case = Case(world_size, heads, key_heads)

    def body(mesh):
        for needs in ((True,) * 3, (True,) * 3, (True, False, False), (False, True, True)) * 2:
            inputs, grad = case.inputs(mesh, needs)
            output = case.problem.attend(*inputs)
            grads = torch.autograd.grad(output, [x for x in inputs if x.requires_grad], grad)
            chosen = [0, *(i + 1 for i, n in enumerate(needs) if n)]
            check(
                [x.full_tensor().detach() for x in (output, *grads)],
                [case.want[i] for i in chosen],
                [case.alone[i] for i in chosen],
            )

    case.run(world_size, body)
    if found is not None:
        found.assert_all_was_read()
        assert found.used == {"keys", "halves"}, "each is for both schedules"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rooms", [False, True], ids=["collectives", "rooms"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_in_head_tail_order(monkeypatch, world_size, rooms, causal):
    """Also without a mask, when there is no mirror rank either."""
    found = Rooms(monkeypatch) if rooms else None
    case = Case(world_size, causal=causal)
    balancer = HeadTail(16 * world_size, world_size)

    def body(mesh):
        for _ in range(3):
            check(run_permuted(case.problem, balancer, mesh), case.want, case.alone)
        with cp_dispatch.enabled(layout=balancer):
            inputs, _ = case.inputs(mesh)
            return cp_dispatch.explain(*inputs, is_causal=causal, enable_gqa=True).op_schedule

    assert set(case.run(world_size, body)) == {"gather+ulysses"}
    if found is not None:
        found.assert_all_is_quiet()
        assert "keys" in found.used


def test_each_moves_what_the_plan_says(monkeypatch):
    recorder, case = Recorder(monkeypatch), Case(4)

    def body(mesh):
        inputs, grad = case.inputs(mesh)
        plan = cp_dispatch.explain(*inputs, is_causal=True, enable_gqa=True)
        with recorder.record() as forward:
            output = case.problem.attend(*inputs)
        with recorder.record() as backward:
            torch.autograd.grad(output, inputs, grad)
        return mesh.get_local_rank(), plan, forward, backward

    for rank, plan, forward, backward in case.run(4, body):
        assert plan.op_schedule == "mirrored_gather+ulysses"
        there, back = plan.transfers(rank)
        for record, moves in ((forward, there), (backward, back)):
            sent = [x.bytes for x in moves if x.collective == "all_to_all"]
            assert sorted(record.sent) == sorted(sent)
        assert forward.gathered and not backward.gathered
        one, other = plan.of_forward, plan.of_backward
        assert (one.schedule, other.schedule) == ("mirrored_gather", "ulysses")
        assert plan.extra_bytes() == (one.extra_bytes()[0], other.extra_bytes()[1])
        assert "\n  backward: ulysses\n" in str(plan)


def test_checkpoints_and_layers():
    """Attention of attention, recomputed: each backward gets what its own forward saved."""
    case = Case(4)

    def body(mesh):
        inputs, grad = case.inputs(mesh)
        found = []
        for checkpointed in (False, True):

            def layers(query, key, value):
                for _ in range(2):
                    query = case.problem.attend(query, key, value)
                return query

            if checkpointed:
                output = torch.utils.checkpoint.checkpoint(layers, *inputs, use_reentrant=False)
            else:
                output = layers(*inputs)
            grads = torch.autograd.grad(output, inputs, grad)
            found.append([x.to_local().detach() for x in (output, *grads)])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)

    case.run(4, body)
