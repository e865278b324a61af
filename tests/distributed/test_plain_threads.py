"""``context_parallel`` on plain shards against float64, on ranks in threads."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as imported_early
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from cp_dispatch import ContextParallelError, HeadTail, context_parallel
from cp_dispatch.plain_tensors.context import layout_for
from tests.distributed.calls import only
from tests.distributed.plain import run_plain
from tests.distributed.reference import Mask, Problem, check, exact, one_device, rounding
from tests.distributed.threads import run_threads
from tests.ranks import fake_ranks, one_rank


@pytest.fixture(autouse=True)
def _default_rotate_method():
    yield
    cp_dispatch.set_rotate_method("allgather")


def on_mesh(world_size: int, body) -> list:
    """Run ``body(mesh)`` on every rank."""
    return run_threads(world_size, lambda rank: body(init_device_mesh("cpu", (world_size,))))


def judge(problem: Problem, world_size: int, kernel: str = "cpu_flash", **how) -> None:
    tensors = problem.tensors()
    want, single = exact(problem, tensors), one_device(problem, tensors, kernel)
    floors, few = rounding(problem, tensors)

    def body(mesh):
        check(run_plain(problem, tensors, mesh, **how), want, single, floors=floors, few=few)

    with only(kernel):
        on_mesh(world_size, body)


def sequences(length: int, dim: int = 8, heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, length, dim, generator=generator) for _ in range(3)]


# -- Right ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balancer", ["auto", "head-tail", None], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("needs", [True, False], ids=["backward", "forward only"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ring_by_context(world_size, needs, causal, balancer, rotate):
    problem = Problem(length=48, dim=16, key_heads=2, causal=causal)
    cp_dispatch.set_rotate_method(rotate)
    judge(problem, world_size, balancer=balancer, needs=needs)


@pytest.mark.parametrize("length", [36, 37])
@pytest.mark.parametrize("balancer", ["auto", "head-tail", None], ids=str)
def test_lengths_that_ranks_do_not_divide(balancer, length):
    judge(Problem(length=length, dim=16, causal=True), 4, balancer=balancer)


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_keys_of_another_length(kernel):
    judge(Problem(length=32, key_length=48, dim=16), 2, kernel)
    judge(Problem(length=32, key_length=48, dim=16, causal=True), 2, kernel, balancer=None)
    for mask, mask_dims in (("b11k", (3,)), ("11q1", (2,)), ("bhqk", (2,)), ("qk", (1,))):
        problem = Problem(length=32, key_length=48, dim=16, mask=Mask(mask))
        judge(problem, 2, kernel, balancer=None, mask_dims=mask_dims)


@pytest.mark.parametrize("how", [
    {"lead": (3,)}, {"lead": (2, 2, 2)}, {"dtype": torch.bfloat16}, {"scale": 0.3},
    {"key_heads": 1}, {"dim": 36},
], ids=str)  # fmt: skip
def test_other_calls(how):
    judge(Problem(**{"length": 64, "dim": 16, "causal": True} | how), 2)


def test_a_given_balancer():
    balancer = cp_dispatch.PerDocumentHeadTail([24, 40], 4)
    judge(Problem(length=64, dim=16, causal=True), 4, balancer=balancer)
    judge(Problem(length=64, dim=16, causal=True), 4, balancer=HeadTail(64, 4), buffers=False)


class Attention(nn.Module):
    def forward(self, *inputs):
        return F.scaled_dot_product_attention(*inputs)


class WithOwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.forward = Attention().forward


@pytest.mark.parametrize("causal", [True, False])
def test_a_given_balancer_says_that_shards_are_uneven(causal):
    problem, balancer = Problem(length=61, dim=16, causal=causal), HeadTail(61, 4)
    judge(problem, 4, balancer=balancer, buffers=False)
    query = problem.tensors()[0]

    def body(mesh):
        module = parallelize_module(
            Attention(), mesh, cp_dispatch.ContextParallel(balancer=balancer)
        )
        own = cp_dispatch.shard(mesh, query, 2, balancer)
        got = cp_dispatch.unshard(mesh, module(own, own, own), 2, balancer)
        want = F.scaled_dot_product_attention(query, query, query)
        torch.testing.assert_close(got, want)

    on_mesh(4, body)


def test_the_order_without_buffers():
    for balancer in ("head-tail", None):
        judge(Problem(length=44, dim=16, causal=True), 2, balancer=balancer, buffers=False)
    judge(Problem(length=48, dim=16), 2, buffers=False)
    judge(Problem(length=48, dim=16, mask=Mask("b11k")), 2, buffers=False, mask_dims=(3,))

    def body(mesh):
        own = [x[:, :, :8] for x in sequences(16)]
        with context_parallel(mesh):
            for options in (
                {"is_causal": True},
                {"attn_mask": torch.ones(16, 16, dtype=torch.bool)},
            ):
                with pytest.raises(ContextParallelError, match="order of the shards is unknown"):
                    F.scaled_dot_product_attention(*own, **options)

    on_mesh(2, body)


@pytest.mark.parametrize("frames", [6, 8])  # of which 4 ranks hold 3 (natural order) and head-tail
def test_tokens_made_from_a_buffer_are_in_its_order(frames):
    patches = torch.randn(1, 2, frames, 4, 8, generator=torch.Generator().manual_seed(0))

    def attend(x):
        tokens = x.flatten(2, 3)
        return F.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True)

    want = attend(patches)

    def body(mesh):
        own = patches.clone()
        with context_parallel(mesh, buffers=[own], buffer_seq_dims=[2]):
            (got,) = cp_dispatch.context_parallel_unshard(mesh, [attend(own)], [2])
        torch.testing.assert_close(got, want)

    on_mesh(2, body)


def test_an_order_that_buffers_do_not_tell():
    """It was guessed from the length: a gather of such a sequence permuted it."""
    query, key, value = sequences(16)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def body(mesh):
        rank, unknown = mesh.get_local_rank(), "no buffer is that long"
        own = [x.chunk(2, 2)[rank] for x in (query, key, value)]
        short, long = torch.zeros(2), torch.zeros(12)  # in natural and in head-tail order
        with context_parallel(mesh, buffers=[short.clone()], buffer_seq_dims=[0]):
            got = F.scaled_dot_product_attention(*own, is_causal=True)  # natural, as the buffer
        torch.testing.assert_close(got, want.chunk(2, 2)[rank])
        for buffers, rows in (([short, long], 8), ([long], 7)):
            given = [x[:, :, :rows] for x in own]
            buffers = [x.clone() for x in buffers]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0] * len(buffers)):
                F.scaled_dot_product_attention(*given)  # needs no order
                with pytest.raises(ContextParallelError, match=unknown):
                    F.scaled_dot_product_attention(*given, is_causal=True)
                with pytest.raises(ContextParallelError, match=unknown):
                    cp_dispatch.context_parallel_unshard(mesh, given, [2] * 3)
        with context_parallel(mesh), pytest.raises(ContextParallelError, match="without buffers"):
            cp_dispatch.context_parallel_unshard(mesh, own, [2] * 3)

    on_mesh(2, body)


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
@pytest.mark.parametrize("balancer", ["auto", None], ids=str)
@pytest.mark.parametrize("mask, mask_dims", [
    (Mask("qk"), ()), (Mask("qk"), (0,)), (Mask("qk"), (1,)), (Mask("b11k"), ()),
    (Mask("b11k"), (3,)), (Mask("1hqk", blind=True), (2,)), (Mask("bhqk", None), ()),
    (Mask("bhqk", None), (2,)), (Mask("11q1"), ()), (Mask("11q1"), (2,)),
], ids=str)  # fmt: skip
def test_masks(mask, mask_dims, balancer, kernel):
    for length in (48, 42) if balancer is None else (48,):
        problem = Problem(batch=2, heads=2, length=length, dim=16, mask=mask)
        judge(problem, 4, kernel, balancer=balancer, mask_dims=mask_dims)


@pytest.mark.parametrize("schedule", ["ring", "gather", "ulysses", "hybrid"])
def test_the_mask_of_a_single_row_is_on_the_rank_that_has_it(schedule):
    """The other ranks hold none of its rows, although they would share the row's heads."""
    query, key, value = sequences(1)
    bias = torch.randn(1, 2, 1, 1)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    want = F.scaled_dot_product_attention(*inputs, bias)
    want = [want, *torch.autograd.grad(want.sum(), inputs)]

    def body(mesh):
        *own, rows = buffers = [x.detach().clone() for x in (query, key, value, bias)]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2] * 4, balancer=None, schedule=schedule
        ):
            own = [x.clone().requires_grad_() for x in own]
            output = F.scaled_dot_product_attention(*own, rows)
            results = [output, *torch.autograd.grad(output.sum(), own)]
        got = cp_dispatch.context_parallel_unshard(mesh, results, [2] * 4, balancer=None)
        for mine, true in zip(got, want, strict=True):
            torch.testing.assert_close(mine, true)

    on_mesh(2, body)


def test_sliding_window_and_documents():
    """As masks of the whole sequence, and as each rank's rows of them."""
    query, key, value = sequences(32)
    at = torch.arange(32)
    documents = (at >= 20).int()
    window = (at[:, None] - at).abs() < 5
    for mask in (window, documents[:, None] == documents):
        want = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

        def body(mesh, mask=mask, want=want):
            buffers = [x.clone() for x in (query, key, value, mask)]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2, 0]):
                rows = imported_early(*buffers)
                whole = imported_early(*buffers[:3], attn_mask=mask)
            for own in (rows, whole):
                (got,) = cp_dispatch.context_parallel_unshard(mesh, [own], [2])
                torch.testing.assert_close(got, want)

        on_mesh(4, body)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_goes_by_true_positions(monkeypatch, causal):
    """Every call draws a seed, which decides what pairs of positions it drops in any order."""
    # Ranks in threads share a generator, so a test decides what they draw.
    drawn: dict[int, int] = {}
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(drawn[dist.get_rank()]))
    whole = sequences(16)

    def body(mesh):
        found = []
        for balancer in (None, "head-tail"):
            buffers = [x.clone() for x in whole]
            for seed in (1, 2):
                drawn[mesh.get_local_rank()] = seed
                arguments = {"buffers": buffers, "buffer_seq_dims": [2] * 3, "balancer": balancer}
                with context_parallel(mesh, **arguments):
                    own = F.scaled_dot_product_attention(*buffers, dropout_p=0.4, is_causal=causal)
                found += cp_dispatch.context_parallel_unshard(mesh, [own], [2], balancer=balancer)
        return found

    for first, second, *laid_out in on_mesh(2, body):
        torch.testing.assert_close(laid_out, [first, second])
        assert not torch.allclose(first, second)


def test_bias_of_own_rows_has_a_gradient():
    query, key, value = sequences(32)
    bias = torch.randn(2, 2, 32, 32, requires_grad=True)
    F.scaled_dot_product_attention(query, key, value, attn_mask=bias).square().sum().backward()
    want = bias.grad

    def body(mesh):
        buffers = [x.detach().clone() for x in (query, key, value, bias)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            own = buffers[3].clone().requires_grad_()
            output = F.scaled_dot_product_attention(*buffers[:3], attn_mask=own)
        (grad,) = torch.autograd.grad(output.square().sum(), own)
        (got,) = cp_dispatch.context_parallel_unshard(mesh, [grad], [2])
        torch.testing.assert_close(got, want)

    on_mesh(2, body)


def test_causal_biases():
    query, key, value = sequences(16)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def body(mesh):
        buffers = [x.clone() for x in (query, key, value)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            for bias in (causal_lower_right(16, 16), causal_upper_left(8, 8)):
                own = F.scaled_dot_product_attention(*buffers, attn_mask=bias)
                got = cp_dispatch.context_parallel_unshard(mesh, [own], [2])[0]
                torch.testing.assert_close(got, want)
            with pytest.raises(ContextParallelError, match="this rank's rows and this rank's keys"):
                keys = [torch.cat([x, x], 2) for x in buffers[1:]]
                F.scaled_dot_product_attention(
                    buffers[0], *keys, attn_mask=causal_lower_right(8, 16)
                )

    on_mesh(2, body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_only_modes(mode):
    query, key, value = sequences(16)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def body(mesh):
        with mode():
            buffers = [x.clone() for x in (query, key, value)]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
                own = imported_early(*buffers, is_causal=True)
            assert torch.equal(buffers[0], query)
            (got,) = cp_dispatch.context_parallel_unshard(mesh, [own], [2])
        torch.testing.assert_close(got, want)

    on_mesh(2, body)


def test_a_backward_inside_autocast_is_as_exact():
    """With plain tensors and the math kernel, its matrix products were rounded to bfloat16."""

    def body(mesh):
        inputs = [x.requires_grad_() for x in sequences(8)]
        with context_parallel(mesh, balancer=None):
            loss = F.scaled_dot_product_attention(*inputs).square().sum()
        want = torch.autograd.grad(loss, inputs, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            got = torch.autograd.grad(loss, inputs)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)

    with only("math"):
        on_mesh(2, body)


def test_debug_mode_finds_ranks_that_differ(monkeypatch):
    monkeypatch.setenv("CP_DISPATCH_DEBUG", "1")

    def body(mesh):
        own = [x[:, :, : 8 - mesh.get_local_rank()] for x in sequences(16)]
        with context_parallel(mesh, balancer=None):
            with pytest.raises(ContextParallelError, match="do not agree"):
                F.scaled_dot_product_attention(*own, is_causal=True)
            same = [x[:, :, :8] for x in sequences(16)]
            F.scaled_dot_product_attention(*same, is_causal=True)

    on_mesh(2, body)


def test_other_attention_of_modules_is_seen():
    """Modules whose fast paths skip F.scaled_dot_product_attention in eval mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 16, 16)
    with torch.no_grad():
        want = layer(x)

    def body(mesh):
        buffer = x.clone()
        with torch.no_grad(), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            own = layer(buffer)
        (got,) = cp_dispatch.context_parallel_unshard(mesh, [own], [1])
        torch.testing.assert_close(got, want)

    assert torch.backends.mha.get_fastpath_enabled()
    on_mesh(2, body)
    assert torch.backends.mha.get_fastpath_enabled()


# -- Buffers ----------------------------------------------------------------------------------


def test_buffers_are_cut_and_come_back():
    whole = {
        "tokens": (torch.arange(24).view(1, 24).repeat(2, 1), 1),
        "labels": (torch.arange(24, dtype=torch.int32), 0),
        "seen": (torch.rand(2, 24) > 0.5, -1),
        "rope": (torch.randn(24, 1, 4), 0),
        "heads": (torch.randn(2, 3, 24, 4, dtype=torch.bfloat16), 2),
        "other length": (torch.randn(2, 16, 4), 1),
    }

    def body(mesh):
        buffers = [x.clone() for x, _ in whole.values()]
        dims = [dim for _, dim in whole.values()]
        kept = buffers[4]
        pointers = [x.data_ptr() for x in buffers]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={kept}
        ):
            for buffer, (x, dim) in zip(buffers, whole.values(), strict=True):
                own = cp_dispatch.shard(mesh, x, dim, layout_for("auto", x.shape[dim], 2))
                assert buffer.dtype is x.dtype and torch.equal(buffer, own)
            shards = [x.clone() for x in buffers]
            buffers[0].zero_()  # what is written to a shard is lost with it
        for i, (x, _) in enumerate(whole.values()):
            assert torch.equal(buffers[i], shards[4] if i == 4 else x)
            assert i == 4 or buffers[i].data_ptr() == pointers[i]
        got = cp_dispatch.context_parallel_unshard(mesh, shards, dims)
        for mine, (x, _) in zip(got, whole.values(), strict=True):
            assert torch.equal(mine, x)

    on_mesh(2, body)


def test_block_masks_are_cut_and_come_back():
    whole = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, "cpu", BLOCK_SIZE=4)

    def body(mesh):
        own = cp_dispatch.shard(mesh, whole, 0)
        back, kept = masks = [copy.copy(whole) for _ in range(2)]
        with context_parallel(
            mesh, buffers=masks, buffer_seq_dims=[0] * 2, no_restore_buffers={kept}, balancer=None
        ):
            inside = [(mask.seq_lengths, mask.kv_num_blocks) for mask in masks]
        after = [(mask.seq_lengths, mask.kv_num_blocks) for mask in masks]
        for lengths, blocks in (*inside, after[1]):
            assert lengths == (16, 16) and torch.equal(blocks, own.kv_num_blocks)
        assert back.seq_lengths == (32, 32) and back.kv_num_blocks is whole.kv_num_blocks

    on_mesh(2, body)


def test_buffers_made_in_inference_mode_are_cut_outside_of_it():
    """They have no version counter, and torch raises if anything would increment it."""

    def body(mesh):
        query, key, value = whole = sequences(16)
        with torch.inference_mode():
            buffers = [x.clone() for x in whole]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3), torch.no_grad():
            own = F.scaled_dot_product_attention(*buffers, is_causal=True)
        for mine, x in zip(buffers, whole, strict=True):
            assert torch.equal(mine, x) and mine.is_inference()
        (got,) = cp_dispatch.context_parallel_unshard(mesh, [own], [2])
        want = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(got, want)

    on_mesh(2, body)


def test_an_exception_restores():
    def body(mesh):
        query, key, value = whole = sequences(16)
        buffers = [x.clone() for x in whole]
        with pytest.raises(KeyError, match="mine"):
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
                raise KeyError("mine")
        for mine, x in zip(buffers, whole, strict=True):
            assert torch.equal(mine, x)
        local = F.scaled_dot_product_attention(*buffers)  # on one device again
        torch.testing.assert_close(local, F.scaled_dot_product_attention(query, key, value))

    on_mesh(2, body)


def test_backward_after_the_block():
    """Buffers that autograd itself has saved: token ids, labels, a factor, and a view of one."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(11, 16), nn.Linear(16, 11)
    tokens, labels = torch.randint(11, (2, 2, 16))
    factor = torch.randn(16, 1)

    def loss(tokens, labels, factor):
        x = embedding(tokens) * factor * factor[:, :1]
        x = x.unflatten(-1, (2, 8)).transpose(1, 2)
        x = imported_early(x, x, x, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="sum")

    parameters = [*embedding.parameters(), *head.parameters()]
    want = torch.autograd.grad(loss(tokens, labels, factor), parameters)

    def body(mesh):
        buffers = [x.clone() for x in (tokens, labels, factor)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            own = loss(*buffers)
        assert torch.equal(buffers[0], tokens)
        return torch.autograd.grad(own, parameters)

    for got in zip(*on_mesh(2, body), want, strict=True):
        torch.testing.assert_close(got[0] + got[1], got[2])


def test_backward_in_the_next_block_with_the_same_buffers():
    """As in a pipeline, which runs the forward of several microbatches first."""

    def body(mesh):
        buffer = torch.arange(16.0)
        x = torch.ones(8, requires_grad=True)
        arguments = {"buffers": [buffer], "buffer_seq_dims": [0], "balancer": None}
        with context_parallel(mesh, **arguments):
            first = (x * buffer).sum()
        with context_parallel(mesh, **arguments):
            assert torch.equal(torch.autograd.grad(first, x)[0], buffer)

    on_mesh(2, body)


def test_a_saved_tensor_modified_in_place_is_still_found():
    def body(mesh):
        buffer, x = torch.randn(16), torch.randn(8, requires_grad=True)
        factor = torch.randn(8)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            y = x * factor
            factor.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            y.sum().backward()

    on_mesh(2, body)


def test_what_is_named_goes_before_what_the_block_says():
    def body(mesh):
        x = torch.arange(8)
        natural = cp_dispatch.shard(mesh, x, 0)
        with context_parallel(mesh, balancer="head-tail"):
            (whole,) = cp_dispatch.context_parallel_unshard(mesh, [natural], [0], balancer=None)
            (other,) = cp_dispatch.context_parallel_unshard(mesh, [natural], [0])
        assert torch.equal(whole, x) and not torch.equal(other, x)
        for length in (8, 7):  # ranks exchange lengths only if these are uneven
            with context_parallel(mesh, buffers=[torch.zeros(length)], buffer_seq_dims=[0]):
                assert cp_dispatch.toggle.plain_context().uneven == (length == 7)

    on_mesh(2, body)


def test_a_graph_from_before_the_block_does_not_find_the_shard():
    def body(mesh):
        buffer, x = torch.randn(2), torch.randn(2, requires_grad=True)
        y = x * buffer  # its gradient would also fit a shard of one row
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                y.sum().backward()

    on_mesh(2, body)


@pytest.mark.parametrize("copies", [False, True])
def test_a_write_to_the_output_in_a_checkpoint_is_found(copies):
    """Gradients were silently wrong, as they are with torch's attention, because autograd does not
    check what hooks keep. A hook's copy is not written to."""

    def step(query):
        return F.scaled_dot_product_attention(query, query, query).mul_(2).square()

    def body(mesh):
        own = sequences(16)[0].chunk(2, 2)[mesh.get_local_rank()].requires_grad_()
        with context_parallel(mesh, balancer=None):
            if copies:
                with saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
                    step(own).sum().backward()
                assert torch.equal(own.grad, want(mesh, own))
            else:
                with pytest.raises(RuntimeError, match="inplace operation: the output"):
                    checkpoint(step, own, use_reentrant=False).sum().backward()

    def want(mesh, own):
        out = F.scaled_dot_product_attention(own, own, own)
        return torch.autograd.grad((out * 2).square().sum(), own)[0]

    on_mesh(2, body)


@pytest.mark.parametrize("schedule", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("ndim", [4, 3])
def test_the_output_may_be_written_to_in_place(schedule, ndim):
    """As on one device, where the output is not a view of another tensor."""
    tensors = [x[0] if ndim == 3 else x for x in sequences(16)]

    def step(query, key, value):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out.add_(query)[..., 0].zero_()
        return out

    def body(mesh):
        shards = [x.chunk(2, -2)[mesh.get_local_rank()].clone() for x in tensors]
        with context_parallel(mesh, balancer=None, schedule=schedule):
            own = step(*[x.requires_grad_() for x in shards])
            # The backward needs the output as it was. So does that of torch's kernel.
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                own.sum().backward()
        return own.detach()

    got = torch.cat(on_mesh(2, body), -2)
    torch.testing.assert_close(got, step(*tensors))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_checkpoint_is_recomputed_in_its_block(depth, reentrant):
    """Outside the block its gradients would be those of attention within a shard. Functions without
    attention may be recomputed anywhere, and another block of the same order will do."""
    tensors = sequences(16)

    def attend(*inputs):
        return F.scaled_dot_product_attention(*inputs, is_causal=True)

    whole = [x.clone().requires_grad_() for x in tensors]
    want = torch.autograd.grad(attend(*whole).sum(), whole)

    def checkpointed(function, *inputs):
        for _ in range(depth):
            function = functools.partial(checkpoint, function, use_reentrant=reentrant)
        return function(*inputs)

    def body(mesh):
        shards = [x.chunk(2, 2)[mesh.get_local_rank()].clone().requires_grad_() for x in tensors]
        block = functools.partial(context_parallel, mesh, balancer=None)
        with block():
            out, other, again = (checkpointed(attend, *shards).sum() for _ in range(3))
            harmless = checkpointed(torch.sin, shards[0]).sum()
            out.backward()
        grads = [x.grad.clone() for x in shards]
        with pytest.raises(ContextParallelError, match="recomputed outside"):
            other.backward()
        harmless.backward()
        torch.testing.assert_close(shards[0].grad, grads[0] + shards[0].cos())
        with block(schedule="gather"):
            again.backward()
        torch.testing.assert_close(shards[1].grad, 2 * grads[1])
        return grads

    for got, true in zip(zip(*on_mesh(2, body), strict=True), want, strict=True):
        torch.testing.assert_close(torch.cat(got, 2), true)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["compiled", "flex", "compiled varlen"])
def test_a_checkpoint_with_other_attention_is_recomputed_in_its_block(kind, reentrant):
    """Graphs of use_reentrant=False and earlier ones of True, and flex_attention in one of True,
    were silently local outside."""

    def attend(x):
        if kind == "flex":
            own = x.detach()  # torch has no gradients of it on CPU
            return flex_attention(own, own, own) + x.sin()
        if kind == "compiled varlen":
            return varlen_attn(*[x[0].transpose(0, 1)] * 3, starts, starts, 16, 16)
        return F.scaled_dot_product_attention(x, x, x)

    torch._dynamo.reset()
    starts = torch.tensor([0, 16], dtype=torch.int32)
    function = attend if kind == "flex" else torch.compile(attend, backend="aot_eager")
    with fake_ranks(2) as mesh:
        for _ in range(2):
            x = sequences(8)[0].requires_grad_()
            with context_parallel(mesh, balancer=None):
                out = checkpoint(function, x, use_reentrant=reentrant)
            with pytest.raises(ContextParallelError, match="recomputed outside"):
                out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_recomputed_in_a_block_of_the_same_order(reentrant):
    """Of the same ranks, too. Functions without attention do not mind."""
    with fake_ranks(2, 2, names=("dp", "cp")) as mesh:
        others = {"mesh": mesh["dp"], "balancer": None}, {"mesh": mesh["cp"]}
        for function in (lambda x: F.scaled_dot_product_attention(x, x, x), torch.sin):
            for other in others:
                x = sequences(8)[0].requires_grad_()
                with context_parallel(mesh["cp"], balancer=None):
                    out = checkpoint(function, x, use_reentrant=reentrant)
                with context_parallel(**other):
                    if function is torch.sin:
                        out.sum().backward()
                        continue
                    with pytest.raises(ContextParallelError, match="recomputed outside"):
                        out.sum().backward()


def test_blocks_nest_and_follow_each_other():
    query, key, value = sequences(16)
    want = {
        causal: F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        for causal in (True, False)
    }

    def body(mesh):
        outer, inner = ([x.clone() for x in (query, key, value)] for _ in range(2))

        def right(buffers, balancer="auto"):
            for causal, true in want.items():
                own = F.scaled_dot_product_attention(*buffers, is_causal=causal)
                got = cp_dispatch.context_parallel_unshard(mesh, [own], [2], balancer=balancer)
                torch.testing.assert_close(got[0], true)

        for _ in range(2):
            with context_parallel(mesh, buffers=outer, buffer_seq_dims=[2] * 3):
                right(outer)
                with context_parallel(mesh, buffers=inner, buffer_seq_dims=[2] * 3, balancer=None):
                    right(inner, None)
                    with pytest.raises(ContextParallelError, match="already a buffer"):
                        with context_parallel(mesh, buffers=outer, buffer_seq_dims=[2] * 3):
                            pass
                right(outer)
                with cp_dispatch.enabled():  # about DTensors
                    right(outer)
                    cp_dispatch.disable()
                    right(outer)
            assert torch.equal(outer[0], query) and torch.equal(inner[0], query)

    on_mesh(2, body)


@pytest.mark.parametrize("order", [None, cp_dispatch.HeadTail(18, 2), "head-tail", "auto"])
def test_unshard_goes_by_the_order_of_the_block(order):
    """In natural order it silently assumed torch's default order of the rows."""
    for length in (18,) if order not in (None, "auto") else (16, 18):
        whole = torch.arange(2 * length).view(2, length)

        def body(mesh, whole=whole):
            buffer = whole.clone()
            with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1], balancer=order):
                (got,) = cp_dispatch.context_parallel_unshard(mesh, [buffer], [1])
            assert torch.equal(got, whole)

        on_mesh(2, body)


def test_a_style_is_for_more_than_one_world():
    """Meshes of the same ranks are equal, and it took the groups of the first one, as a module did
    that was in the style in the first world already."""
    query, key, value = sequences(16)
    want = F.scaled_dot_product_attention(query, key, value).chunk(2, 2)
    styles = [cp_dispatch.ContextParallel(balancer=None) for _ in range(4)]
    olds = [(Attention(), WithOwnForward()) for _ in range(4)]

    def body(groups: int, rank: int) -> None:
        for _ in range(groups):
            dist.new_group([0, 2])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
        at = mesh.get_local_rank()
        for module in (Attention(), *olds[rank]):
            parallelize_module(module, mesh, styles[rank])
            torch.testing.assert_close(
                module(*(x.chunk(2, 2)[at] for x in (query, key, value))), want[at]
            )

    for groups in (0, 3):
        run_threads(4, functools.partial(body, groups))


@pytest.mark.parametrize("attention_type", ["sdpa", "flex"])
def test_a_style_goes_with_its_modules(attention_type):
    """It has process groups, whose threads and sockets would stay forever."""
    with one_rank() as mesh:
        style = cp_dispatch.ContextParallel(attention_type=attention_type, balancer=None)
        for module in (Attention(), WithOwnForward()):
            parallelize_module(module, mesh, style)
            module(*sequences(16))
        gone = weakref.ref(style)
        del module, style
        gc.collect()
        assert gone() is None


def test_dtensors_mean_what_they_mean_outside():
    query, key, value = sequences(16)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def body(mesh):
        rank = mesh.get_local_rank()
        natural = [
            DTensor.from_local(x[:, :, rank * 8 : rank * 8 + 8], mesh, [Shard(2)], run_check=False)
            for x in (query, key, value)
        ]
        with context_parallel(mesh, buffers=[torch.zeros(16)], buffer_seq_dims=[0]):
            with cp_dispatch.enabled():
                got = F.scaled_dot_product_attention(*natural, is_causal=True)
        torch.testing.assert_close(got.full_tensor(), want)

    on_mesh(2, body)


def test_checkpoint():
    """It is right with the backward inside. A recomputation outside, which is local, is
    detected."""
    query, key, value = sequences(16)

    def body(mesh):
        def run(use_reentrant, inside):
            buffers = [x.clone() for x in (query, key, value)]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
                own = [x.clone().requires_grad_() for x in buffers]
                out = checkpoint(
                    lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
                    *own, use_reentrant=use_reentrant,
                )  # fmt: skip
                if inside:
                    out.sum().backward()
                    return own[1].grad
            with pytest.raises(RuntimeError):
                out.sum().backward()

        torch.testing.assert_close(run(False, True), run(True, True))
        run(False, False)

    on_mesh(2, body)


@pytest.mark.parametrize("mask_shape, lengths", [
    ((1, 1, 1, 5), (5, 5)),  # the usual padding mask, with 2, 2, 1 and 0 rows on the ranks
    ((1, 1, 24, 1), (24, 3)),
    ((1, 1, 5, 5), (5, 5)),
])  # fmt: skip
def test_masks_of_few_rows_mean_the_same_on_every_rank(mask_shape, lengths):
    query, key, value = (torch.randn(1, 1, n, 4) for n in (lengths[0], lengths[1], lengths[1]))
    mask = torch.rand(mask_shape) > 0.3
    mask[..., 0] = True
    want = F.scaled_dot_product_attention(query, key, value, mask)

    def body(mesh):
        buffers = [x.clone() for x in (query, key, value)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, balancer=None):
            out = F.scaled_dot_product_attention(*buffers, mask)
        return out

    torch.testing.assert_close(torch.cat(on_mesh(4, body), 2), want)


def test_a_wrong_mask_is_refused_on_every_rank():
    """Also if it has as many rows as one rank happens to hold."""
    query, key, value = sequences(9)

    def body(mesh):
        buffers = [x.clone() for x in (query, key, value)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            with pytest.raises(ContextParallelError, match="attn_mask has .* rows"):
                F.scaled_dot_product_attention(*buffers, torch.ones(1, 1, 4, 9, dtype=torch.bool))

    on_mesh(2, body)


def test_a_block_asks_its_mesh_for_the_number_of_ranks_once():
    """The mesh multiplies it out, which takes the host longer than a view."""

    def body(mesh):
        tensors = [torch.randn(1, 2, 8, 8) for _ in range(3)]
        with cp_dispatch.context_parallel(mesh, balancer=None):
            first = F.scaled_dot_product_attention(*tensors, is_causal=True)
            with mock.patch.object(mesh, "size", side_effect=AssertionError):
                again = F.scaled_dot_product_attention(*tensors, is_causal=True)
        assert torch.equal(first, again)

    on_mesh(2, body)
