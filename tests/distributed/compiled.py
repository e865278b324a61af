"""Cases of ``test_spawned.py`` under ``torch.compile``."""

from __future__ import annotations

import functools

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.cpp_builder import get_cpp_compiler

import cp_dispatch
from tests.distributed.reference import Problem, check, exact, one_device
from tests.distributed.sharded import run_sharded
from tests.distributed.spawn import TORCH_2_13, Env

PROBLEM = Problem(causal=True, key_heads=2, length=250)


def _has_compiler() -> bool:
    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


def as_eager(env: Env, backend: str, problem: Problem = PROBLEM) -> None:
    """The compiled call is as exact as one device, and a second call compiles nothing."""
    if backend == "inductor" and not _has_compiler():
        print("no C++ compiler, nothing to test")
        return
    torch._dynamo.reset()
    tensors = problem.tensors()
    want, single = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")
    attend = torch.compile(problem.attend, fullgraph=True, backend=backend)
    with cp_dispatch.enabled():
        check(run_sharded(problem, tensors, env.mesh(), attend=attend), want, single)
        with torch._dynamo.config.patch(error_on_recompile=True):
            check(run_sharded(problem, tensors, env.mesh(), attend=attend), want, single)


def one_node_each_way(env: Env) -> None:
    """The graphs contain one ring op forward and one backward, and no other collective."""
    torch._dynamo.reset()
    graphs: dict[str, list[str]] = {}

    def keep(name):
        def compiler(module, example_inputs):
            graphs[name] = [
                str(node.target) for node in module.graph.nodes if node.op == "call_function"
            ]
            return module.forward

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    attend = torch.compile(PROBLEM.attend, fullgraph=True, backend=backend)
    with cp_dispatch.enabled():
        run_sharded(PROBLEM, PROBLEM.tensors(), env.mesh(), attend=attend)
    rings = {
        name: [target for target in targets if target.startswith("cp_dispatch.")]
        for name, targets in graphs.items()
    }
    assert rings == {
        "forward": ["cp_dispatch.ring_cpu_flash_attention.default"],
        "backward": ["cp_dispatch.ring_cpu_flash_attention_backward.default"],
    }, graphs
    assert not any("c10d" in target for targets in graphs.values() for target in targets), graphs


def without_gradients(env: Env, mode) -> None:
    torch._dynamo.reset()
    tensors = PROBLEM.tensors()
    want, single = exact(PROBLEM, tensors), one_device(PROBLEM, tensors, "cpu_flash")
    attend = torch.compile(PROBLEM.attend, fullgraph=True, backend="aot_eager")
    with cp_dispatch.enabled(), mode():
        got = run_sharded(PROBLEM, tensors, env.mesh(), attend=attend, needs=(False,) * 3)
    check([x if x is None else x.clone() for x in got], want, single)


def several_lengths(env: Env) -> None:
    """The results are right whether compiled once for many lengths or once for each."""
    # Torch 2.11 does not support DTensors in which every dim is dynamic.
    for dynamic in (None, True) if TORCH_2_13 else (None,):
        torch._dynamo.reset()
        for length in (64, 128, 250):
            problem = Problem(causal=True, length=length, key_heads=2)
            tensors = problem.tensors()
            want, single = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")
            attend = torch.compile(
                problem.attend, fullgraph=True, backend="aot_eager", dynamic=dynamic
            )
            with cp_dispatch.enabled():
                check(run_sharded(problem, tensors, env.mesh(), attend=attend), want, single)


COMPILED = {
    "compile aot_eager causal gqa": functools.partial(as_eager, backend="aot_eager"),
    "compile aot_eager full": functools.partial(
        as_eager, backend="aot_eager", problem=Problem(length=64)
    ),
    "compile aot_eager one node each way": one_node_each_way,
    "compile no_grad": functools.partial(without_gradients, mode=torch.no_grad),
    "compile inference_mode": functools.partial(without_gradients, mode=torch.inference_mode),
    "compile several lengths": several_lengths,
    "compile inductor": functools.partial(as_eager, backend="inductor"),
}
