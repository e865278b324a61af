"""Which schedule runs a call: by what was requested, by what fits, and by cost."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cp_dispatch import HeadTail, PerDocumentHeadTail
from cp_dispatch.plan import Plan
from cp_dispatch.planning.settle import COSTS, estimates, settle


def ring(tokens=8192, ranks=4, causal=True, layout=None, key_length=None, heads=(32, 8), **fields):
    """The plan of a ring: bfloat16, head dim 128, ``tokens`` per rank."""
    heads, key_heads = heads
    keys = key_length if key_length is not None else tokens * ranks
    local = -(-keys // ranks)
    plan = Plan(
        "cp_dispatch",
        backend="flash",
        schedule="ring",
        layout=layout,
        is_causal=causal,
        mesh_dims=(0,),
        ring_shape=(ranks,),
        query_length=tokens * ranks,
        key_length=keys,
        shards=((1, heads, tokens, 128), (1, key_heads, local, 128), (1, key_heads, local, 128)),
        dtype=torch.bfloat16,
    )
    return dataclasses.replace(plan, **fields)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("plan, wish, schedule", [
    (ring(), "natural_ring", "ring"),
    (ring(), "mirrored_ring", "mirrored_ring"),
    (ring(tokens=8), "mirrored_ring", "mirrored_ring"),
    (ring(tokens=7), "mirrored_ring", "ring"),  # halves must be whole
    (ring(causal=False), "mirrored_ring", "ring"),
    (ring(layout=HeadTail(32768, 4)), "mirrored_ring", "ring"),
    (ring(ranks=1), "gather", "ring"),
    (ring(causal=False), "gather", "gather"),
    (ring(causal=False, key_length=4096 * 4), "gather", "gather"),
    (ring(causal=False, key_length=4095 * 4 + 1), "gather", "ring"),
    (ring(), "gather", "mirrored_gather"),
    (ring(tokens=7), "gather", "ring"),
    (ring(key_length=16384), "gather", "ring"),
    (ring(layout=HeadTail(32768, 4)), "gather", "gather"),
    (ring(layout=PerDocumentHeadTail([10001, 22767], 4)), "gather", "ring"),
    (ring(layout=PerDocumentHeadTail([10001, 22767], 4), causal=False), "gather", "gather"),
])  # fmt: skip
def test_wishes_are_granted_where_they_fit(plan, wish, schedule, device):
    got = settle(plan, wish, device)
    assert got.schedule == schedule
    # It says why the requested schedule was not used.
    if schedule == "ring" and plan.world_size > 1:
        why_not = {"gather": "not gathered", "mirrored_ring": "balance", "natural_ring": ""}
        assert why_not[wish] in "; ".join(got.reasons)
        assert bool(got.reasons) == (wish != "natural_ring")


@pytest.mark.parametrize("lengths", [(32768, 16381), (3, 8), (8, 3)], ids=str)
def test_uneven_shards_are_no_one_call(lengths):
    """Every rank has the same number of keys, but not of rows."""
    length, key_length = lengths
    plan = ring(causal=False, query_length=length, key_length=key_length)
    got = settle(plan, "one_call", "cpu")
    assert got.schedule == "ring" and "differ in length, or some are empty" in got.reasons[0]


def test_rows_beyond_the_keys_are_no_one_call():
    """The prefixes of such rows would be longer than the keys."""
    got = settle(ring(tokens=8, key_length=16), "one_call", "cpu")
    assert got.schedule == "ring" and "see only part of a run" in got.reasons[0]


@pytest.mark.parametrize("plan, wish, ranks, across", [
    (ring(), "ulysses", 4, ""),
    (ring(ranks=32), "ulysses", 32, ""),
    (ring(ranks=64), "ulysses", 0, "32 query heads, fewer than the 64 ranks"),
    (ring(), "hybrid", 2, "mirrored_ring"),
    (ring(causal=False), "hybrid", 2, "ring"),
    (ring(layout=HeadTail(32768, 4)), "hybrid", 2, "ring"),
    (ring(tokens=8191), "hybrid", 2, "mirrored_ring"),
    (ring(tokens=8191, query_length=32763), "hybrid", 2, "ring"),
    (ring(ranks=8), "hybrid", 4, "mirrored_ring"),
    # Halves of groups of 4 would be alike, but the shards are not.
    (ring(ranks=8, query_length=65532, key_length=65532), "hybrid", 4, "ring"),
    (ring(ranks=8), "hybrid:2", 2, "mirrored_ring"),
    (ring(ranks=8), "hybrid:8", 8, ""),
    (ring(ranks=64), "hybrid", 8, "mirrored_ring"),  # a node
    (ring(ranks=8, ring_shape=(4, 2)), "hybrid", 2, "mirrored_ring"),
    (ring(ranks=12, heads=(12, 3)), "hybrid", 3, "mirrored_ring"),
    (ring(ranks=12, heads=(12, 1)), "hybrid", 6, "mirrored_ring"),
    (ring(ranks=4), "hybrid:3", 0, "divided into groups of 3"),
    (ring(ranks=4), "hybrid:1", 0, "half-shards with the mirror rank"),  # a ring
    (ring(ranks=10, heads=(12, 3)), "hybrid:5", 0, "more often than others"),
    (ring(ranks=7), "hybrid", 7, ""),
    (ring(ranks=37), "hybrid", 0, "32 query heads"),
])  # fmt: skip
def test_heads_are_shared_where_they_suffice(plan, wish, ranks, across):
    for own_rows in (False, True):
        got = settle(plan, wish, "cuda", masked=own_rows, own_rows=own_rows)
        if not ranks or own_rows:
            assert got.schedule in ("ring", "mirrored_ring") and got.head_ranks == 1
            assert ("differs by row" if own_rows else across) in "\n".join(got.reasons)
            assert wish != "hybrid:1" or "not hybrid: a group of one rank" in got.reasons[0]
        elif ranks == plan.world_size:
            assert (got.schedule, got.op_schedule) == ("ulysses", "ulysses")
            assert ("not hybrid: the group" in got.reasons[0]) == wish.startswith("hybrid")
        else:
            assert (got.schedule, got.head_ranks, got.across) == ("hybrid", ranks, across)
            assert got.op_schedule == f"hybrid:{ranks}:{across}"


@pytest.mark.parametrize("plan, schedule", [
    (ring(tokens=8192), "mirrored_gather"),
    (ring(tokens=65536), "mirrored_gather"),
    (ring(tokens=65536 + 1024), "mirrored_ring"),
    (ring(tokens=8192, layout=HeadTail(32768, 4)), "gather"),
    (ring(tokens=131072, layout=HeadTail(524288, 4)), "ring"),
    (ring(tokens=8192, causal=False), "gather"),
    (ring(tokens=131072, causal=False), "ring"),
    (ring(tokens=512, heads=(1, 1)), "one_call"),
    # It also saves the exchanges with the mirror rank, which a layout does not need.
    (ring(tokens=2048), "one_call"),
    (ring(tokens=2048, layout=HeadTail(8192, 4)), "gather"),
    (ring(tokens=1024, layout=HeadTail(4096, 4)), "one_call"),
    # Kernels without a bottom-right causal mask.
    (ring(tokens=512, heads=(1, 1), backend="cudnn"), "gather"),
    (ring(tokens=2048, ranks=2, backend="cudnn"), "gather"),
    (ring(tokens=2049, ranks=2, backend="cudnn"), "gather"),
    (ring(tokens=8192, ranks=2, backend="cudnn"), "mirrored_gather"),
    (ring(tokens=8193, ranks=2, backend="cudnn"), "ring"),
    (ring(tokens=512, layout=HeadTail(2048, 4), backend="cudnn"), "gather"),
    (ring(tokens=512, causal=False, backend="cudnn"), "one_call"),
    # Shards that are not alike.
    (ring(tokens=512, heads=(1, 1), query_length=2045, key_length=2045), "ring"),
])  # fmt: skip
def test_auto_on_cuda_gathers_while_the_keys_are_few_enough(plan, schedule):
    assert settle(plan, "auto", "cuda").schedule == schedule


def test_auto_gathers_no_more_than_it_may():
    """With many key heads, or many ranks, the gathered keys are large."""
    costs = COSTS["cuda"]
    for plan in (ring(heads=(32, 32), ranks=8), ring(tokens=4096, ranks=64)):
        gathered = 2 * plan.key_length * plan.shards[1][1] * 128 * 2
        assert gathered > costs.gather_bytes or settle(plan, "auto", "cuda").schedule != "ring"
        fits = gathered <= costs.gather_bytes
        assert (settle(plan, "auto", "cuda").schedule == "mirrored_gather") == fits


def test_a_ring_is_balanced_where_that_saves_more_than_it_costs():
    for tokens in (64, 512, 2048, 8192, 32768):
        plan = ring(tokens=tokens)
        saved, spent = estimates(plan, "cuda")
        got = settle(plan, "ring", "cuda")
        assert got.schedule == ("mirrored_ring" if saved > spent else "ring")
        assert f"{saved * 1e3:.3g} ms" in got.reasons[0] and f"{spent * 1e3:.3g}" in got.reasons[0]
    # Quadratic versus linear.
    short, long = (estimates(ring(tokens=n), "cuda") for n in (2048, 4096))
    latency = 2 * COSTS["cuda"].latency
    assert long[0] == pytest.approx(4 * short[0])
    assert long[1] - latency == pytest.approx(2 * (short[1] - latency))


@pytest.mark.parametrize("layout", [None, HeadTail(32768, 4)], ids=["natural", "head-tail"])
def test_auto_gathers_neither_masks_nor_scores(layout):
    """The math kernel holds a tile's scores, and other kernels its mask. In a gather these are W
    times as large."""
    plan = ring(layout=layout)
    assert "gather" in settle(plan, "auto", "cuda").schedule
    masked = dataclasses.replace(plan, is_causal=False)
    assert settle(masked, "auto", "cuda", masked=True).schedule == "ring"
    math = dataclasses.replace(plan, backend="math")
    assert "ring" in settle(math, "auto", "cuda").schedule
    got = settle(masked, "one_call", "cuda", masked=True)
    assert got.schedule == "ring" and "has a mask or dropout" in got.reasons[0]
    # It is still used if it is requested.
    assert settle(masked, "gather", "cuda", masked=True).schedule == "gather"
