"""``explain()`` of plain shards inside a block gives the plan of the call that runs there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.bias import causal_lower_right

import cp_dispatch
from cp_dispatch import (
    ContextParallel,
    ContextParallelError,
    HeadTail,
    context_parallel,
    explain,
)
from cp_dispatch.plain_tensors import local_call
from tests.distributed.calls import only
from tests.distributed.test_plain_threads import on_mesh, sequences


@pytest.fixture
def ran(monkeypatch):
    """The plans that ran, by rank."""
    plans, run_op = {}, local_call.run_op

    def spy(context, plan, *args):
        plans[dist.get_rank()] = plan
        return run_op(context, plan, *args)

    monkeypatch.setattr(local_call, "run_op", spy)
    return plans


MASK = torch.ones(48, 48, dtype=torch.bool).tril()


@pytest.mark.parametrize("how", [
    {}, {"balancer": None}, {"schedule": "gather"}, {"schedule": "ulysses"},
    {"schedule": "mirrored_ring", "balancer": None}, {"schedule": "hybrid:2"},
    {"balancer": HeadTail(48, 4)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("options", [
    {"is_causal": True}, {}, {"attn_mask": MASK}, {"attn_mask": MASK[None, :1]},
    {"is_causal": True, "dropout_p": 0.1}, {"attn_mask": causal_lower_right(12, 12)},
], ids=["causal", "full", "mask", "padding", "dropout", "bias"])  # fmt: skip
def test_it_is_what_runs(ran, how, options):
    def body(mesh):
        buffers = [x.clone() for x in sequences(48, heads=4)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, **how):
            plan = explain(*buffers, **options)
            F.scaled_dot_product_attention(*buffers, **options)
        assert plan == ran[mesh.get_local_rank()]
        assert plan.handler == "cp_dispatch" and plan.world_size == 4
        text = str(plan)
        assert "handled by cp_dispatch" in text and "this rank's shards inside" in text
        assert "not math" in text or plan.backend == "math"

    on_mesh(4, body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_and_dims(ran, mode):
    def body(mesh):
        buffers = [x[:, 0].bfloat16() for x in sequences(16)]
        with mode(), only("math"), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3):
            plan = explain(*buffers, is_causal=True)
            F.scaled_dot_product_attention(*buffers, is_causal=True)
        assert plan == ran[mesh.get_local_rank()] and plan.backend == "math"

    on_mesh(2, body)


def test_autocast_casts_a_bias_too(ran):
    def body(mesh):
        buffers, bias = [x.clone() for x in sequences(16)], torch.zeros(16, 16).half()
        with (
            torch.autocast("cpu", torch.bfloat16),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3),
        ):
            plan = explain(*buffers, bias)
            F.scaled_dot_product_attention(*buffers, bias)
            lower_right = causal_lower_right(8, 16)
            assert explain(buffers[0], *(torch.cat([x] * 2, 2) for x in buffers[1:]), lower_right)
        assert plan == ran[mesh.get_local_rank()]

    on_mesh(2, body)


@pytest.mark.parametrize("balancer", ["auto", "head-tail", None, HeadTail(42, 4)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_uneven_lengths_that_buffers_tell(ran, monkeypatch, balancer, masked):
    mask = torch.ones(42, 42, dtype=torch.bool)

    def body(mesh):
        buffers = [x.clone() for x in (*sequences(42), mask)]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2, 0], balancer=balancer
        ):
            *own, rows = buffers
            options = {"attn_mask": rows} if masked else {"is_causal": True}
            plan = explain(*own, **options)
            F.scaled_dot_product_attention(*own, **options)
        assert plan == ran[mesh.get_local_rank()] and plan.query_length == 42

    on_mesh(4, body)


def test_it_does_not_communicate(monkeypatch):
    """Neither for uneven lengths nor in the debug mode. It says what it assumes."""
    monkeypatch.setenv("CP_DISPATCH_DEBUG", "1")

    def body(mesh):
        if mesh.get_local_rank():
            return
        own = [x[:, :, :8] for x in sequences(16)]
        with context_parallel(mesh, buffers=[torch.zeros(21)], buffer_seq_dims=[0]):
            plan = explain(*own)
        assert plan.handler == "cp_dispatch" and plan.query_length == 16
        assert "assumed that every rank holds 8 rows of key" in str(plan)
        with context_parallel(mesh, buffers=[torch.zeros(21)], buffer_seq_dims=[0]):
            one = explain(*[x[:, :, :1] for x in own], torch.ones(1, 1, dtype=torch.bool))
        for name in ("query", "key"):
            assert f"assumed that size 1 of attn_mask broadcasts over every {name}" in str(one)

    on_mesh(2, body)


def test_what_was_assumed_of_a_call_that_it_refuses():
    """The call may run, because another rank has other lengths."""

    def body(mesh):
        query, key = torch.randn(1, 1, 7, 8), torch.randn(1, 1, 8, 8)
        mask = torch.ones(7, 8, dtype=torch.bool)
        with context_parallel(mesh, buffers=[query, key], buffer_seq_dims=[2, 2], balancer=None):
            plan = explain(query, key, key, mask)
            F.scaled_dot_product_attention(query, key, key, mask)
        return plan.handler, str(plan)

    plans = on_mesh(3, body)
    assert "refused" in dict(plans)
    for handler, text in plans:
        assert handler == "cp_dispatch" or "assumed that every rank holds" in text, text


def test_refusals_are_those_of_the_call(ran):
    def body(mesh):
        own = [x[:, :, :8] for x in sequences(16)]
        for reason, tensors, options, balancer in (
            ("attn_mask has 5 rows", own, {"attn_mask": MASK[:5, :16]}, None),
            ("order of the shards is unknown", own, {"is_causal": True}, "auto"),
            ("enable_gqa is False", [torch.cat([own[0]] * 2, 1), *own[1:]], {}, None),
        ):
            with context_parallel(mesh, balancer=balancer):
                plan = explain(*tensors, **options)
                with pytest.raises(ContextParallelError, match=reason) as raised:
                    F.scaled_dot_product_attention(*tensors, **options)
            assert plan.handler == "refused" and reason in str(plan)
            assert all(each in str(raised.value) for each in plan.reasons)
            assert "refused because" in str(plan) and not ran

    on_mesh(2, body)


def test_one_rank_and_none(ran):
    def body(mesh):
        own = sequences(16)
        with context_parallel(mesh, balancer=None):
            plan = explain(*own)
        assert plan.handler == "stock" and "over one rank" in str(plan)
        assert "no block of context_parallel is on" in str(explain(*own))

    on_mesh(1, body)


def test_in_a_module_of_the_style(ran):
    class Attention(nn.Module):
        def forward(self, query):
            self.plan = cp_dispatch.explain(query, query, query, is_causal=True)
            return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    def body(mesh):
        module = Attention()
        parallelize_module(module, mesh, ContextParallel(balancer="head-tail"))
        module(torch.randn(1, 2, 8, 8))
        assert module.plan == ran[mesh.get_local_rank()] and module.plan.layout is not None

    on_mesh(2, body)
