"""Compiled FlexAttention on 2 and up to 4 GPUs, against float64.

Run it in one command, or in parts, because each case compiles its own kernels::

    python -m pytest tests/gpu/test_flex_cuda.py [-k "4GPUs and bfloat16"]
"""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.flex import group_ops
from cp_dispatch.flex.carriers import Collectives
from cp_dispatch.flex.pulled import PulledGradients, PulledKeys
from tests.distributed.sharded import distribute
from tests.distributed.spawn import TORCH_2_13, Env, run_asked
from tests.distributed.staged import ranks
from tests.flex.problems import (
    COMPILED_KINDS,
    NAMES,
    FlexProblem,
    causal,
    check,
    documents,
    exact,
    one_device,
)
from tests.flex.sharded import ROWS, in_groups, run_sharded
from tests.gpu.capture import capture

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})
BF16 = torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

torch._dynamo.config.recompile_limit = 10_000


def compiled():
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def judge(env: Env, problem: FlexProblem, mesh=None, layout=None, schedule="auto", **how) -> None:
    torch._dynamo.reset()
    with cp_dispatch.enabled(schedule=schedule, layout=layout):
        got = run_sharded(problem, mesh or env.mesh(), layout=layout, attend=compiled(), **how)
    if env.rank == 0:
        check(got, exact(problem, env.device), one_device(problem, env.device, compiled()))


def many_runs(length: int, ranks: int) -> BlockBalanced:
    """A layout whose rows are scattered, as if blocks of documents were assigned to ranks."""
    return BlockBalanced([1 + i * i % 13 for i in range(length // 32)], ranks, block_size=32)


def laid_out(env: Env, problem: FlexProblem, kind: str, **how) -> None:
    length, ranks = problem.length, env.world_size
    third = length // 3
    mods = problem.mods(env.device)
    layout = {
        "head-tail": lambda: HeadTail(length, ranks),
        "documents": lambda: PerDocumentHeadTail([third, length - third], ranks),
        "documents of each row": lambda: PerDocumentHeadTail(
            [[third + i, length - third - i] for i in range(problem.batch)], ranks
        ),
        "blocks": lambda: BlockBalanced(problem.block_mask(mods, env.device), ranks),
        "many runs": lambda: many_runs(length, ranks),
    }[kind]()
    judge(env, problem, layout=layout, **how)


def own_rows(env: Env, problem: FlexProblem, layout: bool) -> None:
    layout = HeadTail(problem.length, env.world_size) if layout else None

    def mask(mods):
        return cp_dispatch.create_cp_block_mask(
            mods.mask, *problem.mask_shape, problem.length, problem.length, env.mesh(),
            layout=layout, BLOCK_SIZE=problem.block,
        )  # fmt: skip

    judge(env, problem, layout=layout, block_mask=mask)


def two_dims(env: Env, problem: FlexProblem, placements) -> None:
    judge(env, problem, env.mesh(2, 2, names=("a", "b")), placements=placements)


def documents_of_other_lengths(env: Env) -> None:
    """No recompilation, forward or backward, and right results each time."""
    torch._dynamo.reset()
    length, mesh, attend = 2048, env.mesh(), compiled()
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, 4, length, 64, generator=generator).to(env.device, BF16) for _ in range(3)
    ]
    alone = compiled()
    for step, mean in enumerate((500, 60, 1100, 300)):
        ids = documents(length, mean, env.device)[0]

        def mod(b, h, q, k, ids=ids):
            return (ids[q] == ids[k]) & (q >= k)

        mask = create_block_mask(mod, None, None, length, length, env.device)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            with cp_dispatch.enabled():
                leaves = [distribute(x, mesh, ROWS).requires_grad_() for x in inputs]
                out = attend(*leaves, block_mask=mask)
                got = [out, *torch.autograd.grad(out, leaves, out.detach())]
        plain = [x.detach().requires_grad_() for x in inputs]
        out = alone(*plain, block_mask=mask)
        want = [out, *torch.autograd.grad(out, plain, out.detach())]
        for a, b in zip(got, want, strict=True):
            error = (a.full_tensor().double() - b.double()).norm() / b.double().norm()
            assert error < 4 * torch.finfo(BF16).eps, error


class Attention(torch.nn.Module):
    """Projections, flex attention with a learned bias, residual."""

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.heads, self.length = heads, length
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.bias = torch.nn.Parameter(torch.randn(heads, 2 * length) / 4)

    def forward(self, x, mask):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (y.transpose(1, 2) for y in qkv.unbind(2))
        bias = self.bias

        def score(score, b, h, q, k):
            return score + bias[h, q - k + self.length]

        y = flex_attention(query, key, value, score_mod=score, block_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


def model_in_one_graph(env: Env) -> None:
    """All parameters are replicated DTensors, and the mod captures one of them. Against one GPU."""
    torch._dynamo.reset()
    length, width, heads = 512, 128, 2
    mask = create_block_mask(causal, None, None, length, length, env.device)
    batch = 2 if TORCH_2_13 else 1  # torch 2.11 supports no Linear on a batch of shards in a graph
    x = torch.randn(batch, length, width, generator=torch.Generator().manual_seed(0)).to(env.device)

    def run(sharded: bool):
        torch.manual_seed(1)
        model = torch.nn.ModuleList([Attention(width, heads, length) for _ in range(2)])
        model.to(env.device)

        def forward(x):
            for layer in model:
                x = layer(x, mask)
            return x

        mine = x
        if sharded:
            distribute_module(model, env.mesh())
            mine = distribute(x, env.mesh(), [Shard(1)])
        out = torch.compile(forward, fullgraph=True, dynamic=False)(mine)
        out.square().sum().backward()
        results = [out, *(p.grad for p in model.parameters())]
        return [y.full_tensor() if isinstance(y, DTensor) else y for y in results]

    want = run(False)
    with cp_dispatch.enabled():
        got = run(True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def auxiliary(env: Env) -> None:
    torch._dynamo.reset()
    problem = FlexProblem("window", 1000, dim=64)
    inputs = problem.tensors(env.device)[:3]
    mask = problem.block_mask(problem.mods(env.device), env.device)
    request = AuxRequest(lse=True, max_scores=True)
    attend = compiled()
    with torch.no_grad():
        want, want_aux = attend(*inputs, block_mask=mask, return_aux=request)
        sharded = [distribute(x, env.mesh(), ROWS) for x in inputs]
        with cp_dispatch.enabled():
            got, got_aux = attend(*sharded, block_mask=mask, return_aux=request)
    pairs = (got, want), (got_aux.lse, want_aux.lse), (got_aux.max_scores, want_aux.max_scores)
    for a, b in pairs:
        assert a.placements == ROWS
        torch.testing.assert_close(a.full_tensor(), b)


def uncompiled(env: Env, recomputed: bool = False) -> None:
    problem, attend = FlexProblem("relative bias", 200), flex_attention
    if recomputed:
        attend = functools.partial(checkpoint, flex_attention, use_reentrant=False)
    with cp_dispatch.enabled():
        got = run_sharded(problem, env.mesh(), attend=attend)
    check(got, exact(problem, env.device), one_device(problem, env.device))


def kernel_options(env: Env) -> None:
    torch._dynamo.reset()
    problem = FlexProblem("causal", 512, dim=64)

    def attend(*args, **kwargs):
        return flex_attention(*args, kernel_options={"BLOCK_M": 64, "BLOCK_N": 32}, **kwargs)

    attend = torch.compile(attend, fullgraph=True, dynamic=False)
    with cp_dispatch.enabled():
        got = run_sharded(problem, env.mesh(), attend=attend)
    if env.rank == 0:
        check(got, exact(problem, env.device), one_device(problem, env.device, attend))


def memory(env: Env, layout: bool = False, grouped: bool = False) -> None:
    """A step holds memory for all keys, their gradients and what is being sent, and no more: no
    second copy for the backward, and none in float32. By groups of heads it holds the keys of two
    groups out of four, and the gradients of one."""
    torch._dynamo.reset()
    local, heads, dim = 8192, 8, 128
    length, mesh, attend = local * env.world_size, env.mesh(), compiled()
    mask = create_block_mask(causal, None, None, length, length, env.device)
    layout = HeadTail(length, env.world_size) if layout else None

    def step():
        leaves = [
            DTensor.from_local(
                torch.randn(1, heads, local, dim, device=env.device, dtype=BF16), mesh, ROWS
            ).requires_grad_()
            for _ in range(3)
        ]
        out = attend(*leaves, block_mask=mask)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out.backward(torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    with cp_dispatch.enabled(layout=layout):
        step()
        gc.collect()
        extra = step()
    shard = 2 * heads * local * dim * 2  # of keys and values, in bytes
    whole = shard * env.world_size
    # Keys and their gradients, three results and dO, one exchange each way, and sums in a wide
    # dtype.
    allowed = 2 * whole + 4 * shard + 2 * shard + 2 * shard
    if grouped:
        # And this rank's keys that the readers of one group hold.
        allowed = 3 * whole / 4 + 3 * shard + whole / 4
    assert extra < allowed, f"{extra / 2**20:.0f} MiB, allowed {allowed / 2**20:.0f} MiB"


def plain_in_a_block(env: Env, kind: str, balancer: str | None) -> None:
    """Plain shards inside context_parallel, compiled and trained; the second call compiles
    nothing."""
    torch._dynamo.reset()
    problem, attend = FlexProblem(kind, 1024, heads=4, key_heads=4, dim=64, dtype=BF16), compiled()
    mods = problem.mods(env.device)
    for again in (False, True):
        mask, tensors = problem.block_mask(mods, env.device), problem.tensors(env.device)
        block = cp_dispatch.context_parallel(
            env.mesh(), buffers=[*tensors, mask], buffer_seq_dims=[2] * 6, balancer=balancer
        )
        with block, torch._dynamo.config.patch(error_on_recompile=again):
            leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
            results = problem.attend(*leaves, mods, mask, attend)
            asked = leaves if mods.parameter is None else [*leaves, mods.parameter]
            grads = torch.autograd.grad(results, asked, tensors[3:])
            local = [x.detach().clone() for x in (*results, *grads[:3])]
        for share in grads[3:]:
            dist.all_reduce(share)
        layout = HeadTail(problem.length, env.world_size) if balancer else None
        whole = cp_dispatch.unshard(env.mesh(), local, 2, layout)
        got = dict(zip(NAMES, [*whole, *grads[3:]], strict=False))
        if env.rank == 0:
            check(got, exact(problem, env.device), one_device(problem, env.device, compiled()))


def by_groups(env: Env, inner, nccl: bool = False, **how) -> None:
    """A case with its keys exchanged by groups of heads; with ``nccl``, also without copy
    engines."""
    carriers = set()
    with in_groups(), pytest.MonkeyPatch.context() as patch:
        for name in ("keys_by", "gradients_by"):
            by = getattr(group_ops, name)

            def carrier(exchange, ring, *args, by=by):
                found = Collectives(exchange, ring) if nccl else by(exchange, ring, *args)
                carriers.add(type(found))
                return found

            patch.setattr(group_ops, name, carrier)
        inner(env, **how)
    # What ran, not what was traced: a graph may come from a cache on disk.
    wanted = {Collectives} if nccl else {PulledKeys, PulledGradients}
    assert carriers and carriers <= wanted, carriers


def groups_like_one(env: Env, nccl: bool) -> None:
    """Bitwise what one kernel gives, repeatedly, with ranks that arrive late. Nothing is read
    before it has arrived, or overwritten while it is still read."""
    local, ranks = 2048, env.world_size
    length, layout = local * ranks, HeadTail(local * ranks, ranks)
    mask = create_block_mask(causal, None, None, length, length, env.device)
    sizes = [(1, heads, local, 64) for heads in (8, 4, 4, 8)]
    generator = torch.Generator(env.device).manual_seed(env.rank)
    rounds = [
        [torch.randn(s, generator=generator, device=env.device, dtype=BF16) for s in sizes]
        for _ in range(12)
    ]

    def run(late: bool) -> list[list[torch.Tensor]]:
        torch._dynamo.reset()
        attend, results = compiled(), []
        for step, tensors in enumerate(rounds):
            *leaves, grad = (DTensor.from_local(x, env.mesh(), ROWS) for x in tensors)
            leaves = [x.detach().requires_grad_() for x in leaves]
            if late and step % ranks == env.rank:
                torch.cuda._sleep(20_000_000)
            out = attend(*leaves, block_mask=mask, enable_gqa=True)
            if late and (step + 1) % ranks == env.rank:
                torch.cuda._sleep(20_000_000)
            grads = torch.autograd.grad(out, leaves, grad)
            results.append([x.to_local() for x in (out.detach(), *grads)])
        return results

    with cp_dispatch.enabled(layout=layout):
        want = run(False)
        got = []
        by_groups(env, lambda _: got.extend(run(True)), nccl=nccl)
    for mine, theirs in zip(got, want, strict=True):
        for name, a, b in zip(("output", "dQ", "dK", "dV"), mine, theirs, strict=True):
            assert torch.equal(a, b), f"{name}: {(a - b).abs().max()}"


def captured(env: Env, layout=None) -> None:
    """``torch.cuda.graph`` of two layers, forward and backward, replayed with new data while ranks
    arrive late. Against eager mode."""
    torch._dynamo.reset()
    local, ranks, attend = 1024, env.world_size, compiled()
    length = local * ranks
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 700), None, None, length, length, env.device
    )
    generator = torch.Generator(env.device).manual_seed(env.rank)

    def fresh():
        sizes = [(1, heads, local, 64) for heads in (8, 4, 4, 8)]
        return [torch.randn(s, generator=generator, device=env.device, dtype=BF16) for s in sizes]

    *leaves, grad = (DTensor.from_local(x, env.mesh(), ROWS) for x in fresh())
    leaves = [x.detach().requires_grad_() for x in leaves]

    def step():
        out = attend(*leaves, block_mask=mask, enable_gqa=True)
        out = attend(out, *leaves[1:], block_mask=mask, enable_gqa=True)
        return [x.to_local() for x in (out, *torch.autograd.grad(out, leaves, grad))]

    with cp_dispatch.enabled(layout=layout and layout(length, ranks)):
        graph, results = capture(step)
        for turn in range(6):
            with torch.no_grad():
                for own, new in zip((*leaves, grad), fresh(), strict=True):
                    own.to_local().copy_(new)
            if turn % ranks == env.rank:
                torch.cuda._sleep(20_000_000)
            graph.replay()
            got = [x.clone() for x in results]
            for a, b in zip(got, step(), strict=True):
                assert torch.equal(a, b), (turn, (a - b).abs().max())


CASES = {}
_FOUR = {}
_LENGTHS = (127, 384, 2048, 5000)


def _case(name: str, function, into=CASES, **how) -> None:
    into[name] = functools.partial(function, **how)


for _i, _kind in enumerate(COMPILED_KINDS):
    for _j, _dtype in enumerate((torch.float32, BF16)):
        # Every kind in both dtypes, each with one of the lengths.
        _length = _LENGTHS[(_i + 2 * _j) % 4]
        _case(f"{_kind} {_length} {_dtype}", judge,
              problem=FlexProblem(_kind, _length, dim=64, dtype=_dtype))  # fmt: skip
for _kind in ("causal", "relative bias"):
    for _length in _LENGTHS:
        for _dtype in (torch.float32, BF16):
            _case(f"{_kind} {_length} {_dtype}", judge,
                  problem=FlexProblem(_kind, _length, dim=64, dtype=_dtype))  # fmt: skip
for _batch in (1, 2, 8):
    for _kind in ("head-tail", "documents of each row", "blocks"):
        if _kind == "documents of each row" and _batch == 1:
            continue
        _problem = FlexProblem("28 documents", 2048, _batch, 8, 8, dim=32)
        if _batch > 1 and _kind == "blocks":
            _problem = FlexProblem("causal", 2048, _batch, 8, 8, dim=32)
        if _batch < 8:
            # The problem's documents are those of eight rows.
            _problem = FlexProblem("documents", 2048, _batch, 8, 8, dim=32)
        _case(f"torch's scenario, {_problem.kind}, batch {_batch}, {_kind}", laid_out,
              problem=_problem, kind=_kind)  # fmt: skip
_case("torch's scenario, 28 documents, batch 8", judge,
      problem=FlexProblem("28 documents", 2048, 8, 8, 8, dim=32))  # fmt: skip
for _kind in ("head-tail", "documents"):
    for _length in (384, 5000):
        _case(f"layout {_kind} {_length}", laid_out, kind=_kind,
              problem=FlexProblem("relative bias", _length, dim=64, dtype=BF16))  # fmt: skip
for _kind in ("documents", "relative bias"):
    _case(f"many runs, {_kind}", laid_out, kind="many runs",
          problem=FlexProblem(_kind, 2048, heads=4, key_heads=2, dim=64, dtype=BF16))  # fmt: skip
for _block in (256, (256, 128)):
    _case(f"blocks of {_block}", judge,
          problem=FlexProblem("documents", 3000, dim=64, block=_block, dtype=BF16))  # fmt: skip
_case("grouped heads", judge, problem=FlexProblem("window", 2048, heads=8, key_heads=2, dim=128,
                                                  dtype=BF16))  # fmt: skip
_case("gather", judge, problem=FlexProblem("causal", 2048, dim=64, dtype=BF16), schedule="gather")
for _kind, _length in (("causal", 2048), ("relative bias", 1000), ("documents", 384)):
    for _dtype in (torch.float32, BF16):
        _case(f"ring {_kind} {_length} {_dtype}", judge, schedule="ring",
              problem=FlexProblem(_kind, _length, dim=64, dtype=_dtype))  # fmt: skip
_case("ring in a layout", laid_out, kind="head-tail", schedule="ring",
      problem=FlexProblem("window", 2048, dim=64, dtype=BF16))  # fmt: skip
_case("keys on every rank", judge, problem=FlexProblem("window", 2048, dim=64),
      key_placements=(Replicate(),))  # fmt: skip
_case("own rows", own_rows, problem=FlexProblem("documents", 2048, dim=64), layout=False)
_case("own rows in a layout", own_rows, problem=FlexProblem("causal", 2048, dim=64), layout=True)
_case("documents of other lengths", documents_of_other_lengths)
_case("captured", captured)
_case("captured in a layout", captured, layout=HeadTail)
_case("captured, many runs", captured, layout=many_runs)
_case("model", model_in_one_graph)
_case("auxiliary outputs", auxiliary)
_case("uncompiled", uncompiled)
_case("uncompiled in a checkpoint", uncompiled, recomputed=True)
_case("kernel options", kernel_options)
_case("memory", memory)
_case("groups, memory", by_groups, inner=memory, layout=True, grouped=True)
for _nccl in (False, True):
    _how = "NCCL" if _nccl else "copy engines"
    for _kind in ("causal", "by head", "relative bias", "documents of each row"):
        _problem = FlexProblem(_kind, 1000, heads=4, key_heads=4, dim=64, dtype=BF16)
        _case(f"groups by {_how}, {_kind}", by_groups, inner=judge, nccl=_nccl, problem=_problem)
    _case(f"groups by {_how} in a layout", by_groups, inner=laid_out, kind="head-tail", nccl=_nccl,
          problem=FlexProblem("causal", 2048, heads=8, key_heads=4, dim=64, dtype=BF16),
          )  # fmt: skip
    _case(f"groups by {_how}, like one", groups_like_one, nccl=_nccl)
for _balancer in (None, "head-tail"):
    _case(f"plain in a block, {_balancer}", plain_in_a_block, kind="by head", balancer=_balancer)
_case("plain in a block, bias", plain_in_a_block, kind="relative bias", balancer="head-tail")
_case("groups, plain in a block", by_groups, inner=plain_in_a_block, kind="by head",
      balancer="head-tail")  # fmt: skip
_case("groups, own rows", by_groups, inner=own_rows, layout=True,
      problem=FlexProblem("by head", 2048, heads=4, key_heads=4, dim=64))  # fmt: skip
_case("groups, model", by_groups, inner=model_in_one_graph)
for _kind, _placements in (
    ("documents of each row", (Shard(0), Shard(2))),
    ("by head", (Shard(2), Shard(1))),
    ("relative bias", (Shard(1), Shard(2))),
    ("window", (Shard(2), Shard(2))),
):
    _case(f"{_kind} on {_placements}", two_dims, _FOUR, placements=_placements,
          problem=FlexProblem(_kind, 1024, batch=4, dim=64))  # fmt: skip
CASES |= _FOUR


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "nccl", 240, lambda name: size == 4 or name not in _FOUR)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    if case not in outcomes:
        pytest.skip("needs 4 GPUs")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
