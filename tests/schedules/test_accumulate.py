"""Partial results of any windows of rows, combined: outputs and gradients."""

import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_dispatch.layouts import Tile
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules import accumulate
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import Rows, backward_block, forward_block
from cp_dispatch.schedules.job import Job
from tests.native.test_merge import DTYPES, INF, SHAPE, assert_as_good, formula64, partial, wide


def window(start: int, length: int, row: int | None = None) -> Tile:
    return Tile(start, length, 0, 0, False, row=row)


def windows(order: str) -> list[Tile]:
    return [window(*rows) for rows in ORDERS[order]]


# The rows (start, length) that the tiles of one shard of 10 rows cover, in order.
ORDERS = {
    "one": [(0, 10)],
    "whole twice": [(0, 10), (0, 10)],
    "whole often": [(0, 10)] * 4,
    "whole, part": [(0, 10), (4, 6)],
    "part, whole": [(4, 6), (0, 10)],
    "whole, part, whole": [(0, 10), (0, 3), (0, 10)],
    "part, whole, part": [(2, 5), (0, 10), (4, 6)],
    "parts side by side": [(0, 4), (4, 6)],
    "parts that overlap": [(0, 7), (3, 7), (5, 2)],
    "rows left out": [(3, 2)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_accumulator(dtype, order):
    query = torch.empty(SHAPE[0], SHAPE[1], SHAPE[2], 6, dtype=dtype)  # Dv differs from D
    tiles = [
        (*partial(dtype, (*SHAPE[:2], length, SHAPE[3])), start) for start, length in ORDERS[order]
    ]
    # Before the first tile, no key has been seen.
    parts = [(torch.zeros(SHAPE).double(), torch.full(SHAPE[:3], -INF).double())]
    for out, lse, start in tiles:
        padded = torch.zeros(SHAPE).double(), torch.full(SHAPE[:3], -INF).double()
        window = slice(start, start + out.size(2))
        padded[0][:, :, window], padded[1][:, :, window] = out, lse
        parts.append(padded)
    exact, exact_lse = formula64(*parts)
    empty = exact_lse == -INF
    exact[empty] = 0.0

    result = OutputAccumulator(query, SHAPE[3], windows(order), dtype, wide(dtype))
    for (out, lse, _), tile in zip(tiles, windows(order), strict=True):
        result.add(out, lse, tile)
    out, lse = result.finish()

    assert out.dtype is dtype and lse.dtype is wide(dtype)
    assert out.stride() == token_major(*SHAPE, like=query).stride() and lse.is_contiguous()
    assert (out[empty] == 0).all() and torch.equal(lse == -INF, empty)
    torch.testing.assert_close(lse, exact_lse.to(lse.dtype))  # torch's default tolerances
    if dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(out, exact.to(dtype))
    else:
        # Every merge is in float32, with one rounding at the end: as good as the exact result
        # rounded.
        assert_as_good(out, exact, exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulator_without_a_tile_is_a_fully_masked_row(dtype):
    query = torch.empty(SHAPE, dtype=dtype)
    out, lse = OutputAccumulator(query, 5, [], dtype, wide(dtype)).finish()
    assert out.shape == (*SHAPE[:3], 5) and out.dtype is dtype and (out == 0).all()
    assert out.stride() == token_major(*SHAPE[:3], 5, like=query).stride()
    assert lse.shape == SHAPE[:3] and lse.dtype is wide(dtype) and (lse == -INF).all()


def test_accumulator_returns_one_tile_bit_by_bit():
    out, lse = partial(torch.bfloat16)
    result = OutputAccumulator(out, SHAPE[3], [window(0, 10)], torch.bfloat16, torch.float32)
    result.add(out, lse, window(0, 10))
    got, got_lse = result.finish()
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_rows_that_are_combined_in_place_are_cut_once(monkeypatch):
    """A view takes the host as long as a small op."""
    places = []

    def merge(out_a, lse_a, out_b, lse_b, out, lse):
        places.append((out is out_a and lse is lse_a, out.size(2)))

    monkeypatch.setattr(accumulate, "merge_partials", merge)
    first, *later = [window(0, 10), window(0, 4), window(4, 6)]
    whole = token_major(*SHAPE, like=torch.empty(0)), torch.empty(SHAPE[:3])
    result = OutputAccumulator(whole[0], SHAPE[3], [first, *later], torch.float32, torch.float32)
    result.add(*whole, first)
    for tile in later:
        rows = *SHAPE[:2], tile.query_length, SHAPE[3]
        result.add(*partial(torch.float32, rows), tile)
    assert places == [(True, 4), (True, 6)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=8))
def test_segments_are_the_rows_between_edges(rows):
    found = [(start, start + length) for start, length in rows]
    edges = sorted({0, 30, *(edge for window in found for edge in window)})
    assert accumulate._make_segments(tuple(found), 30) == [
        (a, b, sum(start <= a and b <= stop for start, stop in found))
        for a, b in itertools.pairwise(edges)
    ]


def test_a_window_looks_at_its_own_segments_alone(monkeypatch):
    """With 1,000 documents a shard has thousands of each."""
    count, asked = 500, []

    def counted(segment, name):
        asked.append(name)
        return object.__getattribute__(segment, name)

    out, lse = torch.zeros(1, 1, count, 4), torch.zeros(1, 1, count)
    rows = [window(i, 1) for i in range(count)]
    result = OutputAccumulator(out, 4, rows, torch.float32, torch.float32)
    monkeypatch.setattr(accumulate._Segment, "__getattribute__", counted, raising=False)
    for tile in rows:
        result.add(out[:, :, :1], lse[:, :, :1], tile)
    assert len(asked) < 100 * count


@pytest.mark.parametrize("order", ORDERS)
def test_accumulator_keeps_the_wide_result_if_asked(order):
    """The requested dtype decides, not query's. Narrowing afterwards gives the narrow result."""
    tiles = [
        (*partial(torch.bfloat16, (*SHAPE[:2], n, SHAPE[3])), start) for start, n in ORDERS[order]
    ]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        like = tiles[0][0].new_empty(SHAPE)
        result = OutputAccumulator(like, SHAPE[3], windows(order), dtype, torch.float32)
        for (out, lse, _), tile in zip(tiles, windows(order), strict=True):
            result.add(out.clone(), lse.clone(), tile)
        results.append(result.finish())
    (wide_out, wide_lse), (out, lse) = results
    assert wide_out.dtype is torch.float32 and out.dtype is torch.bfloat16
    assert torch.equal(wide_out.bfloat16(), out) and torch.equal(wide_lse, lse)


@pytest.mark.parametrize("order", ORDERS)
def test_accumulator_in_float64_for_narrow_partials(order):
    """As the math backend requests: nothing is rounded to the dtype of query or of the partials."""
    tiles = [
        (*partial(torch.float32, (*SHAPE[:2], n, SHAPE[3])), start) for start, n in ORDERS[order]
    ]
    like = torch.empty(SHAPE, dtype=torch.bfloat16)
    results = []
    for dtype in (torch.float32, torch.float64):
        result = OutputAccumulator(like, SHAPE[3], windows(order), torch.float64, torch.float64)
        for (out, lse, _), tile in zip(tiles, windows(order), strict=True):
            result.add(out.to(dtype), lse.double(), tile)
        results.append(result.finish())
    (out, lse), (wide_out, wide_lse) = results
    assert out.dtype is lse.dtype is torch.float64
    assert torch.equal(out, wide_out) and torch.equal(lse, wide_lse)


def test_accumulator_without_rows():
    query = torch.empty(2, 3, 0, 8)
    out, lse = OutputAccumulator(query, 8, [], torch.float32, torch.float32).finish()
    assert out.shape == (2, 3, 0, 8) and lse.shape == (2, 3, 0)


@st.composite
def many_windows(draw):
    """Windows of 10 rows, each of all batch rows or of one."""
    row = st.integers(0, SHAPE[0] - 1) if draw(st.booleans()) else st.none()
    tiles = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, 9))
        tiles.append(window(start, draw(st.integers(1, 10 - start)), draw(row)))
    return tiles


@given(many_windows(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_any_windows(tiles, dtype, seed):
    """Outputs as merged in float64, gradients as added in float64."""
    torch.manual_seed(seed)
    query = torch.empty(SHAPE, dtype=dtype)
    result = OutputAccumulator(query, SHAPE[3], tiles, dtype, wide(dtype))
    total = QueryGradient(query, tiles)
    parts = [(torch.zeros(SHAPE).double(), torch.full(SHAPE[:3], -INF).double())]
    exact_sum = torch.zeros(SHAPE, dtype=torch.float64)
    size = torch.zeros(SHAPE, dtype=torch.float64)
    for tile in tiles:
        batch = slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
        at = batch, slice(None), slice(tile.query_start, tile.query_start + tile.query_length)
        shape = parts[0][0][at].shape
        out, lse = partial(dtype, shape)
        share = torch.randn(shape).to(dtype)
        padded = torch.zeros(SHAPE).double(), torch.full(SHAPE[:3], -INF).double()
        padded[0][at], padded[1][at] = out, lse
        parts.append(padded)
        exact_sum[at] += share
        size[at] += share.double().abs()
        result.add(out, lse, tile)
        total.add(share, tile)
    exact, exact_lse = formula64(*parts)
    exact[exact_lse == -INF] = 0.0
    out, lse = result.finish()
    torch.testing.assert_close(lse, exact_lse.to(lse.dtype))
    torch.testing.assert_close(out, exact.to(dtype))
    grad = total.finish()
    assert (
        grad.dtype is dtype
        and grad.stride() == out.stride() == token_major(*SHAPE, like=query).stride()
    )
    # One rounding to the dtype, and the roundings of a few additions in the wide dtype.
    unit, wide_unit = torch.finfo(dtype).eps / 2, torch.finfo(wide(dtype)).eps
    bound = unit * exact_sum.abs() + len(tiles) * wide_unit * size
    assert ((grad.double() - exact_sum).abs() <= bound * (1 + 1e-6)).all()


def test_head_tail_windows_cost_one_merge_each(monkeypatch):
    """Rows with the same history are merged together. Results that nothing is merged into are not
    widened."""
    merges = []
    merge = accumulate.merge_partials

    def counted(*tensors):
        merges.append((tensors[4].size(2), tensors[4].dtype))
        merge(*tensors)

    monkeypatch.setattr(accumulate, "merge_partials", counted)
    for tiles, expected in (
        ([window(0, 10)] * 3, [(10, torch.float32), (10, torch.bfloat16)]),
        ([window(0, 10), window(5, 5), window(5, 5)], [(5, torch.float32), (5, torch.bfloat16)]),
        ([window(0, 10), window(5, 5), window(0, 5)], [(5, torch.bfloat16)] * 2),
        (
            [window(0, 10), window(0, 10), window(5, 5)],
            [(5, torch.bfloat16), (5, torch.float32), (5, torch.bfloat16)],
        ),
    ):
        merges.clear()
        like = torch.empty(SHAPE, dtype=torch.bfloat16)
        result = OutputAccumulator(like, SHAPE[3], tiles, torch.bfloat16, torch.float32)
        for tile in tiles:
            result.add(*partial(torch.bfloat16, (*SHAPE[:2], tile.query_length, SHAPE[3])), tile)
        result.finish()
        assert merges == expected


@pytest.mark.parametrize("larger", [False, True])
def test_what_a_kernel_gave_serves_if_it_is_no_part_of_more(larger):
    """A result must not keep memory alive that it does not use."""
    dtype, row = torch.float32, SHAPE[1] * SHAPE[3]
    size = SHAPE[0] * SHAPE[2] * row
    buffer = torch.zeros(size + larger)
    out = buffer[:size].view(SHAPE[0], SHAPE[2], SHAPE[1], SHAPE[3]).transpose(1, 2)
    tiles = [window(0, 10), window(0, 10)]
    result = OutputAccumulator(out, SHAPE[3], tiles, dtype, dtype)
    for tile, (part, lse) in zip(tiles, ((out, partial(dtype)[1]), partial(dtype)), strict=True):
        result.add(part, lse, tile)
    found, _ = result.finish()
    assert (found.data_ptr() == buffer.data_ptr()) == (not larger)
    assert found.untyped_storage().nbytes() == found.nbytes


def test_a_kernel_has_the_memory_of_those_before_it():
    """A kernel's results for only some rows are freed when the next kernel runs."""
    alive: list[weakref.ref] = []

    class Kernels:
        def forward(self, query, *rest):
            assert not any(ref() is not None for ref in alive)
            out = torch.ones(query.transpose(1, 2).shape).transpose(1, 2)
            alive.append(weakref.ref(out))
            return out, torch.zeros(query.shape[:3])

        def backward(self, grad_output, query, key, value, *rest):
            assert not any(ref() is not None for ref in alive)
            grads = [
                torch.ones(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value)
            ]
            alive.append(weakref.ref(grads[0]))
            return *grads, None

    job, x = Job(Kernels(), None, 1.0), torch.ones(SHAPE)
    tiles = (window(0, 4), window(4, 6))
    result = OutputAccumulator(x, SHAPE[3], tiles, x.dtype, x.dtype)
    forward_block(job, x, x, x, tiles, result)
    out, lse = result.finish()
    assert len(alive) == 2 and torch.equal(out, x) and not lse.any()
    alive.clear()
    grad = QueryGradient(x, tiles)
    backward_block(job, Rows(x, x, x, lse), x, x, tiles, grad, None)
    assert len(alive) == 2 and torch.equal(grad.finish(), x)


def test_rows_are_cut_once_for_tiles_with_the_same_rows():
    x, lse = torch.ones(SHAPE), torch.ones(SHAPE[:3])
    rows = Rows(x, 2 * x, 3 * x, lse)
    found = rows.of(window(4, 6))
    assert rows.of(window(4, 6)._replace(key_start=3)) is found
    assert [(y.size(2), int(y.max())) for y in found] == [(6, 1), (6, 2), (6, 3), (6, 1)]
    assert rows.of(window(4, 6, row=1))[0].size(0) == 1 and rows.of(window(0, 10))[0] is x
