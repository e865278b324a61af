"""Heads by all-to-all on 2 and up to 4 GPUs: every kernel, order and way to share the heads."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from cp_dispatch.planning import decide
from cp_dispatch.planning.planner import of_two
from cp_dispatch.planning.settle import settle
from cp_dispatch.schedules import head_costs
from cp_dispatch.schedules.comm import Ring
from tests.distributed.calls import only
from tests.distributed.permuted import balancers, run_permuted
from tests.distributed.reference import Mask, Problem, check, exact, rounding, yardstick
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import is_staged, ranks
from tests.gpu import features

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

KERNELS = ("flash", "efficient", "cudnn", "math")
SCHEDULES = ("ulysses", "hybrid:2")
BF16 = torch.bfloat16


def exactly(
    env: Env, schedule: str, kernel: str, kind: str = "natural", staged: bool = False, mesh=None,
    placements=None, where=None, by_nccl: bool = False, **fields,
) -> None:  # fmt: skip
    """As exact as one device. ``kind`` is the order. With ``staged`` there are as many stages as
    the heads allow. ``where`` gives the mask's placements. ``by_nccl`` turns copy engines off."""
    problem = Problem(**{"batch": 2, "length": 512, "dim": 64, "dtype": BF16} | fields)
    tensors = problem.tensors(env.device)
    mesh = env.mesh(*mesh, names=("a", "b")) if mesh else env.mesh()
    wanted = (lambda *_: 4) if staged else head_costs._wanted
    with (
        mock.patch.object(head_costs, "_wanted", wanted),
        mock.patch.object(head_costs, "deal", head_costs.deal.__wrapped__),  # the uncached function
        mock.patch.object(Ring, "may_push", not by_nccl),
        only(kernel),
    ):
        if kind == "natural":
            with cp_dispatch.enabled(schedule=schedule):
                got = run_sharded(problem, tensors, mesh, placements, mask_placements=where)
        else:
            balancer = balancers(problem.length, env.world_size, problem.batch)[kind]
            how = {"mask_placements": where, "schedule": schedule}
            got = run_permuted(problem, balancer, mesh, placements=placements, **how)
    floors, few = rounding(problem, tensors)
    single = yardstick(problem, tensors, kernel)
    check(got, exact(problem, tensors), single, floors=floors, few=few)


def two_schedules(env: Env, kernel: str, kind: str, **fields) -> None:
    """A forward by a gather and its backward by heads, in each order in which "auto" selects
    that."""
    taken = []

    def choose(plan, wish, device_type, *_):
        taken.append(of_two(*(settle(plan, wish, device_type) for wish in ("gather", "ulysses"))))
        return taken[-1]

    with mock.patch.object(decide, "choose", choose), mock.patch.object(decide, "_plans", {}):
        for _ in range(2):
            exactly(env, "auto", kernel, kind, **fields)
    assert {x.op_schedule.removeprefix("mirrored_") for x in taken} == {"gather+ulysses"}


def repeated(env: Env, kernel: str, kind: str, staged: bool) -> None:
    """Consecutive calls, whose rooms are overwritten repeatedly, give the same results."""
    length = 512 * env.world_size
    problem = Problem(
        batch=1, heads=16, key_heads=8, length=length, dim=64, causal=True, dtype=BF16
    )
    balancer = balancers(length, env.world_size, 1)[kind] if kind != "natural" else None
    inputs = [
        distribute(x, env.mesh(), [Shard(2)]).requires_grad_()
        for x in problem.tensors(env.device)[:3]
    ]
    wanted = (lambda *_: 4) if staged else head_costs._wanted
    results = []
    with (
        mock.patch.object(head_costs, "_wanted", wanted),
        mock.patch.object(head_costs, "deal", head_costs.deal.__wrapped__),  # the uncached function
        cp_dispatch.enabled(schedule="ulysses", layout=balancer),
        only(kernel),
    ):
        for _ in range(10):
            output = problem.attend(*inputs)
            grads = torch.autograd.grad(output, inputs, output.detach())
            results.append([x.to_local().clone() for x in (output, *grads)])
    for output, *grads in results[1:]:
        assert torch.equal(output, results[0][0])
        for again, first in zip(grads, results[0][1:], strict=True):
            # Backward kernels add in no fixed order.
            assert (again - first).float().norm() <= 1e-2 * first.float().norm()


def memory(env: Env, kernel: str, causal: bool, order: str, by_nccl: bool) -> None:
    """Peak memory in addition to the rank's shards, for any number of ranks, with as many key heads
    as query heads. In units of q, one bf16 query shard:

    forward   6 q   query, key and value as sent and as received
              (then, without what was sent: 3 q and an output of 1 q; then at most 4 outputs:
              the kernel's, that in the shards' order, the received one, and the final one)
            + 1 q
    backward  5 q   query, key, value, output and its gradient as received
            + 3 q   their gradients
            + 5 q   the kernel's own: 3 q as in a ring, and contiguous output and its gradient
              (before that, 10 q: these as sent and as received; afterwards 12 q: the kernel's
              gradients, those in the shards' order, the received ones, and the final ones)
            + 1 q
    plus float32 logsumexps, as in a ring. Copy engines need less: torch does not allocate rooms.
    """
    layout = None
    if order == "head-tail":
        layout = cp_dispatch.HeadTail(4096 * env.world_size, env.world_size)
    with mock.patch.object(Ring, "may_push", not by_nccl):
        features._bounded(env, kernel, causal, 7, 14, schedule="ulysses", layout=layout)


CASES = {}
for _schedule in SCHEDULES:
    for _kernel in KERNELS:
        _run = functools.partial(exactly, schedule=_schedule, kernel=_kernel)
        _label = f"{_schedule} {_kernel}"
        for _heads, _key_heads in ((8, 8), (8, 2), (8, 1), (12, 3), (5, 5)):
            for _length, _dim, _batch in ((512, 64, 2), (1001, 128, 1), (250, 40, 3)):
                for _causal in (True, False):
                    _name = f"{_heads}/{_key_heads} {_batch}x{_length}x{_dim} causal={_causal}"
                    CASES[f"{_label} {_name}"] = functools.partial(
                        _run, heads=_heads, key_heads=_key_heads, length=_length, dim=_dim,
                        batch=_batch, causal=_causal,
                    )  # fmt: skip
        for _kind in ("natural", "head-tail", "documents of each row", "blocks"):
            for _causal in (True, False):
                for _by_nccl in (False, True) if _schedule == "ulysses" else (True,):
                    _name = f"{_label} {_kind} staged causal={_causal} nccl={_by_nccl}"
                    CASES[_name] = functools.partial(
                        _run, kind=_kind, staged=True, heads=16, key_heads=8, causal=_causal,
                        by_nccl=_by_nccl,
                    )  # fmt: skip
        for _heads, _key_heads in ((8, 2), (8, 1), (12, 3)) if _schedule == "ulysses" else ():
            CASES[f"{_label} {_heads}/{_key_heads} by NCCL"] = functools.partial(
                _run, heads=_heads, key_heads=_key_heads, causal=True, by_nccl=True
            )
        CASES[f"{_label} other lengths"] = functools.partial(
            _run, heads=8, length=128, key_length=384, causal=True
        )
        for _mask in (Mask("b11k"), Mask("1hqk", blind=True)) if _kernel != "flash" else ():
            for _kind in ("natural", "head-tail"):
                CASES[f"{_label} mask {_mask.shape} {_kind}"] = functools.partial(
                    _run, kind=_kind, mask=_mask, heads=8, where=[Replicate()]
                )
    CASES[f"{_schedule} bias gradient"] = functools.partial(
        exactly, schedule=_schedule, kernel="math", kind="head-tail", heads=8, length=256,
        mask=Mask("1hqk", None, needs_grad=True), where=[Replicate()],
    )  # fmt: skip
    for _dtype in (torch.float16, torch.float32):
        CASES[f"{_schedule} {_dtype}"] = functools.partial(
            exactly, schedule=_schedule, kernel="efficient", heads=8, causal=True, dtype=_dtype
        )
_FOUR = {name for name in CASES if name.startswith("hybrid")}
for _placements in (
    [Shard(0), Shard(2)], [Shard(2), Shard(1)], [Shard(2), Shard(2)], [Shard(2), Shard(0)],
):  # fmt: skip
    for _schedule in ("ulysses", "hybrid"):
        _name = f"{_schedule} on {_placements}"
        CASES[_name] = functools.partial(
            exactly, schedule=_schedule, kernel="flash", mesh=(2, 2), placements=_placements,
            batch=4, heads=8, key_heads=4, causal=True,
        )  # fmt: skip
        _FOUR.add(_name)
for _kernel in ("flash", "cudnn", "efficient", "math"):
    for _function in (
        features.inference_mode,
        features.transposed_views,
        features.compiled,
        features.other_collectives_in_flight,
        features.no_host_synchronization,
    ):
        for _schedule in SCHEDULES:
            _name = f"{_schedule} {_kernel} {_function.__name__}"
            CASES[_name] = functools.partial(_function, kernel=_kernel, schedule=_schedule)
            if _schedule != "ulysses":
                _FOUR.add(_name)
for _kernel in ("flash", "cudnn"):
    for _order, _causal in (("natural", True), ("natural", False), ("head-tail", True)):
        for _by_nccl in (False, True):
            _name = f"ulysses {_kernel} memory {_order} causal={_causal} nccl={_by_nccl}"
            CASES[_name] = functools.partial(
                memory, kernel=_kernel, causal=_causal, order=_order, by_nccl=_by_nccl
            )
    for _kind in ("natural", "head-tail"):
        for _staged in (False, True):
            CASES[f"ulysses {_kernel} repeated {_kind} staged={_staged}"] = functools.partial(
                repeated, kernel=_kernel, kind=_kind, staged=_staged
            )


for _kernel in KERNELS:
    for _kind in ("natural", "head-tail"):
        for _causal in (True, False):
            for _heads, _key_heads, _by_nccl in ((8, 2, False), (8, 1, False), (16, 8, True)):
                _name = f"two schedules {_kernel} {_kind} {_heads}/{_key_heads} causal={_causal}"
                CASES[_name] = functools.partial(
                    two_schedules, kernel=_kernel, kind=_kind, heads=_heads, by_nccl=_by_nccl,
                    key_heads=_key_heads, causal=_causal,
                )  # fmt: skip


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    size = request.param

    def runs(name: str) -> bool:
        # Groups of a hybrid use collectives, which wait for the host if ranks share GPUs.
        waits = is_staged() and "hybrid" in name and "no_host" in name
        return not waits and (size == 4 or name not in _FOUR)

    return run_asked(request, size, "nccl", 60, runs)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    if case not in outcomes:
        pytest.skip("needs 4 GPUs, or NCCL")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
