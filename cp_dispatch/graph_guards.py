"""Compiled graphs that notice a change of the setting.

Note [Guards]
~~~~~~~~~~~~~
The override runs below dynamo, which sees a call of scaled_dot_product_attention and guards on
nothing that the override looks at. So a graph with a ring would go on after ``disable()``, one
with a local attention inside ``context_parallel``, and a layout would be the one of yesterday.

Two things prevent it. A trace that comes by the override gets a guard: what decides about this
kind of call, here and now, is what did then. And graphs that were compiled while there was no
override cannot be told from any other; they get their guard, that nothing is on here, when the
override is installed. Graphs of several settings stand side by side in dynamo's cache, so a loop
that enters and leaves a scope compiles once for each side.

A guard asks in the thread of the call, as the override does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from cp_dispatch._compat import add_check, compiled_graphs, guard_trace
from cp_dispatch.compile_cache import note_decision

_done = weakref.WeakSet()  # managers of graphs that need nothing any more


def note_trace(what: str, decides: Callable[[], object]) -> None:
    """Give the graph that is being traced, if any, the guard that ``decides()`` stays equal, and
    what it says to the keys of caches on disk."""
    state = decides()
    note_decision(state)

    def check(_locals) -> bool:
        now = decides()
        return now is state or now == state

    guard_trace(check, f"cp_dispatch: {what} as they were when this was compiled", (what, state))


def override_comes(is_off: Callable[[], bool]) -> None:
    """Guard the graphs that were compiled since the override went."""

    def check(_locals) -> bool:
        return is_off()

    for manager in _new_graphs():
        add_check(manager, check, "cp_dispatch is off, as when this was compiled")


def override_goes() -> None:
    """What was compiled until now has the guards that it needs."""
    for _ in _new_graphs():
        pass


def _new_graphs():
    # Not by a count of compilations: torch._dynamo.reset() sets those back.
    for manager in compiled_graphs():
        if manager not in _done:
            _done.add(manager)
            yield manager
