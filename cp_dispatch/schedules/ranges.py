"""Names the parts of a schedule in profiles.

``record_function`` costs 12 us of host time even without a profiler, so it is called only while one
is on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from cp_dispatch._compat import profiler_is_on

T = TypeVar("T")


def each_hop(name: str, hops: Sequence[T]) -> Iterator[T]:
    """The hops, each inside a range such as ``cp_dispatch::ring[hop 2/4]``."""
    if not profiler_is_on():
        yield from hops
        return
    for number, hop in enumerate(hops, 1):
        with torch.profiler.record_function(f"cp_dispatch::{name}[hop {number}/{len(hops)}]"):
            yield hop


def part(name: str):
    """A range such as ``cp_dispatch::gather[home]``."""
    if not profiler_is_on():
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"cp_dispatch::{name}")
