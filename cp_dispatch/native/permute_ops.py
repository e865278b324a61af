"""``torch.ops.cp_dispatch.permute_sequence`` and its backward: kernels, fakes, autograd.

Each is the other's derivative, so gradients of any order use only these two ops. For an index
without repeats the backward gathers by the inverse. Otherwise one stable sort finds the rows that
share a source, and each row of the gradient is summed and written once, without atomics, so results
are deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch._compat import below_autograd, run_uncompiled
from cp_dispatch.native import rows

library = torch.library.Library("cp_dispatch", "FRAGMENT")
library.define(
    "permute_sequence(Tensor[] tensors, Tensor index, int[] dims, bool checked, bool unique)"
    " -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "permute_sequence_backward(Tensor[] grads, Tensor index, int[] dims, SymInt[] lengths,"
    " bool unique) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
permute_op = torch.ops.cp_dispatch.permute_sequence.default
backward_op = torch.ops.cp_dispatch.permute_sequence_backward.default


def _empty_rows(like: Tensor, dim: int, length: int) -> Tensor:
    """A tensor like another, its dims in the same order in memory, with ``length`` rows."""
    order = memory_order(like)
    sizes = [length if d == dim else like.size(d) for d in order]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return like.new_empty(sizes).permute(inverse)


def memory_order(tensor: Tensor) -> list[int]:
    """The dims in memory order, outermost first. Dims that have no place in it, because they are
    expanded or of size 1, stay after the dim that they follow."""
    order: list[int] = []
    strides, sizes = tensor.stride(), tensor.shape
    for d in range(tensor.dim()):
        at = len(order)
        if strides[d] != 0 and sizes[d] != 1:
            for i in range(len(order) - 1, -1, -1):
                other = order[i]
                if strides[other] == 0 or sizes[other] == 1:
                    continue
                if strides[other] >= strides[d]:
                    break
                at = i
        order.insert(at, d)
    return order


def _permute(tensors: list[Tensor], index: Tensor, dims: list[int], checked: bool, unique: bool):
    if tensors and not checked:
        rows.check_values(index, min(x.size(d) for x, d in zip(tensors, dims, strict=True)))
    outs = _permute_fake(tensors, index, dims)
    if tensors:
        rows.copy_rows(outs, tensors, index, dims, False)
    return outs


def _permute_fake(tensors, index, dims, checked=True, unique=False):
    length = index.size(-1)
    return [_empty_rows(x, d, length) for x, d in zip(tensors, dims, strict=True)]


def _backward(
    grads: list[Tensor], index: Tensor, dims: list[int], lengths: list[int], unique: bool
) -> list[Tensor]:
    outs = _backward_fake(grads, index, dims, lengths)
    for length in set(lengths):
        group = [i for i, n in enumerate(lengths) if n == length]
        into, out_of, along = ([x[i] for i in group] for x in (outs, grads, dims))
        if unique:
            inverse = rows.invert_index(index, length)
            rows.copy_rows(into, out_of, inverse, along, False)
            continue
        order, offsets = sources_of(index, length)
        rows.sum_rows(_as_real(into), _as_real(out_of), order, offsets, along)
    return outs


def _as_real(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]


def _backward_fake(grads, index, dims, lengths, unique=False):
    triples = zip(grads, dims, lengths, strict=True)
    return [_empty_rows(grad, dim, length) for grad, dim, length in triples]


def sources_of(index: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """``order, offsets`` as ``sum_rows`` takes them: which places of ``index`` hold each row."""
    ordered, order = torch.sort(index.long(), dim=-1, stable=True)
    wanted = torch.arange(length + 1, device=index.device)
    if index.dim() == 1:
        return order, torch.searchsorted(ordered, wanted)
    batches, places = index.shape
    offsets = torch.searchsorted(ordered, wanted.expand(batches, -1).contiguous())
    offsets += places * torch.arange(batches, device=index.device).unsqueeze(1)
    return order.flatten(), offsets


class _Permute(torch.autograd.Function):
    @staticmethod
    @run_uncompiled
    def forward(ctx, index, dims, checked, unique, *tensors):
        with below_autograd():
            outs = permute_op(list(tensors), index, dims, checked, unique)
        ctx.save_for_backward(index)
        ctx.set_materialize_grads(False)
        ctx.dims, ctx.unique = dims, unique
        ctx.lengths = [x.size(d) for x, d in zip(tensors, dims, strict=True)]
        ctx.mark_non_differentiable(*(x for x in outs if not _is_differentiable(x)))
        return tuple(outs)

    @staticmethod
    @run_uncompiled
    def backward(ctx, *grads):
        (index,) = ctx.saved_tensors
        needs = _needed(ctx.needs_input_grad[4:], grads)
        result = _where_needed(
            needs, lambda *lists: backward_op(lists[0], index, lists[1], lists[2], ctx.unique),
            grads, ctx.dims, ctx.lengths,
        )  # fmt: skip
        return (None,) * 4 + result


class _PermuteBackward(torch.autograd.Function):
    @staticmethod
    @run_uncompiled
    def forward(ctx, index, dims, lengths, unique, *grads):
        with below_autograd():
            outs = backward_op(list(grads), index, dims, lengths, unique)
        ctx.save_for_backward(index)
        ctx.set_materialize_grads(False)
        ctx.dims, ctx.unique = dims, unique
        return tuple(outs)

    @staticmethod
    @run_uncompiled
    def backward(ctx, *grads):
        (index,) = ctx.saved_tensors
        needs = _needed(ctx.needs_input_grad[4:], grads)
        result = _where_needed(
            needs, lambda *lists: permute_op(lists[0], index, lists[1], True, ctx.unique),
            grads, ctx.dims,
        )  # fmt: skip
        return (None,) * 4 + result


def _needed(needs: tuple[bool, ...], grads: tuple[Tensor | None, ...]) -> list[bool]:
    return [need and grad is not None for need, grad in zip(needs, grads, strict=True)]


def _where_needed(needs: list[bool], function, *lists) -> tuple[Tensor | None, ...]:
    """Call ``function`` with the needed items of each list; None for the others."""
    results = iter(function(*([x for x, need in zip(each, needs, strict=True) if need]
                              for each in lists)) if any(needs) else ())  # fmt: skip
    return tuple(next(results) if need else None for need in needs)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _autograd(function, op):
    @run_uncompiled
    def kernel(tensors, index, *options):
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return list(function.apply(index, *options, *tensors))
        with below_autograd():
            return op(tensors, index, *options)

    return kernel


for _op, _kernel, _fake, _function in (
    (permute_op, _permute, _permute_fake, _Permute),
    (backward_op, _backward, _backward_fake, _PermuteBackward),
):
    _name = _op.name().split("::")[1].removesuffix(".default")
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    library.impl(_name, _autograd(_function, _op), "Autograd")
    torch.library.register_fake(f"cp_dispatch::{_name}", _fake, lib=library)
