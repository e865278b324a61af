"""What is worked out of tensors, for as long as somebody needs it."""

import weakref
from unittest import mock

import pytest
import torch

from cp_dispatch.by_need import kept
from cp_dispatch.by_need.kept import _MAX_KEPT, Kept


class Found:
    """What was worked out."""


@pytest.mark.parametrize("capturing", [False, True])
def test_what_a_cuda_graph_reads_outlives_others(monkeypatch, capturing):
    """A graph goes on reading indices and cut masks wherever it is replayed."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(kept, "is_capturing", lambda: capturing)
    known = Kept()
    first = weakref.ref(known.get((), "first", Found))
    assert known.get((), "first", Found) is first()
    for key in range(_MAX_KEPT + 1):
        known.get((), key, Found)
    assert (first() is None) == (not capturing)


def test_nothing_is_asked_of_cuda_where_it_is_not(monkeypatch):
    asked = mock.Mock()
    monkeypatch.setattr(kept, "is_capturing", asked)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for tensors in ((), (torch.ones(2),)):
        Kept().get(tensors, "key", Found)
    asked.assert_not_called()
