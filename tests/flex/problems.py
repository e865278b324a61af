"""FlexAttention problems and their exact results: the formulas in float64, without flex.

Mods are written with plain tensor arithmetic, so that they also broadcast over whole index grids.
The reference calls them in that way; torch calls them with one index each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.distributed.reference import FACTOR, _scatter

# Torch warns about return_lse once per process, and a graph that was compiled before has a guard on
# that.
getattr(torch_flex, "_WARNINGS_SHOWN", set()).add("deprecated_return_lse")


@dataclass(frozen=True)
class Mods:
    """The mods of a problem and the parameter that they capture, if any."""

    mask: Callable | None = None
    score: Callable | None = None
    parameter: Tensor | None = None


def causal(b, h, q, k):
    return q >= k


def documents(length: int, mean: int, device, batch: int = 1) -> Tensor:
    """The document of each position, ``(batch, length)`` int32, with lengths around ``mean``."""
    generator = torch.Generator().manual_seed(length + mean)
    ids = []
    for _ in range(batch):
        ends = torch.randint(1, 2 * mean, (2 * length // mean + 2,), generator=generator).cumsum(0)
        ids.append(torch.searchsorted(ends, torch.arange(length), right=True))
    return torch.stack(ids).to(device, torch.int32)


def _soft_cap(score, b, h, q, k):
    return 2.0 * torch.tanh(score / 2.0)


def _alibi(score, b, h, q, k):
    return score - (q - k).abs() * torch.exp2(-(h + 1.0))


def _relative(bias: Tensor, length: int):
    def relative(score, b, h, q, k):
        return score + bias[h, q - k + length]

    return relative


def make_mods(kind: str, length: int, heads: int, device, dtype=torch.float32) -> Mods:
    """Mods by name. What they capture is on ``device``, floating tensors in ``dtype``, the same for
    all."""
    generator = torch.Generator().manual_seed(7)

    def parameter(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    ids = documents(length, max(length // 6, 1), device, batch=4)
    one = ids[0]
    many = documents(length, max(length // 28, 1), device, batch=8)
    edge, window = length // 5, max(length // 4, 1)
    bias = parameter(heads, 2 * length + 1)
    by_row = parameter(length)
    return {
        "none": lambda: Mods(),
        "causal": lambda: Mods(causal),
        "window": lambda: Mods(lambda b, h, q, k: (q >= k) & (q - k < window)),
        "prefix": lambda: Mods(torch_flex.or_masks(causal, lambda b, h, q, k: k < edge)),
        "documents": lambda: Mods(
            torch_flex.and_masks(causal, lambda b, h, q, k: one[q] == one[k])
        ),
        "documents of each row": lambda: Mods(lambda b, h, q, k: ids[b, q] == ids[b, k]),
        "28 documents": lambda: Mods(lambda b, h, q, k: (q >= k) & (many[b, q] == many[b, k])),
        "dilated": lambda: Mods(lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0)),
        "by head": lambda: Mods(lambda b, h, q, k: (q >= k) | ((h == 1) & (k < edge))),
        "blind rows": lambda: Mods(lambda b, h, q, k: (q >= edge) & (q >= k)),
        "alibi": lambda: Mods(causal, _alibi),
        "soft cap": lambda: Mods(causal, _soft_cap),
        "relative bias": lambda: Mods(causal, _relative(bias, length), bias),
        "bias by row": lambda: Mods(
            causal, lambda score, b, h, q, k: score + by_row[q] * by_row[k], by_row
        ),
        "bias by query": lambda: Mods(
            causal, lambda score, b, h, q, k: score + by_row[q] * (k + 1.0).rsqrt(), by_row
        ),
    }[kind]()


KINDS = (
    "none", "causal", "window", "prefix", "documents", "documents of each row", "dilated",
    "by head", "blind rows", "alibi", "soft cap", "relative bias", "bias by row",
)  # fmt: skip
# Torch's compiled backward supports the gradient of a tensor that is indexed once.
COMPILED_KINDS = (*KINDS[:-1], "bias by query")
# The kinds whose block mask differs by batch row, and by head.
OWN_BATCH, OWN_HEADS = ("documents of each row", "28 documents"), ("by head",)


@dataclass(frozen=True)
class FlexProblem:
    kind: str
    length: int = 384
    batch: int = 2
    heads: int = 2
    key_heads: int = 2
    dim: int = 16
    value_dim: int | None = None
    block: int | tuple[int, int] = 128
    dtype: torch.dtype = torch.float32
    scale: float | None = None

    def mods(self, device) -> Mods:
        return make_mods(self.kind, self.length, self.heads, device, self.dtype)

    def tensors(self, device="cpu") -> list[Tensor]:
        """query, key, value, and gradients of output and logsumexp."""
        generator = torch.Generator().manual_seed(self.length)
        value_dim = self.value_dim or self.dim
        shapes = [
            (self.batch, self.heads, self.length, self.dim),
            (self.batch, self.key_heads, self.length, self.dim),
            (self.batch, self.key_heads, self.length, value_dim),
            (self.batch, self.heads, self.length, value_dim),
        ]
        tensors = [torch.randn(s, generator=generator).to(device, self.dtype) for s in shapes]
        grad_lse = torch.randn(shapes[0][:3], generator=generator).to(device)
        return [*tensors, grad_lse.to(self.stats_dtype)]

    @property
    def stats_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def mask_shape(self) -> tuple[int | None, int | None]:
        return (
            self.batch if self.kind in OWN_BATCH else None,
            self.heads if self.kind in OWN_HEADS else None,
        )

    def block_mask(self, mods: Mods, device):
        if mods.mask is None:
            return None
        return create_block_mask(
            mods.mask, *self.mask_shape, self.length, self.length, device, BLOCK_SIZE=self.block
        )

    def attend(self, query, key, value, mods: Mods, block_mask, attend=flex_attention):
        """``(output, logsumexp)``."""
        return attend(
            query, key, value, score_mod=mods.score, block_mask=block_mask, scale=self.scale,
            enable_gqa=self.heads != self.key_heads, return_lse=True,
        )  # fmt: skip


def exact(problem: FlexProblem, device="cpu") -> dict[str, Tensor]:
    """The results in float64."""
    inputs = [x.double() for x in problem.tensors(device)]
    mods = dataclasses.replace(problem, dtype=torch.float64).mods(device)
    if mods.parameter is not None:
        with torch.no_grad():  # computed in the problem's own dtype
            mods.parameter.copy_(problem.mods(device).parameter)
    # One batch row at a time, because all the scores of a large problem take much memory.
    rows = [
        _exact_row(problem, mods, row, [x[row : row + 1] for x in inputs])
        for row in range(problem.batch)
    ]
    results = {name: torch.cat([row[name] for row in rows]) for name in NAMES[:5]}
    if mods.parameter is not None:
        results[NAMES[5]] = sum(row[NAMES[5]] for row in rows)
    return results


def _exact_row(problem: FlexProblem, mods: Mods, row: int, tensors) -> dict[str, Tensor]:
    query, key, value, grad, grad_lse = tensors
    groups = problem.heads // problem.key_heads
    leaves = [x.requires_grad_() for x in (query, key, value)]
    if mods.parameter is not None:
        leaves.append(mods.parameter)
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = 1 / math.sqrt(problem.dim) if problem.scale is None else problem.scale
    scores = query @ keys.mT * scale
    b, h, q, k = (
        torch.arange(n, device=query.device).view([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate(scores.shape)
    )
    b = b + row
    if mods.score is not None:
        scores = mods.score(scores, b, h, q, k)
    if mods.mask is not None:
        scores = scores.masked_fill(~mods.mask(b, h, q, k), -torch.inf)
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    weights = torch.softmax(torch.where(seen, scores, 0.0), -1) * seen
    output = weights @ values
    lse = torch.where(seen, scores, 0.0).logsumexp(-1)
    rows = seen.squeeze(-1)
    loss = (output * grad).sum() + torch.where(rows, lse * grad_lse, 0.0).sum()
    grads = torch.autograd.grad(loss, leaves)
    results = [output, torch.where(rows, lse, -torch.inf), *grads]
    return dict(zip(NAMES, [x.detach() for x in results], strict=False))


NAMES = ("output", "logsumexp", "dQ", "dK", "dV", "dParameter")


@contextlib.contextmanager
def gradients_on_cpu():
    """Bypass torch's refusal of FlexAttention gradients on CPU; the op's dense path supports
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)
        yield


def one_device(problem: FlexProblem, device="cpu", attend=flex_attention) -> dict[str, Tensor]:
    """The results of torch's own FlexAttention on one device."""
    *inputs, grad, grad_lse = problem.tensors(device)
    mods = problem.mods(device)
    leaves = [x.requires_grad_() for x in inputs]
    results = problem.attend(*leaves, mods, problem.block_mask(mods, device), attend)
    if mods.parameter is not None:
        leaves.append(mods.parameter)
    grads = torch.autograd.grad(results, leaves, [grad, grad_lse])
    return dict(zip(NAMES, [*(x.detach() for x in results), *grads], strict=False))


def check(got: dict[str, Tensor], want: dict[str, Tensor], single: dict[str, Tensor]) -> None:
    """Check that every result is as close to ``want`` as one device's, up to FACTOR.

    No result can be better than the exact answer rounded to the dtype, so that error counts instead
    of one device's if one device happens to be luckier, as in
    :func:`tests.distributed.reference.report`.
    """
    assert set(got) == set(want), (set(got), set(want))
    wrong = []
    for name, mine in got.items():
        true, theirs = want[name], single[name]
        assert mine.shape == true.shape, f"{name}: shape {mine.shape}, want {true.shape}"
        assert mine.dtype is theirs.dtype, f"{name}: {mine.dtype}, one device {theirs.dtype}"
        blind = true == -torch.inf
        assert torch.equal(blind, mine == -torch.inf), f"{name}: other rows see nothing"
        true = true.masked_fill(blind, 0.0)
        error, *others = (
            (x.detach().double().masked_fill(blind, 0.0) - true).norm().item()
            for x in (mine, true.to(mine.dtype), theirs)
        )
        allowed = max(others)
        if not error <= FACTOR * _scatter(true) * allowed:  # a NaN counts as wrong
            wrong.append(f"{name}: error {error:.3e}, one device {allowed:.3e}")
    assert not wrong, "; ".join(wrong)
