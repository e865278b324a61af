"""Dynamo, fakes, traces and the graphs that come of them."""

import functools
import operator
import sys

import torch
import torch.utils.checkpoint
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import _are_we_tracing as is_tracing
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import is_concrete_int

__all__ = [
    "add_check",
    "compiled_graphs",
    "compiles_for_inductor",
    "count_traced",
    "dynamo_traces",
    "guard_trace",
    "is_fake",
    "is_tracing",
    "keep_order_in_inductor",
    "leave_in_backward",
    "leave_in_forward",
    "run_uncompiled",
    "save_in_partitioners",
    "save_in_traced_checkpoints",
    "size_hint",
    "skip_code",
    "without_subclass",
]


def skip_code(function) -> None:
    """Let no frame of a function be compiled; it may still be traced as a part of another."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def run_uncompiled(function):
    """A decorator for what torch calls from C++: neither it nor what it calls is compiled, though
    it may be traced as a part of something else.

    Where a graph broke, and in a backward inside a compiled function, dynamo compiles all Python
    that runs, but for torch's own: a schedule in pieces, and saved tensors whose versions and
    specs it does not know.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def count_traced(functions) -> int:
    """How many calls of these functions are in the graphs that dynamo makes at the moment."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    graphs = [tracer.graph for tracer in output.tracers]
    graphs += [x.graph for x in output.nn_modules.values() if isinstance(x, torch.fx.GraphModule)]
    return sum(node.target in functions for graph in graphs for node in graph.nodes)


# Inside, functions do not look at __torch_function__ of their arguments; dynamo knows it.
without_subclass = torch._C.DisableTorchFunctionSubclass

# Something where this thread is in the middle of a compilation by dynamo, else None. Every call
# asks, so it is torch's own function.
dynamo_traces = torch._guards.TracingContext.try_get


def size_hint(size) -> int:
    """A size's value in a trace, without a guard on it."""
    node = getattr(size, "node", None)
    return int(size) if node is None or not node.has_hint() else int(node.hint)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data and is not part of a graph that is being traced."""
    return isinstance(tensor, FakeTensor)


def compiles_for_inductor() -> bool:
    """Whether this thread traces a graph that inductor will compile."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is None:
        return False
    return not isinstance(virtualized.V.fake_mode, virtualized.NullHandler)


def save_in_traced_checkpoints(op: torch._ops.OpOverload) -> None:
    """In a trace of a checkpointed region, keep what ``op`` has just returned for the backward.

    For random numbers: where torch 2.13 recomputes them, it takes the meshes of DTensors for the
    generator's states and fails.
    """
    node = _just_traced(op)
    if node is not None and node.meta.get("recompute") is not None:
        node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def leave_in_backward(op: torch._ops.OpOverload) -> None:
    """In a trace of a backward, keep the partitioner from moving the call of ``op`` that was just
    made to the forward."""
    node = _just_traced(op)
    if node is not None:
        node.meta["partitioner_tag"] = "must_be_in_backward"


def leave_in_forward(op: torch._ops.OpOverload) -> None:
    """In a trace of a backward, keep the partitioner from repeating the forward's calls of ``op``
    there. In the trace of the forward it is too early: at its end torch tags all nodes anew."""
    mode = get_proxy_mode()
    for node in mode.tracer.graph.nodes if mode is not None else ():
        if node.target is op and node.meta.get("partitioner_tag") == "is_forward":
            node.meta["partitioner_tag"] = "must_be_in_forward"


def _just_traced(op: torch._ops.OpOverload):
    """The latest call of an op in the graph that is being traced, if any."""
    mode = get_proxy_mode()
    if mode is not None:
        for node in reversed(mode.tracer.graph.nodes):
            if node.target is op:
                return node
    return None


def keep_order_in_inductor(communicates) -> None:
    """From now on, leave the ops of graphs of which ``communicates(op)`` in their order, among
    themselves and among torch's collectives; inductor cares for these alone.

    Stays: backwards are compiled when they first run. Where inductor is not at work, nothing.
    """
    if "torch._inductor.compile_fx" not in sys.modules:
        return
    from torch._inductor import comms
    from torch._inductor.dependencies import WeakDep

    of_torch = comms.decide_global_ordering_of_comms
    if getattr(of_torch, "is_of_cp_dispatch", False):
        return

    @functools.wraps(of_torch)
    def decide_global_ordering_of_comms(nodes, *args):
        nodes, last = of_torch(nodes, *args), None
        for node in nodes:
            is_own = communicates(getattr(node.node, "op_overload", None))
            if not is_own and not comms.contains_collective(node):
                continue
            if last is not None and (is_own or last[1]):
                # As torch chains its own: an order, which keeps no memory alive.
                after = next(iter(node.get_buffer_names()))
                for name in last[0].get_buffer_names():
                    node.add_fake_dep(WeakDep(name, mutating_buf=after, is_fake=True))
            last = node, is_own
        return nodes

    decide_global_ordering_of_comms.is_of_cp_dispatch = True
    comms.decide_global_ordering_of_comms = decide_global_ordering_of_comms


def save_in_partitioners(communicates) -> None:
    """From now on, let no backward of a graph repeat ops of which ``communicates(op)``, but where a
    checkpoint says so, as torch does with its own collectives.

    Stays, as :func:`keep_order_in_inductor`.
    """
    from torch._functorch import partitioners

    of_torch, choose = partitioners.force_save_collectives, partitioners.choose_saved_values_set
    if getattr(of_torch, "is_of_cp_dispatch", False):
        return

    @functools.wraps(of_torch)
    def force_save_collectives(joint_module):
        of_torch(joint_module)
        for node in joint_module.graph.nodes:
            if communicates(node.target) and not partitioners.must_recompute(node):
                node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

    @functools.wraps(choose)
    def choose_saved_values_set(*args, **kwargs):
        saved = choose(*args, **kwargs)
        # Where nothing else is left to choose from, torch names ops that have several results.
        several = [node for node in saved if communicates(node.target) and not _is_one(node)]
        parts = (x for node in several for x in node.users if x.target is operator.getitem)
        return [*dict.fromkeys([*(x for x in saved if x not in several), *parts])]

    force_save_collectives.is_of_cp_dispatch = True
    partitioners.force_save_collectives = force_save_collectives
    partitioners.choose_saved_values_set = choose_saved_values_set


def _is_one(node) -> bool:
    """Whether a node of a graph is a single tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def guard_trace(check, words: str, key: object) -> None:
    """Make the graph that dynamo traces in this thread, if any, valid only where ``check``,
    which gets the frame's locals, is true, and the sizes of DTensors that were constants are the
    same. A second guard of an equal ``key`` changes nothing."""
    context = dynamo_traces()
    if context is None:
        return

    def create(builder, guard) -> None:
        add_check(builder.guard_manager, check, words)
        _guard_sizes(builder)

    create.key = key
    guards = context.guards_context.dynamo_guards
    if not any(getattr(guard.create_fn, "key", None) == key for guard in guards):
        guards.add(torch._dynamo.source.GlobalStateSource().make_guard(create))


def _guard_sizes(builder) -> None:
    """Dynamo guards the sizes of a DTensor's shard alone, and a shard can be alike where the
    DTensor is not: then some ranks would compile anew and others not."""
    graph = builder.check_fn_manager.output_graph
    # Export makes its guards of less, and nobody calls them.
    for tracked in getattr(graph, "tracked_fakes", ()):
        if not isinstance(tracked.fake, DTensor):
            continue
        # Constants, also those that were symbols until an op looked at them.
        sizes = {i: int(n) for i, n in enumerate(tracked.fake.shape) if is_concrete_int(n)}

        manager = builder.get_guard_manager_from_source(tracked.source)
        manager.add_lambda_guard(
            _has_sizes(sizes, len(tracked.fake.shape)),
            [f"cp_dispatch: global sizes of {tracked.source}"],
            None,
        )


def _has_sizes(sizes: dict[int, int], ndim: int):
    """A guard that dims of a tensor have these sizes."""
    if len(sizes) == ndim:  # every call asks
        whole = torch.Size(sizes.values())
        return lambda tensor: tensor.shape == whole

    def check(tensor) -> bool:
        shape = tensor.shape
        return all(shape[i] == n for i, n in sizes.items())

    return check


def add_check(manager, check, words: str) -> None:
    """Add ``check`` to the guards of a compiled graph."""
    manager.root.add_lambda_guard(check, [words], None)


def compiled_graphs():
    """The guard managers of all graphs that dynamo keeps."""
    convert = sys.modules.get("torch._dynamo.convert_frame")
    for reference in convert.input_codes.seen if convert is not None else ():
        code = reference()
        if code is not None:
            for entry in torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code):
                yield entry.guard_manager
