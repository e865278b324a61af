"""Many cases in one set of spawned processes, each reported by name.

Starting W processes with torch takes seconds, so a module spawns them once and its tests look up
their case in the outcomes::

    CASES = {"name": function(env), ...}          # in the test module
    outcomes = run_cases(__name__, names, world_size=2, backend="gloo")
    assert outcomes["name"] == ""                 # or the traceback of every rank that failed

A case that hangs is killed after ``case_timeout``, with the stacks of all ranks in its outcome, and
new processes continue with the next one.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed import staged

TORCH_2_13 = torch.__version__ >= (2, 13)

_HOST = "127.0.0.1"
_START_TIMEOUT = 120
_MAX_HANGS = 3
_PASSED = "passed"
# After one of these errors a process can do nothing more on its GPU.
_STICKY = ("CUDA error", "misaligned address", "an illegal memory access")


@dataclass(frozen=True)
class Env:
    """The arguments of a case."""

    rank: int
    world_size: int
    device: torch.device

    def mesh(self, *shape: int, names: tuple[str, ...] = ("cp",)) -> DeviceMesh:
        """A mesh over all ranks, created once, because each one costs communicators."""
        return _mesh(self.device.type, shape or (self.world_size,), names)


@functools.cache
def _mesh(device_type, shape, names) -> DeviceMesh:
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def run_cases(
    module: str, names: list[str], world_size: int, backend: str, case_timeout: float = 60
) -> dict[str, str]:
    """The outcome of every case: "" if all ranks passed, otherwise the report of each failing
    rank."""
    outcomes: dict[str, str] = {}
    left = list(names)
    for _ in range(_MAX_HANGS):
        if not left:
            break
        done = _spawn(module, left, world_size, backend, case_timeout)
        outcomes.update(done)
        left = [name for name in left if name not in outcomes]
    outcomes.update(dict.fromkeys(left, f"not run: {_MAX_HANGS} earlier cases hung or crashed"))
    return outcomes


def run_asked(
    request, world_size: int, backend: str, case_timeout: float, runs=lambda name: True
) -> dict[str, str]:
    """Outcomes of the cases that the collected tests of a module need, for its fixture
    ``outcomes``.

    Cases that ``-k`` deselects do not run, nor do those for which ``runs`` returns False.
    """
    size = getattr(request, "param", None)
    asked = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.module is request.module
        and "case" in getattr(getattr(item, "callspec", None), "params", ())
        and item.callspec.params.get("outcomes") == size
    ]
    names = [name for name in asked if runs(name)]
    return run_cases(request.module.__name__, names, world_size, backend, case_timeout)


def _spawn(module, names, world_size, backend, case_timeout) -> dict[str, str]:
    """Run cases in order until all are done or one hangs or crashes; that one is the last
    returned."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    args = (world_size, store.port, module, names, backend, case_timeout)
    processes = [
        context.Process(target=_worker, args=(rank, *args), daemon=True)
        for rank in range(world_size)
    ]
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        for process in processes:
            process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    _join(processes, deadline=time.monotonic() + _START_TIMEOUT + case_timeout * len(names))
    outcomes = {}
    for name in names:
        said = {
            rank: _get(store, f"{name}/{rank}") or _get(store, f"{name}/{rank}/hung")
            for rank in range(world_size)
        }
        if outcomes and not any(said.values()):
            break  # all ranks ended after the previous case
        complete = None not in said.values() and not any(
            store.check([f"{name}/{rank}/hung"]) for rank in said
        )
        outcomes[name] = "\n".join(
            f"--- rank {rank} of {world_size}: {text or 'nothing came back'}"
            for rank, text in said.items()
            if text != _PASSED
        )
        if not complete:
            codes = [process.exitcode for process in processes]
            outcomes[name] += f"\n(exit codes {codes}; the next cases ran in new processes)"
            break
    return outcomes


def _get(store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _join(processes, deadline: float) -> None:
    while any(p.is_alive() for p in processes):
        if any(p.exitcode not in (None, 0) for p in processes):
            # The others may wait for the dead one forever; leave them time to report where.
            deadline = min(deadline, time.monotonic() + 3)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        for process in processes:
            process.join(0.2)


def _worker(rank, world_size, port, module, names, backend, case_timeout) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        backend = staged.NAME if staged.is_staged() else backend
    if backend == staged.NAME:
        staged.register()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=_START_TIMEOUT)
    store, watch_store = (
        dist.TCPStore(_HOST, port, is_master=False, timeout=timeout) for _ in range(2)
    )
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        store=dist.PrefixStore("group", store),
        device_id=device if backend == "nccl" else None,
    )
    cases = importlib.import_module(module).CASES
    env = Env(rank, world_size, device)
    watch = _Watch(watch_store, rank, case_timeout)
    for name in names:
        watch.start(name)
        try:
            cases[name](env)
            if device.type == "cuda":
                torch.cuda.synchronize()
            said = _PASSED
        except BaseException:
            said = traceback.format_exc()
        watch.stop()
        _log(f"rank {rank} of {world_size}, {name}: {said}")
        store.set(f"{name}/{rank}", said)
        # All ranks start the next case together, or this process ends with an error.
        everyone = [f"{name}/{r}" for r in range(world_size)]
        store.wait(everyone, timeout)
        if any(word in _get(store, key) for key in everyone for word in _STICKY):
            break
    # No destroy_process_group, because it can wait forever after a case that failed halfway.
    sys.stdout.flush()
    os._exit(0)


def _log(text: str) -> None:
    """Log the outcomes so far, for when a run must be stopped early."""
    path = os.environ.get("CP_DISPATCH_CASE_LOG")
    if path:
        with open(path, "a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


class _Watch:
    """Ends the process, with a stack in the outcome, when a case takes too long."""

    def __init__(self, store, rank: int, limit: float):
        self._store, self._rank, self._limit = store, rank, limit
        self._main = threading.get_ident()
        self._case: tuple[str, float] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, name: str) -> None:
        self._case = name, time.monotonic() + self._limit

    def stop(self) -> None:
        self._case = None

    def _run(self) -> None:
        while True:
            time.sleep(0.5)
            case = self._case
            if case is not None and time.monotonic() > case[1]:
                stack = "".join(traceback.format_stack(sys._current_frames()[self._main]))
                self._store.set(
                    f"{case[0]}/{self._rank}/hung", f"hung for {self._limit} s\n{stack}"
                )
                os._exit(3)
