"""FlexAttention on DTensors, uncompiled, on real processes: every result against float64."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import cp_dispatch
from cp_dispatch import (
    BlockBalanced,
    ContextParallel,
    HeadTail,
    PerDocumentHeadTail,
    context_parallel,
)
from tests.distributed.sharded import distribute
from tests.distributed.spawn import Env, run_asked
from tests.flex.problems import (
    KINDS,
    NAMES,
    FlexProblem,
    causal,
    check,
    exact,
    gradients_on_cpu,
    make_mods,
    one_device,
)
from tests.flex.sharded import ROWS, in_groups, run_sharded

torch._dynamo.config.recompile_limit = 10_000  # each case compiles its own mods


def judge(env: Env, problem: FlexProblem, mesh=None, layout=None, schedule="auto", **how) -> None:
    with gradients_on_cpu():
        with cp_dispatch.enabled(schedule=schedule, layout=layout):
            got = run_sharded(problem, mesh or env.mesh(), layout=layout, **how)
        judge_results(env, problem, got)


def judge_results(env: Env, problem: FlexProblem, got: dict) -> None:
    """The whole results are the same on every rank: the first rank judges them for all."""
    for x in got.values():
        first = x.clone()
        dist.broadcast(first, 0)
        assert torch.equal(x, first)
    if env.rank == 0:
        want = exact(problem)
        check(got, {name: want[name] for name in got}, one_device(problem))


def laid_out(env: Env, problem: FlexProblem, kind: str, **how) -> None:
    length, ranks = problem.length, env.world_size
    third = length // 3
    mods = problem.mods("cpu")
    layout = {
        "head-tail": lambda: HeadTail(length, ranks),
        "documents": lambda: PerDocumentHeadTail([third, length - third], ranks),
        "documents of each row": lambda: PerDocumentHeadTail(
            [[third, length - third], [length - third, third]], ranks
        ),
        "blocks": lambda: BlockBalanced(problem.block_mask(mods, "cpu"), ranks),
        "near blocks": lambda: BlockBalanced(problem.block_mask(mods, "cpu"), ranks, near=True),
    }[kind]()
    judge(env, problem, layout=layout, **how)


def by_table(env: Env, **how) -> None:
    """A layout whose rows have too many runs for constants in a graph."""
    with mock.patch("cp_dispatch.flex.mods._MAX_PIECES", 0):
        laid_out(env, **how)


def two_dims(env: Env, problem: FlexProblem, placements, **how) -> None:
    judge(env, problem, env.mesh(2, 2, names=("a", "b")), placements=placements, **how)


def by_groups(env: Env, inner, counts=(2, 2), **how) -> None:
    """A case with its keys exchanged by groups of heads, forward and backward."""
    with in_groups() as found:
        inner(env, **how)
    assert found == list(zip(("forward", "backward"), counts, strict=True)), found


def placed_parameter(env: Env, placement, layout=None, length: int = 128) -> None:
    """A captured bias as a DTensor: its gradient has the same placements and is that of one
    device."""
    problem = FlexProblem("bias by row", length)
    whole = problem.mods("cpu").parameter.detach()
    if layout:
        layout = HeadTail(length, env.world_size)
    order = layout.indices[0] if layout else torch.arange(length)
    given = whole[order] if placement != Replicate() else whole
    bias = distribute(given, env.mesh(), [placement]).requires_grad_()

    def score(score, b, h, q, k):
        return score + bias[q] * bias[k]

    with gradients_on_cpu():
        *inputs, grad, grad_lse = problem.tensors()
        mask = create_block_mask(causal, None, None, length, length, "cpu")
        leaves = [distribute(x[:, :, order], env.mesh(), ROWS).requires_grad_() for x in inputs]
        with cp_dispatch.enabled(layout=layout):
            results = flex_attention(*leaves, score, mask, return_lse=True)
            tangents = [distribute(x[:, :, order], env.mesh(), ROWS) for x in (grad, grad_lse)]
            (got,) = torch.autograd.grad(results, [bias], tangents)
    assert got.placements == (placement,)
    got = got.full_tensor()
    if placement != Replicate():
        got = got[order.argsort()]
    with gradients_on_cpu():
        judge_results(env, problem, {"dParameter": got})


def backward_afterwards(env: Env) -> None:
    """The backward runs after the block, under different options, and leaves nothing behind."""
    problem = FlexProblem("causal", 128)
    backward = torch.ops.higher_order.flex_attention_backward
    with gradients_on_cpu():
        *inputs, grad, grad_lse = problem.tensors()
        layout = HeadTail(128, env.world_size)
        order = layout.indices[0]
        leaves = [distribute(x[:, :, order], env.mesh(), ROWS).requires_grad_() for x in inputs]
        mask = problem.block_mask(problem.mods("cpu"), "cpu")
        with cp_dispatch.enabled(layout=layout):
            results = flex_attention(*leaves, block_mask=mask, return_lse=True)
        assert DTensor in backward.python_key_table
        tangents = [distribute(x[:, :, order], env.mesh(), ROWS) for x in (grad, grad_lse)]
        grads = torch.autograd.grad(results, leaves, tangents)
    del results
    assert DTensor not in backward.python_key_table
    names, back = ("dQ", "dK", "dV"), layout.inverse[0]
    got = {n: x.full_tensor()[:, :, back] for n, x in zip(names, grads, strict=True)}
    with gradients_on_cpu():
        judge_results(env, problem, got)


def in_checkpoint(env: Env) -> None:
    """The checkpoint's hooks are active while torch traces the gradients. These were whatever was
    in memory."""

    def attend(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(
            flex_attention, *args, use_reentrant=False, **kwargs
        )

    with torch.autograd.graph.save_on_cpu():  # also around the backward
        judge(env, FlexProblem("relative bias", 64, batch=1), attend=attend)


def cross(env: Env, lengths: tuple[int, int]) -> None:
    """Queries and keys of different lengths, and gradients of only some inputs."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, n, 16, generator=generator) for n in (lengths[0], *[lengths[1]] * 2)
    )
    mask = create_block_mask(lambda b, h, q, k: q * 2 >= k, None, None, *lengths, "cpu")
    results = []
    with gradients_on_cpu(), cp_dispatch.enabled():
        for sharded in (False, True):
            inputs = [query, key, value]
            if sharded:
                inputs = [distribute(x, env.mesh(), ROWS) for x in inputs]
            inputs = [x.detach() for x in inputs]
            inputs[1].requires_grad_()
            out = flex_attention(*inputs, block_mask=mask)
            (grad,) = torch.autograd.grad(out.square().sum(), inputs[1])
            results.append([x.full_tensor() if sharded else x for x in (out, grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def aux(env: Env) -> None:
    """``return_aux``, inference mode, and the memory layout of models."""
    problem = FlexProblem("causal", 160)
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in problem.tensors()[:3]]
    mask = problem.block_mask(problem.mods("cpu"), "cpu")
    request = AuxRequest(lse=True)  # torch returns maximal scores only on CUDA
    want, want_aux = flex_attention(*inputs, block_mask=mask, return_aux=request)
    with cp_dispatch.enabled(), torch.inference_mode():
        sharded = [distribute(x, env.mesh(), ROWS) for x in inputs]
        got, got_aux = flex_attention(*sharded, block_mask=mask, return_aux=request)
        assert got.placements == got_aux.lse.placements == ROWS
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(got_aux.lse.full_tensor(), want_aux.lse)
        # Views of the output are chosen by global strides and made of the shard.
        joined = got.transpose(1, 2).reshape(2, 160, -1)
        torch.testing.assert_close(joined.full_tensor(), want.transpose(1, 2).reshape(2, 160, -1))


def local_rows(
    env: Env, kind: str, length: int, layout: bool, made: str, schedule: str = "auto"
) -> None:
    """A mask of this rank's rows, created for them or cut from the whole one."""
    problem = FlexProblem(kind, length, block=64)
    layout = HeadTail(length, env.world_size) if layout else None

    def mask(mods):
        if made == "shard":
            whole = problem.block_mask(mods, "cpu")
            own = cp_dispatch.shard(env.mesh(), {"mask": whole}, {"mask": 2}, layout)["mask"]
            assert cp_dispatch.unshard(env.mesh(), [own], 2, layout)[0] is whole
            return own
        return cp_dispatch.create_cp_block_mask(
            mods.mask, *problem.mask_shape, length, length, env.mesh(), layout=layout, BLOCK_SIZE=64
        )

    judge(env, problem, layout=layout, block_mask=mask, schedule=schedule)


class Inner(torch.nn.Module):
    """An attention module as in real models: q, k, v and any other arguments."""

    def forward(self, tag, q, k, v, block_mask=None, *, scale=None, notes=None):
        assert tag == "tag" and (notes is None or type(notes) is torch.Tensor)
        assert not isinstance(block_mask, DTensor)
        output, lse = flex_attention(q, k, v, block_mask=block_mask, scale=scale, return_lse=True)
        return {"output": output, "lse": [lse]}


def style(env: Env, how: str, length: int = 120, around=None) -> None:
    """``ContextParallel(attention_type="flex")`` on plain shards, for every style of arguments."""
    problem = FlexProblem("documents", length, block=32, scale=0.3)
    mesh, rank = env.mesh(), env.rank
    balancer = HeadTail(length, env.world_size) if around != "natural" else None
    given = "auto" if around == "block" else balancer
    module = parallelize_module(
        Inner(), mesh, ContextParallel(attention_type="flex", balancer=given)
    )
    mask = problem.block_mask(problem.mods("cpu"), "cpu")
    *tensors, grad_lse = problem.tensors()
    *inputs, grad = cp_dispatch.shard(mesh, tensors, 2, balancer)
    grad_lse = cp_dispatch.shard(mesh, grad_lse, 2, balancer)
    leaves = [x.requires_grad_() for x in inputs]
    notes = torch.ones(3)
    block = contextlib.nullcontext()
    if around == "block":
        block = context_parallel(mesh, buffers=[torch.empty(length)], buffer_seq_dims=[0])
    with gradients_on_cpu(), block:
        if how == "positional":
            results = module("tag", *leaves, mask, scale=0.3)
        elif how == "keyword":
            names = dict(zip("qkv", leaves, strict=True))
            results = module(notes=notes, block_mask=mask, scale=0.3, tag="tag", **names)
        else:
            results = module("tag", leaves[0], v=leaves[2], k=leaves[1], block_mask=mask, scale=0.3)
    results = [results["output"], *results["lse"]]
    assert all(type(x) is torch.Tensor for x in results)
    assert not cp_dispatch.is_enabled()
    grads = torch.autograd.grad(results, leaves, [grad, grad_lse])
    local = [*(x.detach() for x in results), *grads]
    whole = cp_dispatch.unshard(mesh, local, 2, balancer)
    with gradients_on_cpu():
        judge_results(env, problem, dict(zip(NAMES, whole, strict=False)))
    assert rank == mesh.get_local_rank()


def block(env: Env, length: int, balancer="auto", inference: bool = False) -> None:
    """Plain calls inside ``context_parallel``, with the mask among the buffers. Each rank has its
    share of a learned bias's gradient, as for all parameters."""
    problem = FlexProblem("relative bias", length, block=32)
    mesh, mods = env.mesh(), problem.mods("cpu")
    mask = problem.block_mask(mods, "cpu")
    fields = dict(vars(mask))
    tensors = problem.tensors()
    buffers = [*tensors, mask]
    with gradients_on_cpu(), contextlib.ExitStack() as stack:
        stack.enter_context(
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 6, balancer=balancer)
        )
        stack.enter_context(torch.inference_mode(inference))
        leaves = [x.detach().clone().requires_grad_(not inference) for x in tensors[:3]]
        results = problem.attend(*leaves, mods, mask)
        assert all(type(x) is torch.Tensor for x in results)
        names = list(NAMES)
        local = [x.detach().clone() for x in results]
        if not inference:
            asked = [*leaves, mods.parameter]
            *grads, of_bias = torch.autograd.grad(results, asked, tensors[3:])
            local += grads
        else:
            names = names[:2]
    assert vars(mask) == fields
    layout = HeadTail(length, env.world_size)
    if balancer is None or (balancer == "auto" and length % (2 * env.world_size)):
        layout = None
    got = dict(zip(names, cp_dispatch.unshard(mesh, local, 2, layout), strict=False))
    if not inference:
        dist.all_reduce(of_bias)
        got["dParameter"] = of_bias
    with gradients_on_cpu():
        judge_results(env, problem, got)


def outside(env: Env) -> None:
    """A mesh of some ranks; the others take no part."""
    mesh = DeviceMesh("cpu", list(range(env.world_size - 1)))
    problem = FlexProblem("causal", 64, block=16)
    *inputs, grad, grad_lse = problem.tensors()
    mask = problem.block_mask(problem.mods("cpu"), "cpu")
    leaves = [distribute(x, mesh, ROWS).requires_grad_() for x in inputs]
    with gradients_on_cpu(), cp_dispatch.enabled():
        results = flex_attention(*leaves, block_mask=mask, return_lse=True)
        tangents = [distribute(x, mesh, ROWS) for x in (grad, grad_lse)]
        grads = torch.autograd.grad(results, leaves, tangents)
    if mesh.get_coordinate() is None:
        assert all(x.to_local().numel() == 0 for x in (*results, *grads))
        return
    whole = [x.full_tensor().detach() for x in (*results, *grads)]
    if env.rank == 0:
        with gradients_on_cpu():
            single = one_device(problem)
        check(dict(zip(NAMES, whole, strict=False)), exact(problem), single)


def debug_mode(env: Env) -> None:
    """Ranks with different masks raise instead of waiting for each other."""
    problem = FlexProblem("causal", 96, block=32)
    inputs = [distribute(x, env.mesh(), ROWS) for x in problem.tensors()[:3]]

    def call(mod):
        mask = create_block_mask(mod, None, None, 96, 96, "cpu", BLOCK_SIZE=32)
        return flex_attention(*inputs, block_mask=mask)

    with pytest.MonkeyPatch.context() as patch, cp_dispatch.enabled():
        patch.setenv("CP_DISPATCH_DEBUG", "1")
        call(causal)
        edge = 40 * env.rank
        with pytest.raises(cp_dispatch.ContextParallelError, match="blocks of the mask"):
            call(lambda b, h, q, k: q >= k + edge)
        # In a block, one rank's mask is that of its shard alone.
        own = [x.to_local() for x in inputs]
        size = 96 if env.rank else 48
        mask = create_block_mask(causal, None, None, size, size, "cpu", BLOCK_SIZE=16)
        buffers = [mask] if env.rank else []
        words = "rank 0 refused this flex_attention call" if env.rank else "3 columns of blocks"
        with context_parallel(
            env.mesh(), buffers=buffers, buffer_seq_dims=[0] * len(buffers), balancer=None
        ):
            with pytest.raises(cp_dispatch.ContextParallelError, match=words):
                flex_attention(*own, block_mask=mask)


def block_refuses(env: Env) -> None:
    problem = FlexProblem("causal", 64, block=16)
    mesh, own = env.mesh(), [x[:, :, :32] for x in problem.tensors()[:3]]
    local = create_block_mask(causal, None, None, 32, 32, "cpu", BLOCK_SIZE=16)
    with context_parallel(mesh, balancer=None):
        with pytest.raises(cp_dispatch.ContextParallelError, match="2 columns of blocks"):
            flex_attention(*own, block_mask=local)
        compiled = torch.compile(flex_attention, backend="aot_eager")
        with pytest.raises(Exception, match="inductor does not compile"):
            compiled(*own)
    with context_parallel(mesh):
        with pytest.raises(cp_dispatch.ContextParallelError, match="order of the shards is"):
            flex_attention(*own)
    torch.testing.assert_close(
        flex_attention(*own, block_mask=local), compiled(*own, block_mask=local)
    )


def style_of_dtensors(env: Env) -> None:
    """DTensors in, DTensors out."""
    problem = FlexProblem("causal", 96)
    module = parallelize_module(Inner(), env.mesh(), ContextParallel(attention_type="flex"))
    mask = problem.block_mask(problem.mods("cpu"), "cpu")
    inputs = [distribute(x, env.mesh(), ROWS) for x in problem.tensors()[:3]]
    results = module("tag", *inputs, mask)
    got = {"output": results["output"].full_tensor(), "logsumexp": results["lse"][0].full_tensor()}
    with gradients_on_cpu():
        judge_results(env, problem, got)
    with pytest.raises(cp_dispatch.ContextParallelError, match="got 2 tensors"):
        module("tag", *inputs[:2])


CASES = {}
_ALL = (2, 3, 4)
_WORLDS: dict[str, tuple[int, ...]] = {}


def _case(name: str, function, worlds=_ALL, **how) -> None:
    CASES[name] = functools.partial(function, **how)
    _WORLDS[name] = worlds


for _kind in KINDS:
    _case(f"{_kind}", judge, (3,), problem=FlexProblem(_kind, 200, block=32))
for _kind, _length in (("causal", 127), ("documents", 500), ("relative bias", 61)):
    _case(f"{_kind} {_length}", judge, (2,), problem=FlexProblem(_kind, _length))
_case("documents 500 on 4", judge, (4,), problem=FlexProblem("documents", 500))
for _block in ((128, 32),):
    _case(f"blocks of {_block}", judge, (3,), problem=FlexProblem("documents", 300, block=_block))
for _kind in ("head-tail", "documents", "documents of each row"):
    _problem = FlexProblem("documents of each row", 250, block=32)
    _case(f"layout {_kind}", laid_out, (3,), problem=_problem, kind=_kind)
    _problem = FlexProblem("relative bias", 128, block=64)
    _case(f"layout {_kind}, bias", laid_out, (2,), problem=_problem, kind=_kind)
_case("layout blocks", laid_out, (2,), problem=FlexProblem("prefix", 512), kind="blocks")
_case("layout near blocks", laid_out, (2,), kind="near blocks",
      problem=FlexProblem("documents", 512, block=32))  # fmt: skip
_case("layout blocks by a table", by_table, (2,), kind="blocks",
      problem=FlexProblem("relative bias", 256, block=32))  # fmt: skip
_case("gather even", judge, (4,), problem=FlexProblem("causal", 256), schedule="gather")
_case("gather in a layout", laid_out, (3,), problem=FlexProblem("causal", 250), kind="head-tail",
      schedule="gather")  # fmt: skip
for _kind, _length in (
    ("causal", 192), ("window", 250), ("documents of each row", 200), ("relative bias", 127),
    ("blind rows", 256),
):  # fmt: skip
    _problem = FlexProblem(_kind, _length, block=32)
    _case(f"ring {_kind} {_length}", judge, (3,), problem=_problem, schedule="ring")
_case("ring, own rows", local_rows, (3,), kind="window", length=250, layout=False,
      made="create_cp_block_mask", schedule="ring")  # fmt: skip
_case("ring in a layout", laid_out, (2,), problem=FlexProblem("window", 250, block=32),
      kind="head-tail", schedule="ring")  # fmt: skip
_case("ring, bias in a layout", laid_out, (2,), problem=FlexProblem("relative bias", 256, block=64),
      kind="head-tail", schedule="ring")  # fmt: skip
_case("ring of bfloat16", judge, (2,), schedule="ring",
      problem=FlexProblem("soft cap", 256, dtype=torch.bfloat16, heads=4))  # fmt: skip
_case("ring on two mesh dims", two_dims, (4,), placements=(Shard(1), Shard(2)), schedule="ring",
      problem=FlexProblem("by head", 96, block=32))  # fmt: skip
for _kind, _world in (
    ("none", 2), ("causal", 4), ("window", 3), ("documents of each row", 2), ("by head", 3),
    ("blind rows", 2), ("relative bias", 3), ("bias by row", 2), ("alibi", 2),
):  # fmt: skip
    _case(f"groups, {_kind}", by_groups, (_world,), inner=judge,
          problem=FlexProblem(_kind, 200, block=32))  # fmt: skip
_case("groups, gather", by_groups, (3,), inner=judge, schedule="gather",
      problem=FlexProblem("by head", 127, heads=8, key_heads=8), counts=(4, 4))  # fmt: skip
_case("groups, grouped heads", by_groups, (4,), inner=judge, counts=(4, 4),
      problem=FlexProblem("alibi", 256, heads=8, key_heads=4, value_dim=24, scale=0.3))  # fmt: skip
for _kind in ("head-tail", "documents of each row", "blocks"):
    _case(f"groups in a layout, {_kind}", by_groups, (2,), inner=laid_out, kind=_kind,
          problem=FlexProblem("relative bias", 256, block=32))  # fmt: skip
_case("groups in a layout, bfloat16", by_groups, (4,), inner=laid_out, kind="head-tail",
      problem=FlexProblem("causal", 512, dtype=torch.bfloat16, heads=4), counts=(2, 2),
      )  # fmt: skip
_case("groups, shorter than the ranks", by_groups, (4,), inner=judge,
      problem=FlexProblem("relative bias", 5))  # fmt: skip
_case("groups, own rows", by_groups, (3,), inner=local_rows, kind="by head", length=250,
      layout=False, made="create_cp_block_mask")  # fmt: skip
_case("groups on two mesh dims", by_groups, (4,), inner=two_dims,
      placements=(Shard(1), Shard(2)),
      problem=FlexProblem("by head", 96, block=32, heads=4, key_heads=4))  # fmt: skip
_case("groups, captured in the layout", by_groups, (3,), inner=placed_parameter,
      placement=Shard(0), layout=True)  # fmt: skip
_case("shorter than the ranks", judge, (4,), problem=FlexProblem("causal", 5))
_case("grouped heads", judge, (2,), problem=FlexProblem("window", 256, heads=4, key_heads=2,
                                                        value_dim=24, scale=0.3))  # fmt: skip
for _dtype in (torch.float64, torch.bfloat16):
    _problem = FlexProblem("soft cap", 256, dtype=_dtype)
    _case(f"{_dtype}", judge, (2,), problem=_problem)
_case("keys on every rank", judge, (3,), problem=FlexProblem("window", 250),
      key_placements=(Replicate(),))  # fmt: skip
for _kind, _placements in (
    ("documents of each row", (Shard(0), Shard(2))),
    ("by head", (Shard(2), Shard(1))),
    ("relative bias", (Shard(1), Shard(2))),
    ("relative bias", (Replicate(), Shard(2))),
    ("window", (Shard(2), Shard(2))),
    ("by head", (Shard(0), Shard(1))),
):
    _problem = FlexProblem(_kind, 96, block=32)
    _case(f"{_kind} on {_placements}", two_dims, (4,), problem=_problem, placements=_placements)
for _placement in (Replicate(), Shard(0)):
    _case(f"captured {_placement}", placed_parameter, (3,), placement=_placement)
_case("captured in the layout", placed_parameter, (3,), placement=Shard(0), layout=True)
# Ranks without rows contribute their part to what the others gather.
_case("captured, shorter than the ranks", placed_parameter, (4,), placement=Shard(0), length=5)
_case("backward afterwards", backward_afterwards, (2,))
_case("in a checkpoint", in_checkpoint, (2,))
_case("other lengths", cross, (3,), lengths=(96, 250))
_case("auxiliary outputs", aux, (2,))
for _how in ("positional", "keyword", "mixed"):
    _case(f"style, {_how}", style, (2,), how=_how)
_case("block", block, (3,), length=120)
_case("block, uneven", block, (3,), length=125, balancer="head-tail")
_case("block, natural order", block, (2,), length=96, balancer=None)
_case("block, inference", block, (2,), length=96, inference=True)
_case("outside of the mesh", outside, (3,))
_case("debug mode", debug_mode, (2,))
_case("block refuses", block_refuses, (2,))
_case("style in a block", style, (3,), how="mixed", around="block")
_case("style, uneven", style, (3,), how="positional", length=125)
_case("style, natural order", style, (3,), how="keyword", around="natural")
_case("style of DTensors", style_of_dtensors, (2,))
for _made, _layout in (("shard", True), ("create_cp_block_mask", False)):
    _case(f"own rows by {_made}", local_rows, (3,), kind="by head", length=250, layout=_layout,
          made=_made)  # fmt: skip
    _case(f"own rows by {_made}, one block", local_rows, (2,), kind="documents of each row",
          length=60, layout=not _layout, made=_made)  # fmt: skip


@pytest.fixture(scope="module", params=_ALL, ids=lambda size: f"{size}ranks")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "gloo", 60, lambda name: size in _WORLDS[name])


@pytest.mark.parametrize("case", CASES)
def test_flex(outcomes, case):
    if case not in outcomes:
        pytest.skip("runs on other numbers of ranks")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"


def test_mods_broadcast_as_the_reference_calls_them():
    """Calls with single indices, as torch calls a mod, give the same as one call with a whole
    grid."""
    mods = make_mods("relative bias", 16, 2, "cpu")
    b, h, q, k = (torch.tensor(i) for i in (0, 1, 5, 3))
    one = mods.score(torch.tensor(0.5), b, h, q, k)
    grid = mods.score(torch.full((16, 16), 0.5), b, h, torch.arange(16)[:, None], torch.arange(16))
    assert one == grid[5, 3]
