"""W ranks as threads of this process, on torch's ``MultiThreadedPG``.

A run takes hundredths of a second, and collectives work as they do between processes, also those
inside custom ops.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback

import torch
import torch._dynamo
import torch.distributed as dist
import torch.fx.traceback
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

_TIMEOUT = 60


def run_threads(world_size: int, function, timeout: float = _TIMEOUT) -> list:
    """``[function(rank) for every rank]``, each in its own thread with a process group.

    The call fails with the first failure of a rank, with its traceback as the message. It also
    fails if a rank is not done in time.
    """
    results: list = [None] * world_size
    failures: dict[int, BaseException] = {}
    store = dist.HashStore()
    # Autograd modes belong to a thread; the ranks get the caller's.
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            with torch.set_grad_enabled(grad), torch.inference_mode(inference):
                results[rank] = function(rank)
        except BaseException as error:
            # A rank that is interrupted in a collective by another rank's failure raises
            # SystemExit.
            failures[rank] = error
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()
            multi_threaded_pg.ThreadLocalWorld._world.__dict__.clear()
            _clear_sharding_prop_cache()  # it holds this run's meshes, whose groups are gone

    with _threaded_world():
        hung = _run_all(body, world_size, timeout)
    real = {r: e for r, e in failures.items() if not isinstance(e, SystemExit)}
    if real:
        rank, error = min(real.items())
        text = "".join(traceback.format_exception(error))
        raise AssertionError(f"rank {rank} of {world_size} (of {sorted(real)}):\n{text}") from error
    assert not hung, f"ranks {hung} of {world_size} were not done after {timeout} s"
    return results


class _Worker:
    """A thread that runs one rank of one run after another.

    Workers never end: in torch 2.11, DTensor's per-thread cache can deadlock with other threads
    when its thread ends.
    """

    def __init__(self):
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.done: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, body, rank: int) -> None:
        self._jobs.put((body, rank))

    def _run(self) -> None:
        # Backwards stay in the rank's own thread.
        torch.autograd.set_multithreading_enabled(False)
        while True:
            body, rank = self._jobs.get()
            body(rank)
            del body
            self.done.put(rank)


_workers: list[_Worker] = []


def _run_all(body, world_size: int, timeout: float) -> list[int]:
    """Run every rank, and return those that were not done in time."""
    while len(_workers) < world_size:
        _workers.append(_Worker())
    workers = _workers[:world_size]
    for rank, worker in enumerate(workers):
        worker.start(body, rank)
    hung = []
    deadline = time.monotonic() + timeout
    for rank, worker in enumerate(workers):
        try:
            worker.done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            hung.append(rank)
            ProcessLocalGroup.exception_handle(TimeoutError())
            deadline = time.monotonic() + 5
    if hung:
        _workers.clear()  # threads that hang cannot be reused
    return hung


@contextlib.contextmanager
def _threaded_world():
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    lock = threading.Lock()

    def one_at_a_time(*args, **kwargs):
        # There is one fake mode for the process. Torch's own threaded tests take turns too, with a
        # lock that torch 2.11 does not have.
        with lock:
            return propagate(*args, **kwargs)

    # With torch 2.11 built for CUDA, on a machine without GPUs, the thread that first enters fake
    # mode owns a guard that all others use. So it must be a thread that stays.
    with FakeTensorMode():
        pass
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    world = multi_threaded_pg._install_threaded_pg()
    if not hasattr(world, "comms"):
        world.comms = []  # destroy_process_group() of torch 2.11 needs it
    ProcessLocalGroup.reset()
    ShardingPropagator._propagate_tensor_meta_non_cached = one_at_a_time
    # Annotations for graphs are in one dict of the process. BlockMask makes some, also in eager
    # mode, and with two threads one removed the other's (KeyError: 'custom').
    annotate = torch.fx.traceback.annotate
    torch.fx.traceback.annotate = lambda notes: contextlib.nullcontext()
    # Up to torch 2.13, one flag of the process says that something is being traced. FlexAttention
    # traces mods.
    trace, tracing = torch.fx.Tracer.trace, threading.RLock()

    def trace_in_turn(*args, **kwargs):
        with tracing:
            return trace(*args, **kwargs)

    torch.fx.Tracer.trace = trace_in_turn
    put_back = _flags_of_the_process()
    try:
        yield
    finally:
        put_back()
        torch.fx.Tracer.trace = trace
        torch.fx.traceback.annotate = annotate
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


# FlexAttention sets these while it runs eagerly, and then restores what it found. With threads,
# that may be what another thread had set: tracing left the first one on, and nothing was compiled
# any more.
_FLAGS = (
    (torch.fx._symbolic_trace, "_is_fx_tracing_flag"),  # per thread since torch 2.14
    (torch._dynamo.config, "allow_empty_graphs"),
    (torch._dynamo.config, "capture_scalar_outputs"),
    (torch._dynamo.config, "recompile_limit"),
    (torch._dynamo.config, "accumulated_recompile_limit"),
)


def _flags_of_the_process():
    """A function that restores the current values of the flags."""
    found = [(owner, name, getattr(owner, name)) for owner, name in _FLAGS if hasattr(owner, name)]

    def put_back() -> None:
        for owner, name, value in found:
            setattr(owner, name, value)

    return put_back
