"""Allocates memory that outlives a CUDA graph, even while one is being prepared.

While ``torch.compile(mode="reduce-overhead")`` warms up, and while a graph is captured, memory that
the thread allocates belongs to the graph: the next call overwrites it, and torch raises if it is
still in use. Memory that another thread allocates does not belong to the graph.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def apart(device: torch.device, function: Callable[..., T], *args) -> T:
    """Call a function on a separate thread. Not during a capture, when no thread may allocate."""

    def call():
        torch.cuda.set_device(device)
        return function(*args)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
