"""Finds out whether ranks can write to each other's memory: GPUs of one host, with our kernels."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from cp_dispatch._compat import all_gather_single, symmetric_memory
from cp_dispatch.extension import NEWEST_CUDA_KERNEL, has_kernel
from cp_dispatch.schedules.host import number_of_host
from cp_dispatch.switches import is_on

_reachable: dict[str, tuple[dist.ProcessGroup, bool]] = {}


def is_used_by(group: dist.ProcessGroup) -> bool | None:
    """Whether a group's ranks can write to each other's memory; None until they have tried."""
    known = _reachable.get(group.group_name)
    return known[1] if known is not None and known[0] is group else None


def ask_peers(group: dist.ProcessGroup, device: torch.device) -> None:
    """Find out whether every rank can write to every other's memory; a collective."""
    mine = torch.tensor([number_of_host(), device.index, _can_try()], device=device)
    everyone = mine.new_empty((dist.get_world_size(group), 3))
    all_gather_single(everyone.flatten(), mine, group=group)
    hosts, devices, able = everyone.T.tolist()
    reaches = len(set(hosts)) == 1 and all(able)
    reaches = reaches and (len(set(devices)) == len(devices) or _can_share())
    count = torch.cuda.device_count()
    reaches = reaches and all(
        other < count and torch.cuda.can_device_access_peer(device.index, other)
        for other in devices
        if other != device.index
    )
    verdict = torch.tensor(int(reaches), device=device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=group)
    _reachable[group.group_name] = group, bool(verdict)


def _can_try() -> bool:
    wanted = is_on("CP_DISPATCH_COPY_ENGINES", True)
    return wanted and symmetric_memory is not None and has_kernel(NEWEST_CUDA_KERNEL, "cuda")


def _can_share() -> bool:
    """Whether torch's symmetric memory, which refuses two ranks on one GPU, is set to allow it."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
