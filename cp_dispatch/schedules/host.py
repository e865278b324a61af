"""Identifies the host that this process runs on."""

from __future__ import annotations

import hashlib
import socket


def number_of_host() -> int:
    """A number below 2**62, the same in every process on a host since it was booted."""
    text = socket.gethostname() + _boot_id()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return ""
