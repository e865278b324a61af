"""A compiled graph never runs under a setting other than its own; see Note [Guards]."""

import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch import (
    HeadTail,
    context_parallel,
    disable,
    enable,
    enabled,
    override,
)
from cp_dispatch.plain_tensors import traced_style
from tests.ranks import one_rank, own_code_compiled


@pytest.fixture
def mesh():
    torch._dynamo.reset()
    with one_rank() as mesh:
        yield mesh
    disable()
    torch._dynamo.reset()


class Attention:
    """Compiled causal attention that counts compilations."""

    def __init__(self, mesh):
        self._counter = CompileCounterWithBackend("eager")
        self._compiled = torch.compile(self._attend, backend=self._counter, fullgraph=True)
        local = torch.randn(1, 2, 8, 4)
        self.sharded = DTensor.from_local(local, mesh, [Shard(2)])
        self.plain = local

    @staticmethod
    def _attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def compilations(self, x=None) -> int:
        """The number of compilations in one more call."""
        before = self._counter.frame_count
        got = self._compiled(self.sharded if x is None else x)
        want = self._attend(self.sharded if x is None else x)
        assert type(got) is type(want)
        return self._counter.frame_count - before


def test_each_setting_compiles_once(mesh):
    """Graphs coexist: a loop over scopes does not compile again."""
    attention = Attention(mesh)
    scopes = [
        enabled,
        lambda: enabled(schedule="ring"),
        lambda: enabled(layout=HeadTail(8, 1)),
    ]
    for expected in (1, 0, 0):
        for scope in scopes:
            with scope():
                assert attention.compilations() == expected


def test_equal_settings_share_a_graph(mesh):
    attention = Attention(mesh)
    with enabled(layout=HeadTail(8, 1)):
        assert attention.compilations() == 1
    enable(layout=HeadTail(8, 1))
    assert attention.compilations() == 0
    enable()
    assert attention.compilations() == 1


def test_off_and_on_again(mesh):
    """In both directions. Graphs from before the override was installed are not called while it
    is."""
    attention = Attention(mesh)
    for expected in (1, 0, 0):
        assert attention.compilations(attention.plain) == expected
        with context_parallel(mesh, balancer=None):
            assert attention.compilations(attention.plain) == expected
    with context_parallel(mesh, balancer="head-tail"):
        assert attention.compilations(attention.plain) == 1
    with context_parallel(mesh, balancer=None, schedule="ring"):
        assert attention.compilations(attention.plain) == 1
    assert attention.compilations(attention.plain) == 0


def test_a_disabled_scope_lets_no_ring_through(mesh):
    """With one rank on CPU, torch's own DTensor cannot run the call, so it must raise."""
    attention = Attention(mesh)
    enable()
    assert attention.compilations() == 1
    with enabled():
        disable()
        with mock.patch.object(attention, "_attend", lambda x: x):
            with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
                attention.compilations()
    assert attention.compilations() == 0
    disable()
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
        attention.compilations()


@pytest.mark.parametrize("inside", [nullcontext, torch.no_grad, torch.inference_mode])
def test_modes(mesh, inside):
    attention = Attention(mesh)
    with inside():
        for expected in (1, 0):
            with enabled():
                assert attention.compilations() == expected
            with enabled(schedule="ring"):
                assert attention.compilations() == expected


def test_other_functions_compile_at_most_once_a_side(mesh):
    """It is unknown which of the earlier graphs contain attention."""
    counter = CompileCounterWithBackend("eager")
    double = torch.compile(lambda x: x * 2, backend=counter)
    for _ in range(3):
        double(torch.ones(3))
        for schedule in ("auto", "ring"):
            with enabled(schedule=schedule):
                double(torch.ones(3))
    assert counter.frame_count == 2


def test_a_graph_asks_in_its_thread(mesh):
    """A scope of another thread does not affect this one, and vice versa."""
    attention = Attention(mesh)
    entered, done = threading.Event(), threading.Event()

    def other():
        with enabled(schedule="ring"):
            entered.set()
            done.wait(60)

    with enabled():
        assert attention.compilations() == 1
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(60)
        try:
            assert attention.compilations() == 0
        finally:
            done.set()
            thread.join()


def test_a_scope_in_a_compiled_function_breaks_the_graph_and_holds(mesh):
    attention = Attention(mesh)

    def function(x):
        with enabled(layout=HeadTail(8, 1)):
            y = attention._attend(x)
        return y + 1

    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(
            compiled(attention.sharded).to_local(), function(attention.sharded).to_local()
        )


def test_the_backward_may_run_outside(mesh):
    attention = Attention(mesh)
    # A shape that no other test uses. DTensor's caches hold meshes of earlier tests, which are
    # equal but not identical, and for which torch 2.13 cannot create a backward graph.
    x = DTensor.from_local(torch.randn(1, 2, 10, 4), mesh, [Shard(2)]).requires_grad_()
    compiled = torch.compile(attention._attend, backend="aot_eager", fullgraph=True)
    with enabled():
        output = compiled(x)
    (got,) = torch.autograd.grad(output.sum(), x)
    with enabled():
        (want,) = torch.autograd.grad(attention._attend(x).sum(), x)
    torch.testing.assert_close(got.to_local(), want.to_local())


def test_plain_calls_keep_their_gradients_afterwards(mesh):
    """Torch's Python dispatcher had cached the override's kernel, and lost the gradients."""

    def gradient():
        torch._dynamo.reset()
        x = torch.ones(1, 2, 8, 4, requires_grad=True)
        compiled = torch.compile(Attention._attend, backend="aot_eager", fullgraph=True)
        (grad,) = torch.autograd.grad(compiled(x).square().sum(), x)
        return grad

    want = gradient()
    for _ in range(2):
        with enabled():
            Attention(mesh).compilations()
            torch.testing.assert_close(gradient(), want)
        torch.testing.assert_close(gradient(), want)


def test_a_first_trace_without_the_override_does_not_hide_it(mesh):
    for _ in range(2):
        attention = Attention(mesh)
        attention.compilations(attention.plain)
        with enabled(), mock.patch.object(override, "attend", wraps=override.attend) as attend:
            assert attention.compilations() == 1
            assert attend.call_count >= 2  # the trace and the eager call


def test_after_a_reset(mesh):
    """Graphs compiled after a reset may have the numbers and addresses of earlier ones."""
    attention = Attention(mesh)
    for _ in range(4):
        torch._dynamo.reset()
        for expected in (1, 0):
            assert attention.compilations(attention.plain) == expected
            with context_parallel(mesh, balancer=None):
                assert attention.compilations(attention.plain) == expected


def test_backward_inside_a_compiled_function(mesh):
    """The functions of ours that torch calls there are not compiled, because dynamo does not
    support the versions of tensors that hooks keep. On DTensors:
    tests/distributed/test_compiled_spawned.py."""
    weight, x = torch.eye(4).requires_grad_(), torch.randn(1, 2, 8, 4)

    def step():
        y = (x * 2).sin() @ weight
        y.square().sum().backward()

    step()
    want, weight.grad = weight.grad, None
    torch._dynamo.reset()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        torch.compile(step, backend="aot_eager")()
    assert torch.equal(weight.grad, want) and not own_code_compiled()


def test_settings_inside_a_compiled_function(mesh):
    """Each causes a graph break. The code that turns settings on and off is not compiled: that took
    seconds, and was repeated at every step. Dynamo inspects generators, and compiles none."""
    x = torch.randn(1, 2, 8, 4)

    def block():
        with enabled("gather"):
            return x.sin()

    def plain_block():
        with context_parallel(mesh, buffers=[x.clone()], buffer_seq_dims=[2]):
            return x.sin()

    def process():
        enable("gather")
        y = x.sin()
        disable()
        return y

    for function in (block, plain_block, process):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(function, backend="eager")(), x.sin())
        names = {name.rsplit(":", 1)[-1] for name in own_code_compiled()}
        assert names <= {"context_parallel", "plain_shards", "no_fast_path", "swapped"}, names


def test_numbers_of_styles_tell_equal_words_apart():
    """The text for meshes [0, 1] and [0, 2] is the same."""

    class Mesh:
        def __repr__(self):
            return "mesh"

    known, (first, second) = {}, (Mesh(), Mesh())
    numbers = [traced_style.number_for(x, known) for x in (first, second, first)]
    assert numbers[0] == numbers[2] != numbers[1]
    assert [known[n] for n in numbers] == [first, second, first]
