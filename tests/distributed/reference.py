"""The exact results of attention, and the error that is allowed.

A result is right if its error against the exact answer is at most ``FACTOR`` times the error that
the same kernel makes on one device with the whole sequence. Nothing here is tuned by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

FACTOR = 1.3
CUDA_GRID = 65535
RESULTS = ("output", "dq", "dk", "dv", "dmask")

ZEROS = dict.fromkeys(RESULTS, 0.0)

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cpu_flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Mask:
    """An ``attn_mask``.

    Attributes:
        shape: a letter for each whole dim of the scores, ``1`` for each that is broadcast; if there
            are fewer characters than dims, the first dims are left out.
        dtype: torch.bool, or the dtype of a bias; None for a bias in the query's dtype.
        blind: hide the first half of the rows, the last row and the first half of the keys, so
            that whole ranks and whole hops see nothing.
        needs_grad: whether the bias needs a gradient.
        expanded: stride 0 in all dims before the last two.
    """

    shape: str = "qk"
    dtype: torch.dtype | None = torch.bool
    blind: bool = False
    needs_grad: bool = False
    expanded: bool = False

    def tensor(self, scores: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + 1)
        shape = [
            1 if c == "1" else n
            for c, n in zip(self.shape, scores[len(scores) - len(self.shape) :], strict=True)
        ]
        whole = torch.Size(shape)
        if self.expanded:
            shape = [1] * (len(shape) - 2) + shape[-2:]
        seen = torch.rand(shape, generator=generator) > 0.3
        if self.blind:
            if shape[-2] > 1:
                seen[..., : shape[-2] // 2, :] = False
                seen[..., -1, :] = False
            if shape[-1] > 1:
                seen[..., : shape[-1] // 2] = False
        mask = seen
        if self.dtype is not torch.bool:
            bias = torch.randn(shape, generator=generator)
            if self.blind:
                bias = bias.masked_fill(~seen, -torch.inf)
            mask = bias.to(self.dtype or dtype)
        return mask.expand(whole) if self.expanded else mask


@dataclass(frozen=True)
class Problem:
    """One attention call on a whole sequence."""

    batch: int = 2
    heads: int = 4
    key_heads: int | None = None
    length: int = 256
    key_length: int | None = None
    dim: int = 32
    value_dim: int | None = None
    causal: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    #: Leading dims of query, key and value instead of ``(batch, heads)``.
    lead: tuple[int, ...] | None = None
    #: A factor of the query.
    amplitude: float = 1.0
    mask: Mask | None = None

    @property
    def grouped(self) -> bool:
        return self.key_heads not in (None, self.heads)

    def tensors(self, device: str | torch.device = "cpu") -> list[torch.Tensor]:
        """query, key, value and the output's gradient, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        key_length = self.key_length or self.length
        value_dim = self.value_dim or self.dim
        lead = key_lead = self.lead
        if lead is None:
            lead = self.batch, self.heads
            key_lead = self.batch, self.key_heads or self.heads
        shapes = (
            (*lead, self.length, self.dim),
            (*key_lead, key_length, self.dim),
            (*key_lead, key_length, value_dim),
            (*lead, self.length, value_dim),
        )
        query, *others = (torch.randn(s, generator=generator) for s in shapes)
        return [x.to(device, self.dtype) for x in (query * self.amplitude, *others)]

    def attn_mask(self, device: str | torch.device = "cpu") -> torch.Tensor | None:
        """The mask, with ``requires_grad`` if its gradient is wanted; the same on every rank."""
        if self.mask is None:
            return None
        lead = (self.batch, self.heads) if self.lead is None else self.lead
        scores = (*lead, self.length, self.key_length or self.length)
        mask = self.mask.tensor(scores, self.dtype, self.seed).to(device)
        return mask.requires_grad_(self.mask.needs_grad)

    @property
    def sequence_dim(self) -> int:
        return 2 if self.lead is None else len(self.lead)

    def attend(self, query, key, value, attn_mask=None):
        """The line of code that a user writes."""
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask,
            is_causal=self.causal, scale=self.scale, enable_gqa=self.grouped,
        )  # fmt: skip


def with_gradients(attend, query, key, value, grad_output, mask=None) -> list[torch.Tensor]:
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    masks = [] if mask is None else [mask.detach().requires_grad_(mask.requires_grad)]
    output = attend(*inputs, *masks)
    wanted = inputs + [x for x in masks if x.requires_grad]
    # Torch does not use the bias if there is nothing to attend.
    grads = torch.autograd.grad(output, wanted, grad_output, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)]
    return [output.detach(), *grads]


def exact(problem: Problem, tensors) -> list[torch.Tensor]:
    """Output, dQ, dK, dV in float64; for float64 inputs, computed in extended precision."""
    mask = problem.attn_mask(tensors[0].device)
    if problem.dtype is torch.float64:
        return _exact_long_double(problem, tensors, mask)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.detach().double().requires_grad_(mask.requires_grad)
    with sdpa_kernel(SDPBackend.MATH):
        return with_gradients(problem.attend, *(x.double() for x in tensors), mask)


def one_device(problem: Problem, tensors, kernel: str) -> list[torch.Tensor]:
    """The results of one device with this kernel. Raises RuntimeError if it does not take the call.

    A kernel that does not support grouped heads gets repeated ones, and one that supports only four
    dims gets four, which is what a user would do.
    """
    query, key, value, grad_output = tensors
    scores = (*query.shape[:-1], key.size(-2))

    def attend(query, key, value, attn_mask=None):
        shape = (*query.shape[:-1], value.size(-1))
        if kernel == "efficient" and problem.grouped:
            groups = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if problem.lead is not None:
            query, key, value = (x.reshape(-1, 1, *x.shape[-2:]) for x in (query, key, value))
            if attn_mask is not None:
                attn_mask = attn_mask.expand(scores).reshape(-1, 1, *scores[-2:])
        elif attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        if attn_mask is not None and attn_mask.is_cuda:
            # Torch 2.11's efficient kernel reads a mask that is broadcast along the keys from a
            # misaligned address. That destroys the process's CUDA context.
            attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2)).contiguous()
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask,
            is_causal=problem.causal, scale=problem.scale,
            enable_gqa=problem.grouped and query.size(1) != key.size(1),
        )  # fmt: skip
        if output is None:  # torch's cuDNN, for an empty batch
            raise RuntimeError("no output")
        return output.reshape(shape)

    with sdpa_kernel(KERNELS[kernel]):
        mask = problem.attn_mask(query.device)
        dims = [dim for dim in (0, 1) if query.size(dim) > CUDA_GRID]
        if dims and mask is None and not problem.grouped and query.is_cuda:
            # More than a kernel supports; a user would split them.
            parts = zip(*(x.tensor_split(20, dims[0]) for x in tensors), strict=True)
            results = [with_gradients(attend, *part) for part in parts]
            return [torch.cat(x, dims[0]) for x in zip(*results, strict=True)]
        return with_gradients(attend, query, key, value, grad_output, mask)


def yardstick(problem: Problem, tensors, kernel: str) -> list[torch.Tensor]:
    """As :func:`one_device`, but with the next best kernel if one device refuses the call with this
    one (tiles of a ring are square, and padded), or returns NaN."""
    same_device = ("efficient", "math") if tensors[0].is_cuda else ("cpu_flash", "math")
    for name in (kernel, *same_device):
        try:
            results = one_device(problem, tensors, name)
        except RuntimeError:
            continue
        if not any(x.isnan().any() for x in results):
            return results
    raise AssertionError(f"no kernel of one device takes {problem}")


def report(got, want, *singles, floors=ZEROS, few=False) -> tuple[bool, str]:
    """Whether every result is as close to ``want`` as one device's, and the numbers in one line.

    A ``got`` of None was not requested. No result can be better than the exact answer rounded to
    the dtype, so that error counts instead of one device's if one device happens to be luckier. Of
    several ``singles`` (one device with several kernels) the worst counts. If the exact result is
    zero except for the rounding of float64, ``floors`` is the error that the dtype may have. The
    same holds with ``few``, where one device's error depends on the luck of a few roundings.
    """
    right, words, ratios = True, [], []
    names = RESULTS[: len(want)]
    for name, mine, true, *theirs in zip(names, got, want, *singles, strict=True):
        if mine is None:
            continue
        assert mine.shape == true.shape, f"{name}: shape {mine.shape}, want {true.shape}"
        for x in theirs:
            assert mine.dtype is x.dtype, f"{name}: {mine.dtype}, one device {x.dtype}"
        size = true.norm().item()
        error, *others = (
            (x.to(true.device, torch.float64) - true).norm().item()
            for x in (mine, true.to(mine.dtype), *theirs)
        )
        allowed = max(others)
        if few or size <= 1e-7 * floors[name]:
            allowed = max(allowed, floors[name])
        # Written so that a NaN counts as wrong.
        ok = error <= FACTOR * _scatter(true) * allowed
        right &= ok
        ratio = error / allowed if allowed else float(error > 0)
        ratios.append(ratio)
        words.append(f"{'' if ok else 'WRONG '}{name} {error / (size or 1):.2e} ({ratio:.2f}x)")
    pooled = (sum(ratio**2 for ratio in ratios) / max(len(ratios), 1)) ** 0.5
    return right and not pooled > FACTOR, ", ".join(words) + f", all {pooled:.2f}x"


def _scatter(result: torch.Tensor) -> float:
    """How far the error of a few numbers may be from its expectation, at three sigmas.

    Errors that share a probability or a row are correlated, about 16 at a time; the norm of n / 16
    independent ones scatters by sqrt(8 / n). The results of a call together must meet the factor
    without this allowance.
    """
    return 1 + 3 * (8 / max(result.numel(), 1)) ** 0.5


def check(got, want, *singles, floors=ZEROS, few=False) -> None:
    right, words = report(got, want, *singles, floors=floors, few=few)
    assert right, f"error and its ratio to one device's, at most {FACTOR} allowed: {words}"


def rounding(problem: Problem, tensors) -> tuple[dict[str, float], bool]:
    """``(floors, few)`` for :func:`report`: the effect of rounding each factor once to the dtype.

    dQ and dK are sums of products of scores' gradients with keys or queries, and a score's gradient
    is a difference of numbers of the size of ``|grad_output| |value|``. Scores far above 1 are
    rounded too, and the relative error of a weight is the absolute error of its score.
    """
    query, key, value, grad = (x.double().norm().item() for x in tensors)
    scale = problem.dim**-0.5 if problem.scale is None else abs(problem.scale)
    unit = torch.finfo(problem.dtype).eps
    few = min(problem.length, problem.key_length or problem.length) <= 8
    if problem.amplitude >= 1e3:
        largest = (scale * tensors[0].double() @ tensors[1].double().mT).abs().max().item()
        few, unit = True, unit + torch.finfo(torch.float32).eps * largest
    scores = unit * grad * value
    sizes = (unit * value, scores * scale * key, scores * scale * query, unit * grad, scores)
    return dict(zip(RESULTS, sizes, strict=True)), few


def _exact_long_double(problem: Problem, tensors, mask) -> list[torch.Tensor]:
    """The textbook formulas in numpy's long double, rounded to float64 at the end.

    This is enough to judge float64, because :func:`report` allows an error of one rounding anyway.
    """
    import numpy as np

    groups = tensors[0].size(1) // tensors[1].size(1) if problem.grouped else 1
    query, key, value, grad_output = (
        x.detach().cpu().numpy().astype(np.longdouble) for x in tensors
    )
    if groups > 1:
        key, value = (x.repeat(groups, axis=1) for x in (key, value))
    scale = 1 / np.sqrt(np.longdouble(problem.dim)) if problem.scale is None else problem.scale

    def product(a, b):  # numpy has no BLAS for long double, and einsum is faster than matmul
        return np.einsum("...ij,...jk->...ik", a, b)

    def transposed(x):
        return x.swapaxes(-1, -2)

    scores = product(query, transposed(key)) * scale
    if problem.causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if mask is not None:
        given = mask.detach().cpu().numpy()
        scores = np.where(given, scores, -np.inf) if given.dtype == bool else scores + given
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(largest), 0, largest))
    weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.longdouble).tiny)
    output = product(weights, value)
    grad_weights = product(grad_output, transposed(value))
    grad_bias = weights * (grad_weights - (grad_output * output).sum(-1, keepdims=True))
    grads = [
        product(grad_bias, key) * scale,
        product(transposed(grad_bias), query) * scale,
        product(transposed(weights), grad_output),
    ]
    if groups > 1:
        for i in (1, 2):
            batch, heads, length, dim = grads[i].shape
            grads[i] = grads[i].reshape(batch, heads // groups, groups, length, dim).sum(2)
    device = tensors[0].device
    results = [torch.from_numpy(x.astype(np.float64)).to(device) for x in (output, *grads)]
    if mask is not None and mask.requires_grad:
        grad_mask = torch.from_numpy(grad_bias.astype(np.float64)).to(device)
        results.append(grad_mask.sum_to_size(mask.shape))
    return results
