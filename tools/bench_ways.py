"""Problems of ``tools/bench.py``, and the implementations that it compares."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.nn.functional as F
from bench_problems import document_ids, document_lengths
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import SDPBackend

import cp_dispatch
from cp_dispatch.backends import BACKENDS
from cp_dispatch.layouts import laid_out

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
KERNELS_ALONE = "block kernels alone"


class Problem:
    """One shape: local shards and the whole sequence's tensors, created on demand."""

    def __init__(self, args, tokens: int, heads, mesh):
        self.args, self.tokens, self.heads, self.mesh = args, tokens, heads, mesh
        self.world_size = mesh.size()
        self.device = torch.device(mesh.device_type, torch.cuda.current_device()
                                   if mesh.device_type == "cuda" else 0)  # fmt: skip
        self.dtype = getattr(torch, args.dtype)

    @functools.cached_property
    def documents(self) -> list[int]:
        """The lengths of the documents; empty without a mask of documents."""
        if not self.args.documents:
            return []
        return document_lengths(self.tokens * self.world_size, self.args.documents)

    @functools.cached_property
    def mask(self) -> torch.Tensor | None:
        """Which keys a row sees, causal within its document, ``(S, S)``."""
        if not self.documents:
            return None
        ids = document_ids(self.documents, self.device)
        return (ids[:, None] == ids).tril_()

    def tensors(self, length: int) -> list[torch.Tensor]:
        """query, key, value, grad_output ``(B, H, length, D)``, token-major in memory."""
        heads, key_heads = self.heads
        return [
            torch.randn(self.args.batch, length, h, self.args.head_dim,
                        device=self.device, dtype=self.dtype).transpose(1, 2)
            for h in (heads, key_heads, key_heads, heads)
        ]  # fmt: skip

    def call(self, query, key, value):
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, self.mask, is_causal=self.args.causal, enable_gqa=gqa
        )

    def call_stock(self, query, key, value):
        """As :meth:`call`, with the mask as a DTensor, which stock DTensor needs."""
        if self.device.type == "cpu":
            raise RuntimeError("on CPU torch 2.13 tries placements of this call for many minutes")
        mask = DTensor.from_local(self.mask, self.mesh, [Replicate()], run_check=False)
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=gqa)

    def flops(self, backward: bool) -> float:
        pairs = (self.tokens * self.world_size) ** 2 * (0.5 if self.args.causal else 1)
        if self.documents:
            pairs = sum(n * n / 2 for n in self.documents)
        forward = 4 * self.args.batch * self.heads[0] * pairs * self.args.head_dim
        return forward * (3.5 if backward else 1)


# Each implementation: problem -> (inputs, grad_output, call). Entered as a context.
@contextlib.contextmanager
def one_device(problem: Problem):
    *inputs, grad = problem.tensors(problem.tokens * problem.world_size)
    yield inputs, grad, problem.call


def _sharded(problem: Problem):
    *inputs, grad = (
        DTensor.from_local(x, problem.mesh, [Shard(2)], run_check=False)
        for x in problem.tensors(problem.tokens)
    )
    return inputs, grad, problem.call


@contextlib.contextmanager
def stock(problem: Problem):
    *parts, call = _sharded(problem)
    yield *parts, problem.call_stock if problem.documents else call


@contextlib.contextmanager
def ours(problem: Problem, schedule: str, balancer=None):
    layout = balancer and balancer(problem.tokens * problem.world_size, problem.world_size)
    with cp_dispatch.enabled(schedule=schedule, layout=layout):
        yield _sharded(problem)


@contextlib.contextmanager
def torch_cp(problem: Problem, rotate_method: str):
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

    # Its balancing of causal work assumes head-tail data; without a mask it changes nothing.
    torch_cp._cp_options.enable_load_balance = problem.args.causal
    torch_cp.set_rotate_method(rotate_method)
    torch_cp._enable_context_parallel_dispatcher()
    try:
        with stock(problem) as parts:
            yield parts
    finally:
        torch_cp._disable_context_parallel_dispatcher()


IMPLEMENTATIONS = {
    "one device": one_device,
    "cp_dispatch ring": lambda p: ours(p, "natural_ring"),
    "cp_dispatch ring, mirrored": lambda p: ours(p, "mirrored_ring"),
    "cp_dispatch ring, head-tail": lambda p: ours(p, "ring", cp_dispatch.HeadTail),
    "cp_dispatch gather": lambda p: ours(p, "gather"),
    "cp_dispatch gather, head-tail": lambda p: ours(p, "gather", cp_dispatch.HeadTail),
    "cp_dispatch one call": lambda p: ours(p, "one_call"),
    "cp_dispatch one call, head-tail": lambda p: ours(p, "one_call", cp_dispatch.HeadTail),
    "cp_dispatch ulysses": lambda p: ours(p, "ulysses"),
    "cp_dispatch ulysses, head-tail": lambda p: ours(p, "ulysses", cp_dispatch.HeadTail),
    "cp_dispatch hybrid": lambda p: ours(p, "hybrid"),
    "cp_dispatch hybrid, head-tail": lambda p: ours(p, "hybrid", cp_dispatch.HeadTail),
    "cp_dispatch auto": lambda p: ours(p, "auto"),
    "cp_dispatch auto, head-tail": lambda p: ours(p, "auto", cp_dispatch.HeadTail),
    "torch cp allgather": lambda p: torch_cp(p, "allgather"),
    "torch cp alltoall": lambda p: torch_cp(p, "alltoall"),
    "stock DTensor": stock,
}


# Without a mask these are the same as the ring.
ONLY_CAUSAL = [name for name in IMPLEMENTATIONS if "head-tail" in name or "mirrored" in name]


def steps(problem: Problem, inputs, grad, call):
    """The forward step and the forward-and-backward step as functions."""

    def forward():
        with torch.no_grad():
            return call(*inputs)

    leaves = [x.detach().requires_grad_() for x in inputs]

    def both():
        out = call(*leaves)
        go = grad
        if isinstance(out, DTensor) and out.placements != grad.placements:
            go = grad.redistribute(placements=out.placements)
        return torch.autograd.grad(out, leaves, go)

    return {"fwd": forward, "fwd+bwd": both}


def kernels_alone(problem: Problem, backend: str) -> dict:
    """Steps, as in :func:`steps`, of the block kernels of a balanced ring, without merging or
    communication. Causal work is that of rank 0 in head-tail order; every rank has the same
    amount."""
    kernel, world_size = BACKENDS[backend], problem.world_size
    query, key, value, grad = problem.tensors(problem.tokens)
    scale = problem.args.head_dim**-0.5
    length = problem.tokens * world_size
    layout = cp_dispatch.HeadTail(length, world_size)
    geometry = laid_out(length, length, (world_size,), problem.args.causal, layout)
    tiles = [tile for owner in range(world_size) for tile in geometry.tiles(0, owner)]

    def cut(tile):
        rows = slice(tile.query_start, tile.query_start + tile.query_length)
        columns = slice(tile.key_start, tile.key_start + tile.key_length)
        return rows, columns

    def forward():
        results = []
        for tile in tiles:
            rows, columns = cut(tile)
            block = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            results.append(kernel.forward(*block, None, tile.causal, scale))
        return results

    def both():
        results = forward()
        for tile, (out, lse) in zip(tiles, results, strict=True):
            rows, columns = cut(tile)
            block = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            kernel.backward(grad[:, :, rows], *block, out, lse, None, tile.causal, scale)

    return {"fwd": forward, "fwd+bwd": both}


def planned(problem: Problem, inputs, mode: str) -> dict:
    """The schedule that the plan chooses for a call of ours, and the seconds that this kind of
    GPU's constants predict, if there are constants."""
    gqa = inputs[0].shape[1] != inputs[1].shape[1]
    if mode != "fwd":  # what is faster may depend on whether there is a backward
        inputs = [x.detach().requires_grad_() for x in inputs]
    plan = cp_dispatch.explain(*inputs, problem.mask, is_causal=problem.args.causal, enable_gqa=gqa)
    if plan.handler != "cp_dispatch":  # the call itself says why
        return {}
    found = {"schedule": plan.op_schedule}
    for name, forward, backward in plan.predictions or ():
        if name == plan.op_schedule:
            found["predicted"] = forward if mode == "fwd" else forward + backward
    return found
