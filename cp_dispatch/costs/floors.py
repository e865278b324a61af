"""Measures calls with almost no work, whose time is that of the host and of latencies."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import sdpa_kernel

from cp_dispatch.costs.clock import Clock, inputs
from cp_dispatch.layouts import HeadTail

TOKENS = 64  # a rank's
WISHES = ("natural_ring", "mirrored_ring", "gather", "one_call", "ulysses", "hybrid")


def measure_floors(ranks: int, backends, dim: int, clock: Clock, passes: int) -> dict:
    """Measure calls with almost no work, on all ranks and, concurrently, on each half of them.

    A host is faster at some times than at others, for longer than one measurement takes. So all
    calls are measured in turn, in several ``passes``, and the medians are returned.
    """
    halves = [ranks // 2] if ranks % 2 == 0 and ranks > 2 else []
    steps = dict(_steps([*halves, ranks], backends, dim, clock))
    times: dict[tuple, list[tuple[float, float]]] = {key: [] for key in steps}
    for _ in range(passes):
        for key, (scope, forward, both) in steps.items():
            with scope():
                there = clock(forward, 8)
                times[key].append((there, max(clock(both, 8) - there, there / 2)))
    found: dict[str, dict[str, dict[str, list]]] = {backend.name: {} for backend in backends}
    for (backend, size, name), pairs in times.items():
        ways = found[backend].setdefault(name, {"forward": [], "backward": []})
        for way, seconds in zip(ways, zip(*pairs, strict=True), strict=True):
            ways[way].append([size, float(f"{statistics.median(seconds):.4g}")])
    return found


def _steps(sizes, backends, dim: int, clock: Clock) -> Iterable[tuple[tuple, tuple]]:
    """``(backend, ranks, schedule)``; and a scope, a forward and a forward with its backward."""
    from cp_dispatch import explain

    meshes, known = {}, set()  # each mesh costs communicators
    for backend, size, wish, layout in itertools.product(backends, sizes, WISHES, (False, True)):
        if size not in meshes:
            shape = max(sizes) // size, size
            meshes[size] = init_device_mesh(clock.device.type, shape, mesh_dim_names=("a", "b"))
        *shards, grad = (
            DTensor.from_local(x, meshes[size]["b"], [Shard(2)], run_check=False)
            for x in inputs(clock.device, TOKENS, dim)
        )
        setting = {"schedule": wish, "layout": HeadTail(TOKENS * size, size) if layout else None}
        scope = functools.partial(_scope, backend, setting)
        with scope():
            key = backend.name, size, explain(*shards, is_causal=True, enable_gqa=True).schedule
        if key not in known:
            known.add(key)
            yield key, (scope, *_calls(shards, grad))


def _calls(shards, grad) -> tuple[Callable, Callable]:
    leaves = [x.detach().requires_grad_() for x in shards]

    def attend(tensors):
        return F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    def forward():
        with torch.no_grad():
            attend(shards)

    def both():
        torch.autograd.grad(attend(leaves), leaves, grad)

    return forward, both


@contextlib.contextmanager
def _scope(backend, setting: dict):
    from cp_dispatch import enabled

    with enabled(**setting), sdpa_kernel(backend.sdp_backend):
        yield
