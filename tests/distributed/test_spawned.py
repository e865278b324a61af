"""What only real processes can show, on gloo: deadlocks, compilation, the profiler, sub-meshes.

Two spawns in all, one of 2 ranks and one of 4; see ``spawn.py``.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.flop_counter import FlopCounterMode

import cp_dispatch
from tests.distributed.compiled import COMPILED
from tests.distributed.modules import MODULES
from tests.distributed.reference import Problem, check, exact, one_device
from tests.distributed.sharded import SEQUENCE, distribute, run_sharded
from tests.distributed.spawn import Env, run_asked

PROBLEM = Problem(causal=True, key_heads=2, length=250)


@functools.cache
def judged(problem: Problem, kernel: str = "cpu_flash"):
    tensors = problem.tensors()
    return tensors, exact(problem, tensors), one_device(problem, tensors, kernel)


def ring(env: Env, problem: Problem, kernel: str) -> None:
    tensors, want, single = judged(problem, kernel)
    with cp_dispatch.enabled():
        check(run_sharded(problem, tensors, env.mesh(), kernel=kernel), want, single)


def two_dims(env: Env) -> None:
    problem = Problem(causal=True, key_heads=2, length=65)
    tensors, want, single = judged(problem)
    for names, placements in (
        (("dp", "cp"), (Shard(0), Shard(2))),
        (("cp", "tp"), (Shard(2), Shard(1))),
    ):
        mesh = env.mesh(2, env.world_size // 2, names=names)
        with cp_dispatch.enabled():
            check(run_sharded(problem, tensors, mesh, placements), want, single)


def other_collectives_in_flight(env: Env) -> None:
    """Asynchronous all-reduces of the mesh's own group before, between and after the calls, waited
    for at the end."""
    tensors, want, single = judged(PROBLEM)
    mesh = env.mesh()
    works = []

    def start() -> None:
        for _ in range(3):
            buffer = torch.full((100_000,), float(env.rank + 1))
            works.append((dist.all_reduce(buffer, group=mesh.get_group(), async_op=True), buffer))

    inputs = [distribute(x, mesh, SEQUENCE).requires_grad_() for x in tensors[:3]]
    grad = distribute(tensors[3], mesh, SEQUENCE)
    with cp_dispatch.enabled():
        for _ in range(5):
            start()
            output = PROBLEM.attend(*inputs)
            start()
            grads = torch.autograd.grad(output, inputs, grad)
            start()
    for work, buffer in works:
        work.wait()
        assert (buffer == env.world_size * (env.world_size + 1) / 2).all()
    check([x.full_tensor().detach() for x in (output, *grads)], want, single)


def toggled(env: Env) -> None:
    """On, off, on, nested and as a decorator, with the same answer whenever it is on."""
    tensors, want, single = judged(PROBLEM)

    def once():
        inputs = [distribute(x, env.mesh(), SEQUENCE) for x in tensors[:3]]
        assert cp_dispatch.explain(*inputs, is_causal=True, enable_gqa=True).schedule == "ring"
        check(run_sharded(PROBLEM, tensors, env.mesh()), want, single)

    for _ in range(2):
        cp_dispatch.enable()
        once()
        with cp_dispatch.enabled(schedule="ring"):
            once()
        cp_dispatch.disable()
        assert not cp_dispatch.is_enabled()
        inputs = [distribute(x, env.mesh(), SEQUENCE) for x in tensors[:3]]
        assert cp_dispatch.explain(*inputs, is_causal=True, enable_gqa=True).handler == "stock"
        cp_dispatch.enabled()(once)()
    plain = PROBLEM.attend(*tensors[:3])
    with cp_dispatch.enabled():
        torch.testing.assert_close(PROBLEM.attend(*tensors[:3]), plain, rtol=0, atol=0)


def ranks_outside_of_the_mesh(env: Env) -> None:
    """All ranks run the program. Those outside the mesh take no part and do not wait."""
    problem = Problem(causal=True, length=65)
    tensors, want, single = judged(problem)
    for members in ([1, 3], [0, 1, 2], [2]):
        mesh = DeviceMesh("cpu", members)
        inputs = [distribute(x, mesh, SEQUENCE).requires_grad_() for x in tensors[:3]]
        with cp_dispatch.enabled():
            output = problem.attend(*inputs)
            grads = torch.autograd.grad(output, inputs, distribute(tensors[3], mesh, SEQUENCE))
        assert output.placements == SEQUENCE and output.shape == want[0].shape
        if env.rank in members:
            check([x.full_tensor().detach() for x in (output, *grads)], want, single)


def profiler_sees_the_bytes(env: Env) -> None:
    problem = Problem(batch=1, heads=4, key_heads=2, length=16 * env.world_size, dim=8)
    mesh = env.mesh()
    inputs = [distribute(x, mesh, SEQUENCE) for x in problem.tensors()[:3]]
    with (
        cp_dispatch.enabled(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile,
    ):
        problem.attend(*inputs)
    gloo = [event for event in profile.events() if event.name.startswith("gloo:")]
    assert {event.name for event in gloo} == {"gloo:all_to_all"}, gloo
    one = 2 * 2 * 16 * 8 * 4  # key and value, heads, rows, dim, bytes
    assert len(gloo) == env.world_size - 1
    for event in gloo:
        assert [one] in event.input_shapes, (event.input_shapes, one)


def flops_of_the_whole_sequence(env: Env) -> None:
    problem = Problem(batch=2, heads=4, key_heads=2, length=64, key_length=96, dim=16)
    mesh = env.mesh()
    tensors = [distribute(x, mesh, SEQUENCE) for x in problem.tensors()]
    inputs = [x.requires_grad_() for x in tensors[:3]]
    product = 2 * 2 * 4 * 64 * 96 * 16  # multiply and add, batch, heads, rows, keys, dim
    with cp_dispatch.enabled():
        with FlopCounterMode(display=False) as forward:
            output = problem.attend(*inputs)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(output, inputs, tensors[3])
    assert forward.get_total_flops() == 2 * product
    assert backward.get_total_flops() == 5 * product


CASES = {
    **{
        f"ring {kernel} {dtype} {'causal' if causal else 'full'}": functools.partial(
            ring,
            problem=Problem(causal=causal, key_heads=2, length=250, dtype=dtype),
            kernel=kernel,
        )
        for kernel in ("cpu_flash", "math")
        for dtype in (torch.float32, torch.bfloat16)
        for causal in (False, True)
    },
    "other collectives in flight": other_collectives_in_flight,
    "toggled": toggled,
    "profiler sees the bytes": profiler_sees_the_bytes,
    "flops of the whole sequence": flops_of_the_whole_sequence,
    **MODULES,
    **COMPILED,
    "two dims": two_dims,
    "ranks outside of the mesh": ranks_outside_of_the_mesh,
}
ONLY_4 = {"two dims", "ranks outside of the mesh"}
ONLY_2 = {*MODULES, *COMPILED, "toggled", *(name for name in CASES if "math" in name)}


def _runs(case: str, world_size: int) -> bool:
    return case not in (ONLY_2 if world_size == 4 else ONLY_4)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size} ranks")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "gloo", 150, lambda name: _runs(name, size))


@pytest.mark.parametrize("case", CASES)
def test_spawned(outcomes, case):
    if case not in outcomes:
        pytest.skip("for the other number of ranks")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
