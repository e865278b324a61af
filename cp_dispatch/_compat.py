"""Every private torch symbol that cp_dispatch uses, in one place.

Tested against torch 2.11, 2.13 and 2.14 (``tests/test_compat.py``). No other module of the package
may use a name that torch marks as private, except ``Tensor._version``, which torch documents.
"""

import collections
import contextlib
import functools
import hashlib
import operator
import sys
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.utils.checkpoint

# Like the kernels of torch's autograd: results made below it are not views, so users may write to
# them in place.
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._C._dynamo.guards import _reinterpret_tensor as view_of
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as outside_functorch,
)
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import _are_we_tracing as is_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops.utils import (
    generate_redistribute_costs,
    register_op_strategy,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.nn.attention.bias import CausalBias
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "CausalBiasDispatch",
    "CheckpointFrameInit",
    "DTensorSpec",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "PLAIN_KEYS",
    "ReentrantForward",
    "RuntimeSchemaInfo",
    "Unflatten",
    "active_ddp_module",
    "add_check",
    "add_subclass_rule",
    "all_gather_single",
    "argument_names",
    "below_autograd",
    "compiled_graphs",
    "compiles_for_inductor",
    "composite_kernel",
    "count_traced",
    "cudnn_logsumexp_ndim",
    "current_raw_stream",
    "disable_current_modes",
    "dispatch_modes_are_on",
    "dress",
    "dtensor_spec",
    "dynamo_traces",
    "forget_resolved_kernels",
    "forward_pre_hooks",
    "functorch_is_active",
    "fused_sdp_choice",
    "generate_redistribute_costs",
    "get_unwrapped",
    "group_name",
    "groups_of",
    "guard_trace",
    "has_tangent",
    "implicit_replication_is_on",
    "in_backward",
    "in_fake_mode",
    "is_capturing",
    "is_fake",
    "is_functorch_wrapped_tensor",
    "is_of_replays",
    "is_tracing",
    "keep_order_in_inductor",
    "keep_sizes_traceable",
    "kernel_is_registered",
    "leave_in_backward",
    "leave_in_forward",
    "local_tensor",
    "local_tensor_mode",
    "new_group_of_these",
    "outside_functorch",
    "plain_kernel",
    "profiler_is_on",
    "put_known_sizes",
    "recompute_in_forward",
    "register_op_strategy",
    "remove_subclass_rule",
    "resolve_group",
    "rewrite_flex_kernels",
    "run_uncompiled",
    "save_in_partitioners",
    "save_in_traced_checkpoints",
    "sdp_priority_order",
    "sdp_switches",
    "set_plain_kernel",
    "size_hint",
    "skip_code",
    "symmetric_memory",
    "torch_context_parallel_is_on",
    "trace_gradients",
    "varlen_ops",
    "version_witness",
    "view_of",
    "when_traced",
    "withdraw",
    "without_subclass",
]


# -- The dispatcher, autograd and kernels ----------------------------------------------------------


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent of forward-mode AD."""
    level = torch.autograd.forward_ad._current_level
    return level >= 0 and (
        torch.autograd.forward_ad.unpack_dual(tensor, level=level).tangent is not None
    )


functorch_is_active = torch._C._are_functorch_transforms_active

fused_sdp_choice = torch._fused_sdp_choice


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def sdp_priority_order() -> tuple[int, ...]:
    """The order in which torch tries its SDPA backends, as ``sdpa_kernel(set_priority=True)``
    leaves it."""
    return tuple(torch._C._get_sdp_priority_order())


#: Whether SDPA may use flash, efficient, cuDNN and math kernels; as ``torch.backends.cuda``'s own,
#: each of which is one more function of Python.
sdp_switches: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_enabled,
)


def composite_kernel(dispatch_key: str):
    """Torch's own kernel of ``aten::scaled_dot_product_attention`` behind a dispatch key."""
    return torch.library.get_kernel("aten::scaled_dot_product_attention", dispatch_key)


def varlen_ops() -> list[str]:
    """The ops behind ``torch.nn.attention.varlen`` that this torch has."""
    try:
        import torch.nn.attention.varlen  # noqa: F401  defines them
    except ImportError:
        return []
    return [op for op in ("_varlen_attn", "_varlen_attn_out") if hasattr(torch.ops.torch_attn, op)]


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data that has the version counter of a plain tensor or a DTensor, also when
    that is gone."""
    with torch._C._DisableTorchDispatch():
        witness = tensor.detach()
        if type(tensor) is torch.Tensor:
            witness.data = tensor.new_empty(0)  # keeps the counter
        return witness


def profiler_is_on() -> bool:
    """Whether a profiler records in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def forget_resolved_kernels(op: torch._ops.OpOverload) -> None:
    """Make the Python dispatcher, which traces use, look up an op's kernels again, since
    registering or removing one does not. It would otherwise call an autograd kernel that no longer
    exists, whose stand-in computes no gradients."""
    op._dispatch_cache.clear()


def argument_names(op: torch._ops.OpOverload) -> list[str]:
    """The names of an op's arguments, in their order."""
    return [argument.name for argument in op._schema.arguments]


# Of the last few hundred libraries.
_withdrawn: collections.deque = collections.deque(maxlen=1000)


def withdraw(library: torch.library.Library) -> None:
    """Remove everything registered with a library now, not when it is garbage-collected.

    Its kernels live on for a while: another thread's call may have been dispatched to one of them
    and wait for the GIL, without a reference to it.
    """
    for registered in library._op_impls:
        namespace, op, key = registered.split("/")
        _withdrawn.append(torch.library.get_kernel(f"{namespace}::{op}", key))
    library._destroy()


def kernel_is_registered(op: str, dispatch_key: str) -> bool:
    """Whether an op has a kernel of its own for a dispatch key, not by way of an alias key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, dispatch_key)


#: How many dispatch modes are on in this thread; at least one in any trace.
dispatch_modes_are_on: Callable[[], int] = torch._C._len_torch_dispatch_stack


def current_raw_stream(device: torch.device) -> int:
    """The handle of a device's current stream; 0 on CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


#: Whether the current stream is captured by a CUDA graph, where CUDA is in use; as torch.cuda's
#: own, which is one more function of Python.
is_capturing: Callable[[], bool] = (
    torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else bool
)


def is_of_replays(x: torch.Tensor) -> bool:
    """Whether this tensor, or its base, is an output of the CUDA graphs of
    ``torch.compile(mode="reduce-overhead")``: each replay changes its contents but not its
    version."""
    is_cached = torch._C._is_cached_tensor
    return is_cached(x) or (x._is_view() and is_cached(x._base))


def add_subclass_rule(op: torch._ops.HigherOrderOperator, kind: type, rule) -> None:
    """Let a higher-order op run ``rule`` if an argument is of a tensor subclass. A rule that
    returns NotImplemented leaves the call to others."""
    remove_subclass_rule(op, kind)
    op.py_impl(kind)(rule)


def remove_subclass_rule(op: torch._ops.HigherOrderOperator, kind: type) -> None:
    """Undo :func:`add_subclass_rule`."""
    op.python_key_table.pop(kind, None)


def trace_gradients(score_mod, query: torch.Tensor, captured: tuple):
    """Trace the gradients of a ``score_mod``, as torch does before a forward, but outside all
    saved-tensor hooks and below autograd."""
    index = [torch.zeros((), dtype=torch.int, device=query.device) for _ in range(4)]
    score = torch.zeros((), dtype=query.dtype, device=query.device, requires_grad=True)
    # Imported here, for dynamo takes a second.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    # The package has the op under the module's name.
    flex = sys.modules["torch._higher_order_ops.flex_attention"]
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(included, excluded),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
        torch.enable_grad(),
        TransformGetItemToIndex(),
    ):
        return flex.create_fw_bw_graph(score_mod, (score, *index), captured)[1]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def forward_pre_hooks(module: torch.nn.Module) -> list[Callable]:
    """The forward pre-hooks of a module and all modules inside."""
    return [hook for part in module.modules() for hook in part._forward_pre_hooks.values()]


# Where a higher-order op's kernels for plain tensors are: with autograd, and in inference mode.
PLAIN_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeExplicitAutograd)


def plain_kernel(op: torch._ops.HigherOrderOperator, dispatch_key):
    """The kernel of a higher-order op behind one of ``PLAIN_KEYS``."""
    return op.py_kernels[dispatch_key]


def set_plain_kernel(op: torch._ops.HigherOrderOperator, dispatch_key, kernel) -> None:
    """Replace that kernel, also in the op's cache."""
    op.py_kernels[dispatch_key] = kernel
    op._dispatch_cache.clear()


class StaticMethod:
    """A static method of a torch class that can be read, replaced and restored."""

    _kind = staticmethod  # for subclasses to change

    def __init__(self, owner: type, name: str):
        self._owner, self._name = owner, name
        self._before = self._put = None

    def get(self):
        return getattr(self._owner, self._name)

    def put(self, function) -> None:
        self._before, self._put = self._owner.__dict__[self._name], function
        setattr(self._owner, self._name, self._kind(function))

    def restore(self) -> None:
        if self._put is not None and self.get() is self._put:
            setattr(self._owner, self._name, self._before)
        self._before = self._put = None


class CausalBiasDispatch(StaticMethod):
    """The function that ``CausalBias`` hands its calls to."""

    def __init__(self):
        super().__init__(CausalBias, "_dispatch")


class ReentrantForward(StaticMethod):
    """The forward of checkpoints with ``use_reentrant=True``: ``forward(ctx, function, preserve,
    *args)``, whose backward calls ``function`` a second time."""

    def __init__(self):
        super().__init__(torch.utils.checkpoint.CheckpointFunction, "forward")


class CheckpointFrameInit(StaticMethod):
    """The ``init(frame, recompute, *args)`` of a checkpoint with ``use_reentrant=False``. It then
    calls its function, which ``recompute`` calls again in the backward."""

    def __init__(self):
        super().__init__(torch.utils.checkpoint._CheckpointFrame, "__init__")

    _kind = staticmethod(lambda function: function)


def implicit_replication_is_on() -> bool:
    """Whether torch takes plain tensors beside DTensors as replicated ones."""
    return DTensor._op_dispatcher._allow_implicit_replication


def recompute_in_forward(frame):
    """The ``recompute`` of such a checkpoint until its function has returned, then None."""
    return None if frame.forward_completed else frame.recompute_fn


@functools.cache
def cudnn_logsumexp_ndim() -> int:
    """Dims of the logsumexp that cuDNN attention returns: 4 with a trailing 1, or 3."""
    query = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, query, query, None, True, 0.0, False, False
    )
    return out[1].dim()


# -- Process groups, the memory that their ranks share, and DTensor --------------------------------

# all_gather_into_tensor until torch 2.12, which deprecates that name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def active_ddp_module() -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` whose forward is running, the innermost one."""
    return DistributedDataParallel._get_active_ddp_module()


def new_group_of_these(ranks: Sequence[int], **options) -> dist.ProcessGroup:
    """A group that its ranks create among themselves, without the other ranks.

    If ``init_process_group`` got a ``device_id``, ``new_group`` splits the communicator off the
    world's. NCCL does that with all ranks of the world together, even with local synchronization,
    so a pipeline stage would wait for another one that waits for it.
    """
    world = dist.distributed_c10d._get_default_group()
    device, apart = world.bound_device_id, len(ranks) < dist.get_world_size()
    if apart:
        world.bound_device_id = None
    try:
        with _named_by_ranks(ranks):
            return dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        if apart:
            world.bound_device_id = device


_group_names = threading.local()


@contextlib.contextmanager
def _named_by_ranks(ranks: Sequence[int]):
    """Within it, a group gets a name that is derived from its ranks, by which they find each other.

    Torch's name contains the number of groups that a rank is in or, in torch 2.14, has created.
    That number may differ between ranks, which would then wait for each other under different
    names. In torch 2.14 the count also increases only on these ranks, so a later group with more
    ranks would have different names too.
    """
    c10d = dist.distributed_c10d
    if not hasattr(c10d._process_group_name, "of_cp_dispatch"):
        c10d._process_group_name = _or_torchs_name(c10d._process_group_name)
    text = "_".join(map(str, sorted(ranks)))
    start = f"cp_dispatch_{hashlib.sha256(text.encode()).hexdigest()[:16]}_"
    number = sum(name.startswith(start) for name in c10d._world.pg_names.values())
    _group_names.wanted = f"{start}{number}"
    try:
        yield
    finally:
        _group_names.wanted = None


def _or_torchs_name(torchs):
    """Installed permanently, because threads create groups concurrently. Groups without a name of
    ours get torch's."""

    @functools.wraps(torchs)
    def name(ranks, use_hashed_name):
        return getattr(_group_names, "wanted", None) or torchs(ranks, use_hashed_name)

    name.of_cp_dispatch = True
    return name


# Buffers that the ranks of a group address; None in a torch without them.
try:
    from torch._C._distributed_c10d import _SymmetricMemory as symmetric_memory
except ImportError:
    symmetric_memory = None

#: Mesh, placements, global shape, strides and dtype of a DTensor, hashable.
dtensor_spec: Callable[[DTensor], DTensorSpec] = operator.attrgetter("_spec")

#: This rank's shard of a DTensor, without autograd and without a collective. (Both are read many
#: times per call, and a Python function would cost more than the access.)
local_tensor: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def dress(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """The DTensor of which ``local`` is this rank's part, a leaf, without the rest of the
    constructor, which does nothing and takes longer."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def groups_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...] | None:
    """The group of each mesh dim, None for a rank outside the mesh; as ``mesh.get_group``, outside
    traces and in less time."""
    if mesh.get_coordinate() is None:
        return None
    return tuple(map(resolve_group, mesh._dim_group_names))


def group_name(group: dist.ProcessGroup) -> str:
    """The name by which :func:`resolve_group` finds a group."""
    return group.group_name


class Unflatten(StaticMethod):
    """The static method by which compiled graphs make the DTensors that they return."""

    def __init__(self):
        super().__init__(DTensor, "__tensor_unflatten__")


def local_tensor_mode() -> type | None:
    """The class of torch's ``LocalTensorMode``, None where this torch has none."""
    try:
        from torch.distributed._local_tensor import LocalTensorMode
    except ImportError:
        return None
    return LocalTensorMode


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


def torch_context_parallel_is_on() -> bool:
    """Whether torch's experimental context-parallel dispatcher handles SDPA at present."""
    return _FLASH in DTensor._op_dispatcher._custom_op_handlers


# -- Dynamo, fakes, traces and the graphs that come of them ----------------------------------------


def skip_code(function) -> None:
    """Keep dynamo from compiling frames of a function. It may still be traced as part of another
    one."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def run_uncompiled(function):
    """A decorator for functions that torch calls from C++. Dynamo compiles neither them nor what
    they call, though they may be traced as part of another function.

    After a graph break, and in a backward inside a compiled function, dynamo compiles all Python
    code that runs, except torch's own. It would compile a schedule in pieces, and saved tensors
    whose versions and specs it does not know.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def count_traced(functions) -> int:
    """How many calls of these functions are in the graphs that dynamo is currently making."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    graphs = [tracer.graph for tracer in output.tracers]
    graphs += [x.graph for x in output.nn_modules.values() if isinstance(x, torch.fx.GraphModule)]
    return sum(node.target in functions for graph in graphs for node in graph.nodes)


# Inside, functions do not look at __torch_function__ of their arguments; dynamo knows it.
without_subclass = torch._C.DisableTorchFunctionSubclass

# Not None while dynamo compiles in this thread. Every call checks it, so it is torch's own
# function.
dynamo_traces = torch._guards.TracingContext.try_get


def size_hint(size) -> int:
    """A size's value in a trace, without a guard on it."""
    node = getattr(size, "node", None)
    return int(size) if node is None or not node.has_hint() else int(node.hint)


def put_known_sizes(tensor: DTensor) -> None:
    """In a trace, put ints into a DTensor's spec if all its sizes have become constants.

    Torch (2.11 to 2.14) looks up such a spec in its cache, and a symbolic stride has no hash.
    """
    meta = tensor._spec.tensor_meta
    nodes = [getattr(size, "node", None) for size in meta.shape]
    if all(node is None or node.maybe_as_int() is not None for node in nodes):
        shape, stride = torch.Size(map(int, meta.shape)), tuple(map(int, meta.stride))
        tensor._spec.tensor_meta = meta._replace(shape=shape, stride=stride)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data and is not part of a graph that is being traced."""
    return isinstance(tensor, FakeTensor)


def in_fake_mode(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor for the fake mode that is on, which takes none with data; itself if none is on, or
    in a function that dynamo traces, which makes it fake by itself."""
    if torch.compiler.is_dynamo_compiling():
        return tensor
    mode = active_fake_mode()
    return tensor if mode is None or is_fake(tensor) else mode.from_tensor(tensor)


def compiles_for_inductor() -> bool:
    """Whether this thread traces a graph that inductor will compile."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is None:
        return False
    return not isinstance(virtualized.V.fake_mode, virtualized.NullHandler)


def save_in_traced_checkpoints(op: torch._ops.OpOverload) -> None:
    """In a trace of a checkpointed region, save the last result of ``op`` for the backward.

    For random numbers: if torch 2.13 recomputes them, it mistakes the meshes of DTensors for the
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
    in the backward. The trace of the forward is too early, because at its end torch tags all nodes
    again."""
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


def keep_order_in_inductor(communicates, knows_memory=lambda op: False) -> None:
    """From now on, keep the order of ops with ``communicates(op)`` in inductor's graphs, among
    themselves and relative to torch's collectives; inductor orders only the latter. Also keep
    graphs from overwriting integers that they made for an op with ``knows_memory(op)`` or got from
    it, possibly from a forward in its backward.

    Permanent, because backwards are compiled when they first run. No effect without inductor.
    """
    if "torch._inductor.compile_fx" not in sys.modules:
        return
    from torch._inductor import comms, ir
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.virtualized import V

    of_torch = comms.decide_global_ordering_of_comms
    if getattr(of_torch, "is_of_cp_dispatch", False):
        return

    @functools.wraps(of_torch)
    def decide_global_ordering_of_comms(nodes, *args):
        nodes, last, tensors = of_torch(nodes, *args), None, []
        if V.graph.is_backward:
            given = V.graph.graph_inputs.values()
            tensors += (x for x in given if isinstance(x, ir.TensorBox))
        for node in nodes:
            op = getattr(node.node, "op_overload", None)
            if knows_memory(op):
                tensors += [*node.node.inputs, *node.node.outputs]
            is_own = communicates(op)
            if not is_own and not comms.contains_collective(node):
                continue
            if last is not None and (is_own or last[1]):
                # Like torch's own chain: an order that keeps no memory alive.
                after = next(iter(node.get_buffer_names()))
                for name in last[0].get_buffer_names():
                    node.add_fake_dep(WeakDep(name, mutating_buf=after, is_fake=True))
            last = node, is_own
        V.graph.never_reuse_buffers.update(
            x.get_name() for x in tensors if not x.get_dtype().is_floating_point
        )
        return nodes

    decide_global_ordering_of_comms.is_of_cp_dispatch = True
    comms.decide_global_ordering_of_comms = decide_global_ordering_of_comms


def rewrite_flex_kernels(rewrites: dict[str, Callable[[str], str | None]]) -> bool:
    """Replace the Jinja source of each of inductor's FlexAttention templates, named by the keys, by
    what its function returns for it. Returns whether all were replaced; if the source is not known
    or a function returns None, none is.

    Permanent, like :func:`keep_order_in_inductor`.
    """
    from torch._inductor.kernel.flex import flex_attention as flex
    from torch._inductor.kernel.flex.common import load_flex_template

    files = {
        "flex_attention": ("flex_attention", "utilities", "common"),
        "flex_attention_backward": ("flex_backwards", "utilities"),
    }
    replaced = []
    for name, rewrite in rewrites.items():
        template = getattr(flex, f"{name}_template")
        source = "".join(map(load_flex_template, files[name]))
        written = rewrite(source)
        is_known = template.src_hash == hashlib.sha256(source.encode()).hexdigest()
        if not is_known or written is None:
            return False
        replaced.append((template, template._template_from_string(written)))
    for template, written in replaced:
        template.template = written
    return True


def save_in_partitioners(communicates) -> None:
    """From now on, keep backwards of graphs from repeating ops with ``communicates(op)``, except in
    checkpoints, as torch does with its own collectives. Instead of views of a result, which take no
    less memory, the result itself is saved: one tensor, where every saved tensor costs host time.

    Permanent, like :func:`keep_order_in_inductor`.
    """
    from torch._functorch import partitioners

    of_torch, choose = partitioners.force_save_collectives, partitioners.choose_saved_values_set
    if getattr(of_torch, "is_of_cp_dispatch", False):
        return

    def is_saved(node) -> bool:
        return communicates(node.target) and not partitioners.must_recompute(node)

    @functools.wraps(of_torch)
    def force_save_collectives(joint_module):
        of_torch(joint_module)
        for node in joint_module.graph.nodes:
            if is_saved(node):
                node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

    @functools.wraps(choose)
    def choose_saved_values_set(*args, **kwargs):
        saved = choose(*args, **kwargs)
        # Where nothing else is left to choose from, torch names ops that have several results.
        several = [node for node in saved if communicates(node.target) and not _is_one(node)]
        parts = (x for node in several for x in node.users if x.target is operator.getitem)
        others = (_whole_of(x, is_saved) for x in saved if x not in several)
        return [*dict.fromkeys([*others, *parts])]

    force_save_collectives.is_of_cp_dispatch = True
    partitioners.force_save_collectives = force_save_collectives
    partitioners.choose_saved_values_set = choose_saved_values_set


def keep_sizes_traceable() -> None:
    """From now on, keep traces from defining a known size by an op that was applied to it.

    Torch (2.11 to 2.14) looks up an unknown size by the latest value with the same symbol. In the
    backward of a DTensor's view that value is ``sym_max(n, 1)`` of the same size ``n``, so the
    lookup never ends (RecursionError). Permanent, like :func:`keep_order_in_inductor`.
    """
    from torch.fx.experimental import proxy_tensor

    of_torch = proxy_tensor._sym_register
    if getattr(of_torch, "is_of_cp_dispatch", False):
        return

    @functools.wraps(of_torch)
    def _sym_register(tracer, func, args, out):
        symbol = getattr(getattr(out, "node", None), "expr", None)
        known = tracer.sympy_expr_tracker.get(symbol)
        of_torch(tracer, func, args, out)
        if known is not None:
            tracer.sympy_expr_tracker[symbol] = known

    _sym_register.is_of_cp_dispatch = True
    proxy_tensor._sym_register = _sym_register


_VIEWS = torch.ops.aten.slice.Tensor, torch.ops.aten.view.default


def _whole_of(node, is_saved):
    """The node with ``is_saved(node)`` of which a node of a graph is a view, else the node itself.
    Views whose sizes are symbols are left alone: the backward may not have those."""
    base = node
    while base.target in _VIEWS and len(base.all_input_nodes) == 1:
        base = base.args[0]
        if is_saved(base):
            return base
    return node


def _is_one(node) -> bool:
    """Whether a node of a graph is a single tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def guard_trace(check, words: str, key: object) -> None:
    """Guard the graph that dynamo traces in this thread, if any, on ``check``, which gets the
    frame's locals, and on the sizes of DTensors that were constants. A second guard with an equal
    ``key`` has no effect."""
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


def when_traced(function) -> None:
    """Call ``function`` once the graph that dynamo traces in this thread is compiled; never if that
    fails."""

    def create(builder, guard) -> None:  # guards come last
        function()

    guards = dynamo_traces().guards_context.dynamo_guards
    guards.add(torch._dynamo.source.GlobalStateSource().make_guard(create))


def _guard_sizes(builder) -> None:
    """Dynamo guards only on the sizes of a DTensor's shard. DTensors of different sizes can have
    equal shards on some ranks, and then only the other ranks would recompile."""
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
