"""Positions that transformers counts from 0: where they are found, and where they are the true
ones."""

import pytest
import torch

from cp_dispatch import HeadTail
from cp_dispatch.hugging_face.positions import (
    begin_elsewhere,
    count_from_zero,
    generates,
    longest,
    taken_by_the_model,
)

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
    (torch.arange(5)[None], False),  # for other rows than the mask's
    (torch.arange(4), True),  # as those of CSM's depth decoder, which were silently wrong
    (torch.arange(4, 8), False),
    # With several axes, as for images: Qwen2-VL's text model made these itself, for a shard.
    (torch.arange(4).expand(3, 1, 4), True),
    (torch.tensor([[[0, 1, 1, 1]], [[0, 1, 1, 2]], [[0, 1, 2, 1]]]), False),
    (torch.arange(4, 8).expand(3, 1, 4), False),
    (None, False),
])  # fmt: skip
def test_positions_are_found(positions, counted):
    assert bool(PRETEND["create_mask"](4, positions)) == counted


@pytest.mark.parametrize("module, found", [
    ("transformers.generation.utils", True), ("transformers.trainer", False),
])  # fmt: skip
def test_generation_is_found(module, found):
    caller = {"__name__": module}
    exec("def call(function): return function()", caller)
    assert caller["call"](lambda: generates()) == found


def of_a_model(source: str, name: str = "transformers.models.some.modeling_some"):
    """``forward`` of a module of a model that makes its masks without positions."""
    masks = {"__name__": "transformers.masking_utils"}
    masks["asked"] = lambda rows: (bool(count_from_zero(rows)), taken_by_the_model())
    exec("def create_mask(rows): return asked(rows)", masks)
    model = {"__name__": name, "create_mask": masks["create_mask"]}
    exec(source, model)
    return model["forward"]


@pytest.mark.parametrize("given, counted", [
    (None, True), (torch.arange(4)[None], True), (torch.arange(4, 8)[None], False),
])  # fmt: skip
def test_positions_are_found_in_the_model(given, counted):
    """BERT does not pass them to the function that makes the mask."""
    forward = of_a_model(
        "def masks(rows): return create_mask(rows)\n"
        "def forward(rows, position_ids=None): return masks(rows)\n"
    )
    assert forward(4, position_ids=given) == (counted, True)


@pytest.mark.parametrize("given, counted", [(None, True), (torch.arange(4, 8)[None], False)])
def test_positions_that_a_model_made_were_not_given(given, counted):
    """OPT counts only what is not padding, so its own positions need not run from 0 to the end."""
    forward = of_a_model(
        "def decoder(rows, position_ids): return create_mask(rows)\n"
        "def forward(rows, made, position_ids=None): return decoder(rows, made)\n"
    )
    assert forward(4, torch.tensor([[0, 1, 2, -1]]), given) == (counted, True)


@pytest.mark.parametrize("of", ["transformers.models.some.modeling", "transformers_modules.some"])
@pytest.mark.parametrize("rows", [4, 1, 0])
def test_a_model_that_takes_no_positions(of, rows):
    """Also one whose code came with its weights."""
    forward = of_a_model("def forward(rows): return create_mask(rows)", of)
    assert forward(rows) == (rows > 0, False)


def test_positions_that_an_outer_forward_passes_under_another_name_are_taken():
    forward = of_a_model(
        "def decoder(rows, position_ids): return create_mask(rows)\n"
        "def forward(rows, places): return decoder(rows, places)\n"
    )
    assert forward(4, torch.arange(4, 8)[None]) == (False, True)


def test_positions_that_a_model_counts_are_not_taken():
    """BART's decoder alone: the one-dimensional positions that it made were not recognized as such,
    and the results were silently wrong."""
    forward = of_a_model(
        "def forward(rows):\n    position_ids = range(rows)\n    return create_mask(rows)\n"
    )
    assert forward(4) == (True, False)


@pytest.mark.parametrize("positions, want", [
    (torch.tensor([[4, 7, 5]]), 8), (None, 0), (torch.empty(1, 0, dtype=torch.int64), 0),
])  # fmt: skip
def test_the_longest_position(positions, want):
    masks = {"__name__": "transformers.masking_utils", "longest": longest}
    exec("def create_mask(position_ids): return (lambda: longest())()", masks)
    assert masks["create_mask"](positions) == want


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
