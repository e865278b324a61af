"""Guards compiled graphs on the options of cp_dispatch.

Note [Guards]
~~~~~~~~~~~~~
The override runs below dynamo, which sees a call of scaled_dot_product_attention and guards on
nothing that the override depends on. So a graph with a ring would still be used after
``disable()``, one with local attention inside ``context_parallel``, and one with an old layout
after the layout has changed.

Two kinds of guards prevent this. A trace that reaches the override gets a guard that the options or
block that apply to this kind of call are unchanged. Graphs that were compiled without the override
cannot be told from graphs without attention; when the override is installed, they all get the guard
that nothing is enabled. Graphs for several options coexist in dynamo's cache, so a loop that enters
and leaves a scope compiles once for each case.

A guard is evaluated in the thread of the call, like the override.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from cp_dispatch._compat import add_check, compiled_graphs, guard_trace
from cp_dispatch.graphs.compile_cache import note_decision

_done = weakref.WeakSet()  # managers of graphs that need nothing any more


def note_trace(
    what: str, decides: Callable[[], object], applies: Callable[[object], None] | None = None
) -> None:
    """Guard the graph that is being traced, if any, on ``decides()`` staying equal, and put its
    value into the keys of on-disk caches. ``applies`` gets the value whenever the graph runs."""
    state = decides()
    note_decision(state)

    def check(_locals) -> bool:
        now = decides()
        if now is not state and now != state:
            return False
        if applies is not None:
            applies(now)
        return True

    guard_trace(check, f"cp_dispatch: {what} as they were when this was compiled", (what, state))


def override_comes(is_off: Callable[[], bool]) -> None:
    """Guard the graphs that were compiled since the override went."""

    def check(_locals) -> bool:
        return is_off()

    for manager in _new_graphs():
        add_check(manager, check, "cp_dispatch is off, as when this was compiled")


def override_goes() -> None:
    """Record that all graphs compiled until now have the guards that they need."""
    for _ in _new_graphs():
        pass


def _new_graphs():
    # Not by a count of compilations: torch._dynamo.reset() sets those back.
    for manager in compiled_graphs():
        if manager not in _done:
            _done.add(manager)
            yield manager
