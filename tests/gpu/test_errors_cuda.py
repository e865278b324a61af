"""An error on one rank of a call by copy engines: the other ranks complete the call, and the next
call is right (:mod:`cp_dispatch.schedules.flags_alone`, :mod:`cp_dispatch.by_need.to_the_end`).
``tests/distributed/test_errors_threads.py`` lets every allocation of SDPA fail in turn."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import cp_dispatch
from cp_dispatch import HeadTail
from cp_dispatch.backends import BACKENDS
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import ranks
from tests.flex import test_errors_threads as flex_errors
from tests.varlen import test_pulled_threads as varlen_errors

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})
LOCAL = 512

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]


class Broken(RuntimeError):
    pass


def failing(env: Env, schedule: str, layout: bool, backward: bool, causal: bool = True) -> None:
    """On the last rank the first or the second kernel of a forward or of a backward runs out of
    memory."""
    length, mesh = LOCAL * env.world_size, env.mesh()
    order = HeadTail(length, env.world_size) if layout else None
    generator = torch.Generator(env.device).manual_seed(env.rank)
    names = ("backward", "prefix_backward") if backward else ("forward", "prefix_forward")

    def fresh(heads: int) -> DTensor:
        own = torch.randn(1, LOCAL, heads, 64, generator=generator, device=env.device)
        return DTensor.from_local(own.bfloat16().transpose(1, 2), mesh, [Shard(2)])

    *inputs, grad = fresh(8), fresh(4), fresh(4), fresh(8)
    inputs = [x.requires_grad_() for x in inputs]

    def attend() -> DTensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)

    def step() -> list[torch.Tensor]:
        out = attend()
        grads = torch.autograd.grad(out, inputs, grad)
        return [x.to_local().detach() for x in (out, *grads)]

    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        cp_dispatch.enabled(schedule=schedule, layout=order),
    ):
        want = [step() for _ in range(3)][-1]
        for calls in (0, 1):
            with pytest.MonkeyPatch.context() as patch:
                if env.rank == env.world_size - 1:
                    left = [calls]
                    for name in names:
                        kernel = getattr(BACKENDS["flash"], name)
                        patch.setattr(BACKENDS["flash"], name, _breaking(kernel, left))
                try:
                    step() if backward else attend()
                except Broken:
                    assert env.rank == env.world_size - 1
            torch.cuda.synchronize()
            for mine, theirs in zip(step(), want, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def _breaking(kernel, left: list[int]):
    def broken(*args):
        if not left[0]:
            raise Broken
        left[0] -= 1
        return kernel(*args)

    return broken


def failing_flex(env: Env, name: str, kind: str | None) -> None:
    """On the last rank one allocation after another fails."""
    call = flex_errors.CALLS[name]
    torch.manual_seed(env.rank)
    place = flex_errors.tensors_of(env.rank, env.world_size, env.mesh(), kind, env.device)
    want, failing = call(*place), env.rank == env.world_size - 1
    failed = 0
    for last in range(4):
        try:
            with flex_errors.Limited(last if failing else None):
                call(*place)
        except torch.OutOfMemoryError:
            failed += 1
        torch.cuda.synchronize()
        for mine, theirs in zip(call(*place), want, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert (failed > 0) == failing


def failing_varlen(env: Env, way: str, layout: str) -> None:
    """As :func:`failing_flex`."""
    torch.manual_seed(env.rank)
    place = way, env.rank, env.world_size, env.mesh(), layout, torch.bfloat16
    call, failing = varlen_errors.call_of(*place), env.rank == env.world_size - 1
    want, failed = call(), 0
    for last in range(6):
        try:
            with varlen_errors.Limited(last if failing else None):
                call()
        except torch.OutOfMemoryError:
            failed += 1
        torch.cuda.synchronize()
        for mine, theirs in zip(call(), want, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert (failed > 0) == failing


CASES = {
    f"{schedule}{', head-tail' if layout else ''}, {'backward' if backward else 'forward'}":
        functools.partial(failing, schedule=schedule, layout=layout, backward=backward)
    for schedule in ("ring", "mirrored_ring", "gather", "ulysses", "one_call")
    for layout in ((False, True) if schedule in ("gather", "one_call") else (False,))
    for backward in (False, True)
} | {
    f"flex {name}, {kind}": functools.partial(failing_flex, name=name, kind=kind)
    for name in flex_errors.CALLS
    for kind in (None, "head-tail", "many runs")
} | {
    f"varlen {way}, {layout}": functools.partial(failing_varlen, way=way, layout=layout)
    for way in varlen_errors.WAYS
    for layout in ("natural", "head-tail", "near blocks")
}  # fmt: skip


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    return run_asked(request, request.param, "nccl", 60)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
