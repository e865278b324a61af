"""Meshes inside the test process, and DTensors on them that hold no data."""

from __future__ import annotations

import contextlib
import math
import os

import torch
import torch.distributed as dist
from torch._dynamo import convert_frame
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

SEQUENCE = (Shard(2),)


@contextlib.contextmanager
def one_rank():
    """A mesh ``cp`` of this process alone, with real collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_ranks(*shape: int, names=("cp",), rank=0):
    """A mesh whose other ranks do not exist: collectives return immediately, with garbage."""
    size = math.prod(shape)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def outline(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    placements=SEQUENCE,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of this global shape that holds one element, because plans use nothing else."""
    stride = torch.empty(shape, device="meta").stride()
    local = torch.zeros(1, dtype=dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    ).requires_grad_(requires_grad)


def with_rows(mesh: DeviceMesh, rows: int, shape: tuple[int, ...], dim: int) -> DTensor:
    """A DTensor of this global shape whose shard along ``dim`` has ``rows`` rows, right or not."""
    local, stride = list(shape), torch.empty(shape, device="meta").stride()
    local[dim] = rows
    return DTensor.from_local(
        torch.zeros(local), mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape),
        stride=stride,
    )  # fmt: skip


def own_code_compiled() -> set[str]:
    """Functions of cp_dispatch that dynamo has compiled by themselves, not as parts of a model."""
    seen = (reference() for reference in convert_frame.input_codes.seen)
    names = {f"{code.co_filename}:{code.co_name}" for code in seen if code is not None}
    return {name for name in names if f"{os.sep}cp_dispatch{os.sep}" in name}
