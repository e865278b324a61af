"""State that a forward leaves for its backward, and how long the backward's rule stays for it."""

from __future__ import annotations

import threading
import weakref

from cp_dispatch.options import Options

_KEY = "cp_dispatch"

_lock = threading.RLock()
_alive = 0  # notes
_when_none: list = []


class _Note:
    """Lives as long as torch keeps the ``kernel_options`` of a call: as its autograd graph does."""

    def __init__(self, options: Options):
        global _alive
        self.options = options
        with _lock:
            _alive += 1
        weakref.finalize(self, _one_is_gone)


def remember(kernel_options: dict, options: Options) -> None:
    """Store the options of a forward for its backward.

    In a trace the dict may belong to the graph and not be writable; there both directions are
    traced under the same options.
    """
    try:
        kernel_options[_KEY] = _Note(options)
    except TypeError:
        pass


def remembered(kernel_options: dict) -> Options | None:
    """The options that the forward ran under; None if they were not stored."""
    note = kernel_options.get(_KEY)
    return None if note is None else note.options


def users(kernel_options: dict) -> dict:
    """The user's own ``kernel_options``, for the local kernel."""
    return {key: value for key, value in kernel_options.items() if key != _KEY}


def when_none_is_left(function) -> None:
    """Call ``function`` as soon as no forward waits for its backward any more."""
    with _lock:
        _when_none.append(function)
        _call_if_none()


def never_mind() -> None:
    """Forget the functions that still wait."""
    with _lock:
        _when_none.clear()


def _one_is_gone() -> None:
    global _alive
    with _lock:
        _alive -= 1
        _call_if_none()


def _call_if_none() -> None:
    while not _alive and _when_none:
        _when_none.pop()()
