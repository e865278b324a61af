"""The sum of several tensors in one pass over memory, rounded once.

Shares of dK and dV come from several tiles and ranks in the kernels' dtype; adding them two by two
would round, or write float32, every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.extension import has_kernel

library = torch.library.Library("cp_dispatch", "FRAGMENT")
library.define(
    "sum_parts(Tensor[] parts, Tensor(a!) out) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
_op = torch.ops.cp_dispatch.sum_parts.default

#: The most parts that a kernel takes.
_MOST = 48


def sum_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of ``parts``, added in their order in float32 (float64), into ``out``.

    Args:
        parts: at least one, each ``(B, H, S, D)`` with any strides and of one dtype, that of
            ``out`` or wider.
        out: ``(B, H, S, D)``, any strides. May be one of the parts.
    """
    rows = (*parts, out)
    fits = len(parts) <= _MOST and all(x.stride(-1) == 1 or x.size(-1) == 1 for x in rows)
    # The kernel has no narrow sum of float64.
    fits = fits and (parts[0].dtype is out.dtype or parts[0].dtype is torch.float32)
    if fits and has_kernel("sum_parts", out.device.type):
        _op(parts, out)
    else:
        sum_parts_eager(parts, out)


def sum_parts_eager(parts: Sequence[Tensor], out: Tensor) -> None:
    """The specification of :func:`sum_parts`."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    wide = wide_dtype(parts[0].dtype)
    total = torch.add(parts[0].to(wide), parts[1])
    for part in parts[2:]:
        total.add_(part)
    out.copy_(total)


def add_up(total: Tensor, parts: list[tuple[int, Tensor]]) -> None:
    """Write the sum of parts, each with its first row of ``total``; zeros where there is none."""
    spans = [(start, start + part.size(2), part) for start, part in parts]
    edges = {0, total.size(2)}
    for start, stop, _ in spans:
        edges |= {start, stop}
    edges = sorted(edges)
    for begin, end in zip(edges, edges[1:], strict=False):
        here = [
            part if (start, stop) == (begin, end) else part.narrow(2, begin - start, end - begin)
            for start, stop, part in spans
            if start <= begin and end <= stop
        ]
        into = total.narrow(2, begin, end - begin)
        sum_parts(here, into) if here else into.zero_()


library.impl("sum_parts", sum_parts_eager, "CompositeExplicitAutograd")
torch.library.register_fake("cp_dispatch::sum_parts", lambda parts, out: None, lib=library)
