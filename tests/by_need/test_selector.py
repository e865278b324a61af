"""Rows of a tensor by few slices or by an index: the same rows, also in other dtypes."""

import pytest
import torch

from cp_dispatch.by_need.copies import copies, copy_all
from cp_dispatch.by_need.selector import Selector
from cp_dispatch.layouts import Span

SPANS = {
    "none": (),
    "slice": (Span(3, 4),),
    "slices": (Span(7, 2), Span(0, 1), Span(4, 3)),
    "index": (Span(9, 1), Span(0, 2), Span(4, 1), Span(7, 2), Span(3, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_slices_and_indices_choose_alike(spans, dtype):
    """``dtype`` is that of what is written into."""
    at = [p for start, length in spans for p in range(start, start + length)]
    selector = Selector(spans, torch.device("cpu"))
    rows, values = torch.randn(10, 2, 3), torch.randn(len(at), 2, 3)
    assert torch.equal(selector.take(rows), rows[at])

    packed = torch.zeros(len(at) + 1, 2, 3, dtype=dtype)
    copy_all(selector.taken_into(packed[:-1], rows))
    assert torch.equal(packed[:-1], rows[at].to(dtype)) and not packed[-1].any()

    for add in (False, True):
        into = rows.to(dtype)
        want = into.clone()
        want[at] = (want[at] if add else 0) + values.to(dtype)
        for part, own in selector.parts(into, values.to(dtype)):
            part.add_(own) if add else part.copy_(own)
        assert torch.equal(into, want)

    into = torch.zeros(10, 2, 3, dtype=dtype)
    copy_all(list(selector.parts(into, values)))
    assert torch.equal(into[at], values.to(dtype))
    assert not into[[p for p in range(10) if p not in at]].any()


def test_as_few_launches_as_can_be():
    """One for all rows by the same index, which are not copied first, none for no rows."""
    selector = Selector(SPANS["index"], torch.device("cpu"))
    tensors = [torch.randn(10, 3) for _ in range(2)]
    taken = [pair for x in tensors for pair in selector.taken_into(torch.zeros(7, 3), x)]
    put = [pair for x in tensors for pair in selector.parts(x, torch.zeros(7, 3))]
    for pairs, scatter in ((taken, False), (put, True)):
        (found,) = copies(pairs)
        rows = found.targets if scatter else found.sources
        assert found.scatter == scatter and all(map(lambda x, y: x is y, rows, tensors))
    assert copies([(x[:0], x[3:3]) for x in tensors]) == []


def test_one_item():
    into = torch.zeros(2)
    copy_all([(into[:1], torch.ones(1))])
    assert into.tolist() == [1, 0]
