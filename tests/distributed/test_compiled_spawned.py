"""``torch.compile`` on real processes: forward and backward in whole graphs that compile once and
equal eager mode.

``compiled.py`` compares single calls with one device. This file covers masks, layouts, schedules,
dynamic lengths, modules and training steps, with and without checkpoints.
"""

from __future__ import annotations

import functools
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import cp_dispatch
from cp_dispatch.graphs import order as graph_order
from cp_dispatch.plain_tensors import traced_style
from cp_dispatch.planning import decide
from cp_dispatch.planning.planner import of_two
from cp_dispatch.planning.settle import settle
from tests.distributed.compiled import _has_compiler
from tests.distributed.models import Model
from tests.distributed.reference import Mask, Problem, check, exact, one_device
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.spawn import Env, run_asked
from tests.ranks import own_code_compiled

ROWS = (Shard(2),)


class Graphs:
    """A backend that compiles as ``aot_eager`` does and counts the ring ops in the graphs that it
    gets."""

    def __init__(self, decompositions=None):
        self.forward: list[int] = []
        self.backward: list[int] = []
        self._backend = aot_autograd(
            decompositions=decompositions,
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def __call__(self, graph, example):
        return self._backend(graph, example)

    @staticmethod
    def _keep(counts):
        def compiler(graph, _):
            names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            rings = [name for name in names if name.startswith("cp_dispatch.ring_")]
            counts.append((len(rings), sum("backward" in name for name in rings)))
            return make_boxed_func(graph.forward)

        return compiler


def compile_once(function, backend):
    return torch.compile(function, fullgraph=True, backend=backend)


def attention_alone(env: Env, problem: Problem, placements=None, **options) -> None:
    """As exact as one device. One ring op each way. A second call compiles nothing."""
    torch._dynamo.reset()
    graphs = Graphs()
    attend = compile_once(problem.attend, graphs)
    layout = options.get("layout")
    tensors = problem.tensors()
    want = exact(problem, tensors)
    needs = problem.mask is not None and problem.mask.needs_grad
    single = one_device(problem, tensors, "math" if needs else "cpu_flash")
    if layout is not None:
        tensors = [x.index_select(2, layout.indices[0]) for x in tensors]
    with cp_dispatch.enabled(**options):
        for again in (False, True):
            with torch._dynamo.config.patch(error_on_recompile=again):
                got = run_sharded(
                    problem, tensors, env.mesh(), mask_placements=placements, attend=attend
                )
            if layout is not None:
                got = [x if x is None else x.index_select(2, layout.inverse[0]) for x in got]
            check(got, want, single)
    assert (graphs.forward, graphs.backward) == ([(1, 0)], [(1, 1)]), vars(graphs)


def dynamic_length(env: Env, marked: bool) -> None:
    """One graph for many lengths, from the first or the second call on."""
    torch._dynamo.reset()
    graphs = Graphs()
    mesh = env.mesh()

    def function(x):
        x = x * 2
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = compile_once(function, graphs)
    with cp_dispatch.enabled():
        for length in (64, 96, 128, 160):
            whole = torch.randn(2, 2, length, 8, generator=torch.Generator().manual_seed(length))
            results = []
            for f in (function, compiled):
                x = distribute(whole, mesh, ROWS).requires_grad_()
                if marked:
                    torch._dynamo.mark_dynamic(x, 2)
                y = f(x)
                results.append((y, *torch.autograd.grad(y, x, y.detach())))
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a.to_local(), b.to_local())
    assert len(graphs.forward) == (1 if marked else 2), vars(graphs)
    assert set(graphs.forward) == {(1, 0)} and set(graphs.backward) == {(1, 1)}, vars(graphs)


# In the second tuple, rank 0's shard is at first unchanged, and then rank 1's. In the last tuple,
# the third length is dynamic until the schedule looks at it.
ALIKE = (131, 132, 131), (128, 127, 126), (127, 128, 129), (64, 96, 131, 132, 131)


def lengths_whose_shards_are_alike(
    env: Env, schedule="auto", causal=True, dynamic=None, sequences=ALIKE
) -> None:
    """Some ranks' shards have the same size before and after, so only the DTensor's own size shows
    that the length has changed."""
    mesh = env.mesh()

    def function(x):
        return F.scaled_dot_product_attention(x * 2, x, x, is_causal=causal)

    for lengths in sequences:
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for length in lengths:
            whole = torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(length))
            results = []
            for f in (function, compiled):
                x = distribute(whole, mesh, ROWS).requires_grad_()
                with cp_dispatch.enabled(schedule=schedule):
                    y = f(x)
                    results.append((y, *torch.autograd.grad(y, x, y.detach())))
            for want, got in zip(*results, strict=True):
                assert got.shape == whole.shape
                torch.testing.assert_close(got.to_local(), want.to_local())


def every_size_dynamic(env: Env) -> None:
    """One op each way, and no second one on tensors of the whole size, whose strides torch 2.11
    would read. Also if a shard is as long as the head dim, because dynamo then treats the two as
    one size."""
    mesh = env.mesh()

    def function(x):
        return F.scaled_dot_product_attention(x * 2, x, x, is_causal=True)

    for schedule, layout in (
        ("gather", False), ("gather", True), ("mirrored_ring", False), ("ulysses", False),
    ):  # fmt: skip
        torch._dynamo.reset()
        graphs = Graphs()
        compiled = torch.compile(function, fullgraph=True, backend=graphs, dynamic=True)
        for length in (16 * env.world_size, 32 * env.world_size):
            whole = torch.randn(2, 2, length, 16, generator=torch.Generator().manual_seed(length))
            balancer = cp_dispatch.HeadTail(length, env.world_size) if layout else None
            results = []
            for f in (function, compiled):
                x = distribute(whole, mesh, ROWS).requires_grad_()
                with cp_dispatch.enabled(schedule=schedule, layout=balancer):
                    y = f(x)
                    results.append((y, *torch.autograd.grad(y, x, y.detach())))
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a.to_local(), b.to_local())
        assert set(graphs.forward) == {(1, 0)} and set(graphs.backward) == {(1, 1)}, vars(graphs)


def head_dims_as_long_as_lengths(env: Env) -> None:
    """Head dims are constants, so a length that dynamo takes for the same size is constant too. The
    strides of a slice are not, and torch found no hash for those."""
    torch._dynamo.reset()
    mesh, length = env.mesh(), 16 * env.world_size
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(3, 2, 2 * length, d, generator=generator) for d in (16, 16, length)]

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    tensors = [distribute(x[:, :, :length], mesh, ROWS).requires_grad_() for x in whole]
    results = []
    with cp_dispatch.enabled():
        for f in (attend, compiled):
            y = f(*tensors)
            results.append((y, *torch.autograd.grad(y, tensors, torch.ones_like(y))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.to_local(), b.to_local())


def rank_without_rows(env: Env) -> None:
    """Inductor's gradient of a norm over no rows is zeros that depend on no gradient. What leads to
    them is dead on that rank, and what is computed from them belongs to the forward."""

    def both_ways(x, scale):
        x = F.layer_norm(x, x.shape[-1:])
        return F.layer_norm(F.scaled_dot_product_attention(x * scale, x, x), x.shape[-1:])

    def into_nothing(x):
        x = F.layer_norm(x, x.shape[-1:])
        return F.scaled_dot_product_attention(x, x, x)

    scale = distribute(torch.full((8,), 2.0), env.mesh(), [Replicate()]).requires_grad_()
    for function, given in ((both_ways, [scale]), (into_nothing, [])):
        torch._dynamo.reset()
        graphs = Graphs(select_decomp_table())
        _as_eager(env, function, compile_once(function, graphs), given, (1, 2, 5, 8))
        assert (graphs.forward, graphs.backward) == ([(1, 0)], [(1, 1)]), vars(graphs)
    assert graph_order._warned


def rank_without_rows_inductor(env: Env) -> None:
    """Inductor omits a loop over nothing if its result is not read."""
    if not _has_compiler():
        print("no C++ compiler, nothing to test")
        return

    def function(x):
        return F.scaled_dot_product_attention(x * 2, x, x) * 2

    torch._dynamo.reset()
    x = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(0))
    x = distribute(x, env.mesh(), ROWS)
    with cp_dispatch.enabled(), torch.no_grad():
        want, (_, codes) = function(x), run_and_get_code(compile_once(function, "inductor"), x)
    assert want.to_local().size(2) == (env.rank == 0)
    assert codes[0].count("= torch.ops.cp_dispatch.ring_") == 1, codes


def order_of_uneven_shards(env: Env) -> None:
    """By the memory that shards of 2 rows and of 1 row take, inductor would begin with different
    attention calls on the two ranks."""
    if not _has_compiler():
        print("no C++ compiler, nothing to test")
        return

    def attend(x):
        x = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)

    def function(x, whole, wide, narrow, out):
        first = attend(x @ wide)
        second = attend((whole.sin() @ narrow).redistribute(placements=[Shard(1)]))
        return first @ out + second

    torch._dynamo.reset()
    compiled = compile_once(function, "inductor")
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 3, 32, generator=generator)  # the most that torch 2.11's linear supports
    weights = [torch.randn(*s, generator=generator) for s in ((32, 128), (32, 32), (128, 32))]
    inputs = [distribute(whole, env.mesh(), [Shard(1)])]
    inputs += [distribute(x, env.mesh(), [Replicate()]) for x in (whole, *weights)]
    with cp_dispatch.enabled(), torch.no_grad():
        want, (got, codes) = function(*inputs), run_and_get_code(compiled, *inputs)
    torch.testing.assert_close(got.to_local(), want.to_local())
    calls = [re.findall(r"= torch\.ops\.cp_dispatch\.ring\w+\.default\((.*)\)", x) for x in codes]
    assert len(calls[0]) == 2, codes
    wide = [", 128, 1), 0)" in call for call in calls[0]]  # recognized by its strides
    everyone = [None] * env.world_size
    torch.distributed.all_gather_object(everyone, wide)
    assert sorted(wide) == [False, True] and everyone.count(wide) == env.world_size, everyone


def _as_eager(env: Env, function, compiled, given, shape) -> None:
    """Compare the result and gradients of a compiled function of a sharded tensor with eager
    mode."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator)
    x = distribute(whole, env.mesh(), ROWS).requires_grad_()
    results = []
    for f in (function, compiled):
        with cp_dispatch.enabled():
            y = f(x, *given)
            grads = torch.autograd.grad(y, [x, *given], distribute(whole.cos(), env.mesh(), ROWS))
        results.append([y, *grads])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.full_tensor(), want.full_tensor())


def train(model, mesh, compiled=None, steps=3, lr=0.1) -> list[float]:
    """Losses of a few steps. The forward is compiled with its loss, or nothing is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    forward = model if compiled is None else compiled
    generator = torch.Generator().manual_seed(3)
    losses = []
    for step in range(steps):
        tokens, labels = torch.randint(17, (2, 1, 64), generator=generator)
        if mesh is not None:
            tokens, labels = (distribute(x, mesh, [Shard(1)]) for x in (tokens, labels))
        torch.manual_seed(step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            loss = forward(tokens, labels)
        if isinstance(loss, DTensor):
            loss = loss.redistribute(placements=[Replicate()] * loss.device_mesh.ndim)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def build(mesh=None, **options):
    torch.manual_seed(0)
    model = Model(**options)
    return distribute_module(model, mesh) if mesh is not None else model


def two_schedules(env: Env, **options) -> None:
    """The forward runs by one schedule and the backward by another, as "auto" selects on GPUs; also
    when recomputed."""

    def choose(plan, *_):
        return of_two(*(settle(plan, wish, "cuda") for wish in ("gather", "ulysses")))

    with (
        mock.patch.object(decide, "choose", choose),
        mock.patch.dict(decide._plans, clear=True),
    ):
        attention_alone(env, Problem(length=64, heads=4, key_heads=2, causal=True))
        whole_step(env, **options)


def whole_step(env: Env, backend="graphs", **options) -> None:
    """The losses of a compiled model with its loss are those of one process, and of eager mode."""
    if backend == "inductor" and not _has_compiler():
        print("no C++ compiler, nothing to test")
        return
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = Graphs()
    mesh = env.mesh()
    with cp_dispatch.enabled():
        eager = train(build(mesh, **options), mesh)
        model = build(mesh, **options)
        compiled = compile_once(model, graphs if backend == "graphs" else backend)
        got = train(model, mesh, compiled)
    torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)
    assert got[0] != got[-1]
    if not options.get("dropout"):
        torch.testing.assert_close(got, train(build(), None), rtol=1e-4, atol=1e-4)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    if backend == "graphs":
        rings = 4 if options.get("dropout") else 2
        recomputed = rings if options.get("checkpointed") and not options.get("context_fn") else 0
        assert (graphs.forward, graphs.backward) == ([(rings, 0)], [(rings + recomputed, rings)])


def whole_step_of_any_length(env: Env, lengths, **options) -> None:
    """Losses and gradients are those of eager mode, with one graph for the first length and one for
    all others."""
    torch._dynamo.reset()
    graphs, mesh = Graphs(), env.mesh()
    generator = torch.Generator().manual_seed(3)
    with cp_dispatch.enabled():
        model = build(mesh, **options)
        compiled = compile_once(model, graphs)
        for length in lengths:
            tokens = torch.randint(17, (2, 1, length), generator=generator)
            tokens, labels = (distribute(x, mesh, [Shard(1)]) for x in tokens)
            results = []
            for forward in (model, compiled):
                loss = forward(tokens, labels)
                loss.backward()
                results.append([loss.full_tensor(), *(x.grad for x in model.parameters())])
                model.zero_grad()
            torch.testing.assert_close(*results)
    assert len(graphs.forward) == len(graphs.backward) == 2, vars(graphs)


def saved():
    return create_selective_checkpoint_contexts(cp_dispatch.ops_to_save())


def by_policy():
    ops = set(cp_dispatch.ops_to_save())

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def plain_shards(env: Env) -> None:
    """A compiled call inside context_parallel, and the same function outside it."""
    torch._dynamo.reset()
    graphs = Graphs()
    whole = torch.randn(1, 2, 32, 8, generator=torch.Generator().manual_seed(0))

    def function(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = compile_once(function, graphs)
    own = whole.chunk(env.world_size, 2)[env.rank]
    for _ in range(2):
        torch.testing.assert_close(compiled(own), function(own))
        with cp_dispatch.context_parallel(env.mesh(), balancer=None):
            got = compiled(own)
        want = function(whole).chunk(env.world_size, 2)[env.rank]
        torch.testing.assert_close(got, want)
    assert graphs.forward == [(0, 0), (1, 0)]


def settings(env: Env) -> None:
    """One compiled function under several settings in turn: right each time, and compiled once for
    each."""
    torch._dynamo.reset()
    graphs = Graphs()
    attend = compile_once(CAUSAL.attend, graphs)
    tensors = CAUSAL.tensors()
    want, single = exact(CAUSAL, tensors), one_device(CAUSAL, tensors, "cpu_flash")
    layout = cp_dispatch.HeadTail(CAUSAL.length, env.world_size)
    permuted = [x.index_select(2, layout.indices[0]) for x in tensors]
    for again in (False, True):
        with torch._dynamo.config.patch(error_on_recompile=again):
            for schedule in ("natural_ring", "gather"):
                with cp_dispatch.enabled(schedule=schedule):
                    check(run_sharded(CAUSAL, tensors, env.mesh(), attend=attend), want, single)
                with cp_dispatch.enabled(schedule=schedule, layout=layout):
                    got = run_sharded(CAUSAL, permuted, env.mesh(), attend=attend)
                    check([x.index_select(2, layout.inverse[0]) for x in got], want, single)
    assert len(graphs.forward) == 4, vars(graphs)


def profiled(env: Env) -> None:
    """One profiler range for each hop, forward and backward, in eager and in compiled calls."""
    mesh, size = env.mesh(), env.world_size
    problem = Problem(length=16 * size, dim=8)
    inputs = [distribute(x, mesh, ROWS).requires_grad_() for x in problem.tensors()[:3]]
    compiled = compile_once(problem.attend, "aot_eager")
    parts = [f"[hop {hop + 1}/{size}]" for hop in range(size)]
    for schedule, name, want in (
        ("natural_ring", "ring", parts),
        ("gather", "gather", ["[home]", "[gathered]"]),
        ("ulysses", "heads", ["[stage 1/1]"]),
    ):
        with cp_dispatch.enabled(schedule=schedule):
            for attend in (problem.attend, compiled):
                attend(*inputs)
                with torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CPU]
                ) as profile:
                    output = attend(*inputs)
                    torch.autograd.grad(output, inputs, output.detach())
                got = {event.name for event in profile.events() if "cp_dispatch::" in event.name}
                ranges = {
                    f"cp_dispatch::{name}{way}{part}" for way in ("", "_backward") for part in want
                }
                assert ranges == {x for x in got if "[" in x}, got


def flops(env: Env) -> None:
    """Torch does not enter a compiled graph under the counter, so both count the same: the whole
    sequence. The graph itself counts what this rank computes."""
    mesh, size = env.mesh(), env.world_size
    problem = Problem(batch=2, heads=4, length=16 * size, key_length=32 * size, dim=16)
    inputs = [distribute(x, mesh, ROWS).requires_grad_() for x in problem.tensors()[:3]]
    product = 2 * 2 * 4 * (16 * size) * (32 * size) * 16
    in_graphs = []

    def count(graph, example):
        with FlopCounterMode(display=False) as counter:
            graph(*example)
        in_graphs.append(counter.get_total_flops() * size)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        problem.attend, backend=aot_autograd(fw_compiler=count, bw_compiler=count)
    )
    with cp_dispatch.enabled():
        output = compiled(*inputs)
        torch.autograd.grad(output, inputs, output.detach())
        for attend in (problem.attend, compiled):
            with FlopCounterMode(display=False) as forward:
                output = attend(*inputs)
            with FlopCounterMode(display=False) as backward:
                torch.autograd.grad(output, inputs, output.detach())
            assert forward.get_total_flops() == 2 * product, forward.get_flop_counts()
            assert backward.get_total_flops() == 5 * product, backward.get_flop_counts()
    assert in_graphs == [2 * product, 5 * product], (in_graphs, product)


def stances(env: Env) -> None:
    """``set_stance``: eager mode where the stance says so, and no old graph under a new setting."""
    torch._dynamo.reset()
    graphs = Graphs()
    attend = compile_once(CAUSAL.attend, graphs)
    tensors = CAUSAL.tensors()
    want, single = exact(CAUSAL, tensors), one_device(CAUSAL, tensors, "cpu_flash")

    def right(schedule: str) -> None:
        with cp_dispatch.enabled(schedule=schedule):
            check(run_sharded(CAUSAL, tensors, env.mesh(), attend=attend), want, single)

    with torch.compiler.set_stance("force_eager"):
        right("natural_ring")
    assert not graphs.forward
    right("natural_ring")
    for stance in ("eager_on_recompile", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            right("natural_ring")
            if stance == "eager_on_recompile":
                right("gather")
            else:
                with pytest.raises(RuntimeError, match="fail_on_recompile"):
                    right("gather")
    assert len(graphs.forward) == 1


class Causal(torch.nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def exported(env: Env) -> None:
    """An exported program contains the call, and does what eager mode does wherever it runs. A
    module in a style keeps its block, with the mesh and the order of its export."""
    mesh = env.mesh()
    whole = Problem(length=32, dim=8).tensors()[:3]
    want = Causal()(*whole)
    inputs = [distribute(x, mesh, ROWS) for x in whole]
    own = tuple(x.to_local() for x in inputs)

    def same(got) -> None:
        torch.testing.assert_close(got, want.chunk(env.world_size, 2)[env.rank])

    for strict in (False, True):
        with cp_dispatch.enabled():
            program = torch.export.export(Causal(), tuple(inputs), strict=strict)
            same(program.module()(*inputs).to_local())
        with cp_dispatch.context_parallel(mesh, balancer=None):
            program = torch.export.export(Causal(), own, strict=strict)
            same(program.module()(*own))
        torch.testing.assert_close(program.module()(*own), Causal()(*own))  # outside: local
    styled = parallelize_module(Causal(), mesh, cp_dispatch.ContextParallel())
    program = torch.export.export(styled, own, strict=True)
    same(program.module()(*own))
    with pytest.raises(cp_dispatch.ContextParallelError, match="strict=True"):
        torch.export.export(styled, own, strict=False)
    traced_style._contexts.clear()  # as in another process
    with pytest.raises(cp_dispatch.ContextParallelError, match="in another process"):
        program.module()(*own)


CAUSAL = Problem(causal=True, key_heads=2, length=128)


def sharded_padding_mask(env: Env, backend: str) -> None:
    """Inductor converts a boolean mask to integers if a collective moves it; it must not be taken
    for a bias."""
    if backend == "inductor" and not _has_compiler():
        print("no C++ compiler, nothing to test")
        return
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, 32, 16, generator=generator) for _ in range(2))
    mask = torch.ones(2, 1, 1, 32, dtype=torch.bool)
    mask[1, ..., 20:] = False
    attend = compile_once(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), backend
    )
    for dim in (16, 24):  # the CPU's flash kernel, and math
        value = torch.randn(2, 4, 32, dim, generator=generator)
        want = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        inputs = [distribute(x, env.mesh(), ROWS) for x in (query, key, value)]
        with cp_dispatch.enabled():
            got = attend(*inputs, distribute(mask, env.mesh(), (Shard(3),)))
        torch.testing.assert_close(got.full_tensor(), want)


def checkpoint_in_another_order(env: Env) -> None:
    """Compiled graphs pass on the memory that reveals it."""
    torch._dynamo.reset()
    problem = Problem(batch=1, length=64, dim=16, causal=True)
    leaves = [distribute(x, env.mesh(), ROWS).requires_grad_() for x in problem.tensors()[:3]]

    @functools.partial(compile_once, backend="aot_eager")
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query.sin(), key, value, is_causal=True)

    orders = None, cp_dispatch.HeadTail(64, env.world_size)
    for first in orders:
        for second in orders:
            with cp_dispatch.enabled(layout=first):
                out = checkpoint(attend, *leaves, use_reentrant=False)
            with cp_dispatch.enabled(layout=second):
                if first is second:
                    out.sum().backward()
                    continue
                with pytest.raises(cp_dispatch.ContextParallelError, match="in a different order"):
                    out.sum().backward()


def backward_inside(env: Env) -> None:
    """Dynamo compiles all Python that runs in a backward inside a compiled function, except
    ours."""
    mesh, generator = env.mesh(), torch.Generator().manual_seed(0)
    tokens = torch.randint(17, (1, 32), generator=generator)
    model = distribute_module(Model(), mesh)
    data = [distribute(x, mesh, [Shard(1)]) for x in (tokens, tokens.flip(1))]

    def step():
        model(*data).backward()

    def grads():
        found = [x.grad.full_tensor() for x in model.parameters()]
        model.zero_grad()
        return found

    torch._dynamo.reset()
    with cp_dispatch.enabled():
        step()
        want, compiled = grads(), torch.compile(step, backend="eager")
        for _ in range(2):
            compiled()
            torch.testing.assert_close(grads(), want)
    assert not own_code_compiled(), own_code_compiled()


CASES = {
    "backward inside": backward_inside,
    "causal": functools.partial(attention_alone, problem=CAUSAL),
    "bool mask": functools.partial(attention_alone, problem=Problem(length=64, mask=Mask())),
    "bool mask sharded": functools.partial(
        attention_alone, problem=Problem(length=64, mask=Mask("bhqk")), placements=ROWS
    ),
    "bias with gradient": functools.partial(
        attention_alone,
        problem=Problem(length=64, mask=Mask("hqk", dtype=None, needs_grad=True)),
        placements=(Replicate(),),
    ),
    **{
        f"schedule {name}": functools.partial(attention_alone, problem=CAUSAL, schedule=name)
        for name in ("natural_ring", "mirrored_ring", "gather", "ulysses", "hybrid")
    },
    "dynamic length, marked": functools.partial(dynamic_length, marked=True),
    "dynamic length, automatic": functools.partial(dynamic_length, marked=False),
    "every size dynamic": every_size_dynamic,
    "head dims as long as lengths": head_dims_as_long_as_lengths,
    "lengths whose shards are alike": lengths_whose_shards_are_alike,
    # Every length is compiled anew, whatever the schedule.
    "lengths whose shards are alike, static": functools.partial(
        lengths_whose_shards_are_alike, dynamic=False, sequences=ALIKE[:2]
    ),
    "lengths whose shards are alike, gather": functools.partial(
        lengths_whose_shards_are_alike, schedule="gather", causal=False
    ),
    "lengths whose shards are alike, one_call": functools.partial(
        lengths_whose_shards_are_alike, schedule="one_call"
    ),
    "rank without rows": rank_without_rows,
    "rank without rows, inductor": rank_without_rows_inductor,
    "order of uneven shards": order_of_uneven_shards,
    "two schedules": two_schedules,
    "two schedules, checkpoint": functools.partial(two_schedules, checkpointed=True),
    "whole step": whole_step,
    "whole step, inductor": functools.partial(whole_step, backend="inductor"),
    "whole step of any length": functools.partial(
        whole_step_of_any_length, lengths=(64, 96, 128, 160)
    ),
    "checkpoint": functools.partial(whole_step, checkpointed=True),
    "checkpoint, dropout": functools.partial(whole_step, checkpointed=True, dropout=0.3),
    "checkpoint in another order": checkpoint_in_another_order,
    **{
        f"sharded padding mask {backend}": functools.partial(sharded_padding_mask, backend=backend)
        for backend in ("aot_eager", "inductor")
    },
    "selective": functools.partial(whole_step, checkpointed=True, context_fn=saved),
    "selective by policy, dropout": functools.partial(
        whole_step, checkpointed=True, context_fn=by_policy, dropout=0.3
    ),
    "plain shards": plain_shards,
    "settings": settings,
    "stances": stances,
    "exported": exported,
    "profiled": profiled,
    "flops": flops,
}


def head_tail(env: Env, schedule: str) -> None:
    layout = cp_dispatch.HeadTail(128, env.world_size)
    attention_alone(env, CAUSAL, schedule=schedule, layout=layout)


CASES |= {
    f"head-tail, {schedule}": functools.partial(head_tail, schedule=schedule)
    for schedule in ("ring", "gather", "ulysses", "hybrid")
}
ON_4_ALONE = {"rank without rows"}
ON_4 = {"head-tail, gather", "head-tail, hybrid", "schedule hybrid", *ON_4_ALONE}


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size} ranks")
def outcomes(request) -> dict[str, str]:
    size = request.param
    chosen = set(CASES) - ON_4_ALONE if size == 2 else ON_4
    return run_asked(request, size, "gloo", 60, chosen.__contains__)


@pytest.mark.parametrize("case", CASES)
def test_compiled(outcomes, case):
    if case not in outcomes:
        pytest.skip("on the other number of ranks only")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
