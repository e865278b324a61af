"""Views attention's tensors as rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch._compat import compiles_for_inductor


def pack_rows(tensors: Sequence[Tensor], lanes: int) -> Tensor:
    """``(B, H, L, D)`` tensors side by side: ``(lanes * L, B / lanes * H * sum of D)``."""
    batch, heads, length, _ = tensors[0].shape
    dims = [x.size(3) for x in tensors]
    rows = tensors[0].new_empty((lanes, length, batch // lanes, heads, sum(dims)))
    views = split_rows(rows, dims)
    for view, x in zip(views, tensors, strict=True):
        view.copy_(x)
    return rows.view(lanes * length, batch // lanes * heads * sum(dims))


def split_rows(rows: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """``(lanes, L, B / lanes, H, sum of D)`` as views ``(B, H, L, D)``."""
    lanes, length, per_lane, heads, dim = rows.shape
    # One of the two is 1, so the batch is a view.
    batch = rows.permute(0, 2, 3, 1, 4).view(lanes * per_lane, heads, length, dim)
    return list(batch.split(list(dims), dim=-1))


def rows_of(x: Tensor, lanes: int) -> Tensor:
    """``(B, H, S, D)`` as ``(lanes * S, B / lanes * H * D)``, a view where memory allows it."""
    batch, heads, length, dim = x.shape
    rows = x.view(lanes, batch // lanes, heads, length, dim).permute(0, 3, 1, 2, 4)
    return rows.reshape(lanes * length, batch // lanes * heads * dim)


def apart(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the given views of one buffer, or copies for inductor's CPU kernel, which supports
    neither two arguments from one buffer nor a view with an offset."""
    given = [x for x in tensors if x is not None]
    if given[0].device.type == "cpu" and compiles_for_inductor():
        given = torch.ops.cp_dispatch.flex_apart(given)
    found = iter(given)
    return [None if x is None else next(found) for x in tensors]
