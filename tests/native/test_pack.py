"""Packing rows into one buffer, and indices: the extension's kernels agree with their twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.native import rows
from cp_dispatch.native.permute import (
    inverse_permutation,
    pack_sequence,
    packed_views,
    permute_sequence,
    span_indices,
    unpack_sequence,
)
from cp_dispatch.schedules.pair import Pair
from tests.native.test_permute import numbered

COPIES = {"op": rows.copy_rows, "twin": rows.copy_rows_eager}


@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("start", [0, 2])
def test_pack_of_a_range_is_token_major(start, length):
    k, v = torch.randn(2, 3, 8, 4), torch.randn(2, 8, 3, 6).transpose(1, 2)
    buffer = pack_sequence([k, v], start=start, length=length)
    stop = 8 if length is None else start + length
    parts = [x[:, :, start:stop].transpose(1, 2).reshape(-1) for x in (k, v)]
    assert torch.equal(buffer, torch.cat(parts))
    views = packed_views(buffer, [k, v], stop - start)
    assert [x.data_ptr() for x in views] == [
        buffer.data_ptr(), buffer[parts[0].numel() :].data_ptr()
    ]  # fmt: skip
    targets = [torch.zeros_like(k), torch.zeros_like(v)]
    unpack_sequence(buffer, targets, start=start, length=length)
    for x, target in zip((k, v), targets, strict=True):
        assert torch.equal(target[:, :, start:stop], x[:, :, start:stop])
        assert not target[:, :, :start].any() and not target[:, :, stop:].any()


def test_pack_into_a_slice_of_a_buffer():
    x = torch.randn(1, 2, 4, 3)
    buffer = torch.zeros(30)
    assert pack_sequence([x], out=buffer[3:27]).data_ptr() == buffer[3:].data_ptr()
    assert torch.equal(buffer[3:27], x.transpose(1, 2).reshape(-1))
    assert not buffer[:3].any() and not buffer[27:].any()


def test_pack_along_the_first_dim():
    x, y = torch.randn(4, 3), torch.randn(4)
    assert torch.equal(pack_sequence([x, y], dim=0), torch.cat([x.flatten(), y]))


def test_pack_is_differentiable_without_out():
    x = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    for index in (None, torch.tensor([2, -1, 2])):
        assert torch.autograd.gradcheck(
            lambda x, y, index=index: pack_sequence([x, y], index), (x, y)
        )
        with torch.no_grad():
            plain = pack_sequence([x, y], index)
        assert torch.equal(pack_sequence([x, y], index), plain)
    with pytest.raises(ContextParallelError, match="not differentiable"):
        pack_sequence([x], out=torch.empty(12, dtype=torch.float64))
    with pytest.raises(ContextParallelError, match="not differentiable"):
        unpack_sequence(torch.empty(12, dtype=torch.float64), [x])


@st.composite
def packs(draw):
    """Tensors with one sequence length, a place for each row, and the size of the target."""
    length, batch = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    shapes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6))
    size = length + draw(st.integers(0, 4))
    per_batch = draw(st.booleans())
    places = [draw(st.permutations(range(size)))[:length] for _ in range(batch if per_batch else 1)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]))
    token_major = draw(st.booleans())
    tensors = []
    for heads, dim in shapes:
        x = numbered(batch, length, heads, dim, dtype=dtype).transpose(1, 2)
        tensors.append(x if token_major else x.contiguous())
    return tensors, torch.tensor(places, dtype=torch.int64).reshape(len(places), length), size


@given(packs())
def test_pack_and_unpack_round_trip(problem):
    tensors, places, size = problem
    index = places if len(places) > 1 else places[0]
    # Rows go where `places` says. Packing by the same index returns them.
    buffer = pack_sequence(tensors)
    targets = [x.new_zeros(*x.shape[:2], size, x.size(3)) for x in tensors]
    unpack_sequence(buffer, targets, index)
    assert torch.equal(pack_sequence(targets, index), buffer)
    # Rows that are no source's target stay as they were, and the inverse index says so too.
    inverse = rows.invert_index(index, size)
    for x, target in zip(permute_sequence(tensors, inverse, 2), targets, strict=True):
        assert torch.equal(x, target)


@given(packs())
def test_kernels_equal_their_twins(problem):
    tensors, places, size = problem
    for index in (places if len(places) > 1 else places[0], places.int(), None):
        for scatter in (False, True):
            shape = size if index is not None else tensors[0].size(2)
            big = [x.new_zeros(*x.shape[:2], shape, x.size(3)) for x in tensors]
            results = []
            for copy in COPIES.values():
                if scatter:
                    out = [torch.ones_like(x) for x in big]
                    copy(out, tensors, index, [2] * len(big), True)
                else:
                    out = [torch.ones_like(x) for x in tensors]
                    copy(out, big, index, [2] * len(big), False)
                results.append(out)
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b)


# Indices.


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 40))))
def test_span_indices(spans):
    expected = [p for position, length in spans for p in range(position, position + length)]
    assert span_indices(spans).tolist() == expected
    tensor = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)
    assert rows.span_indices_eager(tensor, len(expected)).tolist() == expected
    flipped = tensor.flip(1).contiguous().flip(1).mT.contiguous().mT
    assert span_indices(flipped).tolist() == expected


@pytest.mark.parametrize("spans, total", [
    ([[0, 2], [5, 1]], 2), ([[0, 2], [5, 1]], 4), ([[0, 3], [5, -1]], 2),
])  # fmt: skip
def test_spans_that_do_not_add_up_raise(spans, total):
    """Their indices would run into those of other rows."""
    for indices_of in (rows.span_indices, rows.span_indices_eager):
        with pytest.raises((ContextParallelError, RuntimeError), match=f"spans? .*{total}"):
            indices_of(torch.tensor(spans), total)


def test_many_span_indices_by_several_threads():
    lengths = torch.randint(0, 50, (5000,))
    spans = torch.stack([torch.randint(0, 1 << 40, (5000,)), lengths], 1)
    total = int(lengths.sum())
    assert torch.equal(span_indices(spans), rows.span_indices_eager(spans, total))


@given(st.integers(0, 30), st.integers(1, 3), st.sampled_from([torch.int64, torch.int32]))
def test_inverse_permutation(size, batch, dtype):
    indices = torch.stack([torch.randperm(size) for _ in range(batch)]).to(dtype)
    inverse = inverse_permutation(indices)
    assert inverse.dtype is dtype and torch.equal(inverse.long(), indices.argsort(-1))
    assert torch.equal(inverse, rows.invert_index_eager(indices, size))
    assert torch.equal(inverse_permutation(indices[0]), inverse[0])
    assert torch.equal(inverse_permutation(inverse), indices)


@pytest.mark.parametrize("bad", [[0, 0, 1], [0, 1, 3], [0, -1, 1], [0, 1, -2], [[0, 1], [1, 1]]])
def test_what_is_no_permutation_raises(bad):
    with pytest.raises(ContextParallelError):
        inverse_permutation(torch.tensor(bad))


def test_a_pair_is_packed_like_two_tensors():
    key, value = torch.randn(2, 3, 5, 4), torch.randn(2, 5, 3, 6).transpose(1, 2)
    pair = Pair(key, value)
    buffer = pair.buffer(5)
    pair.pack(key, value, buffer)
    assert torch.equal(buffer, pack_sequence([key, value]))
