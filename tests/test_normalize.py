"""Calls of any rank as 4-D calls, and back."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from cp_dispatch import ContextParallelError, enabled, explain
from cp_dispatch.call import Call
from cp_dispatch.normalize import autocast, four_dims, like_query, without_causal_bias
from tests.ranks import fake_ranks, one_rank, outline

ROWS, KEYS, DIM = 5, 7, 8
# Everything before the last two dims of query, and the equivalent in four dims.
LEADING = {
    (): (1, 1),
    (3,): (3, 1),
    (2, 4): (2, 4),
    (2, 3, 4): (6, 4),
    (2, 1, 3, 4): (6, 4),
}
# Query's leading dims, a mask's leading dims, and the mask's equivalent in four dims.
MASKS = [
    ((), (), (1, 1)),
    ((3,), (), (1, 1)),
    ((3,), (3,), (3, 1)),
    ((3,), (1,), (1, 1)),
    ((2, 4), (), (1, 1)),
    ((2, 4), (4,), (1, 4)),
    ((2, 4), (1,), (1, 1)),
    ((2, 4), (2, 4), (2, 4)),
    ((2, 4), (2, 1), (2, 1)),
    ((2, 4), (1, 4), (1, 4)),
    ((2, 3, 4), (), (1, 1)),
    ((2, 3, 4), (4,), (1, 4)),
    ((2, 3, 4), (1,), (1, 1)),
    ((2, 3, 4), (1, 4), (1, 4)),
    ((2, 3, 4), (1, 1, 4), (1, 4)),
    ((2, 3, 4), (2, 3, 4), (6, 4)),
    ((2, 3, 4), (2, 3, 1), (6, 1)),
    ((2, 1, 3, 4), (1, 1, 1, 4), (1, 4)),
    ((2, 1, 3, 4), (2, 1, 3, 1), (6, 1)),
]
# Masks that are broadcast over some batch dims and not over others: in four dims these are not
# views.
COPIED = [
    ((2, 3, 4), (3, 4), (6, 4)),
    ((2, 3, 4), (1, 3, 4), (6, 4)),
    ((2, 3, 4), (2, 1, 4), (6, 4)),
    ((2, 1, 3, 4), (1, 3, 1), (6, 1)),
]
# Masks that torch refuses as well.
UNFIT = [
    ((2, 4), (), ()),
    ((), (1,), (ROWS, KEYS)),
    ((3,), (1, 3), (ROWS, KEYS)),
    ((2, 4), (1, 2, 4), (ROWS, KEYS)),
    ((2, 3, 4), (2, 4), (ROWS, KEYS)),
    ((2, 3, 4), (3, 3, 4), (ROWS, KEYS)),
]
# How a mask may be broadcast over rows and keys.
LAST = [(ROWS, KEYS), (1, KEYS), (ROWS, 1), (1, 1)]


def call(leading, mask=None, dtype=torch.float64) -> Call:
    query, key, value = (torch.randn(*leading, n, DIM, dtype=dtype) for n in (ROWS, KEYS, KEYS))
    return Call(query, key, value, mask)


def call_like(given: Call, mask) -> Call:
    return Call(given.query, given.key, given.value, mask)


def attend(call: Call) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        call.query, call.key, call.value, call.attn_mask, scale=call.scale
    )


@pytest.mark.parametrize("leading, four", LEADING.items())
def test_the_4d_call_is_the_same_call(leading, four):
    given = call(leading)
    seen = four_dims(given)
    assert seen.query.shape == (*four, ROWS, DIM) and seen.key.shape == (*four, KEYS, DIM)
    for mine, theirs in zip(seen.tensors.values(), given.tensors.values(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()  # views
    out = like_query(attend(seen), given.query)
    assert out.shape == given.query.shape
    torch.testing.assert_close(out, attend(given))


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("leading, mask_leading, four", MASKS + COPIED)
def test_masks_broadcast_as_torch_broadcasts_them(leading, mask_leading, four, dtype, last):
    mask = torch.randn(*mask_leading, *last)
    mask = mask > -0.5 if dtype is torch.bool else mask.to(dtype)
    given = call(leading, mask)
    seen = four_dims(given)
    assert seen.attn_mask.shape == (*four, *last)
    copied = (leading, mask_leading, four) in COPIED
    assert copied or seen.attn_mask.data_ptr() == mask.data_ptr()
    assert all(x.ndim == 4 for x in seen.tensors.values())
    torch.testing.assert_close(like_query(attend(seen), given.query), attend(given))


@pytest.mark.parametrize("leading, four", LEADING.items())
def test_a_mask_of_keys_alone(leading, four):
    mask = torch.tensor([True, False] * KEYS)[:KEYS]
    given = call(leading, mask)
    seen = four_dims(given)
    assert seen.attn_mask.shape == (1, 1, 1, KEYS)
    wanted = attend(call_like(given, mask.expand(ROWS, KEYS)))
    torch.testing.assert_close(like_query(attend(seen), given.query), wanted)


def test_four_dims_already_are_left_as_they_are():
    for mask in (None, torch.ones(1, 1, ROWS, KEYS)):
        given = call((2, 4), mask)
        assert four_dims(given) is given
    out = torch.ones(2, 4, ROWS, DIM)
    assert like_query(out, given.query) is out


def test_nothing_else_of_a_call_changes():
    query, key, value = call((3,)).tensors.values()
    seen = four_dims(Call(query, key, value, None, 0.25, True, 0.5, True))
    assert (seen.dropout_p, seen.is_causal, seen.scale, seen.enable_gqa) == (0.25, True, 0.5, True)


@pytest.mark.parametrize("leading, mask_leading, last", UNFIT)
def test_a_mask_that_does_not_fit_leaves_the_call_unchanged(leading, mask_leading, last):
    given = call(leading, torch.ones((*mask_leading, *last)))
    assert four_dims(given) is given


def test_tensors_of_different_ranks_are_left_as_they_are():
    three, four = call((3,)), call((3, 1))
    for given in (
        Call(three.query, four.key, four.value),
        Call(four.query, three.key, four.value),
        Call(four.query, four.key, three.value),
        Call(torch.ones(3), torch.ones(3), torch.ones(3)),
    ):
        assert four_dims(given) is given


def test_a_mask_that_is_no_tensor_is_refused_in_any_rank():
    with fake_ranks(4) as mesh, enabled():
        for shape in ((2, 4, 64, 16), (2, 64, 16)):
            plan = explain(*[outline(mesh, shape, (Shard(len(shape) - 2),))] * 3, attn_mask=[[1]])
            assert plan.handler == "refused" and "attn_mask is a list" in str(plan)


def test_what_torch_lets_through_to_explain_alone():
    """Arguments that are not tensors; and shards without data, of a model that is planned before it
    is created."""
    with fake_ranks(4) as mesh, enabled():
        query = outline(mesh, (2, 4, 64, 16))
        assert "key is a NoneType but other arguments" in str(explain(query, None, query))
        empty = DTensor.from_local(torch.empty(2, 4, 16, 16, device="meta"), mesh, [Shard(2)])
        assert explain(empty, empty, empty).schedule == "ring"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_batch_dim_that_does_not_survive_is_refused_in_every_mode(mode):
    """In inference mode DTensor's own flatten would gather it."""
    with fake_ranks(4) as mesh, enabled(), mode():
        tensors = [outline(mesh, (2, 4, 8, 64, 16), (Shard(1),))] * 3
        with pytest.raises(ContextParallelError, match="that DTensor can flatten"):
            F.scaled_dot_product_attention(*tensors)


@pytest.mark.parametrize("placed", [Shard(1), Shard(3)])
def test_reasons_know_what_was_given(placed):
    """Not _StridedShard, to which torch 2.13 flattens it, nor a different dim as the sequence."""
    with fake_ranks(2) as mesh, enabled():
        odd = outline(mesh, (4, 4, 2, 64, 16), (Shard(1),))
        plan = explain(odd, *[outline(mesh, (4, 4, 2, 64, 16), (placed,))] * 2)
    assert plan.handler == "refused" and len(plan.reasons) == 3
    assert all("that DTensor can flatten" in reason for reason in plan.reasons)


@pytest.mark.parametrize("mask_leading", [None, (), (4,), (1,)])
@pytest.mark.parametrize("key_heads", [2, 1])
def test_three_dims_whose_first_differ_are_grouped_heads(mesh, key_heads, mask_leading):
    query = torch.randn(4, ROWS, DIM).double().requires_grad_()
    key, value = (torch.randn(key_heads, KEYS, DIM).double().requires_grad_() for _ in range(2))
    mask = None if mask_leading is None else torch.randn(*mask_leading, ROWS, KEYS).double()
    plain = query, key, value

    def attend(*tensors):
        return F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)

    expected = attend(*plain)
    tensors = [on_mesh(mesh, x.detach()).requires_grad_() for x in plain]
    with enabled():
        out = attend(*tensors)
    assert out.placements == tensors[0].placements
    torch.testing.assert_close(out.to_local(), expected)
    grads = torch.autograd.grad(out, tensors, on_mesh(mesh, torch.ones_like(expected)))
    wanted = torch.autograd.grad(expected, plain, torch.ones_like(expected))
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine.to_local(), theirs)


def test_no_memory_for_a_copy_is_no_shape_that_does_not_fit(monkeypatch):
    def flatten(*_):
        raise torch.OutOfMemoryError

    x = torch.zeros(2, 3, 4, ROWS, DIM)
    monkeypatch.setattr(torch.Tensor, "flatten", flatten)
    with pytest.raises(torch.OutOfMemoryError):
        four_dims(Call(x, x, x))


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_one_length_are_plain_causal_calls(bias):
    """They need no mask, and can use kernels and schedules that do not support masks."""
    plain = without_causal_bias(call_like(call((2, 4)), bias(ROWS, ROWS)))
    assert plain.attn_mask is None and plain.is_causal


def test_what_autocast_leaves_as_it_is():
    kept = [torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.bool)]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(autocast(x) is x for x in (*kept, None, causal_lower_right(ROWS, KEYS)))
        assert autocast(torch.ones(2)).dtype is torch.bfloat16


@pytest.fixture
def mesh():
    with one_rank() as mesh:
        yield mesh


def on_mesh(mesh, tensor, dim=-2):
    placement = Replicate() if dim is None else Shard(dim % tensor.ndim)
    return DTensor.from_local(tensor, mesh, [placement])


@pytest.mark.parametrize("leading, mask_leading, last", UNFIT)
def test_what_cannot_be_seen_in_four_dims_is_refused_for_its_shape(
    mesh, leading, mask_leading, last
):
    given = call(leading, torch.ones((*mask_leading, *last), dtype=torch.float64))
    tensors = [on_mesh(mesh, x) for x in given.tensors.values()]
    with enabled():
        plan = explain(*tensors, attn_mask=given.attn_mask)
        with pytest.raises(ContextParallelError) as raised:
            F.scaled_dot_product_attention(*tensors, attn_mask=given.attn_mask)
    assert plan.handler == "refused" and str(raised.value) == str(plan)
    wanted = ("does not broadcast", "must have shape [B, H, S, D]")
    assert any(part in reason for reason in plan.reasons for part in wanted)


def test_different_ranks_are_refused_for_their_shapes(mesh):
    three, four = (
        [on_mesh(mesh, x) for x in call(leading).tensors.values()] for leading in ((3,), (3, 1))
    )
    for tensors in ((three[0], *four[1:]), (four[0], *three[1:]), (four[0], four[1], three[2])):
        with enabled(), pytest.raises(ContextParallelError, match=r"must have shape \[B, H, S, D"):
            F.scaled_dot_product_attention(*tensors)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "leading, mask_leading, _", [(x, None, None) for x in LEADING] + MASKS + COPIED
)
def test_dtensors_of_any_rank(mesh, leading, mask_leading, _, grad):
    """The line of code that a user writes, with the query's number of dims and placement in and
    out."""
    mask = None if mask_leading is None else torch.randn(*mask_leading, ROWS, KEYS).double()
    given = call(leading, mask)
    plain = [x.requires_grad_(grad) for x in given.tensors.values()]
    expected = attend(given)
    tensors = [on_mesh(mesh, x.detach()).requires_grad_(grad) for x in plain]
    with enabled():
        assert explain(*tensors, attn_mask=mask).schedule == "ring"
        out = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    assert out.shape == expected.shape and out.placements == tensors[0].placements
    torch.testing.assert_close(out.to_local(), expected)
    if grad:
        grad_output = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, plain, grad_output)
        grads = torch.autograd.grad(out, tensors, on_mesh(mesh, grad_output))
        for mine, theirs, tensor in zip(grads, wanted, tensors, strict=True):
            assert mine.placements == tensor.placements
            torch.testing.assert_close(mine.to_local(), theirs)
