"""Groups of some ranks on 4 GPUs, in processes whose communicators NCCL has already created. With a
``device_id`` torch splits new ones off the world's, with all ranks together."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cp_dispatch
from tests.distributed.reference import Problem, check, exact, yardstick
from tests.distributed.sharded import run_sharded
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ranks() < 4, reason="needs four GPUs")]


def at_other_times(env: Env, schedule: str) -> None:
    """The first pair attends before the second does anything, as the stages of a pipeline do."""
    mesh = env.mesh(2, 2, names=("stage", "cp"))["cp"]
    dtype = torch.bfloat16 if env.device.type == "cuda" else torch.float32
    problem = Problem(batch=1, heads=4, length=512, dim=64, causal=True, dtype=dtype)
    tensors = problem.tensors(env.device)
    kernel = "flash" if env.device.type == "cuda" else "cpu_flash"
    for stage in (0, 1):
        if env.rank // 2 == stage:
            with cp_dispatch.enabled(schedule=schedule):
                got = run_sharded(problem, tensors, mesh, (Shard(2),), kernel=kernel)
            check(got, exact(problem, tensors), yardstick(problem, tensors, kernel))
        dist.barrier()


CASES = {
    schedule: functools.partial(at_other_times, schedule=schedule)
    for schedule in ("natural_ring", "gather", "ulysses")
}


@pytest.fixture(scope="module")
def outcomes(request) -> dict[str, str]:
    return run_asked(request, 4, "nccl", 60)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
