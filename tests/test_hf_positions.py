"""Positions that transformers counts from 0: where they are found, and where they are true."""

import pytest
import torch

from cp_dispatch import HeadTail
from cp_dispatch.hf_positions import begin_elsewhere, count_from_zero

PRETEND = {"__name__": "transformers.masking_utils", "count_from_zero": count_from_zero}
exec(
    "def create_mask(rows, position_ids):\n"
    "    def mask_function():\n"
    "        return count_from_zero(rows)\n"
    "    return (lambda: mask_function())()\n",
    PRETEND,
)


@pytest.mark.parametrize("positions, counted", [
    (torch.arange(4)[None], True),
    (torch.arange(4).repeat(2, 1), True),
    (torch.stack([torch.arange(4), torch.arange(4, 8)]), False),
    (torch.arange(4, 8)[None], False),
    (torch.arange(5)[None], False),  # of other rows than the mask's
    (torch.arange(4).expand(3, 1, 4), False),  # of several kinds, as for pictures
    (None, False),
])  # fmt: skip
def test_positions_are_found(positions, counted):
    assert bool(PRETEND["create_mask"](4, positions)) == counted


def test_no_positions_and_no_rows():
    position_ids = torch.arange(4)[None]  # noqa: F841  not of a function of transformers
    assert count_from_zero(4) is False
    assert PRETEND["create_mask"](0, torch.empty(1, 0, dtype=torch.int64)) is False


@pytest.mark.parametrize("layout, lengths, elsewhere", [
    (None, [4, 4], [1]),
    (None, [2, 2, 1, 0], [1, 2]),
    (HeadTail(16, 2), [8, 8], [0, 1]),
    (HeadTail(2, 2), [1, 1], [1]),
    (HeadTail(16, 1), [16], []),
])  # fmt: skip
def test_who_holds_other_positions(layout, lengths, elsewhere):
    assert begin_elsewhere(layout, lengths) == elsewhere
