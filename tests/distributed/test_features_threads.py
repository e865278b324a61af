"""Masks, bias gradients, decoding, and inputs of any rank and length, on ranks in threads, against
float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import cp_dispatch
from tests.distributed import behaviours, calls
from tests.distributed.reference import Problem
from tests.distributed.threads import run_threads

BASE = Problem(length=128, dim=16)
CPU = torch.device("cpu")

FAMILIES = {
    "masks": calls.masks(BASE),
    "uneven masks": calls.uneven_masks(replace(BASE, batch=1)),
    "bias gradients": calls.bias_gradients(replace(BASE, length=120)),
    "one side whole": calls.one_sided(replace(BASE, length=120)),
    "dims": calls.ranks_of_tensors(replace(BASE, length=100)),
    "extremes": calls.extremes(BASE),
    "gqa masks": calls.masks(replace(BASE, key_heads=2)),
    "16-bit bias gradients": calls.bias_gradients(replace(BASE, dtype=torch.bfloat16)),
}
CASES = {
    f"{family}: {name}": case for family, cases in FAMILIES.items() for name, case in cases.items()
}
# Two dims here only if each shards something else. The sequence over both needs real processes.
MESHES = {
    name: case
    for name, case in calls.two_dims(replace(BASE, length=100, batch=3)).items()
    if "on both" not in name
}
ON_ALL = ("blind b1qk", "bhqk on rows", "b11k on columns", "250 x 250", "131 x 203", "1 x 33",
          "gradient 1hqk whole", "gradient decode", "gqa uneven", "causal 7 rows", "length 1 full",
          "3 rows causal", "one key", "zero batch full", "logits x 1000 causal", "mask b1k",
          "on columns")  # fmt: skip


def matches(case: calls.Case, world_size: int, kernel: str | None = None) -> None:
    def rank_body(rank: int):
        return calls.run(case, init_device_mesh("cpu", case.mesh or (world_size,)), CPU)

    with cp_dispatch.enabled(), calls.only(kernel):
        outcomes = run_threads(world_size, rank_body)
    # Every rank has gathered the whole results. Judge one; the others are the same.
    calls.judge(case, CPU, kernel, *outcomes[0])
    for results, _ in outcomes[1:]:
        for mine, first in zip(results, outcomes[0][0], strict=True):
            assert torch.equal(mine, first)


@pytest.mark.parametrize("name", CASES)
def test_on_four_ranks(name):
    matches(CASES[name], 4)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(ON_ALL)])
def test_on_other_numbers_of_ranks(name, world_size):
    matches(CASES[name], world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", [n for n, case in CASES.items() if n.endswith(ON_ALL) and "gradient" not in n]
)
def test_with_the_math_kernel(name, dtype):
    case = CASES[name]
    matches(replace(case, problem=replace(case.problem, dtype=dtype)), 3, "math")


@pytest.mark.parametrize("name", MESHES)
def test_on_two_dims(name):
    matches(MESHES[name], 4)


@pytest.mark.parametrize("lengths", [(96, 96), (40, 110), (110, 40), (17, 50)], ids=str)
@pytest.mark.parametrize("keys", [behaviours.S2, behaviours.R], ids=str)
def test_causal_biases(lengths, keys):
    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        behaviours.causal_biases(mesh, lengths=lengths, key_placements=keys)

    run_threads(4, rank_body)


def test_float16_overflows_as_on_one_device():
    problem, tensors, *known = behaviours.overflowing("cpu", "cpu_flash", 4)

    def rank_body(rank: int) -> torch.Tensor:
        return behaviours.value_gradient(problem, tensors, init_device_mesh("cpu", (4,)))

    with cp_dispatch.enabled(), calls.only("cpu_flash"):
        behaviours.overflows_alike(run_threads(4, rank_body)[0], *known)


@pytest.mark.parametrize("schedule", ["ring", "auto"])
def test_a_plain_mask_is_that_of_every_rank(schedule):
    """Each rank passes the whole plain mask, and the schedule that was requested is kept."""
    case = calls.masked(replace(BASE, length=120), shape="1hqk", dtype=None)

    def rank_body(rank: int):
        mesh = init_device_mesh("cpu", (3,))
        return calls.run(case, mesh, CPU)

    with cp_dispatch.enabled(schedule=schedule):
        outcomes = run_threads(3, rank_body)
    calls.judge(case, CPU, None, *outcomes[0])


def test_replicated_call_takes_masks_too():
    """If the sequence is not sharded, a rank computes alone."""
    for placed in (None, (Replicate(),)):
        case = calls.masked(BASE, placed, (Replicate(),), shape="b1qk", blind=True)
        matches(case, 2)
