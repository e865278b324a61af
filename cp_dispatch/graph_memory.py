"""Memory that outlives a CUDA graph, although it is first asked for while one is prepared.

While ``torch.compile(mode="reduce-overhead")`` warms up, and while a graph is captured, what a
thread allocates belongs to the graph: it is written over in the next call, and torch raises where
somebody holds it. What another thread allocates does not.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def apart(device: torch.device, function: Callable[..., T], *args) -> T:
    """Call a function on a thread of its own. Not in a capture, during which none may allocate."""

    def call():
        torch.cuda.set_device(device)
        return function(*args)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
