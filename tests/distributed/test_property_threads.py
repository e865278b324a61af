"""Any supported call on any small mesh is right: hypothesis over ranks in threads.

It looks for errors of logic, in float64, where those cannot hide; how exact the kernels are is
the matter of ``test_ring_threads.py``.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from tests.distributed.reference import RESULTS, Problem, exact
from tests.distributed.sharded import run_sharded
from tests.distributed.threads import run_threads

MESHES = [
    ((2,), [Shard(2)]),
    ((3,), [Shard(2)]),
    ((4,), [Shard(2)]),
    ((5,), [Shard(2)]),
    ((2, 2), [Shard(0), Shard(2)]),
    ((2, 2), [Shard(2), Shard(1)]),
    ((2, 3), [Replicate(), Shard(2)]),
    ((3, 2), [Shard(2), Shard(0)]),
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((2,), [Replicate()]),
]


@st.composite
def calls(draw):
    shape, placements = draw(st.sampled_from(MESHES))
    size = st.integers(1, 3)
    key_heads, groups = draw(size), draw(size)
    if groups > 1 and Shard(1) in placements:
        key_heads *= shape[placements.index(Shard(1))]
    length = draw(st.integers(1, 40))
    kernel = draw(st.sampled_from(["math", "cpu_flash"]))
    dim = draw(st.integers(1, 20))
    # Torch's CPU flash kernel gives NaN for causal calls with a scale <= 0, on one device too.
    scales = st.floats(-2 if kernel == "math" else 2**-10, 2)
    problem = Problem(
        batch=draw(size),
        heads=key_heads * groups,
        key_heads=key_heads,
        length=length,
        key_length=draw(st.one_of(st.just(length), st.integers(1, 40))),
        dim=dim,
        value_dim=draw(st.integers(1, 20)) if kernel == "math" else dim,
        causal=draw(st.booleans()),
        scale=draw(st.one_of(st.none(), scales)),
        dtype=torch.float64,
        seed=draw(st.integers(0, 99)),
    )
    kept = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    key_placements = [p if keep else Replicate() for p, keep in zip(placements, kept, strict=True)]
    needs = tuple(draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    return problem, shape, placements, key_placements, kernel, needs


def rounding_bounds(problem: Problem, tensors) -> list[float]:
    """What rounding alone may do, by the usual analysis of matrix products in float64.

    A sum of n products is off by at most n u |x||y|. Every result is a few products over at most
    ``terms`` terms of factors no larger than these norms, and the exponential turns an absolute
    error of the scores, itself ``terms`` u |scores|, into a relative one.
    """
    query, key, value, grad = (x.norm().item() for x in tensors)
    scale = problem.dim**-0.5 if problem.scale is None else abs(problem.scale)
    terms = problem.dim + (problem.value_dim or 0) + problem.length + tensors[1].size(2)
    unit = torch.finfo(torch.float64).eps * terms * (1 + scale * query * key)
    scores = grad * value * scale
    return [unit * value, unit * scores * key, unit * scores * query, unit * grad]


@settings(
    max_examples=100,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(calls())
def test_any_supported_call_is_right(call):
    problem, shape, placements, key_placements, kernel, needs = call
    tensors = problem.tensors()
    want = exact(problem, tensors)
    bounds = rounding_bounds(problem, tensors)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        got = run_sharded(
            problem, tensors, mesh, placements,
            key_placements=key_placements, kernel=kernel, needs=needs,
        )  # fmt: skip
        for name, mine, true, bound in zip(RESULTS[:4], got, want, bounds, strict=True):
            if mine is not None:
                error = (mine - true).norm().item()
                assert error <= bound, f"{name}: error {error:.1e}, rounding gives {bound:.1e}"

    with cp_dispatch.enabled():
        run_threads(torch.Size(shape).numel(), rank_body)
