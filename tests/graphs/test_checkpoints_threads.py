"""Checkpoints whose second run has another layout around: refused where the order of the sequence
differs from that of the first run, and only there."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cp_dispatch
from cp_dispatch import ContextParallel, ContextParallelError, HeadTail, context_parallel, enabled
from cp_dispatch.graphs import checkpoints
from tests.distributed.sharded import distribute
from tests.distributed.threads import run_threads
from tests.flex.problems import gradients_on_cpu
from tests.ranks import fake_ranks

LENGTH, ROWS = 16, (Shard(2),)
ORDER = r'(natural order|\["HeadTail)'
REFUSED = f"a different order of the sequence than its forward: {ORDER}.* instead of {ORDER}"
causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def head_tail() -> HeadTail:
    """Equal ones, which are not identical."""
    return HeadTail(LENGTH, 2)


def leaves(mesh) -> list[DTensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, 2, LENGTH, 8, generator=generator) for _ in range(3)]
    return [distribute(x, mesh, ROWS).requires_grad_() for x in tensors]


def on_ranks(body) -> list:
    return run_threads(2, lambda rank: body(init_device_mesh("cpu", (2,))))


@contextlib.contextmanager
def around(layout):
    """The scope of a layout; ``"off"``: none, in which another thread's would apply."""
    dist.barrier()
    with contextlib.nullcontext() if layout == "off" else enabled(layout=layout):
        yield
    dist.barrier()


def refused():
    return pytest.raises(ContextParallelError, match=REFUSED)


def masked(query, key, value):
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def varlen(query, key, value):
    starts = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    packed = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attn(*packed, starts, starts, LENGTH, LENGTH, window_size=(-1, 0))


def flex(query, key, value):
    return flex_attention(*(x.detach() for x in (query, key, value))) + query.sin()


@pytest.mark.parametrize(
    "attend", [causal, masked, varlen, flex], ids=["causal", "mask", "varlen", "flex"]
)
@pytest.mark.parametrize(
    "first, second",
    [(x, y) for x in (None, head_tail()) for y in (None, head_tail(), "off") if x or y != "off"],
    ids=str,
)
def test_a_reentrant_one_is_recomputed_in_its_order(attend, first, second):
    """It computes a whole backward of the second run, which the first one's gradient would enter in
    the wrong order. The schedule may change."""

    def body(mesh):
        own = leaves(mesh)
        with enabled("ring", first):
            for _ in range(2):  # the second one repeats a known call
                outs = [checkpoint(attend, *own, use_reentrant=True) for _ in range(2)]
        if first == second:
            with enabled("gather", None if first is None else head_tail()):
                outs[0].sum().backward()
        else:
            with around(second), refused():
                outs[0].sum().backward()
        with enabled(layout=first):
            for x in own:
                x.grad = None
            outs[1].sum().backward()
            got = [x.grad for x in own if x.grad is not None]
            want = torch.autograd.grad(attend(*own).sum(), own[: len(got)])
        for one, true in zip(got, want, strict=True):
            torch.testing.assert_close(one.full_tensor(), true.full_tensor())

    on_ranks(body)


def test_where_the_order_does_not_matter_any_layout_will_do():
    """Neither does that of functions without attention."""

    def body(mesh):
        own = leaves(mesh)
        for function in (F.scaled_dot_product_attention, torch.sin):
            inputs = own if function is not torch.sin else own[:1]
            with enabled(layout=head_tail()):
                want = torch.autograd.grad(function(*inputs).square().sum(), inputs)
                out = checkpoint(function, *inputs, use_reentrant=True)
            for x in own:
                x.grad = None
            with enabled():
                out.square().sum().backward()
            for x, true in zip(inputs, want, strict=True):
                torch.testing.assert_close(x.grad.full_tensor(), true.full_tensor())

    on_ranks(body)


def attention_of_constants(query, *_):
    """Autograd saves nothing of it."""
    constant = query.detach()
    return causal(constant, constant, constant) * query.sin()


def attention_with_copies(query, key, value):
    """Autograd has copies of what it saves of attention, but not of what it saves of the sine."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out = causal(query, key, value)
    return out.sin()


@pytest.mark.parametrize("function", [attention_of_constants, attention_with_copies])
def test_what_autograd_saves_need_not_reveal_the_order(function):
    def body(mesh):
        query, *keys = leaves(mesh)
        with enabled(layout=head_tail()):
            out, again = (checkpoint(function, query, *keys, use_reentrant=False) for _ in "ab")
        with enabled(), refused():
            out.sum().backward()
        with enabled("gather", head_tail()):
            (got,) = torch.autograd.grad(again.sum(), query)
            (want,) = torch.autograd.grad(function(query, *keys).sum(), query)
        torch.testing.assert_close(got.full_tensor(), want.full_tensor())

    on_ranks(body)


def test_what_a_selective_checkpoint_saves_is_not_recomputed():
    """So the layout of the backward does not matter."""
    save = functools.partial(create_selective_checkpoint_contexts, cp_dispatch.ops_to_save())

    def attend(query, *keys):
        return causal(query.sin(), *keys).sin()

    def body(mesh):
        own = leaves(mesh)
        with enabled(layout=head_tail()):
            want = torch.autograd.grad(attend(*own).sum(), own)
            out = checkpoint(attend, *own, use_reentrant=False, context_fn=save)
        with enabled():
            got = torch.autograd.grad(out.sum(), own)
        for one, true in zip(got, want, strict=True):
            torch.testing.assert_close(one.full_tensor(), true.full_tensor())

    on_ranks(body)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_scope_inside_the_function_is_its_own(reentrant):
    """The function enters it again; what is around does not matter to it, only to other calls."""

    def alone(query, *keys):
        with enabled(layout=head_tail()):
            return causal(query, *keys).sin()

    def both(query, *keys):
        return causal(alone(query, *keys), *keys)

    def body(mesh):
        own = leaves(mesh)
        for function in (alone, both):
            with enabled():
                want = torch.autograd.grad(function(*own).sum(), own)
                outs = [checkpoint(function, *own, use_reentrant=reentrant) for _ in range(3)]
            for second in (None, head_tail(), "off"):
                for x in own:
                    x.grad = None
                if function is both and second == head_tail():
                    with enabled(layout=second), refused():
                        outs.pop().sum().backward()
                    continue
                if function is both and second == "off":
                    continue  # torch's own
                with around(second):
                    outs.pop().sum().backward()
                for x, true in zip(own, want, strict=True):
                    torch.testing.assert_close(x.grad.full_tensor(), true.full_tensor())

    on_ranks(body)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_checkpoints_in_checkpoints(depth):
    """Of both kinds."""

    def body(mesh):
        own = leaves(mesh)
        for start in (True, False):
            function = causal
            for level in range(depth):
                function = functools.partial(
                    checkpoint, function, use_reentrant=bool((start + level) % 2)
                )
            with enabled(layout=head_tail()):
                want = torch.autograd.grad(causal(*own).sum(), own)
                out, again = (function(*own).sum() for _ in range(2))
            with enabled(), refused():
                out.backward()
            for x in own:
                x.grad = None
            with enabled(layout=head_tail()):
                again.backward()
            for x, true in zip(own, want, strict=True):
                torch.testing.assert_close(x.grad.full_tensor(), true.full_tensor())
        assert not (checkpoints._thread.first or checkpoints._thread.second)

    on_ranks(body)


def test_checkpoints_are_forgotten_when_their_first_run_ends():
    """Also if there is no attention that would ask for them."""
    x = torch.ones(2, requires_grad=True)
    with enabled():
        for _ in range(5):
            checkpoint(torch.sin, x, use_reentrant=False)
    assert len(checkpoints._thread.frames) <= 1


@pytest.fixture
def _compiled_anew():
    torch._dynamo.reset()
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests


@pytest.mark.usefixtures("_compiled_anew")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("attend", [causal, flex], ids=["sdpa", "flex"])
def test_compiled_graphs_on_dtensors(attend, reentrant):
    compiled = torch.compile(attend, backend="aot_eager")
    with fake_ranks(2) as mesh:
        own = leaves(mesh)
        for second in (None, head_tail()):
            with enabled(layout=head_tail()):
                out = checkpoint(compiled, *own, use_reentrant=reentrant)
            with enabled(layout=second), refused() if second is None else contextlib.nullcontext():
                out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_may_run_in_other_orders_meanwhile(reentrant):
    """As in a pipeline whose batches have their own layouts."""

    def body(mesh):
        module = parallelize_module(Causal(), mesh, ContextParallel(balancer="auto"))
        own = [x.to_local().detach().requires_grad_() for x in leaves(mesh)]
        outs, wants = [], []
        for layout in (head_tail(), None):
            with enabled(layout=layout):
                outs += [checkpoint(module, *own, use_reentrant=reentrant) for _ in range(2)]
                wants.append(torch.autograd.grad(module(*own).sum(), own))
        for layout, want in ((head_tail(), wants[0]), (None, wants[1])):
            for x in own:
                x.grad = None
            with enabled(layout=layout):
                outs.pop(0).sum().backward()
            for x, true in zip(own, want, strict=True):
                torch.testing.assert_close(x.grad, true)
            with enabled(layout=None if layout else head_tail()):
                with pytest.raises(ContextParallelError, match="order"):
                    outs.pop(0).sum().backward()

    on_ranks(body)


def in_own_block(mesh, layout, *own):
    with context_parallel(mesh, balancer=layout):
        return causal(*own)


def test_the_order_of_a_block_inside_is_not_that_around():
    """Nor may the order around be it."""

    def both(mesh, query, *own):
        return causal(query, query, query).to_local() + in_own_block(mesh, None, *own)

    def body(mesh):
        query, *_ = leaves(mesh)
        own = [x.to_local().detach().requires_grad_() for x in leaves(mesh)]
        with enabled(layout=head_tail()):
            out = checkpoint(both, mesh, query, *own, use_reentrant=True)
        with enabled(), refused():
            out.sum().backward()

    on_ranks(body)


def test_a_block_inside_does_not_depend_on_the_order_around():
    def body(mesh):
        own = [x.to_local().detach().requires_grad_() for x in leaves(mesh)]
        with enabled(layout=head_tail()):
            want = torch.autograd.grad(in_own_block(mesh, head_tail(), *own).sum(), own)
            out = checkpoint(in_own_block, mesh, head_tail(), *own, use_reentrant=True)
        with around("off"):
            out.sum().backward()
        for x, true in zip(own, want, strict=True):
            torch.testing.assert_close(x.grad, true)

    on_ranks(body)


def test_what_ran_outside_a_block_is_not_recomputed_inside():
    """Where its plain tensors would be shards. Without causal masks, gradients are right in sum."""

    def both(mesh, attend, *own):
        return attend(*own) + in_own_block(mesh, None, *own)

    def body(mesh):
        own = [x.to_local().detach().requires_grad_() for x in leaves(mesh)]
        with enabled():
            outs = [
                checkpoint(both, mesh, attend, *own, use_reentrant=True)
                for attend in (causal, F.scaled_dot_product_attention)
            ]
        with context_parallel(mesh, balancer=None):
            with pytest.raises(ContextParallelError, match="outside the context_parallel block"):
                outs[0].sum().backward()
            outs[1].sum().backward()

    on_ranks(body)


class Attend(torch.nn.Module):
    def forward(self, query, key, value):
        return flex_attention(query, key, value)


class Causal(torch.nn.Module):
    def forward(self, query, key, value):
        return causal(query, key, value)


@pytest.mark.usefixtures("_compiled_anew")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["sdpa", "flex"])
@pytest.mark.parametrize("order", ["auto", head_tail()], ids=["auto", "own"])
def test_compiled_modules_that_take_their_order_from_their_surroundings(kind, order, reentrant):
    """From a scope, or from a block, in which flex_attention needs inductor."""
    with fake_ranks(2) as mesh, gradients_on_cpu():
        module = {"sdpa": Causal, "flex": Attend}[kind]()
        style = ContextParallel(attention_type=kind, balancer=order)
        module = torch.compile(parallelize_module(module, mesh, style), backend="aot_eager")
        x = torch.ones(1, 2, LENGTH // 2, 8, requires_grad=True)
        block = functools.partial(enabled, layout=head_tail())
        if kind == "sdpa":
            block = functools.partial(context_parallel, mesh, balancer="head-tail")
        with block():
            out, again = (checkpoint(module, x, x, x, use_reentrant=reentrant) for _ in "ab")
        with enabled(), refused() if order == "auto" else contextlib.nullcontext():
            out.sum().backward()
        with block():
            again.sum().backward()
