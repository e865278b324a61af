"""Captures a step as a CUDA graph, for tests."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(step: Callable) -> tuple[torch.cuda.CUDAGraph, object]:
    """The graph of a step, and what it returns, which replays write to. The step runs three times
    before, on another stream than the current one."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
