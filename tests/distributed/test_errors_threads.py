"""If ranks write to each other's rooms, an error on some of them leaves no other rank waiting, and
no flag for the next call (:mod:`cp_dispatch.schedules.flags_alone`).

Copy engines are emulated (:mod:`tests.distributed.rooms`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode

import cp_dispatch
from cp_dispatch import HeadTail, kernels
from cp_dispatch.backends import BACKENDS
from cp_dispatch.backends.cpu_flash import CpuFlash
from cp_dispatch.schedules import SCHEDULES, flags_alone
from cp_dispatch.schedules.job import Job
from tests.distributed.calls import only
from tests.distributed.permuted import balancers
from tests.distributed.reference import Mask, Problem, check, exact, one_device
from tests.distributed.rooms import Rooms
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.test_head_groups_threads import limit
from tests.distributed.threads import run_threads


@pytest.fixture
def rooms(monkeypatch):
    return Rooms(monkeypatch)


class Memory(TorchFunctionMode):
    """The memory of one rank: allocation number ``last``, and all later ones, fail."""

    ALLOCATE = {"cat", "clone", "contiguous", "new_empty", "new_zeros", "repeat_interleave", "to"}

    def __init__(self, last: int | None):
        super().__init__()
        self.left, self.was_missing = last, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.left is not None and getattr(func, "__name__", "") in self.ALLOCATE:
            self.left -= 1
            if self.left < 0:
                self.was_missing = True
                raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


class Schedules(dict):
    """``SCHEDULES``, run with the memory of their thread's rank."""

    def __init__(self):
        super().__init__()
        self.memory = threading.local()

    def __missing__(self, name: str):
        self[name] = found = _Limited(SCHEDULES[name], self.memory)
        return found


class _Limited:
    def __init__(self, inner, memory):
        self._inner, self._memory = inner, memory

    def __getattr__(self, name: str):
        found = getattr(self._inner, name)
        if name == "KnownCalls":
            return lambda job: _Limited(found(job), self._memory)
        return found

    def forward(self, *args):
        return self._within(self._inner.forward, args)

    def backward(self, *args):
        return self._within(self._inner.backward, args)

    def _within(self, method, args):
        tensor = next(x for x in args if isinstance(x, torch.Tensor))
        # Error handling runs on meta tensors, which take no memory.
        with contextlib.nullcontext() if tensor.is_meta else self._memory.mode:
            return method(*args)


CALLS = [
    ("gather", None), ("gather", "head-tail"), ("natural_ring", None), ("mirrored_ring", None),
    ("ring", "head-tail"), ("ring", "documents"), ("one_call", None), ("ulysses", None),
    ("groups", None), ("groups", "head-tail"), ("mask", None), ("mask", "head-tail"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("schedule, kind", CALLS)
@pytest.mark.parametrize("failing", [(1,), (0, 2)], ids=str)
def test_memory_runs_out_anywhere(rooms, monkeypatch, caplog, failing, schedule, kind, where):
    """Whatever the memory was for: packing, results, sums."""
    how = {"causal": schedule != "one_call"}
    if schedule == "mask":
        how = {"mask": Mask("1hqk", None)}
    problem = Problem(heads=8, key_heads=4, length=96, dim=16, **how)
    tensors, layout = problem.tensors(), balancers(96, 3, 1).get(kind)
    schedules, barrier, left = Schedules(), threading.Barrier(3), [0, 0, 0]
    monkeypatch.setattr(kernels, "SCHEDULES", schedules)
    monkeypatch.setattr(kernels, "_jobs", {})
    if schedule == "groups":
        limit(monkeypatch, problem, 2)
    chosen = {"groups": "gather", "mask": "ring"}.get(schedule, schedule)
    want = alone = None
    if layout is None:
        want, alone = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (3,))
        shards = [distribute(x, mesh, (Shard(2),)) for x in tensors]
        inputs = [x.requires_grad_() for x in shards[:3]]
        mask = problem.attn_mask()
        everything, masks = Memory(None), [] if mask is None else [mask.detach()]
        schedules.memory.mode = everything
        with cp_dispatch.enabled(schedule=chosen, layout=layout):
            for last in itertools.count(step=len(failing)):  # two ranks: every second number
                memory = Memory(last) if rank in failing else everything
                schedules.memory.mode = memory if where == "forward" else everything
                missing = False
                try:
                    output = problem.attend(*inputs, *masks)
                    schedules.memory.mode = memory
                    if where == "backward":
                        torch.autograd.grad(output, inputs, shards[3])
                except torch.OutOfMemoryError:
                    missing = True
                assert missing == memory.was_missing
                schedules.memory.mode = everything
                left[rank] = missing
                barrier.wait()
                rooms.assert_all_is_quiet()
                done = not any(left)
                barrier.wait()
                if done:
                    break
            assert last > 3
            if layout is None:
                check(run_sharded(problem, tensors, mesh), want, alone)

    with only("cpu_flash"):
        run_threads(3, rank_body)
    rooms.assert_all_is_quiet()
    assert rooms.used and not caplog.records


@pytest.mark.parametrize("schedule, causal", [
    ("gather", True), ("gather", False), ("one_call", False), ("natural_ring", True),
])  # fmt: skip
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_all_leaves_no_flag(rooms, monkeypatch, where, schedule, causal):
    """Such as running out of memory in the middle of a call. The next call is right."""
    problem = Problem(heads=2, length=64, dim=16, causal=causal)
    tensors, method = problem.tensors(), getattr(CpuFlash, where)
    failing = threading.Event()

    def fail(*args, **kwargs):
        if failing.is_set():
            raise torch.OutOfMemoryError("no memory")
        return method(*args, **kwargs)

    monkeypatch.setattr(CpuFlash, where, fail)
    barrier = threading.Barrier(4)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (4,))
        with cp_dispatch.enabled(schedule=schedule):
            for _ in range(2):
                barrier.wait()
                failing.set()
                barrier.wait()
                with pytest.raises(torch.OutOfMemoryError):
                    run_sharded(problem, tensors, mesh)
                barrier.wait()
                failing.clear()
                rooms.assert_all_is_quiet()
            barrier.wait()
            check(run_sharded(problem, tensors, mesh), exact(problem, tensors),
                  one_device(problem, tensors, "cpu_flash"))  # fmt: skip

    with only("cpu_flash"):
        run_threads(4, rank_body)
    rooms.assert_all_is_quiet()


def failing_at(calls: threading.local, method):
    """The method, which runs out of memory after ``calls.left`` successful calls of a thread; never
    if that is not set."""

    def fail(*args, **kwargs):
        calls.left = getattr(calls, "left", -1) - 1
        if calls.left == -1:
            raise torch.OutOfMemoryError("no memory")
        return method(*args, **kwargs)

    return fail


@pytest.mark.parametrize("kind", [None, "head-tail"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_gathers_backward_that_fails_at_any_tile_leaves_no_flag(rooms, monkeypatch, first, kind):
    """Also at the mirror's diagonal, while shares are being sent, and if some ranks run out of
    memory earlier than others."""
    problem = Problem(heads=2, length=64, dim=16, causal=True)
    tensors, method = problem.tensors(), CpuFlash.backward
    layout = HeadTail(64, 4) if kind else None
    calls = threading.local()

    monkeypatch.setattr(CpuFlash, "backward", failing_at(calls, method))
    barrier = threading.Barrier(4)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (4,))
        calls.left = (first + rank) % 3
        with cp_dispatch.enabled(schedule="gather", layout=layout):
            with pytest.raises(torch.OutOfMemoryError):
                run_sharded(problem, tensors, mesh)
            barrier.wait()
            rooms.assert_all_is_quiet()
            barrier.wait()
            got = run_sharded(problem, tensors, mesh)
            if layout is None:
                alone = one_device(problem, tensors, "cpu_flash")
                check(got, exact(problem, tensors), alone)

    with only("cpu_flash"):
        run_threads(4, rank_body)
    rooms.assert_all_is_quiet()


def test_a_gathers_backward_whose_room_was_freed_has_one_room_all_the_same(rooms, monkeypatch):
    """The keys enlarged the room of the shares, and a rank that failed looked for flags there."""
    problem = Problem(heads=2, length=64, dim=16)
    tensors, calls, barrier = problem.tensors(), threading.local(), threading.Barrier(2)
    monkeypatch.setattr(CpuFlash, "backward", failing_at(calls, CpuFlash.backward))

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2,))
        *inputs, grad = (distribute(x, mesh, (Shard(2),)) for x in tensors)
        output = problem.attend(*(x.requires_grad_() for x in inputs))
        if barrier.wait() == 0:
            rooms.free()
        barrier.wait()
        calls.left = 0 if rank else -1
        with pytest.raises(torch.OutOfMemoryError) if rank else contextlib.nullcontext():
            torch.autograd.grad(output, inputs, grad)

    with only("cpu_flash"), cp_dispatch.enabled(schedule="gather"):
        run_threads(2, rank_body)
    rooms.assert_all_is_quiet()


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("kind", [None, "mirrored", "head-tail", "documents"])
@pytest.mark.parametrize("failing", [(1,), (3,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_an_error_in_a_ring_leaves_no_rank_waiting(rooms, monkeypatch, failing, kind, name):
    """On some ranks, at a different tile on each."""
    problem = Problem(heads=2, length=64, dim=16, causal=True)
    tensors, method = problem.tensors(), getattr(CpuFlash, name)
    schedule = "mirrored_ring" if kind == "mirrored" else "natural_ring"
    layout = balancers(64, 4, 1).get(kind)
    want, alone = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")
    calls, barrier = threading.local(), threading.Barrier(4)

    monkeypatch.setattr(CpuFlash, name, failing_at(calls, method))

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (4,))
        for first in range(4):
            # In natural order the first rank has a single tile.
            fails = rank in failing and (kind is not None or first <= rank)
            calls.left = first if fails else -1
            with cp_dispatch.enabled(schedule=schedule, layout=layout):
                shards = [distribute(x, mesh, (Shard(2),)) for x in tensors]
                inputs = [x.requires_grad_() for x in shards[:3]]
                with pytest.raises(torch.OutOfMemoryError) if fails else contextlib.nullcontext():
                    output = problem.attend(*inputs)
                    if name == "backward":
                        torch.autograd.grad(output, inputs, shards[3])
            barrier.wait()
            rooms.assert_all_is_quiet()
            barrier.wait()
        if layout is None:
            with cp_dispatch.enabled(schedule=schedule):
                check(run_sharded(problem, tensors, mesh), want, alone)

    with only("cpu_flash"):
        run_threads(4, rank_body)
    rooms.assert_all_is_quiet()


@pytest.mark.parametrize("where", ["the schedule", "the wait"])
def test_the_calls_own_error_is_the_one_that_is_raised(monkeypatch, caplog, where):
    """Also if the GPU is lost, so that flags cannot be raised either."""
    ring = SimpleNamespace(group=None, rank=0, world_size=2, steps=[], may_push=True)
    job = Job(BACKENDS["math"], None, 1.0, ring)

    def lost(*_):
        raise RuntimeError("CUDA error")

    def schedule(*_):
        if where == "the schedule":
            lost()

    waits = []
    monkeypatch.setattr(flags_alone._Ring, "wait", lambda _: waits.append(1) or lost())
    flags_alone.finish(job, schedule, ())
    assert waits and "may wait for this one" in caplog.text
