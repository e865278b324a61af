"""The alternative that ``tools/varlen_bench.py`` times attends as one device does."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from cp_dispatch.varlen import dense
from cp_dispatch.varlen.documents import Window
from tests.distributed.threads import run_threads
from tests.tools.scripts import TOOLS, load


class Dense(torch.autograd.Function):
    """Replaces torch's kernel, which does not exist on CPU."""

    @staticmethod
    def forward(ctx, query, key, value, sizes, window):
        ctx.rest = sizes, Window(*window), query.size(-1) ** -0.5
        output, logsumexp = dense.forward(query, key, value, *ctx.rest)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx, grad):
        return (*dense.backward(grad, *ctx.saved_tensors, *ctx.rest), None, None)


def varlen_attn(query, key, value, rows, keys, *_, window_size, **options):
    sizes = list(zip(rows.diff().tolist(), keys.diff().tolist(), strict=True))
    return Dense.apply(query, key, value, sizes, window_size)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("mean", [8, 20, 200])
@pytest.mark.parametrize("window", [None, 5])
def test_gathered_by_hand(monkeypatch, mean, window):
    monkeypatch.syspath_prepend(TOOLS)
    bench = load("varlen_bench")
    monkeypatch.setattr(bench, "varlen_attn", varlen_attn)
    args = argparse.Namespace(heads=(4, 2), head_dim=8, dtype="float64", window=window)

    # Before there are ranks, because the random number generator belongs to the process.
    tensors = [torch.randn(48, n, 8, dtype=torch.float64) for n in (4, 2, 2, 4)]

    def body(rank):
        problem = bench.Problem(args, init_device_mesh("cpu", (3,)), 16, mean)
        own = slice(rank * 16, (rank + 1) * 16)

        def run(attend, tensors):
            *leaves, grad = (x.clone() for x in tensors)
            output = attend(*(x.requires_grad_() for x in leaves))
            return output, *torch.autograd.grad(output, leaves, grad)

        with bench.by_hand(problem) as (_, _, attend, facts):
            results = run(attend, [x[own] for x in tensors])
        for got, want in zip(results, run(problem.attend, tensors), strict=True):
            torch.testing.assert_close(got, want[own])
        size = 2 * 2 * 16 * 2 * 8 * 8  # to 2 ranks, key and value, rows, heads, dim, bytes
        assert facts == {"sent_mib": size / 2**20}

    run_threads(3, body)
