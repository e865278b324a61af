"""The custom ops of FlexAttention: schemas and fakes agree with the kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cp_dispatch import HeadTail, PerDocumentHeadTail
from cp_dispatch.flex.mask_tuple import MaskTuple
from cp_dispatch.flex.ops import SCHEMAS

OPS = torch.ops.cp_dispatch
CHECKS = ("test_schema", "test_faketensor")


def arguments(length: int, full: bool, layout="", rank=0, ranks=1, batch=2):
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, length, length, "cpu", BLOCK_SIZE=8
    )
    tensors = list(MaskTuple(mask.as_tuple()).tensors)
    if not full:
        tensors[2:] = [None, None]
    shape = [ranks] if ranks > 1 else []
    return (*tensors, length, length, [8, 8], [0, batch, 0, 3], shape, rank, "", layout, False,
            False)  # fmt: skip


def keys(length: int):
    key, value = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 5)
    # As models lay them out, and as they come from a matmul.
    return key.transpose(1, 2).contiguous().transpose(1, 2), value


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", ["", HeadTail(37, 2).text,
                                    PerDocumentHeadTail([[7, 30], [30, 7]], 2).text])  # fmt: skip
def test_cut(layout, rank, full):
    for hop in (-1,) if "Document" in layout else (-1, 0, 1):
        torch.library.opcheck(
            OPS.flex_cut.default, (*arguments(37, full, layout, rank, 2), hop), test_utils=CHECKS
        )


@pytest.mark.parametrize("length", [16, 21])
def test_bring(length):
    mask, (key, value) = arguments(length, True), keys(length)
    torch.library.opcheck(
        OPS.flex_bring.default, (key, value, *mask, True, False), test_utils=CHECKS
    )
    grads = torch.randn_like(key), torch.randn_like(value)
    torch.library.opcheck(
        OPS.flex_bring_back.default, (*grads, key, value, *mask), test_utils=CHECKS
    )
    for got, want in zip(OPS.flex_bring_back(*grads, key, value, *mask), grads, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_order_and_apart():
    for which, part in ((0, [0, 2]), (1, [1, 1]), (-1, [0, 2]), (-2, [0, 2])):
        layout = PerDocumentHeadTail([[7, 30], [30, 7]], 2)
        rows = 37 if which < 0 else layout.shard_lengths[which]
        torch.library.opcheck(
            OPS.flex_order.default,
            (torch.ones(1), layout.text, which, [*part, 0, 1], rows),
            test_utils=CHECKS,
        )
    torch.library.opcheck(
        OPS.flex_apart.default, ([torch.ones(3), torch.ones(2, 2)],), test_utils=CHECKS
    )


def test_every_op_waits_for_the_host_and_says_so():
    for schema in SCHEMAS:
        op = getattr(OPS, schema.split("(")[0]).default
        assert torch.Tag.cudagraph_unsafe in op.tags
