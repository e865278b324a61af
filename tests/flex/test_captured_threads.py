"""Tensors that mods capture, passed to the op as dynamo passes them. Ranks as threads, against
dense float64."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import create_block_mask

import cp_dispatch
from cp_dispatch import PerDocumentHeadTail
from tests.distributed.sharded import distribute
from tests.distributed.threads import run_threads
from tests.flex.sharded import ROWS, in_groups, permuted, uncompiled_op

FORWARD = torch.ops.higher_order.flex_attention
B, H, D = 2, 2, 4


@pytest.fixture(autouse=True)
def uncompiled():
    with uncompiled_op():
        yield


def tensors(length: int) -> list[Tensor]:
    """query, key and value."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(B, H, length, D, generator=generator, dtype=torch.float64) for _ in range(3)
    ]


def attend(inputs, score_mod, captured, mask) -> Tensor:
    options = torch_flex._apply_kernel_options(*inputs, False, None)
    return FORWARD(*inputs, score_mod, mask.as_tuple(), D**-0.5, options, tuple(captured), ())[0]


def dense(inputs, score_mod, captured, mask_mod) -> Tensor:
    query, key, value = inputs
    b, h, q, k = (
        torch.arange(n).view([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate((B, H, query.size(2), key.size(2)))
    )
    scores = score_mod(query @ key.mT / math.sqrt(D), b, h, q, k, *captured)
    return scores.masked_fill(~mask_mod(b, h, q, k), -torch.inf).softmax(-1) @ value


def causal(b, h, q, k):
    return q >= k


def every_second(b, h, q, k):
    return (q >= k) & ((h == 0) | ((q - k) % 2 == 0))


def weighted(score, b, h, q, k, slope, bias, ids):
    return score * slope[q] + bias[k] * (ids[q] == ids[k])


@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_where_a_rank_has_no_rows(grouped):
    """The rank takes part in the sums that the other ranks make, and in no others."""
    inputs = tensors(4)
    slope, bias = torch.rand(2, 4, generator=torch.Generator().manual_seed(0)).double()
    ids = torch.arange(4) // 3
    mask = create_block_mask(causal, None, None, 4, 4, "cpu")
    leaves = [x.clone().requires_grad_() for x in (*inputs, bias)]
    out = dense(leaves[:3], weighted, (slope, leaves[3], ids), causal)
    want = [out, *torch.autograd.grad(out, leaves, out.detach())]

    def body(rank: int):
        mesh = init_device_mesh("cpu", (3,))
        mine = [distribute(x, mesh, ROWS).requires_grad_() for x in inputs]
        learned = bias.clone().requires_grad_()
        with cp_dispatch.enabled():
            out = attend(mine, weighted, (slope, learned, ids), mask)
            got = [out, *torch.autograd.grad(out, [*mine, learned], out.detach())]
        return [x.full_tensor() if isinstance(x, DTensor) else x for x in got]

    with in_groups() if grouped else contextlib.nullcontext():
        for got in run_threads(3, body):
            for mine, true in zip(got, want, strict=True):
                torch.testing.assert_close(mine, true)


def test_whole_keys_where_a_rank_has_no_rows():
    """Over two mesh dims, whose ranks would create a group: the others waited there for the rank
    without rows."""
    inputs = tensors(2)
    mask = create_block_mask(causal, None, None, 2, 2, "cpu")

    def body(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2))
        placed = [Shard(2)] * 2, [Replicate()] * 2, [Replicate()] * 2
        mine = [distribute(x, mesh, p) for x, p in zip(inputs, placed, strict=True)]
        mine = [x.requires_grad_() for x in mine]
        with cp_dispatch.enabled():
            out = attend(mine, lambda score, b, h, q, k: score, (), mask)
            return [x.full_tensor() for x in (out, *torch.autograd.grad(out, mine, out.detach()))]

    leaves = [x.clone().requires_grad_() for x in inputs]
    out = dense(leaves, lambda score, b, h, q, k: score, (), causal)
    want = [out, *torch.autograd.grad(out, leaves, out.detach())]
    for got in run_threads(4, body, timeout=20):
        for mine, true in zip(got, want, strict=True):
            torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_inference_mode(placement):
    """In inference mode torch does not make a view of a DTensor that was created outside it."""
    inputs, bias = tensors(8), torch.arange(8.0, dtype=torch.float64)
    mask = create_block_mask(causal, None, None, 8, 8, "cpu")

    def score(score, b, h, q, k, bias):
        return score + bias[q - k]

    def body(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        mine = [distribute(x, mesh, ROWS) for x in inputs]
        learned = distribute(bias, mesh, [placement]).requires_grad_()
        with cp_dispatch.enabled(), torch.inference_mode():
            return attend(mine, score, [learned], mask).full_tensor()

    for got in run_threads(2, body):
        torch.testing.assert_close(got, dense(inputs, score, [bias], causal))


def test_layout_of_each_batch_row():
    """With a rank that has no rows, a mask for each head, and a captured number."""
    layout, inputs = PerDocumentHeadTail([[1, 3], [2, 2]], 3), tensors(4)
    mask = create_block_mask(every_second, None, H, 4, 4, "cpu")

    def score(score, b, h, q, k, factor):
        return score * factor

    def body(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (3,))
        mine = [distribute(permuted(x, layout.indices), mesh, ROWS) for x in inputs]
        factor = distribute(torch.tensor(0.5).double(), mesh, [Replicate()])
        with cp_dispatch.enabled(layout=layout):
            return permuted(attend(mine, score, [factor], mask).full_tensor(), layout.inverse)

    for got in run_threads(3, body):
        torch.testing.assert_close(got, dense(inputs, score, [0.5], every_second))
