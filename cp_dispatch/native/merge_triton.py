"""A Triton kernel for the merge of :mod:`cp_dispatch.native.merge`, in one pass over memory.

Imported at the first merge on a GPU, because importing triton is slow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_kernel(
    out_a, lse_a, out_b, lse_b, out, lse,
    a_b, a_h, a_s, la_b, la_h, la_s,
    b_b, b_h, b_s, lb_b, lb_h, lb_s,
    o_b, o_h, o_s, lo_b, lo_h, lo_s,
    heads, rows, dim, blocks,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # int64, because sizes times strides of long sequences pass 2**31.
    program = tl.program_id(0).to(tl.int64)
    batch_head = program // blocks
    batch = batch_head // heads
    head = batch_head % heads
    row = (program % blocks) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    row_mask = row < rows
    mask = row_mask[:, None] & (column < dim)[None, :]

    la = tl.load(lse_a + batch * la_b + head * la_h + row * la_s, mask=row_mask, other=0.0)
    lb = tl.load(lse_b + batch * lb_b + head * lb_h + row * lb_s, mask=row_mask, other=0.0)
    at_a = out_a + batch * a_b + head * a_h + row[:, None] * a_s + column[None, :]
    at_b = out_b + batch * b_b + head * b_h + row[:, None] * b_s + column[None, :]
    a = tl.load(at_a, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at_b, mask=mask, other=0.0).to(tl.float32)

    difference = tl.where(la == lb, 0.0, lb - la)
    weight_b = 1.0 / (1.0 + tl.exp(-difference))
    weight_a = 1.0 / (1.0 + tl.exp(difference))
    nothing = float("-inf")
    part_a = tl.where((la == nothing)[:, None], 0.0, weight_a[:, None] * a)
    part_b = tl.where((lb == nothing)[:, None], 0.0, weight_b[:, None] * b)
    merged = tl.maximum(la, lb) + tl.log(1.0 + tl.exp(-tl.abs(difference)))

    at_out = out + batch * o_b + head * o_h + row[:, None] * o_s + column[None, :]
    # In place, one warp writes logsumexps that the others read: not before they have.
    tl.debug_barrier()
    tl.store(at_out, (part_a + part_b).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + batch * lo_b + head * lo_h + row * lo_s, merged, mask=row_mask)


def merge_triton(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    """:func:`cp_dispatch.native.merge.merge_eager` for float32, bfloat16 and float16 on CUDA."""
    batch, heads, rows, dim = out.shape
    if out.numel() == 0:
        return
    out_a, out_b = (x if x.stride(-1) == 1 else x.contiguous() for x in (out_a, out_b))
    padded_dim = max(16, triton.next_power_of_2(dim))
    block = max(1, 4096 // padded_dim)
    blocks = triton.cdiv(rows, block)
    tensors = (out_a, lse_a, out_b, lse_b, out, lse)
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    grid = (blocks * batch * heads,)
    sizes = heads, rows, dim, blocks
    with torch.cuda.device(out.device):  # where Triton launches
        _merge_kernel[grid](*tensors, *strides, *sizes, ROWS=block, DIM=padded_dim)
