"""Schedules in which ranks write what others need to their memory: results are right, no flags
remain, and only what is needed is sent.

Copy engines are emulated (:mod:`tests.distributed.rooms`); tests/gpu uses the real ones.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.layouts import laid_out
from cp_dispatch.schedules.pushed_ring import shares_overlap
from tests.distributed.calls import only
from tests.distributed.permuted import balancers, run_permuted
from tests.distributed.reference import Mask, Problem, check, exact, one_device, rounding
from tests.distributed.rooms import Box, Rooms
from tests.distributed.sharded import run_sharded
from tests.distributed.threads import run_threads


@pytest.fixture
def rooms(monkeypatch):
    return Rooms(monkeypatch)


def judge(rooms, problem, world_size, kernel, schedule, kind=None, twice=True) -> None:
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, kernel)
    floors, few = rounding(problem, tensors)
    balancer = balancers(problem.length, world_size, problem.batch)[kind] if kind else None

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (world_size,))
        for _ in range(1 + twice):  # rooms are reused
            if balancer is not None:
                got = run_permuted(problem, balancer, mesh, schedule=schedule)
            else:
                with cp_dispatch.enabled(schedule=schedule):
                    got = run_sharded(problem, tensors, mesh)
            check(got, want, alone, floors=floors, few=few)

    with only(kernel):
        run_threads(world_size, rank_body)
    assert rooms.sent
    rooms.assert_all_was_read()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
@pytest.mark.parametrize("schedule, causal", [
    ("gather", True), ("gather", False), ("natural_ring", True), ("natural_ring", False),
    ("mirrored_ring", True),
])  # fmt: skip
def test_natural_order(rooms, schedule, causal, kernel, world_size):
    length = 16 * world_size
    problem = Problem(batch=2, heads=4, key_heads=2, length=length, dim=16, causal=causal)
    judge(rooms, problem, world_size, kernel, schedule)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize("kind", ["head-tail", "documents", "documents of each row", "blocks"])
def test_layouts(rooms, kind, schedule, world_size):
    problem = Problem(batch=2, heads=4, key_heads=2, length=96, dim=16, causal=True)
    judge(rooms, problem, world_size, "cpu_flash", schedule, kind)


@pytest.mark.parametrize("kind", [None, "head-tail"])
@pytest.mark.parametrize("heads, key_heads", [(4, 1), (6, 3), (1, 1)])
def test_heads_of_which_a_gather_computes_a_part_at_a_time(rooms, heads, key_heads, kind):
    problem = Problem(heads=heads, key_heads=key_heads, length=48, dim=8, value_dim=16, causal=True)
    judge(rooms, problem, 3, "math", "gather", kind, twice=False)


@pytest.mark.parametrize("schedule", ["natural_ring", "gather"])
@pytest.mark.parametrize("mask", [Mask("bhqk"), Mask("1hqk", None, blind=True)], ids=str)
def test_masks(rooms, mask, schedule):
    problem = Problem(batch=2, heads=2, length=64, dim=16, mask=mask)
    judge(rooms, problem, 4, "math", schedule)


def test_shares_of_one_tile_beside_shares_of_several_in_16_bits(rooms):
    """Rooms of a wide dtype accept only shares in that dtype. Others would be misread."""
    balancer = BlockBalanced([7, 7, 1, 5, 9, 8], 3, 8, near=True)
    geometry = laid_out(48, 48, (3,), True, balancer)
    pairs = itertools.permutations(range(3), 2)
    assert shares_overlap(geometry) and 1 in {len(geometry.tiles(*pair)) for pair in pairs}
    problem = Problem(batch=2, heads=2, length=48, dim=16, causal=True, dtype=torch.bfloat16)
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")
    floors, few = rounding(problem, tensors)

    def rank_body(rank):
        got = run_permuted(problem, balancer, init_device_mesh("cpu", (3,)), schedule="ring")
        check(got, want, alone, floors=floors, few=few)

    with only("cpu_flash"):
        run_threads(3, rank_body)
    rooms.assert_all_was_read()


@pytest.mark.parametrize("lengths", [(64, 96), (96, 64), (16, 13)], ids=str)
def test_causal_calls_of_different_lengths(rooms, lengths):
    """A rank itself holds gradients of only some of its keys."""
    length, key_length = lengths
    problem = Problem(heads=2, length=length, key_length=key_length, dim=16, causal=True)
    judge(rooms, problem, 4, "math", "natural_ring", twice=False)


@pytest.mark.parametrize("length", [61, 5])
def test_uneven_shards(rooms, length):
    problem = Problem(batch=2, heads=2, length=length, dim=16, causal=True)
    judge(rooms, problem, 4, "math", "natural_ring")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("schedule", ["ring", "gather"])
def test_dtypes(rooms, schedule, dtype):
    problem = Problem(length=256, causal=True, dtype=dtype)
    judge(rooms, problem, 4, "cpu_flash", schedule, "head-tail")


@pytest.mark.parametrize("balancer, causal, overlap", [
    (None, True, False), (HeadTail(64, 4), True, False), (HeadTail(64, 4), False, False),
    (PerDocumentHeadTail([16, 48], 4), True, True),
    (PerDocumentHeadTail([[64], [16, 48]], 4), True, True),
    (PerDocumentHeadTail([[64], [16, 48]], 4), False, False),
], ids=str)  # fmt: skip
def test_shares_travel_wide_only_where_several_are_of_the_same_keys(balancer, causal, overlap):
    """And of the same batch row."""
    assert shares_overlap(laid_out(64, 64, (4,), causal, balancer)) == overlap


def test_keys_of_the_next_hop_come_meanwhile(rooms, monkeypatch):
    """Copies do not wait for the kernels that were launched since the room was opened."""
    push, waits = Box.push, []

    def pushed(box, targets, sources, peers=None, coming=None, ready_at_open=False):
        waits.append((box._key[1], not ready_at_open))
        return push(box, targets, sources, peers, coming, ready_at_open)

    monkeypatch.setattr(Box, "push", pushed)
    sent(rooms, "natural_ring")
    assert set(waits) == {("ring keys", False), ("ring gradients", True)}


# What distinguishes each call from the first one.
_OTHERS = [
    {"dtype": torch.bfloat16}, {"causal": False}, {"batch": 2, "length": 24},
    {"key_heads": 4, "dim": 8}, {"heads": 2}, {"kind": "head-tail"}, {"kind": "blocks"},
]  # fmt: skip


@pytest.mark.parametrize("schedule", ["gather", "mirrored_ring", "ulysses"])
def test_what_rooms_remember_is_of_the_same_calls(rooms, monkeypatch, schedule):
    """Moves and views of calls that differ in one respect, in the same rooms."""
    monkeypatch.setattr(Box, "forget_many", lambda box: None)
    rooms.least = 2**16
    cases = []
    for other in ({}, *_OTHERS):
        how = {"batch": 1, "heads": 4, "key_heads": 2, "length": 48, "dim": 16, "causal": True}
        kind = other.get("kind")
        problem = Problem(**how | {k: v for k, v in other.items() if k != "kind"})
        tensors = problem.tensors()
        want, alone = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")
        balancer = balancers(problem.length, 2, problem.batch)[kind] if kind else None
        cases.append((problem, balancer, want, alone, rounding(problem, tensors)))

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2,))
        for case in cases[1:]:
            for problem, balancer, want, alone, (floors, few) in (cases[0], case):
                if balancer is None:
                    with cp_dispatch.enabled(schedule=schedule):
                        got = run_sharded(problem, problem.tensors(), mesh)
                else:
                    got = run_permuted(problem, balancer, mesh, schedule=schedule)
                check(got, want, alone, floors=floors, few=few)

    with only("cpu_flash"):
        run_threads(2, rank_body)
    rooms.assert_all_was_read()
    assert len(rooms._rooms) == len(rooms.used)


def sent(rooms, schedule, layout=None, causal=True, world_size=4):
    """Bytes of keys and of gradients that each rank sends, in units of a shard of keys and
    values."""
    problem = Problem(batch=1, heads=2, key_heads=2, length=16 * world_size, causal=causal)
    tensors = problem.tensors()

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (world_size,))
        with cp_dispatch.enabled(schedule=schedule, layout=layout):
            run_sharded(problem, tensors, mesh)

    with only("cpu_flash"):
        run_threads(world_size, rank_body)
    key, value = tensors[1:3]
    shard = (key.nbytes + value.nbytes) / world_size
    found: dict[str, list[float]] = {}
    for (name, rank), size in rooms.sent.items():
        found.setdefault(name, [0.0] * world_size)[rank] = size / shard
    return found


def test_ring_moves_what_is_needed(rooms):
    """In natural order rank r's keys go to the W - 1 - r ranks after it (in the forward and in the
    backward), and it sends gradients to the r ranks before it."""
    found = sent(rooms, "natural_ring")
    assert found["ring keys"] == [6, 4, 2, 0]
    assert found["ring gradients"] == [0, 1, 2, 3]


def test_gather_moves_what_is_needed(rooms):
    """Of a head-tail pair, the lo piece goes to all other ranks and the hi piece to those before,
    in the forward and in the backward. Each rank's hi rows have shares of 6 - rank pieces of
    others, and its lo rows have shares of the lo pieces before. The last rank's rows are adjacent
    and have their shares in common. All moves use one room, one after the other."""
    keys = [2 * (3 + rank) / 2 for rank in range(4)]
    shares = [6 / 2, 6 / 2, 6 / 2, 3 / 2]
    found = sent(rooms, "gather", HeadTail(64, 4))
    assert found == {"keys": [x + y for x, y in zip(keys, shares, strict=True)]}


@pytest.mark.parametrize("schedule, world_size, layout, shards", [
    ("gather", 4, None, 3), ("gather", 4, HeadTail(64, 4), 3), ("natural_ring", 4, None, 2),
    ("natural_ring", 2, None, 1),
])  # fmt: skip
def test_room_for_keys_that_come(rooms, schedule, world_size, layout, shards):
    """In natural order no other rank sees the last rank's keys. In other orders a rank's own keys
    do not arrive. A ring has room for the keys of two hops, if there are two."""

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (world_size,))
        local = [torch.randn(1, 2, 16, 8) for _ in range(3)]
        with cp_dispatch.enabled(schedule=schedule, layout=layout):
            F.scaled_dot_product_attention(
                *(DTensor.from_local(x, mesh, [Shard(2)]) for x in local), is_causal=True
            )
        return sum(x.nbytes for x in local[1:])

    with only("cpu_flash"):
        (shard,) = set(run_threads(world_size, rank_body))
    found = {size / shard for _, name, size in rooms._rooms if name.endswith("keys")}
    assert found == {shards}


def test_gather_of_all_moves_all(rooms):
    found = sent(rooms, "gather", causal=False)
    assert found == {"keys": [6.0 + 3.0] * 4}


@pytest.mark.parametrize("schedule", ["gather", "natural_ring", "mirrored_ring", "ulysses"])
def test_batch_rows_that_are_one(rooms, schedule):
    """Expanded over the batch, as latents and the gradients of means are. No engine copies such
    tensors."""
    problem = Problem(batch=3, heads=2, length=64, dim=16, causal=True)
    rows = [x.transpose(1, 2)[:1].contiguous() for x in problem.tensors()]
    tensors = [x.transpose(1, 2).expand(3, -1, -1, -1) for x in rows]
    want, alone = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")
    floors, few = rounding(problem, tensors)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2,))
        query, key, value, grad = (
            DTensor.from_local(x.chunk(2, 2)[rank], mesh, [Shard(2)], run_check=False)
            for x in tensors
        )
        inputs = [x.requires_grad_() for x in (query, key, value)]
        with cp_dispatch.enabled(schedule=schedule):
            output = problem.attend(*inputs)
        got = output.detach(), *torch.autograd.grad(output, inputs, grad)
        check([x.full_tensor() for x in got], want, alone, floors=floors, few=few)

    with only("cpu_flash"):
        run_threads(2, rank_body)
    rooms.assert_all_was_read()


@pytest.mark.parametrize("schedule", ["natural_ring", "mirrored_ring", "gather", "ulysses"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch, heads, mesh, other", [
    (0, 2, (2,), None), (2, 4, (3, 2), Shard(0)), (2, 4, (3, 2), Shard(1)),
], ids=["no batch row", "no batch row on some", "no head on some"])  # fmt: skip
def test_nothing_on_all_ranks_that_share_rooms(rooms, batch, heads, mesh, other, causal, schedule):
    if other == Shard(1):
        heads = 2 if schedule != "ulysses" else 4
    problem = Problem(batch=batch, heads=heads, length=24, dim=16, causal=causal)
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "math")
    floors, few = rounding(problem, tensors)

    def rank_body(rank):
        places = [Shard(2)] if other is None else [other, Shard(2)]
        with cp_dispatch.enabled(schedule=schedule):
            got = run_sharded(problem, tensors, init_device_mesh("cpu", mesh), places)
        check(got, want, alone, floors=floors, few=few)

    with only("math"):
        run_threads(math.prod(mesh), rank_body)
    rooms.assert_all_was_read()


@pytest.mark.parametrize("kind", [None, "head-tail"])
def test_a_gathers_keys_are_released_also_where_no_shares_follow(rooms, kind):
    """Shares would wait for the readers of the keys anyway."""
    problem = Problem(heads=2, length=64, dim=16, causal=True)
    tensors, layout = problem.tensors(), balancers(64, 4, 1).get(kind)

    def rank_body(rank):
        with cp_dispatch.enabled(schedule="gather", layout=layout):
            run_sharded(problem, tensors, init_device_mesh("cpu", (4,)), needs=(True, False, False))

    with only("cpu_flash"):
        run_threads(4, rank_body)
    assert "keys" in rooms.used
    rooms.assert_all_was_read()


@pytest.mark.parametrize("schedule", ["ring", "gather"])
def test_ranks_without_keys(rooms, schedule):
    """A rank that owns no keys still has gradients of others' keys."""
    problem = Problem(heads=2, length=18, key_length=4, dim=16)
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "math")
    floors, few = rounding(problem, tensors)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (3,))
        with cp_dispatch.enabled(schedule=schedule):
            check(run_sharded(problem, tensors, mesh), want, alone, floors=floors, few=few)

    with only("math"):
        run_threads(3, rank_body)
    rooms.assert_all_was_read()


@pytest.mark.parametrize("kind", ["head-tail", "documents", "blocks"])
def test_gradients_are_rounded_as_often_as_in_a_ring_that_passes_them_on(kind, monkeypatch):
    """In layouts by documents and blocks, several tiles of a hop see the same keys. When these were
    rounded before they were sent, their sums had 1.1 times the error."""
    problem = Problem(batch=1, heads=8, length=256, causal=True, dtype=torch.bfloat16)
    want = exact(problem, problem.tensors())
    errors = []
    for by_rooms in (False, True):
        with monkeypatch.context() as patch:
            rooms = Rooms(patch) if by_rooms else None
            found = {}

            def rank_body(rank, found=found):
                mesh = init_device_mesh("cpu", (2,))
                balancer = balancers(problem.length, 2, 1)[kind]
                found[rank] = run_permuted(problem, balancer, mesh, schedule="ring")

            with only("cpu_flash"):
                run_threads(2, rank_body)
            errors.append([(x.double() - y).norm() for x, y in zip(found[0], want, strict=True)])
            assert rooms is None or rooms.used == {"ring keys", "ring gradients"}
    for passed_on, pushed in zip(*errors, strict=True):
        assert pushed < 1.01 * passed_on
