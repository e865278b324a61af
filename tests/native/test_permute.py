"""Permuting and summing rows, and what is refused: the kernels agree with their twins."""

from __future__ import annotations

import itertools

import pytest
import torch

from cp_dispatch import extension
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.native import rows
from cp_dispatch.native.permute import (
    inverse_permutation,
    pack_sequence,
    permute_sequence,
    span_indices,
    unpack_sequence,
)
from cp_dispatch.native.permute_ops import memory_order, sources_of

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
    torch.float8_e4m3fn,
]  # fmt: skip
COPIES = {"op": rows.copy_rows, "twin": rows.copy_rows_eager}
SUMS = {"op": rows.sum_rows, "twin": rows.sum_rows_eager}


def numbered(*shape, dtype=torch.float32):
    """Elements that are all different, as far as the dtype allows."""
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    return (numbers % 2 == 1) if dtype is torch.bool else (numbers % 120).to(dtype)


def by_hand(x, index, dim):
    """What permute_sequence promises, row by row."""
    index = index.expand(x.size(0), -1) if index.dim() == 2 else index
    out = []
    for i in range(index.size(-1)):
        column = index[:, i].tolist() if index.dim() == 2 else [int(index[i])]
        if len(column) == 1:
            row = x.select(dim, column[0]) if column[0] >= 0 else torch.zeros_like(x.select(dim, 0))
        else:
            row = torch.stack([x[b].select(dim - 1, r) if r >= 0 else
                               torch.zeros_like(x[b].select(dim - 1, 0))
                               for b, r in enumerate(column)])  # fmt: skip
        out.append(row)
    return torch.stack(out, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", range(-4, 4))
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_every_dim_and_dtype(dim, dtype, kind):
    x = numbered(3, 4, 5, 6, dtype=dtype)
    index = torch.tensor([2, 0, -1, 1, 2], dtype=kind)
    (out,) = permute_sequence([x], index, dim)
    wide = torch.complex128 if x.is_complex() else torch.float64  # float8 has no comparison
    assert out.dtype is dtype and torch.equal(out.to(wide), by_hand(x.to(wide), index, dim % 4))


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_an_index_per_batch_row(copy, dim):
    x = numbered(2, 4, 5, 6)
    index = torch.tensor([[0, 3, -1, 3], [-1, 2, 1, 0]])
    expected = by_hand(x, index, dim)
    out = torch.full_like(expected, torch.nan)
    COPIES[copy]([out], [x], index, [dim], False)
    assert torch.equal(out, expected)
    (out,) = permute_sequence([x], index[:1], dim)
    assert torch.equal(out, by_hand(x, index[0], dim))


def layouts(x):
    """The same numbers in different memory layouts."""
    yield x
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.mT.contiguous().mT
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield x.repeat_interleave(3, 2)[:, :, ::3]
    yield torch.cat([x, x], -1)[..., x.size(-1) :]


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("copy", COPIES)
def test_any_strides_on_both_sides(copy, scatter):
    x, index = numbered(2, 3, 8, 4), torch.tensor([7, 1, 0, 2, 5, 3, 6, 4])
    expected = x[:, :, index.argsort() if scatter else index]
    for source, target in itertools.product(layouts(x), layouts(torch.zeros_like(x))):
        COPIES[copy]([target], [source], index, [2], scatter)
        assert torch.equal(target, expected)
        COPIES[copy]([target], [source], None, [2], scatter)
        assert torch.equal(target, x)


def test_expanded_inputs_and_their_gradient():
    x = torch.randn(2, 1, 6, 3, requires_grad=True)
    index = torch.tensor([5, -1, 0, 0])
    (out,) = permute_sequence([x.expand(-1, 4, -1, -1)], index, 2)
    assert torch.equal(out, by_hand(x.detach().expand(-1, 4, -1, -1), index, 2))
    out.sum().backward()
    assert x.grad[0, 0, :, 0].tolist() == [8, 0, 0, 0, 0, 4]


@pytest.mark.parametrize(
    ("stride", "order"),
    [((60, 20, 5, 1), [0, 1, 2, 3]), ((60, 5, 15, 1), [0, 2, 1, 3]), ((0, 5, 15, 1), [0, 2, 1, 3]),
     ((60, 0, 5, 1), [0, 1, 2, 3]), ((1, 2, 8, 24), [3, 2, 1, 0]), ((0, 0, 0, 0), [0, 1, 2, 3])],
    ids=str,
)  # fmt: skip
def test_memory_order(stride, order):
    assert memory_order(torch.empty_strided((2, 4, 3, 5), stride)) == order


def test_output_lies_in_memory_as_the_input_does():
    token_major = torch.randn(1, 6, 2, 4).transpose(1, 2)
    plain = torch.randn(1, 2, 6, 4)
    outs = permute_sequence([token_major, plain], torch.tensor([3, 1, -1]), 2)
    assert outs[0].transpose(1, 2).is_contiguous() and outs[1].is_contiguous()


def test_several_tensors_of_different_kinds_at_once():
    tensors = [torch.randn(2, 5, 3), numbered(5, dtype=torch.int64), torch.ones(2, 2, 2, 2, 5) > 0]
    index = torch.tensor([4, -1, 1])
    outs = permute_sequence(tensors, index, [1, 0, -1])
    for x, out, dim in zip(tensors, outs, (1, 0, 4), strict=True):
        assert torch.equal(out, by_hand(x, index, dim))
    assert permute_sequence([], index, 0) == []


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_nothing_to_move(shape):
    x = torch.randn(shape)
    index = torch.tensor([0, -1, 3] if shape[1] else [-1, -1, -1])
    (out,) = permute_sequence([x], index, 1)
    assert out.shape == (shape[0], 3, shape[2]) and (out[:, 1] == 0).all()
    (out,) = permute_sequence([x], index[:0], 1)
    assert out.shape == (shape[0], 0, shape[2])


@pytest.mark.parametrize("bytes_of_row", [1, 100, 1 << 12, 1 << 18, (1 << 21) + 3])
def test_large_rows_and_large_copies(bytes_of_row):
    """Sizes at which the CPU kernel uses streaming stores, or splits a run among its threads."""
    count = max(3, (1 << 23) // bytes_of_row)
    x = torch.randint(0, 256, (count, bytes_of_row), dtype=torch.uint8)
    index = torch.randperm(count)
    index[1] = -1
    expected = torch.empty_like(x)
    rows.copy_rows_eager([expected], [x], index, [0], False)
    assert torch.equal(permute_sequence([x], index, 0)[0], expected)
    out = torch.empty(x.numel() + 1, dtype=torch.uint8)[1:]  # not aligned
    rows.copy_rows([out], [x.flatten()], None, [0], False)
    assert torch.equal(out, x.flatten())


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize(
    "index", [[1, -1, 3, 0], [[1, -1, 3, 0], [2, 1, 0, -1]], [[3, 2, -1, 1]]], ids=str
)
def test_gradients_of_first_and_second_order(index, unique):
    x = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 4, dtype=torch.complex128, requires_grad=True)

    def function(x, y):
        a, b = permute_sequence([x, y], torch.tensor(index), [2, 1], unique=unique)
        return a * a, b * b

    assert torch.autograd.gradcheck(function, (x, y))
    assert torch.autograd.gradgradcheck(function, (x, y))


@pytest.mark.parametrize("index", [[1, 1, 1, -1, 0], [[1, 0, 1], [2, 2, 2]]], ids=str)
def test_rows_taken_twice_get_the_sum(index):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute_sequence([x], torch.tensor(index), 1)[0], x)


def test_gradient_only_where_it_is_wanted():
    a, b = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    c = torch.arange(3)
    out_a, out_b, out_c = permute_sequence([a, b, c], torch.tensor([2, 2]), 0)
    out_a.sum().backward()
    assert out_a.requires_grad and not out_c.requires_grad
    assert a.grad.tolist() == [[0, 0], [0, 0], [2, 2]] and b.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("sums", SUMS)
def test_repeats_are_summed_wide_and_rounded_once(sums, dtype):
    x = torch.randn(2, 3, 700, 6).to(dtype)
    index = torch.randint(-1, 20, (2, 700))
    order, offsets = sources_of(index, 25)
    out = torch.full((2, 3, 25, 6), torch.nan, dtype=dtype)
    SUMS[sums]([out], [x], order, offsets, [2])
    wide = torch.zeros(2, 3, 25, 6, dtype=torch.float64)
    for b, i in itertools.product(range(2), range(700)):
        if index[b, i] >= 0:
            wide[b, :, index[b, i]] += x[b, :, i]
    limits = {torch.float64: 1e-12, torch.float32: 1e-5}
    limit = limits.get(dtype, 1e-4)
    torch.testing.assert_close(out, wide.to(dtype), atol=limit, rtol=torch.finfo(dtype).eps)
    again = torch.empty_like(out)
    SUMS[sums]([again], [x], order, offsets, [2])
    assert torch.equal(out, again)


def pairs_to_sum(batches: int, length: int, rows: int):
    """Sources and targets of different shapes, dims and dtypes, some of them empty."""
    for shape, dim, dtype in (
        ((batches, length, 6), 1, torch.bfloat16), ((batches, 3, length, 40), 2, torch.float32),
        ((batches, 2, 5, length), 3, torch.float16), ((batches, length), 1, torch.float64),
        ((batches, 0, length), 2, torch.float32), ((batches, length, 0), 1, torch.bfloat16),
        ((batches, 2, length, 1030), 2, torch.bfloat16),
    ):  # fmt: skip
        x = torch.randn(shape).to(dtype)
        shape = [rows if d == dim else n for d, n in enumerate(shape)]
        yield torch.full(shape, torch.nan, dtype=dtype), x, dim


@pytest.mark.parametrize("per_batch_row", [False, True])
@pytest.mark.parametrize("sums", SUMS)
def test_sums_of_several_tensors_are_those_of_each(sums, per_batch_row):
    index = torch.randint(-1, 9, (2, 30) if per_batch_row else (30,))
    order, offsets = sources_of(index, 12)
    targets, sources, dims = map(list, zip(*pairs_to_sum(2, 30, 12), strict=True))
    expected = [torch.empty_like(x) for x in targets]
    SUMS[sums](targets, sources, order, offsets, dims)
    for out, one, x, dim in zip(expected, targets, sources, dims, strict=True):
        SUMS[sums]([out], [x], order, offsets, [dim])
        assert torch.equal(out, one)
    SUMS[sums]([], [], order, offsets, [])


def test_summands_are_added_in_the_order_they_have():
    index = torch.randint(0, 9, (300,))
    order, offsets = sources_of(index, 9)
    for target, x, dim in pairs_to_sum(2, 300, 9):
        rows.sum_rows([target], [x], order, offsets, [dim])
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        total = torch.zeros(target.shape, dtype=wide)
        for i, row in enumerate(index.tolist()):
            total.select(dim, row).add_(x.select(dim, i))
        assert torch.equal(target, total.to(x.dtype))


def test_one_backward_sums_all_tensors_of_a_length_in_one_call(monkeypatch):
    calls = []
    monkeypatch.setattr(rows, "sum_rows", lambda *args: calls.append(len(args[0])))
    tensors = [torch.randn(2, n, requires_grad=True) for n in (4, 4, 5)]
    tensors.append(torch.randn(4, dtype=torch.complex64, requires_grad=True))
    outs = permute_sequence(tensors, torch.tensor([1, 1, -1]), [1, 1, 1, 0])
    torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
    assert sorted(calls) == [1, 3]


# What is refused.


@pytest.mark.parametrize("function", [
    lambda x, i: permute_sequence([x], i, 1),
    lambda x, i: pack_sequence([x], i, 1),
    lambda x, i: unpack_sequence(torch.zeros(2 * i.size(-1) * 3), [x], i, 1),
], ids=["permute", "pack", "unpack"])  # fmt: skip
@pytest.mark.parametrize(
    ("index", "message"),
    [([0, 4], "4 is out of range: expected -1 .* or 0 to 3"), ([-2], "-2 is out of range"),
     ([2**40], "out of range"), ([[0, 4], [0, 0]], "out of range")],
    ids=str,
)  # fmt: skip
def test_bad_values_raise(function, index, message):
    with pytest.raises(ContextParallelError, match=message):
        function(torch.randn(2, 4, 3), torch.tensor(index))


def test_kernels_refuse_bad_values_that_were_promised_to_be_good():
    for copy in COPIES.values():
        for scatter, bad in itertools.product((False, True), (-2, 4, 2**40)):
            with pytest.raises(RuntimeError, match="out of range"):
                copy([torch.zeros(4, 3)], [torch.zeros(4, 3)], torch.tensor([0, bad, 1, 2]), [0],
                     scatter)  # fmt: skip
    with pytest.raises(RuntimeError, match="out of range"):
        permute_sequence([torch.zeros(4)], torch.tensor([4]), 0, checked=True)


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("wrong", ["size", "order", "dims", "sources"])
def test_sums_that_do_not_fit_write_nothing(sums, wrong):
    x, order, offsets = torch.randn(2, 3, 5), torch.tensor([0, 2, 2]), torch.tensor([0, 1, 1, 3, 3])
    targets, sources, dims = [torch.zeros(2, 4, 5) for _ in range(2)], [x, x], [1, 1]
    if wrong == "size":
        sources[1] = x[..., :4]
    elif wrong == "order":
        sources[1] = x[:, :2]
    else:
        {"dims": dims, "sources": sources}[wrong].pop()
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        SUMS[sums](targets, sources, order, offsets, dims)
    assert not any(target.any() for target in targets)


@pytest.mark.skipif(not extension.has_kernel("sum_rows", "cpu"), reason="no extension")
def test_the_kernel_sums_floats_of_one_dtype_in_each_pair():
    order, offsets = sources_of(torch.tensor([0, 0, 1]), 4)
    x, targets = torch.ones(3, 2), [torch.zeros(4, 2), torch.zeros(4, 2)]
    for bad, message in ((x.half(), "one dtype"), (x.long(), "float32 or float64")):
        with pytest.raises(RuntimeError, match=message):
            rows.sum_rows(targets, [x, bad], order, offsets, [0, 0])
        assert not any(target.any() for target in targets)


@pytest.mark.parametrize("index", [
    torch.tensor([0.0]), torch.tensor([True]), torch.tensor([0], dtype=torch.int16),
    torch.tensor(0), torch.zeros(1, 1, 1, dtype=torch.int64),
], ids=lambda x: f"{x.dtype} {x.dim()}")  # fmt: skip
def test_bad_index_tensors_raise(index):
    for function in (lambda: permute_sequence([torch.randn(2, 3)], index, 1),
                     lambda: pack_sequence([torch.randn(2, 3)], index, 1),
                     lambda: inverse_permutation(index)):  # fmt: skip
        with pytest.raises(ContextParallelError, match="int64 or int32 of shape"):
            function()


def test_what_does_not_fit_together_raises():
    x, index = torch.randn(2, 4, 3), torch.tensor([[0, 1], [1, 0]])
    for function, message in (
        (lambda: permute_sequence([x], index[0], 3), "dim must name"),
        (lambda: permute_sequence([x], index[0], [1, 1]), "dim must name"),
        (lambda: permute_sequence([x], index, 0), "a row for each of 2 batches"),
        (lambda: permute_sequence([x[:1]], index, 1), "a row for each of 2 batches"),
        (lambda: permute_sequence([x.to("meta")], index, 1), "on one device"),
        (lambda: pack_sequence([x, x.half()], dim=1), "one dtype"),
        (lambda: pack_sequence([], dim=1), "one dtype"),
        (lambda: pack_sequence([x], index, 1, start=1), "not both"),
        (lambda: pack_sequence([x], dim=1, start=2, length=3), "rows 2 to 5"),
        (lambda: pack_sequence([x], dim=1, start=-1, length=1), "rows -1 to 0"),
        (lambda: pack_sequence([x], dim=1, out=torch.empty(23)), "24 elements"),
        (lambda: pack_sequence([x], dim=1, out=torch.empty(48)[::2]), "contiguous"),
        (lambda: unpack_sequence(torch.empty(25), [x], dim=1), "24 elements"),
        (lambda: span_indices([(0, -1)]), "negative"),
        (lambda: span_indices(torch.zeros(2, 3, dtype=torch.int64)), r"\(n, 2\)"),
        (lambda: span_indices(torch.zeros(2, 2)), "int64"),
    ):
        with pytest.raises(ContextParallelError, match=message):
            function()
