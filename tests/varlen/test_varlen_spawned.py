"""``varlen_attn`` on real processes, eager and compiled. Documents are data to a graph."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import Replicate
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from tests.distributed.compiled import _has_compiler
from tests.distributed.sharded import distribute
from tests.distributed.spawn import Env, run_asked
from tests.varlen.problems import (
    ROWS,
    VarlenProblem,
    check,
    exact,
    one_device,
    run_in_block,
    run_sharded,
)

BASE = VarlenProblem((5, 20, 1, 9, 13), key_heads=2)
LENGTHS = ((48, 0, 0, 0, 0), (5, 20, 1, 9, 13), (24, 0, 24, 0, 0))


def eager(env: Env, problem: VarlenProblem) -> None:
    with cp_dispatch.enabled():
        check(run_sharded(problem, env.mesh()), exact(problem), one_device(problem))


def compiled(env: Env, backend: str, window=(-1, 0), layout=False) -> None:
    """Right, and documents of different lengths compile nothing, whether in new tensors or written
    over the old ones."""
    if backend == "inductor" and not _has_compiler():
        print("no C++ compiler, nothing to test")
        return
    torch._dynamo.reset()
    layout = cp_dispatch.HeadTail(48, env.world_size) if layout else None
    # The longest length is a number in the graph, which ours does not read.
    problems = [VarlenProblem(x, key_heads=2, window=window) for x in LENGTHS]

    def attend(query, key, value, starts):
        return problems[0].attend(query, key, value, starts)

    attend = torch.compile(attend, fullgraph=True, backend=backend)
    kept = torch.zeros(6, dtype=torch.int32)
    with cp_dispatch.enabled(layout=layout):
        for again in range(2):
            for step, problem in enumerate(problems):
                starts = problem.starts()
                if again:
                    starts = [kept.copy_(starts[0])] * 2
                with torch._dynamo.config.patch(error_on_recompile=bool(again or step)):
                    got = run_sharded(
                        problem, env.mesh(), layout=layout, starts=starts, attend=attend
                    )
                check(got, exact(problem), one_device(problem))


def one_node_each_way(env: Env) -> None:
    torch._dynamo.reset()
    graphs: dict[str, list[str]] = {}

    def keep(name):
        def compiler(module, example_inputs):
            graphs[name] = [str(x.target) for x in module.graph.nodes if x.op == "call_function"]
            return module.forward

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    attend = torch.compile(BASE.attend, fullgraph=True, backend=backend)
    with cp_dispatch.enabled():
        run_sharded(BASE, env.mesh(), attend=attend)
    ours = {
        name: [target for target in targets if "varlen" in target]
        for name, targets in graphs.items()
    }
    assert ours == {
        "forward": ["cp_dispatch.varlen_attention.default"],
        "backward": ["cp_dispatch.varlen_attention_backward.default"],
    }, graphs
    assert not any("c10d" in target for targets in graphs.values() for target in targets), graphs


def settings_compile_anew(env: Env) -> None:
    """Another layout is another graph. A return to the first compiles nothing. When off, the call
    is torch's."""
    torch._dynamo.reset()
    attend = torch.compile(BASE.attend, fullgraph=True, backend="aot_eager")
    layouts = None, cp_dispatch.HeadTail(48, env.world_size)
    for again in (False, True):
        for layout in layouts:
            with (
                cp_dispatch.enabled(layout=layout),
                torch._dynamo.config.patch(error_on_recompile=again),
            ):
                got = run_sharded(BASE, env.mesh(), layout=layout, attend=attend)
            check(got, exact(BASE), one_device(BASE))
    with pytest.raises(Exception) as found:
        run_sharded(BASE, env.mesh(), attend=attend)
    assert not isinstance(found.value, cp_dispatch.ContextParallelError)


def several_lengths(env: Env, dynamic) -> None:
    """Lengths of the packed sequence that the number of ranks divides, and others."""
    torch._dynamo.reset()
    attend = torch.compile(BASE.attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with cp_dispatch.enabled():
        for last in (13, 29, 28, 30, 13):
            problem = VarlenProblem((*BASE.lengths[:-1], last), key_heads=2)
            got = run_sharded(problem, env.mesh(), attend=attend)
            check(got, exact(problem), one_device(problem))


def without_gradients(env: Env, mode) -> None:
    torch._dynamo.reset()
    attend = torch.compile(BASE.attend, fullgraph=True, backend="aot_eager")
    want = exact(BASE)
    with cp_dispatch.enabled(), mode():
        got = run_sharded(BASE, env.mesh(), attend=attend, needs_grad=False)
        for name, x in got.items():
            torch.testing.assert_close(x.double(), want[name], rtol=1e-5, atol=1e-6)


def placed_starts(env: Env, backend: str) -> None:
    """A DTensor that is overwritten between calls, which changes no version of its local tensor."""
    if backend == "inductor" and not _has_compiler():
        print("no C++ compiler, nothing to test")
        return
    torch._dynamo.reset()
    attend = torch.compile(BASE.attend, fullgraph=True, backend=backend)
    kept = distribute(torch.zeros(6, dtype=torch.int32), env.mesh(), [Replicate()])
    with cp_dispatch.enabled():
        for lengths in LENGTHS[:2]:
            problem = dataclasses.replace(BASE, lengths=lengths)
            kept.copy_(distribute(problem.starts()[0], env.mesh(), [Replicate()]))
            got = run_sharded(
                problem, env.mesh(), starts=[kept] * 2, attend=attend, needs_grad=False
            )
            check(got, exact(problem), one_device(problem))


def made_in_the_graph(env: Env) -> None:
    """Inductor writes documents over those of an earlier call without a version change. The
    documents come from a matrix product of torch, for which no kernel has to be built."""
    if not _has_compiler():
        print("no C++ compiler, nothing to test")
        return
    torch._dynamo.reset()
    problems = [VarlenProblem(x, key_heads=2) for x in LENGTHS]
    before = torch.ones(6, 5, dtype=torch.int32).tril(-1)

    def attend(query, key, value, *lengths):
        starts = [(before @ x).view(-1) for x in lengths]
        return [problems[0].attend(query, key, value, [x, x])[0] for x in starts]

    lengths = [torch.tensor(x, dtype=torch.int32).view(-1, 1) for x in LENGTHS]
    for placement in (ROWS[0], Replicate()):
        inputs = [distribute(x, env.mesh(), [placement]) for x in problems[0].tensors()[:3]]
        with cp_dispatch.enabled():
            found = torch.compile(attend, fullgraph=True)(*inputs, *lengths)
        for problem, out in zip(problems, found, strict=True):
            want = exact(problem)["output"]
            torch.testing.assert_close(out.full_tensor().double(), want, rtol=1e-5, atol=1e-6)


def in_a_model(env: Env, compile: bool) -> None:
    """With projections on DTensors around it, in a checkpoint; gradients of the weights."""
    torch._dynamo.reset()
    mesh, generator = env.mesh(), torch.Generator().manual_seed(0)
    x = torch.randn(48, 32, generator=generator)
    weights = torch.randn(3, 32, 32, generator=generator) / 32**0.5
    starts = BASE.starts()

    def block(x, weights, mesh_starts):
        query, key, value = (
            torch.einsum("ti,oi->to", x, w).unflatten(-1, (4, 8)) for w in weights.unbind()
        )
        problem = VarlenProblem(BASE.lengths)
        return problem.attend(query, key, value, mesh_starts)[0].flatten(1).tanh()

    def loss(x, weights, starts):
        out = checkpoint(block, x, weights, starts, use_reentrant=False)
        return (out * out).sum()

    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compile else loss
    placed = distribute(weights, mesh, [Replicate()]).requires_grad_()
    with cp_dispatch.enabled():
        total = function(distribute(x, mesh, ROWS), placed, starts)
        total.backward()
    whole = torch.tensor(0.0, dtype=torch.float64), weights.double().requires_grad_()
    q, k, v = (torch.einsum("ti,oi->to", x.double(), w).unflatten(-1, (4, 8)) for w in whole[1])
    out = []
    for part in zip(*(t.split(list(BASE.lengths)) for t in (q, k, v)), strict=True):
        part = [t.transpose(0, 1) for t in part]
        out.append(
            torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1)
        )
    want = torch.cat(out).flatten(1).tanh().square().sum()
    want.backward()
    torch.testing.assert_close(total.full_tensor().double(), want, rtol=1e-5, atol=1e-5)
    grad = placed.grad.full_tensor().double()
    torch.testing.assert_close(grad, whole[1].grad, rtol=1e-4, atol=1e-4)


def in_a_block(env: Env, backend: str) -> None:
    """Plain shards: a graph made outside is not used inside, one made inside not in another order,
    and other documents compile nothing."""
    if backend == "inductor" and not _has_compiler():
        print("no C++ compiler, nothing to test")
        return
    torch._dynamo.reset()
    problems = [VarlenProblem(x, key_heads=2) for x in LENGTHS]

    def attend(query, key, value, starts):
        return problems[0].attend(query, key, value, starts)

    attend = torch.compile(attend, fullgraph=True, backend=backend)
    for again in range(2):
        with pytest.raises(Exception, match="_flash_attention_forward"):  # torch has none for CPU
            attend(*(x[:24] for x in BASE.tensors()[:3]), BASE.starts())
        for balancer in ("auto", None):
            for step, problem in enumerate(problems):
                with torch._dynamo.config.patch(error_on_recompile=bool(again or step)):
                    got = run_in_block(problem, env.mesh(), balancer, attend)
                check(got, exact(problem), one_device(problem))


def windows_in_a_block(env: Env) -> None:
    """As arguments, which are symbols to a graph for all sizes."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(query, key, value, starts, left, right):
        problem = VarlenProblem(key_heads=2, window=(left, right))
        return problem.attend(query, key, value, starts)

    for window in (-1, 0), (3, 2), (-1, -1):
        problem = VarlenProblem(key_heads=2, window=window)
        given = dict(zip(("left", "right"), window, strict=True))
        got = run_in_block(problem, env.mesh(), attend=functools.partial(attend, **given))
        check(got, exact(problem), one_device(problem))


def numbers_of_documents(env: Env, block: bool) -> None:
    """One graph for the first number of documents, and one for all others."""
    torch._dynamo.reset()
    lengths = (5, 20, 1, 9, 13), (40, 5, 3), (24, 24), (9,) * 5 + (3,)
    problems = [VarlenProblem(x, key_heads=2) for x in lengths]

    def attend(query, key, value, starts):
        return problems[0].attend(query, key, value, starts)

    attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for step, problem in enumerate(problems):
        with torch._dynamo.config.patch(error_on_recompile=step > 1), cp_dispatch.enabled():
            if block:
                got = run_in_block(problem, env.mesh(), attend=attend)
            else:
                got = run_sharded(problem, env.mesh(), attend=attend)
        check(got, exact(problem), one_device(problem))


def one_node_in_a_block(env: Env) -> None:
    torch._dynamo.reset()
    found: list[str] = []

    def compiler(module, example_inputs):
        found.extend(str(x.target) for x in module.graph.nodes if x.op == "call_function")
        return module.forward

    attend = torch.compile(BASE.attend, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    run_in_block(BASE, env.mesh(), attend=attend)
    assert [x for x in found if "varlen" in x] == [
        "cp_dispatch.varlen_attention.default", "cp_dispatch.varlen_attention_backward.default",
    ], found  # fmt: skip


CASES = {
    "eager": functools.partial(eager, problem=BASE),
    "eager window": functools.partial(eager, problem=VarlenProblem(window=(3, 4))),
    "aot_eager causal": functools.partial(compiled, backend="aot_eager"),
    "aot_eager window": functools.partial(compiled, backend="aot_eager", window=(3, 2)),
    "aot_eager head-tail": functools.partial(compiled, backend="aot_eager", layout=True),
    "inductor causal": functools.partial(compiled, backend="inductor"),
    "inductor, placed starts": functools.partial(placed_starts, backend="inductor"),
    "inductor, made in the graph": made_in_the_graph,
    "one node each way": one_node_each_way,
    "settings": settings_compile_anew,
    "several lengths": functools.partial(several_lengths, dynamic=None),
    "several lengths, dynamic": functools.partial(several_lengths, dynamic=True),
    "no_grad": functools.partial(without_gradients, mode=torch.no_grad),
    "inference_mode": functools.partial(without_gradients, mode=torch.inference_mode),
    "block, eager graph": functools.partial(in_a_block, backend="eager"),
    "block, aot_eager": functools.partial(in_a_block, backend="aot_eager"),
    "block, inductor": functools.partial(in_a_block, backend="inductor"),
    "block, windows": windows_in_a_block,
    "numbers of documents": functools.partial(numbers_of_documents, block=False),
    "block, numbers of documents": functools.partial(numbers_of_documents, block=True),
    "block, one node each way": one_node_in_a_block,
    "model": functools.partial(in_a_model, compile=False),
    "model compiled": functools.partial(in_a_model, compile=True),
}


@pytest.fixture(scope="module")
def outcomes(request) -> dict[str, str]:
    return run_asked(request, 2, "gloo", 120)


@pytest.mark.parametrize("case", CASES)
def test_spawned(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
