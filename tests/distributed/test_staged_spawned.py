"""The process group for tests with fewer GPUs than ranks, on CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cp_dispatch
from tests.distributed.reference import Problem, check, exact, one_device
from tests.distributed.sharded import run_sharded
from tests.distributed.spawn import Env, run_cases


def schedules(env: Env) -> None:
    problem = Problem(batch=2, heads=4, key_heads=2, length=64, dim=16, causal=True)
    tensors = problem.tensors()
    for schedule in ("gather", "natural_ring", "ulysses"):
        with cp_dispatch.enabled(schedule=schedule):
            got = run_sharded(problem, tensors, env.mesh())
        check(got, exact(problem, tensors), one_device(problem, tensors, "cpu_flash"))


def reductions(env: Env) -> None:
    whole = torch.arange(8.0).view(4, 2)
    placed = distribute_tensor(whole, env.mesh(), [Shard(0)])
    assert placed.sum().full_tensor() == whole.sum()
    torch.testing.assert_close((placed.T @ placed).full_tensor(), whole.T @ whole)
    torch.testing.assert_close(placed.redistribute(placements=[Replicate()]).to_local(), whole)
    mean = torch.full((3,), float(env.rank), dtype=torch.bfloat16)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert bool((mean == (env.world_size - 1) / 2).all())


CASES = {"schedules": schedules, "reductions": reductions}


def test_staged():
    assert run_cases(__name__, list(CASES), 2, "staged") == dict.fromkeys(CASES, "")
