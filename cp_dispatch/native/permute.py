"""Permutes sequences, and packs rows of several tensors into one buffer to send.

An index, int64 or int32, has shape ``(N,)`` or ``(1, N)`` for all batch rows, or ``(B, N)`` with
one row for each; -1 means a row of zeros, which pads uneven shards. Invalid values raise. On CUDA
that check waits for the device, so pass ``checked=True`` with an index that was made and checked on
the host, such as a balancer's. If an invalid value gets through even so, the CPU kernel raises and
the CUDA kernel treats it as -1: neither reads or writes out of bounds.

Balancers use the permutation. Packing is for programs that send rows themselves; schedules have
their own format (:mod:`cp_dispatch.schedules.wire`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.native import rows
from cp_dispatch.native.permute_ops import permute_op


def span_indices(spans: Tensor | Sequence[tuple[int, int]]) -> Tensor:
    """Positions of ``(position, length)`` spans, one after the other, ``(total,)`` int64."""
    if not isinstance(spans, Tensor):
        spans = torch.tensor(list(spans), dtype=torch.int64, device="cpu").reshape(-1, 2)
    if spans.dim() != 2 or spans.size(1) != 2 or spans.dtype is not torch.int64:
        raise ContextParallelError(
            f"spans must be int64 of shape (n, 2): position, length; got {_described(spans)}"
        )
    total = int(spans[:, 1].sum())
    if spans.numel() and int(spans.min()) < 0:
        raise ContextParallelError(f"spans must not be negative, got {spans.tolist()}")
    return rows.span_indices(spans, total)


def inverse_permutation(indices: Tensor, check: bool = True) -> Tensor:
    """``inverse[..., indices[..., i]] = i``, in the shape and dtype of ``indices``.

    ``check`` raises if a row of ``indices`` is not a permutation; on CUDA that waits for the
    device.
    """
    _check_index(indices)
    size = indices.size(-1)
    if check:
        rows.check_values(indices, size)
    inverse = rows.invert_index(indices, size)
    # All are within range, so if a row occurs twice, another one is missing.
    if check and bool((inverse < 0).any()):
        raise ContextParallelError(
            f"indices are no permutation of 0 to {size - 1}: some occur twice or are missing"
        )
    return inverse


def permute_sequence(
    tensors: Sequence[Tensor],
    index: Tensor,
    dim: int | Sequence[int],
    *,
    checked: bool = False,
    unique: bool = False,
) -> list[Tensor]:
    """``out[..., i, ...] = x[..., index[i], ...]`` along ``dim``, for each tensor, in one launch.

    Args:
        tensors: any shapes, dtypes and strides, on one device.
        index: see the module's docstring; per-batch rows refer to dim 0 of each tensor.
        dim: the sequence dim, one for all tensors or one for each.
        checked: the values of ``index`` are known to be valid (-1, or a row of every tensor).
        unique: no row occurs twice, so the backward needs no sort. Not checked.

    Returns:
        New tensors with the same order of dims in memory as the inputs. Differentiable: rows that
        occur more than once get the sum of their gradients, added in float32 (float64 for float64).
    """
    tensors = list(tensors)
    dims = _dims(tensors, dim)
    _check_index(index)
    _check_tensors(tensors, dims, index)
    return permute_op(tensors, index, dims, checked, unique)


def pack_sequence(
    tensors: Sequence[Tensor],
    index: Tensor | None = None,
    dim: int | Sequence[int] = 2,
    *,
    start: int = 0,
    length: int | None = None,
    out: Tensor | None = None,
    checked: bool = False,
) -> Tensor:
    """Rows of several tensors of one dtype, one tensor after the other, in one flat buffer.

    Each tensor is stored batch first, then its rows, then its other dims: token-major ``(B, N, H,
    D)`` for ``(B, H, S, D)``. The rows are those of ``index``, or ``length`` rows from ``start``
    on. ``out`` takes the result instead of a new buffer; then there is no autograd.
    """
    tensors = list(tensors)
    dims = _dims(tensors, dim)
    tensors, length = _rows_of(tensors, index, dims, start, length)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        if out is not None:
            raise ContextParallelError("pack_sequence with out= is not differentiable")
        if index is not None:
            tensors = permute_sequence(tensors, index, dims, checked=checked)
        return torch.cat([_rows_second(x, d).flatten() for x, d in zip(tensors, dims, strict=True)])
    _check_values(index, tensors, dims, checked)
    if out is None:
        numel = sum(_numel(x, d, length) for x, d in zip(tensors, dims, strict=True))
        out = tensors[0].new_empty(numel)
    _copy(packed_views(out, tensors, length, dims), tensors, index, dims, False)
    return out


def unpack_sequence(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    index: Tensor | None = None,
    dim: int | Sequence[int] = 2,
    *,
    start: int = 0,
    length: int | None = None,
    checked: bool = False,
) -> None:
    """The inverse of :func:`pack_sequence`: write the buffer's rows into ``tensors``, in place.

    Row i goes to row ``index[i]`` (nowhere for -1), or to row ``start + i``. If ``index`` names a
    row twice, either value may remain.
    """
    tensors = list(tensors)
    dims = _dims(tensors, dim)
    tensors, length = _rows_of(tensors, index, dims, start, length)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (buffer, *tensors)):
        raise ContextParallelError(
            "unpack_sequence writes in place and is not differentiable; "
            "use packed_views, or permute_sequence with the inverse index"
        )
    _check_values(index, tensors, dims, checked)
    _copy(tensors, packed_views(buffer, tensors, length, dims), index, dims, True)


def _copy(targets, sources, index, dims, scatter) -> None:
    # For a range, torch's copy is faster than a kernel that can gather.
    copy = rows.copy_rows if index is not None else rows.copy_rows_eager
    copy(targets, sources, index, dims, scatter)


def packed_views(
    buffer: Tensor, like: Sequence[Tensor], length: int, dim: int | Sequence[int] = 2
) -> list[Tensor]:
    """Views of a packed buffer, shaped like the tensors it was packed from, of ``length`` rows."""
    dims = _dims(like, dim)
    sizes = [_numel(x, d, length) for x, d in zip(like, dims, strict=True)]
    if buffer.dim() != 1 or buffer.numel() != sum(sizes) or not buffer.is_contiguous():
        raise ContextParallelError(
            f"the buffer must be flat and contiguous, with {sum(sizes)} elements for {length} rows;"
            f" got {_described(buffer)} with strides {tuple(buffer.stride())}"
        )
    offset = buffer.storage_offset()
    views = []
    for size, x, d in zip(sizes, like, dims, strict=True):
        shape = list(x.shape)
        shape[d] = length
        # Contiguous except for the rows, which come second.
        strides, step, row = [0] * len(shape), 1, min(d, 1)
        for at in (*range(len(shape) - 1, row - 1, -1), *range(row - 1, -1, -1)):
            if at != d:
                strides[at] = step
                step *= shape[at]
            if at == row:
                strides[d] = step
                step *= length
        views.append(buffer.as_strided(shape, strides, offset))
        offset += size
    return views


def _rows_second(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, min(dim, 1))


def _numel(tensor: Tensor, dim: int, length: int) -> int:
    numel = length
    for d, n in enumerate(tensor.shape):
        numel *= 1 if d == dim else n
    return numel


def _rows_of(tensors, index, dims, start, length) -> tuple[list[Tensor], int]:
    """The tensors narrowed to the selected rows, and the number of rows in the buffer."""
    if not tensors or any(x.dtype is not tensors[0].dtype for x in tensors):
        raise ContextParallelError(
            "expected tensors of one dtype, got " + (", ".join(map(_described, tensors)) or "none")
        )
    if index is not None:
        if start or length is not None:
            raise ContextParallelError("give an index, or start and length, not both")
        _check_index(index)
        _check_tensors(tensors, dims, index)
        return tensors, index.size(-1)
    sizes = [x.size(d) for x, d in zip(tensors, dims, strict=True)]
    if length is None:
        length = sizes[0] - start
    if start < 0 or length < 0 or start + length > min(sizes):
        raise ContextParallelError(
            f"rows {start} to {start + length} are not among the {min(sizes)} rows there are"
        )
    if any(length != size for size in sizes):
        pairs = zip(tensors, dims, strict=True)
        tensors = [x.narrow(d, start, length) for x, d in pairs]
    return tensors, length


def _check_values(index: Tensor | None, tensors: list[Tensor], dims, checked: bool) -> None:
    if index is None or checked:
        return
    rows.check_values(index, min(x.size(d) for x, d in zip(tensors, dims, strict=True)))


def _dims(tensors: Sequence[Tensor], dim: int | Sequence[int]) -> list[int]:
    dims = [dim] * len(tensors) if isinstance(dim, int) else list(dim)
    if len(dims) != len(tensors) or any(
        not -x.dim() <= d < x.dim() for x, d in zip(tensors, dims, strict=False)
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ContextParallelError(f"dim must name a dim of each of {shapes}; got {dim}")
    return [d % x.dim() for x, d in zip(tensors, dims, strict=True)]


def _check_index(index: Tensor) -> None:
    if index.dtype not in (torch.int64, torch.int32) or index.dim() not in (1, 2):
        raise ContextParallelError(
            f"an index must be int64 or int32 of shape (N,), (1, N) or (B, N); got "
            f"{_described(index)}"
        )


def _check_tensors(tensors: list[Tensor], dims: list[int], index: Tensor) -> None:
    batches = index.size(0) if index.dim() == 2 else 1
    for x, dim in zip(tensors, dims, strict=True):
        if x.device != index.device:
            raise ContextParallelError(
                f"index and tensors must be on one device, got {index.device} and {x.device}"
            )
        if batches != 1 and (dim == 0 or x.size(0) != batches):
            raise ContextParallelError(
                f"an index with a row for each of {batches} batches needs tensors with that many"
                f" in dim 0 and the sequence in another dim; got {_described(x)}, dim {dim}"
            )


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
