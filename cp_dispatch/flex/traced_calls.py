"""Records which options the ``flex_attention`` calls of a dynamo graph have: a style's or enable's.

In the trace below dynamo, the rules of the op cannot know whether a call was made in a module in
the style ``ContextParallel``. Dynamo knows, and calls the rules for every call first to get shapes.
That first look records the options for its graph. A graph whose calls have different options is
refused.
"""

from __future__ import annotations

import weakref

from cp_dispatch._compat import dynamo_traces
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.options import Options

_graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by dynamo's tracing context


class _Graph:
    def __init__(self):
        self.style: int | None = None  # the style that dynamo is in
        self.options: Options | None = None  # of this style
        self.calls = 0  # in this style
        self.has_styles = False
        self.was_left = True  # whether dynamo saw the end of every module
        self.found: list[Options] = []  # distinct options of all calls


def _graph() -> _Graph:
    return _graphs.setdefault(dynamo_traces(), _Graph())


def enter(style: int) -> None:
    """Dynamo enters a module in a style."""
    graph = _graph()
    graph.was_left &= graph.style is None
    graph.style, graph.options, graph.calls, graph.has_styles = style, None, 0, True


def know(style: int, options: Options) -> None:
    """Dynamo has determined the options of the module's style."""
    graph = _graph()
    if graph.style == style:
        graph.options = options


def leave() -> str:
    """Dynamo has left the module. Returns why it must not be traced, or ""."""
    graph = _graph()
    graph.style = None
    if not graph.calls:
        return (
            "a compiled module in ContextParallel(attention_type='flex') did not call "
            "flex_attention on its query, key and value, as far as dynamo can see. Do not compile "
            "the module"
        )
    return _several(graph)


def options_at_look(toggles: Options | None) -> tuple[Options | None, bool]:
    """The options of a call at dynamo's first look, and whether they are those of a style."""
    graph = _graph()
    is_own = graph.style is not None
    options = graph.options if is_own else toggles
    graph.calls += is_own
    if options is not None and options not in graph.found:
        graph.found.append(options)
    return options, is_own


def options_of_graph() -> Options | None:
    """The options of all calls of the graph that is traced below dynamo; None if no call is in a
    style, so that the options are those of ``enable``.

    Raises:
        ContextParallelError: if there are several, or if dynamo did not see where a module ended,
            so that calls after it would count as its own.
    """
    graph = _graphs.get(dynamo_traces())
    if graph is None or not graph.has_styles or not graph.found:
        return None
    if graph.style is not None or not graph.was_left:
        raise ContextParallelError(
            "cp_dispatch cannot tell where a module in ContextParallel(attention_type='flex') ends "
            "in a compiled graph that catches an exception of the module, or has it inside another "
            "such module. Do not compile the module"
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
        "one compiled graph has calls of flex_attention in ContextParallel(attention_type='flex') "
        f"and calls under different options: {words}. Give them the same options, or compile the "
        "modules separately, each in its own graph (model.layers[i].compile())"
    )
