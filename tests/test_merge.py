"""The merge against float64 attention over all keys, at infinities, and in every layout."""

import itertools

import pytest
import torch

from cp_dispatch.backends import BACKENDS
from cp_dispatch.merge import merge_eager, merge_partials
from tests.distributed.reference import FACTOR

INF = torch.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPE = (2, 3, 10, 8)  # (B, H, S, D)


def wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def partial(dtype=torch.float32, shape=SHAPE):
    """An output and a logsumexp as a kernel might give them."""
    out = torch.randn(shape).to(dtype)
    return out, 2 * torch.randn(shape[:3], dtype=wide(dtype))


def merged(out_a, lse_a, out_b, lse_b, dtype=None):
    """``merge_eager`` into new tensors."""
    out, lse = out_a.new_empty(out_a.shape, dtype=dtype or lse_a.dtype), torch.empty_like(lse_a)
    merge_eager(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def assert_as_good(got, exact, one_device):
    """As near to what is exact as one device, or as the exact answer rounded to the dtype."""
    error, *allowed = ((x.double() - exact).norm() for x in (got, one_device, exact.to(got.dtype)))
    assert error <= FACTOR * max(allowed)


def formula64(*partials):
    """Attention over the union of keys, in float64, by the definition of the logsumexp."""
    outs, lses = (torch.stack([x.double() for x in group]) for group in zip(*partials, strict=True))
    return (outs * lses.softmax(0).unsqueeze(-1)).sum(0), lses.logsumexp(0)


@pytest.mark.parametrize("cut", [1, 17, 64, 127])
def test_two_parts_of_the_keys_give_attention_over_all(cut):
    query, key, value = torch.randn(3, 2, 4, 128, 16).unbind(0)
    kernel = BACKENDS["math"].forward
    parts = [
        kernel(query, key[:, :, keys], value[:, :, keys], None, False, 0.25)
        for keys in (slice(0, cut), slice(cut, None))
    ]
    scores = 0.25 * query.double() @ key.double().mT
    exact = scores.softmax(-1) @ value.double(), scores.logsumexp(-1)
    whole = kernel(query, key, value, None, False, 0.25)
    for results in zip(merged(*parts[0], *parts[1]), exact, whole, strict=True):
        assert_as_good(*results)


def test_float64_stays_float64():
    a, b = partial(torch.float64), partial(torch.float64)
    got = merged(*a, *b)
    assert [x.dtype for x in got] == [torch.float64] * 2
    for x, exact in zip(got, formula64(a, b), strict=True):
        torch.testing.assert_close(x, exact)  # torch's default tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_partials_merge_in_float32_and_round_once(dtype):
    a, b = partial(dtype), partial(dtype)
    in_float32 = merged(*a, *b)
    for got, exact in zip(in_float32, formula64(a, b), strict=True):
        torch.testing.assert_close(got, exact.float())  # torch's default tolerance for float32
    rounded = merged(*a, *b, dtype=dtype)
    assert torch.equal(rounded[0], in_float32[0].to(dtype))
    assert torch.equal(rounded[1], in_float32[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_the_two_sides_does_not_matter(dtype):
    a, b = partial(dtype), partial(dtype)
    for one, other in zip(merged(*a, *b), merged(*b, *a), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [torch.nan, INF, -INF, 7.0])
def test_a_side_without_keys_has_no_say(dtype, garbage):
    out, lse = partial(dtype)
    nothing = torch.full_like(out, garbage), torch.full_like(lse, -INF)
    for pair in ((*nothing, out, lse), (out, lse, *nothing)):
        got, got_lse = merged(*pair, dtype=dtype)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [torch.nan, 7.0])
def test_a_row_without_keys_on_either_side_is_zero(dtype, garbage):
    a, b = partial(dtype), partial(dtype)
    for out, lse in (a, b):
        out[:, :, 4], lse[:, :, 4] = garbage, -INF
    out, lse = merged(*a, *b, dtype=dtype)
    assert (out[:, :, 4] == 0).all() and (lse[:, :, 4] == -INF).all()
    others = [x for x in range(SHAPE[2]) if x != 4]
    assert out[:, :, others].isfinite().all() and lse[:, :, others].isfinite().all()


def test_an_infinite_logsumexp_takes_the_row():
    (out_a, lse_a), (out_b, lse_b) = partial(), partial()
    lse_a[:, 0], lse_b[:, 1] = INF, INF
    lse_a[:, 2], lse_b[:, 2] = INF, INF
    out, lse = merged(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[:, 0], out_a[:, 0])
    assert torch.equal(out[:, 1], out_b[:, 1])
    assert torch.equal(out[:, 2], 0.5 * out_a[:, 2] + 0.5 * out_b[:, 2])
    assert (lse == INF).all()


def test_infinity_against_minus_infinity():
    (out_a, lse_a), (out_b, lse_b) = partial(), partial()
    out, lse = merged(out_a, lse_a.fill_(INF), out_b.fill_(torch.nan), lse_b.fill_(-INF))
    assert torch.equal(out, out_a) and (lse == INF).all()


@pytest.mark.parametrize("gap", [1e3, 1e30, 3e38])
def test_far_apart_sides_neither_overflow_nor_turn_nan(gap):
    (out_a, lse_a), (out_b, lse_b) = partial(), partial()
    lse_a += gap
    lse_b -= gap
    for pair in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        out, lse = merged(*pair)
        assert torch.equal(out, out_a) and torch.equal(lse, lse_a)


def test_nan_of_a_kernel_is_not_hidden():
    (out_a, lse_a), b = partial(), partial()
    lse_a[:, :, 3] = torch.nan
    out_a[:, :, 5] = torch.nan
    out, lse = merged(out_a, lse_a, *b)
    assert out[:, :, [3, 5]].isnan().all() and lse[:, :, 3].isnan().all()
    assert not lse[:, :, 5].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["a", "b"])
def test_in_place(dtype, side):
    a, b = partial(dtype), partial(dtype)
    a[1][:, :, 0], b[1][:, :, 1] = -INF, -INF
    expected = merged(*a, *b, dtype=dtype)
    target = a if side == "a" else b
    merge_eager(*a, *b, *target)
    for got, want in zip(target, expected, strict=True):
        assert torch.equal(got, want)


def layouts(out, lse):
    """The same numbers in other memory: token-major, strided head dim, strided rows."""
    yield out.transpose(1, 2).contiguous().transpose(1, 2), lse.transpose(1, 2).contiguous().mT
    yield out.repeat_interleave(2, -1)[..., ::2], lse.repeat_interleave(2, -1)[..., ::2]
    yield out.repeat_interleave(3, 2)[:, :, ::3], lse.repeat_interleave(3, 2)[:, :, ::3]


def test_any_strides():
    a, b = partial(), partial()
    expected = merged(*a, *b)
    for x, y, target in itertools.product(layouts(*a), layouts(*b), layouts(*partial())):
        merge_eager(*x, *y, *target)
        for got, want in zip(target, expected, strict=True):
            assert torch.equal(got, want)


def test_merge_partials_is_merge_eager_on_cpu():
    a, b = partial(), partial()
    out, lse = torch.empty_like(a[0]), torch.empty_like(a[1])
    merge_partials(*a, *b, out, lse)
    for got, want in zip((out, lse), merged(*a, *b), strict=True):
        assert torch.equal(got, want)
