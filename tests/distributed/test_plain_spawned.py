"""``context_parallel`` on gloo processes: torch's own scenarios, training, compilation."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import scaled_dot_product_attention as imported_early

import cp_dispatch
from cp_dispatch import ContextParallel, HeadTail, context_parallel, context_parallel_unshard
from tests.distributed.plain import run_plain
from tests.distributed.reference import Problem, check, exact, one_device
from tests.distributed.spawn import Env, run_asked


@functools.cache
def judged(problem: Problem):
    tensors = problem.tensors()
    return tensors, exact(problem, tensors), one_device(problem, tensors, "cpu_flash")


def fullgraph(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def by_context(env: Env, causal, rotate, balancer, forward_only, compiled=False) -> None:
    problem = Problem(causal=causal, key_heads=2, length=64)
    tensors, want, single = judged(problem)
    attend = fullgraph(problem.attend) if compiled else None
    how = {"balancer": balancer, "needs": not forward_only, "attend": attend}
    cp_dispatch.set_rotate_method(rotate)
    try:
        check(run_plain(problem, tensors, env.mesh(), **how), want, single)
    finally:
        cp_dispatch.set_rotate_method("allgather")


class Attention(nn.Module):
    def forward(self, query, key, value, **options):
        return imported_early(query, key, value, **options)


def by_style(env: Env, causal, rotate, balancer, forward_only, compiled=False) -> None:
    problem = Problem(causal=causal, length=64)
    tensors, want, single = judged(problem)
    mesh = env.mesh()
    layout = HeadTail(64, env.world_size) if balancer else None
    cp_dispatch.set_rotate_method(rotate)
    try:
        module = parallelize_module(Attention(), mesh, ContextParallel(balancer=balancer))
        module = fullgraph(module) if compiled else module
        *inputs, grad = cp_dispatch.shard(mesh, tensors, 2, layout)
        inputs = [x.requires_grad_(not forward_only) for x in inputs]
        results = [module(inputs[0], inputs[1], value=inputs[2], is_causal=causal)]
        if not forward_only:
            results += torch.autograd.grad(results[0], inputs, grad)
        whole = cp_dispatch.unshard(mesh, [x.detach() for x in results], 2, layout)
        check(whole + [None] * (4 - len(whole)), want, single)
    finally:
        cp_dispatch.set_rotate_method("allgather")


def native_transformer(env: Env, rotate, causal) -> None:
    """``nn.TransformerEncoder`` with the style on its attention alone, in training and in eval
    mode, where it would call a fused kernel that cp_dispatch does not replace."""
    mesh, length = env.mesh(), 16
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, grad = torch.randn(2, 3, length, 16, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():  # the same model on all ranks
        torch.distributed.broadcast(parameter.data, 0)
    alone = copy.deepcopy(model)
    cp_dispatch.set_rotate_method(rotate)
    try:
        for layer in model.layers:
            parallelize_module(layer.self_attn, mesh, ContextParallel(seq_dim=1))
        own, own_grad = (t.chunk(env.world_size, 1)[env.rank] for t in (x, grad))

        def mask(rows):
            return nn.Transformer.generate_square_subsequent_mask(rows) if causal else None

        want = alone(x, mask=mask(length), is_causal=causal)
        got = model(own, mask=mask(own.size(1)), is_causal=causal)
        torch.testing.assert_close(got, want.chunk(env.world_size, 1)[env.rank])
        want.backward(grad)
        got.backward(own_grad)
        for mine, true in zip(model.parameters(), alone.parameters(), strict=True):
            torch.distributed.all_reduce(mine.grad, group=mesh.get_group())
            torch.testing.assert_close(mine.grad, true.grad, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            got = model.eval()(own, mask=mask(own.size(1)), is_causal=causal)
            want = alone.eval()(x, mask=mask(length), is_causal=causal)
        torch.testing.assert_close(got, want.chunk(env.world_size, 1)[env.rank])
    finally:
        cp_dispatch.set_rotate_method("allgather")


def buffers_with_and_without_batch(env: Env) -> None:
    mesh, size = env.mesh(), env.world_size
    length = 6 * 2 * size
    batched, table = torch.arange(3 * length).view(3, length), torch.arange(length) * 2.0
    buffers = [batched.clone(), table.clone()]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 0]):
        positions = HeadTail(length, size).positions(env.rank)[0]
        assert torch.equal(buffers[0], batched[:, positions])
        assert torch.equal(buffers[1], table[positions])
        own = [x.clone() for x in buffers]
    assert torch.equal(buffers[0], batched) and torch.equal(buffers[1], table)
    got = context_parallel_unshard(mesh, own, [1, 0])
    assert torch.equal(got[0], batched) and torch.equal(got[1], table)


def dropout_of_one_mask(env: Env) -> None:
    """The dropout mask belongs to pairs of positions: two layouts drop the same pairs."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 2, 16, 8, generator=generator)
    value = torch.eye(16).expand(2, 2, 16, 16)  # the output is the weights
    results = []
    for balancer in ("auto", None):
        buffers = [x.clone() for x in (query, key, value)]
        with context_parallel(
            env.mesh(), buffers=buffers, buffer_seq_dims=[2] * 3, balancer=balancer
        ):
            torch.manual_seed(3)
            own = F.scaled_dot_product_attention(*buffers, dropout_p=0.4, is_causal=True)
        results += context_parallel_unshard(env.mesh(), [own], [2], balancer=balancer)
    torch.testing.assert_close(*results)
    dropped = (results[0] == 0).tril().float().sum() / 4 / 136
    assert 0.2 < dropped < 0.6, dropped


class Model(nn.Module):
    """A small language model with rotary positions in a buffer."""

    def __init__(self, length: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 32), nn.Linear(32, 31)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        angles = torch.arange(length).float()[:, None] / 10 ** (torch.arange(4) / 4)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens):
        x = self.embedding(tokens)
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        query, key = (self.turn(x) for x in (query, key))
        mixed = imported_early(query, key, value, is_causal=True)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))

    def turn(self, x):
        return torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.turns
        ).flatten(-2)


def steps(model, data, around, count=3, compiled=False) -> list[float]:
    """Losses of a few steps of training; ``around(buffers)`` returns a block and a sum over
    ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    losses = []
    for tokens, labels in data[:count]:
        tokens, labels = tokens.clone(), labels.clone()
        block, summed = around([tokens, labels], model)
        with block:
            logits = forward(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            loss = loss / 128
        loss.backward()  # after the block
        for parameter in model.parameters():
            parameter.grad.copy_(summed(parameter.grad))
        losses.append(summed(loss.detach()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(31, (2, 2, 64), generator=generator) for _ in range(3)]


def alone(buffers, model):
    import contextlib

    return contextlib.nullcontext(), lambda x: x


def together(mesh, buffers, model, extra=()):
    names = [name for name, dim in extra]
    more = [model.get_buffer(name) for name in names]
    block = context_parallel(
        mesh,
        buffers=[*buffers, *more],
        buffer_seq_dims=[1] * len(buffers) + [dim for _, dim in extra],
        no_restore_buffers=set(buffers),
    )

    def summed(x):
        x = x.clone()
        torch.distributed.all_reduce(x, group=mesh.get_group())
        return x

    return block, summed


def trains_as_on_one_process(env: Env, compiled=False) -> None:
    torch.manual_seed(0)
    model = Model(64)
    want = steps(copy.deepcopy(model), batches(), alone)
    around = functools.partial(together, env.mesh(), extra=[("turns", 0)])
    mine = copy.deepcopy(model)
    got = steps(mine, batches(), around, compiled=compiled)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(mine.turns, model.turns)


CASES = {
    **{
        f"{name} {rotate} balancer={balancer} causal={causal} forward_only={forward}":
        functools.partial(
            function, causal=causal, rotate=rotate, balancer=balancer, forward_only=forward
        )
        for name, function in (("context", by_context), ("style", by_style))
        for rotate in ("allgather", "alltoall")
        for balancer in ("head-tail", None)
        for causal in (True, False)
        for forward in (True, False)
    },
    **{
        f"{name} {rotate} balancer={balancer} causal={causal} forward_only={forward} compiled":
        functools.partial(
            function, causal=causal, rotate=rotate, balancer=balancer, forward_only=forward,
            compiled=True,
        )
        for name, function in (("context", by_context), ("style", by_style))
        for rotate in ("allgather", "alltoall")
        for balancer in ("head-tail", None)
        for causal in (True, False)
        for forward in (True, False)
    },
    **{
        f"native transformer {rotate} causal={causal}": functools.partial(
            native_transformer, rotate=rotate, causal=causal
        )
        for rotate in ("allgather", "alltoall")
        for causal in (True, False)
    },
    "buffers with and without batch": buffers_with_and_without_batch,
    "dropout of one mask": dropout_of_one_mask,
    "trains as on one process": trains_as_on_one_process,
    "trains compiled": functools.partial(trains_as_on_one_process, compiled=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(request) -> dict[str, str]:
    return run_asked(request, 2, "gloo", 60)


@pytest.mark.parametrize("case", CASES)
def test_spawned(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
