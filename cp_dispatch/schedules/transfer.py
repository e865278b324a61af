"""``Transfer``: one collective and its bytes, for reports of plans."""

from __future__ import annotations

from typing import NamedTuple


class Transfer(NamedTuple):
    """One collective of a rank: its name, what it carries, and the bytes that the rank sends
    (all_to_all) or contributes (all_gather, all_reduce)."""

    collective: str
    what: str
    bytes: int
