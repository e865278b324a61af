"""Whose options the calls of a graph have that dynamo makes: those of a style, or the toggle's.

In the trace below dynamo nothing tells the rules of the op whether a call was made in a module in
the style ``ContextParallel``. Dynamo knows, and has the rules look at every call first. So a look
notes the options down for its graph, and a graph whose calls have different ones is refused.
"""

from __future__ import annotations

import weakref

from cp_dispatch._compat import dynamo_traces
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.options import Options

_graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by what dynamo has for each


class _Graph:
    def __init__(self):
        self.style: int | None = None  # in which dynamo is
        self.options: Options | None = None  # of that
        self.calls = 0  # in that
        self.has_styles = False
        self.was_left = True  # all modules by their ends
        self.found: list[Options] = []  # of all calls, each once


def _graph() -> _Graph:
    return _graphs.setdefault(dynamo_traces(), _Graph())


def enter(style: int) -> None:
    """Dynamo comes to a module in a style."""
    graph = _graph()
    graph.was_left &= graph.style is None
    graph.style, graph.options, graph.calls, graph.has_styles = style, None, 0, True


def know(style: int, options: Options) -> None:
    """And to the options that the style has for it."""
    graph = _graph()
    if graph.style == style:
        graph.options = options


def leave() -> str:
    """Dynamo has left the module; why it must not be traced, if so."""
    graph = _graph()
    graph.style = None
    if not graph.calls:
        return (
            "no call of flex_attention was seen in a compiled module in ContextParallel("
            "attention_type='flex') on what was made of query, key and value. Do not compile the "
            "module"
        )
    return _several(graph)


def options_at_look(toggles: Options | None) -> tuple[Options | None, bool]:
    """The options of a call that dynamo looks at, and whether they are those of a style."""
    graph = _graph()
    is_own = graph.style is not None
    options = graph.options if is_own else toggles
    graph.calls += is_own
    if options is not None and options not in graph.found:
        graph.found.append(options)
    return options, is_own


def options_of_graph() -> Options | None:
    """The options of all calls of the graph that is traced below dynamo; None if no call is in a
    style, so that they are the toggle's.

    Raises:
        ContextParallelError: there are several, or dynamo did not see where a module ended, so that
            calls after it are taken for its own.
    """
    graph = _graphs.get(dynamo_traces())
    if graph is None or not graph.has_styles or not graph.found:
        return None
    if graph.style is not None or not graph.was_left:
        raise ContextParallelError(
            "there is no telling where a module in ContextParallel(attention_type='flex') ends in "
            "a compiled graph that catches what it raised, or has it inside another such module. "
            "Do not compile the module"
        )
    if reason := _several(graph):
        raise ContextParallelError(reason)
    return graph.found[0]


def _several(graph: _Graph) -> str:
    if len(graph.found) < 2:
        return ""
    words = " and ".join(
        f"schedule={x.schedule!r}, layout={x.layout!r}, of "
        f"{'plain shards' if x.of_shards else 'DTensors'}"
        for x in graph.found
    )
    return (
        "one compiled graph holds calls of flex_attention in ContextParallel(attention_type="
        f"'flex') and others under other options: {words}. Give them the same, or compile the "
        "modules apart, each in a graph of its own (model.layers[i].compile())"
    )
