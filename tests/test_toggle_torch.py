"""What the toggle changes in torch besides the override, and restores: the tag of compile caches,
and the dispatch of causal biases."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._guards import TracingContext, tracing
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import bias as torch_bias
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import CheckpointFunction

from cp_dispatch import context_parallel, disable, enable, enabled, explain
from cp_dispatch.graphs import compile_cache
from tests.ranks import one_rank

# A tag from before, as a user may have set one.
TAGS = ["", "mine", "mine|other"]


def tag() -> str:
    return torch.compiler.config.cache_key_tag


@pytest.fixture(params=TAGS)
def before(request):
    old = tag()
    torch.compiler.config.cache_key_tag = request.param
    yield request.param
    disable()
    torch.compiler.config.cache_key_tag = old


def test_disable_restores_the_tag_exactly(before):
    for switch in (enable, lambda: enable(schedule="ring")):
        switch()
        assert tag() != before and tag().startswith(before)
        disable()
        assert tag() == before
    with enabled(), enabled(schedule="ring"):
        assert tag() != before
    assert tag() == before
    disable()
    assert tag() == before


def test_the_tag_tells_the_options_apart(before):
    tags = {before}
    for schedule in ("auto", "ring"):
        with enabled(schedule=schedule):
            own = tag()
            assert own not in tags
            tags.add(own)
            with enabled(schedule="auto"):
                pass
            assert tag() == own
        with enabled(schedule=schedule):
            assert tag() == own  # the same options, the same caches
        enable(schedule=schedule)
        assert tag() == own
        disable()


def test_enabling_twice_does_not_lengthen_the_tag(before):
    enable()
    once = tag()
    enable()
    assert tag() == once
    with enabled():
        assert tag() == once


def test_what_others_put_into_the_tag_meanwhile_stays(before):
    with enabled():
        own = tag()[len(before) :]
        torch.compiler.config.cache_key_tag = "theirs" + own
    assert tag() == "theirs"


def test_an_exception_restores_the_tag(before):
    with pytest.raises(KeyError), enabled():
        raise KeyError
    assert tag() == before


def test_the_tag_tells_which_group_a_trace_uses(before, monkeypatch):
    """Not only the groups that the process has used. Otherwise a process that meets them in another
    order would take the graph of the first for the second."""

    def tags(names):
        monkeypatch.setattr(compile_cache, "_groups", set())
        found = {}
        for name in names:
            with tracing(TracingContext(None)):
                for _ in range(2):
                    compile_cache.note_group(name, "state")
                    assert tag() not in found.values()
                found[name] = tag()
        return found

    with one_rank(), enabled():
        names = [dist.group.WORLD.group_name, dist.new_group([0]).group_name]
        first, again, other_way = tags(names), tags(names), tags(names[::-1])
        assert first == again and not {*first.values()} & {*other_way.values()}


def test_the_tag_tells_what_kernels_and_schedules_are_chosen_by(before, monkeypatch):
    """Torch's kernel switches, and the measured constants."""

    def own() -> str:
        compile_cache.tag("state")
        return tag()

    with enabled():
        plain = own()
        with sdpa_kernel(SDPBackend.MATH):
            only_math = own()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(compile_cache, "constants_here", lambda device_type: "measured")
        assert len({plain, only_math, own()}) == 3


def test_the_tag_of_a_trace_is_none_of_the_next_one():
    """The next trace's plain call is left to torch, as another thread's is while this one is in a
    block."""
    tags = []

    def backend(graph, _):  # the cache keys are computed where this is called
        tags.append(tag())
        return graph

    with one_rank() as mesh, enabled():
        plain = torch.randn(1, 2, 8, 4)
        sharded = DTensor.from_local(plain, mesh, [Shard(2)])
        for x in (sharded, plain, sharded, plain):
            torch._dynamo.reset()
            torch.compile(F.scaled_dot_product_attention, backend=backend)(x, x, x)
    assert tags[:2] == tags[2:] and tags[0] != tags[1]


def test_causal_biases_are_dispatched_by_torch_again_afterwards():
    before = torch_bias.CausalBias.__dict__["_dispatch"]
    for _ in range(2):
        with enabled(), enabled(schedule="ring"):
            assert torch_bias.CausalBias.__dict__["_dispatch"] is not before
        assert torch_bias.CausalBias.__dict__["_dispatch"] is before


def test_a_dispatch_that_somebody_else_put_there_meanwhile_stays(monkeypatch):
    def other(*args, **kwargs):
        return "theirs"

    before = torch_bias.CausalBias.__dict__["_dispatch"]
    try:
        with enabled():
            torch_bias.CausalBias._dispatch = staticmethod(other)
        assert torch_bias.CausalBias._dispatch is other
    finally:
        torch_bias.CausalBias._dispatch = before


@pytest.mark.filterwarnings("ignore:Lower right causal bias")  # torch's own
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_plain_tensors_and_of_dtensors(kind, lengths, grad):
    rows, keys = lengths
    plain = [torch.randn(1, 2, n, 4).double().requires_grad_(grad) for n in (rows, keys, keys)]
    bias = kind(rows, keys)
    expected = F.scaled_dot_product_attention(*plain, attn_mask=bias)
    with one_rank() as mesh, enabled():
        assert torch.equal(F.scaled_dot_product_attention(*plain, attn_mask=bias), expected)
        tensors = [
            DTensor.from_local(x.detach(), mesh, [Shard(2)]).requires_grad_(grad) for x in plain
        ]
        plan = explain(*tensors, attn_mask=bias)
        assert plan.handler == "cp_dispatch" and plan.schedule == "ring"
        out = F.scaled_dot_product_attention(*tensors, attn_mask=bias)
        assert out.placements == (Shard(2),)
        # Rows that see no key at all are zeros. A lower-right bias with more rows than keys has
        # such rows.
        blind = max(rows - keys, 0) if kind is causal_lower_right else 0
        assert (out.to_local()[:, :, :blind] == 0).all()
        torch.testing.assert_close(out.to_local(), expected)
        if grad:
            wanted = torch.autograd.grad(expected.square().sum(), plain)
            got = torch.autograd.grad(out.square().sum(), tensors)
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine.to_local(), theirs)


@pytest.mark.parametrize(
    "taken",
    ["aten::scaled_dot_product_attention", "aten::index.Tensor", "torch_attn::_varlen_attn"],
)
def test_what_cannot_be_installed_leaves_nothing_behind(monkeypatch, taken):
    """For example if other code has registered a rule for DTensors there. A second attempt must
    fail too."""
    register = torch.library.register_torch_dispatch

    def registered(name, *args, **kwargs):
        if name == taken:
            raise RuntimeError("taken")
        return register(name, *args, **kwargs)

    def state():
        ops = "aten::scaled_dot_product_attention", "torch_attn::_varlen_attn"
        dumps = [torch._C._dispatch_dump(op) for op in ops]
        return *dumps, CheckpointFunction.__dict__["forward"], tag()

    disable()
    before = state()
    monkeypatch.setattr(torch.library, "register_torch_dispatch", registered)
    with one_rank() as mesh:
        for block in (enabled(), context_parallel(mesh, balancer=None), enabled()):
            with pytest.raises(RuntimeError, match="taken"), block:
                pass
            assert state() == before
