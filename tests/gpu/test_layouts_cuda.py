"""Attention on permuted data, and on data in natural order that cp_dispatch balances itself, on 2
and up to 4 GPUs, against float64."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from cp_dispatch import fast_path
from cp_dispatch.backends import BACKENDS, packed_heads
from cp_dispatch.schedules import mailboxes, reach
from tests.distributed.calls import only
from tests.distributed.permuted import balancers, run_permuted
from tests.distributed.reference import Mask, Problem, check, exact, rounding, yardstick
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import ranks

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

KERNELS = ("flash", "efficient", "cudnn", "math")
BF16 = torch.bfloat16


def judge(problem: Problem, device, kernel: str, got) -> None:
    tensors = problem.tensors(device)
    floors, few = rounding(problem, tensors)
    single = yardstick(problem, tensors, kernel)
    check(got, exact(problem, tensors), single, floors=floors, few=few)


def laid_out(
    env: Env, kernel: str, kind: str, length: int, heads: int, mask=None, where=None,
    schedule: str = "ring", **how,
) -> None:  # fmt: skip
    how = {"dim": 64} | how
    problem = Problem(batch=2, heads=heads, length=length, dtype=BF16, mask=mask, **how)
    balancer = balancers(length, env.world_size, 2)[kind]
    with only(kernel):
        got = run_permuted(problem, balancer, env.mesh(), mask_placements=where, schedule=schedule)
    judge(problem, env.device, kernel, got)


def natural(
    env: Env, schedule: str, kernel: str, heads: int, key_heads: int, length: int, **how
) -> None:
    problem = Problem(batch=2, heads=heads, key_heads=key_heads, length=length, dtype=BF16, **how)
    tensors = problem.tensors(env.device)
    with cp_dispatch.enabled(schedule=schedule):
        got = run_sharded(problem, tensors, env.mesh(), kernel=kernel)
    judge(problem, env.device, kernel, got)


def grouped_heads(env: Env, kernel: str, schedule: str, kind: str | None, causal: bool) -> None:
    """Backwards that hold the gradients of only a few query heads at a time, as with long
    shards."""
    calls = []
    backend = type(BACKENDS[kernel])
    plain, pack = backend._backward, packed_heads.packed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "largest_workspace", 2**18)
        patch.setattr(packed_heads, "LEAST_SAVED", 1)
        patch.setattr(packed_heads, "packed", lambda *x: (calls.append("packed"), pack(*x))[1])
        patch.setattr(
            backend, "_backward",
            lambda self, go, q, k, *x: (calls.append(k.size(1)), plain(self, go, q, k, *x))[1],
        )  # fmt: skip
        how = {"heads": 8, "key_heads": 4, "length": 512 * env.world_size, "dim": 128}
        if kind is None:
            natural(env, schedule, kernel, causal=causal, **how)
        else:
            laid_out(env, kernel, kind, causal=causal, schedule=schedule, **how)
    # Some gradients are too many for one call. The first rank has a tile with more than twice as
    # many keys as queries: in head-tail order from 3 ranks on, else from 4.
    assert {1, 2} & set(calls), calls
    if env.rank == 0 and env.world_size > (2 if causal and kind is not None else 3):
        assert ("packed" in calls) == (kernel == "cudnn"), calls


def two_mesh_dims(env: Env, placements, kind: str) -> None:
    problem = Problem(batch=4, heads=8, length=512, dim=64, causal=True, dtype=BF16)
    ranks = 4 if placements.count(Shard(2)) == 2 else 2
    mesh = env.mesh(2, 2, names=("a", "b"))
    balancer = balancers(512, ranks, 4)[kind]
    for schedule in ("ring", "gather"):
        with only("flash"):
            got = run_permuted(problem, balancer, mesh, placements=placements, schedule=schedule)
        judge(problem, env.device, "flash", got)


def large_enough_to_pay(env: Env, tokens: int, schedules: set[str], key_heads: int = 4) -> None:
    """Calls for which "auto" selects one of ``schedules``, by the costs of this GPU."""
    length = tokens * env.world_size
    # On 2 ranks, as many keys as on 4.
    key_heads = key_heads if key_heads < 64 else 4 * key_heads // env.world_size
    problem = Problem(1, max(16, key_heads), key_heads, length, dim=128, causal=True, dtype=BF16)
    tensors = problem.tensors(env.device)
    inputs = [distribute(x, env.mesh(), [Shard(2)]) for x in tensors[:3]]
    results = []
    for wish in ("auto", "natural_ring"):
        with cp_dispatch.enabled(schedule=wish), only("cudnn"):
            plan = cp_dispatch.explain(*inputs, is_causal=True, enable_gqa=True)
            assert plan.schedule in (schedules if wish == "auto" else {"ring"}), plan
            results.append(problem.attend(*inputs).full_tensor().double())
    # Both round partial outputs to bfloat16, in a different order.
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert error < 2 * torch.finfo(BF16).eps, error


def with_and_without_copy_engines(env: Env, schedule: str, kernel: str, causal: bool) -> None:
    """The ranks of one host write to each other's memory, and NCCL gives the same results."""
    problem = Problem(batch=2, heads=8, key_heads=2, length=1024, dim=64, causal=causal, dtype=BF16)
    tensors = problem.tensors(env.device)
    with cp_dispatch.enabled(schedule=schedule), only(kernel):
        inputs = [distribute(x, env.mesh(), [Shard(2)]) for x in tensors[:3]]
        plan = cp_dispatch.explain(*inputs, is_causal=causal, enable_gqa=True)
    assert schedule in (plan.schedule, plan.schedule.removeprefix("mirrored_")), plan
    results = []
    for wanted in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CP_DISPATCH_COPY_ENGINES", wanted)
            patch.setattr(reach, "_reachable", {})
            patch.setattr(fast_path, "_known", {})  # a known call does not check
            with cp_dispatch.enabled(schedule=schedule):
                for _ in range(3):  # rooms are reused
                    got = run_sharded(problem, tensors, env.mesh(), kernel=kernel)
            ((_, reached),) = reach._reachable.values()
            assert reached == (wanted == "1")
        judge(problem, env.device, kernel, got)
        results.append(got)
    assert mailboxes.held_bytes() > 0
    mailboxes.free()
    assert mailboxes.held_bytes() == 0
    with cp_dispatch.enabled(schedule=schedule):
        got = run_sharded(problem, tensors, env.mesh(), kernel=kernel)
    judge(problem, env.device, kernel, got)
    # Backward kernels add in no fixed order. An all-gather brings a rank's own keys too, between
    # those of others, so from 3 ranks on some compute two tiles where copy engines bring one.
    if schedule != "gather" or causal or env.world_size == 2:
        assert torch.equal(*(got[0] for got in results))


CASES = {
    "balanced by itself, short": functools.partial(
        large_enough_to_pay, tokens=8192, schedules={"mirrored_gather"}
    ),
    "balanced by itself, many keys": functools.partial(
        large_enough_to_pay, tokens=8192, key_heads=72, schedules={"mirrored_ring", "ulysses"}
    ),
}
for _kernel in KERNELS:
    for _schedule, _ways in (
        ("gather", (True, False)),
        ("mirrored_ring", (True,)),
        ("one_call", (True, False) if _kernel == "flash" else (False,)),
    ):
        for _causal in _ways:
            CASES[f"{_kernel} {_schedule} by copy engines and NCCL causal={_causal}"] = (
                functools.partial(
                    with_and_without_copy_engines,
                    schedule=_schedule,
                    kernel=_kernel,
                    causal=_causal,
                )
            )
    for _kind in ("head-tail", "documents", "documents of each row", "blocks"):
        for _length in (512, 1000) if _kind == "head-tail" else (512,):
            for _causal in (True, False):
                CASES[f"{_kernel} {_kind} {_length} causal={_causal}"] = functools.partial(
                    laid_out, kernel=_kernel, kind=_kind, length=_length, heads=4, causal=_causal
                )
    CASES[f"{_kernel} odd head-tail"] = functools.partial(
        laid_out, kernel=_kernel, kind="head-tail", length=251, heads=3, causal=True
    )
    for _heads, _key_heads, _length in ((8, 2, 1024), (3, 3, 512), (8, 1, 256)):
        for _dim in (64, 128):
            _shape = {"heads": _heads, "key_heads": _key_heads, "length": _length, "dim": _dim}
            _name = f"{_heads}/{_key_heads} {_length} {_dim}"
            for _schedule, _causal in (
                ("mirrored_ring", True),
                ("gather", True),
                ("gather", False),
                ("one_call", _kernel == "flash"),
            ):
                CASES[f"{_kernel} {_schedule} {_name} causal={_causal}"] = functools.partial(
                    natural, schedule=_schedule, kernel=_kernel, causal=_causal, **_shape
                )
            for _schedule in ("gather", "one_call"):  # one_call runs only with flash
                CASES[f"{_kernel} {_schedule} head-tail {_name}"] = functools.partial(
                    laid_out, kernel=_kernel, kind="head-tail", causal=True, schedule=_schedule,
                    **_shape,
                )  # fmt: skip
for _kernel in ("flash", "cudnn"):
    for _kind, _causal in (("head-tail", True), (None, True), (None, False)):
        CASES[f"{_kernel} grouped heads {_kind} causal={_causal}"] = functools.partial(
            grouped_heads, kernel=_kernel, schedule="gather", kind=_kind, causal=_causal
        )
for _kernel in ("efficient", "cudnn", "math"):
    for _mask in (Mask("qk"), Mask("b11k"), Mask("1hqk", blind=True), Mask("bhqk", None)):
        for _kind in ("head-tail", "documents of each row"):
            for _where in (None, [Replicate()], [Shard(2)], [Shard(3)]):
                _dims = [p.dim for p in _where or () if isinstance(p, Shard)]
                if _dims and (len(_mask.shape) < 4 or _mask.shape[_dims[0]] == "1"):
                    continue
                if _dims and _mask.shape[0] == "1" and _kind != "head-tail":
                    continue
                _name = f"{_kernel} {_kind} mask {_mask.shape} {_mask.dtype} {_where}"
                for _schedule in ("ring", "gather"):
                    CASES[f"{_name} {_schedule}"] = functools.partial(
                        laid_out, kernel=_kernel, kind=_kind, length=512, heads=4,
                        mask=_mask, where=_where, schedule=_schedule,
                    )  # fmt: skip
for _shape in ("1hqk", "b11k", "11q1"):
    CASES[f"math bias gradient {_shape}"] = functools.partial(
        laid_out, kernel="math", kind="head-tail", length=256, heads=4,
        mask=Mask(_shape, None, needs_grad=True), where=[Replicate()],
    )  # fmt: skip
_FOUR = {}
for _kind in ("head-tail", "documents of each row"):
    for _placements in (
        [Shard(0), Shard(2)], [Shard(2), Shard(1)], [Shard(2), Shard(2)], [Shard(2), Shard(0)],
    ):  # fmt: skip
        _FOUR[f"{_kind} on {_placements}"] = functools.partial(
            two_mesh_dims, placements=_placements, kind=_kind
        )
CASES |= _FOUR


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "nccl", 60, lambda name: size == 4 or name not in _FOUR)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    if case not in outcomes:
        pytest.skip("needs 4 GPUs")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
