"""``torch.ops.cp_dispatch.merge``: the merge of two partial attention outputs, with autograd.

The schedules have their own backward and merge in place, with
:func:`cp_dispatch.native.merge.merge_partials`. This op is for code that differentiates through the
merge. With ``w_a + w_b = 1`` as in :mod:`cp_dispatch.native.merge`::

    d out_a = w_a * d out
    d lse_a = w_a * d lse + w_a * w_b * sum(d out * (out_a - out_b))

and the same with the sides exchanged. A side without keys gets zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch._compat import below_autograd, run_uncompiled
from cp_dispatch.native.merge import merge_partials

library = torch.library.Library("cp_dispatch", "FRAGMENT")
library.define(
    "merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, ScalarType? dtype)"
    " -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
merge_op = torch.ops.cp_dispatch.merge.default


def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two partial results ``(B, H, S, D)``, ``(B, H, S)`` into new tensors.

    ``dtype`` is that of the merged output, by default of ``out_a``. Differentiable.
    """
    return merge_op(out_a, lse_a, out_b, lse_b, dtype)


def _merge(out_a, lse_a, out_b, lse_b, dtype):
    out, lse = _merge_fake(out_a, lse_a, out_b, lse_b, dtype)
    merge_partials(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def _merge_fake(out_a, lse_a, out_b, lse_b, dtype):
    return torch.empty_like(out_a, dtype=dtype), lse_a.new_empty(lse_a.shape)


class _Merge(torch.autograd.Function):
    @staticmethod
    @run_uncompiled
    def forward(ctx, out_a, lse_a, out_b, lse_b, dtype):
        with below_autograd():
            out, lse = merge_op(out_a, lse_a, out_b, lse_b, dtype)
        ctx.save_for_backward(out_a, lse_a, out_b, lse_b)
        return out, lse

    @staticmethod
    @run_uncompiled
    def backward(ctx, grad_out, grad_lse):
        out_a, lse_a, out_b, lse_b = ctx.saved_tensors
        difference = torch.where(lse_a == lse_b, 0.0, lse_b - lse_a)
        weight_a, weight_b = torch.sigmoid(-difference), torch.sigmoid(difference)
        grad_out = grad_out.to(lse_a.dtype)
        empty_a, empty_b = lse_a == -torch.inf, lse_b == -torch.inf
        wide_a, wide_b = (
            torch.where(empty.unsqueeze(-1), 0.0, out.to(lse_a.dtype))
            for empty, out in ((empty_a, out_a), (empty_b, out_b))
        )
        tilt = weight_a * weight_b * (grad_out * (wide_a - wide_b)).sum(-1)
        grads = []
        for out, empty, weight, tilted in (
            (out_a, empty_a, weight_a, tilt),
            (out_b, empty_b, weight_b, -tilt),
        ):
            share = torch.where(empty.unsqueeze(-1), 0.0, weight.unsqueeze(-1) * grad_out)
            grads.append(share.to(out.dtype))
            grads.append(torch.where(empty, 0.0, weight * grad_lse + tilted))
        return (*grads, None)


@run_uncompiled
def _autograd(*args):
    if torch.is_grad_enabled() and any(x.requires_grad for x in args[:4]):
        return _Merge.apply(*args)
    with below_autograd():
        return merge_op(*args)


library.impl("merge", _merge, "CompositeExplicitAutograd")
library.impl("merge", _autograd, "Autograd")
torch.library.register_fake("cp_dispatch::merge", _merge_fake, lib=library)
