"""``varlen_attn`` on 2 and up to 4 GPUs: FlashAttention's kernel, against float64 and one device.

One set of processes per world size runs all cases (``tests/distributed/spawn.py``). ``-k`` selects
cases, and only those run.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.schedules.comm import Ring
from tests.distributed.sharded import distribute
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import is_staged, ranks
from tests.gpu.capture import capture
from tests.varlen.problems import (
    ROWS,
    VarlenProblem,
    check,
    exact,
    one_device,
    run_in_block,
    run_sharded,
)

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = (300, 1, 700, 0, 47, 800, 200)  # 2048 in total
BASE = VarlenProblem(LENGTHS, heads=8, key_heads=8, dim=64, dtype=BF16)


def matches(env: Env, problem: VarlenProblem, layout=None, mesh=None, **how) -> None:
    layout = None if layout is None else layout(problem.totals[0], env.world_size)
    with cp_dispatch.enabled(layout=layout):
        got = run_sharded(problem, mesh or env.mesh(), layout=layout, **how)
        again = run_sharded(problem, mesh or env.mesh(), layout=layout, **how)
    check(got, exact(problem, env.device), one_device(problem, env.device))
    for name in ("output", "logsumexp"):
        assert torch.equal(got[name], again[name]), f"{name} differs from call to call"


def on_two_dims(env: Env, problem: VarlenProblem, placements) -> None:
    matches(env, problem, mesh=env.mesh(2, 2, names=("a", "b")), placements=placements)


def compiled(env: Env, problem: VarlenProblem) -> None:
    """Documents of different lengths compile nothing."""
    torch._dynamo.reset()
    attend = torch.compile(problem.attend, fullgraph=True)
    others = (2048, 0, 0, 0, 0, 0, 0), (1024, 0, 1024, 0, 0, 0, 0)
    for step, lengths in enumerate((problem.lengths, *others)):
        here = dataclasses.replace(problem, lengths=lengths)
        with (
            cp_dispatch.enabled(),
            torch._dynamo.config.patch(error_on_recompile=step > 0),
        ):
            got = run_sharded(here, env.mesh(), attend=attend)
        check(got, exact(here, env.device), one_device(here, env.device))


def host_does_not_wait(env: Env, problem: VarlenProblem) -> None:
    """In a call with known documents."""
    if is_staged():
        print("collectives by way of the host, nothing to test")
        return
    mesh, starts = env.mesh(), problem.starts(env.device)
    *inputs, grad = (distribute(x, mesh, ROWS) for x in problem.tensors(env.device))
    leaves = [x.requires_grad_() for x in inputs]

    def step():
        out, _ = problem.attend(*leaves, starts)
        torch.autograd.grad(out, leaves, grad)

    with cp_dispatch.enabled():
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def captured(env: Env, problem: VarlenProblem, layout=None) -> None:
    """``torch.cuda.graph`` of two layers, forward and backward, replayed with new data while ranks
    arrive late. Against eager mode."""
    if not Ring.of(env.mesh().get_group(), torch.device(env.device)).may_push:
        print("collectives by way of the host cannot be captured")
        return
    starts = problem.starts(env.device)
    generator = torch.Generator(env.device).manual_seed(env.rank)
    local = problem.totals[0] // env.world_size

    def fresh():
        heads = problem.heads, problem.key_heads, problem.key_heads, problem.heads
        sizes = [(local, n, problem.dim) for n in heads]
        return [torch.randn(s, generator=generator, device=env.device, dtype=BF16) for s in sizes]

    *leaves, grad = (DTensor.from_local(x, env.mesh(), ROWS) for x in fresh())
    leaves = [x.detach().requires_grad_() for x in leaves]

    def step():
        out, _ = problem.attend(*leaves, starts)
        out, _ = problem.attend(out, *leaves[1:], starts)
        return [x.to_local() for x in (out, *torch.autograd.grad(out, leaves, grad))]

    with cp_dispatch.enabled(layout=layout and layout(problem.totals[0], env.world_size)):
        graph, results = capture(step)
        for turn in range(6):
            with torch.no_grad():
                for own, new in zip((*leaves, grad), fresh(), strict=True):
                    own.to_local().copy_(new)
            if turn % env.world_size == env.rank:
                torch.cuda._sleep(20_000_000)
            graph.replay()
            got = [x.clone() for x in results]
            for a, b in zip(got, step(), strict=True):  # dQ is added up in any order
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
            assert torch.equal(got[0], step()[0])


def in_a_block(env: Env, problem: VarlenProblem, balancer="auto", compile=False) -> None:
    """On plain shards, inside ``context_parallel``, after a call outside, which is torch's."""
    torch._dynamo.reset()
    attend = torch.compile(problem.attend, fullgraph=True) if compile else problem.attend
    want, single = exact(problem, env.device), one_device(problem, env.device)
    inputs, starts = problem.tensors(env.device)[:3], problem.starts(env.device)
    for _ in range(2):
        check({"output": attend(*inputs, starts)[0]}, want, single)
        check(run_in_block(problem, env.mesh(), balancer, attend), want, single)


def refuses(env: Env, problem: VarlenProblem, words: str) -> None:
    with cp_dispatch.enabled(), pytest.raises(cp_dispatch.ContextParallelError, match=words):
        run_sharded(problem, env.mesh())


CASES: dict = {}
_FOUR: dict = {}


def add(name: str, cases=CASES, function=matches, how=None, **fields) -> None:
    problem = dataclasses.replace(BASE, **fields)
    cases[name] = functools.partial(function, problem=problem, **(how or {}))


for _window in ((-1, 0), (-1, -1), (128, 0), (64, 32), (100, -1), (-1, 50)):
    for _dtype in (BF16, FP16):
        add(f"window {_window} {_dtype}", window=_window, dtype=_dtype)
    add(f"window {_window} gqa", window=_window, key_heads=2)
    add(f"window {_window} uneven", window=_window, lengths=(300, 1, 699, 0, 47, 800))
    add(f"window {_window} one document", window=_window, lengths=(2048,))
    add(f"window {_window} more keys", window=_window, lengths=(300, 700, 48),
        key_lengths=(400, 900, 236))  # fmt: skip
    add(f"window {_window} head-tail", window=_window, how={"layout": HeadTail})
    add(f"window {_window} head-tail of documents", window=_window, key_heads=2,
        how={"layout": lambda length, ranks: PerDocumentHeadTail([[1024, 1024]], ranks)},
        lengths=(1024, 1024))  # fmt: skip
for _lengths in (
    tuple(filter(None, LENGTHS)),
    (64,) * 32,
):  # a rank's keys are few runs, then many
    for _window in ((-1, 0), (128, 0)):
        _how = {
            "near blocks": lambda length, ranks, own=_lengths: BlockBalanced.from_documents(
                own, ranks, 64, near=True
            ),
            "documents": lambda length, ranks, own=_lengths: PerDocumentHeadTail([own], ranks),
        }
        for _name, _layout in _how.items():
            add(f"{_name} {len(_lengths)} {_window}", lengths=_lengths, window=_window, key_heads=2,
                how={"layout": _layout})  # fmt: skip
add("fewer keys", lengths=(300, 700, 48), key_lengths=(200, 700, 0))
add("fewer keys, window", lengths=(300, 700, 48), key_lengths=(200, 700, 0), window=(128, 0))
add("no keys for a rank", lengths=(300, 100, 50), key_lengths=(0, 0, 64), window=(-1, -1))
add("rows after the documents", lengths=(300, 700), rest=100)
add("documents of one row", lengths=(1,) * 64, key_heads=2)
add("fewer rows than ranks", lengths=(1,))
add("nothing moves", lengths=(1024, 1024))
add("mqa", key_heads=1)
add("scale", scale=0.3)
add("heads sharded", how={"placements": (Shard(1),)}, key_heads=4)
add("replicated", how={"placements": (Replicate(),)})
for _dim in (8, 96, 128, 192, 256):
    add(f"head dim {_dim}", dim=_dim, lengths=(300, 1, 723))
add("no gradients", how={"needs_grad": False})
add("compiled", function=compiled)
add("compiled gqa window", function=compiled, key_heads=2, window=(128, 0))
for _balancer in ("auto", None):
    for _window in ((-1, 0), (128, 0), (-1, -1)):
        _how = {"balancer": _balancer}
        add(
            f"block {_balancer} {_window}",
            function=in_a_block,
            how=_how,
            window=_window,
            key_heads=2,
        )
    add(f"block {_balancer} compiled", function=in_a_block, how=_how | {"compile": True})
add("block uneven", function=in_a_block, lengths=(300, 1, 699, 0, 47, 800))
add("captured", function=captured, key_heads=2)
add("captured, one document", function=captured, key_heads=2, lengths=(2048,))
add("captured, window", function=captured, window=(128, 0))
add("captured, head-tail", function=captured, how={"layout": HeadTail})
add("host does not wait", function=host_does_not_wait)
add("host does not wait, window", function=host_does_not_wait, window=(64, 32))
add("float32", function=refuses, how={"words": "float16 and bfloat16"}, dtype=torch.float32)
add("head dim 36", function=refuses, how={"words": "multiples of 8"}, dim=36)
for _placements in (
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(0)),
):
    add(f"on {_placements}", _FOUR, on_two_dims, {"placements": _placements}, key_heads=4)
CASES |= _FOUR


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "nccl", 120, lambda name: size == 4 or name not in _FOUR)


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    if case not in outcomes:
        pytest.skip("needs 4 GPUs")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
