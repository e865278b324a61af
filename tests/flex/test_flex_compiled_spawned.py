"""``torch.compile`` of FlexAttention on DTensors, on real processes: forward and backward in whole
graphs."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import cp_dispatch
from cp_dispatch import BlockBalanced, ContextParallel, HeadTail
from cp_dispatch.flex import flight, install, plain
from cp_dispatch.flex import local as flex_local
from cp_dispatch.flex.cut import FULL, PARTIAL, lists
from tests.distributed.sharded import distribute
from tests.distributed.spawn import TORCH_2_13, Env, run_asked
from tests.flex.problems import (
    NAMES,
    FlexProblem,
    causal,
    check,
    exact,
    gradients_on_cpu,
    one_device,
)
from tests.flex.sharded import in_groups, run_sharded


class Graphs:
    """A backend that compiles as ``aot_eager`` does and counts the ops in the graphs that it
    gets."""

    def __init__(self):
        self.forward: list[dict] = []
        self.backward: list[dict] = []
        self._backend = aot_autograd(
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
            flex = [name for name in names if "flex" in name]
            counts.append({name: flex.count(name) for name in set(flex)})
            return make_boxed_func(graph.forward)

        return compiler


CUT, BRING, BACK, ORDER, LISTED = (
    f"cp_dispatch.flex_{name}.default" for name in ("cut", "bring", "bring_back", "order", "listed")
)


def blocks(length: int, ranks: int) -> BlockBalanced:
    """So many runs of rows that the mods read positions from a table."""
    layout = BlockBalanced([1 + i * i % 13 for i in range(length // 4)], ranks, block_size=4)
    assert all(len(layout.spans(rank)[0]) > 4 for rank in range(ranks))
    return layout


def alone(env: Env, problem: FlexProblem, layout=None, compile_what="flex") -> None:
    """As exact as one device. Keys are exchanged once each way, and a second call compiles
    nothing."""
    torch._dynamo.reset()
    graphs = Graphs()

    def doubled(query, *args, **kwargs):
        return flex_attention(query * 2.0, *args, **kwargs)

    function = flex_attention if compile_what == "flex" else doubled
    attend = torch.compile(function, fullgraph=True, backend=graphs)
    with gradients_on_cpu():
        single = one_device(problem)  # this also triggers torch's one-time warnings
    layout = layout and layout(problem.length, env.world_size)
    with gradients_on_cpu(), cp_dispatch.enabled(layout=layout):
        for again in (False, True):
            with torch._dynamo.config.patch(error_on_recompile=again):
                got = run_sharded(problem, env.mesh(), layout=layout, attend=attend)
    if compile_what == "flex":
        check(got, exact(problem), single)
    else:
        with gradients_on_cpu(), cp_dispatch.enabled():
            want = run_sharded(problem, env.mesh(), attend=doubled)
        for name, x in got.items():
            torch.testing.assert_close(x, want[name])
    (forward,), (backward,) = graphs.forward, graphs.backward
    assert forward == {CUT: 1, LISTED: 1, BRING: 1, "flex_attention": 1}, forward
    # What the forward made of the mask is kept for the backward; the keys are not.
    assert backward[BRING] == backward[BACK] == backward["flex_attention_backward"] == 1, backward
    assert not {CUT, ORDER, LISTED} & set(backward), backward


def compiled_ring(env: Env) -> None:
    """As exact as one device, with all hops in one graph, forward and backward."""
    torch._dynamo.reset()
    problem, graphs = FlexProblem("relative bias", 250, block=32), Graphs()
    attend = torch.compile(flex_attention, fullgraph=True, backend=graphs)
    with gradients_on_cpu():
        single = one_device(problem)
        for layout in (None, HeadTail(250, env.world_size)):
            with cp_dispatch.enabled(schedule="ring", layout=layout):
                got = run_sharded(problem, env.mesh(), layout=layout, attend=attend)
            check(got, exact(problem), single)
    hop, back = "cp_dispatch.flex_hop.default", "cp_dispatch.flex_hop_back.default"
    for forward, backward in zip(graphs.forward, graphs.backward, strict=True):
        assert forward[hop] == forward[CUT] == forward["flex_attention"] == env.world_size
        assert backward[hop] == backward[back] == env.world_size
        assert backward["flex_attention_backward"] == env.world_size


def compiled_groups(env: Env, problem: FlexProblem, layout=None) -> None:
    """As exact as one device, with all groups of heads in one graph. Each graph contains its own
    ops that start and finish the exchanges, and a second call compiles nothing."""
    torch._dynamo.reset()
    graphs, count = Graphs(), problem.key_heads
    attend = torch.compile(flex_attention, fullgraph=True, backend=graphs)
    layout = HeadTail(problem.length, env.world_size) if layout else None
    with gradients_on_cpu(), in_groups(), cp_dispatch.enabled(layout=layout):
        single = one_device(problem)
        for again in (False, True):
            with torch._dynamo.config.patch(error_on_recompile=again):
                got = run_sharded(problem, env.mesh(), layout=layout, attend=attend)
            check(got, exact(problem), single)
    assert not flight._flights, "tokens are gone, and what they stood for with them"
    (forward,), (backward,) = graphs.forward, graphs.backward
    start, arrive, give, collect = (
        f"cp_dispatch.flex_{name}.default" for name in ("start", "arrive", "give", "collect")
    )
    assert forward == {
        CUT: 1, LISTED: 1, start: 1, arrive: count, "flex_attention": count,
    }, forward  # fmt: skip
    assert backward == {
        start: 1, arrive: count, give: count, collect: 1, "flex_attention_backward": count,
    }, backward  # fmt: skip


def without_rows(env: Env, grouped: bool) -> None:
    """A rank that computes nothing, but has keys: its graph does not need the exchange, but the
    other rank needs it there. The same holds for the sum of a captured tensor's gradients. For
    another captured tensor no gradient is requested, and none is summed."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, n, 16, generator=generator) for n in (1, 64, 64)]
    bias, slope = torch.rand(2, 64, generator=generator)
    bias = bias.clone().requires_grad_()

    def score(score, b, h, q, k):
        return score * slope[k] + bias[k]

    groups = in_groups() if grouped else contextlib.nullcontext()
    with gradients_on_cpu(), groups, cp_dispatch.enabled(), pytest.MonkeyPatch.context() as patch:
        alone = [x.clone().requires_grad_() for x in whole]
        want = flex_attention(*alone, score)
        want = [want, *torch.autograd.grad(want, [*alone, bias], want.detach())]
        leaves = [distribute(x, env.mesh(), [Shard(2)]).requires_grad_() for x in whole]
        # These split graphs into forward and backward in different ways.
        for backend in (Graphs(), "aot_eager"):
            torch._dynamo.reset()
            out = torch.compile(flex_attention, fullgraph=True, backend=backend)(*leaves, score)
            got = [out, *torch.autograd.grad(out, [*leaves, bias], out.detach())]
            for mine, true in zip(got, want, strict=True):
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                torch.testing.assert_close(mine, true)
        torch._dynamo.reset()
        patch.setattr(flex_local, "Listed", None)
        with torch.no_grad():
            out = torch.compile(flex_attention, fullgraph=True)(*leaves)
            torch.testing.assert_close(out.full_tensor(), flex_attention(*whole))


def documents_of_other_lengths(env: Env) -> None:
    """One graph for all contents of a mask. What is sent depends on the contents."""
    torch._dynamo.reset()
    graphs = Graphs()
    attend = torch.compile(flex_attention, fullgraph=True, backend=graphs)
    length, mesh = 256, env.mesh()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, length, 16, generator=generator) for _ in range(3)]
    results = []
    for size in (128, 60, 200):
        ids = torch.arange(length) // size

        def mod(b, h, q, k, ids=ids):
            return (ids[q] == ids[k]) & (q >= k)

        mask = create_block_mask(mod, None, None, length, length, "cpu", BLOCK_SIZE=32)
        with gradients_on_cpu(), cp_dispatch.enabled():
            for f in (flex_attention, attend):
                leaves = [distribute(x, mesh, [Shard(2)]).requires_grad_() for x in inputs]
                with torch._dynamo.config.patch(error_on_recompile=f is attend and size != 128):
                    out = f(*leaves, block_mask=mask)
                results.append([out, *torch.autograd.grad(out, leaves, out.detach())])
        for a, b in zip(*results[-2:], strict=True):
            torch.testing.assert_close(a.full_tensor(), b.full_tensor())
    assert len(graphs.forward) == len(graphs.backward) == 1


class Attention(torch.nn.Module):
    """A block of a model: projections, flex attention with a learned bias, residual.

    The bias is a plain tensor. In graphs that are not compiled further, torch 2.13's dense backward
    has no gradient for a tensor that became a shard of a DTensor on the way. ``tests/gpu`` has a
    bias that is a parameter.
    """

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.bias = (torch.randn(heads, 2 * length) / 4).requires_grad_()
        self.length = length

    def forward(self, x, mask):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (y.transpose(1, 2) for y in qkv.unbind(2))
        bias = self.bias

        def score(score, b, h, q, k):
            return score + bias[h, q - k + self.length]

        y = flex_attention(query, key, value, score_mod=score, block_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


def model_in_one_graph(env: Env, backend_name: str | None) -> None:
    """Two layers with replicated DTensors as parameters, and a learned bias that the mod captures,
    against one process."""
    torch._dynamo.reset()
    length, width, heads = 96, 16, 2
    mask = create_block_mask(causal, None, None, length, length, "cpu", BLOCK_SIZE=32)
    # Uncompiled, torch's dynamo supports no views of a Linear's output for a batch of shards. Torch
    # 2.11 does not support such a Linear in a graph.
    batch = 2 if backend_name is not None and TORCH_2_13 else 1
    x = torch.randn(batch, length, width, generator=torch.Generator().manual_seed(0))

    def run(sharded: bool):
        torch.manual_seed(1)
        model = torch.nn.ModuleList([Attention(width, heads, length) for _ in range(2)])

        def forward(x):
            for layer in model:
                x = layer(x, mask)
            return x

        mine = x
        if sharded:
            distribute_module(model, env.mesh())
            mine = distribute(x, env.mesh(), [Shard(1)])
            if backend_name is not None:
                forward = torch.compile(forward, fullgraph=True, backend=backend_name)
        out = forward(mine)
        out.square().sum().backward()
        grads = [p.grad for p in model.parameters()] + [layer.bias.grad for layer in model]
        results = [out, *grads]
        return [y.full_tensor() if isinstance(y, DTensor) else y for y in results]

    with gradients_on_cpu():
        want = run(False)
        with cp_dispatch.enabled():
            got = run(True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def follows_the_setting(env: Env) -> None:
    """Another layout compiles anew; a return to the first layout finds the first graph again."""
    torch._dynamo.reset()
    graphs = Graphs()
    attend = torch.compile(flex_attention, fullgraph=True, backend=graphs)
    length, mesh = 96, env.mesh()
    layout = HeadTail(length, env.world_size)
    x = torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(0))
    mask = create_block_mask(causal, None, None, length, length, "cpu", BLOCK_SIZE=32)
    want = flex_attention(x, x, x, block_mask=mask)
    for setting in (None, layout, None, layout):
        index = torch.arange(length) if setting is None else setting.indices[0]
        mine = distribute(x[:, :, index], mesh, [Shard(2)])
        with cp_dispatch.enabled(layout=setting):
            got = attend(mine, mine, mine, block_mask=mask).full_tensor()
        torch.testing.assert_close(got[:, :, index.argsort()], want)
    assert len(graphs.forward) == 2


def inductor_groups(env: Env) -> None:
    with in_groups():
        inductor(env, FlexProblem("by head", 250, block=64))


def inductor(env: Env, problem=None) -> None:
    """The kernel that inductor makes for CPU (which has no backward). The second time it comes from
    torch's caches, which all ranks share and whose keys must distinguish the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        # Its kernels use the lists themselves, so its graphs contain nothing of this.
        patch.setattr(flex_local, "Listed", None)
        _inductor(env, problem or FlexProblem("documents", 250, block=64))
        if problem is None:
            layout = blocks(256, env.world_size)
            _inductor(env, FlexProblem("documents", 256, block=64), layout)


def _inductor(env: Env, problem, layout=None) -> None:
    mods = problem.mods("cpu")
    mask = problem.block_mask(mods, "cpu")
    order = torch.arange(problem.length) if layout is None else layout.indices[0]
    inputs = [distribute(x[:, :, order], env.mesh(), [Shard(2)]) for x in problem.tensors()[:3]]
    with gradients_on_cpu():
        single = one_device(problem)
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad(), cp_dispatch.enabled(layout=layout):
            attend = torch.compile(flex_attention, fullgraph=True)
            got = attend(*inputs, block_mask=mask).full_tensor()[:, :, order.argsort()]
        check({"output": got}, {"output": exact(problem)["output"]}, single)


def lists_hold(env: Env, backend: str, schedule: str = "auto") -> None:
    """Lists that say less than the mod, or more, also hold in graphs that are not for inductor."""
    torch._dynamo.reset()
    length, block = 100, 8
    kinds = torch.randint(0, 3, (1, 2, 13, 13), generator=torch.Generator().manual_seed(0))
    mask = BlockMask.from_kv_blocks(
        *lists(kinds == PARTIAL), *lists(kinds == FULL), BLOCK_SIZE=block, mask_mod=causal,
        seq_lengths=(length, length),
    )  # fmt: skip
    place = torch.arange(length)
    asked = kinds.repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :length, :length]
    seen = (asked == FULL) | ((asked == PARTIAL) & (place[:, None] >= place))
    *whole, grad = (x.double() for x in FlexProblem("none", length).tensors()[:4])
    leaves = [x.clone().requires_grad_() for x in whole]
    scores = (leaves[0] @ leaves[1].mT / 4).masked_fill(~seen, -1e300)
    want = torch.softmax(scores, -1) * seen.any(-1, keepdim=True) @ leaves[2]
    want = [want, *torch.autograd.grad(want, leaves, grad)]
    attend = torch.compile(flex_attention, fullgraph=True, backend=backend)
    for layout in (None, HeadTail(length, env.world_size)):
        order = torch.arange(length) if layout is None else layout.indices[0]
        leaves = [distribute(x[:, :, order], env.mesh(), [Shard(2)]) for x in whole]
        leaves = [x.requires_grad_() for x in leaves]
        with gradients_on_cpu(), cp_dispatch.enabled(schedule=schedule, layout=layout):
            out = attend(*leaves, block_mask=mask)
            tangent = distribute(grad[:, :, order], env.mesh(), [Shard(2)])
            got = [out, *torch.autograd.grad(out, leaves, tangent)]
        for mine, true in zip(got, want, strict=True):
            torch.testing.assert_close(mine.full_tensor()[:, :, order.argsort()], true)


class OfBlocks(Graphs):
    """Graphs of calls in a block, run as inductor's are, so that nothing sees their own calls of
    the op."""

    @staticmethod
    def _keep(counts):
        keep = Graphs._keep(counts)

        def compiler(graph, example):
            compiled = keep(graph, example)

            def run(args):
                with plain.inside():
                    return compiled(args)

            run._boxed_call = True
            return run

        return compiler


def plain_in_a_block(env: Env, kind: str, grouped: bool = False) -> None:
    """Plain shards in a block, trained, with forward and backward in one graph each."""
    problem = FlexProblem(kind, 128, block=32)
    mods = problem.mods("cpu")
    with gradients_on_cpu(), pytest.MonkeyPatch.context() as patch:
        single = one_device(problem)
        patch.setattr(plain, "compiles_for_inductor", lambda: True)
        for balancer, again in ((None, False), ("head-tail", False), ("head-tail", True)):
            if not again:
                torch._dynamo.reset()
                graphs = OfBlocks()
                attend = torch.compile(flex_attention, fullgraph=True, backend=graphs)
            mask, tensors = problem.block_mask(mods, "cpu"), problem.tensors()
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch._dynamo.config.patch(error_on_recompile=again))
                if grouped:
                    stack.enter_context(in_groups())
                stack.enter_context(
                    cp_dispatch.context_parallel(
                        env.mesh(), buffers=[*tensors, mask], buffer_seq_dims=[2] * 6,
                        balancer=balancer,
                    )
                )  # fmt: skip
                leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
                results = problem.attend(*leaves, mods, mask, attend)
                asked = leaves if mods.parameter is None else [*leaves, mods.parameter]
                grads = torch.autograd.grad(results, asked, tensors[3:])
                local = [x.detach().clone() for x in (*results, *grads[:3])]
            layout = HeadTail(128, env.world_size) if balancer else None
            whole = cp_dispatch.unshard(env.mesh(), local, 2, layout)
            for share in grads[3:]:
                dist.all_reduce(share)
            check(dict(zip(NAMES, [*whole, *grads[3:]], strict=False)), exact(problem), single)
            (forward,), (backward,) = graphs.forward, graphs.backward
            assert (BRING in forward) != grouped and (BRING in backward) != grouped


def plain_by_inductor(env: Env) -> None:
    """The second time it comes from torch's caches on disk, which distinguish ranks. Also what is
    refused."""
    problem = FlexProblem("by head", 128, block=32)
    mods = problem.mods("cpu")
    with gradients_on_cpu():
        single = one_device(problem)
    for _ in range(2):
        torch._dynamo.reset()
        attend = torch.compile(flex_attention, fullgraph=True)
        mask, tensors = problem.block_mask(mods, "cpu"), problem.tensors()[:3]
        block = cp_dispatch.context_parallel(
            env.mesh(), buffers=[*tensors, mask], buffer_seq_dims=[2] * 4
        )
        with torch.no_grad(), block:
            got = attend(*tensors, block_mask=mask).clone()
        whole = cp_dispatch.unshard(env.mesh(), [got], 2, HeadTail(128, env.world_size))[0]
        check({"output": whole}, {"output": exact(problem)["output"]}, single)
        assert not torch.equal(attend(*tensors, block_mask=mask)[:, :, :64], got), "outside"
    uneven = [x[:, :, :125] for x in problem.tensors()[:3]]
    mask = create_block_mask(causal, None, None, 125, 125, "cpu", BLOCK_SIZE=32)
    block = cp_dispatch.context_parallel(
        env.mesh(), buffers=[*uneven, mask], buffer_seq_dims=[2] * 4, balancer="head-tail"
    )
    with (
        torch.no_grad(),
        block,
        pytest.raises(Exception, match="a multiple of the number of ranks"),
    ):
        attend(*uneven, block_mask=mask)


class Inner(torch.nn.Module):
    """An attention module as in real models."""

    def forward(self, q, k, v, *, block_mask=None):
        return flex_attention(q, k, v, block_mask=block_mask)


class Learned(torch.nn.Module):
    """With a parameter that the mod captures."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor([0.3, 0.1], dtype=torch.float64))

    def forward(self, q, k, v, *, block_mask=None):
        def score(score, b, h, q_idx, kv_idx):
            return score + self.slope[h] * (q_idx - kv_idx)

        return flex_attention(q, k, v, score_mod=score, block_mask=block_mask)


class Silent(torch.nn.Module):
    def forward(self, q, k, v, *, block_mask=None):
        return q + k + v


class Fails(Inner):
    def forward(self, *args, **kwargs):
        super().forward(*args, **kwargs)
        raise ValueError


class Styled(torch.nn.Module):
    """A block of a model of plain tensors, around an attention module."""

    def __init__(self, inner=None):
        super().__init__()
        self.project = torch.nn.Linear(16, 16, dtype=torch.float64)
        self.inner = inner or Inner()

    def forward(self, x, mask):
        y = self.project(x)
        return x + self.inner(x * 2.0, v=y, k=y * 3.0, block_mask=mask)


def styled(mesh, balancers, inner=Inner, **how) -> list[Styled]:
    """A block for each order, each in its style, with equal parameters at each call."""
    torch.manual_seed(0)
    blocks, made = [Styled(inner()) for _ in balancers], {}
    for block, balancer in zip(blocks, balancers, strict=True):
        style = made.setdefault(
            balancer, ContextParallel(attention_type="flex", balancer=balancer, **how)
        )
        parallelize_module(block, mesh, {"inner": style})
    return blocks


def through(blocks, x, mask):
    for block in blocks:
        x = block(x, mask)
    return x


def style_by_inductor(env: Env) -> None:
    torch._dynamo.reset()
    mesh, layout = env.mesh(), HeadTail(128, env.world_size)
    problem = FlexProblem("documents", 128, block=32)
    mask = problem.block_mask(problem.mods("cpu"), "cpu")
    module = parallelize_module(
        Inner(), mesh, ContextParallel(attention_type="flex", balancer=layout)
    )
    own = cp_dispatch.shard(mesh, problem.tensors()[:3], 2, layout)
    with torch.no_grad():
        got = torch.compile(module, fullgraph=True)(*own, block_mask=mask)
    with gradients_on_cpu():
        single = one_device(problem)
    whole = cp_dispatch.unshard(mesh, got, 2, layout)
    check({"output": whole}, {"output": exact(problem)["output"]}, single)


def style(env: Env, length: int = 96) -> None:
    """Two blocks of one graph under checkpoints give what one device gives, forward and backward;
    each rank has its share of the parameters' gradients. Each block is in its own style, which is
    the same for both. A second call compiles nothing."""
    torch.manual_seed(0)
    mesh, whole = env.mesh(), torch.randn(1, 2, length, 16, dtype=torch.float64)
    mod = FlexProblem("documents", length).mods("cpu").mask
    mask = create_block_mask(mod, None, None, length, length, "cpu", BLOCK_SIZE=32)
    layout, checkpoint = HeadTail(length, env.world_size), torch.utils.checkpoint.checkpoint

    def train(blocks, x):
        for block in blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return x

    def results(function, x, blocks):
        x.requires_grad_()
        y = function(x)
        asked = [x, *(p for block in blocks for p in block.parameters())]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), asked)]

    with gradients_on_cpu():
        torch.manual_seed(0)
        alone = [Styled(Learned()) for _ in range(2)]
        # Uncompiled in a checkpoint, torch's dense backward has no gradient of captured tensors.
        want = results(functools.partial(through, alone, mask=mask), whole.clone(), alone)
        graphs, blocks = Graphs(), styled(mesh, [layout] * 2, Learned)
        compiled = torch.compile(functools.partial(train, blocks), fullgraph=True, backend=graphs)
        uncompiled = functools.partial(through, blocks, mask=mask)
        for function, again in ((compiled, False), (compiled, True), (uncompiled, False)):
            own = cp_dispatch.shard(mesh, whole, 2, layout)
            with torch._dynamo.config.patch(error_on_recompile=again):
                got = results(function, own, blocks)
            got = [*cp_dispatch.unshard(mesh, got[:2], 2, layout), *got[2:]]
            for share in got[2:]:
                dist.all_reduce(share)
            for one, true in zip(got, want, strict=True):
                torch.testing.assert_close(one, true)
    (forward,), (backward,) = graphs.forward, graphs.backward
    assert forward["flex_attention"] == backward["flex_attention_backward"] == 2
    assert not cp_dispatch.is_enabled() and not install._rules_of_torch

    graphs, blocks = Graphs(), styled(mesh, [None] * 2)
    for block in blocks:
        block.compile(fullgraph=True, backend=graphs)
    own = cp_dispatch.shard(mesh, whole, 2)
    with torch.no_grad():
        got = cp_dispatch.unshard(mesh, through(blocks, own, mask), 2)
        torch.manual_seed(0)
        torch.testing.assert_close(got, through([Styled(), Styled()], whole, mask))
    assert len(graphs.forward) == 1


def style_follows_its_surroundings(env: Env, length: int = 64) -> None:
    """Another order around the module compiles anew; a return to the first order finds the first
    graph again."""
    torch._dynamo.reset()
    mesh, graphs = env.mesh(), Graphs()
    (block,) = styled(mesh, ["auto"])
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    whole = torch.randn(1, 2, length, 16, dtype=torch.float64, generator=torch.Generator())
    layout = HeadTail(length, env.world_size)
    mask = create_block_mask(causal, None, None, length, length, "cpu", BLOCK_SIZE=32)
    torch.manual_seed(0)
    with torch.no_grad():
        want = Styled()(whole, mask)
        for order in (None, layout, None, layout):
            with cp_dispatch.enabled(layout=order):
                own = cp_dispatch.create_cp_block_mask(
                    causal, None, None, length, length, mesh, BLOCK_SIZE=32
                )
                got = compiled(cp_dispatch.shard(mesh, whole, 2, order), own)
            torch.testing.assert_close(cp_dispatch.unshard(mesh, got, 2, order), want)
    assert len(graphs.forward) == 2


def style_refuses(env: Env) -> None:
    """What a trace cannot know. Without ``fullgraph`` it runs uncompiled."""
    torch.manual_seed(0)
    mesh, layout = env.mesh(), HeadTail(64, env.world_size)
    x = torch.randn(1, 2, 32, 16, dtype=torch.float64)
    mask = create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=32)
    uneven = create_block_mask(causal, None, None, 63, 63, "cpu", BLOCK_SIZE=32)

    def compiled(blocks, full=True, backend="aot_eager", function=through):
        torch._dynamo.reset()
        function = functools.partial(function, blocks)
        return torch.compile(function, fullgraph=full, backend=backend)

    def and_more(blocks, x, mask):
        other = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
        return through(blocks, x, mask) + flex_attention(other, other, other).to_local()

    def caught(blocks, x, mask):
        try:
            through(blocks, x, mask)
        except ValueError:
            return and_more([], x, mask)

    with torch.no_grad():
        blocks, own = styled(mesh, [None]), x[:, :, : 32 - env.rank]
        with pytest.raises(Exception, match="cannot exchange their lengths"):
            compiled(blocks)(own, uneven)
        torch.testing.assert_close(
            compiled(blocks, full=False)(own, uneven), through(blocks, own, uneven)
        )
        both = styled(mesh, [None, layout])
        with pytest.raises(Exception, match="under different options: .*, layout=None, .*HeadTail"):
            compiled(both)(x, mask)
        with cp_dispatch.enabled(), pytest.raises(Exception, match="plain shards and .* DTensors"):
            compiled(blocks, function=and_more)(x, mask)
        with pytest.raises(Exception, match="flex_attention"):
            compiled(blocks, function=and_more)(x, mask)
        fails = parallelize_module(
            Fails(), mesh, ContextParallel(attention_type="flex", balancer=None)
        )
        with (
            cp_dispatch.enabled(layout=layout),
            pytest.raises(Exception, match="cannot tell where"),
        ):
            compiled([Styled(fails)], function=caught)(x, mask)
        with cp_dispatch.context_parallel(mesh):
            with pytest.raises(Exception, match="order of the shards is unknown"):
                compiled(styled(mesh, ["auto"]))(x, mask)
            with pytest.raises(Exception, match="the block would take the graph's own call"):
                compiled(blocks)(x, mask)
        with pytest.raises(cp_dispatch.ContextParallelError, match="runs the graph as is"):
            compiled(blocks, backend="eager")(x, mask)
        silent = parallelize_module(
            Silent(), mesh, ContextParallel(attention_type="flex", balancer=None)
        )
        with pytest.raises(Exception, match="did not call flex_attention"):
            compiled([Styled(silent)])(x, mask)
        with pytest.raises(cp_dispatch.ContextParallelError, match="cannot be exported"):
            torch.export.export(silent, (x, x, x), strict=False)
        with pytest.raises(Exception, match="cannot be exported"):
            torch.export.export(silent, (x, x, x), strict=True)
    (block,) = styled(mesh, ["auto"])
    with gradients_on_cpu(), cp_dispatch.enabled(layout=layout):
        leaf = x.clone().requires_grad_()
        out = torch.utils.checkpoint.checkpoint(block, leaf, mask, use_reentrant=False)
    with gradients_on_cpu(), pytest.raises(cp_dispatch.ContextParallelError, match="recomputed in"):
        out.sum().backward()
    gc.collect()  # reference cycles of failed traces
    cp_dispatch.disable()
    assert not install._rules_of_torch


CASES = {
    "causal": functools.partial(alone, problem=FlexProblem("causal", 256, block=32)),
    "bias": functools.partial(alone, problem=FlexProblem("relative bias", 127)),
    "layout": functools.partial(
        alone, problem=FlexProblem("window", 200, block=64), layout=HeadTail
    ),
    "blocks": functools.partial(
        alone, problem=FlexProblem("documents", 256, block=32), layout=blocks
    ),
    "in a function": functools.partial(
        alone, problem=FlexProblem("documents", 192), compile_what="function"
    ),
    "ring": compiled_ring,
    "groups": functools.partial(
        compiled_groups, problem=FlexProblem("relative bias", 250, block=32, batch=1)
    ),
    "groups, by head": functools.partial(
        compiled_groups, problem=FlexProblem("by head", 192, block=32), layout=True
    ),
    "without rows": functools.partial(without_rows, grouped=False),
    "without rows in groups": functools.partial(without_rows, grouped=True),
    "documents of other lengths": documents_of_other_lengths,
    "model": functools.partial(model_in_one_graph, backend_name="aot_eager"),
    "model, uncompiled": functools.partial(model_in_one_graph, backend_name=None),
    "follows the setting": follows_the_setting,
    "lists hold": functools.partial(lists_hold, backend="aot_eager"),
    "lists hold in a ring": functools.partial(lists_hold, backend="aot_eager", schedule="ring"),
    "lists hold, eager graphs": functools.partial(lists_hold, backend="eager"),
    "inductor": inductor,
    "inductor, groups": inductor_groups,
    "style": style,
    "style by inductor": style_by_inductor,
    "style follows its surroundings": style_follows_its_surroundings,
    "style refuses": style_refuses,
    "plain in a block": functools.partial(plain_in_a_block, kind="relative bias"),
    "plain in a block, groups": functools.partial(plain_in_a_block, kind="by head", grouped=True),
    "plain in a block, inductor": plain_by_inductor,
}


@pytest.fixture(scope="module", params=[2], ids=lambda size: f"{size}ranks")
def outcomes(request) -> dict[str, str]:
    return run_asked(request, request.param, "gloo", 240)


@pytest.mark.parametrize("case", CASES)
def test_compiled(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
