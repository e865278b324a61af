"""FlexAttention's kernels give the same bits in our order of programs; needs one GPU."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cp_dispatch.flex import program_order
from cp_dispatch.flex.program_order import OPTION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def results(inputs, mask, options, **compiling):
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, fullgraph=True, **compiling)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, logsumexp = attend(
        *leaves, block_mask=mask, enable_gqa=True, return_lse=True, kernel_options=options
    )
    loss = (out * out).sum() + logsumexp.sum()
    return out, logsumexp, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    "length, batch, heads, by_head, full, dynamic",
    [
        (2048, 1, (8, 2), False, True, False),
        (1000, 2, (6, 3), True, True, False),
        (1536, 2, (4, 4), False, False, False),
        (1900, 1, (8, 1), True, True, True),
    ],
)
def test_the_order_changes_no_bit(length, batch, heads, by_head, full, dynamic):
    assert program_order._templates_know()
    torch.manual_seed(0)
    documents = torch.randint(0, 2, (length,), device="cuda").cumsum(0) // 150

    def mod(b, h, q, k):
        near = q - k < 100 + 300 * h if by_head else q >= k
        return (documents[q] == documents[k]) & (q >= k) & near

    shape = None, heads[0] if by_head else None, length, length
    mask = create_block_mask(mod, *shape, "cuda")
    if not full:
        dense = mask.to_dense().bool()
        lists = dense.int().argsort(dim=-1, descending=True, stable=True).int()
        mask = BlockMask.from_kv_blocks(
            dense.sum(-1, dtype=torch.int32), lists, mask_mod=mod, seq_lengths=(length, length)
        )
    inputs = [
        torch.randn(batch, n, length, 64, device="cuda", dtype=torch.bfloat16)
        for n in (heads[0], heads[1], heads[1])
    ]
    want = results(inputs, mask, None, dynamic=dynamic)
    for wanted in (1, 40, 100_000):
        got = results(inputs, mask, {OPTION: wanted}, dynamic=dynamic)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
