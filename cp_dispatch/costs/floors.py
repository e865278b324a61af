"""Calls with next to no work: the host's time and all latencies."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import sdpa_kernel

from cp_dispatch.costs.clock import Clock, inputs
from cp_dispatch.layouts import HeadTail

TOKENS = 64  # a rank's


def measure_floors(ranks: int, backends, dim: int, clock: Clock) -> dict:
    """Calls with next to no work, on all ranks and, side by side, on both halves of them."""
    from cp_dispatch import enabled, explain

    found: dict[str, dict[str, dict[str, list]]] = {backend.name: {} for backend in backends}
    meshes = {}  # each costs communicators
    halves = [ranks // 2] if ranks % 2 == 0 and ranks > 2 else []
    for backend, size, wish, layout in itertools.product(
        backends,
        [*halves, ranks],
        ("natural_ring", "mirrored_ring", "gather", "one_call", "ulysses", "hybrid"),
        (False, True),
    ):
        floors = found[backend.name]
        if size not in meshes:
            shape = ranks // size, size
            meshes[size] = init_device_mesh(clock.device.type, shape, mesh_dim_names=("a", "b"))
        mesh = meshes[size]
        *shards, grad = (
            DTensor.from_local(x, mesh["b"], [Shard(2)], run_check=False)
            for x in inputs(clock.device, TOKENS, dim)
        )
        leaves = [x.detach().requires_grad_() for x in shards]
        balancer = HeadTail(TOKENS * size, size) if layout else None
        with enabled(schedule=wish, layout=balancer), sdpa_kernel(backend.sdp_backend):
            name = explain(*shards, is_causal=True, enable_gqa=True).schedule
            if any(r == size for r, _ in floors.get(name, {}).get("forward", ())):
                continue

            def forward(tensors=shards):
                return F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

            def both(leaves=leaves, grad=grad, forward=forward):
                torch.autograd.grad(forward(leaves), leaves, grad)

            with torch.no_grad():
                there = clock(forward, 8)
            back = max(clock(both, 8) - there, there / 2)
        ways = floors.setdefault(name, {"forward": [], "backward": []})
        ways["forward"].append([size, float(f"{there:.4g}")])
        ways["backward"].append([size, float(f"{back:.4g}")])
    return found
