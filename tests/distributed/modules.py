"""Cases of ``test_spawned.py``: modules written for one device, on sharded inputs."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_module

import cp_dispatch
from tests.distributed.sharded import distribute
from tests.distributed.spawn import TORCH_2_13, Env

FACTOR = 1.3


class LoraLinear(nn.Module):
    """A frozen projection and a trained low-rank one that is added to it."""

    def __init__(self, dim_in: int, dim_out: int, rank: int = 2):
        super().__init__()
        self.base = nn.Linear(dim_in, dim_out, bias=False)
        self.base.weight.requires_grad_(False)
        self.down = nn.Linear(dim_in, rank, bias=False)
        self.up = nn.Linear(rank, dim_out, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Attention(nn.Module):
    """Grouped heads, causal, as in any Llama; nothing here depends on ranks."""

    def __init__(self, linear, dim: int = 32, heads: int = 4, key_heads: int = 2):
        super().__init__()
        self.head_dim = dim // heads
        self.query = linear(dim, dim)
        self.key = linear(dim, key_heads * self.head_dim)
        self.value = linear(dim, key_heads * self.head_dim)
        self.out = linear(dim, dim)

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class TorchMultihead(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4, bias=False, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class TorchEncoder(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            dim, 4, 64, dropout=0.0, bias=False, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x)


def _train_once(module: nn.Module, x, grad) -> dict[str, torch.Tensor]:
    """Output, and the gradients of the input and of every parameter, of one step.

    The output's gradient is given, because DTensor's own product of a broadcast and a sharded
    tensor, as in ``(output * output).sum()``, has local strides that do not match its metadata.
    """
    x = x.detach().requires_grad_()
    output = module(x)
    output.backward(grad)
    results = {"output": output.detach(), "input": x.grad}
    results |= {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in results.items()}


def trains_as_on_one_device(env: Env, build, batch: int) -> None:
    """Errors against the module in float64 are no larger than those of one process in float32."""
    torch.manual_seed(0)
    module = build()
    x, grad = torch.randn(2, batch, 250, 32)
    want = _train_once(copy.deepcopy(module).double(), x.double(), grad.double())
    single = _train_once(copy.deepcopy(module), x, grad)
    sharded = distribute_module(copy.deepcopy(module), env.mesh())
    with cp_dispatch.enabled():
        got = _train_once(sharded, *(distribute(t, env.mesh(), [Shard(1)]) for t in (x, grad)))
    wrong = {}
    for name, true in want.items():
        mine, theirs, rounding = (
            (t.double() - true).norm().item() for t in (got[name], single[name], true.float())
        )
        if not mine <= FACTOR * max(theirs, rounding):
            wrong[name] = f"error {mine:.2e}, one process {theirs:.2e}, size {true.norm():.1e}"
    assert not wrong, wrong


MODULES = {
    f"{name}, batch {batch}": functools.partial(trains_as_on_one_device, build=build, batch=batch)
    for name, build in {
        # No biases: the gradient of a key's bias is zero except for rounding, so it proves nothing.
        "attention": functools.partial(Attention, functools.partial(nn.Linear, bias=False)),
        "LoRA": functools.partial(Attention, LoraLinear),
        "nn.MultiheadAttention": TorchMultihead,
        "nn.TransformerEncoder": TorchEncoder,
    }.items()
    # DTensor of torch 2.11 does not support a linear layer on a batch of several sharded sequences.
    for batch in ((1, 2) if TORCH_2_13 else (1,))
}
