"""What the planner makes of predictions, and how ``explain()`` shows them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from cp_dispatch import HeadTail, enabled, explain
from cp_dispatch.costs import constants_of
from cp_dispatch.planning import planner
from cp_dispatch.planning.planner import alternatives, choose, with_predictions
from cp_dispatch.planning.settle import settle
from tests.costs.test_costs import BALANCED, FREE, constants, line
from tests.planning.test_settle import ring
from tests.ranks import fake_ranks, one_rank
from tests.test_plan import gqa


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("plan", [
    ring(), ring(layout=BALANCED), ring(causal=False), ring(tokens=1024), ring(tokens=65536),
    ring(heads=(8, 8)), ring(ranks=64, tokens=512), ring(tokens=7), ring(heads=(2, 1)),
])  # fmt: skip
def test_auto_takes_the_least_predicted_time(monkeypatch, plan, training):
    """Among schedules within half a percent, it selects the one with the fewest moves. (Heads that
    take a backward because of its memory have a separate test.)"""
    known = constants(slowdown=1.1)
    monkeypatch.setattr(planner, "SMALLER", 0.0)
    got = choose(plan, "auto", "cuda", False, False, known, training)
    assert got == choose(plan, "auto", "cuda", False, False, known, training)
    found = {
        x.op_schedule: (p.forward + training * p.backward, planner.FEWEST_MOVES.index(x.schedule))
        for x, p in alternatives(plan, "cuda", False, known)
        if planner._is_affordable(x, settle(plan, "ring", "cuda"), "cuda")
        and (training or not x.backward_schedule)
    }
    fastest = min(found.values())[0]
    alike = {name: order for name, (time, order) in found.items() if time <= 1.005 * fastest}
    assert alike[got.op_schedule] == min(alike.values())
    assert "predicted" in got.reasons[-1] and ("backward" in got.reasons[-1]) == training
    assert "constants of A GPU" in got.reasons[-1]
    assert ("fewest moves" in got.reasons[-1]) == (len(alike) > 1)


def test_a_forward_and_a_backward_of_two_schedules(monkeypatch):
    """Each takes the time that it takes alone. Without a backward there is nothing to choose."""
    known, plan = constants_of("nvidia-h200"), ring(heads=(32, 8), tokens=8192)
    found = {x.op_schedule: (x, p) for x, p in alternatives(plan, "cuda", False, known)}
    two, prediction = found["mirrored_gather+ulysses"]
    assert prediction.forward == found["mirrored_gather"][1].forward
    assert prediction.backward == found["ulysses"][1].backward
    assert prediction.backward < found["mirrored_gather"][1].backward
    assert choose(plan, "auto", "cuda", False, False, known, True).op_schedule == two.op_schedule
    assert choose(plan, "auto", "cuda", False, False, known, False).backward_schedule == ""
    monkeypatch.setattr(planner, "constants_here", lambda device: known)
    shown = planner.with_predictions(two, "cuda").predictions
    assert shown == tuple((name, *times) for name, (_, times) in found.items())
    permuted = ring(heads=(32, 8), tokens=8192, layout=HeadTail(32768, 4))
    found = [x.op_schedule for x, _ in alternatives(permuted, "cuda", False, known)]
    assert [x for x in found if "+" in x] == ["gather+ulysses"]


@pytest.mark.parametrize("more, taken", [(0.019, "mirrored_gather+ulysses"), (0.021, "")])
def test_heads_take_a_backward_that_is_little_longer_for_its_memory(monkeypatch, more, taken):
    plan, known = ring(heads=(32, 8), tokens=8192), constants()
    times = {"mirrored_gather": 1.0, "mirrored_gather+ulysses": 1.0 + 2 * more}
    found = [
        (x, p._replace(forward=1.0, backward=times[x.op_schedule]))
        for x, p in alternatives(plan, "cuda", False, known)
        if x.op_schedule in times
    ]
    monkeypatch.setattr(planner, "alternatives", lambda *_: found)
    got = choose(plan, "auto", "cuda", False, False, known, True)
    assert got.op_schedule == (taken or "mirrored_gather")
    assert ("less memory" in got.reasons[-1]) == bool(taken)


def test_of_two_that_are_alike_the_smaller():
    free, plan = constants(bandwidth=FREE, memory=FREE), ring(heads=(32, 8), tokens=8192)
    found = {x.op_schedule: (x, p) for x, p in alternatives(plan, "cuda", False, free)}
    one, two = (found[name] for name in ("mirrored_gather", "mirrored_gather+ulysses"))
    assert one[1] == pytest.approx(two[1]) and max(one[0].extra_bytes()) > max(two[0].extra_bytes())
    assert choose(plan, "auto", "cuda", False, False, free, True).op_schedule == two[0].op_schedule


def test_auto_does_not_take_more_memory_than_a_gather_may():
    """If all moves are free except a ring's, the gather would win."""
    known = constants(bandwidth=FREE, memory=FREE)
    known.moves["shift"] = line(1e9)
    for tokens, schedule in ((65536, "gather"), (65536 * 2, "ulysses")):
        plan = ring(tokens=tokens, layout=HeadTail(tokens * 4, 4), heads=(32, 8))
        got = choose(plan, "auto", "cuda", False, False, known, True)
        assert "predicted" in got.reasons[-1], "others hold no more"
        held = max(got.extra_bytes()) - max(settle(plan, "ring", "cuda").extra_bytes())
        assert held <= 2**30
        if schedule == "gather":
            assert got.schedule in ("gather", "ulysses")
        else:
            assert got.schedule != "gather"


def test_without_constants_or_with_a_mask_todays_rules_hold():
    for plan in (ring(), ring(causal=False), ring(tokens=131072, causal=False)):
        for known, masked in ((None, False), (constants(), True)):
            got = choose(plan, "auto", "cuda", masked, False, known, True)
            assert got == settle(plan, "auto", "cuda", masked)
    # Kernels that were not measured, and lengths that are not ints, such as symbolic ones.
    for plan in (ring(dtype=torch.float32), ring(query_length=32768.0), ring(key_length=32768.0)):
        got = choose(plan, "auto", "cuda", False, False, constants(), True)
        assert got == settle(plan, "auto", "cuda")
    wish = choose(ring(), "mirrored_ring", "cuda", False, False, constants(), True)
    assert wish == settle(ring(), "mirrored_ring", "cuda")
    assert planner.constants_here("cpu") is None


def test_explain_shows_every_schedules_time(monkeypatch):
    known = constants()
    known.kernels["cpu_flash"] = known.kernels["flash"]
    monkeypatch.setattr(planner, "constants_here", lambda device: known)
    with fake_ranks(4) as mesh, enabled(schedule="ulysses"):
        tensors = [x.bfloat16() for x in gqa(mesh, (Shard(2),), length=16384)]
        plan = explain(*tensors, is_causal=True, enable_gqa=True)
    with one_rank() as mesh, enabled():  # one rank has nothing to choose from
        alone = explain(*(x.bfloat16() for x in gqa(mesh)), is_causal=True, enable_gqa=True)
    assert alone.predictions == ()
    names = {name for name, *_ in plan.predictions}
    assert {"ring", "mirrored_ring", "mirrored_gather", "ulysses"} < names
    seconds = {name: forward for name, forward, _ in plan.predictions}
    lines = [line for line in str(plan).splitlines() if line.endswith("<- this")]
    assert len(lines) == 1 and lines[0].split()[0] == "ulysses"
    assert f"{seconds['ulysses'] * 1e3:.3f}" in lines[0]


@pytest.mark.parametrize("wish", ["hybrid:2", "hybrid:4", "hybrid"])
def test_explain_shows_the_time_of_a_hybrid_of_chosen_groups(monkeypatch, wish):
    monkeypatch.setattr(planner, "constants_here", lambda device: constants())
    plan = with_predictions(settle(ring(ranks=8), wish, "cuda"), "cuda")
    lines = [line.split()[0] for line in str(plan).splitlines() if line.endswith("<- this")]
    assert lines == [plan.op_schedule] and plan.schedule == "hybrid"


@pytest.mark.parametrize("schedule", ["ring", "replicated_keys", "replicated_queries", "local"])
def test_explain_shows_no_times_of_schedules_that_do_not_apply(monkeypatch, schedule):
    monkeypatch.setattr(planner, "constants_here", lambda device: constants())
    plan = with_predictions(ring(causal=False, schedule=schedule), "cuda")
    assert bool(plan.predictions) == (schedule == "ring")
