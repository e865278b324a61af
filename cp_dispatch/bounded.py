"""Caches of bounded size, which drop the oldest entries of programs whose shapes keep changing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable
from typing import Any


def keep(known: dict, key: Hashable, value: Any, most: int) -> None:
    """Put ``value`` in a dict of at most so many entries. Several threads may do so at a time."""
    while len(known) >= most and key not in known:
        # Other threads may have taken it by now, or put one between these two steps.
        with contextlib.suppress(RuntimeError):
            known.pop(next(iter(known), None), None)
    known[key] = value


class ByWeight:
    """Remembers what ``make`` gave for its arguments, the newest of it up to so much weight; what
    alone weighs more too. For what may be large: documents make thousands of pieces."""

    def __init__(self, make: Callable, weigh: Callable[[Any], int], most: int):
        self._make, self._weigh, self._most = make, weigh, most
        self._known: dict[tuple, tuple[Any, int]] = {}
        self._total, self._lock = 0, threading.Lock()

    def __call__(self, *key: Hashable) -> Any:
        found = self._known.get(key)
        if found is None:
            value = self._make(*key)
            found = value, self._weigh(value)
            with self._lock:
                self._total += found[1] - self._known.pop(key, (None, 0))[1]
                while self._known and self._total > self._most:
                    self._total -= self._known.pop(next(iter(self._known)))[1]
                self._known[key] = found
        return found[0]
