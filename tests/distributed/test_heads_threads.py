"""Heads by all-to-all, alone and with a ring across groups, against float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.layouts import Span, natural
from cp_dispatch.schedules import head_shares
from cp_dispatch.schedules.head_moves import Moves, runs_of
from cp_dispatch.schedules.wire import Part
from tests.distributed.calls import in_stages, only
from tests.distributed.permuted import balancers, run_permuted
from tests.distributed.reference import Mask, Problem, check, exact, one_device, rounding
from tests.distributed.rooms import Rooms
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.threads import run_threads

KERNELS = ("cpu_flash", "math")
# Query and key heads: grouped, one for all, groups that ranks split, and unequal numbers per rank.
HEADS = [(4, 2), (4, 1), (12, 3), (5, 5)]


def planned(problem, tensors, mesh, placements=None):
    inputs = [distribute(x, mesh, placements or [Shard(2)]) for x in tensors[:3]]
    return cp_dispatch.explain(*inputs, is_causal=problem.causal, enable_gqa=problem.grouped)


def judge(
    problem, world_size, schedule, kernel=None, shape=None, placements=None, granted=None,
    balancer=None, **how,
):  # fmt: skip
    """Check that the result is exact, by the requested schedule (or ``granted``). Returns the
    plan."""
    tensors = problem.tensors()
    want = exact(problem, tensors)
    alone = one_device(problem, tensors, kernel or "math")
    floors, few = rounding(problem, tensors)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", shape or (world_size,))
        if balancer is not None:
            got = run_permuted(
                problem, balancer, mesh, placements=placements, schedule=schedule, **how
            )
        else:
            got = run_sharded(problem, tensors, mesh, placements, **how)
        check(got, want, alone, floors=floors, few=few)
        return planned(problem, tensors, mesh, placements)

    with cp_dispatch.enabled(schedule=schedule, layout=balancer), only(kernel):
        plan = run_threads(world_size, rank_body)[0]
    assert plan.schedule == (granted or schedule.split(":")[0]), plan
    return plan


@pytest.fixture
def stages(monkeypatch):
    """As many stages as the number of heads allows, however short the shards are."""
    in_stages(monkeypatch, 4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ulysses(heads, world_size, kernel, causal):
    heads, key_heads = heads
    problem = Problem(batch=2, heads=heads, key_heads=key_heads, length=61, dim=16, causal=causal)
    judge(problem, world_size, "ulysses", kernel)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads, world_size, ranks, length", [
    ((4, 2), 4, 2, 64), ((4, 2), 4, 2, 61), ((4, 1), 6, 3, 61), ((6, 3), 6, 3, 48),
    ((12, 3), 4, 2, 61), ((5, 5), 4, 2, 60), ((8, 2), 8, 4, 64),
])  # fmt: skip
def test_hybrid(heads, world_size, ranks, length, causal):
    heads, key_heads = heads
    problem = Problem(
        batch=2, heads=heads, key_heads=key_heads, length=length, dim=16, causal=causal
    )
    plan = judge(problem, world_size, f"hybrid:{ranks}", "cpu_flash")
    assert plan.head_ranks == ranks and plan.op_schedule.startswith(f"hybrid:{ranks}:")


@pytest.mark.parametrize("world_size", [2, 4])  # 104 is twice a multiple of 4 groups
def test_hybrid_balances_the_ring_across_groups(monkeypatch, world_size):
    monkeypatch.setattr("cp_dispatch.planning.settle.estimates", lambda *_: (1.0, 0.0))
    # A shape that no other test uses, because plans are cached.
    problem = Problem(heads=4, key_heads=2, length=104, dim=24, causal=True)
    plan = judge(problem, 2 * world_size, "hybrid:2", "cpu_flash")
    assert plan.across == "mirrored_ring"


PUSHED = {
    "natural": {"batch": 2},
    "uneven": {"length": 61, "batch": 3},
    "full": {"causal": False},
    "head-tail": {"kind": "head-tail", "length": 61},
    "documents of each row": {"kind": "documents of each row", "batch": 2},
    "full documents of each row": {
        "kind": "documents of each row", "batch": 2, "causal": False,
    },
    "blocks": {"kind": "blocks"},
    "shared key heads": {"heads": 8, "key_heads": 1, "kind": "head-tail"},
    "a group cut in two": {"heads": 12, "key_heads": 3, "batch": 2},
    "wide rows": {"dim": 128, "heads": 8, "key_heads": 8},
    "other lengths": {"length": 61, "key_length": 40, "batch": 2},
    "few rows": {"length": 6},
    "many stages": {"heads": 32, "key_heads": 16},
    "three stages": {"heads": 12, "key_heads": 12, "batch": 1, "dim": 8},
    "bfloat16": {"dtype": torch.bfloat16, "key_heads": 2, "kind": "head-tail", "length": 256},
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("case", PUSHED)
def test_copy_engines_put_heads_where_kernels_read_them(monkeypatch, case, staged, kernel):
    """With rooms that ranks write to. Each is read before it is written again."""
    rooms = Rooms(monkeypatch)
    if staged:
        in_stages(monkeypatch, 4)
    fields = {"heads": 16, "key_heads": 8, "length": 64, "dim": 16, "causal": True} | PUSHED[case]
    balancer = balancers(fields["length"], 4, fields.get("batch", 1)).get(fields.pop("kind", ""))
    if kernel == "cpu_flash" and "key_length" in fields:
        kernel = "math"
    judge(Problem(**fields), 4, "ulysses", kernel, balancer=balancer)
    names = {"keys"}
    stages = head_shares.most_stages(fields["heads"], fields["key_heads"], 4, 4 if staged else 1)
    if "key_length" in fields:
        names |= {"heads 10", "heads 11"} if stages > 1 else {"heads 10"}
    if stages > 1:
        names |= {"heads 01"}
    if "key_length" in fields or fields["key_heads"] % 4:  # dK and dV in a separate message
        names |= {"halves", "heads home 11"} if stages > 1 else {"halves"}
    if stages > 2:  # one is returned while another arrives
        names |= {"heads home 00", "heads home 01"}
    assert rooms.used == names


def test_rows_in_many_places_are_not_pushed(monkeypatch):
    """Each copy costs the host time. If each of 20 batch rows has its own layout, there are too
    many copies."""
    rooms = Rooms(monkeypatch)
    problem = Problem(batch=20, heads=4, length=32, dim=8, causal=True)
    judge(problem, 2, "ulysses", "cpu_flash")
    assert not rooms.used


def test_copy_engines_leave_the_order_that_masks_lie_in(monkeypatch):
    """The order of the shards, if nothing is masked by position."""
    rooms = Rooms(monkeypatch)
    problem = Problem(batch=2, heads=4, length=64, dim=16, mask=Mask("1hqk", None, needs_grad=True))
    layout, where = HeadTail(64, 4), [Replicate()]
    judge(problem, 4, "ulysses", "math", balancer=layout, mask_placements=where)
    assert rooms.used


def test_copy_engines_bring_nothing_to_ranks_without_heads(monkeypatch):
    rooms = Rooms(monkeypatch)
    problem = Problem(heads=4, length=10, causal=True)
    judge(problem, 6, "ulysses", "math", (2, 3), [Shard(2), Shard(1)])
    assert rooms.used


def test_no_two_ranks_push_to_one_at_a_time():
    runs = runs_of(natural(12, 12, (3,), True), False, 0, 2)
    heads = tuple(Span(rank, 1) for rank in range(3))
    parts = Part(torch.float32, 8, heads), Part(torch.float32, 1, heads)
    box = mock.Mock(address=lambda peer, offset: peer, numbers=lambda moves, opens: moves[6::8])
    for outward in (True, False):
        found = [
            Moves(rank, outward, 2, (4, 4, 4), runs, parts).numbers(box, (False, False))
            for rank in range(3)
        ]
        assert all(len(set(peers)) == 3 for peers in zip(*found, strict=True))
        assert [peers[-1] for peers in found] == [0, 1, 2], "what stays comes last"


@pytest.mark.parametrize("dtype, kernel", [
    (torch.bfloat16, "cpu_flash"), (torch.bfloat16, "math"), (torch.float64, "cpu_flash"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_other_dtypes(heads, schedule, dtype, kernel):
    """Gradients of keys that several ranks share are rounded once."""
    heads, key_heads = heads
    length = 64 if dtype is torch.float64 else 256
    problem = Problem(heads=heads, key_heads=key_heads, length=length, causal=True, dtype=dtype)
    judge(problem, 4, schedule, kernel)


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2"])
@pytest.mark.parametrize("kind", ["natural", "head-tail", "documents of each row"])
@pytest.mark.parametrize("causal", [True, False])
def test_stages_overlap(stages, kind, schedule, causal):
    problem = Problem(batch=2, heads=16, key_heads=8, length=64, dim=16, causal=causal)
    balancer = balancers(64, 4, 2).get(kind)
    judge(problem, 4, schedule, "cpu_flash", balancer=balancer)


@pytest.mark.parametrize("lengths", [(7, 48), (48, 12), (61, 64), (3, 3), (64, 32)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2"])
def test_different_lengths(schedule, lengths, causal):
    length, key_length = lengths
    problem = Problem(heads=4, key_heads=2, length=length, key_length=key_length, causal=causal)
    judge(problem, 4, schedule, "math")


@pytest.mark.parametrize("schedule, balancer", [
    ("ulysses", BlockBalanced([1, 7, 6, 9, 3, 2], 2, 4)),  # blocks 3 4 5 | 0 1 2
    ("ulysses", BlockBalanced([8.1, 5.4, 9.6, 6.0, 5.9, 4.4], 2, 4, near=True)),  # 0 1 3 | 2 4 5
    ("hybrid:2", HeadTail(7, 4)),
], ids=["halves", "near", "head-tail of 7"])  # fmt: skip
def test_orders_that_are_their_own_inverse(schedule, balancer):
    """Such orders must not be taken for natural order."""
    there, back = balancer.indices, balancer.inverse
    assert torch.equal(there, back) or schedule != "ulysses", there
    assert not torch.equal(there[0], torch.arange(there.size(1)))
    length = there.size(1)
    problem = Problem(batch=2, heads=4, key_heads=4, length=length, dim=16, causal=True)
    judge(problem, balancer.world_size, schedule, "math", balancer=balancer)


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2"])
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False,) * 3])
def test_needs(schedule, needs):
    judge(Problem(causal=True, length=48, heads=4), 4, schedule, "cpu_flash", needs=needs)


def test_without_gradients_of_keys_that_ranks_share_in_16_bits():
    """The kernels get a separate key head for every query head."""
    problem = Problem(length=64, heads=8, key_heads=1, dim=8, dtype=torch.bfloat16)
    judge(problem, 2, "ulysses", "cpu_flash", needs=(True, False, False))


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2"])
@pytest.mark.parametrize("mask", [
    Mask("b11k"), Mask("bh1k", None), Mask("1h1k", None, needs_grad=True),
    Mask("1k", None, needs_grad=True), Mask("1111", None),
], ids=str)  # fmt: skip
def test_masks_of_keys(schedule, mask):
    problem = Problem(batch=2, heads=6, key_heads=6, length=50, dim=16, mask=mask)
    where = [Replicate()]
    judge(problem, 4, schedule, "math", mask_placements=where)


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2"])
@pytest.mark.parametrize("mask", [
    Mask("1hqk", blind=True), Mask("bhqk", None), Mask("1hqk", None, needs_grad=True),
    Mask("11q1", None, needs_grad=True), Mask("b11k", None),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["head-tail", "documents of each row"])
def test_masks_of_layouts(kind, schedule, mask):
    """Whole masks are in true positions. Masks that are sharded over keys are in the order of the
    keys."""
    problem = Problem(batch=2, heads=4, length=64, dim=16, mask=mask)
    balancer = balancers(64, 4, 2)[kind]
    judge(problem, 4, schedule, "math", balancer=balancer, mask_placements=[Replicate()])
    if mask.shape[3] != "1" and mask.shape[0] == "b":
        judge(problem, 4, schedule, "math", balancer=balancer, mask_placements=[Shard(3)])


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2"])
def test_a_mask_that_differs_by_row_is_a_rings(schedule):
    """Each rank would have to hold all rows of the mask."""
    problem = Problem(batch=2, heads=4, length=50, dim=16, mask=Mask("b1qk"))
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "math")

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (4,))
        inputs = [distribute(x, mesh, [Shard(2)]) for x in tensors[:3]]
        plan = cp_dispatch.explain(*inputs, problem.attn_mask())
        check(run_sharded(problem, tensors, mesh), want, alone)
        return plan

    with cp_dispatch.enabled(schedule=schedule), only("math"):
        for plan in run_threads(4, rank_body):
            assert plan.schedule == "ring" and "differs by row" in plan.reasons[-1]


@pytest.mark.parametrize("schedule, granted", [
    ("ulysses", "ring"), ("hybrid:3", "ring"), ("hybrid:4", "ring"), ("hybrid:1", "ring"),
    ("hybrid", "hybrid"), ("hybrid:2", "hybrid"),
])  # fmt: skip
def test_what_does_not_fit_is_a_ring_and_says_why(schedule, granted):
    """Two heads for four ranks."""
    plan = judge(Problem(heads=2, length=48), 4, schedule, "cpu_flash", granted=granted)
    if granted == "ring" and schedule != "hybrid:1":
        (why,) = (reason for reason in plan.reasons if "heads are not exchanged: " in reason)
        assert any(word in why for word in ("2 query heads", "divided into groups of 3"))


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid"])
@pytest.mark.parametrize("shape, placements", [
    ((2, 2), [Shard(0), Shard(2)]), ((2, 2), [Shard(2), Shard(1)]), ((2, 2), [Shard(2), Shard(2)]),
    ((3, 2), [Shard(2), Shard(2)]), ((2, 4), [Replicate(), Shard(2)]),
    ((2, 3), [Shard(2), Shard(1)]),
], ids=str)  # fmt: skip
def test_meshes(shape, placements, schedule):
    """With a mesh dim for data, for heads or for the sequence as well. 7 heads over 3 ranks leave
    one rank a single head."""
    problem = Problem(batch=4, heads=7, length=61, causal=True)
    ranks = [n for n, p in zip(shape, placements, strict=True) if p == Shard(2)]
    # Two ranks do not make two groups of more than one rank.
    granted = "ulysses" if ranks == [2] else None
    size = torch.Size(shape).numel()
    plan = judge(problem, size, schedule, "cpu_flash", shape, placements, granted)
    if plan.schedule == "hybrid":
        assert plan.head_ranks == (ranks[-1] if len(ranks) == 2 else 2)


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("ranks", [(2, 2), (1, 2)], ids=str)
def test_layouts_of_batch_rows_that_other_ranks_hold(monkeypatch, ranks, pushed):
    """Or that this rank holds, with rows in as many pieces as the documents make."""
    rooms = Rooms(monkeypatch) if pushed else None
    problem = Problem(batch=4, heads=4, length=24, dim=128, causal=True)
    rows = PerDocumentHeadTail([[24], [20, 4], [7, 17], [9, 15]], 2)
    where = [Shard(0), Shard(2)]
    judge(problem, torch.Size(ranks).numel(), "ulysses", "cpu_flash", ranks, where, balancer=rows)
    assert rooms is None or rooms.used


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2", "gather"])
@pytest.mark.parametrize("kind", ["natural", "head-tail"])
def test_dropout_drops_the_same_pairs(monkeypatch, kind, schedule):
    if schedule == "gather":
        Rooms(monkeypatch)
    # Ranks in threads share a generator; processes draw one seed because each has its own.
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(1234))
    problem = Problem(heads=4, key_heads=2, length=48, dim=8, causal=True, dtype=torch.float64)
    layout = HeadTail(48, 4) if kind == "head-tail" else None
    order = torch.arange(48) if layout is None else layout.indices[0]

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (4,))
        results = []
        for name in ("natural_ring", schedule):
            inputs = [
                distribute(x.index_select(2, order), mesh, [Shard(2)]).requires_grad_()
                for x in problem.tensors()[:3]
            ]
            with cp_dispatch.enabled(schedule=name, layout=layout):
                output = torch.nn.functional.scaled_dot_product_attention(
                    *inputs, dropout_p=0.4, is_causal=True, enable_gqa=True
                )
            grads = torch.autograd.grad(output, inputs, output.detach())
            results.append([x.full_tensor() for x in (output, *grads)])
        for ring, heads in zip(*results, strict=True):
            torch.testing.assert_close(heads, ring)

    run_threads(4, rank_body)


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid:2"])
def test_ranks_without_rows_or_heads(schedule):
    """5 rows on 4 ranks leave one rank none. 3 heads over 2 ranks for heads leave one rank fewer
    than CP; 4 heads over 3 ranks leave one rank none."""
    judge(Problem(heads=4, length=5, causal=True), 4, schedule, "math")
    judge(
        Problem(heads=3, length=10, causal=True), 4, schedule, "math", (2, 2),
        [Shard(2), Shard(1)], granted="ulysses",
    )  # fmt: skip
    shape = (2, 3) if schedule == "ulysses" else (4, 3)
    for causal in (False, True):
        judge(
            Problem(heads=4, length=10, causal=causal), torch.Size(shape).numel(), schedule,
            "math", shape, [Shard(2), Shard(1)],
        )  # fmt: skip
