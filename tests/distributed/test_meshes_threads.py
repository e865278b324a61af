"""Meshes of more than one dim, and calls whose sequence is not sharded, on ranks in threads."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cp_dispatch
from tests.distributed.calls import only
from tests.distributed.reference import Mask, Problem, check, exact, one_device
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.threads import run_threads
from tests.ranks import fake_ranks

PLACEMENTS = {"dp": Shard(0), "tp": Shard(1), "cp": Shard(2), "rep": Replicate()}


@pytest.fixture(autouse=True)
def enabled():
    with cp_dispatch.enabled():
        yield


def mesh_matches(problem: Problem, shape, placements, kernel="cpu_flash", **how) -> None:
    tensors = problem.tensors()
    want, single = exact(problem, tensors), one_device(problem, tensors, kernel)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        got = run_sharded(problem, tensors, mesh, placements, **how)
        check(got, want, single)

    with only(kernel):
        run_threads(torch.Size(shape).numel(), rank_body)


def placed(names: str) -> list:
    return [PLACEMENTS[name] for name in names.split()]


@pytest.mark.parametrize(
    "names",
    ["dp cp", "cp dp", "cp tp", "tp cp", "rep cp", "cp rep"],
    ids=lambda n: n.replace(" ", "x"),
)
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_two_dims(names, shape, causal):
    problem = Problem(batch=4, heads=12, key_heads=6, length=131, dim=16, causal=causal)
    if any(n == "tp" and 6 % size for n, size in zip(names.split(), shape, strict=True)):
        problem = Problem(batch=4, heads=16, key_heads=4, length=131, dim=16, causal=causal)
    mesh_matches(problem, shape, placed(names))


@pytest.mark.parametrize("names", [" ".join(p) for p in itertools.permutations(("dp", "cp", "tp"))])
def test_three_dims(names):
    problem = Problem(batch=4, heads=8, key_heads=4, length=65, causal=True)
    mesh_matches(problem, (2, 2, 2), placed(names))


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
@pytest.mark.parametrize(
    "names, fields",
    [
        ("dp cp", {"batch": 3}),  # one data rank has fewer batches
        ("dp cp", {"batch": 1}),  # one data rank has none
        ("tp cp", {"heads": 3}),
        ("tp cp", {"heads": 1, "batch": 3}),
        ("dp cp", {"batch": 3, "key_heads": 2, "key_length": 50}),
    ],
    ids=str,
)
def test_uneven_other_dims(names, fields, kernel):
    dtype = torch.bfloat16 if kernel == "math" else torch.float32
    problem = Problem(**{"length": 67, "causal": True, "dtype": dtype, **fields})
    mesh_matches(problem, (2, 2), placed(names), kernel)


def test_mqa_replicates_its_key_over_tensor_ranks():
    """Eight query heads on two ranks, and the one key head on both."""
    problem = Problem(heads=8, key_heads=2, length=64, causal=True)
    mesh_matches(problem, (2, 2), placed("cp tp"))
    with pytest.raises(AssertionError, match="are not a multiple of the 2 ranks"):
        mesh_matches(
            Problem(heads=8, key_heads=1, length=64), (2, 2), placed("tp cp"),
            key_placements=placed("rep cp"),
        )  # fmt: skip


def test_replicated_keys_on_a_two_dim_mesh():
    problem = Problem(length=67, causal=True, key_heads=2)
    for key_placements in (placed("rep rep"), placed("dp rep"), placed("rep cp")):
        mesh_matches(problem, (2, 2), placed("dp cp"), key_placements=key_placements)


@pytest.mark.parametrize(
    "names, shape, fields",
    [
        ("dp", (2,), {}),
        ("dp", (2,), {"batch": 3}),
        ("dp", (3,), {"batch": 2}),
        ("tp", (2,), {}),
        ("tp", (2,), {"heads": 3}),
        ("tp", (4,), {"heads": 2}),
        ("tp", (2,), {"key_heads": 2}),
        ("rep", (2,), {}),
        ("dp tp", (2, 2), {"key_heads": 2}),
        ("rep dp", (2, 2), {"length": 100, "key_length": 37}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_without_a_sharded_sequence_each_rank_computes_locally(names, shape, fields, kernel):
    dtype = torch.bfloat16 if kernel == "math" else torch.float32
    problem = Problem(**{"length": 128, "causal": True, "dtype": dtype, **fields})

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        inputs = [distribute(x, mesh, placed(names)) for x in problem.tensors()[:3]]
        plan = cp_dispatch.explain(*inputs, is_causal=True, enable_gqa=problem.grouped)
        assert (plan.handler, plan.schedule) == ("cp_dispatch", "local"), plan

    run_threads(torch.Size(shape).numel(), rank_body)
    mesh_matches(problem, shape, placed(names), kernel)


@pytest.mark.parametrize("names", ["cp dp", "rep"])
def test_partial_query_is_summed(names):
    """A query that is still a sum over some mesh dim gives a whole output."""
    problem = Problem(length=65, causal=True)
    query, key, value, grad = problem.tensors()
    want = exact(problem, (query, key, value, grad))
    single = one_device(problem, (query, key, value, grad), "cpu_flash")
    others = placed(names)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,) * (len(others) + 1))
        share = distribute(query / 2, mesh, [Replicate(), *others])
        share = DTensor.from_local(
            share.to_local(), mesh, [Partial(), *others], run_check=False,
            shape=share.shape, stride=share.stride(),
        )  # fmt: skip
        whole = [Replicate(), *others]
        inputs = [share, distribute(key, mesh, whole), distribute(value, mesh, whole)]
        for x in inputs:
            x.requires_grad_()
        output = problem.attend(*inputs)
        assert output.placements == tuple(whole)
        grads = torch.autograd.grad(output, inputs, distribute(grad, mesh, whole))
        check([x.full_tensor().detach() for x in (output, *grads)], want, single)

    run_threads(2 ** (len(others) + 1), rank_body)


def test_later_calls_over_several_mesh_dims_find_the_group_of_the_first():
    """Each rank finds its own group, which was made together with the others. A rank that made
    another group waited for the others forever."""
    problem = Problem(length=66, mask=Mask())  # with a mask every call asks for the group
    tensors = problem.tensors()
    want, single = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for _ in range(3):
            check(run_sharded(problem, tensors, mesh, placed("cp cp")), want, single)

    run_threads(4, rank_body, timeout=20)


def test_mesh_of_one_rank():
    mesh_matches(Problem(causal=True, key_heads=2), (1,), placed("cp"))
    mesh_matches(Problem(causal=True, length=65), (1, 2), placed("cp dp"))


def test_ranks_outside_of_the_mesh_take_the_same_steps():
    problem = Problem(length=66, mask=Mask(shape="bhqk", dtype=None, needs_grad=True))
    tensors = problem.tensors()
    want, single = exact(problem, tensors), one_device(problem, tensors, "math")

    def rank_body(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0, 1, 2])
        inputs = [distribute(x, mesh, placed("cp")).requires_grad_() for x in tensors[:3]]
        bias = distribute(problem.attn_mask().detach(), mesh, placed("rep")).requires_grad_()
        output = problem.attend(*inputs, bias)
        output.backward(distribute(tensors[3], mesh, placed("cp")))
        got = [output, *(x.grad for x in (*inputs, bias))]
        assert [x.placements for x in got] == [tuple(placed("cp"))] * 4 + [tuple(placed("rep"))]
        if rank < 3:
            check([x.full_tensor().detach() for x in got], want, single)

    run_threads(4, rank_body)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_ranks_outside_of_the_mesh_make_known_calls_too(monkeypatch, debug):
    """And they have nothing to agree on."""
    monkeypatch.setenv("CP_DISPATCH_DEBUG", debug)
    problem = Problem(length=66, causal=True)
    tensors = problem.tensors()

    def rank_body(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0, 1])
        inputs = [distribute(x, mesh, placed("cp")) for x in tensors[:3]]
        first, again = (problem.attend(*inputs).to_local() for _ in range(2))
        assert torch.equal(first, again) and first.numel() == (rank < 2) * tensors[0].numel() // 2

    run_threads(3, rank_body)


def test_sub_mesh_of_a_larger_mesh():
    """Two independent rings, each over its own dim of a 2-D mesh."""
    problem = Problem(length=66, causal=True)
    tensors = problem.tensors()
    want, single = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")

    def rank_body(rank: int) -> None:
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        for name in ("cp", "dp"):
            check(run_sharded(problem, tensors, whole[name]), want, single)

    run_threads(4, rank_body)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}], ids=str)
def test_a_rank_outside_the_mesh_takes_no_part(options):
    """Also in a repeated call; its gradients have the strides of the leaves."""
    with fake_ranks(5, rank=4):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        tensors = [
            distribute(torch.zeros(2, heads, 16, 8), mesh, placed("dp cp")).requires_grad_()
            for heads in (4, 2, 2)
        ]
        for _ in range(2):
            output = F.scaled_dot_product_attention(*tensors, enable_gqa=True, **options)
            grads = torch.autograd.grad(output, tensors, torch.zeros_like(output))
            for x, like in zip((output, *grads), (tensors[0], *tensors), strict=True):
                assert x.placements == like.placements and x.shape == like.shape
                assert x.to_local().numel() == 0
            assert all(a.stride() == b.stride() for a, b in zip(grads, tensors, strict=True))
