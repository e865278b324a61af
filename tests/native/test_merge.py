"""The merge against float64 attention over all keys, at infinities, and in every layout."""

import itertools

import pytest
import torch

from cp_dispatch.backends import BACKENDS
from cp_dispatch.native.merge import (
    is_token_major,
    merge_eager,
    merge_partials,
    plain_batch,
    token_major,
)
from cp_dispatch.native.merge_ops import merge as differentiable_merge
from tests.distributed.reference import FACTOR

INF = torch.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPE = (2, 3, 10, 8)  # (B, H, S, D)


def wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def partial(dtype=torch.float32, shape=SHAPE):
    """An output and a logsumexp as a kernel might return them."""
    out = torch.randn(shape).to(dtype)
    return out, 2 * torch.randn(shape[:3], dtype=wide(dtype))


MERGES = {"twin": merge_eager, "dispatched": merge_partials}


@pytest.fixture(params=MERGES)
def merge(request):
    """The specification, and what runs on this machine: the extension's kernel if it is loaded."""
    return MERGES[request.param]


@pytest.fixture
def merged(merge):
    def merged(out_a, lse_a, out_b, lse_b, dtype=None):
        """A merge into new tensors."""
        out, lse = out_a.new_empty(out_a.shape, dtype=dtype or lse_a.dtype), torch.empty_like(lse_a)
        merge(out_a, lse_a, out_b, lse_b, out, lse)
        return out, lse

    return merged


def assert_as_good(got, exact, one_device):
    """As close to the exact result as one device, or as the exact result rounded to the dtype."""
    error, *allowed = ((x.double() - exact).norm() for x in (got, one_device, exact.to(got.dtype)))
    assert error <= FACTOR * max(allowed)


def formula64(*partials):
    """Attention over the union of keys, in float64, by the definition of the logsumexp."""
    outs, lses = (torch.stack([x.double() for x in group]) for group in zip(*partials, strict=True))
    return (outs * lses.softmax(0).unsqueeze(-1)).sum(0), lses.logsumexp(0)


@pytest.mark.parametrize("cut", [1, 17, 64, 127])
def test_two_parts_of_the_keys_give_attention_over_all(merged, cut):
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


def test_float64_stays_float64(merged):
    a, b = partial(torch.float64), partial(torch.float64)
    got = merged(*a, *b)
    assert [x.dtype for x in got] == [torch.float64] * 2
    for x, exact in zip(got, formula64(a, b), strict=True):
        torch.testing.assert_close(x, exact)  # torch's default tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_partials_merge_in_float32_and_round_once(merged, dtype):
    a, b = partial(dtype), partial(dtype)
    in_float32 = merged(*a, *b)
    for got, exact in zip(in_float32, formula64(a, b), strict=True):
        torch.testing.assert_close(got, exact.float())  # torch's default tolerance for float32
    rounded = merged(*a, *b, dtype=dtype)
    assert torch.equal(rounded[0], in_float32[0].to(dtype))
    assert torch.equal(rounded[1], in_float32[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_the_two_sides_does_not_matter(merged, dtype):
    a, b = partial(dtype), partial(dtype)
    for one, other in zip(merged(*a, *b), merged(*b, *a), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [torch.nan, INF, -INF, 7.0])
def test_a_side_without_keys_has_no_say(merged, dtype, garbage):
    out, lse = partial(dtype)
    nothing = torch.full_like(out, garbage), torch.full_like(lse, -INF)
    for pair in ((*nothing, out, lse), (out, lse, *nothing)):
        got, got_lse = merged(*pair, dtype=dtype)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [torch.nan, 7.0])
def test_a_row_without_keys_on_either_side_is_zero(merged, dtype, garbage):
    a, b = partial(dtype), partial(dtype)
    for out, lse in (a, b):
        out[:, :, 4], lse[:, :, 4] = garbage, -INF
    out, lse = merged(*a, *b, dtype=dtype)
    assert (out[:, :, 4] == 0).all() and (lse[:, :, 4] == -INF).all()
    others = [x for x in range(SHAPE[2]) if x != 4]
    assert out[:, :, others].isfinite().all() and lse[:, :, others].isfinite().all()


def test_an_infinite_logsumexp_takes_the_row(merged):
    (out_a, lse_a), (out_b, lse_b) = partial(), partial()
    lse_a[:, 0], lse_b[:, 1] = INF, INF
    lse_a[:, 2], lse_b[:, 2] = INF, INF
    out, lse = merged(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[:, 0], out_a[:, 0])
    assert torch.equal(out[:, 1], out_b[:, 1])
    assert torch.equal(out[:, 2], 0.5 * out_a[:, 2] + 0.5 * out_b[:, 2])
    assert (lse == INF).all()


def test_infinity_against_minus_infinity(merged):
    (out_a, lse_a), (out_b, lse_b) = partial(), partial()
    out, lse = merged(out_a, lse_a.fill_(INF), out_b.fill_(torch.nan), lse_b.fill_(-INF))
    assert torch.equal(out, out_a) and (lse == INF).all()


@pytest.mark.parametrize("gap", [1e3, 1e30, 3e38])
def test_far_apart_sides_neither_overflow_nor_turn_nan(merged, gap):
    (out_a, lse_a), (out_b, lse_b) = partial(), partial()
    lse_a += gap
    lse_b -= gap
    for pair in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        out, lse = merged(*pair)
        assert torch.equal(out, out_a) and torch.equal(lse, lse_a)


def test_nan_of_a_kernel_is_not_hidden(merged):
    (out_a, lse_a), b = partial(), partial()
    lse_a[:, :, 3] = torch.nan
    out_a[:, :, 5] = torch.nan
    out, lse = merged(out_a, lse_a, *b)
    assert out[:, :, [3, 5]].isnan().all() and lse[:, :, 3].isnan().all()
    assert not lse[:, :, 5].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["a", "b"])
def test_in_place(merged, merge, dtype, side):
    a, b = partial(dtype), partial(dtype)
    a[1][:, :, 0], b[1][:, :, 1] = -INF, -INF
    expected = merged(*a, *b, dtype=dtype)
    target = a if side == "a" else b
    merge(*a, *b, *target)
    for got, want in zip(target, expected, strict=True):
        assert torch.equal(got, want)


def layouts(out, lse):
    """The same numbers in different memory layouts: token-major, strided head dim, strided rows."""
    yield out.transpose(1, 2).contiguous().transpose(1, 2), lse.transpose(1, 2).contiguous().mT
    yield out.repeat_interleave(2, -1)[..., ::2], lse.repeat_interleave(2, -1)[..., ::2]
    yield out.repeat_interleave(3, 2)[:, :, ::3], lse.repeat_interleave(3, 2)[:, :, ::3]


def test_any_strides(merged, merge):
    a, b = partial(), partial()
    expected = merged(*a, *b)
    for x, y, target in itertools.product(layouts(*a), layouts(*b), layouts(*partial())):
        merge(*x, *y, *target)
        for got, want in zip(target, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 9, 1300), (2, 2, 0, 4)])
@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES, repeat=3)], ids=str)
def test_kernel_equals_twin(dtypes, shape):
    """Every combination of dtypes, with every pair of finite and infinite logsumexps."""
    *sides, dtype = dtypes
    for lse_dtype in (torch.float32, torch.float64):
        outs = [torch.randn(shape).to(d) for d in sides]
        values = torch.tensor([-INF, INF, torch.nan, -1e30, 1e30, 0.0, 1.5, -2.0], dtype=lse_dtype)
        lses = [values[torch.randint(8, shape[:3])] for _ in sides]
        for out, lse in zip(outs, lses, strict=True):
            out[lse == -INF] = torch.nan
        results = []
        for merge in MERGES.values():
            out, lse = torch.empty(shape, dtype=dtype), torch.empty(shape[:3], dtype=lse_dtype)
            merge(outs[0], lses[0], outs[1], lses[1], out, lse)
            # Sums in float32 are no more exact when stored as float64.
            results.append((out.to(lse_dtype) if dtype is torch.float64 else out, lse))
        torch.testing.assert_close(*results, equal_nan=True)  # torch's default tolerances


def test_differentiable_merge():
    generator = torch.Generator().manual_seed(1)
    out_a, out_b = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64, generator=generator).unbind(0)
    lse_a, lse_b = torch.randn(2, 1, 2, 3, dtype=torch.float64, generator=generator).unbind(0)
    parts = [x.clone().requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    assert torch.autograd.gradcheck(differentiable_merge, parts)
    assert torch.autograd.gradgradcheck(differentiable_merge, parts)
    for mine, exact in zip(
        differentiable_merge(*parts), formula64((out_a, lse_a), (out_b, lse_b)), strict=True
    ):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gradients_of_sides_without_keys_are_zero(dtype):
    parts = [*partial(torch.bfloat16), *partial(torch.bfloat16)]
    parts[0][:, :, :4], parts[1][:, :, :4] = torch.nan, -INF
    parts[2][:, :, 2:6], parts[3][:, :, 2:6] = torch.nan, -INF
    parts = [x.requires_grad_() for x in parts]
    out, lse = differentiable_merge(*parts, dtype=dtype)
    assert out.dtype is (dtype or torch.bfloat16)
    (out.float().sum() + lse[:, :, :2].sum()).backward()
    assert all(x.grad.isfinite().all() and x.grad.dtype is x.dtype for x in parts)
    assert not any(x.grad[:, :, :4].any() for x in parts[:2])
    assert not any(x.grad[:, :, 2:6].any() for x in parts[2:])
    assert (parts[2].grad[:, :, :2] == 1).all() and (parts[0].grad[:, :, 4:6] == 1).all()


def test_triton_writes_once_all_warps_have_read():
    """A merge in place, in which warps read each other's logsumexps, without the extension's
    kernel."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from cp_dispatch.native.merge_triton import _merge_kernel as kernel

    kinds = dict.fromkeys(kernel.arg_names, "i32")
    kinds |= {"out_a": "*bf16", "out_b": "*bf16", "out": "*bf16"}
    kinds |= dict.fromkeys(["lse_a", "lse_b", "lse"], "*fp32")
    sizes = {"ROWS": 32, "DIM": 128, "la_s": 1, "lb_s": 1, "lo_s": 1}
    kinds |= dict.fromkeys(sizes, "constexpr")
    places = {(kernel.arg_names.index(name),): size for name, size in sizes.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=places)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    between = ptx[ptx.rindex("ld.global") : ptx.index("st.global")]
    assert "bar.sync" in between or "barrier.sync" in between


def test_a_batch_of_one_has_the_stride_of_a_longer_one():
    rows = torch.randn(1, 6, 4, 8)
    query = rows.transpose(1, 2)
    odd = query.view_as(query)  # as DTensor.from_local does
    assert odd.stride(0) < odd.numel()
    plain = plain_batch(odd)
    assert plain.stride() == token_major(1, 4, 6, 8, like=rows).stride() and is_token_major(plain)
    assert plain.equal(query) and plain.data_ptr() == rows.data_ptr()
    shifted = torch.randn(2, 6, 4, 8).transpose(1, 2)[1:]
    shifted = shifted.view_as(shifted)
    assert plain_batch(shifted).equal(shifted)
    for same in (query, rows, torch.randn(2, 4, 6, 8), torch.randn(1, 4, 0, 8), rows[:0]):
        assert plain_batch(same) is same
