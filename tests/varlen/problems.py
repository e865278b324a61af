"""Calls of ``varlen_attn`` on whole sequences: their exact results, and those of one device."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from cp_dispatch import context_parallel, context_parallel_unshard
from cp_dispatch.varlen.ops import FORWARD
from tests.distributed.reference import FACTOR, _scatter
from tests.distributed.sharded import distribute

NAMES = ("output", "logsumexp", "dQ", "dK", "dV")
ROWS = (Shard(0),)
# Torch 2.11 accepts grouped heads without this argument.
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class VarlenProblem:
    """Lengths of the documents, and ``rest`` rows after them that belong to no document."""

    lengths: tuple[int, ...] = (5, 20, 1, 9, 13)
    key_lengths: tuple[int, ...] | None = None
    window: tuple[int, int] = (-1, 0)
    heads: int = 4
    key_heads: int = 4
    dim: int = 8
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    rest: int = 0

    @property
    def grouped(self) -> bool:
        return self.heads != self.key_heads

    @property
    def totals(self) -> tuple[int, int]:
        return sum(self.lengths) + self.rest, sum(self.key_lengths or self.lengths) + self.rest

    def tensors(self, device="cpu") -> list[Tensor]:
        """Query, key, value and the output's gradient, the same on every rank."""
        generator = torch.Generator().manual_seed(sum(self.lengths))
        rows, keys = self.totals
        shapes = [(rows, self.heads), (keys, self.key_heads), (keys, self.key_heads)]
        return [
            torch.randn(*s, self.dim, generator=generator).to(device, self.dtype)
            for s in (*shapes, shapes[0])
        ]

    def starts(self, device="cpu") -> list[Tensor]:
        found = [
            torch.tensor([0, *accumulate(x)], dtype=torch.int32).to(device)
            for x in (self.lengths, self.key_lengths or self.lengths)
        ]
        return found if self.key_lengths else [found[0]] * 2

    def attend(self, query, key, value, starts):
        """The line of code that a user writes; returns ``(output, logsumexp)``."""
        gqa = GQA if self.grouped else {}
        longest = max(self.lengths), max(self.key_lengths or self.lengths)
        return varlen_attn(
            query, key, value, *starts, *longest, window_size=self.window, scale=self.scale,
            return_aux=AuxRequest(lse=True), **gqa,
        )  # fmt: skip


def exact(problem: VarlenProblem, device="cpu") -> dict[str, Tensor]:
    """The results in float64, with one mask of all rows and keys."""
    query, key, value, grad = (x.double() for x in problem.tensors(device))
    rows, keys = problem.totals
    seen = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    row = start = 0
    left, right = problem.window
    lengths = zip(problem.lengths, problem.key_lengths or problem.lengths, strict=True)
    for n, m in lengths:
        after = torch.arange(m).view(1, -1) - torch.arange(n).view(-1, 1) - (m - n)
        part = torch.ones(n, m, dtype=torch.bool)
        if left >= 0:
            part &= after >= -left
        if right >= 0:
            part &= after <= right
        seen[row : row + n, start : start + m] = part.to(device)
        row, start = row + n, start + m
    leaves = [x.requires_grad_() for x in (query, key, value)]
    groups = problem.heads // problem.key_heads
    k, v = (x.repeat_interleave(groups, 1) for x in leaves[1:])
    scale = problem.dim**-0.5 if problem.scale is None else problem.scale
    scores = torch.einsum("qhd,khd->hqk", query, k) * scale
    sees = seen.any(-1)
    scores = scores.masked_fill(~seen & sees.unsqueeze(-1), -torch.inf)
    weights = scores.softmax(-1) * sees.unsqueeze(-1)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    grads = torch.autograd.grad(out, leaves, grad)
    lse = scores.logsumexp(-1).masked_fill(~sees, torch.inf)
    return dict(zip(NAMES, [x.detach() for x in (out, lse, *grads)], strict=True))


def one_device(problem: VarlenProblem, device="cpu") -> dict[str, Tensor]:
    """Torch's kernel, or ours on one rank on CPU, where torch has none."""
    *inputs, grad = problem.tensors(device)
    leaves = [x.requires_grad_() for x in inputs]
    starts = problem.starts(device)
    if torch.device(device).type == "cpu":
        options = list(problem.window), problem.scale, *problem.totals, False, None, [], 0, "", ""
        out, lse = FORWARD(*leaves, *starts, *options)
    else:
        out, lse = problem.attend(*leaves, starts)
    grads = torch.autograd.grad(out, leaves, grad)
    found = dict(zip(NAMES, [x.detach() for x in (out, lse, *grads)], strict=True))
    # Torch's kernel does not write rows outside all documents.
    rows, keys = (total - problem.rest for total in problem.totals)
    for name, end in (("output", rows), ("dQ", rows), ("dK", keys), ("dV", keys)):
        found[name][end:] = 0
    found["logsumexp"][:, rows:] = torch.inf
    return found


def permuted(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index[0].to(x.device))


def run_sharded(
    problem: VarlenProblem, mesh, placements=ROWS, *, key_placements=None, layout=None,
    starts=None, attend=None, needs_grad=True,
) -> dict[str, Tensor]:  # fmt: skip
    """Whole results. Also checks that they have the query's placements."""
    device = mesh.device_type
    *inputs, grad = problem.tensors(device)
    where = placements, key_placements or placements, key_placements or placements

    def place(x, placements):
        return distribute(x if layout is None else permuted(x, layout.indices), mesh, placements)

    leaves = [place(x, p).requires_grad_(needs_grad) for x, p in zip(inputs, where, strict=True)]
    starts = problem.starts(device) if starts is None else starts
    out, lse = (attend or problem.attend)(*leaves, starts)
    placed = tuple(placements)
    turned = tuple(Shard(1 - p.dim) if isinstance(p, Shard) else p for p in placed)
    assert isinstance(out, DTensor) and out.placements == placed, out
    assert isinstance(lse, DTensor) and lse.placements == turned, lse
    assert not lse.requires_grad
    found = [out, lse]
    if needs_grad:
        found += torch.autograd.grad(out, leaves, place(grad, placements))
        assert all(x.placements == placed for x in found[2:])
        for x, leaf in zip(found[2:], leaves, strict=True):
            if leaf.placements == placed:  # full_tensor() would drop rows too many
                assert x.to_local().shape == leaf.to_local().shape
    named = {}
    for name, x in zip(NAMES, found, strict=False):
        x = x.full_tensor()
        if layout is not None:
            x = permuted(x.t(), layout.inverse).t() if x.ndim == 2 else permuted(x, layout.inverse)
        named[name] = x.detach()
    return named


def run_in_block(problem, mesh, balancer="auto", attend=None, starts=None) -> dict[str, Tensor]:
    """Whole results of a call on plain shards in ``context_parallel``."""
    *inputs, grad = problem.tensors(mesh.device_type)
    starts = problem.starts(mesh.device_type) if starts is None else starts
    buffers = [*inputs, grad]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0] * 4, balancer=balancer):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, lse = (attend or problem.attend)(*leaves, starts)
        assert type(out) is Tensor and not lse.requires_grad
        assert out.shape == leaves[0].shape and lse.shape == out.shape[1::-1]
        found = [out, lse.t().contiguous(), *torch.autograd.grad(out, leaves, grad.clone())]
        whole = context_parallel_unshard(mesh, [x.detach() for x in found], [0] * 5)
    named = dict(zip(NAMES, whole, strict=True))
    return named | {"logsumexp": named["logsumexp"].t()}


def check(got: dict[str, Tensor], want: dict[str, Tensor], single: dict[str, Tensor]) -> None:
    """Check that every result is as close to ``want`` as one device's, up to FACTOR; see
    :func:`tests.distributed.reference.report`."""
    wrong = []
    for name, mine in got.items():
        true, theirs = want[name], single[name]
        assert mine.shape == true.shape, f"{name}: shape {mine.shape}, want {true.shape}"
        assert mine.dtype is theirs.dtype, f"{name}: {mine.dtype}, one device {theirs.dtype}"
        blind = true == torch.inf
        assert torch.equal(blind, mine == torch.inf), f"{name}: other rows see nothing"
        true = true.masked_fill(blind, 0.0)
        error, *others = (
            (x.double().masked_fill(blind, 0.0) - true).norm().item()
            for x in (mine, true.to(mine.dtype), theirs)
        )
        allowed = max(others)
        if not error <= FACTOR * _scatter(true) * allowed:  # a NaN counts as wrong
            wrong.append(f"{name}: error {error:.3e}, one device {allowed:.3e}")
    assert not wrong, "; ".join(wrong)
