"""Any supported call on any small mesh is right: hypothesis over ranks in threads.

Mostly in float64, where a logic error cannot hide; ``test_ring_threads.py`` tests how exact the
kernels are. ``CP_DISPATCH_EXAMPLES=2000`` tests more than the normal run.
"""

from __future__ import annotations

import math
import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from cp_dispatch.schedules import CHOICES
from tests.distributed.calls import only
from tests.distributed.reference import (
    FACTOR,
    RESULTS,
    Mask,
    Problem,
    exact,
    one_device,
    rounding,
)
from tests.distributed.sharded import run_sharded
from tests.distributed.threads import run_threads

MESHES = [
    *(((size,), [Shard(2)]) for size in range(1, 9)),
    ((2, 2), [Shard(0), Shard(2)]),
    ((2, 2), [Shard(2), Shard(1)]),
    ((2, 2), [Shard(2), Shard(2)]),
    ((2, 3), [Replicate(), Shard(2)]),
    ((3, 2), [Shard(2), Shard(0)]),
    ((2, 2, 2), [Shard(0), Shard(2), Shard(1)]),
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((2,), [Replicate()]),
]
DTYPES = [torch.float64] * 3 + [torch.float32, torch.bfloat16, torch.float16]
MASK_SHAPES = ["qk", "1k", "q1", "hqk", "bhqk", "b1qk", "1hqk", "b11k", "bh1k", "1111"]


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
    causal, mask = draw(st.booleans()), None
    if not causal and draw(st.booleans()):
        mask = Mask(
            shape=draw(st.sampled_from(MASK_SHAPES)),
            dtype=draw(st.sampled_from([torch.bool, None])),
            blind=draw(st.booleans()),
        )
    # Also where torch's CPU flash kernel returns NaN on one device: causal, with a scale <= 0.
    scales = st.one_of(st.floats(-2, -(2**-10)), st.just(0.0), st.floats(2**-10, 2))
    problem = Problem(
        batch=draw(size),
        heads=key_heads * groups,
        key_heads=key_heads,
        length=length,
        key_length=draw(st.one_of(st.just(length), st.integers(1, 40))),
        dim=dim,
        value_dim=draw(st.integers(1, 20)) if kernel == "math" else dim,
        causal=causal,
        scale=draw(st.one_of(st.none(), scales)),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 99)),
        mask=mask,
    )
    kept = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    if placements.count(Shard(2)) > 1:
        kept = kept[:1] * len(shape)  # over several dims in different ways is refused
    key_placements = [p if keep else Replicate() for p, keep in zip(placements, kept, strict=True)]
    mask_placements = None
    if mask is not None and draw(st.booleans()):
        # Any placement that the mask's own dims allow.
        sizes = problem.attn_mask().shape
        choices = [Replicate(), *(Shard(dim) for dim, n in enumerate(sizes) if n > 1)]
        mask_placements = [draw(st.sampled_from(choices)) for _ in shape]
    needs = tuple(draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    schedule = draw(st.sampled_from(["auto", *CHOICES, "hybrid:2", "hybrid:3"]))
    return problem, shape, placements, key_placements, mask_placements, kernel, needs, schedule


def bounds(problem: Problem, tensors, kernel: str) -> list[float]:
    """The error that each result may have.

    In float64 it is what rounding alone may cause, by the usual analysis of matrix products. A sum
    of n products is off by at most n u |x||y|. Every result is a few products over at most
    ``terms`` terms of factors no larger than these norms. The exponential turns an absolute error
    of the scores, itself ``terms`` u |scores|, into a relative one. In other dtypes that bound says
    nothing, so the bound is one device's error, or one rounding of each factor if that is more.
    """
    scale = problem.dim**-0.5 if problem.scale is None else abs(problem.scale)
    if problem.dtype is not torch.float64:
        floors, _ = rounding(problem, tensors)
        # Kernels hold scores in float32, and the relative error of a weight is the absolute error
        # of its score.
        norms = (x.double().norm(dim=-1).amax().item() for x in tensors[:2])
        largest = scale * math.prod(norms)
        wider = 1 + largest * torch.finfo(torch.float32).eps / torch.finfo(problem.dtype).eps
        want = exact(problem, tensors)
        alone = one_device(problem, tensors, kernel)
        errors = [(x.double() - y).norm().item() for x, y in zip(alone, want, strict=True)]
        # Below the smallest normal number the rounding error is absolute, whatever is rounded.
        info = torch.finfo(problem.dtype)
        steps = [4 * info.smallest_normal * info.eps * x.numel() ** 0.5 for x in want]
        # One device may return NaN if a row sees nothing, which is no measure.
        return [
            FACTOR * max(error if error == error else 0.0, floors[name] * wider) + step
            for name, error, step in zip(RESULTS, errors, steps, strict=False)
        ]
    query, key, value, grad = (x.norm().item() for x in tensors)
    bias = 0.0
    if problem.mask is not None and problem.mask.dtype is not torch.bool:
        attn_mask = problem.attn_mask()
        bias = (
            attn_mask[attn_mask.isfinite()].abs().amax().item() if attn_mask.isfinite().any() else 0
        )
    terms = problem.dim + (problem.value_dim or 0) + problem.length + tensors[1].size(2)
    unit = torch.finfo(torch.float64).eps * terms * (1 + scale * query * key + bias)
    scores = grad * value * scale
    return [unit * value, unit * scores * key, unit * scores * query, unit * grad]


@settings(
    max_examples=int(os.environ.get("CP_DISPATCH_EXAMPLES", 150)),
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(calls())
def test_any_supported_call_is_right(call):
    problem, shape, placements, key_placements, mask_placements, kernel, needs, schedule = call
    tensors = problem.tensors()
    want = exact(problem, tensors)
    allowed = bounds(problem, tensors, kernel)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        got = run_sharded(
            problem, tensors, mesh, placements,
            key_placements=key_placements, mask_placements=mask_placements,
            needs=needs,
        )  # fmt: skip
        for name, mine, true, bound in zip(RESULTS[:4], got, want, allowed, strict=True):
            if mine is not None:
                error = (mine - true).norm().item()
                assert error <= bound, f"{name}: error {error:.1e}, allowed {bound:.1e}"

    with cp_dispatch.enabled(schedule=schedule), only(kernel):
        run_threads(torch.Size(shape).numel(), rank_body)
