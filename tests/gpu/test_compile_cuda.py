"""Compiled steps, CUDA graphs, checkpoints and real models on 2 and up to 4 GPUs.

Calls are compared with float64, as in the other tests. Losses of a float32 model may differ by
1e-4, and those of a bfloat16 model by the error of one device in bfloat16.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

import cp_dispatch
from tests.distributed import test_titan_spawned as titan
from tests.distributed.calls import only
from tests.distributed.models import Model
from tests.distributed.reference import FACTOR, Mask, Problem, check, exact, rounding, yardstick
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.spawn import Env, run_asked
from tests.distributed.staged import is_staged, ranks
from tests.distributed.test_compiled_spawned import by_policy, saved
from tests.gpu.capture import capture

try:
    from tests.distributed import test_hf_spawned as hf
except pytest.skip.Exception:  # transformers is not installed
    hf = None

GPUS = ranks()
WORLD_SIZES = sorted({2, min(GPUS, 4)} - {0, 1})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

ROWS = (Shard(2),)
LENGTH = 1024
PROBLEM = Problem(
    batch=2, heads=8, key_heads=2, length=LENGTH, dim=64, causal=True, dtype=torch.bfloat16
)
# (schedule, in head-tail order)
WAYS = (("natural_ring", False), ("ring", True), ("mirrored_ring", False), ("gather", False),
        ("gather", True), ("auto", False), ("auto", True))  # fmt: skip


def layout_of(env: Env, head_tail: bool):
    return cp_dispatch.HeadTail(LENGTH, env.world_size) if head_tail else None


def order(tensors, layout, back=False):
    """Whole tensors permuted to the layout's order, or back to natural order."""
    if layout is None:
        return list(tensors)
    index = (layout.inverse if back else layout.indices)[0]
    return [x if x is None else x.index_select(2, index.to(x.device)) for x in tensors]


def judge(problem, tensors, got, kernel: str) -> None:
    floors, few = rounding(problem, tensors)
    single = yardstick(problem, tensors, kernel)
    check(got, exact(problem, tensors), single, floors=floors, few=few)


def fresh(seed: int, device, problem=PROBLEM) -> list[torch.Tensor]:
    return Problem(**vars(problem) | {"seed": seed}).tensors(device)


# -- One call, compiled and replayed -------------------------------------------------------------


def compiled(
    env: Env, kernel: str, schedule: str, head_tail: bool, problem=PROBLEM, steps=2, **compiler
) -> None:
    """Right with new data at every step. After the first steps nothing is compiled."""
    torch._dynamo.reset()
    layout = layout_of(env, head_tail)
    attend = torch.compile(problem.attend, fullgraph=True, **compiler)
    with cp_dispatch.enabled(schedule=schedule, layout=layout):
        for seed in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            this = Problem(**vars(problem) | {"seed": seed})  # with another mask or bias, too
            tensors = this.tensors(env.device)
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                got = run_sharded(
                    this, order(tensors, layout), env.mesh(), kernel=kernel, attend=attend
                )
            # The next step overwrites the graph's memory.
            got = [x if x is None else x.clone() for x in order(got, layout, back=True)]
            judge(this, tensors, got, kernel)


def replayed(env: Env) -> None:
    """Check that ``mode="reduce-overhead"`` does record a CUDA graph here. Otherwise its cases
    prove nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mesh = env.mesh()
    attend = torch.compile(PROBLEM.attend, fullgraph=True, mode="reduce-overhead")
    results = []
    with cp_dispatch.enabled(), torch.profiler.profile() as profile:
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            inputs = [distribute(x, mesh, ROWS) for x in fresh(0, env.device)[:3]]
            with torch.no_grad():
                results.append(attend(*inputs).to_local().clone())
        torch.cuda.synchronize()
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    launched = sum(event.name == "cudaGraphLaunch" for event in profile.events())
    assert not skipped and launched, (skipped, launched)
    for got in results[1:]:
        torch.testing.assert_close(got, results[0])


def captured(env: Env, kernel: str, schedule: str, head_tail: bool, problem=PROBLEM) -> None:
    """``torch.cuda.graph`` of a forward and its backward on DTensors, replayed with new data."""
    layout = layout_of(env, head_tail)
    mesh = env.mesh()
    static = [
        distribute(x, mesh, ROWS).requires_grad_(i < 3)
        for i, x in enumerate(order(fresh(0, env.device, problem), layout))
    ]
    *inputs, grad = static
    mask = problem.attn_mask(env.device)
    masks = [] if mask is None else [mask]

    def step():
        output = problem.attend(*inputs, *masks)
        return output, *torch.autograd.grad(output, inputs, grad)

    with cp_dispatch.enabled(schedule=schedule, layout=layout), only(kernel):
        graph, results = capture(step)
    for seed in (1, 2, 3):
        this = Problem(**vars(problem) | {"seed": seed})
        tensors = this.tensors(env.device)
        with torch.no_grad():
            for own, new in zip(static, order(tensors, layout), strict=True):
                own.to_local().copy_(distribute(new, mesh, ROWS).to_local())
            for own in masks:
                own.copy_(this.attn_mask(env.device))
        graph.replay()
        torch.cuda.synchronize()
        got = order([x.detach().full_tensor() for x in results], layout, back=True)
        judge(this, tensors, got, kernel)


def captured_dropout(env: Env) -> None:
    """Every replay draws a new dropout mask, the same on all ranks."""
    mesh = env.mesh()
    query, key = (torch.ones(1, 2, 64, 64, device=env.device) for _ in range(2))
    value = torch.eye(64, device=env.device).expand(1, 2, 64, 64)  # the output is the weights
    inputs = [distribute(x, mesh, ROWS) for x in (query, key, value)]

    def step():
        return torch.nn.functional.scaled_dot_product_attention(*inputs, dropout_p=0.5)

    torch.manual_seed(0)
    with cp_dispatch.enabled(), torch.no_grad():
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            step()
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
    masks = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        masks.append(result.full_tensor() == 0)
        assert 0.4 < masks[-1].float().mean() < 0.6
    assert not torch.equal(*masks)


# -- Training ----------------------------------------------------------------------------------


def losses(model, mesh, compiled=None, lengths=(256,) * 4, device="cuda") -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = model if compiled is None else compiled
    generator = torch.Generator().manual_seed(3)
    result = []
    for step, length in enumerate(lengths):
        tokens, labels = torch.randint(17, (2, 1, length), generator=generator).to(device)
        if mesh is not None:
            tokens, labels = (distribute(x, mesh, [Shard(1)]) for x in (tokens, labels))
        torch.compiler.cudagraph_mark_step_begin()
        torch.manual_seed(step)
        loss = forward(tokens, labels)
        if isinstance(loss, DTensor):
            loss = loss.redistribute(placements=[Replicate()] * loss.device_mesh.ndim)
        loss.backward()
        result.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return result


def trained(env: Env, dtype=torch.float32, compiler=None, lengths=(256,) * 4, **options) -> None:
    """A model's losses are those of one device, to within 1e-4 or one device's error."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(**options).to(env.device, dtype)
    alone = Model().to(env.device, dtype)
    alone.load_state_dict(model.state_dict())
    exactly = copy.deepcopy(alone).double()
    sharded = distribute_module(model, env.mesh())
    with cp_dispatch.enabled():
        run = torch.compile(sharded, fullgraph=True, **compiler) if compiler else None
        got = losses(sharded, env.mesh(), run, lengths)
    if options.get("dropout"):
        assert got[-1] != got[0] and all(x < 10 for x in got)
        return
    single = losses(alone, None, lengths=lengths)
    if dtype is torch.float32:
        torch.testing.assert_close(got, single, rtol=1e-4, atol=1e-4)
        return
    true = torch.tensor(losses(exactly, None, lengths=lengths))
    mine, theirs = ((torch.tensor(x) - true).norm() for x in (got, single))
    # A loss is one number, whose error on one device may happen to be small. The error of rounding
    # the loss itself is allowed as well.
    floor = (true.to(dtype).double() - true).norm()
    assert mine <= FACTOR * max(theirs, floor), (got, single, true)


INDUCTOR, EAGER = {"backend": "inductor"}, {"backend": "aot_eager"}


def beside_each_other(env: Env, length: int = 1021) -> None:
    """Two attention calls and a torch collective, independent of each other, on uneven shards: all
    ranks run them in the same order (Note [Graphs of ranks])."""

    def attend(x):
        x = x.unflatten(-1, (8, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)

    def function(x, whole, wide, narrow, out):
        second = attend((whole.sin() @ narrow).redistribute(placements=[Shard(1)]))
        return attend(x @ wide) @ out + second

    torch._dynamo.reset()
    generator = torch.Generator(env.device).manual_seed(0)
    shapes = (1, length, 256), (256, 1024), (256, 256), (1024, 256)
    whole, *weights = (
        torch.randn(shape, generator=generator, device=env.device).bfloat16() / 8
        for shape in shapes
    )
    inputs = [distribute(whole, env.mesh(), [Shard(1)])]
    inputs += [distribute(x, env.mesh(), [Replicate()]) for x in (whole, *weights)]
    inputs = [x.requires_grad_() for x in inputs]
    grad, results = distribute(whole.cos(), env.mesh(), [Shard(1)]), []
    with cp_dispatch.enabled():
        for f in (function, torch.compile(function, fullgraph=True)):
            y = f(*inputs)
            grads = torch.autograd.grad(y, inputs, grad)
            results.append([x.full_tensor().detach().float() for x in (y, *grads)])
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


REPLAY = {"mode": "reduce-overhead"}
BF16 = torch.bfloat16
CASES = {
    "beside each other": beside_each_other,
    "reduce-overhead replays": replayed,
    **{
        f"{name} {kernel} {schedule}{', head-tail' * head_tail}": functools.partial(
            function, kernel=kernel, schedule=schedule, head_tail=head_tail, **options
        )
        for name, function, options in (
            ("aot_eager", compiled, EAGER),
            ("inductor", compiled, INDUCTOR),
            ("reduce-overhead", compiled, REPLAY | {"steps": 5}),
            ("captured", captured, {}),
        )
        for kernel in ("flash", "cudnn")
        for schedule, head_tail in WAYS
    },
    **{
        f"{name} {kernel} {what}{', head-tail' * head_tail}": functools.partial(
            function,
            kernel=kernel,
            schedule="auto",
            head_tail=head_tail,
            problem=Problem(**vars(PROBLEM) | {"causal": False, "key_heads": None, "mask": mask}),
            **options,
        )
        for name, function, options in (
            ("inductor", compiled, INDUCTOR),
            ("reduce-overhead", compiled, REPLAY | {"steps": 5}),
            ("captured", captured, {}),
        )
        for kernel, what, mask in (
            ("efficient", "full", None),
            ("efficient", "padding mask", Mask("b11k")),
            ("cudnn", "bias", Mask("hqk", dtype=None)),
        )
        for head_tail in (False, True)
    },
    "captured dropout": captured_dropout,
    **{
        f"trains {dtype} {name}": functools.partial(
            trained, dtype=dtype, compiler=compiler, **options
        )
        for dtype in (torch.float32, BF16)
        for name, compiler, options in (
            ("eager", None, {}),
            ("inductor", INDUCTOR, {}),
            ("aot_eager", EAGER, {}),
            ("reduce-overhead", REPLAY, {}),
            ("checkpoint", None, {"checkpointed": True}),
            ("checkpoint, inductor", INDUCTOR, {"checkpointed": True}),
            ("selective", None, {"checkpointed": True, "context_fn": saved}),
            ("selective, inductor", INDUCTOR, {"checkpointed": True, "context_fn": by_policy}),
        )
    },
    "trains with dropout and checkpoint, inductor": functools.partial(
        trained, compiler=INDUCTOR, checkpointed=True, dropout=0.3
    ),
    **{
        f"trains with lengths that change, {name}": functools.partial(
            trained, compiler=compiler, lengths=(256, 384, 512, 640)
        )
        for name, compiler in (("inductor", INDUCTOR), ("aot_eager", EAGER))
    },
    **{f"titan: {name}": case for name, case in titan.CASES.items()},
    **({f"HF: {name}": case for name, case in hf.CASES.items()} if hf else {}),
}
# Tensor parallelism, pipelines and data x context need four ranks.
ON_4 = ("titan: sequence", "titan: pipeline")


def runs(name: str, size: int) -> bool:
    captures = name.startswith("trains") and "reduce-overhead" in name
    if is_staged() and (captures or name.startswith("titan: pipeline")):
        return False  # staged collectives: not in CUDA graphs, and no sends
    return size >= 4 or not name.startswith(ON_4)


@pytest.fixture(scope="module", params=WORLD_SIZES or [2], ids=lambda size: f"{size}GPUs")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "nccl", 120, lambda name: runs(name, size))


@pytest.mark.parametrize("case", CASES)
def test_cuda(outcomes, case):
    if case not in outcomes:
        pytest.skip("needs four GPUs, or NCCL")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
