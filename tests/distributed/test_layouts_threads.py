"""Attention on permuted data, and on data in natural order that cp_dispatch balances itself,
against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.schedules import gather
from tests.distributed.calls import only
from tests.distributed.permuted import balancers, permuted, run_permuted
from tests.distributed.reference import (
    Mask,
    Problem,
    check,
    exact,
    one_device,
    rounding,
)
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.threads import run_threads

WORLD_SIZES = (2, 3, 4, 8)
KERNELS = ("cpu_flash", "math")


def judge(problem, balancer, world_size, kernel=None, shape=None, **how) -> None:
    tensors = problem.tensors()
    want = exact(problem, tensors)
    alone = one_device(problem, tensors, kernel or "math")
    floors, few = rounding(problem, tensors)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", shape or (world_size,))
        check(run_permuted(problem, balancer, mesh, **how), want, alone, floors=floors, few=few)

    with only(kernel):
        run_threads(world_size, rank_body)


def in_token_major_memory(x: DTensor) -> DTensor:
    own = x.to_local().transpose(1, 2).contiguous().transpose(1, 2)
    return DTensor.from_local(own, x.device_mesh, x.placements, run_check=False)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("length", [96, 61])
@pytest.mark.parametrize("kind", ["head-tail", "documents", "documents of each row", "blocks"])
def test_layouts_are_right(kind, length, world_size, kernel, causal):
    problem = Problem(batch=2, heads=4, key_heads=2, length=length, dim=16, causal=causal)
    found = balancers(length, world_size, 2)
    if kind not in found:
        pytest.skip("blocks must be whole")
    judge(problem, found[kind], world_size, kernel)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", ["head-tail", "documents", "documents of each row", "blocks"])
@pytest.mark.parametrize("schedule", ["gather", "ulysses", "hybrid"])
def test_other_schedules_are_right(schedule, kind, world_size, kernel, causal):
    """If shards are not alike, or there are too few heads, a ring runs."""
    problem = Problem(batch=2, heads=4, key_heads=2, length=96, dim=16, causal=causal)
    balancer = balancers(96, world_size, 2)[kind]
    judge(problem, balancer, world_size, kernel, schedule=schedule)


@pytest.mark.parametrize("mask", [
    Mask("qk"), Mask("b11k"), Mask("1hqk", None, needs_grad=True), Mask("bhqk", None, blind=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["head-tail", "documents"])
def test_gather_with_masks(kind, mask):
    problem = Problem(batch=2, heads=2, length=96, dim=16, mask=mask)
    wheres = [[Replicate()]]
    if len(mask.shape) == 4:
        wheres += [[Shard(dim)] for dim in (2, 3) if mask.shape[dim] != "1"]
    for where in wheres:
        judge(
            problem, balancers(96, 4, 2)[kind], 4, "math", mask_placements=where, schedule="gather"
        )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_both_halves_of_a_gather_are_one_kernel_call(kernel, batch, monkeypatch):
    """If the memory is ``(B, S, H, D)``, as models make it, they are two batch rows of one call."""
    problem = Problem(batch=batch, heads=4, key_heads=2, length=48, dim=16, causal=True)
    tensors, balancer = problem.tensors(), HeadTail(48, 4)
    want, alone = exact(problem, tensors)[0], one_device(problem, tensors, kernel)[0]
    of_halves, calls = gather._forward_halves, []
    monkeypatch.setattr(gather, "_forward_halves", lambda *x: calls.append(0) or of_halves(*x))

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (4,))
        moved = (permuted(x, balancer.indices, 2) for x in tensors[:3])
        inputs = [in_token_major_memory(distribute(x, mesh, [Shard(2)])) for x in moved]
        output = problem.attend(*inputs).full_tensor()
        check([permuted(output, balancer.inverse, 2)], [want], [alone])

    with cp_dispatch.enabled(schedule="gather", layout=balancer), only(kernel):
        run_threads(4, rank_body)
    assert len(calls) == 3  # the halves of the last rank are adjacent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["head-tail", "documents of each row"])
def test_other_dtypes(kind, dtype):
    problem = Problem(length=256, causal=True, dtype=dtype)
    judge(problem, balancers(256, 4, 2)[kind], 4, "cpu_flash")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", [
    Mask("qk"), Mask("b11k"), Mask("1hqk", blind=True), Mask("bhqk", None),
    Mask("11q1", None, needs_grad=True), Mask("1hqk", None, needs_grad=True),
    Mask("b11k", None, needs_grad=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["head-tail", "documents", "documents of each row", "blocks"])
def test_masks_go_by_true_positions(kind, mask, kernel):
    """A plain mask, a replicated one, one sharded over rows and one sharded over keys."""
    if mask.needs_grad and kernel != "math":
        pytest.skip("the math kernel alone gives the gradient of a bias")
    problem = Problem(batch=2, heads=2, length=96, dim=16, mask=mask)
    balancer = balancers(96, 4, 2)[kind]
    wheres = [[Replicate()]]
    if not mask.needs_grad:
        wheres.append(None)
    if len(mask.shape) == 4 and (mask.shape[0] == "b" or balancer.rows == 1):
        wheres += [[Shard(dim)] for dim in (2, 3) if mask.shape[dim] != "1"]
    for where in wheres:
        judge(problem, balancer, 4, kernel, mask_placements=where)


@pytest.mark.parametrize("kind", ["head-tail", "documents of each row"])
@pytest.mark.parametrize("shape, placements", [
    ((2, 2), [Shard(0), Shard(2)]), ((2, 2), [Shard(2), Shard(1)]), ((2, 2), [Shard(2), Shard(2)]),
    ((2, 2), [Shard(2), Shard(0)]),
])  # fmt: skip
def test_meshes(kind, shape, placements):
    ranks = 4 if placements.count(Shard(2)) == 2 else 2
    balancer = balancers(64, ranks, 4)[kind]
    problem = Problem(batch=4, heads=4, length=64, causal=True)
    judge(problem, balancer, 4, "cpu_flash", shape, placements=placements)


def test_dropout_goes_by_true_positions(monkeypatch):
    """The dropout mask is that of natural order."""
    # Ranks in threads share a generator; processes draw one seed because each has its own.
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(1234))
    problem = Problem(heads=4, length=48, dim=8, causal=True, dtype=torch.float64)
    query, key, value, _ = problem.tensors()

    def attend(mesh, order, placed=lambda x: x, **options):
        inputs = [
            placed(distribute(x.index_select(2, order), mesh, [Shard(2)]))
            for x in (query, key, value)
        ]
        with cp_dispatch.enabled(**options):
            return torch.nn.functional.scaled_dot_product_attention(
                *inputs, dropout_p=0.4, is_causal=True
            ).full_tensor()

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (3,))
        balancer = HeadTail(48, 3)
        natural = attend(mesh, torch.arange(48), schedule="natural_ring")
        laid_out = attend(mesh, balancer.indices[0], layout=balancer)
        torch.testing.assert_close(laid_out.index_select(2, balancer.inverse[0]), natural)
        for schedule in ("mirrored_ring", "gather", "ulysses"):
            other = attend(mesh, torch.arange(48), schedule=schedule)
            torch.testing.assert_close(other, natural)
        for placed in (lambda x: x, in_token_major_memory):
            gathered = attend(mesh, balancer.indices[0], placed, schedule="gather", layout=balancer)
            torch.testing.assert_close(gathered.index_select(2, balancer.inverse[0]), natural)

    run_threads(3, rank_body)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("needs", [(True,) * 3, (True, False, False)], ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["mirrored_ring", "gather"])
def test_natural_order_is_balanced(schedule, world_size, dtype, needs, kernel):
    problem = Problem(
        batch=2, heads=4, key_heads=2, length=24 * world_size, dim=16, causal=True, dtype=dtype
    )
    tensors = problem.tensors()
    want = exact(problem, tensors)
    alone = one_device(problem, tensors, kernel)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (world_size,))
        check(run_sharded(problem, tensors, mesh, needs=needs), want, alone)

    with cp_dispatch.enabled(schedule=schedule), only(kernel):
        run_threads(world_size, rank_body)


@pytest.mark.parametrize("lengths", [(48, 48), (24, 48), (7, 48), (48, 12), (61, 64), (48, 61)])
@pytest.mark.parametrize("causal", [False, True])
def test_gather_of_different_lengths(lengths, causal):
    """If a gather does not fit, a ring runs."""
    length, key_length = lengths
    problem = Problem(length=length, key_length=key_length, causal=causal)
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "math")
    floors, _ = rounding(problem, tensors)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (4,))
        check(run_sharded(problem, tensors, mesh), want, alone, floors=floors, few=length < 10)

    with cp_dispatch.enabled(schedule="gather"), only("math"):
        run_threads(4, rank_body)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_shares_for_others_takes_theirs(world_size):
    """The first rank of blocks in natural order, and ranks without queries."""
    length = 8 * world_size
    causal = Problem(batch=2, heads=4, key_heads=2, length=length, dim=16, causal=True)
    judge(causal, BlockBalanced([1] * world_size, world_size, 8), world_size, schedule="gather")
    for problem in (
        Problem(length=1, key_length=length),
        Problem(length=1, key_length=length, causal=True),
        Problem(heads=0, key_heads=1, length=length, causal=True),
    ):
        tensors = problem.tensors()
        want, alone = exact(problem, tensors), one_device(problem, tensors, "math")
        floors, _ = rounding(problem, tensors)

        def rank_body(rank, problem=problem, tensors=tensors):
            mesh = init_device_mesh("cpu", (world_size,))
            return run_sharded(problem, tensors, mesh)

        with cp_dispatch.enabled(schedule="gather"), only("math"):
            for got in run_threads(world_size, rank_body):
                check(got, want, alone, floors=floors, few=True)


def test_whole_key_beside_a_value_that_one_of_two_mesh_dims_shards():
    """The key was cut in true order, but the value, which is a sum over the other dim, in the
    layout's order."""
    problem = Problem(length=48)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        query, key, value, _ = problem.tensors()
        sums = DTensor.from_local(value.chunk(2, 2)[rank % 2], mesh, [Partial(), Shard(2)])
        inputs = [
            distribute(query, mesh, [Shard(2)] * 2),
            distribute(key, mesh, [Replicate()] * 2),
            sums,
        ]
        with pytest.raises(cp_dispatch.ContextParallelError, match="but the other shards are"):
            torch.nn.functional.scaled_dot_product_attention(*inputs)

    with cp_dispatch.enabled(layout=HeadTail(48, 4)):
        run_threads(4, rank_body)


def test_refusals():
    problem = Problem(length=48, causal=True)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2,))
        query, key, value, _ = problem.tensors()
        sharded = [distribute(x, mesh, [Shard(2)]) for x in (query, key, value)]
        whole = [distribute(x, mesh, [Replicate()]) for x in (query, key, value)]

        def refused(layout, inputs, words, **options):
            with cp_dispatch.enabled(layout=layout):
                with pytest.raises(cp_dispatch.ContextParallelError, match=words):
                    torch.nn.functional.scaled_dot_product_attention(*inputs, **options)

        for ranks in (1, 3):
            words = "2 ranks share the sequence.*; make one for 2"
            refused(HeadTail(48, ranks), sharded, words)
        refused(HeadTail(64, 2), sharded, "query of length 48 is sharded")
        refused(PerDocumentHeadTail([[48], [8, 40], [40, 8]], 2), sharded, "the batch has 2 rows")
        fits = HeadTail(48, 2)
        refused(fits, [sharded[0], *whole[1:]], "ambiguous", is_causal=True)
        refused(fits, [whole[0], *sharded[1:]], "ambiguous", is_causal=True)
        refused(fits, whole, "ambiguous", is_causal=True)
        mask = distribute(torch.ones(48, 48, dtype=torch.bool), mesh, [Shard(1)])
        refused(fits, [sharded[0], *whole[1:]], "sharded along its keys", attn_mask=mask)
        for odd in ([Replicate()], [Partial()]):  # it would be cut in true order
            for mixed in ((1, 2), (2, 1)):
                inputs = [sharded[0], None, None]
                inputs[mixed[0]] = sharded[mixed[0]]
                inputs[mixed[1]] = DTensor.from_local(value, mesh, odd, run_check=False)
                refused(fits, inputs, "but the other shards are in the layout")
                refused(fits, inputs, "but the other shards are in the layout", is_causal=True)
        sums = [DTensor.from_local(x, mesh, [Partial()], run_check=False) for x in (key, value)]
        refused(fits, [sharded[0], *sums], "but the other shards are in the layout", dropout_p=0.5)
        rows = distribute(torch.ones(1, 1, 48, 48, dtype=torch.bool), mesh, [Shard(2)])
        own = PerDocumentHeadTail([[8, 40], [40, 8]], 2)
        refused(own, sharded, "each batch row has its own order", attn_mask=rows)
        with cp_dispatch.enabled(layout=fits):  # here the order does not matter
            torch.nn.functional.scaled_dot_product_attention(sharded[0], *whole[1:])
            torch.nn.functional.scaled_dot_product_attention(*whole)

    run_threads(2, rank_body)


def test_the_layout_of_one_rank_is_natural_order():
    problem = Problem(length=10, causal=True)
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "math")

    def rank_body(rank):
        return run_sharded(problem, tensors, init_device_mesh("cpu", (1,)))

    for length in (10, 48):
        with cp_dispatch.enabled(layout=HeadTail(length, 1)), only("math"):
            check(run_threads(1, rank_body)[0], want, alone)


@pytest.mark.parametrize("layout", ["head-tail", HeadTail, 4])
def test_layout_must_be_a_balancer(layout):
    with pytest.raises(cp_dispatch.ContextParallelError, match="layout must be"):
        cp_dispatch.enable(layout=layout)


def test_decode_against_a_cache_in_a_layout():
    """One whole query of another length. The order of keys matters only to the mask."""
    for mask in (None, Mask("b11k")):
        problem = Problem(length=1, key_length=48, mask=mask)
        tensors = problem.tensors()
        want = exact(replace(problem), tensors)[0]
        balancer = HeadTail(48, 4)

        def rank_body(rank, tensors=tensors, problem=problem, balancer=balancer, want=want):
            mesh = init_device_mesh("cpu", (4,))
            query = distribute(tensors[0], mesh, [Replicate()])
            keys = [
                distribute(permuted(x, balancer.indices, 2), mesh, [Shard(2)]) for x in tensors[1:3]
            ]
            masks = [] if problem.mask is None else [problem.attn_mask()]
            with cp_dispatch.enabled(layout=balancer):
                got = problem.attend(query, *keys, *masks).full_tensor()
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)

        run_threads(4, rank_body)
