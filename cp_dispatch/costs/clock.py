"""Helpers for measurements: a clock across all ranks, and input tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

DTYPE = torch.bfloat16
HEADS, KEY_HEADS = 32, 8


class Clock:
    """Times steps on all ranks at once."""

    def __init__(self, device: torch.device, rounds: int):
        self.device, self._rounds = device, rounds
        self._cuda = device.type == "cuda"

    def __call__(self, step: Callable[[], object], steps: int = 1) -> float:
        """Seconds of one of ``steps`` back to back: the median of rounds, the slowest rank."""
        step(), step()
        times = []
        for _ in range(self._rounds):
            if self._cuda:
                torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            if self._cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
            for _ in range(steps):
                step()
            if self._cuda:
                end.record()
                end.synchronize()
            seconds = start.elapsed_time(end) / 1e3 if self._cuda else time.perf_counter() - begin
            times.append(seconds / steps)
        slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()


def tensor(device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=DTYPE)


def inputs(device, length: int, dim: int, heads: int = HEADS) -> list[torch.Tensor]:
    """query, key, value, grad_output, token-major, with the usual query heads per key head."""
    key_heads = heads * KEY_HEADS // HEADS
    return [
        tensor(device, 1, length, h, dim).transpose(1, 2)
        for h in (heads, key_heads, key_heads, heads)
    ]
