"""The rest of ``scaled_dot_product_attention`` on 2 and up to 4 GPUs: masks, dropout, any shape.

One set of NCCL processes per world size runs all cases (``tests/distributed/spawn.py``), and each
test here looks up the result of its case. ``-k`` selects cases, and only those run.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from tests.distributed import behaviours, calls
from tests.distributed.calls import Case, masked
from tests.distributed.reference import Problem
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import ranks

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BASE = Problem(batch=2, heads=8, length=512, dim=64, dtype=BF16)
S2, R = (Shard(2),), (Replicate(),)


def matches(env: Env, case: Case, kernel: str | None, schedule: str = "ring") -> None:
    mesh = env.mesh(*case.mesh, names=("a", "b")) if case.mesh else env.mesh()
    with cp_dispatch.enabled(schedule=schedule), calls.only(kernel):
        outcome = calls.run(case, mesh, env.device)
    calls.judge(case, env.device, kernel, *outcome)


def behaves(env: Env, function, **how) -> None:
    function(env.mesh(), **how)


def dropout_ignores_ranks(env: Env) -> None:
    alone = env.mesh(env.world_size, 1, names=("all", "alone"))["alone"]
    behaviours.dropout_ignores_ranks(env.mesh(), alone)


def repeated_calls_are_equal(env: Env) -> None:
    """A mask changes between calls with one plan, and the gradients of the old mask are computed
    last."""
    cases = [masked(replace(BASE, seed=seed), shape="b1qk") for seed in range(3)]
    for case in cases * 2:
        matches(env, case, None)


CASES: dict = {}


def add(
    kernel: str | None, cases: dict[str, Case], prefix: str = "", schedule: str = "ring"
) -> None:
    for name, case in cases.items():
        label = f"{kernel or 'any'} {prefix}{name}"
        assert label not in CASES, label
        CASES[label] = functools.partial(matches, case=case, kernel=kernel, schedule=schedule)


def some(cases: dict[str, Case], *words: str) -> dict[str, Case]:
    return {name: case for name, case in cases.items() if any(word in name for word in words)}


# Masks: all of them with torch's choice and math, and with the other kernels those that differ.
_masks, _uneven = calls.masks(BASE), calls.uneven_masks(BASE)
add(None, _masks)
add(None, _uneven)
add("math", some(_masks, " qk", "bhqk", "b11k", "blind"))
add("math", some(_uneven, "x 203", "x 33"))
for _kernel in ("efficient", "cudnn"):
    add(_kernel, some(_masks, " qk", "bhqk", "b11k", "b1q1", "bh1k", "1111", "expanded", "blind"))
    add(_kernel, _uneven)
add("flash", some(_masks, "bool qk whole", "bias b1qk"))  # refused, as on one device
for _dtype, _name in ((FP16, "float16 "), (FP32, "float32 ")):
    _some = some(calls.masks(replace(BASE, dtype=_dtype)), "b1qk", "on columns")
    add(None, _some, _name)
_grouped = calls.masks(replace(BASE, key_heads=2))
add(None, some(_grouped, "b1qk", "1hqk", "blind", "on heads"), "gqa ")
add(None, {"float32 bias": masked(BASE, shape="1hqk", dtype=FP32)}, "mixed ")
add(None, calls.bias_gradients(BASE))
add("math", some(calls.bias_gradients(replace(BASE, dtype=FP32)), "1hqk", "blind"), "float32 ")

for _kernel in ("efficient", "cudnn", "math"):
    _some = some(_masks, " qk", "b1qk", "b11k", "blind") | _uneven
    add(_kernel, _some, "gather ", schedule="gather")

# One side whole, with every kernel that supports it.
add(None, calls.one_sided(BASE))
for _kernel in ("flash", "efficient", "cudnn", "math"):
    _words = ("decode full 1 rows", "decode causal 7 rows", "uneven", "replicated keys causal")
    add(_kernel, some(calls.one_sided(BASE), *_words))
add(None, {
    "decode 1 x 8192 gqa": Case(
        replace(BASE, batch=1, heads=32, key_heads=8, length=1, key_length=8192, dim=128),
        R, {"key_placements": S2, "needs": (False,) * 3},
    ),
})  # fmt: skip

# Two mesh dims, on 4 GPUs.
add(None, calls.two_dims(replace(BASE, batch=4)))
for _kernel in ("flash", "cudnn"):
    add(_kernel, some(calls.two_dims(replace(BASE, batch=4)), "on both"))

# Shapes.
add(None, calls.ranks_of_tensors(replace(BASE, length=130)))
for _kernel in ("flash", "efficient", "cudnn", "math"):
    add(_kernel, some(calls.ranks_of_tensors(replace(BASE, length=128)), "-D causal", "-D full"))
    for _causal in (False, True):
        _mla = replace(BASE, dim=192, value_dim=128, causal=_causal)
        _name = "causal" if _causal else "full"
        add(_kernel, {f"192/128 {_name}": Case(_mla)})
        add(_kernel, {f"96/40 {_name}": Case(replace(_mla, dim=96, value_dim=40, length=250))})
    _wide = replace(BASE, length=32, dim=8, causal=True)
    add(_kernel, {"8200 x 8 batch x heads": Case(replace(_wide, batch=8200, heads=8))})
    add(_kernel, {"65600 x 1 batch x heads": Case(replace(_wide, batch=65600, heads=1))})
    add(_kernel, {"1 x 65600 batch x heads": Case(replace(_wide, batch=1, heads=65600))})
add(None, {"192/128": Case(replace(BASE, dim=192, value_dim=128, causal=True))})
add(None, {"8200 x 8 with a mask": masked(replace(_wide, causal=False, batch=8200), shape="b11k")})

# Extreme numbers and lengths.
add(None, calls.extremes(BASE))
for _kernel in ("flash", "efficient", "cudnn", "math"):
    add(_kernel, some(calls.extremes(BASE), "logits", "length 1", "3 rows", "zero batch full"))
add(None, some(calls.extremes(replace(BASE, dtype=FP32)), "logits"), "float32 ")
add(None, {
    f"{kind} logits x 30": masked(replace(BASE, amplitude=30.0), shape="b1qk", dtype=dtype)
    for kind, dtype in (("mask", torch.bool), ("bias", None))
})  # fmt: skip

for _dtype in (FP32, BF16):
    for _name, _how in {
        "": {},
        " causal": {"causal": True},
        " decode": {"placements": R, "length": 5},
        " replicated keys": {"keys": R},
    }.items():
        CASES[f"dropout exact{_name} {_dtype}"] = functools.partial(
            behaves, function=behaviours.dropout_exact, dtype=_dtype, **_how
        )
    CASES[f"dropout repeats {_dtype}"] = functools.partial(
        behaves, function=behaviours.dropout_repeats, dtype=_dtype
    )
CASES["dropout ignores ranks"] = dropout_ignores_ranks
for _lengths in ((512, 512), (256, 640), (640, 256), (255, 513)):
    CASES[f"causal biases {_lengths}"] = functools.partial(
        behaves, function=behaviours.causal_biases, lengths=_lengths, dtype=BF16
    )
CASES["causal biases replicated keys"] = functools.partial(
    behaves, function=behaviours.causal_biases, lengths=(256, 640), dtype=BF16, key_placements=R
)
for _kernel in ("flash", "efficient", "cudnn", "math"):
    CASES[f"float16 overflow {_kernel}"] = functools.partial(
        behaves, function=behaviours.half_overflows_alike, kernel=_kernel
    )
CASES["repeated calls are equal"] = repeated_calls_are_equal

_FOUR = {
    name
    for name, case in CASES.items()
    if "case" in getattr(case, "keywords", ()) and case.keywords["case"].mesh
}


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "nccl", 60, lambda name: size == 4 or name not in _FOUR)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    if case not in outcomes:
        pytest.skip("needs 4 GPUs")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
