"""Dicts that remember a number of things: programs whose shapes change all the time forget the
oldest, and not everything at once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


def keep(known: dict, key: Hashable, value: Any, most: int) -> None:
    """Put ``value`` in a dict of at most so many entries."""
    while len(known) >= most and key not in known:
        # Other threads may have taken it by now.
        known.pop(next(iter(known), None), None)
    known[key] = value
