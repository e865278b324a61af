"""Sums of parts: against float64, with any strides, and the op's contract."""

import pytest
import torch

from cp_dispatch.native import parts
from cp_dispatch.native.merge import token_major
from cp_dispatch.native.parts import add_up, sum_parts

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPE = (2, 3, 5, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 60])
def test_rounded_once(count, dtype):
    parts = [torch.randn(SHAPE).to(dtype) for _ in range(count)]
    parts[0] = parts[0].transpose(1, 2).contiguous().transpose(1, 2)
    out = token_major(*SHAPE, like=parts[0])
    sum_parts(parts, out)
    exact = sum(part.double() for part in parts)
    # Half a unit in the last place of the result, plus the error that float32 accumulates.
    slack = 0.5 * torch.finfo(dtype).eps * exact.abs()
    wide = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32)
    slack += count * wide.eps * sum(part.double().abs() for part in parts)
    slack += torch.finfo(dtype).smallest_normal
    assert ((out.double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wide_parts_of_a_narrow_sum(dtype):
    parts = [torch.full(SHAPE, 1.0), torch.full(SHAPE, 2.0**-7)]
    out = torch.empty(SHAPE, dtype=dtype)
    sum_parts(parts, out)
    assert torch.equal(out, torch.full(SHAPE, 1 + 2.0**-7).to(dtype))


def test_the_sum_may_be_a_part():
    part, other = torch.randn(SHAPE), torch.randn(SHAPE)
    expected = part + other
    sum_parts([part, other], part)
    assert torch.equal(part, expected)


def test_opcheck():
    parts = [torch.randn(SHAPE) for _ in range(3)]
    torch.library.opcheck(
        torch.ops.cp_dispatch.sum_parts.default,
        (parts, [0, 0, 5, 2, 0, 0, 2, 0], [torch.empty(SHAPE)]),
    )


def places_of(generator, length, count):
    for _ in range(count):
        start, stop = sorted(torch.randint(length + 1, (2,), generator=generator).tolist())
        yield start, stop - start, int(torch.randint(4, (), generator=generator))


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_parts(seed):
    """Parts that cover some rows of two sums. Rows that none covers are zero."""
    generator = torch.Generator().manual_seed(seed)
    length, count = 17, seed % 5
    places = tuple(places_of(generator, length, count))
    totals = [torch.full((2, 3, length, dim), torch.nan) for dim in (8, 5)]
    expected = [torch.zeros_like(x) for x in totals]
    parts = [[], []]
    for start, rows, first in places:
        for total, own, want in zip(totals, parts, expected, strict=True):
            own.append(torch.randn(2, 3, first + rows + 1, total.size(3)))
            want[:, :, start : start + rows] += own[-1][:, :, first : first + rows]
    add_up(totals, parts, places)
    for total, want in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, want)


def test_what_the_kernel_does_not_take_is_summed_without_it(monkeypatch):
    """It takes 48 parts of a row, contiguous head dims, and no narrow sum of float64."""
    monkeypatch.setattr(parts, "has_kernel", lambda *_: True)

    def by_kernel(count=48, dtype=torch.float32, part=None):
        part = torch.zeros(1, 1, 4, 8) if part is None else part
        total = torch.empty(1, 1, 4, 8, dtype=dtype)
        add, _ = parts.way_to_add([part] * count, [total], ((0, 4, 0),) * count)
        return add is not parts.sum_parts_eager

    assert by_kernel() and by_kernel(dtype=torch.bfloat16)
    assert not by_kernel(49)
    assert not by_kernel(dtype=torch.float64)
    assert by_kernel(dtype=torch.float64, part=torch.zeros(1, 1, 4, 8, dtype=torch.float64))
    assert not by_kernel(part=torch.zeros(1, 1, 8, 4).mT)
