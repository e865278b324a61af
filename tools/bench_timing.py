"""Timing of benchmark steps: rounds, CUDA graphs, the slowest rank, kernel time by kind."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

import cp_dispatch
from cp_dispatch.schedules import mailboxes


def _mailbox_bytes() -> int:
    """Bytes of mailboxes, which torch's statistics do not count, if this project is the one that
    runs."""
    return mailboxes.held_bytes() if cp_dispatch.is_enabled() else 0


def measure(step, args, cuda: bool) -> dict:
    """Seconds (median of rounds, worst rank), host seconds and peak extra memory in MiB."""
    for _ in range(args.warmup):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if args.cuda_graph:
            step = captured(step)
    times, host = [], []
    for _ in range(args.rounds):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        begin = time.perf_counter()
        for _ in range(args.steps):
            result = step()
        host.append((time.perf_counter() - begin) / args.steps)
        if cuda:
            end.record()
            end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / args.steps if cuda else host[-1])
        del result
    extra = (torch.cuda.max_memory_allocated() - before + _mailbox_bytes()) / 2**20 if cuda else 0.0
    row = worst_rank([statistics.median(times), statistics.median(host), extra], cuda)
    return dict(zip(("seconds", "host_seconds", "extra_mib"), row, strict=True))


def captured(step):
    """The step as a CUDA graph: a function that replays it, and keeps what the capture
    allocated."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call creates must not be captured
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay():
        graph.replay()
        return kept

    return replay


def worst_rank(values: list[float], cuda: bool) -> list[float]:
    """The largest of each value among the ranks."""
    row = torch.tensor(values, device="cuda" if cuda else "cpu", dtype=torch.float64)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    return row.tolist()


def profile_step(step) -> dict[str, float]:
    """Milliseconds of GPU kernels of one step on this rank, by kind."""
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name.lower()
        if "nccl" in name:
            kind = "communication"
        elif "merge" in name:
            kind = "merge"
        elif any(word in name for word in ("flash", "fmha", "cudnn", "sdpa")):
            kind = "attention"
        elif "memcpy" in name or "memset" in name or "copy" in name:
            kind = "copies"
        else:
            kind = "other"
        kinds[kind] = kinds.get(kind, 0.0) + event.device_time / 1e3
    return kinds
