"""Known calls of ``one_call`` and of heads on GPUs, with ranks that arrive late: bitwise equal to
calls through DTensor's dispatch."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import cp_dispatch
from cp_dispatch import HeadTail
from cp_dispatch.schedules.known_call import Known
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import ranks

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})
LAYERS, STEPS = 3, 8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]


def steps(
    env: Env, layout, late: bool, causal: bool, schedule: str
) -> tuple[list[torch.Tensor], int]:
    """Outputs and gradients of consecutive layers, step by step with new data, and how many calls
    were known. Two of the steps use another stream."""
    mesh, local = env.mesh(), 48
    generator = torch.Generator(env.device).manual_seed(env.rank)
    calls, found = 0, []
    way = Known._way

    def count(self, index, tensors):
        nonlocal calls
        known = way(self, index, tensors) if late else None
        calls += known is not None
        return known

    def fresh(heads: int) -> DTensor:
        own = torch.randn(2, local, heads, 64, generator=generator, device=env.device)
        own = own.bfloat16().transpose(1, 2)
        return DTensor.from_local(own, mesh, [Shard(2)], run_check=False)

    def step(number: int) -> None:
        *leaves, grad = fresh(8), fresh(4), fresh(4), fresh(8)
        leaves = [x.requires_grad_() for x in leaves]
        x = leaves[0]
        for layer in range(LAYERS):
            if late and (number + layer) % env.world_size == env.rank:
                torch.cuda._sleep(3_000_000)
            x = F.scaled_dot_product_attention(x, *leaves[1:], is_causal=causal, enable_gqa=True)
        grads = torch.autograd.grad(x, leaves, grad)
        found.extend(y.to_local().clone() for y in (x.detach(), *grads))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Known, "_way", count)
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            cp_dispatch.enabled(schedule=schedule, layout=layout),
        ):
            side = torch.cuda.Stream()
            for number in range(STEPS):
                if number in (4, 5):
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        step(number)
                    torch.cuda.current_stream().wait_stream(side)
                else:
                    step(number)
    torch.cuda.synchronize()
    return found, calls


def known(env: Env, kind: str | None, causal: bool = True, schedule: str = "one_call") -> None:
    layout = HeadTail(48 * env.world_size, env.world_size) if kind else None
    want, none = steps(env, layout, late=False, causal=causal, schedule=schedule)
    got, calls = steps(env, layout, late=True, causal=causal, schedule=schedule)
    assert none == 0
    # Forwards and backwards of all steps except a few, in which kinds and streams are learned.
    assert calls > LAYERS * STEPS, calls
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), (number, (a - b).abs().max())


CASES = {
    "natural": functools.partial(known, kind=None),
    "head-tail": functools.partial(known, kind="head-tail"),
    "not causal": functools.partial(known, kind=None, causal=False),
    "heads natural": functools.partial(known, kind=None, schedule="ulysses"),
    "heads head-tail": functools.partial(known, kind="head-tail", schedule="ulysses"),
    "heads not causal": functools.partial(known, kind=None, causal=False, schedule="ulysses"),
}


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    return run_asked(request, request.param, "nccl", 60)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
