"""The extension's CUDA kernels against their twins on the same device.

``csrc/README.md`` says which of these tests are fast enough for ``compute-sanitizer``.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from cp_dispatch import extension
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.native import rows
from cp_dispatch.native.merge import merge_eager, merge_partials, token_major
from cp_dispatch.native.parts import add_up, sum_parts, sum_parts_eager
from cp_dispatch.native.permute import (
    inverse_permutation,
    pack_sequence,
    permute_sequence,
    span_indices,
    unpack_sequence,
)
from cp_dispatch.native.permute_ops import sources_of
from cp_dispatch.schedules.copy_ops import (
    CURRENT,
    copies_of,
    copy_and_pull,
    numbers_of,
    push_heads,
    push_pair,
)
from tests.native.test_permute import layouts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

INF, NAN = torch.inf, torch.nan
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.complex128, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def test_kernels_are_loaded():
    for op in ("copy_rows", "sum_rows", "span_indices", "invert_index", "merge_partials",
               "sum_parts", "raise_flags", "push_slabs", "push_rows", "push_pair",
               "push_heads", "copy_and_pull",
               "join_streams"):  # fmt: skip
        assert extension.has_kernel(op, "cuda"), extension.why_not_loaded()


def randoms(*shape, dtype=torch.float32):
    x = torch.randint(-100, 100, shape, device="cuda").float()
    return (x > 0) if dtype is torch.bool else x.to(dtype)


def bits(x):
    """Bits that can be compared, whatever the dtype."""
    return x.contiguous().view(torch.uint8) if x.itemsize == 1 else x


def both(targets, sources, index, dims, scatter):
    """The results of kernel and twin in copies of the targets, after a check that they are
    equal."""
    results = []
    for copy in (rows.copy_rows, rows.copy_rows_eager):
        outs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)
                for x in targets]  # fmt: skip
        copy(outs, sources, index, dims, scatter)
        results.append(outs)
    for kernel, twin in zip(*results, strict=True):
        assert torch.equal(bits(kernel), bits(twin))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_copy_every_dim_and_dtype(dtype, kind):
    x = randoms(3, 4, 5, 6, dtype=dtype)
    for dim in range(4):
        index = torch.tensor([2, 0, -1, 1, 2], dtype=kind, device="cuda")
        shape = [5 if d == dim else n for d, n in enumerate(x.shape)]
        both([x.new_ones(shape)], [x], index, [dim], False)
        places = torch.tensor([4, -1, 0, 6, 2, 5][: x.size(dim)], dtype=kind, device="cuda")
        shape = [7 if d == dim else n for d, n in enumerate(x.shape)]
        both([x.new_ones(shape)], [x], places, [dim], True)


@pytest.mark.parametrize("scatter", [False, True])
def test_copy_any_strides(scatter):
    x = randoms(2, 3, 8, 24, dtype=torch.bfloat16)
    index = torch.randperm(8, device="cuda")
    per_batch = torch.stack([index, index.flip(0)])
    for source, target in itertools.product(layouts(x), layouts(torch.zeros_like(x))):
        for i in (index, per_batch, None):
            both([target], [source], i, [2], scatter)


def test_copy_of_many_dims_and_of_expanded_memory():
    x = randoms(2, 3, 2, 3, 2, 3, 2, 3, 2).permute(8, 1, 6, 3, 4, 5, 2, 7, 0)
    index = torch.tensor([1, -1, 0, 0], device="cuda")
    for dim in (0, 4, 8):
        (out,) = permute_sequence([x], index, dim)
        expected = x.index_select(dim, index.clamp(min=0))
        expected.select(dim, 1).zero_()
        assert torch.equal(out, expected)
    x = randoms(2, 1, 6, 8).expand(-1, 5, -1, -1)
    both([x.new_ones(2, 5, 4, 8)], [x], index, [2], False)


@pytest.mark.parametrize("dim", [1, 8, 40, 96, 128, 255, 8192, 100_000])
def test_copy_of_rows_of_every_length(dim):
    """Also more tensors than one launch can take, with different alignments."""
    xs = [randoms(1, 70, 2, dim + extra, dtype=torch.bfloat16) for extra in (0, 0, 1, 2, 8, 0)]
    index = torch.randint(-1, 70, (90,), device="cuda")
    targets = [x.new_ones(1, 90, 2, x.size(-1)) for x in xs]
    both(targets, xs, index, [1] * 6, False)
    both([torch.ones_like(x) for x in xs], xs, None, [1] * 6, False)
    flat = xs[0].flatten()
    both([torch.ones_like(flat)[1:]], [flat[1:]], None, [0], False)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_copy_of_nothing(shape):
    x = torch.ones(shape, device="cuda")
    index = torch.full((3,), -1, device="cuda")
    assert not permute_sequence([x], index, 1)[0].any()
    assert permute_sequence([x], index[:0], 1)[0].numel() == 0


def test_bad_values_raise_and_never_read_out_of_bounds():
    x = randoms(2, 4, 3)
    for bad in ([0, 4], [-2, 0], [2**40, 0]):
        index = torch.tensor(bad, device="cuda")
        for function in (
            lambda index=index: permute_sequence([x], index, 1),
            lambda index=index: pack_sequence([x], index, 1),
            lambda index=index: unpack_sequence(torch.zeros(12, device="cuda"), [x], index, 1),
            lambda index=index: inverse_permutation(index),
        ):
            with pytest.raises(ContextParallelError, match="out of range"):
                function()
        (out,) = permute_sequence([x], index, 1, checked=True)  # a promise that does not hold
        for i, row in enumerate(bad):
            assert torch.equal(out[:, i], x[:, row] if row == 0 else torch.zeros_like(x[:, 0]))
    with pytest.raises(ContextParallelError, match="on one device"):
        permute_sequence([x], torch.tensor([0]), 1)


def test_checked_calls_do_not_wait_for_the_device():
    x, index = randoms(2, 4, 3), torch.tensor([1, 0, -1], device="cuda")
    x.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for unique in (True, False):
            (out,) = permute_sequence([x], index, 1, checked=True, unique=unique)
            out.sum().backward()
        with torch.no_grad():
            buffer = pack_sequence([x], index, 1, checked=True)
            unpack_sequence(buffer, [x], index, 1, checked=True)
            inverse_permutation(index, check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sum_rows(dtype):
    for shape in ((2, 3, 70, 40), (2, 1, 70, 3), (2, 5, 70, 0)):
        x = torch.randn(shape, device="cuda").to(dtype)
        for source in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
            index = torch.randint(-1, 20, (2, 70), device="cuda")
            order, offsets = sources_of(index, 25)
            results = []
            for function in (rows.sum_rows, rows.sum_rows_eager):
                out = torch.full((*shape[:2], 25, shape[3]), NAN, dtype=dtype, device="cuda")
                function([out], [source], order, offsets, [2])
                results.append(out)
            torch.testing.assert_close(*results)


def summed(function, sources, order, offsets, dims):
    length = offsets.size(-1) - 1
    targets = []
    for x, dim in zip(sources, dims, strict=True):
        shape = [length if d == dim else n for d, n in enumerate(x.shape)]
        targets.append(torch.full(shape, NAN, dtype=x.dtype, device=x.device))
    function(targets, sources, order, offsets, dims)
    return targets


def check_sums(sources, index, dims):
    """One call for all, a call for each, and the twin. They are equal, because these are whole
    numbers."""
    order, offsets = sources_of(index, 25)
    together = summed(rows.sum_rows, sources, order, offsets, dims)
    twins = summed(rows.sum_rows_eager, sources, order, offsets, dims)
    for out, twin, x, dim in zip(together, twins, sources, dims, strict=True):
        (alone,) = summed(rows.sum_rows, [x], order, offsets, [dim])
        assert torch.equal(out, twin) and torch.equal(out, alone)


@pytest.mark.parametrize("shape", [(70,), (1, 70), (2, 70)], ids=str)
def test_sum_of_several_tensors_at_once(shape):
    """Rows along any dim, some empty tensors, all dtypes in turn: more jobs than one launch can
    take."""
    index = torch.randint(-1, 20, shape, device="cuda")
    pairs = [
        (randoms(*shape, dtype=dtype), dim)
        for shape, dim in (((2, 3, 70, 40), 2), ((2, 70, 8), 1), ((2, 1, 70, 128), 2),
                           ((2, 70, 2, 64), 1), ((2, 2, 70, 16), 2), ((2, 70, 0), 1),
                           ((2, 0, 70, 8), 2), ((2, 70, 3), 1), ((2, 5, 70), 2), ((2, 70), 1))
        for dtype in FLOATS
    ]  # fmt: skip
    xs, dims = map(list, zip(*pairs, strict=True))
    check_sums(xs, index, dims)


@pytest.mark.parametrize("dim", [1, 8, 40, 96, 255, 520, 8192, 100_000])
def test_sum_of_rows_of_every_length(dim):
    """With different alignments, so that rows have pieces and tails."""
    xs = [randoms(1, 70, 2, dim + extra, dtype=torch.bfloat16) for extra in (0, 0, 1, 2, 8, 0)]
    xs += [x[..., 1:] for x in xs[:2]]
    check_sums(xs, torch.randint(-1, 20, (70,), device="cuda"), [1] * 8)


def test_sum_of_many_dims_of_expanded_memory_and_of_nothing():
    x = randoms(2, 3, 2, 3, 2, 3, 2, 3, 2).permute(8, 1, 6, 3, 4, 5, 2, 7, 0)
    index = torch.tensor([1, 0], device="cuda")
    check_sums([x, x, x], index, [0, 4, 8])
    x = randoms(2, 1, 6, 8).expand(-1, 5, -1, -1)
    index = torch.tensor([[1, 1, -1, 0, 20, 1], [3, 2, 2, 2, 2, 2]], device="cuda")
    check_sums([x, x.mT, x[:, :0]], index, [2, 3, 2])
    check_sums([], index, [])
    check_sums([x[:, :, :0]], index[:, :0], [2])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_those_of_the_cpu_bit_by_bit(dtype):
    """The same summands are added in the same order."""
    sources = [torch.randn(2, n, 500, 40).to(dtype) for n in (3, 1, 4)]
    order, offsets = sources_of(torch.randint(-1, 20, (2, 500)), 25)
    expected = summed(rows.sum_rows, sources, order, offsets, [2] * 3)
    outs = summed(rows.sum_rows, [x.cuda() for x in sources], order.cuda(), offsets.cuda(), [2] * 3)
    for out, x in zip(outs, expected, strict=True):
        assert torch.equal(out.cpu(), x)


def test_sums_that_do_not_fit_write_nothing():
    x, index = randoms(2, 70, 8), torch.randint(0, 20, (70,), device="cuda")
    order, offsets = sources_of(index, 25)
    for bad in (
        randoms(2, 70, 7),
        randoms(2, 70, 8, dtype=torch.float16),
        randoms(2, 70, 8).long(),
    ):
        targets = [torch.zeros(2, 25, 8, device="cuda") for _ in range(6)]
        with pytest.raises(RuntimeError):
            rows.sum_rows(targets, [*[x] * 5, bad], order, offsets, [1] * 6)
        assert not any(target.any() for target in targets)


def test_gradients():
    x = torch.randn(2, 3, 4, 2, dtype=torch.float64, device="cuda", requires_grad=True)
    for values, unique in (([1, -1, 1, 0], False), ([[1, -1, 3, 0], [2, 1, 0, -1]], True)):
        index = torch.tensor(values, device="cuda")

        def function(x, index=index, unique=unique):
            return permute_sequence([x], index, 2, unique=unique)[0] ** 2

        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))


def test_pack_and_unpack():
    k = randoms(2, 64, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
    v = randoms(2, 8, 64, 96, dtype=torch.bfloat16)
    index = torch.randperm(64, device="cuda")
    for keywords in ({}, {"start": 5, "length": 32}, {"index": index}):
        buffer = pack_sequence([k, v], **keywords)
        expected = pack_sequence(
            [k.cpu(), v.cpu()],
            **{n: getattr(x, "cpu", lambda x=x: x)() for n, x in keywords.items()},
        )
        assert torch.equal(buffer.cpu(), expected)
        targets = [torch.zeros_like(k), torch.zeros_like(v)]
        unpack_sequence(buffer, targets, **keywords)
        assert torch.equal(pack_sequence(targets, **keywords), buffer)


def test_indices():
    spans = torch.stack([torch.randint(0, 1 << 40, (500,)), torch.randint(0, 50, (500,))], 1).cuda()
    total = int(spans[:, 1].sum())
    expected = rows.span_indices_eager(spans, total)
    assert torch.equal(span_indices(spans), expected)
    assert torch.equal(span_indices(spans.mT.contiguous().mT), expected)
    assert span_indices(spans[:0]).numel() == 0
    for dtype in (torch.int64, torch.int32):
        indices = torch.stack([torch.randperm(1000, device="cuda") for _ in range(3)]).to(dtype)
        assert torch.equal(inverse_permutation(indices).long(), indices.argsort(-1))
        some = indices[:, :900].contiguous()
        some[:, ::7] = -1
        assert torch.equal(rows.invert_index(some, 1000), rows.invert_index_eager(some, 1000))
    with pytest.raises(ContextParallelError, match="no permutation"):
        inverse_permutation(torch.tensor([0, 0], device="cuda"))


def merge_both(parts, dtype):
    results = []
    for merge in (torch.ops.cp_dispatch.merge_partials, merge_eager):
        out = torch.full(parts[0].shape, NAN, dtype=dtype, device="cuda")
        lse = torch.full_like(parts[1], NAN)
        merge(*parts, out, lse)
        # Sums in float32 are no more exact when stored as float64.
        results.append((out.to(lse.dtype) if dtype is torch.float64 else out, lse))
    torch.testing.assert_close(*results, equal_nan=True)
    return results[0]


@pytest.mark.parametrize("dtypes", [*itertools.product(FLOATS, repeat=3)], ids=str)
def test_merge_of_every_dtype_and_infinity(dtypes):
    values = torch.tensor([-INF, INF, NAN, -1e30, 1e30, 0.0, 1.5, -2.0], device="cuda")
    for shape in ((2, 3, 30, 128), (1, 2, 64, 7), (1, 1, 3, 512), (2, 2, 0, 8), (1, 2, 3, 96)):
        for lse_dtype in (torch.float32, torch.float64):
            a, b = (torch.randn(shape, device="cuda").to(d) for d in dtypes[:2])
            la, lb = (values[torch.randint(8, shape[:3])].to(lse_dtype) for _ in range(2))
            a[la == -INF], b[lb == -INF] = NAN, INF
            merge_both((a, la, b, lb), dtypes[2])


def test_merge_any_strides():
    a, b = (torch.randn(2, 3, 8, 32, device="cuda").bfloat16() for _ in range(2))
    la, lb = (torch.randn(2, 3, 8, device="cuda") for _ in range(2))
    for x, y in itertools.product(layouts(a), layouts(b)):
        merge_both((x, la.mT.contiguous().mT, y, lb.repeat_interleave(2, -1)[..., ::2]), a.dtype)


@pytest.mark.parametrize("side", [0, 2])
@pytest.mark.parametrize("dim", [7, 64, 128, 512])
def test_merge_in_place(dim, side):
    """Also if several threads share a row whose logsumexp one of them overwrites."""
    parts = []
    for _ in range(2):
        out = token_major(2, 4, 500, dim, like=torch.empty(0, device="cuda")).normal_()
        parts += [out, torch.randn(2, 4, 500, device="cuda")]
    expected = torch.empty_like(parts[0]), torch.empty_like(parts[1])
    merge_eager(*parts, *expected)
    window = [x[:, :, 20:450] for x in parts]
    target = window[side : side + 2]
    outside = [x[:, :, :20].clone() for x in parts[side : side + 2]]
    torch.ops.cp_dispatch.merge_partials(*window, *target)
    torch.testing.assert_close(tuple(target), tuple(x[:, :, 20:450] for x in expected))
    for x, before in zip(parts[side : side + 2], outside, strict=True):
        assert torch.equal(x[:, :, :20], before)


def test_public_merge_uses_the_kernel(monkeypatch):
    import cp_dispatch.native.merge as module

    def not_called(*args):
        raise AssertionError("the twin was called")

    monkeypatch.setattr(module, "_merge_in_python", not_called)
    a, b, out = (torch.randn(1, 2, 3, 8, device="cuda").bfloat16() for _ in range(3))
    la, lb, lse = (torch.randn(1, 2, 3, device="cuda") for _ in range(3))
    merge_partials(a, la, b, lb, out, lse)


def test_another_stream_and_another_device():
    x, index = randoms(1, 4096, 64), torch.randperm(4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x.clone()
        torch.cuda._sleep(10_000_000)  # work on another stream would overtake this
        y.add_(1)
        (out,) = permute_sequence([y], index, 1, checked=True)
    stream.synchronize()
    assert torch.equal(out, (x + 1)[:, index])
    if torch.cuda.device_count() > 1:
        x, index = x.to("cuda:1"), index.to("cuda:1")
        assert torch.equal(permute_sequence([x], index, 1)[0], x[:, index])
        assert torch.cuda.current_device() == 0


def test_large_more_than_two_billion_elements():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    length = 2**24 + 5
    x = torch.zeros(1, length, 130, dtype=torch.uint8, device="cuda")
    x[:, -1] = 7
    x[:, 3] = 5
    index = torch.arange(length - 1, -1, -1, device="cuda")
    index[1] = -1
    (out,) = permute_sequence([x], index, 1, checked=True)
    assert (out[:, 0] == 7).all() and (out[:, -4] == 5).all()
    assert out.sum(dtype=torch.int64) == 12 * 130
    targets = [torch.zeros_like(x)]
    unpack_sequence(out.flatten(), targets, index, 1, checked=True)
    assert torch.equal(targets[0], x)
    # One element at a time, and more elements than one launch can take.
    odd = x.mT.contiguous().mT
    (out,) = permute_sequence([odd.mT], index, 2, checked=True)
    assert (out[..., 0] == 7).all() and (out[..., -4] == 5).all()
    assert out.sum(dtype=torch.int64) == 12 * 130


def whole(sources, out):
    """All sources contribute to all rows of the single sum."""
    numbers = (x for i in range(len(sources)) for x in (i, 0))
    return [0, 0, out.size(2), len(sources), *numbers]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [128, 64, 24, 7])
@pytest.mark.parametrize("count", [1, 2, 7, 48])
def test_sum_parts(count, dim, dtype):
    shape = 2, 3, 37, dim
    sources = [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]
    sources[0] = sources[0].transpose(1, 2).contiguous().transpose(1, 2)
    # A part of a larger tensor, with rows from its middle.
    larger = torch.randn(2, 50, 3, dim, device="cuda").to(dtype)
    sources[-1] = larger.transpose(1, 2)[:, :, 5:42]
    out, twin = (token_major(*shape, like=sources[0]) for _ in range(2))
    sum_parts(sources, out)
    sum_parts_eager(sources, whole(sources, twin), [twin])
    assert torch.equal(out, twin)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [128, 7])
def test_sums_between_wide_and_narrow(narrow, dim):
    wide = [torch.randn(2, 3, 33, dim, device="cuda") for _ in range(4)]
    for sources, dtype in ((wide, narrow), ([x.to(narrow) for x in wide], torch.float32)):
        for count in (1, 4):
            out, twin = (torch.empty_like(sources[0], dtype=dtype) for _ in range(2))
            sum_parts(sources[:count], out)
            sum_parts_eager(sources[:count], whole(sources[:count], twin), [twin])
            assert torch.equal(out, twin)


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_parts(seed):
    """Some rows of each part, in one call for two sums. Rows that no part covers are zero."""
    generator = torch.Generator().manual_seed(seed)
    length, places = 37, []
    totals = [torch.full((2, 3, length, dim), torch.nan, device="cuda") for dim in (64, 24)]
    twins, parts = [x.clone() for x in totals], [[], []]
    for _ in range(seed):
        start, stop = sorted(torch.randint(length + 1, (2,), generator=generator).tolist())
        places.append((start, stop - start, seed))
        for total, own in zip(totals, parts, strict=True):
            own.append(torch.randn(2, 3, 2 * seed + stop - start, total.size(3), device="cuda"))
    add_up(totals, parts, tuple(places))
    for twin, own, total in zip(twins, parts, totals, strict=True):
        twin.zero_()
        for part, (start, count, first) in zip(own, places, strict=True):
            twin[:, :, start : start + count] += part[:, :, first : first + count]
        torch.testing.assert_close(total, twin)


def test_sums_refuse_what_is_not_there():
    part, out = (torch.zeros(1, 1, 4, 8, device="cuda") for _ in range(2))
    for pieces in ([0, 0, 4, 1, 1, 0], [1, 0, 4, 1, 0, 0], [0, 1, 4, 1, 0, 0], [0, 0, 4, 1, 0, 1],
                   [0, 0, 4, 2, 0, 0], [0, 0, 4]):  # fmt: skip
        with pytest.raises(RuntimeError, match="no such|rows that|too early"):
            torch.ops.cp_dispatch.sum_parts([part], pieces, [out])


def test_push_rows():
    """Copy rows of sources to addresses, as slabs."""
    sources = [torch.randn(3, 40, 2, 16, device="cuda"), torch.randn(3, 50, 9, device="cuda")]
    targets = [torch.zeros(3, 90, 2, 16, device="cuda"), torch.zeros(3, 60, 9, device="cuda")]
    expected, stream, moves = [x.clone() for x in targets], torch.cuda.Stream(), []
    for index, first, count, at in ((0, 30, 10, 20), (1, 0, 50, 3), (0, 0, 7, 0), (1, 4, 0, 0)):
        target = targets[index]
        address = target.data_ptr() + at * target.stride(1) * 4
        moves += [index, first, count, address, target.stride(0) * 4]
        expected[index][:, at : at + count] = sources[index][:, first : first + count]
    push_rows = torch.ops.cp_dispatch.push_rows
    push_rows(sources, targets[0], moves, [], [], [], [], stream.cuda_stream, True)
    torch.ops.cp_dispatch.join_streams(targets[0], stream.cuda_stream, False)
    for target, want in zip(targets, expected, strict=True):
        assert torch.equal(target, want)
    for wrong, words in (([2, 0, 1, 0, 0], "no such"), ([0, 38, 3, 0, 0], "does not have"),
                         ([0, 0, 1], "five numbers")):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            push_rows(sources, targets[0], wrong, [], [], [], [], stream.cuda_stream, True)
    # Empty sources.
    push_rows([x[:, :, :0] for x in sources], targets[0], moves, [], [], [], [],
              stream.cuda_stream, True)  # fmt: skip
    with pytest.raises(RuntimeError, match="contiguous"):
        push_rows([sources[0][:, :, :1]], targets[0], [], [], [], [], [], stream.cuda_stream, True)


def addresses(flags):
    return [flags.data_ptr() + 4 * i for i in range(flags.numel())]


def push(targets, sources, stream, first=(), take=(), give=(), last=()):
    here = targets[0] if targets else torch.empty(1, device="cuda")
    torch.ops.cp_dispatch.push_slabs(
        targets, sources, here, first, take, give, last, stream.cuda_stream, True
    )


def test_push_slabs():
    source = torch.randn(3, 40, 2, 16, device="cuda")
    target = torch.zeros(3, 90, 2, 16, device="cuda")
    stream = torch.cuda.Stream()
    push([target[:, 20:30], target[:1, :5]], [source[:, 30:], source[2:, :5]], stream)
    torch.ops.cp_dispatch.join_streams(target, stream.cuda_stream, False)
    expected = torch.zeros_like(target)
    expected[:, 20:30], expected[:1, :5] = source[:, 30:], source[2:, :5]
    assert torch.equal(target, expected)
    with pytest.raises(RuntimeError, match="contiguous"):
        push([target[:, :, :1]], [target[:, :, :1]], stream)
    with pytest.raises(RuntimeError, match="sizes differ"):
        push([target], [source], stream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("batch, dim", [(1, 16), (3, 16), (2, 5), (2, 0)])
def test_many_short_slabs(batch, dim, dtype):
    """One kernel if they start and end at multiples of 16 bytes, otherwise copies. 100 are too many
    for one launch."""
    source = torch.randint(255, (batch, 400, dim), device="cuda").to(dtype)
    target = torch.zeros(batch, 900, dim, device="cuda", dtype=dtype)
    expected, stream = target.clone(), torch.cuda.Stream()
    targets, sources = [], []
    for i in range(100):
        targets.append(target[:, 9 * i : 9 * i + 4])
        sources.append(source[:, 4 * (99 - i) :][:, :4])
        expected[:, 9 * i : 9 * i + 4] = sources[-1]
    push(targets, sources, stream)
    torch.ops.cp_dispatch.join_streams(target, stream.cuda_stream, False)
    assert torch.equal(target, expected)


@pytest.fixture
def loaded():
    """Load the kernels of these tests, which run in any order. CUDA loads a kernel at its first
    launch, and then waits for all streams, even one that waits for a flag."""
    torch.cuda._sleep(1)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 4, device="cuda").to(dtype)
        assert bool((x.fill_(1).clone() == 1).all())
    x.copy_(torch.randn(4, 4, device="cuda"))
    torch.cuda.synchronize()


def test_flags_order_streams(loaded):
    """A stream that takes a flag waits until another has raised it, and lowers it again."""
    flags, more = torch.zeros(2, 150, dtype=torch.int32, device="cuda")
    x, seen = (torch.zeros(1, 2**20, device="cuda") for _ in range(2))
    # Another priority, so that the waiting stream does not share a queue with what it waits for.
    waiting = torch.cuda.Stream(priority=-1)
    raising, current = (torch.cuda.Stream() for _ in range(2))
    for step in range(1, 4):
        torch.cuda.synchronize()
        push([seen], [x], waiting, first=addresses(more), take=addresses(flags))
        with torch.cuda.stream(current):
            torch.cuda._sleep(10_000_000)
            x.fill_(step)
            torch.ops.cp_dispatch.raise_flags(x, addresses(flags), raising.cuda_stream)
        torch.cuda.synchronize()
        assert bool((seen == step).all()) and not bool(flags.any())
        assert bool((more == 1).all())  # raised before, and not taken by any stream


@pytest.mark.parametrize("count", [1, 4, 64, 65])
@pytest.mark.parametrize("rows", [8, 4096], ids=["short", "long"])
def test_push_in_the_current_stream(loaded, count, rows):
    """Flags and copies one after another, repeatedly, in one kernel, or in two if there are many
    copies. Another stream acts as the peer."""
    room = torch.zeros(4096 + count * rows * 64, dtype=torch.uint8, device="cuda")
    places = room[4096:].view(torch.bfloat16).view(count, rows, 1, 32)
    source = torch.zeros(1, count * rows, 1, 32, dtype=torch.bfloat16, device="cuda")
    own, theirs, full, came = torch.zeros(4, 3, dtype=torch.int32, device="cuda")
    moves = []
    for i in range(count):
        moves += [0, rows * (count - 1 - i), rows, places[i].data_ptr(), rows * 64]
    peer = torch.cuda.Stream(priority=-1)
    # CUDA loads a kernel at its first launch, and then waits for all streams, even one that waits
    # for a flag.
    torch.ops.cp_dispatch.push_rows([source], room, moves, [], [], [], [], -1, False)
    for _ in range(3):
        source.copy_(torch.randn(source.shape, device="cuda"))
        torch.cuda.synchronize()
        with torch.cuda.stream(peer):  # arrives late
            torch.cuda._sleep(10_000_000)
        with torch.cuda.stream(peer):
            torch.ops.cp_dispatch.raise_flags(room, addresses(theirs), peer.cuda_stream)
            torch.ops.cp_dispatch.push_slabs(
                [], [], room, (), addresses(full), addresses(came), (), peer.cuda_stream, False
            )
        torch.ops.cp_dispatch.push_rows(
            [source], room, moves, addresses(own), addresses(theirs), addresses(full),
            addresses(came), -1, False,
        )  # fmt: skip
        seen = places.clone()
        torch.cuda.synchronize()
        assert torch.equal(seen, source.view(count, rows, 1, 32).flip(0))
        assert bool((own == 1).all())
        assert not any(bool(x.any()) for x in (theirs, full, came, room[:4096]))


def test_streams_join():
    x, side = torch.zeros(1, 2**20, device="cuda"), torch.cuda.Stream()
    torch.cuda._sleep(10_000_000)
    x.fill_(1)
    torch.ops.cp_dispatch.join_streams(x, side.cuda_stream, True)
    with torch.cuda.stream(side):
        x.mul_(3)
        torch.cuda._sleep(10_000_000)
        x.add_(1)
    torch.ops.cp_dispatch.join_streams(x, side.cuda_stream, False)
    assert bool((x * 2 == 8).all())


@pytest.mark.parametrize("here_only", [True, False], ids=["current stream", "side stream"])
@pytest.mark.parametrize("length, run", [(4, 4), (64, 4), (400, 4), (4096, 4096), (12, 3)])
def test_push_heads(length, run, here_only):
    """Copy some heads of some rows from one GPU to itself: few and many copies, short and long,
    rows that are not adjacent, and one number per row. Wrong numbers raise."""
    batch, heads, dim = 2, 6, 64
    wide = randoms(batch, length, 3, heads, dim, dtype=torch.bfloat16)
    source = wide[:, :, 1].transpose(1, 2)  # as in a joint projection of query, key and value
    numbers_a_row = randoms(batch, heads, length)
    count, size = 2, 2 * batch * length * dim * 2
    here = torch.zeros(4096 + size + batch * count * length * 4, dtype=torch.uint8, device="cuda")
    start, moves = here.data_ptr(), []
    for row in range(batch):
        for first in range(0, length, run):
            at = start + 4096 + (row * length + first) * count * dim * 2
            moves += [0, row, first, run, 3, count, at, count * dim * 2]
            at = start + 4096 + size + (row * count * length + first) * 4
            moves += [1, row, first, run, 3, count, at, length * 4]
    flags = [[start], [start], [start + 4], [start + 4]]
    numbers, sources = numbers_of(moves, *flags), [source, numbers_a_row]
    stream = CURRENT if here_only else torch.cuda.Stream().cuda_stream
    for _ in range(2):
        here[4096:].zero_()
        push_heads(sources, here, numbers, stream, True)
        found, of_rows = here[4096:].split([size, here.numel() - 4096 - size])
        want = source[:, 3:5].transpose(1, 2)
        assert torch.equal(found.view(torch.bfloat16).view(want.shape), want)
        want = numbers_a_row[:, 3:5]
        assert torch.equal(of_rows.view(torch.float32).view(want.shape), want)
        assert not here[:4096].any()
    bad = [(0, 2), (0, -1), (1, batch), (2, -1), (3, length + 1), (4, heads), (5, heads), (5, -1)]
    for place, value in bad:
        wrong = [*moves]
        wrong[place] = value
        with pytest.raises(RuntimeError, match="does not have|no such"):
            push_heads(sources, here, numbers_of(wrong, *flags), stream, True)
    with pytest.raises(RuntimeError, match="eight numbers"):
        push_heads(sources, here, numbers_of(moves[:-1], *flags), stream, True)
    with pytest.raises(RuntimeError, match="contiguous"):
        push_heads([source.transpose(2, 3), numbers_a_row], here, numbers, stream, True)


@pytest.mark.parametrize("here_only", [True, False], ids=["current stream", "side stream"])
def test_push_heads_of_one_row(here_only):
    """The stride of a dim of size 1 may be less than the row, which copies would not accept. The
    row is not a multiple of 16 bytes either, so no kernel copies it."""
    source = randoms(1, 6, 1, 3, dtype=torch.bfloat16)
    here = torch.zeros(4096 + 4 * 3 * 2, dtype=torch.uint8, device="cuda")
    start = here.data_ptr()
    flags = [[start], [start], [start + 4], [start + 4]]
    numbers = numbers_of([0, 0, 0, 1, 2, 4, start + 4096, 4 * 3 * 2], *flags)
    stream = CURRENT if here_only else torch.cuda.Stream().cuda_stream
    push_heads([source], here, numbers, stream, True)
    assert torch.equal(here[4096:].view(torch.bfloat16), source[0, 2:].flatten())
    assert not here[:4096].any()


@pytest.mark.parametrize("runs", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_copy_and_pull(runs, dtype):
    """Strided copies to the room, then rows of it to their places: few and many, of one GPU with
    itself. Wrong numbers raise."""
    batch, heads, length, dim = 2, 3, 40, 8
    wide = (randoms(batch, length, 2, heads, dim, dtype=torch.float32) * 9).to(dtype)
    x = wide[:, :, 1].transpose(1, 2)  # (B, H, L, D)
    room = torch.zeros(4096 + x.nbytes, dtype=torch.uint8, device="cuda")
    rows = room[4096:].view(dtype).view(length, batch, heads, dim)
    into = torch.empty(2 + length, batch, heads, dim, dtype=dtype, device="cuda")[1:-1]
    offered = [(rows, x.permute(2, 0, 1, 3))]
    step = -(-length // runs)
    starts = range(0, length, step)
    needed = [(into[i : i + step].flatten(1), rows[i : i + step].flatten(1)) for i in starts]
    tensors = [x, into, room]
    copies, slabs = (copies_of(pairs, tensors) for pairs in (offered, needed))
    flags = [[room.data_ptr()], [room.data_ptr()], [room.data_ptr() + 4], [room.data_ptr() + 4]]
    numbers = numbers_of(copies, slabs, *flags)
    for _ in range(2):
        room[4096:].zero_()
        into.zero_()
        copy_and_pull(tensors, room, numbers)
        assert torch.equal(into, x.permute(2, 0, 1, 3))
        assert not room[:4096].any()
    copy_and_pull(tensors, room, numbers_of([], [], *flags))  # flags alone
    assert not room[:4096].any()
    for bad in (
        numbers_of(copies[:-1], slabs, *flags), numbers_of(copies, slabs[:-1], *flags),
        numbers_of([3, *copies[1:]], slabs, *flags), numbers_of([-1, *copies[1:]], slabs, *flags),
        numbers_of(copies, copies, *flags), numbers[:5], numbers.cuda(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            copy_and_pull(tensors, room, bad)


@pytest.mark.parametrize("rows", [3, 20])
def test_push_pair(rows):
    """Copies and flags of one GPU with itself, few and many. Wrong numbers raise."""
    pair = [randoms(2, rows, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    heads_first = [x.transpose(1, 2) for x in pair]
    here = torch.zeros(4096 + sum(x.nbytes for x in pair), dtype=torch.uint8, device="cuda")
    start, row, moves = here.data_ptr(), pair[0][0, 0].nbytes, []
    for index, i in itertools.product(range(2), range(rows)):
        place = start + 4096 + index * pair[0].nbytes + i * row
        moves += [index, i, 1, place, rows * row]
    flags = [[start], [start], [start + 4], [start + 4]]
    numbers = numbers_of(moves, *flags)
    for _ in range(2):
        here[4096:].zero_()
        push_pair(*heads_first, here, numbers)
        assert torch.equal(here[4096:].view(torch.bfloat16), torch.cat(pair).flatten())
        assert not here[:4096].any()
    for bad in (
        numbers[:-1], numbers[:4], numbers[::2], numbers.int(), numbers.cuda(),
        numbers_of(moves[:-1], *flags), numbers_of([2, *moves[1:]], *flags),
        numbers_of([0, rows, *moves[2:]], *flags), numbers_of([0, -1, *moves[2:]], *flags),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            push_pair(*heads_first, here, bad)
    with pytest.raises(RuntimeError, match="contiguous"):
        push_pair(*(x.contiguous() for x in heads_first), here, numbers)
