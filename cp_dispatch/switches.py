"""Reads on/off switches from environment variables."""

from __future__ import annotations

import os

_OFF = ("0", "false", "no", "off")


def is_on(name: str, default: bool) -> bool:
    """Whether the variable is on; ``default`` if it is unset or empty."""
    value = os.environ.get(name)
    return value.lower() not in _OFF if value else default
