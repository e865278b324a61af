"""enable(), disable(), enabled(): whose options apply where, and to what."""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_before_enable

import cp_dispatch
from cp_dispatch import (
    ContextParallelError,
    disable,
    enable,
    enabled,
    is_enabled,
    override,
    toggle,
)
from cp_dispatch.options import Options
from tests.ranks import one_rank

RING, AUTO = Options("ring"), Options("auto")


def current():
    return toggle.current_options()


@pytest.fixture
def off():
    """Turn the process-wide switch off afterwards, whatever a test did to it."""
    yield
    disable()


@pytest.fixture
def mesh():
    with one_rank() as mesh:
        yield mesh


def sharded(mesh, requires_grad=False):
    return [
        DTensor.from_local(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]).requires_grad_(requires_grad)
        for _ in range(3)
    ]


def test_off_at_import():
    assert not is_enabled() and current() is None and not toggle._installed


def test_enable_is_idempotent_and_one_disable_undoes_it(off):
    for _ in range(3):
        enable()
        assert is_enabled() and current() == AUTO and len(toggle._installed) == 1
    enable(schedule="ring")
    assert current() == RING and len(toggle._installed) == 1
    disable()
    assert not is_enabled() and not toggle._installed
    disable()
    assert not is_enabled()


def test_scopes_nest_and_restore_the_outer_options(off):
    with enabled(schedule="ring"):
        assert current() == RING
        with enabled():
            assert current() == AUTO
            with enabled(schedule="ring"):
                assert current() == RING
            assert current() == AUTO
        assert current() == RING
    assert not is_enabled() and not toggle._installed


def test_a_scope_restores_what_enable_set_before_it(off):
    enable(schedule="ring")
    with enabled():
        assert current() == AUTO
    assert current() == RING


def test_enable_and_disable_inside_a_scope_hold_until_its_end(off):
    with enabled():
        disable()
        assert not is_enabled()
        with enabled():
            assert is_enabled()
        assert not is_enabled()
        enable(schedule="ring")
        assert current() == RING
    assert not is_enabled()

    enable()
    with enabled(schedule="ring"):
        disable()
        assert not is_enabled()
    assert current() == AUTO


def test_an_exception_leaves_the_scope(off):
    with enabled(), pytest.raises(KeyError), enabled(schedule="ring"):
        raise KeyError
    with pytest.raises(KeyError), enabled(), enabled(schedule="ring"):
        raise KeyError
    assert not is_enabled() and not toggle._installed


def test_scopes_do_not_show_warnings_again():
    with enabled():
        pass
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            with enabled():
                warnings.warn("said once for each line", stacklevel=1)
    assert len(shown) == 1


def test_decorator():
    @enabled(schedule="ring")
    def inside(depth, fail=False):
        assert current() == RING
        if depth:
            inside(depth - 1)
            assert current() == RING
        if fail:
            raise KeyError
        return depth

    # A generator-based context manager that is used up by the first call would fail in the next.
    assert inside(0) == 0 and inside(2) == 2
    with pytest.raises(KeyError):
        inside(1, fail=True)
    assert not is_enabled()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [imported_before_enable, F.scaled_dot_product_attention])
def test_a_dtensor_call_is_taken_however_the_function_was_imported(mesh, function, mode):
    query, key, value = sharded(mesh)
    expected = F.scaled_dot_product_attention(*(x.to_local() for x in (query, key, value)))
    with enabled(), mode():
        with mock.patch.object(override, "attend", wraps=override.attend) as attend:
            out = function(query, key, value)
        assert attend.call_count == 1
    assert out.placements == (Shard(2),) and torch.equal(out.to_local(), expected)


@pytest.mark.parametrize("schedule", ["auto", "ring"])
def test_a_call_sees_the_options_of_its_scope(mesh, schedule):
    with mock.patch.object(override, "attend", wraps=override.attend) as attend:
        with enabled(), enabled(schedule=schedule):
            F.scaled_dot_product_attention(*sharded(mesh))
            disable()
            assert attend.call_count == 1
            assert cp_dispatch.explain(*sharded(mesh)).handler == "stock"
    assert attend.call_args.args[0] == Options(schedule)


def test_backward_needs_no_scope(mesh):
    """A loss computed inside the scope may be differentiated outside it, on autograd's thread."""
    tensors = sharded(mesh, requires_grad=True)
    plain = [x.detach().to_local().requires_grad_() for x in tensors]
    F.scaled_dot_product_attention(*plain, is_causal=True).square().sum().backward()
    with enabled():
        loss = F.scaled_dot_product_attention(*tensors, is_causal=True).square().sum()
    loss.backward()
    for mine, theirs in zip(tensors, plain, strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad)


@pytest.mark.parametrize("switch", [enable, lambda **options: enabled(**options).__enter__()])
def test_a_wrong_option_names_the_choices_and_changes_nothing(switch):
    for schedule in ("rings", "", None, 3):
        with pytest.raises(ContextParallelError) as raised:
            switch(schedule=schedule)
        assert "schedule" in str(raised.value) and repr(schedule) in str(raised.value)
        assert "'auto'" in str(raised.value) and "'ring'" in str(raised.value)
    with pytest.raises(ContextParallelError, match="layout.*None.*natural order.*'zigzag'"):
        switch(layout="zigzag")
    assert not is_enabled() and not toggle._installed


@pytest.mark.parametrize("part, inside", [
    ("flex", False), ("varlen", False), ("checkpoints", False), ("hf_masks", False),
    ("hf_masks", True),
])  # fmt: skip
def test_an_installation_that_fails_is_undone(mesh, part, inside):
    """So the next one works, and until then calls are torch's; also inside a scope."""
    of_blocks = part == "hf_masks"
    x = torch.randn(1, 1, 8, 4)
    want = imported_before_enable(x, x, x, is_causal=True)

    def switch():
        return cp_dispatch.context_parallel(mesh) if of_blocks else enabled("ring")

    with enabled("gather") if inside else contextlib.nullcontext():
        before = current()
        with mock.patch.object(getattr(toggle, part), "install", side_effect=KeyError("no")):
            for _ in range(2):
                with pytest.raises(KeyError), switch():
                    pass
        assert current() == before and toggle.plain_context() is None
        installed = bool(toggle._installed), bool(toggle.flex._replaced), is_enabled()
        assert installed == (before is not None,) * 3
        assert torch.equal(imported_before_enable(x, x, x, is_causal=True), want)
        with switch():
            assert toggle._installed
        assert current() == before
    assert not toggle._installed


@pytest.mark.parametrize("switch", [enable, lambda: enabled().__enter__()])
def test_torchs_own_context_parallel_dispatcher_is_refused(switch):
    torch_cp._enable_context_parallel_dispatcher()
    try:
        with pytest.raises(ContextParallelError) as raised:
            switch()
        assert not is_enabled() and not toggle._installed
    finally:
        torch_cp._disable_context_parallel_dispatcher()
    message = str(raised.value)
    assert "torch" in message and "_disable_context_parallel_dispatcher" in message
    assert hasattr(torch_cp, "_disable_context_parallel_dispatcher")  # the name in the message
    with enabled():
        assert is_enabled()


@pytest.mark.parametrize("inference", [False, True])
def test_calls_inside_torchs_own_context_parallel_are_refused(mesh, inference):
    """Its DTensors contain shards in head-tail order without saying so."""
    query = DTensor.from_local(torch.randn(1, 2, 8, 8), mesh, [Shard(2)])
    with enabled(), torch.inference_mode(inference):
        torch_cp._enable_context_parallel_dispatcher()
        try:
            with pytest.raises(ContextParallelError, match="use cp_dispatch.context_parallel"):
                F.scaled_dot_product_attention(query, query, query)
        finally:
            torch_cp._disable_context_parallel_dispatcher()


@pytest.mark.parametrize("bias", [causal_upper_left(8, 8), causal_lower_right(8, 8)], ids=str)
def test_a_causal_bias_beside_is_causal_raises_as_in_torch(mesh, bias):
    for on in (False, True):
        with enabled() if on else contextlib.nullcontext():
            for x in (sharded(mesh)[0], torch.randn(1, 2, 8, 4)):
                with pytest.raises(ValueError, match="should not be used with causal=True"):
                    F.scaled_dot_product_attention(x, x, x, attn_mask=bias, is_causal=True)


def test_torch_func_transforms_of_dtensors_are_refused(mesh):
    """Their wrappers hide the DTensor. A computation on its shard alone would be wrong."""
    query, key, value = sharded(mesh)

    def loss(query):
        return F.scaled_dot_product_attention(query, key, value).sum()

    with enabled(), pytest.raises(ContextParallelError, match="torch.func.*autograd.*disable"):
        torch.func.grad(loss)(query)


def test_transforms_of_what_stands_beside_dtensors_are_refused(mesh):
    query, key, value = sharded(mesh)
    length = query.shape[2]
    masks, stacked = torch.ones(3, length, length, dtype=torch.bool), torch.randn(3, *query.shape)

    def masked(mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def plain(query):
        return F.scaled_dot_product_attention(query, key, value)

    with enabled():
        for function, given in ((masked, masks), (plain, stacked)):
            with pytest.raises(ContextParallelError, match="torch.func.*autograd.*disable"):
                torch.vmap(function)(given)


def test_vmap_of_dtensors_is_refused_and_of_plain_tensors_torchs(mesh):
    """Also if tensors are stacked outside, because vmap decomposes the function before all keys."""
    plain = torch.randn(3, 2, 2, 8, 4)
    query = distribute_tensor(plain, mesh, [Shard(3)])

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    want = torch.vmap(attend)(plain)
    with enabled():
        with pytest.raises(ContextParallelError, match="torch.func"):
            torch.vmap(attend)(query)
        one = distribute_tensor(plain[0], mesh, [Shard(2)])  # torch searched for a rule for minutes
        with pytest.raises(ContextParallelError, match="torch.func"):
            torch.vmap(lambda x: attend(one).to_local() + x)(torch.ones(3, 1))
        assert torch.equal(torch.vmap(attend)(plain), want)
    assert torch.equal(torch.vmap(attend)(plain), want)
