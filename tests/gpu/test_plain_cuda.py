"""``context_parallel`` on plain CUDA shards against float64, on 2 and up to 4 GPUs."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from cp_dispatch import ContextParallel, context_parallel
from tests.distributed.calls import only
from tests.distributed.plain import run_plain
from tests.distributed.reference import Mask, Problem, check, exact, rounding, yardstick
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import ranks

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

KERNELS = ("flash", "efficient", "cudnn", "math")


def by_context(env: Env, kernel: str, balancer, mask_dims=(), **how) -> None:
    problem = Problem(**{"batch": 2, "length": 512, "dim": 64, "dtype": torch.bfloat16} | how)
    tensors = problem.tensors(env.device)
    with only(kernel):
        got = run_plain(problem, tensors, env.mesh(), balancer=balancer, mask_dims=mask_dims)
    floors, few = rounding(problem, tensors)
    single = yardstick(problem, tensors, kernel)
    check(got, exact(problem, tensors), single, floors=floors, few=few)


class Attention(nn.Module):
    def forward(self, query, key, value, **options):
        return nn.functional.scaled_dot_product_attention(query, key, value, **options)


def by_style(env: Env) -> None:
    """Also with gradients on autograd's own threads, and recomputed there."""
    problem = Problem(batch=2, length=512, dim=64, dtype=torch.bfloat16, causal=True)
    tensors = problem.tensors(env.device)
    mesh = env.mesh()
    module = parallelize_module(Attention(), mesh, ContextParallel())
    results = {}
    for recomputed in (False, True):
        *inputs, grad = cp_dispatch.shard(mesh, tensors, 2)
        inputs = [x.requires_grad_() for x in inputs]
        call = functools.partial(module, is_causal=True)
        output = checkpoint(call, *inputs, use_reentrant=False) if recomputed else call(*inputs)
        results[recomputed] = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
    whole = cp_dispatch.unshard(mesh, results[True], 2)
    check(whole, exact(problem, tensors), yardstick(problem, tensors, "flash"))
    for one, other in zip(*results.values(), strict=True):
        torch.testing.assert_close(one, other)


def recomputed_inside_the_block(env: Env) -> None:
    problem = Problem(batch=2, length=512, dim=64, dtype=torch.bfloat16, causal=True)
    tensors = problem.tensors(env.device)
    mesh = env.mesh()
    *buffers, grad = (x.clone() for x in tensors)
    with context_parallel(mesh, buffers=[*buffers, grad], buffer_seq_dims=[2] * 4):
        inputs = [x.clone().requires_grad_() for x in buffers]
        output = checkpoint(problem.attend, *inputs, use_reentrant=False)
        grads = torch.autograd.grad(output, inputs, grad)
    whole = cp_dispatch.context_parallel_unshard(mesh, [output, *grads], [2] * 4)
    check(whole, exact(problem, tensors), yardstick(problem, tensors, "flash"))


def backward_inside_autocast(env: Env, kernel: str) -> None:
    """The forward's autocast state counts: gradients are those of float32, not of products in
    bfloat16, except for the differences of atomic sums."""
    problem = Problem(batch=2, length=512, dim=64, dtype=torch.float32, causal=True)
    inputs = [
        x.requires_grad_()
        for x in cp_dispatch.shard(env.mesh(), problem.tensors(env.device), 2)[:3]
    ]
    with only(kernel), context_parallel(env.mesh(), balancer=None):
        loss = problem.attend(*inputs).square().sum()
    want = torch.autograd.grad(loss, inputs, retain_graph=True)
    with torch.autocast("cuda", torch.bfloat16):
        got = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(got, want)


def causal_lower_right_does_not_stay_local(env: Env) -> None:
    own = [torch.randn(1, 2, 64, 64, device=env.device, dtype=torch.bfloat16) for _ in range(3)]
    bias = causal_lower_right(64, 128)
    keys = [torch.cat([x, x], 2) for x in own[1:]]
    with context_parallel(env.mesh(), balancer=None):
        with pytest.raises(cp_dispatch.ContextParallelError, match="rows and this rank's keys"):
            nn.functional.scaled_dot_product_attention(own[0], *keys, attn_mask=bias)


CASES = {
    **{
        f"{kernel} causal={causal} balancer={balancer} {length}": functools.partial(
            by_context, kernel=kernel, causal=causal, balancer=balancer, length=length
        )
        for kernel in KERNELS
        for causal in (True, False)
        for balancer in ("auto", None)
        for length in (512, 500)
    },
    **{
        f"{kernel} mask {mask.shape} {dims} balancer={balancer}": functools.partial(
            by_context, kernel=kernel, mask=mask, mask_dims=dims, balancer=balancer
        )
        for kernel in ("efficient", "cudnn", "math")
        for mask, dims in (
            (Mask("b11k"), ()),
            (Mask("b11k"), (3,)),
            (Mask("bhqk", None), ()),
            (Mask("bhqk", None), (2,)),
        )
        for balancer in ("auto", None)
    },
    **{
        f"{kernel}, backward inside autocast": functools.partial(
            backward_inside_autocast, kernel=kernel
        )
        for kernel in ("efficient", "math")
    },
    "style": by_style,
    "recomputed inside the block": recomputed_inside_the_block,
    "causal_lower_right": causal_lower_right_does_not_stay_local,
}


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    return run_asked(request, request.param, "nccl", 60)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
