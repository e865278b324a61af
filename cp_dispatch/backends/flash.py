"""FlashAttention-2 as torch ships it, on CUDA."""

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cp_dispatch.backends.base import CUDA_GRID, Backend
from cp_dispatch.backends.no_coins import no_coins
from cp_dispatch.native.merge import is_token_major

aten = torch.ops.aten


class Flash(Backend):
    name = "flash"
    sdp_backend = SDPBackend.FLASH_ATTENTION
    devices = ("cuda",)
    largest_grid = CUDA_GRID
    largest_workspace = 2**29
    head_dim_multiple = 8
    takes_prefixes = True

    def _forward(self, query, key, value, bias, causal, scale):
        out = aten._scaled_dot_product_flash_attention.default(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return out[0], out[1]

    def _backward(self, grad_output, query, key, value, output, logsumexp, bias, causal, scale):
        # The kernel takes the logsumexp for contiguous.
        return aten._scaled_dot_product_flash_attention_backward.default(
            grad_output, query, key, value, output, logsumexp.contiguous(),
            None, None, query.size(2), key.size(2), 0.0, causal,
            *no_coins(query.device, torch.uint64), scale=scale,
        )  # fmt: skip

    # With as many queries as keys or not, a causal mask of this kernel ends at the bottom right.

    def prefix_lengths(self, batch, prefixes, device):
        return _lengths(batch, prefixes, device) if len(prefixes) > 1 else None

    def prefix_forward(self, query, key, value, prefixes, scale, lengths=None):
        if len(prefixes) == 1:
            return self.forward(query, key, value, None, True, scale)
        batch, heads, length, _ = query.shape
        if batch * len(prefixes) > CUDA_GRID or heads > CUDA_GRID:
            results = [
                self.forward(q, k, v, None, True, scale)
                for q, k, v in _runs(prefixes, (query,), (key, value))
            ]
            return tuple(torch.cat(x, 2) for x in zip(*results, strict=True))
        lengths = lengths or _lengths(batch, prefixes, query.device)
        out, lse, *_ = aten._flash_attention_forward.default(
            *map(_packed, (query, key, value)), *lengths, 0.0, True, False, scale=scale,
        )  # fmt: skip
        out = out.view(batch, length, heads, -1).transpose(1, 2)
        return out, lse.view(heads, batch, length).transpose(0, 1)

    def prefix_backward(
        self, grad_output, query, key, value, output, logsumexp, prefixes, scale, lengths=None
    ):  # fmt: skip
        tensors = grad_output, query, key, value, output, logsumexp
        if len(prefixes) == 1:
            return self.backward(*tensors, None, True, scale)[:3]
        batch, heads, length, _ = query.shape
        if batch * len(prefixes) > CUDA_GRID or heads > CUDA_GRID:
            of_rows = grad_output, query, output, logsumexp
            results = [
                self.backward(go, q, k, v, out, lse, None, True, scale)[:3]
                for go, q, out, lse, k, v in _runs(prefixes, of_rows, (key, value))
            ]
            return tuple(torch.cat(x, 2) for x in zip(*results, strict=True))
        *packed, lse = *map(_packed, tensors[:5]), logsumexp.transpose(0, 1).reshape(heads, -1)
        lengths = lengths or _lengths(batch, prefixes, query.device)
        grads = aten._flash_attention_backward.default(
            *packed, lse, *lengths, 0.0, True, *no_coins(query.device, torch.uint64), scale=scale,
        )  # fmt: skip
        return tuple(
            grad.view(batch, like.size(2), *grad.shape[1:]).transpose(1, 2)
            for grad, like in zip(grads, (query, key, value), strict=True)
        )


def _packed(tensor: Tensor) -> Tensor:
    """``(B * S, H, D)``, as the kernel takes sequences of several lengths."""
    batch, heads, length, dim = tensor.shape
    if is_token_major(tensor):
        # One call: a transposition and a view cost the host more than twice as much.
        return tensor.as_strided((batch * length, heads, dim), (heads * dim, dim, 1))
    return tensor.transpose(1, 2).flatten(0, 1)


def _lengths(batch: int, prefixes: Sequence[tuple[int, int]], device: torch.device):
    """Where sequences of queries and keys start, int32, and the longest of each.

    Cached only on the host, for the reason given in layouts/select.py.
    """
    longest = tuple(map(max, zip(*prefixes, strict=True)))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph must not remember host memory either.
        return *(_counted(batch, x, device) for x in zip(*prefixes, strict=True)), *longest
    starts = _starts(batch, tuple(prefixes), device.type == "cuda")
    return *starts.to(device, non_blocking=True).unbind(), *longest


@functools.lru_cache(maxsize=256)
def _starts(batch: int, prefixes: tuple[tuple[int, int], ...], pinned: bool) -> Tensor:
    lengths = zip(*prefixes, strict=True)
    starts = torch.tensor([[0, *accumulate(x * batch)] for x in lengths], dtype=torch.int32)
    return starts.pin_memory() if pinned else starts


def _counted(batch: int, lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """A row of :func:`_starts` by kernels alone."""
    total, ends = sum(lengths), accumulate(lengths)
    how = {"dtype": torch.int32, "device": device}
    rows = [torch.arange(end, end + batch * total, total, **how) for end in ends]
    return torch.cat([torch.zeros(1, **how), torch.stack(rows, 1).flatten()])


def _runs(prefixes, of_rows: Sequence[Tensor], of_keys: Sequence[Tensor]):
    """Each run's part of the tensors."""
    row = start = 0
    for rows, keys in prefixes:
        yield (
            *(x.narrow(2, row, rows) for x in of_rows),
            *(x.narrow(2, start, keys) for x in of_keys),
        )
        row, start = row + rows, start + keys
