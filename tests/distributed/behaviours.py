"""Features that are not tested by comparing one call with float64; each takes a mesh over all
ranks.

The same ones run on ranks in threads and on GPUs.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from cp_dispatch.backends import BACKENDS
from tests.distributed.reference import FACTOR, KERNELS, Problem, with_gradients
from tests.distributed.sharded import distribute

S2, R = (Shard(2),), (Replicate(),)
SEED = 1234


def _run(mesh, tensors, placements, key_placements, p: float, wrap=None, **options):
    """Whole output and gradients of one call with dropout, after seeding torch."""
    where = (placements, key_placements, key_placements)
    inputs = [
        distribute(x, mesh, w).requires_grad_() for x, w in zip(tensors[:3], where, strict=True)
    ]

    def attend(*inputs):
        return F.scaled_dot_product_attention(*inputs, dropout_p=p, **options)

    torch.manual_seed(SEED)
    output = wrap(attend, *inputs) if wrap else attend(*inputs)
    assert output.placements == tuple(placements)
    # Other code may draw from the generator before the backward, too.
    torch.rand(7)
    grads = torch.autograd.grad(output, inputs, distribute(tensors[3], mesh, placements))
    return [x.full_tensor().detach() for x in (output, *grads)]


def coins(mesh, shape, p: float, placements=S2, key_placements=S2) -> torch.Tensor:
    """The dropout factors of all pairs, made visible by uniform weights and the unit matrix as
    value."""
    batch, heads, length, keys = shape
    device = mesh.device_type
    query = torch.zeros(batch, heads, length, 8, device=device)
    key = torch.zeros(batch, heads, keys, 8, device=device)
    value = torch.eye(keys, device=device).expand(batch, heads, keys, keys)
    query, key, value = (
        distribute(x.contiguous(), mesh, w)
        for x, w in ((query, placements), (key, key_placements), (value, key_placements))
    )
    torch.manual_seed(SEED)
    return F.scaled_dot_product_attention(query, key, value, dropout_p=p).full_tensor() * keys


def dropout_exact(mesh, dtype=torch.float32, causal=False, placements=S2, keys=S2, length=70):
    """Output and gradients are those of dense attention in float64 with the same dropout mask."""
    shape, p = (2, 4, length, 70), 0.3
    problem = Problem(length=length, key_length=70, dim=16, causal=causal, dtype=dtype)
    tensors = problem.tensors(mesh.device_type)
    with cp_dispatch.enabled():
        factors = coins(mesh, shape, p, placements, keys)
        got = _run(mesh, tensors, placements, keys, p, is_causal=causal)
    rounded = (factors * (1 - p)).round()
    assert (factors - rounded / (1 - p)).abs().max() < 1e-4, "0 or 1 / (1 - p)"
    kept, n = rounded.mean().item(), rounded.numel()
    assert abs(kept - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n), f"{kept} kept"
    for dim in range(4):
        assert (rounded.var(dim) > 0).any(), f"the same coins along dim {dim}"

    def dense(query, key, value, wide):
        query, key, value, pairs = (x.to(wide) for x in (query, key, value, rounded / (1 - p)))
        scores = query @ key.mT / math.sqrt(query.size(-1))
        if causal:
            scores = scores.masked_fill(
                torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf
            )
        return scores.softmax(-1) * pairs @ value

    want = with_gradients(
        functools.partial(dense, wide=torch.float64), *(x.double() for x in tensors)
    )
    narrow = torch.float32 if dtype.itemsize == 2 else dtype
    single = with_gradients(lambda *x: dense(*x, wide=narrow).to(dtype), *tensors[:3], tensors[3])
    for name, mine, true, theirs in zip(
        ("output", "dq", "dk", "dv"), got, want, single, strict=True
    ):
        errors = [(x.double() - true).norm().item() for x in (mine, theirs, true.to(dtype))]
        assert errors[0] <= FACTOR * max(errors[1:]), f"{name}: {errors}, size {true.norm():.1e}"


def dropout_repeats(mesh, dtype=torch.float32, placements=S2, keys=S2) -> None:
    """The same seed repeats, another call differs, checkpoints replay, and the output is linear in
    v."""
    p = 0.2
    tensors = Problem(length=96, dtype=dtype).tensors(mesh.device_type)
    with cp_dispatch.enabled():
        first, again = (_run(mesh, tensors, placements, keys, p) for _ in range(2))
        replayed = [
            _run(mesh, tensors, placements, keys, p,
                 wrap=functools.partial(checkpoint, use_reentrant=False))
        ]  # fmt: skip
        inputs = [
            distribute(x, mesh, w)
            for x, w in zip(tensors[:3], (placements, keys, keys), strict=True)
        ]
        torch.manual_seed(SEED)
        one, two = (
            F.scaled_dot_product_attention(*inputs, dropout_p=p).full_tensor() for _ in range(2)
        )
        none, everything = (
            F.scaled_dot_product_attention(*inputs, dropout_p=q).full_tensor() for q in (0.0, 1.0)
        )
    for other in (again, *replayed):
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert torch.equal(one, first[0]) and not torch.equal(one, two)
    assert everything.abs().max() == 0
    change = ((one - none).double().norm() / none.double().norm()).item()
    assert 0.05 < change < 2, change
    left = (first[0].double() * tensors[3].double()).sum().item()
    right = (tensors[2].double() * first[3].double()).sum().item()
    size = (first[0].double().norm() * tensors[3].double().norm()).item()
    assert abs(left - right) <= torch.finfo(dtype).eps * size, (left, right, size)


def dropout_ignores_ranks(mesh, single) -> None:
    """The dropout mask of one rank is that of all ranks: ``single`` is a mesh of this rank
    alone."""
    shape, p = (2, 3, 50, 41), 0.4
    with cp_dispatch.enabled():
        want = coins(single, shape, p)
        for placements, keys in ((S2, S2), (S2, R), (R, S2)):
            got = coins(mesh, shape, p, placements, keys)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def causal_biases(mesh, dtype=torch.float32, lengths=(96, 160), key_placements=S2) -> None:
    """``causal_upper_left`` and ``causal_lower_right`` are as exact as on one device.

    Lower right bypasses ``scaled_dot_product_attention`` on CUDA, so the output need not stay
    sharded there.
    """
    length, key_length = lengths
    problem = Problem(length=length, key_length=key_length, dim=64, dtype=dtype)
    tensors = problem.tensors(mesh.device_type)
    for build in (causal_upper_left, causal_lower_right):
        bias = build(length, key_length)
        dense = bias._materialize(tensors[0].device)
        # No switches here: they belong to the process, and other threads are in the middle of a
        # call.
        want = with_gradients(
            lambda *x, dense=dense: F.scaled_dot_product_attention(*x, dense),
            *(x.double() for x in tensors),
        )
        single = with_gradients(
            lambda *x, bias=bias: F.scaled_dot_product_attention(*x, bias), *tensors
        )
        with cp_dispatch.enabled():
            inputs = [
                distribute(x, mesh, w).requires_grad_()
                for x, w in zip(tensors[:3], (S2, key_placements, key_placements), strict=True)
            ]
            output = F.scaled_dot_product_attention(*inputs, bias)
            if build is causal_upper_left or mesh.device_type == "cpu":
                assert output.placements == S2
            print(f"{build.__name__} {lengths}: output {output.placements}")
            grad = distribute(tensors[3], mesh, output.placements)
            got = [output, *torch.autograd.grad(output, inputs, grad)]
            got = [x.full_tensor().detach() for x in got]
        for name, mine, true, theirs in zip(("output", "dq", "dk", "dv"), got, want, single,
                                            strict=True):  # fmt: skip
            errors = [(x.double() - true).norm().item() for x in (mine, theirs, true.to(dtype))]
            assert errors[0] <= FACTOR * max(errors[1:]), (build.__name__, name, errors)


def half_overflows_alike(mesh, kernel: str) -> None:
    """Our float16 gradients overflow where one device's do, and nowhere else."""
    problem, tensors, *known = overflowing(mesh.device_type, kernel, mesh.size())
    with cp_dispatch.enabled(), sdpa_kernel(KERNELS[kernel]):
        overflows_alike(value_gradient(problem, tensors, mesh), *known)


def overflowing(device, kernel: str, ranks: int):
    """A problem, its tensors, and dV in float64 and on one device. For a kernel that returns
    float16, also dV as the sum of a float16 share of each rank's rows: here nothing else rounds as
    much.

    Half of the output's gradient is huge and positive, so the first keys of a causal call, which
    all rows see, get a dV beyond float16, and the last ones do not.
    """
    problem = Problem(batch=1, heads=2, length=256, dim=64, causal=True, dtype=torch.float16)
    query, key, value, grad = problem.tensors(device)
    value, grad = value * 1e-3, grad.abs() * 1e-3
    grad[..., :32] = 3e4
    tensors = query, key, value, grad
    owned = torch.arange(problem.length, device=device) * ranks // problem.length
    shares = torch.zeros_like(value, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        exactly = [x.double() for x in (query, key, value)]
        want = with_gradients(problem.attend, *exactly, grad.double())[3]
        for rank in range(ranks):
            own = grad.double() * (owned == rank)[:, None]
            shares += with_gradients(problem.attend, *exactly, own)[3].half()
    with sdpa_kernel(KERNELS[kernel]):
        single = with_gradients(problem.attend, *tensors)[3]
    narrow = BACKENDS[kernel].gradient_dtype(problem.dtype) is problem.dtype
    return problem, tensors, want, single, *([shares.half()] if narrow else [])


def value_gradient(problem: Problem, tensors, mesh) -> torch.Tensor:
    inputs = [distribute(x, mesh, S2).requires_grad_() for x in tensors[:3]]
    output = problem.attend(*inputs)
    return torch.autograd.grad(output, inputs, distribute(tensors[3], mesh, S2))[2].full_tensor()


def overflows_alike(dv, want, single, *shared) -> None:
    limit = torch.finfo(torch.float16).max
    over, under = want > 1.01 * limit, want < 0.99 * limit
    assert over.any() and under.any()
    for x in (single, dv):
        assert (x[over] == torch.inf).all() and x[under].isfinite().all()
    known = single, want.half(), *shared
    errors = [((x.double() - want)[under]).norm().item() for x in (dv, *known)]
    assert errors[0] <= FACTOR * max(errors[1:]), errors
