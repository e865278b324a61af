"""Every private symbol of torch that cp_dispatch uses exists in this torch and does what it is used
for.

A name added to ``_compat.__all__`` needs a ``test_<name>`` here, or an entry in ``TESTED_WITH``.
"""

import inspect
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cp_dispatch import _compat
from tests.distributed.threads import run_threads
from tests.ranks import one_rank

TESTED_WITH = {
    "recompute_in_forward": "CheckpointFrameInit",
    "DTensorSpec": "dtensor_spec",
    "OpSchema": "register_op_strategy",
    "OpSpec": "register_op_strategy",
    "OpStrategy": "register_op_strategy",
    "RuntimeSchemaInfo": "register_op_strategy",
    "generate_redistribute_costs": "register_op_strategy",
    "add_check": "compiled_graphs",
    "dynamo_traces": "guard_trace",
    "PLAIN_KEYS": "set_plain_kernel",
    "plain_kernel": "set_plain_kernel",
    "remove_subclass_rule": "add_subclass_rule",
    "get_unwrapped": "is_functorch_wrapped_tensor",
}


@pytest.fixture
def mesh():
    with one_rank() as mesh:
        yield mesh


@pytest.mark.parametrize("name", _compat.__all__)
def test_every_name_exists_and_has_a_test(name):
    assert hasattr(_compat, name)
    test = globals()[f"test_{TESTED_WITH.get(name, name)}"]
    assert f"_compat.{name}" in inspect.getsource(test)


def test_register_op_strategy(mesh):
    """A rule of ours decides for an op of ours: Shard in, Shard out, and no sharding of dim 1."""
    library = torch.library.Library("cp_dispatch_compat_test", "FRAGMENT")
    library.define("halve(Tensor x, float by) -> Tensor")
    library.impl("halve", lambda x, by: x / by, "CompositeExplicitAutograd")
    halve = torch.ops.cp_dispatch_compat_test.halve.default
    asked = []

    def strategy(schema):
        assert isinstance(schema, _compat.OpSchema)
        (x,) = (arg for arg in schema.args_strategy if isinstance(arg, _compat.OpStrategy))
        given = x.strategies[0].output_spec
        asked.append(given.placements)
        target = _compat.DTensorSpec(
            given.mesh,
            tuple(p if p == Shard(0) else Replicate() for p in given.placements),
            tensor_meta=given.tensor_meta,
        )
        costs = [_compat.generate_redistribute_costs(x, target)]
        assert all(cost >= 0 for cost in costs[0])
        return _compat.OpStrategy(
            [_compat.OpSpec(output_specs=target, input_specs=[target], redistribute_cost=costs)]
        )

    info = _compat.RuntimeSchemaInfo()
    _compat.register_op_strategy(halve, schema_info=info)(strategy)
    try:
        for placement, wanted in ((Shard(0), Shard(0)), (Shard(1), Replicate())):
            x = DTensor.from_local(torch.ones(2, 4), mesh, [placement])
            for by in (2.0, 4.0):
                # ``by`` is not part of the cache key: the rule runs once for each placement.
                out = halve(x, by)
                assert out.placements == (wanted,)
                assert torch.equal(out.to_local(), torch.full((2, 4), 1 / by))
        assert asked == [(Shard(0),), (Shard(1),)]
    finally:
        DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.pop(halve, None)
        library._destroy()


def test_dtensor_spec(mesh):
    first, second, other = (
        _compat.dtensor_spec(DTensor.from_local(torch.rand(2, 4), mesh, [placement]))
        for placement in (Shard(0), Shard(0), Shard(1))
    )
    assert isinstance(first, _compat.DTensorSpec)
    assert first == second and hash(first) == hash(second) and first != other
    assert first.mesh is mesh and first.placements == (Shard(0),) and first.shape == (2, 4)


def test_local_tensor(mesh):
    """The shard itself. Autograd does not see its use."""
    shard = torch.rand(2, 4)
    tensor = DTensor.from_local(shard, mesh, [Shard(0)]).requires_grad_()
    local = _compat.local_tensor(tensor)
    assert local.data_ptr() == shard.data_ptr() and torch.equal(local, shard)
    assert not isinstance(local, DTensor) and (local * 2).grad_fn is None


def test_all_gather_single(mesh):
    gathered = torch.zeros(3)
    _compat.all_gather_single(gathered, torch.arange(3.0), group=mesh.get_group(0))
    assert torch.equal(gathered, torch.arange(3.0))


def test_symmetric_memory():
    # Its buffers need GPUs, so tests/gpu tests them.
    for name in ("empty_strided_p2p", "rendezvous", "get_buffer"):
        assert callable(getattr(_compat.symmetric_memory, name))


def test_has_tangent():
    x = torch.ones(2)
    assert not _compat.has_tangent(x)
    with torch.autograd.forward_ad.dual_level():
        assert _compat.has_tangent(torch.autograd.forward_ad.make_dual(x, x))
        assert not _compat.has_tangent(x)


def test_version_witness(mesh):
    for x in (DTensor.from_local(torch.ones(3), mesh, [Shard(0)]), torch.ones(3)):
        alias, witness = x.detach(), _compat.version_witness(x)
        assert type(x) is DTensor or witness.untyped_storage().nbytes() == 0
        del x
        assert witness._version == 0
        alias.add_(1)
        assert witness._version == 1 and alias.shape == (3,)


def test_group_name(mesh):
    group = mesh.get_group(0)
    assert _compat.group_name(group) == group.group_name
    assert _compat.resolve_group(_compat.group_name(group)) is group


def test_groups_of():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        for part in (mesh, mesh["cp"]):
            want = tuple(part.get_group(dim) for dim in range(part.ndim))
            assert _compat.groups_of(part) == want
        inside = rank < 2
        part = DeviceMesh("cpu", [0, 1])
        assert _compat.groups_of(part) == ((part.get_group(),) if inside else None)

    run_threads(4, body)


def test_current_raw_stream():
    """A torch built without CUDA does not have this function."""
    assert _compat.current_raw_stream(torch.device("cpu")) == 0
    device, name = torch.device("cuda", 3), "_cuda_getCurrentRawStream"
    with mock.patch.object(torch._C, name, lambda index: 10 + index, create=True):
        assert _compat.current_raw_stream(device) == 13
    if torch.cuda.is_available():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert _compat.current_raw_stream(stream.device) == stream.cuda_stream


def test_is_capturing():
    assert not torch.cuda.is_available() or not _compat.is_capturing()
    if not torch.backends.cuda.is_built():
        assert _compat.is_capturing() is False


def test_is_of_replays():
    cached, other = torch.ones(2), torch.ones(2)
    torch._C._set_cached_tensors_enabled(True)
    try:
        torch._C._add_cached_tensor(cached)
        assert _compat.is_of_replays(cached) and _compat.is_of_replays(cached[:1])
        assert not _compat.is_of_replays(other) and not _compat.is_of_replays(other[:1])
    finally:
        torch._C._remove_cached_tensor(cached)
        torch._C._set_cached_tensors_enabled(False)
    assert not _compat.is_of_replays(cached)


def test_CausalBiasDispatch():
    def mine(*args):
        return "mine"

    before, switch = CausalBias.__dict__["_dispatch"], _compat.CausalBiasDispatch()
    assert switch.get() is CausalBias._dispatch
    switch.put(mine)
    query = torch.ones(1, 1, 4, 4)
    assert F.scaled_dot_product_attention(query, query, query, causal_lower_right(4, 4)) == "mine"
    switch.restore()
    assert CausalBias.__dict__["_dispatch"] is before
    switch.restore()
    assert CausalBias.__dict__["_dispatch"] is before


def test_Unflatten():
    before, switch = DTensor.__dict__["__tensor_unflatten__"], _compat.Unflatten()
    assert switch.get() is DTensor.__tensor_unflatten__
    seen = []

    def mine(inner, description, size, stride):
        seen.append((set(inner), tuple(size), tuple(stride)))
        return before.__func__(inner, description, size, stride)

    with one_rank() as mesh:
        given = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        double = torch.compile(lambda x: x * 2, backend="aot_eager", fullgraph=True)
        double(given)
        switch.put(mine)
        seen.clear()
        got = double(given)
        assert isinstance(got, DTensor) and torch.equal(got.to_local(), torch.full((2, 3), 2.0))
    ((names, *shape),) = seen
    assert "_local_tensor" in names and names <= {"_local_tensor", "device_mesh"}
    assert shape == [(2, 3), (3, 1)]
    for _ in range(2):
        switch.restore()
        assert DTensor.__dict__["__tensor_unflatten__"] is before


def test_below_autograd():
    x = torch.ones(2, requires_grad=True)
    with _compat.below_autograd():
        assert (x * 2).grad_fn is None
        assert not (x * 2).t()._is_view()
    assert (x * 2).grad_fn is not None


@pytest.mark.parametrize("key", ["CPU", "AutogradCPU", "CUDA", "AutogradCUDA"])
def test_composite_kernel(key):
    """The kernel is torch's own, accepts boxed calls, and records autograd when it should."""
    kernel = _compat.composite_kernel(key)
    tensors = [torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3)]
    with torch.set_grad_enabled(key.startswith("Autograd")):
        keys = torch._C._dispatch_keys(tensors[0])
        out = kernel.call_boxed(keys, *tensors, None, 0.0, True, scale=0.3, enable_gqa=False)
    expected = F.scaled_dot_product_attention(*tensors, is_causal=True, scale=0.3)
    assert torch.equal(out, expected)
    assert out.requires_grad == key.startswith("Autograd")


def test_kernel_is_registered():
    """Kernels for a device count. Those for an alias key, which serve every device, do not."""
    library = torch.library.Library("cp_dispatch_compat_kernel", "FRAGMENT")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", torch.clone, "CompositeExplicitAutograd")
    assert not _compat.kernel_is_registered("cp_dispatch_compat_kernel::same", "CPU")
    library.impl("same", torch.clone, "CPU")
    assert _compat.kernel_is_registered("cp_dispatch_compat_kernel::same", "CPU")
    assert not _compat.kernel_is_registered("cp_dispatch_compat_kernel::same", "CUDA")


def test_cudnn_logsumexp_ndim():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        query = torch.empty(2, 4, 16, 64, dtype=torch.float16, device="cuda")
        lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, query, query, None, True, 0.0, False, False
        )[1]
    assert _compat.cudnn_logsumexp_ndim() == lse.dim()
    assert lse.shape in {(2, 4, 16), (2, 4, 16, 1)}  # the two that the cuDNN backend knows


def test_disable_current_modes():
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Count() as count:
        torch.ones(2)
        with _compat.disable_current_modes():
            torch.ones(2)
        assert count.seen == 1
        torch.ones(2)
        assert count.seen == 2


def test_fused_sdp_choice():
    x = torch.ones(1, 2, 8, 16)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            choice = _compat.fused_sdp_choice(x, x, x, None, 0.0, True, enable_gqa=False)
        assert SDPBackend(choice) == backend
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError):
        _compat.fused_sdp_choice(x, x, x, None, 0.0, True, enable_gqa=False)


def test_sdp_priority_order():
    before = _compat.sdp_priority_order()
    assert isinstance(before, tuple) and {int(SDPBackend.MATH), 1} <= set(before)
    wanted = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(wanted, set_priority=True):
        assert _compat.sdp_priority_order()[:2] == tuple(map(int, wanted))
    assert _compat.sdp_priority_order() == before


def test_sdp_switches():
    backends = "FLASH", "EFFICIENT", "CUDNN"
    for index, name in enumerate(backends):
        with sdpa_kernel(getattr(SDPBackend, f"{name}_ATTENTION")):
            assert [x() for x in _compat.sdp_switches] == [i == index for i in range(4)]
    with sdpa_kernel(SDPBackend.MATH):
        assert [x() for x in _compat.sdp_switches] == [False] * 3 + [True]


def test_in_backward():
    seen = []
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(_compat.in_backward()))
    x.sum().backward()
    assert seen == [True] and not _compat.in_backward()


def test_is_functorch_wrapped_tensor():
    plain = torch.ones(2)
    assert not _compat.is_functorch_wrapped_tensor(plain)
    seen = []

    def look(x):
        assert _compat.is_functorch_wrapped_tensor(x)
        inner = _compat.get_unwrapped(x)
        while _compat.is_functorch_wrapped_tensor(inner):
            inner = _compat.get_unwrapped(inner)
        seen.append(inner)
        return (x * x).sum()

    torch.func.grad(look)(plain)
    torch.func.vmap(torch.func.grad(look))(plain[None])
    assert torch.equal(seen[0], plain) and torch.equal(seen[1], plain[None])


def test_outside_functorch():
    seen = []

    def look(x):
        with _compat.outside_functorch():
            assert not _compat.functorch_is_active()
            seen.append((torch.ones(2) == 1).all().item())
        assert _compat.functorch_is_active()
        return (x * x).sum()

    torch.func.vmap(torch.func.grad(look))(torch.ones(1, 2))
    assert seen == [True]


def test_functorch_is_active():
    assert not _compat.functorch_is_active()
    answers = []

    def look(x):
        answers.append(_compat.functorch_is_active())
        return (x * x).sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 3))
    assert answers == [True, True] and not _compat.functorch_is_active()


def test_is_tracing():
    answers = []

    def look(x):
        answers.append(_compat.is_tracing())
        return x + 1

    look(torch.ones(2))
    make_fx(look)(torch.ones(2))
    assert answers == [False, True]


def test_local_tensor_mode():
    mode = _compat.local_tensor_mode()
    if mode is None:
        with pytest.raises(ImportError):
            __import__("torch.distributed._local_tensor")
    else:
        assert inspect.isclass(mode) and issubclass(mode, TorchDispatchMode)
        assert mode.__name__ == "LocalTensorMode"


def test_resolve_group(mesh):
    group = mesh.get_group(0)
    assert _compat.resolve_group(group.group_name) is group
    with pytest.raises((RuntimeError, KeyError, ValueError)):
        _compat.resolve_group("no such group")


def test_torch_context_parallel_is_on():
    assert not _compat.torch_context_parallel_is_on()
    torch_cp._enable_context_parallel_dispatcher()
    try:
        assert _compat.torch_context_parallel_is_on()
    finally:
        torch_cp._disable_context_parallel_dispatcher()
    assert not _compat.torch_context_parallel_is_on()


def test_when_traced():
    """Called once for each graph, when the graph is complete."""
    events = []

    @torch.compiler.assume_constant_result
    def traced():
        _compat.when_traced(lambda: events.append("done"))
        return 1

    def backend(graph, _):
        events.append("compiled")
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + traced(), backend=backend, fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(2))
    assert events == ["compiled", "done"]


def test_guard_trace():
    """A check that is added while dynamo traces decides whether the graph is used again."""
    library = torch.library.Library("cp_dispatch_compat_test", "FRAGMENT")
    library.define("same(Tensor x) -> Tensor")
    wanted, traced = [1], []

    def same(x):
        traced.append(_compat.dynamo_traces() is not None)
        if traced[-1]:
            now = wanted[0]
            for _ in range(2):
                _compat.guard_trace(lambda _: wanted[0] == now, "the test's setting", now)
        return x.clone()

    library.impl("same", same, "CompositeExplicitAutograd")
    torch.library.register_fake("cp_dispatch_compat_test::same", same, lib=library)
    op = torch.ops.cp_dispatch_compat_test.same
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: op(x) + 1, backend=counter, fullgraph=True)
    for wanted[0], graphs in ((1, 1), (1, 1), (2, 2), (1, 2), (2, 2)):
        compiled(torch.ones(2))
        assert counter.frame_count == graphs
    assert True in traced and _compat.dynamo_traces() is None
    torch._dynamo.reset()
    library._destroy()


def test_compiled_graphs():
    """A check that is added to an existing graph decides too."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: x + 1, backend=counter)
    compiled(torch.ones(2))
    (manager,) = _compat.compiled_graphs()
    holds = [True]
    _compat.add_check(manager, lambda _: holds[0], "the test's check")
    compiled(torch.ones(2))
    assert counter.frame_count == 1
    holds[0] = False
    compiled(torch.ones(2))
    assert counter.frame_count == 2
    assert len(list(_compat.compiled_graphs())) == 2
    torch._dynamo.reset()
    assert not list(_compat.compiled_graphs())


def test_save_in_traced_checkpoints():
    """The random numbers of a checkpointed region are saved, and not drawn again."""
    library = torch.library.Library("cp_dispatch_compat_test", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("noise", torch.rand_like, "CompositeExplicitAutograd")
    torch.library.register_fake("cp_dispatch_compat_test::noise", torch.empty_like, lib=library)
    op = torch.ops.cp_dispatch_compat_test.noise.default
    library.define("call(Tensor x) -> Tensor")

    def call(x):
        noise = op(x)
        _compat.save_in_traced_checkpoints(op)
        return (x * noise).sin()

    library.impl("call", call, "CompositeImplicitAutograd")
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        lambda x: checkpoint(torch.ops.cp_dispatch_compat_test.call, x, use_reentrant=False),
        backend=aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
        ),
        fullgraph=True,
    )
    compiled(torch.ones(2, requires_grad=True)).sum().backward()
    forward, backward = graphs
    assert op in forward and op not in backward
    assert not any("rng_state" in str(target) for target in forward)
    torch._dynamo.reset()
    library._destroy()


def test_leave_in_backward():
    """An op of the backward stays there, although it depends only on tensors of the forward."""
    library = torch.library.Library("cp_dispatch_compat_test", "FRAGMENT")
    library.define("shrink(Tensor x) -> Tensor")
    library.impl("shrink", lambda x: x[:1].clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(
        "cp_dispatch_compat_test::shrink", lambda x: x.new_empty(1, *x.shape[1:]), lib=library
    )
    op = torch.ops.cp_dispatch_compat_test.shrink.default

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            shrunk = op(*ctx.saved_tensors)
            if tagged:
                _compat.leave_in_backward(op)
            return grad * 2 + shrunk

    library.define("call(Tensor x) -> Tensor")
    library.impl("call", Twice.apply, "CompositeImplicitAutograd")
    found = {}
    for tagged in (False, True):
        torch._dynamo.reset()
        graphs = []

        def keep(graph, _, graphs=graphs):
            graphs.append([node.target for node in graph.graph.nodes])
            return make_boxed_func(graph.forward)

        compiled = torch.compile(
            lambda x: torch.ops.cp_dispatch_compat_test.call(x.sin()),
            backend=aot_autograd(
                fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
            ),
        )
        compiled(torch.ones(8, 8, requires_grad=True)).sum().backward()
        found[tagged] = [op in targets for targets in graphs]
    assert found == {False: [True, False], True: [False, True]}
    torch._dynamo.reset()
    library._destroy()


def test_leave_in_forward():
    """Binds the calls that torch has tagged. Spawned tests cover those in traces of whole steps."""
    op = torch.ops.aten.sin.default

    def both_ways(x):
        x = x.sin()
        for node in get_proxy_mode().tracer.graph.nodes:
            node.meta["partitioner_tag"] = "is_forward"
        x = x.sin()
        _compat.leave_in_forward(op)
        return x

    nodes = make_fx(both_ways)(torch.ones(2)).graph.nodes
    tags = [node.meta.get("partitioner_tag") for node in nodes if node.target is op]
    assert tags == ["must_be_in_forward", None]


def test_keep_order_in_inductor():
    """Torch chains only its own collectives. With ours added, each of them comes after the previous
    one."""
    from torch._inductor import comms, compile_fx
    from torch._inductor.virtualized import V

    assert compile_fx.__name__ in sys.modules

    class Node:
        def __init__(self, name, op=None):
            self.node, self.name, self.after = mock.Mock(op_overload=op), name, []

        def get_buffer_names(self):
            return [self.name]

        def add_fake_dep(self, dep):
            assert dep.is_fake and dep.mutating_buf == self.name
            self.after.append(dep.name)

    names = {"a": "ours", "b": None, "first": None, "c": "ours", "second": None, "third": None}
    given = [Node(name, op) for name, op in names.items()]
    torchs = [given[2], given[4], given[5]]
    with (
        mock.patch.object(comms, "decide_global_ordering_of_comms", lambda nodes, *_: nodes),
        mock.patch.object(comms, "contains_collective", torchs.__contains__),
        V.set_graph_handler(mock.Mock(is_backward=False)),
    ):
        for _ in range(2):
            _compat.keep_order_in_inductor(lambda op: op == "ours")
        assert comms.decide_global_ordering_of_comms(given, {}, {}) == given
    assert [x.after for x in given] == [[], [], ["a"], ["first"], ["c"], []]


@pytest.mark.parametrize("is_backward", [False, True])
def test_integers_that_graphs_do_not_overwrite(is_backward):
    """Those by which an op knows something, those that it returns, and those that were saved."""
    from torch._inductor import comms, ir
    from torch._inductor.virtualized import V

    def pair(name, spec=None):
        """An integer and a floating-point tensor."""
        tensors = [mock.Mock(spec=spec) for _ in range(2)]
        for x, kind, dtype in zip(tensors, "if", (torch.int32, torch.bfloat16), strict=True):
            x.get_name.return_value, x.get_dtype.return_value = f"{name}, {kind}", dtype
        return tensors

    nodes = [
        mock.Mock(node=mock.Mock(op_overload=op, inputs=pair(f"to {op}"), outputs=pair(f"of {op}")))
        for op in ("ours", "torch's")
    ]
    graph = mock.Mock(
        is_backward=is_backward, never_reuse_buffers=set(),
        graph_inputs=dict(enumerate([*pair("saved", ir.TensorBox), "a symbol"])),
    )  # fmt: skip
    with (
        mock.patch.object(comms, "decide_global_ordering_of_comms", lambda nodes, *_: nodes),
        mock.patch.object(comms, "contains_collective", lambda node: False),
        V.set_graph_handler(graph),
    ):
        _compat.keep_order_in_inductor(lambda op: False, lambda op: op == "ours")
        comms.decide_global_ordering_of_comms(nodes, {}, {})
    saved = {"saved, i"} if is_backward else set()
    assert graph.never_reuse_buffers == {"to ours, i", "of ours, i"} | saved


def test_keep_sizes_traceable():
    """A symbol keeps the first op that produced it; constants and other results are unchanged."""
    from torch.fx.experimental import proxy_tensor

    symbol, seen = object(), []
    tracer = mock.Mock(sympy_expr_tracker={})

    def of_torch(tracer, func, args, out):
        seen.append(out)
        if hasattr(out, "node"):
            tracer.sympy_expr_tracker[out.node.expr] = func

    with mock.patch.object(proxy_tensor, "_sym_register", of_torch):
        for _ in range(2):
            _compat.keep_sizes_traceable()
        size = mock.Mock(node=mock.Mock(expr=symbol))
        for func, out in (("size", size), ("sym_max", size), ("+", 3)):
            proxy_tensor._sym_register(tracer, func, (), out)
    assert seen == [size, size, 3] and tracer.sympy_expr_tracker == {symbol: "size"}


def test_rewrite_flex_kernels(monkeypatch):
    """Both of inductor's templates or none are replaced."""
    from torch._inductor.kernel.flex import flex_attention as flex

    templates = flex.flex_attention_template, flex.flex_attention_backward_template
    for template in templates:
        monkeypatch.setattr(template, "template", template.template)
    before = [template.template for template in templates]
    written = {"flex_attention": lambda _: "a", "flex_attention_backward": lambda _: None}
    assert not _compat.rewrite_flex_kernels(written)
    assert [template.template for template in templates] == before
    written["flex_attention_backward"] = lambda source: "b" if "program_id" in source else None
    assert _compat.rewrite_flex_kernels(written)
    assert [template.template.render() for template in templates] == ["a", "b"]
    monkeypatch.setattr(templates[0], "_hash", "of another text")
    assert not _compat.rewrite_flex_kernels(written)


def test_save_in_partitioners():
    """No backward repeats the op, except that of a checkpoint. The op has two results."""
    from torch._functorch import config, partitioners

    op, backwards = torch.ops.aten.sort.default, []

    def count_ops(graph, _):
        backwards.append(sum(node.target is op for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def as_is(graph, _):
        return make_boxed_func(graph.forward)

    def function(x):
        return (x.sin().sort().values.cos() * x).sort().values

    def count(function):
        backend = aot_autograd(
            fw_compiler=as_is, bw_compiler=count_ops,
            partition_fn=min_cut_rematerialization_partition,
        )  # fmt: skip
        torch._dynamo.reset()
        x = torch.rand(64, requires_grad=True)
        with config.patch(activation_memory_budget=0.01):
            got = torch.compile(function, backend=backend)(x)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), x), torch.autograd.grad(function(x).sum(), x)
        )
        return backwards.pop()

    names = "force_save_collectives", "choose_saved_values_set"
    torchs = {name: inspect.unwrap(getattr(partitioners, name)) for name in names}
    with mock.patch.multiple(partitioners, **torchs):
        repeated = count(function)
        for _ in range(2):
            _compat.save_in_partitioners(lambda target: target is op)
        assert (repeated, count(function)) == (2, 0)
        assert count(lambda x: checkpoint(function, x, use_reentrant=False)) == 2


def test_views_of_our_results_are_saved_as_one():
    from torch._functorch import partitioners

    op, saved = torch.ops.aten.cumsum.default, []

    def keep(graph, _):
        saved.append(sum(node.op == "placeholder" for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def function(x, y):
        parts = y.cumsum(0)
        first, second, third = (parts[i : i + 2].view(1, 2) for i in (0, 2, 4))
        return (x * first).sin() + (x * second).sin() + (x * third).sin()

    def count(y):
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
        )  # fmt: skip
        x = torch.rand(1, 2, requires_grad=True)
        got = torch.compile(function, backend=backend)(x, y)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), x), torch.autograd.grad(function(x, y).sum(), x)
        )
        return saved.pop()

    names = "force_save_collectives", "choose_saved_values_set"
    torchs = {name: inspect.unwrap(getattr(partitioners, name)) for name in names}
    with mock.patch.multiple(partitioners, **torchs):
        _compat.save_in_partitioners(lambda target: target is op)
        with mock.patch.object(_compat, "_whole_of", lambda node, _: node):
            apart = count(torch.rand(64))
        assert (apart, count(torch.rand(64))) == (5, 3), "x and the tangent among them"


def test_forget_resolved_kernels():
    """A trace that uses the Python dispatcher sees kernels that were added or removed since."""
    library = torch.library.Library("cp_dispatch_compat_test", "FRAGMENT")
    library.define("which(Tensor x) -> Tensor")
    library.impl("which", lambda x: x + 1, "CompositeImplicitAutograd")
    op = torch.ops.cp_dispatch_compat_test.which.default

    def trace():
        with enable_python_dispatcher():
            return op(torch.zeros((), requires_grad=True))

    assert trace() == 1
    before = torch.library.Library("cp_dispatch_compat_test", "IMPL")
    before.impl("which", lambda x: x + 2, "AutogradCPU")
    _compat.forget_resolved_kernels(op)
    assert trace() == 2
    before._destroy()
    _compat.forget_resolved_kernels(op)
    assert trace() == 1 and trace().requires_grad
    library._destroy()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_add_subclass_rule(mesh, compiler):
    """A rule gets FlexAttention's op with DTensors, below autograd, in eager mode and in traces,
    where torch's modes defer to it. It gets the op's backward too, and it can be removed."""
    ops = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
    seen = []

    def local(x):
        return _compat.local_tensor(x) if isinstance(x, DTensor) else x

    def wrapped(x):
        return DTensor.from_local(x, mesh, [Replicate()]) if isinstance(x, torch.Tensor) else x

    def rule(op):
        def call(*args):
            seen.append(op)
            assert isinstance(args[6], dict) or op is ops[1]
            results = op(*map(local, args))
            return tuple(x if isinstance(x, tuple) else wrapped(x) for x in results)

        return call

    for op in ops:
        _compat.add_subclass_rule(op, DTensor, rule(op))
    attend = torch.compile(flex_attention, backend=compiler) if compiler != "eager" else (
        flex_attention
    )  # fmt: skip
    torch._dynamo.reset()
    x = wrapped(torch.randn(1, 1, 16, 8)).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *x: None)
        attend(x, x, x).sum().backward()
    assert isinstance(x.grad, DTensor) and set(seen) == set(ops)
    for op in ops:
        _compat.remove_subclass_rule(op, DTensor)
        _compat.remove_subclass_rule(op, DTensor)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no rule registered|not supported"):
        flex_attention(x.detach(), x.detach(), x.detach())


@pytest.mark.parametrize("inference", [False, True])
def test_set_plain_kernel(inference):
    """A kernel of ours gets FlexAttention's op on plain tensors, and torch's kernel is restored."""
    op, seen = torch.ops.higher_order.flex_attention, []
    x = torch.randn(1, 1, 16, 8)
    before = {key: _compat.plain_kernel(op, key) for key in _compat.PLAIN_KEYS}
    with torch.inference_mode(inference):
        want = flex_attention(x, x, x)  # and the op caches its kernels

        def first(key):
            def kernel(*args):
                seen.append(key)
                return before[key](*args)

            return kernel

        for key in _compat.PLAIN_KEYS:
            _compat.set_plain_kernel(op, key, first(key))
        assert torch.equal(flex_attention(x, x, x), want) and seen
        for key, kernel in before.items():
            _compat.set_plain_kernel(op, key, kernel)
        seen.clear()
        assert torch.equal(flex_attention(x, x, x), want) and not seen


def test_trace_gradients():
    """Below autograd, and with saved-tensor hooks active."""
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: None)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), hooks:
        graph = _compat.trace_gradients(
            lambda score, b, h, q, k, weight: score.square() * weight[h], weight, (weight,)
        )
    zero, one = (torch.tensor(i, dtype=torch.int) for i in range(2))
    score, tangent = torch.tensor(3.0), torch.tensor(10.0)
    of_score, *_, of_weight = graph(score, zero, one, zero, zero, tangent, weight.detach())
    assert of_score == 180.0 and of_weight.tolist() == [0.0, 90.0]


def test_is_fake():
    with FakeTensorMode():
        assert _compat.is_fake(torch.ones(1))
    assert not _compat.is_fake(torch.ones(1))


def test_in_fake_mode():
    x = torch.ones(1)
    assert _compat.in_fake_mode(x) is x
    with FakeTensorMode():
        fake = _compat.in_fake_mode(x)
        assert _compat.is_fake(fake) and _compat.in_fake_mode(fake) is fake


def test_compiles_for_inductor():
    """True only in a trace for inductor. A backend that is a function is not one."""
    library = torch.library.Library("cp_dispatch_compat_test", "FRAGMENT")
    library.define("look(Tensor x) -> Tensor")
    seen = []

    def look(x):
        seen.append(_compat.compiles_for_inductor())
        return x + 1

    library.impl("look", look, "CompositeImplicitAutograd")
    op = torch.ops.cp_dispatch_compat_test.look
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        seen.clear()
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.compile(lambda x: op(x) * 2, backend=backend, fullgraph=True)(torch.ones(2))
        # Dynamo's own evaluation of shapes comes first, before there is a compiler.
        assert seen[-1] == (backend == "inductor"), seen
    assert not _compat.compiles_for_inductor()
    torch._dynamo.reset()
    library._destroy()


def test_profiler_is_on():
    assert not _compat.profiler_is_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _compat.profiler_is_on()
    assert not _compat.profiler_is_on()


def test_dispatch_modes_are_on():
    assert not _compat.dispatch_modes_are_on()
    with FakeTensorMode():
        assert _compat.dispatch_modes_are_on()


def test_dress():
    with one_rank() as mesh:
        given = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        local = given.to_local()
        got = _compat.dress(local, _compat.dtensor_spec(given))
        assert type(got) is DTensor and not got.requires_grad
        assert _compat.local_tensor(got) is local
        assert (got.shape, got.stride(), got.placements) == (
            given.shape, given.stride(), given.placements,
        )  # fmt: skip
        assert torch.equal((got + 1).to_local(), local + 1)


def test_without_subclass():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    x = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError):
        x + 1
    with _compat.without_subclass():
        assert type(torch.ops.aten.alias(x)) is torch.Tensor


def test_skip_code():
    """Called directly, such a function runs in eager mode. Called from another, it is a part of
    that one's graph."""
    seen = []

    def inner(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    def outer(x):
        return inner(x)

    _compat.skip_code(inner)
    for function, expected in ((inner, False), (outer, True)):
        torch._dynamo.reset()
        seen.clear()
        torch.compile(function, backend="eager")(torch.ones(2))
        assert seen == [expected]


def test_ReentrantForward():
    """Checkpoints call what was set, with their function as the first argument. Afterwards the
    original is restored."""
    owner, seen = torch.utils.checkpoint.CheckpointFunction, []
    before, switch = owner.__dict__["forward"], _compat.ReentrantForward()
    theirs = switch.get()

    def forward(ctx, function, *args):
        return theirs(ctx, lambda x: seen.append(1) or function(x), *args)

    switch.put(forward)
    x = torch.ones(2, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True)
    switch.restore()
    y.sum().backward()
    assert len(seen) == 2 and owner.__dict__["forward"] is before


def test_CheckpointFrameInit():
    """Checkpoints call what was set, and in the backward the function that it passed on."""
    owner, seen, frames = torch.utils.checkpoint._CheckpointFrame, [], []
    before, switch = owner.__dict__["__init__"], _compat.CheckpointFrameInit()
    theirs = switch.get()

    def init(frame, recompute, *args):
        theirs(frame, lambda *x: seen.append(1) or recompute(*x), *args)
        frames.append(frame)

    def function(x):
        seen.append(_compat.recompute_in_forward(frames[0]) is not None)
        return x.sin()

    switch.put(init)
    x = torch.ones(2, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
    switch.restore()
    assert seen == [True] and _compat.recompute_in_forward(frames[0]) is None
    y.sum().backward()
    assert seen == [True, 1, False] and owner.__dict__["__init__"] is before


def test_implicit_replication_is_on():
    assert not _compat.implicit_replication_is_on()
    with implicit_replication():
        assert _compat.implicit_replication_is_on()
    assert not _compat.implicit_replication_is_on()


def test_run_uncompiled():
    """Neither the function nor what it calls is compiled, also after a graph break. It may be
    traced."""
    seen = []

    def below(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    @_compat.run_uncompiled
    def inner(x):
        return below(x)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @_compat.run_uncompiled
        def backward(ctx, grad):
            return below(grad)

    def breaks(x):
        torch._dynamo.graph_break()
        Broken.apply(x).sum().backward()

    for function, expected in ((inner, [False]), (lambda x: inner(x), [True]), (breaks, [False])):
        torch._dynamo.reset()
        seen.clear()
        torch.compile(function, backend="eager")(torch.ones(2, requires_grad=True))
        assert seen == expected


def test_argument_names():
    names = _compat.argument_names(torch.ops.aten.scaled_dot_product_attention.default)
    assert names[:4] == ["query", "key", "value", "attn_mask"] and "enable_gqa" in names


def test_withdraw():
    """An op's own kernel is restored as soon as an override of it is withdrawn."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", lambda x: x + 1, "CPU", allow_override=True)
    x = -torch.ones(2)
    assert torch.relu(x).sum() == 0 and torch.relu(2 * x).sum() == -2
    _compat.withdraw(library)
    assert torch.relu(2 * x).sum() == 0


def test_withdrawn_kernels_live_on():
    """Another thread's call that waits for the GIL would run freed memory: errors, or a crash."""

    def kernel(x):
        return x + 1

    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", kernel, "CPU", allow_override=True)
    references = sys.getrefcount(kernel)
    _compat.withdraw(library)
    assert sys.getrefcount(kernel) == references
    _compat._withdrawn.clear()
    assert sys.getrefcount(kernel) == references - 1


def test_size_hint():
    """It adds no guard."""
    assert _compat.size_hint(3) == 3
    seen = []

    def function(x):
        size = x.shape[0]
        assert isinstance(size, torch.SymInt) and _compat.size_hint(size) == 6
        seen.append(len(size.node.shape_env.guards))
        int(size)
        seen.append(len(size.node.shape_env.guards))
        return x + 1

    make_fx(function, tracing_mode="symbolic")(torch.ones(6, 2))
    assert seen == [0, 1]


def test_put_known_sizes(mesh):
    """Strides become numbers too, unless some size is symbolic."""
    tensor = DTensor.from_local(torch.ones(6, 2), mesh, [Shard(0)])
    spec = _compat.dtensor_spec(tensor)
    whole = spec.tensor_meta

    def function(x):
        for shape, kind in (((6, 2), int), ((x.shape[0], 2), torch.SymInt)):
            spec.tensor_meta = whole._replace(shape=torch.Size(shape), stride=x.stride())
            _compat.put_known_sizes(tensor)
            stride = spec.tensor_meta.stride
            assert isinstance(stride[0], kind) and stride == (3, 1)
        return x + 1

    traced = torch.ones(6, 3)[:, :2]
    make_fx(function, tracing_mode="symbolic")(traced)


def test_varlen_ops(monkeypatch):
    assert _compat.varlen_ops()[0] == "_varlen_attn"
    for op in _compat.varlen_ops():
        assert torch.library.get_kernel(f"torch_attn::{op}", "CPU") is not None
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert _compat.varlen_ops() == [], "this torch has none"


def test_count_traced():
    """Also in the graphs of higher-order ops."""
    counts = []

    @torch.compiler.assume_constant_result
    def count():
        counts.append(_compat.count_traced([torch.sin]))
        return counts[-1]

    def call(x):
        x = torch.sin(x) + count()
        x = torch.utils.checkpoint.checkpoint(lambda x: torch.sin(x).cos(), x, use_reentrant=False)
        return x + count()

    torch.compile(call, backend="eager", fullgraph=True)(torch.ones(2, requires_grad=True))
    assert counts == [1, 2]


def test_forward_pre_hooks():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].register_forward_pre_hook(print)
    model.register_forward_pre_hook(test_forward_pre_hooks, with_kwargs=True)
    assert _compat.forward_pre_hooks(model) == [test_forward_pre_hooks, print]


def test_active_ddp_module(mesh):
    class Inner(nn.Linear):
        def forward(self, x):
            seen.append(_compat.active_ddp_module())
            return super().forward(x)

    seen = []
    ddp = DistributedDataParallel(Inner(2, 2))
    ddp(torch.zeros(1, 2))
    assert seen == [ddp] and _compat.active_ddp_module() is None


@pytest.mark.parametrize("ranks, apart", [((0, 2), True), ((0, 1, 2, 3), False)])
@pytest.mark.parametrize("fails", [False, True])
def test_new_group_of_these(ranks, apart, fails):
    """NCCL splits a communicator off the world's, with all ranks together. A group of some ranks
    would wait for the rest, which may be waiting for it (as with the stages of a pipeline)."""
    seen, device = [], object()
    world = mock.Mock(bound_device_id=device)

    def new_group(given, **options):
        seen.append((given, world.bound_device_id, options))
        if fails:
            raise RuntimeError("no")
        return "group"

    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "get_world_size", lambda: 4),
        mock.patch.object(dist.distributed_c10d, "_get_default_group", lambda: world),
    ):
        if fails:
            with pytest.raises(RuntimeError, match="no"):
                _compat.new_group_of_these(ranks, group_desc="x")
        else:
            assert _compat.new_group_of_these(ranks, group_desc="x") == "group"
    options = {"use_local_synchronization": True, "group_desc": "x"}
    assert seen == [(ranks, None if apart else device, options)]
    assert world.bound_device_id is device


def test_view_of():
    """A view given by size, strides and an offset from the start of the tensor."""
    whole = torch.arange(24)
    part = whole[4:].view(4, 5)
    view = _compat.view_of(part, (2, 3), (5, 1), 6)
    assert torch.equal(view, part[1:3, 1:4])
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    view.fill_(-1)
    assert whole[10] == -1 and (whole == -1).sum() == 6
