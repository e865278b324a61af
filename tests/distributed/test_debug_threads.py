"""``CP_DISPATCH_DEBUG=1``: if one rank refuses a call, all ranks raise instead of waiting for
it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import cp_dispatch
from cp_dispatch import ContextParallel, ContextParallelError, HeadTail, context_parallel
from tests.distributed.sharded import distribute
from tests.distributed.test_plain_threads import on_mesh, sequences
from tests.distributed.threads import run_threads
from tests.ranks import with_rows

varlen_attn_out = getattr(varlen, "varlen_attn_out", None)
ONES = torch.ones(16, 16, dtype=torch.bool)


@pytest.fixture(autouse=True)
def debug_mode(monkeypatch):
    """Without numpy, which torch's gathering of objects needs and a user may not have."""
    monkeypatch.setenv("CP_DISPATCH_DEBUG", "1")

    def no_numpy(self):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", no_numpy)


@contextlib.contextmanager
def refused(mesh, words: str, by: int = 0):
    """Rank ``by`` raises its own error, and the others raise one that contains it."""
    rank = torch.distributed.get_rank()
    with pytest.raises(ContextParallelError) as raised:
        yield
    text = str(raised.value)
    assert words in text, text
    assert (f"rank {by} refused this" in text) == (rank != by), text
    if rank != by:
        assert f"rank {rank}:" in text and "nothing was computed" in text


@pytest.mark.parametrize("words, wrong", [
    ("this rank's rows and this rank's keys", lambda q, k, v: ((q, k, v, ONES[:8, :8]), {})),
    ("key and value must have the same", lambda q, k, v: ((q, k, v[:, :, :4]), {})),
    ("enable_gqa is False", lambda q, k, v: ((torch.cat([q, q], 1), k, v), {})),
    ("both given", lambda q, k, v: ((q, k, v, ONES), {"is_causal": True})),
    ("must have shape", lambda q, k, v: ((q, k[0], v[0]), {})),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_in_a_block(words, wrong, uneven):
    """Also if ranks exchange their lengths first."""

    if uneven and ("rows" in words or words == "both given"):
        words = "attn_mask has [1, "  # those without a mask report a length of 1

    def body(mesh):
        own = [x[:, :, :8] for x in sequences(16)]
        args, options = wrong(*own) if mesh.get_local_rank() == 1 else (own, {"is_causal": True})
        buffers = [torch.zeros(15)] if uneven else []
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[0] * len(buffers), balancer=None
        ):
            with refused(mesh, words, by=1):
                F.scaled_dot_product_attention(*args, **options)
            F.scaled_dot_product_attention(*own, is_causal=True)  # and the ranks continue together

    on_mesh(2, body)


def test_what_differs_is_marked():
    def body(mesh):
        query, key, value = (distribute(x, mesh, [Shard(2)]) for x in sequences(16))
        with cp_dispatch.enabled(), pytest.raises(ContextParallelError) as raised:
            is_causal = mesh.get_local_rank() == 0
            F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        marked = [x for x in str(raised.value).splitlines() if x.startswith("  * ")]
        assert ["is_causal=True" in x for x in marked] == [True, False], marked

    on_mesh(2, body)


def test_ranks_that_refuse_alike_raise_their_own_errors():
    def body(mesh):
        own = [x[:, :, :8] for x in sequences(16)]
        with context_parallel(mesh, balancer=None):
            with pytest.raises(ContextParallelError, match="is refused: attn_mask has 5 rows"):
                F.scaled_dot_product_attention(*own, ONES[:5])

    on_mesh(2, body)


def test_uneven_shards_of_masks_are_no_disagreement():
    query, key, value = sequences(15)
    mask = torch.rand(15, 15, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, 0] = True
    want = F.scaled_dot_product_attention(query, key, value, mask)

    def body(mesh, dim):
        buffers = [x.clone() for x in (query, key, value, mask)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2, dim]):
            own = F.scaled_dot_product_attention(*buffers)
        (got,) = cp_dispatch.context_parallel_unshard(mesh, [own], [2])
        torch.testing.assert_close(got, want)

    for dim in (0, 1):
        on_mesh(2, lambda mesh, dim=dim: body(mesh, dim))


def test_blocks_that_differ_in_whether_lengths_are_told():
    def body(mesh):
        own = [x[:, :, :8] for x in sequences(16)]
        buffer = torch.zeros(15 + mesh.get_local_rank())
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], balancer=None):
            with pytest.raises(ContextParallelError, match="do not agree"):
                F.scaled_dot_product_attention(*own, is_causal=True)

    on_mesh(2, body)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap], ids=["grad", "vmap"])
def test_transforms_of_dtensors(transform):
    """On a mesh of two dims, in which all ranks wait for each other."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        x = distribute(torch.randn(2, 2, 16, 8), mesh, [Shard(0), Shard(2)])

        def loss(x):
            return F.scaled_dot_product_attention(x, x, x).sum()

        with cp_dispatch.enabled(), refused(mesh, "torch.func transforms", by=3):
            if rank == 3:
                transform(loss)(x)
            else:
                loss(x)

    run_threads(4, body)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap], ids=["grad", "vmap"])
def test_transforms_of_shards(transform):
    def body(mesh):
        own = [x[:, :, :8] for x in sequences(16)]

        def loss(x):
            return F.scaled_dot_product_attention(x, *own[1:]).sum()

        with context_parallel(mesh, balancer=None), refused(mesh, "torch.func transforms"):
            (loss if mesh.get_local_rank() else transform(loss))(own[0])

    on_mesh(2, body)


class Attention(nn.Module):
    def forward(self, query, mask=None):
        return F.scaled_dot_product_attention(query, query, query, mask, is_causal=mask is None)


def test_modules_in_the_style():
    def body(mesh):
        module = Attention()
        parallelize_module(module, mesh, ContextParallel(balancer="head-tail"))
        own, first = torch.randn(1, 2, 8, 8), mesh.get_local_rank() == 0
        with refused(mesh, "says nothing about the other 8 keys"):
            module(own, ONES[None, None, :8, :8] if first else None)
        placed = distribute(torch.randn(1, 2, 16, 8), mesh, [Replicate() if first else Shard(2)])
        with refused(mesh, "takes plain shards, or DTensors"):
            module(placed)

    on_mesh(2, body)


def test_varlen_attn_on_one_rank():
    def body(mesh):
        own = torch.randn(1, 2, 8, 8)
        packed, ends = own[0].transpose(0, 1), torch.tensor([0, 8], dtype=torch.int32)
        with context_parallel(mesh, balancer=None):
            first = mesh.get_local_rank() == 0
            if first:
                packed = packed[None]
            with refused(mesh, "varlen_attn on plain shards"):
                if first:
                    varlen_attn(packed, packed, packed, ends, ends, 8, 8)
                else:
                    F.scaled_dot_product_attention(own, own, own)

    on_mesh(2, body)


def test_varlen_attn_out_on_one_rank():
    def body(mesh):
        own = [distribute(torch.randn(16, 2, 8), mesh, [Shard(0)]) for _ in range(3)]
        ends = torch.tensor([0, 16], dtype=torch.int32)
        with cp_dispatch.enabled(), refused(mesh, "varlen_attn_out is not supported"):
            if mesh.get_local_rank() == 0:
                varlen_attn_out(torch.empty_like(own[0]), *own, ends, ends, 16, 16)
            else:
                varlen_attn(*own, ends, ends, 16, 16)

    if varlen_attn_out is None:
        pytest.skip("torch 2.11 has no varlen_attn_out")
    on_mesh(2, body)


@pytest.mark.parametrize("length", [16, 17])
def test_modules_around_flex_attention(length):
    """Also if ranks exchange their lengths first."""

    class Flex(nn.Module):
        def forward(self, query, key, value):
            return flex_attention(query, key, value)

    def body(mesh):
        module = Flex()
        style = ContextParallel(seq_dim=2, attention_type="flex", balancer=None)
        parallelize_module(module, mesh, style)
        placement = Shard(1 if mesh.get_local_rank() == 0 else 2)
        placed = distribute(torch.randn(1, 2, length, 8), mesh, [placement])
        with refused(mesh, "takes plain shards, or DTensors"):
            module(placed, placed, placed)

    on_mesh(2, body)


def test_lengths_of_shards_in_the_style_are_no_disagreement():
    def body(mesh):
        module = Attention()
        parallelize_module(module, mesh, ContextParallel(seq_dim=2, balancer=None))
        whole = torch.randn(1, 2, 17, 8, generator=torch.Generator().manual_seed(0))
        got = module(distribute(whole, mesh, [Shard(2)])).full_tensor()
        torch.testing.assert_close(got, Attention()(whole))

    on_mesh(2, body)


def grouped(query, key, value):
    return flex_attention(query, key[:, :1], value[:, :1], enable_gqa=True)


def of_wrong_shards(query, key, value):
    key = with_rows(key.device_mesh, 7, key.shape, 2)
    return flex_attention(query, key, key)


@pytest.mark.parametrize("call, words", [
    (lambda *x: flex_attention(*x, scale=0.5), "scale=0.5"),
    (F.scaled_dot_product_attention, "* scaled_dot_product_attention\n"),
    (cp_dispatch.enabled(schedule="ring")(flex_attention), "schedule='ring'"),
    (grouped, "(1, 1, 16, 8)"),
    (of_wrong_shards, "that the global shapes imply: False"),
], ids=["scale", "function", "schedule", "heads", "shards"])  # fmt: skip
def test_flex_attention_on_all_ranks_but_one(call, words):
    def body(mesh):
        own = [distribute(torch.randn(1, 2, 16, 8), mesh, [Shard(2)]) for _ in range(3)]
        attend = call if mesh.get_local_rank() == 0 else flex_attention
        with cp_dispatch.enabled(), pytest.raises(ContextParallelError, match="do not agree") as e:
            attend(*own)
        assert words in str(e.value) and " flex_attention\n" in str(e.value)

    on_mesh(2, body)


def test_masks_of_flex_attention_that_differ():
    """Also between fewer queries than keys."""

    def body(mesh):
        rows = (lambda b, h, q, k: q >= k) if mesh.get_local_rank() else (lambda b, h, q, k: q > 8)
        mask = create_block_mask(rows, None, None, 16, 64, "cpu", BLOCK_SIZE=8)
        query, key = (
            distribute(torch.randn(1, 2, length, 8), mesh, [Shard(2)]) for length in (16, 64)
        )
        with cp_dispatch.enabled(), pytest.raises(ContextParallelError, match="do not agree") as e:
            flex_attention(query, key, key, block_mask=mask)
        assert "blocks of the mask" in str(e.value)

    on_mesh(2, body)


def test_masks_of_flex_attention_that_agree(monkeypatch):
    """Whole masks may differ in entries that they do not list, and own rows differ."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # is faster
    layout = HeadTail(64, 2)

    def causal(b, h, q, k):
        return q >= k

    def body(mesh):
        rank = mesh.get_local_rank()
        whole = create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=8)
        for num, indices in (
            (whole.kv_num_blocks, whole.kv_indices),
            (whole.full_kv_num_blocks, whole.full_kv_indices),
        ):
            listed = torch.arange(indices.size(-1)) < num.unsqueeze(-1)
            indices.masked_fill_(~listed, rank)
        rows = [torch.randn(1, 2, 32, 8) for _ in range(3)]
        placed = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in rows]
        with cp_dispatch.enabled(layout=layout):
            own = cp_dispatch.create_cp_block_mask(causal, None, None, 64, 64, mesh, BLOCK_SIZE=8)
            results = [flex_attention(*placed, block_mask=mask).to_local() for mask in (whole, own)]
        assert torch.equal(*results)

    on_mesh(2, body)
