"""The cost model with constants for which the answers are known."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline

from cp_dispatch import ContextParallelError, HeadTail
from cp_dispatch.__main__ import main
from cp_dispatch.costs import Constants, Curve, Links, calibrate, constants_of, kind_of, predict
from cp_dispatch.costs.constants import KERNELS
from cp_dispatch.costs.model import WHOLE_WAY
from cp_dispatch.planning.planner import alternatives, of_two
from cp_dispatch.planning.settle import settle
from cp_dispatch.schedules import SCHEDULES
from tests.planning.test_settle import ring

RATE = 400e12


def line(per_second: float) -> Curve:
    """Seconds in proportion to the amount."""
    return Curve([(1.0, 1 / per_second)])


def constants(rate=RATE, bandwidth=250e9, memory=2e12, slowdown=1.0, floors=None, push=False):
    moves = {name: line(bandwidth) for name in ("all_gather", "all_to_all", "shift")}
    if push:
        moves["push"] = line(bandwidth)
    curves = {name: line(rate) for name in KERNELS}
    about = {"ranks": 4, "torch": "2", "date": "today"}
    kernels = {"flash": {dim: {32: curves} for dim in (64, 128)}}
    return Constants(
        "A GPU",
        about,
        kernels,
        moves,
        line(memory),
        line(memory),
        {"flash": floors or {}},
        slowdown,
    )


FREE = 1e30  # a speed at which nothing takes time
BALANCED = HeadTail(32768, 4)


def work(plan, backward=False) -> float:
    """FLOPs of a rank if all have the same work."""
    (batch, heads, _, dim), *_ = plan.shards
    pairs = plan.query_length * plan.key_length * (0.5 if plan.is_causal else 1)
    return 4 * batch * heads * dim * pairs / plan.world_size * (2.5 if backward else 1)


def test_curves():
    curve = Curve([(100, 1.0), (400, 2.0), (1600, 8.0)])
    assert curve(0) == 0 and curve(1) == curve(100) == 1.0
    assert curve(200) == pytest.approx(2**0.5) and curve(400) == 2.0
    assert curve(800) == pytest.approx(4.0) and curve(3200) == 16.0
    for wrong in ([], [(0, 1)], [(1, 0)], [(1, float("nan"))], [(1, float("inf"))]):
        with pytest.raises(ValueError):
            Curve(wrong)


def test_constants_are_kept(monkeypatch, tmp_path):
    known = constants(floors={"ring": {"forward": ((2, 1e-3), (4, 2e-3))}})
    assert Constants.from_json(known.to_json()) == known
    for text in ("", "{}", known.to_json().replace('"shift"', '"moves"').replace("0.5", "x")[:-9]):
        with pytest.raises(ContextParallelError, match="calibrate"):
            Constants.from_json(text)
    monkeypatch.setattr("cp_dispatch.costs.constants.FOLDER", tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ContextParallelError, match="broken.json is not .*'device'.* remove it"):
        constants_of("broken")
    monkeypatch.undo()
    assert kind_of("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert constants_of("no-such-gpu") is None
    sibling = constants_of(kind_of("NVIDIA H100 80GB HBM3"))
    assert sibling == constants_of(kind_of("NVIDIA H200")) and sibling.device == "NVIDIA H200"


def test_calibrate_wants_several_ranks(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["calibrate"]) == 2
    assert "torchrun --nproc-per-node 4 -m cp_dispatch calibrate" in capsys.readouterr().err


def test_calibrate_writes_no_tries_into_the_package(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["calibrate", "--quick"]) == 2
    assert "pass a file, -o FILE" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate"]) == 2
    assert "torch sees none" in capsys.readouterr().err


def test_calibrate_asks_at_once_whether_it_may_write(monkeypatch, capsys, tmp_path):
    """Rank 0 failed after minutes, with nothing written, and the others in their barrier."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(calibrate.dist, "init_process_group", lambda *_: pytest.fail("too late"))
    assert main(["calibrate", "--quick", "-o", str(tmp_path / "none" / "x.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_calibrate_of_a_host_wants_the_rest():
    with pytest.raises(ContextParallelError, match="there are none of cpu; run calibrate without"):
        calibrate._known(torch.device("cpu"))


def test_floors_grow_with_ranks():
    known = constants(floors={"ring": {"forward": ((2, 1e-3), (4, 2e-3))}})
    assert [known.floor("ring", "forward", n) for n in (2, 4, 8)] == pytest.approx(
        [1e-3, 2e-3, 4e-3]
    )
    assert known.floor("gather", "forward", 4) == 0
    # The median over kernels, because a single call may have been measured at a slow moment.
    other, slow = ({"ring": {"forward": ((4, x),)}} for x in (3e-3, 9e-3))
    several = dataclasses.replace(known, floors=known.floors | {"cudnn": other, "efficient": slow})
    assert several.floor("ring", "forward", 4) == 3e-3
    short = ring(tokens=8)
    assert predict(short, known).forward == pytest.approx(2e-3)
    assert predict(ring(tokens=32768), known).forward > 2e-3


def test_every_stage_of_heads_is_a_call_for_the_host():
    known = constants(floors={"ulysses": {"forward": ((4, 1e-3),), "backward": ((4, 2e-3),)}})
    fast = dataclasses.replace(known, kernels=constants(rate=FREE).kernels)
    many = settle(ring(tokens=65536, heads=(32, 32)), "ulysses", "cuda")
    stages, more = (
        len(SCHEDULES["ulysses"].messages(many, 0, backward).stages) for backward in (False, True)
    )
    assert 1 < stages <= more
    assert predict(settle(ring(tokens=8), "ulysses", "cuda"), fast).forward == pytest.approx(1e-3)
    free = dataclasses.replace(fast, moves=constants(bandwidth=FREE).moves, copy=line(FREE))
    there, back = WHOLE_WAY["forward"], WHOLE_WAY["backward"]
    assert predict(many, free) == pytest.approx((there * stages * 1e-3, back * more * 2e-3))


def test_heads_that_are_no_known_calls_take_the_host_longer():
    """Heads that are no known calls: shared key heads, uneven heads, and heads combined with
    another schedule's forward."""
    each = {"forward": ((4, 1e-3),), "backward": ((4, 2e-3),)}
    known = constants(floors={"ulysses": each, "mirrored_gather": each})
    there, back = WHOLE_WAY["forward"], WHOLE_WAY["backward"]
    short = settle(ring(tokens=8, heads=(32, 8)), "ulysses", "cuda")
    assert predict(short, known) == pytest.approx((1e-3, 2e-3))
    for heads in ((16, 1), (6, 6)):
        plan = settle(ring(tokens=8, heads=heads), "ulysses", "cuda")
        assert predict(plan, known) == pytest.approx((there * 1e-3, back * 2e-3))
    both = of_two(settle(ring(tokens=8), "gather", "cuda"), short)
    assert predict(both, known) == pytest.approx((1e-3, back * 2e-3))


@pytest.mark.parametrize("tokens, heads, stages", [
    (4096, (32, 8), (1, 1)),
    (8192, (32, 8), (1, 2)),  # in the backward, kernels may use half the room
    (4096, (32, 32), (1, 1)),  # same bytes, a fourth of the work to hide the host time
    (32768, (32, 8), (2, 4)),
    (32768, (16, 1), (1, 1)),  # no rank has several key heads
])  # fmt: skip
def test_stages_go_by_bytes_and_work(tokens, heads, stages):
    plan = settle(ring(tokens=tokens, heads=heads, ranks=2), "ulysses", "cuda")
    messages = (SCHEDULES["ulysses"].messages(plan, 0, backward) for backward in (False, True))
    assert tuple(len(x.stages) for x in messages) == stages


def test_few_heads_take_longer():
    """The time is linear in 1 / heads between the measured numbers of heads, where blocks run
    short."""
    slow = {name: line(RATE / 2) for name in KERNELS}
    known = constants()
    known.kernels["flash"][128][4] = slow
    seconds = [known.kernel("flash", 128, "forward", n, RATE) for n in (64, 32, 8, 4, 1)]
    assert seconds == pytest.approx([1, 1, 1 + 3 / 7, 2, 2])
    assert known.kernel("flash", 64, "forward", 4, RATE) == pytest.approx(1)
    plan = settle(ring(causal=False, layout=None), "ulysses", "cuda")
    assert predict(plan, known).forward > predict(plan, constants()).forward
    gathered = settle(ring(causal=False), "gather", "cuda")
    assert predict(gathered, known).forward == predict(gathered, constants()).forward


@pytest.mark.parametrize("plan", [
    ring(causal=False), ring(layout=BALANCED), ring(ranks=8, causal=False),
    ring(causal=False, heads=(16, 1)),
], ids=["full", "head-tail", "8 ranks", "one key head"])  # fmt: skip
def test_without_moves_every_balanced_schedule_takes_the_kernels_time(plan):
    free = constants(bandwidth=FREE, memory=FREE)
    found = alternatives(plan, "cuda", False, free)
    assert {"ring", "gather", "ulysses"} <= {x.op_schedule for x, _ in found}
    assert any(x.schedule == "hybrid" for x, _ in found)
    for candidate, prediction in found:
        assert prediction.forward == pytest.approx(work(plan) / RATE, rel=1e-3), candidate
        assert prediction.backward == pytest.approx(work(plan, True) / RATE, rel=1e-3)


def test_a_natural_ring_waits_for_its_last_rank():
    free = constants(bandwidth=FREE, memory=FREE)
    plan = ring()
    # W - 1/2 blocks; the mean is W / 2.
    want = work(plan) / RATE * (4 - 0.5) / 2
    assert predict(plan, free).forward == pytest.approx(want, rel=1e-3)


def test_a_gather_in_natural_order_waits_for_its_mirror():
    """Of 2 ranks the last one runs kernels for one block. The first computes 3/8 of a block for
    itself and half of one for the other rank's rows, which then have to be sent."""
    plan, free = settle(ring(ranks=2), "gather", "cuda"), constants(bandwidth=FREE, memory=FREE)
    block = work(plan) / RATE
    assert predict(plan, free).forward == pytest.approx(block)
    (_, heads, tokens, dim), *_ = plan.shards
    half = heads * tokens * dim * plan.dtype.itemsize / 2
    slow = dataclasses.replace(free, moves=free.moves | {"shift": line(half / (block / 4))})
    assert predict(plan, slow).forward == pytest.approx(block * (3 / 8 + 1 / 2 + 1 / 4))


def test_without_kernels_moves_are_what_is_left():
    """The time is bytes over bandwidth, with the plan's own count of bytes."""
    free = constants(rate=FREE, memory=FREE, bandwidth=100e9)
    for candidate, prediction in alternatives(ring(causal=False), "cuda", False, free):
        for way, seconds in enumerate(prediction):
            sizes = [
                size * 3 if name == "all_gather" else size
                for name, _, size in candidate.transfers(0)[way]
            ]
            assert seconds == pytest.approx(sum(sizes) / 100e9, rel=1e-6), candidate


def test_moves_hide_behind_kernels():
    plan = ring(causal=False)
    fast, slow = (constants(bandwidth=x, memory=FREE) for x in (300e9, 3e9))
    kernels = work(plan) / RATE
    assert predict(plan, fast).forward == pytest.approx(kernels)
    assert predict(plan, slow).forward > 2 * kernels
    # A collective that uses SMs costs time even if it is hidden. Copy engines do not.
    taking = constants(memory=FREE, slowdown=1.5)
    assert predict(plan, taking).forward > kernels
    gathered = settle(plan, "gather", "cuda")
    beside = predict(gathered, taking).forward
    pushed = predict(gathered, dataclasses.replace(taking, moves=constants(push=True).moves))
    assert pushed.forward < beside


def test_links_between_nodes_slow_what_crosses_them():
    plan = ring(ranks=32, tokens=2048, causal=False, heads=(32, 32))
    links = Links(node=8, bandwidth=50e9, latency=1e-5)
    known = constants(rate=FREE)
    near = {x.op_schedule: p for x, p in alternatives(plan, "cuda", False, known)}
    far = {x.op_schedule: p for x, p in alternatives(plan, "cuda", False, known, links)}
    assert near.keys() == far.keys()
    assert all(far[name].forward >= near[name].forward for name in near)
    assert far["ulysses"].forward > 2 * near["ulysses"].forward
    assert predict(ring(ranks=8), constants(), links) == predict(ring(ranks=8), constants())


@pytest.mark.parametrize("plan", [
    ring(backend="math"), ring(dtype=torch.float32), ring(backend="cudnn"),
    ring(shards=((1, 8, 64, 256), (1, 8, 64, 256), (1, 8, 64, 256))),
    ring(schedule="replicated_keys"),
], ids=["math", "float32", "not measured", "head dim", "no choice"])  # fmt: skip
def test_what_was_not_measured_is_not_predicted(plan):
    assert predict(plan, constants()) is None


def test_long_calls_of_few_heads_are_no_faster_than_of_many():
    """A GPU lowers its clocks in calls longer than those that were measured with few heads."""
    known = constants()
    known.kernels["flash"][128][4] = {name: Curve([(1e12, 1e12 / RATE / 2)]) for name in KERNELS}
    short, long = (known.kernel("flash", 128, "forward", 4, x) for x in (1e12, 2e12))
    assert (short, long) == pytest.approx((1e12 / RATE / 2, 2e12 / RATE))


def test_a_hybrid_that_was_not_measured_costs_the_host_both_of_its_parts():
    """Constants of two ranks contain no hybrid. On four ranks it was predicted as the fastest of
    all for short shards."""
    each = {"forward": ((2, 1e-3),), "backward": ((2, 2e-3),)}
    plan = ring(ranks=4, tokens=32)
    hybrid = settle(plan, "hybrid", "cuda")
    assert (hybrid.schedule, hybrid.across) == ("hybrid", "ring")
    known = constants(floors={"ulysses": each, "ring": each})
    there, back = 1 + WHOLE_WAY["forward"], 1 + WHOLE_WAY["backward"]
    assert predict(hybrid, known) == pytest.approx((there * 1e-3, back * 2e-3))
    known = constants(floors={"ulysses": each, "ring": each, "hybrid": each})
    assert predict(hybrid, known) == pytest.approx((1e-3, 2e-3))


def test_what_is_said_of_each_schedule():
    """Times and memory that cannot be checked here. On GPUs they were found to be about right. If
    you change the model, change them deliberately."""
    balanced, links = HeadTail(65536, 4), Links(2, 50e9, 10e-6)
    said = []
    for name, layout, push, between in (
        ("natural", None, False, None),
        ("natural, pushed", None, True, None),
        ("head-tail", balanced, False, None),
        ("head-tail, pushed", balanced, True, None),
        ("head-tail, nodes of 2", balanced, True, links),
    ):
        known = constants(300e12, 200e9, 1.5e12, slowdown=1.3, push=push)
        plan = ring(tokens=16384, layout=layout, heads=(32, 16))
        said += ["", name]
        for x, p in alternatives(plan, "cuda", False, known, between):
            forward, backward = (size / 2**20 for size in x.extra_bytes())
            said.append(
                f"{x.op_schedule:24s} {p.forward * 1e6:6.0f} {p.backward * 1e6:6.0f} us "
                f"{forward:5.0f} {backward:5.0f} MiB"
            )
    assert_expected_inline(
        "\n".join(said[1:]),
        """\
natural
ring                      52183 131833 us   774  1536 MiB
mirrored_ring             31736  79945 us  1286  2560 MiB
mirrored_gather           30114  75661 us  1542  2688 MiB
one_call                  53324 132571 us  1540  2816 MiB
ulysses                   31108  74999 us   512   642 MiB
hybrid:2:mirrored_ring    32436  79414 us  1798  1282 MiB
mirrored_gather+ulysses   30114  74999 us  1542   642 MiB

natural, pushed
ring                      51579 129663 us   774  1536 MiB
mirrored_ring             31132  77775 us  1286  2560 MiB
mirrored_gather           29410  73748 us  1542  2688 MiB
one_call                  53324 132571 us  1540  2816 MiB
ulysses                   30929  74104 us   512   642 MiB
hybrid:2:mirrored_ring    32436  79414 us  1798  1282 MiB
mirrored_gather+ulysses   29410  74104 us  1542   642 MiB

head-tail
ring                      30193  76858 us   774  1536 MiB
gather                    30014  75046 us  1158  2304 MiB
one_call                  31585  78133 us  1604  3072 MiB
ulysses                   31108  74999 us   520   706 MiB
hybrid:2:ring             30893  76327 us  1294  1090 MiB
gather+ulysses            30014  74999 us  1158   706 MiB

head-tail, pushed
ring                      29589  74688 us   774  1536 MiB
gather                    29410  73748 us  1158  2304 MiB
one_call                  31585  78133 us  1604  3072 MiB
ulysses                   30929  74104 us   520   706 MiB
hybrid:2:ring             30893  76327 us  1294  1090 MiB
gather+ulysses            29410  74104 us  1158   706 MiB

head-tail, nodes of 2
ring                      32014  84335 us   774  1536 MiB
gather                    30017  76058 us  1158  2304 MiB
one_call                  31595  81927 us  1604  3072 MiB
ulysses                   33658  77440 us   520   706 MiB
hybrid:2:ring             31500  80216 us  1294  1090 MiB
gather+ulysses            30017  77440 us  1158   706 MiB""",
    )
