"""Values that are computed from tensors, cached as long as they are needed."""

import weakref
from unittest import mock

import pytest
import torch

from cp_dispatch.by_need import kept
from cp_dispatch.by_need.kept import _MAX_KEPT, Kept, KeptByAll


class Found:
    """A computed value."""


@pytest.mark.parametrize("capturing", [False, True])
def test_what_a_cuda_graph_reads_outlives_others(monkeypatch, capturing):
    """A graph reads indices and cut masks whenever it is replayed."""
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


@pytest.mark.parametrize("kind", [Kept, KeptByAll])
def test_other_objects_of_the_same_contents_are_the_same(kind):
    """As compiled graphs pass them. What is written, in whichever object, is seen in all."""
    known, mask = kind(), torch.ones(4)

    def get(x, key="key"):
        return known.get((None, x), key, Found)

    first = get(mask)
    assert all(get(x) is first for x in (mask, mask.detach(), mask.view(4), mask))
    others = [get(x) for x in (mask[:2], mask[2:], mask.view(2, 2), mask[::2], mask.clone())]
    assert len({first, get(mask, "other"), *others}) == 7
    assert get(mask) is first
    mask.detach().zero_()
    again = get(mask)
    assert again is not first and get(mask.detach()) is again


def test_what_is_kept_goes_after_its_tensors():
    known, mask, other = Kept(), torch.ones(2), torch.ones(3)
    gone = weakref.ref(known.get((mask, None), "key", Found))
    del mask
    known.get((other, None), "key", Found)
    assert gone() is None


def test_what_ranks_told_each_other_stays_while_the_mask_does():
    """A rank that asked again would wait for the ranks that know the answer."""
    told, masks = KeptByAll(), [(torch.ones(2), None, torch.ones(3)) for _ in range(3 * _MAX_KEPT)]
    found = [told.get(mask, "key", Found) for mask in masks]
    assert all(told.get(mask, "key", Found) is x for mask, x in zip(masks, found, strict=True))
    first, *_ = masks
    assert told.get(first, "other", Found) is not found[0]
    assert told.get((first[0], None, torch.ones(3)), "key", Found) is not found[0]
    assert told.get((first[0].view(1, 2), *first[1:]), "key", Found) is not found[0]
    assert told.get((first[0].view(2), *first[1:]), "key", Found) is found[0]
    first[2].zero_()
    again = told.get(first, "key", Found)
    assert again is not found[0] and told.get(first, "key", Found) is again
    gone = weakref.ref(found[1])
    del found, masks, first, _
    assert gone() is None


def test_what_ranks_told_each_other_goes_with_any_tensor():
    """A list of a mask may serve many masks."""
    told, first, gone = KeptByAll(), torch.ones(2), []
    for _ in range(3):
        mask = first, torch.ones(3)
        gone.append(weakref.ref(told.get(mask, "key", Found)))
        assert told.get(mask, "key", Found) is gone[-1]()
        del mask
    assert [ref() is None for ref in gone] == [True, True, False]


def test_nobody_counts_what_is_written_in_inference_mode():
    told = KeptByAll()
    with torch.inference_mode():
        mask = (torch.ones(2),)
    assert told.get(mask, "key", Found) is not told.get(mask, "key", Found)


@pytest.mark.parametrize("known", [Kept, KeptByAll])
def test_nobody_counts_what_replays_write(monkeypatch, known):
    known, mask = known(), (torch.ones(2), None)
    monkeypatch.setattr(kept, "is_of_replays", lambda x: x is mask[0])
    assert known.get(mask, "key", Found) is not known.get(mask, "key", Found)
    other = (None, torch.ones(2))
    assert known.get(other, "key", Found) is known.get(other, "key", Found)


@pytest.mark.parametrize("kind", [Kept, KeptByAll])
def test_a_tensor_that_was_given_other_memory_is_another(kind):
    """Assigning ``.data`` does not change the version. It may also point elsewhere in the same
    storage."""
    known, buffer = kind(), torch.ones(8)
    mask = buffer[:4]
    first = known.get((mask,), "key", Found)
    assert known.get((mask,), "key", Found) is first
    for other in (buffer[4:], buffer[::2], torch.ones(4)):
        version = mask._version
        mask.data = other
        assert mask._version == version and known.get((mask,), "key", Found) is not first
