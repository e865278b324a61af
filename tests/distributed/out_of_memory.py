"""Ranks, as threads, that run out of memory at one allocation after another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection

import torch

from tests.distributed.threads import run_threads


def failures(rooms, ranks: int, failing: Collection[int], limited, make: Callable, step=1):
    """How often the calls of each rank failed, until all allocations have.

    ``make(rank)`` returns a rank's call, and what all ranks do before each one, or None.
    In the context ``limited(last)`` allocation number ``last`` and all later ones fail. After each
    call no flag may be left in the ``rooms``.
    """
    barrier, left, found = threading.Barrier(ranks), [0] * ranks, [0] * ranks

    def body(rank: int) -> None:
        call, before = make(rank)
        call()  # works out what is known later, makes the rooms
        for last in itertools.count(step=step):
            if before is not None:
                before()
                barrier.wait()
            memory, missing = limited(last if rank in failing else None), False
            try:
                with memory:
                    call()
            except torch.OutOfMemoryError:
                missing = True
            assert missing == memory.was_missing
            left[rank] = missing
            found[rank] += missing
            barrier.wait()
            rooms.assert_all_is_quiet()
            done = not any(left)
            barrier.wait()
            if done:
                break

    run_threads(ranks, body)
    return found
