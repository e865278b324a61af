"""Rows of a tensor by few slices or by an index: the same rows, also in other dtypes."""

import pytest
import torch

from cp_dispatch.by_need.copies import copy_all
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
