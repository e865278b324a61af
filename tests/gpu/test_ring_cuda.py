"""Ring attention on 2 and up to 4 GPUs: every kernel, forward and backward, against float64.

One set of NCCL processes per world size runs all cases (``tests/distributed/spawn.py``), and each
test here looks up the result of its case. ``-k`` selects cases, and only those run.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from tests.distributed.reference import Problem, check, exact, one_device, rounding
from tests.distributed.sharded import run_sharded
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import ranks
from tests.gpu.features import FEATURES

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BASE = Problem(batch=2, heads=8, length=1024, dim=64, dtype=BF16)
HEADS = {"mha": (8, None), "gqa": (8, 2), "mqa": (8, 1), "3 heads": (3, None), "gqa 9/3": (9, 3)}
DTYPES = {
    "flash": (FP16,),
    "efficient": (FP16, FP32),
    "cudnn": (FP16,),
    "math": (FP16, FP32),
}
KERNELS = tuple(DTYPES)
# None: torch's own choice. 2-D meshes need 4 ranks.
MESHES = {
    "dp x cp": ((2, 2), ("dp", "cp"), (Shard(0), Shard(2))),
    "cp x dp": ((2, 2), ("cp", "dp"), (Shard(2), Shard(0))),
    "cp x tp": ((2, 2), ("cp", "tp"), (Shard(2), Shard(1))),
    "tp x cp": ((2, 2), ("tp", "cp"), (Shard(1), Shard(2))),
    "replicated x cp": ((2, 2), ("x", "cp"), (Replicate(), Shard(2))),
}


def change(problem: Problem, **fields) -> Problem:
    return Problem(**{**vars(problem), **fields})


def matches(env: Env, problem: Problem, kernel: str, yardstick: str | None = None, **how) -> None:
    """The sharded call is as exact as the kernel on one device, or both refuse.

    ``yardstick`` names another kernel for calls that this one supports only in the ring.
    """
    tensors = problem.tensors(env.device)
    mesh, placements = env.mesh(), (Shard(2),)
    if "mesh" in how:
        shape, names, placements = MESHES[how.pop("mesh")]
        mesh = env.mesh(*shape, names=names)
    try:
        single = one_device(problem, tensors, yardstick or kernel)
    except RuntimeError as refusal:
        with (
            cp_dispatch.enabled(schedule="natural_ring"),
            pytest.raises(cp_dispatch.ContextParallelError),
        ):
            run_sharded(problem, tensors, mesh, placements, kernel=kernel, **how)
        print(f"both refuse: {refusal}")
        return
    with cp_dispatch.enabled(schedule="natural_ring"):
        got = run_sharded(problem, tensors, mesh, placements, kernel=kernel, **how)
    # One device's error in float64 depends on the luck of a few roundings, as does ours.
    floors, _ = rounding(problem, tensors)
    check(got, exact(problem, tensors), single, floors=floors, few=problem.dtype is FP64)


def _cases() -> dict:
    cases: dict = {}

    def add(name: str, kernel: str, yardstick: str | None = None, how=None, **fields):
        problem = change(BASE, **fields)
        assert f"{kernel} {name}" not in cases
        cases[f"{kernel} {name}"] = functools.partial(
            matches, problem=problem, kernel=kernel, yardstick=yardstick, **(how or {})
        )

    for kernel in KERNELS:
        for causal in (False, True):
            mask = "causal" if causal else "full"
            for label, (heads, key_heads) in HEADS.items():
                add(f"{mask} {label}", kernel, causal=causal, heads=heads, key_heads=key_heads)
            for dtype in DTYPES[kernel]:
                add(f"{mask} {dtype}", kernel, causal=causal, dtype=dtype, key_heads=4)
            for length in (1000, 1023, 130):
                add(f"{mask} uneven {length}", kernel, causal=causal, length=length)
            # On one device neither flash nor cuDNN supports causal calls between different lengths.
            stick = "efficient" if causal and kernel in ("flash", "cudnn") else None
            add(f"{mask} 512 x 1536", kernel, stick, causal=causal, length=512, key_length=1536)
            add(f"{mask} 1536 x 512", kernel, stick, causal=causal, length=1536, key_length=512)
            add(f"{mask} 700 x 900 gqa", kernel, stick, causal=causal, length=700,
                key_length=900, key_heads=2)  # fmt: skip
            add(f"{mask} fewer rows than ranks", kernel, stick, causal=causal, length=3,
                key_length=64, heads=64)  # fmt: skip
        for dim in (8, 36, 40, 80, 96, 128, 192, 256):
            add(f"head dim {dim}", kernel, causal=True, dim=dim, key_heads=4, length=768)
        add("head dim 36 full", kernel, dim=36, length=768)
        add("scale 0.3", kernel, causal=True, scale=0.3, key_heads=2)
        add("long 8192", kernel, causal=True, batch=1, heads=2, length=8192, dim=128)
        add("only query needs grad", kernel, how={"needs": (True, False, False)}, causal=True)
        add("only value needs grad", kernel, how={"needs": (False, False, True)}, causal=True)
        add("no gradients", kernel, how={"needs": (False,) * 3}, causal=True, key_heads=2)
        add("replicated key and value", kernel, how={"key_placements": (Replicate(),)}, causal=True)
        for mesh in MESHES:
            add(f"mesh {mesh}", kernel, how={"mesh": mesh}, causal=True, key_heads=4)
    add("fp32 head dim 36", "efficient", causal=True, dim=36, dtype=FP32)
    add("value dim 48", "math", causal=True, value_dim=48)
    add("value dim 32", "efficient", causal=True, value_dim=32)
    add("fp64 causal gqa", "math", causal=True, dtype=FP64, key_heads=2, length=128, dim=16)
    add("fp64 full", "math", dtype=FP64, length=130, dim=16, batch=1)
    return cases


CASES = {**_cases(), **FEATURES}


def _needs_four(case: str) -> bool:
    return " mesh " in case


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "nccl", 120, lambda name: size == 4 or not _needs_four(name))


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    if case not in outcomes:
        pytest.skip("needs 4 GPUs")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
