"""Running a :class:`~tests.flex.problems.FlexProblem` on DTensors."""

from __future__ import annotations

import contextlib
import importlib
import threading

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import flex_attention

from cp_dispatch.flex import grouped, groups, plan
from tests.distributed.sharded import distribute
from tests.flex.problems import NAMES, FlexProblem, gradients_on_cpu

ROWS = (Shard(2),)


def permuted(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Permute dim 2 by ``index`` (1 or B, S)."""
    index = index.to(x.device)
    if index.size(0) == 1:
        return x.index_select(2, index[0])
    return torch.stack([row.index_select(1, i) for row, i in zip(x, index, strict=True)])


def run_sharded(
    problem: FlexProblem, mesh, placements=ROWS, *, key_placements=None, layout=None,
    attend=flex_attention, parameter=None, block_mask=None, needs_grad=True,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Whole results. Also checks that each has the placements of the input that it belongs to.

    ``parameter`` places the captured parameter as a DTensor; with None it stays plain.
    ``block_mask(mods)`` replaces the global mask.
    """
    device = mesh.device_type
    *inputs, grad, grad_lse = problem.tensors(device)
    mods = problem.mods(device)
    mask = problem.block_mask(mods, device) if block_mask is None else block_mask(mods)
    where = placements, key_placements or placements, key_placements or placements

    def place(x, placements):
        if layout is not None:
            x = permuted(x, layout.indices)
        return distribute(x, mesh, placements)

    leaves = [place(x, p).requires_grad_(needs_grad) for x, p in zip(inputs, where, strict=True)]
    results = problem.attend(*leaves, mods, mask, attend)
    for x in results:
        assert isinstance(x, DTensor) and x.placements == tuple(placements), x
    if mods.parameter is not None:
        leaves.append(mods.parameter)
    whole = list(results)
    if needs_grad:
        tangents = [place(x, placements) for x in (grad, grad_lse)]
        grads = torch.autograd.grad(results, leaves, tangents)
        for x, leaf in zip(grads, leaves, strict=True):
            if isinstance(leaf, DTensor):
                assert x.placements == leaf.placements, (x.placements, leaf.placements)
        whole += grads
    named = {}
    for name, x in zip(NAMES, whole, strict=False):
        x = x.full_tensor() if isinstance(x, DTensor) else x
        if layout is not None and name != "dParameter":
            x = permuted(x, layout.inverse)
        named[name] = x.detach()
    return named


def replicated(mesh) -> tuple:
    return (Replicate(),) * mesh.ndim


@contextlib.contextmanager
def uncompiled_op():
    """Inside, ``flex_attention`` calls the op itself, with gradients, because torch's tracers do
    not support threads."""
    module = importlib.import_module("torch._higher_order_ops.flex_attention")
    trace, lock = module.create_fw_bw_graph, threading.Lock()

    def one_by_one(*args):
        with lock:
            return trace(*args)

    with pytest.MonkeyPatch.context() as patch, gradients_on_cpu():
        patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        patch.setattr(module, "create_fw_bw_graph", one_by_one)
        yield


@contextlib.contextmanager
def in_groups():
    """Inside, keys are exchanged by groups of heads, whatever the mask and however small the
    problem. Yields a list of ``("forward" or "backward", number of groups)`` of all calls."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "LEAST_ROWS", 0)
        patch.setattr(groups, "LEAST_BYTES", 0)
        patch.setattr(plan, "keys_travel", lambda *_: True)
        for name in ("forward", "backward"):
            kernel = getattr(grouped, name)

            def counted(local, *args, kernel=kernel, name=name):
                counts.append((name, local.plan.groups))
                return kernel(local, *args)

            patch.setattr(grouped, name, counted)
        yield counts
