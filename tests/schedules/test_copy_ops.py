"""Which heads are copied without packing."""

import pytest
import torch

from cp_dispatch.schedules.copy_ops import has_heads_in_rows
from cp_dispatch.schedules.pushed_heads import as_heads

B, H, S, D = 2, 4, 6, 8

IN_ROWS = {
    "one projection of all": torch.randn(B, S, 3, H, D)[:, :, 1].transpose(1, 2),
    "some heads": torch.randn(B, S, H + 1, D)[:, :, 1:].transpose(1, 2),
    "every other row": torch.randn(B, 2 * S, H, D)[:, ::2].transpose(1, 2),
    "one row": torch.randn(B, H, 1, D),  # its stride is less than its length
    "one head": torch.randn(B, 1, S, D),
    "one batch row for all": torch.randn(S, H, D).transpose(0, 1).expand(B, -1, -1, -1),
}
NOT_IN_ROWS = {
    "heads first": torch.randn(B, H, S, D),
    "each head by itself": torch.randn(B, S, H, 3 * D)[..., D : 2 * D].transpose(1, 2),
    "every other number": torch.randn(B, S, 1, 2 * D)[..., ::2].transpose(1, 2),
    "one row for all": torch.randn(B, 1, 1, D).expand(B, 1, S, D),
}


@pytest.mark.parametrize("name", [*IN_ROWS, *NOT_IN_ROWS])
def test_heads_in_rows(name):
    tensor = (IN_ROWS | NOT_IN_ROWS)[name]
    assert has_heads_in_rows(tensor) == (name in IN_ROWS)
    heads = as_heads(tensor)
    assert (heads is tensor) == (name in IN_ROWS) and has_heads_in_rows(heads)
    assert torch.equal(heads, tensor)


def test_rows_that_copies_cannot_take():
    """CUDA has a largest pitch."""
    for apart, taken in ((2**29 - 1, True), (2**29, False)):
        rows = torch.empty_strided((1, 1, 2, D), (0, 0, apart, 1), device="meta")
        assert has_heads_in_rows(rows) == taken
