"""What a plan costs: its collectives, their bytes, and extra memory."""

import dataclasses
import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dispatch import enabled, explain
from cp_dispatch.planning.settle import settle
from tests.planning.test_settle import ring
from tests.ranks import fake_ranks, one_rank, outline
from tests.test_plan import gqa


@pytest.fixture
def mesh():
    with fake_ranks(4) as mesh:
        yield mesh


def sharded(mesh, placements, lengths, dtype):
    query, keys = placements
    return [
        outline(mesh, (2, heads, rows, 16), (place,), dtype)
        for heads, rows, place in (
            (8, lengths[0], query), (2, lengths[1], keys), (2, lengths[1], keys),
        )
    ]  # fmt: skip


S, R = Shard(2), Replicate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_of_a_ring(mesh, dtype):
    with enabled():
        plan = explain(*sharded(mesh, (S, S), (64, 64), dtype), enable_gqa=True)
    row, shard = 2 * 2 * 32, 16
    for rank in range(4):
        forward, backward = plan.transfers(rank)
        moves = [("all_to_all", "key, value", row * shard * dtype.itemsize)] * 3
        assert forward == moves
        # Sums are sent in float32, and returned to the owners in the inputs' dtype.
        sums = [row * shard * 4] * 3 + [row * shard * dtype.itemsize]
        assert backward == [*moves, *(("all_to_all", "dK, dV", size) for size in sums)]
        assert plan.bytes_sent(rank) == sum(size for *_, size in forward)


def test_collectives_of_the_schedules_that_move_no_keys(mesh):
    with enabled():
        keys = explain(*sharded(mesh, (S, R), (64, 60), torch.bfloat16), enable_gqa=True)
        queries = explain(*sharded(mesh, (R, S), (3, 60), torch.bfloat16), enable_gqa=True)
        local = explain(*sharded(mesh, (R, R), (3, 60), torch.bfloat16), enable_gqa=True)
    for rank in range(4):
        whole = 2 * 2 * 60 * 16 * 4
        assert keys.transfers(rank) == (
            [], [("all_reduce", "dK", whole), ("all_reduce", "dV", whole)],
        )  # fmt: skip
        rows = 2 * 8 * 3 * 4
        assert queries.transfers(rank) == (
            [("all_gather", "output", rows * 16), ("all_gather", "logsumexp", rows)],
            [("all_reduce", "dQ", rows * 16)],
        )
        assert local.transfers(rank) == ([], [])
    assert (keys.schedule, queries.schedule) == ("replicated_keys", "replicated_queries")


def test_math_counts_its_float64_output(mesh):
    with enabled(), sdpa_kernel(SDPBackend.MATH):
        plan = explain(*sharded(mesh, (R, S), (3, 60), torch.bfloat16), enable_gqa=True)
    rows = 2 * 8 * 3 * 8
    assert plan.transfers(0)[0] == [
        ("all_gather", "output", rows * 16), ("all_gather", "logsumexp", rows),
    ]  # fmt: skip


def test_groups_of_heads_move_one_after_the_other(mesh):
    with enabled(schedule="gather"):
        one = explain(*sharded(mesh, (S, S), (64, 64), torch.bfloat16), enable_gqa=True)
    two = dataclasses.replace(one, head_groups=2)
    assert one.schedule == "gather" and two.op_schedule == "gather:2"
    for whole, parts in zip(one.transfers(1), two.transfers(1), strict=True):
        assert parts == [x._replace(bytes=x.bytes // 2) for x in whole] * 2
    # The memory of one group, and the results of all: output and logsumexp; dQ, dK and dV.
    results = 2 * 8 * 16 * (16 * 2 + 4), (2 * 8 + 2 * 2 * 2) * 16 * 16 * 2
    assert two.extra_bytes() == tuple(
        size // 2 + whole for size, whole in zip(one.extra_bytes(), results, strict=True)
    )


def test_gradients_of_keys_that_ranks_share_go_back_to_the_mirror_in_float32():
    """If the ranks of a group share one key head, their gradients still have to be summed."""
    plan = settle(ring(heads=(8, 1)), "hybrid:2", "cuda")
    assert plan.op_schedule == "hybrid:2:mirrored_ring"
    rows = 2 * 8192 // 2 * 128
    dq, dkv = 4 * rows * 2, 2 * rows * 4
    assert ("all_to_all", "halves of dQ, dK, dV", dq + dkv) in plan.transfers(0)[1]


def test_one_rank_moves_nothing():
    with one_rank() as mesh, enabled():
        plan = explain(*gqa(mesh), enable_gqa=True)
    assert plan.world_size == 1 and plan.transfers(0) == ([], [])
    forward, backward = plan.extra_bytes()
    # The output and its logsumexp, as the kernel returns them and as the op does; then the kernel's
    # three gradients, those of the op, and float32 sums of two of them.
    assert forward == 2 * 2 * 8 * 64 * (16 + 1) * 4
    assert backward == (2 * 2 * 8 + 2 * 4 * 2 + 4 * 2) * 64 * 16 * 4


@pytest.mark.parametrize("placements", [(S, S), (S, R), (R, S)])
def test_extra_memory_is_that_of_the_shards(mesh, placements):
    """The memory of a few shards, whatever the number of ranks, and never less than what is
    returned."""
    sizes = []
    for length in (256, 512):
        with enabled():
            plan = explain(
                *sharded(mesh, placements, (length, length), torch.bfloat16), enable_gqa=True
            )
        query, key, value = map(math.prod, plan.shards)
        forward, backward = plan.extra_bytes()
        assert forward >= 2 * query and backward >= 2 * (query + key + value)
        assert forward <= 4 * 6 * plan.world_size * (query + key + value)
        sizes.append((forward, backward))
    assert [2 * x for x in sizes[0]] == list(sizes[1])
    assert plan.extra_bytes() == sizes[1]
