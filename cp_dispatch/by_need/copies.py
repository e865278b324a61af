"""Copies pairs of tensors in few launches."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cp_dispatch.by_need.selector import Indexed, Pairs
from cp_dispatch.native.rows import copy_rows


class Copies(NamedTuple):
    """Pairs for one call of :func:`~cp_dispatch.native.rows.copy_rows`. The index, if any, is that
    of the targets (``scatter``) or of the sources."""

    targets: list[Tensor]
    sources: list[Tensor]
    index: Tensor | None
    scatter: bool


def copies(pairs: Pairs) -> list[Copies]:
    """The copies for ``pairs``, in as few launches as memory allows."""
    found: dict[tuple, Copies] = {}
    for target, source in pairs:
        scatter, gather = isinstance(target, Indexed), isinstance(source, Indexed)
        if (source if scatter else target).numel() == 0:
            continue
        if target.dtype is not source.dtype:
            source = (source.taken() if gather else source).to(target.dtype)
            gather = False
        index = target.index if scatter else source.index if gather else None
        made = found.setdefault((id(index), scatter), Copies([], [], index, scatter))
        made.targets.append(target.rows if scatter else target)
        made.sources.append(source.rows if gather else source)
    return list(found.values())


def copy_all(pairs: Pairs) -> None:
    """Copy the second of each pair to the first."""
    for targets, sources, index, scatter in copies(pairs):
        copy_rows(targets, sources, index, [0] * len(targets), scatter)
