"""The model and the data of ``train_bench.py``: a Llama with tied embeddings, sharded by FSDP2.

Its blocks take and return this rank's rows. A block is compiled as one graph or as the two parts
before and after attention, whichever the way of context parallelism supports.
"""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.nn.functional as F
from demo.model import FeedForward, ModelConfig, rotate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

#: What is compiled, in the table's words.
WHOLE, PARTS, NOTHING = "whole blocks, loss", "blocks without attention, loss", "nothing"


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.head_dim = cfg.dim // cfg.n_heads
        self.attn_norm, self.ffn_norm = (nn.RMSNorm(cfg.dim, eps=1e-5) for _ in range(2))
        self.wq, self.wo = (nn.Linear(cfg.dim, cfg.dim, bias=False) for _ in range(2))
        key_dim = cfg.n_kv_heads * self.head_dim
        self.wk, self.wv = (nn.Linear(cfg.dim, key_dim, bias=False) for _ in range(2))
        self.ffn = FeedForward(cfg)
        self.run = self.whole

    def before(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value ``(B, H, L, D)``."""
        x = self.attn_norm(x)
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        cosine, sine = turns.unbind(-1)
        return rotate(query, cosine, sine), rotate(key, cosine, sine), value

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))

    def whole(self, x: Tensor, turns: Tensor) -> Tensor:
        query, key, value = self.before(x, turns)
        # Looked up in F, where torch's context parallel replaces it.
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
        )
        return self.after(x, attended)

    def recomputed(self, x: Tensor, turns: Tensor) -> Tensor:
        return checkpoint(self.whole, x, turns, use_reentrant=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        return self.run(x, turns)

    def prepare(self, compiled: str, backend: str, checkpointed: bool) -> None:
        """Compile and checkpoint the block. A block compiled as a whole has its checkpoint inside,
        as in torchtitan; compiled parts are inside a checkpoint."""

        def graph(function):
            return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

        if compiled == PARTS:
            self.before, self.after = graph(self.before), graph(self.after)
        self.run = self.recomputed if checkpointed else self.whole
        if compiled == WHOLE:
            self.run = graph(self.run)


def summed_loss(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight).float(), labels, reduction="sum")


class Llama(nn.Module):
    """``turns`` is a buffer of all positions, for a block of context_parallel to cut."""

    turns: Tensor

    def __init__(self, cfg: ModelConfig, length: int, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.embed = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        half = cfg.dim // cfg.n_heads // 2
        rates = cfg.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
        turns = torch.stack([angles.cos(), angles.sin()], -1).float()
        self.register_buffer("turns", turns, persistent=False)
        self.summed_loss = summed_loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of these rows. Logits are computed, and recomputed, one chunk at a time:
        those of all rows would take more memory than the rest of the model."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        rows = self.norm(x).flatten(0, 1).split(self.chunk)
        total = x.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(rows, labels.flatten().split(self.chunk), strict=True):
            total = total + checkpoint(self.chunk_loss, part, wanted, use_reentrant=False)
        return total / labels.numel()

    def chunk_loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        # The weight is not an argument of the checkpoint, which would return a tensor that is no
        # parameter, and the graph would be recompiled for it.
        return self.summed_loss(rows, self.embed.weight, labels)


def config(args: Namespace) -> ModelConfig:
    return ModelConfig(
        vocab_size=args.vocab,
        dim=args.dim,
        n_layers=args.layers,
        n_heads=args.heads[0],
        n_kv_heads=args.heads[1],
        ffn_dim=args.ffn,
        rope_theta=500_000.0,
    )


def build(args: Namespace, mesh: DeviceMesh, compiled: str) -> Llama:
    """The model of ``args.seed``, the same for any number of ranks, sharded over the mesh."""
    torch.manual_seed(args.seed)
    with torch.device("cpu" if mesh.device_type == "cpu" else "cuda"):
        model = Llama(config(args), args.tokens, args.chunk)
    # Inputs are not cast, because the table of positions needs its 32 bits.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, args.dtype),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        block.prepare(compiled, args.compiler, args.checkpoint)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if compiled != NOTHING:
        model.summed_loss = torch.compile(
            summed_loss, fullgraph=True, dynamic=False, backend=args.compiler
        )
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batches(args: Namespace, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels ``(1, S)`` of every step. Some tokens are much more frequent than others,
    which is learned at once, and the second half repeats the first."""
    result = []
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(args.seed + step)
        half = torch.rand(1, args.tokens // 2 + 1, generator=generator).pow(4)
        data = (half.repeat(1, 2)[:, : args.tokens + 1] * args.vocab).long().to(device)
        result.append((data[:, :-1].clone(), data[:, 1:].clone()))
    return result


def attention_gradients(model: Llama) -> list[Tensor]:
    """This rank's shards of the gradients of query and key projections, on the host. They show much
    sooner than losses whether attention saw the right keys."""
    weights = [p for block in model.blocks for p in (block.wq.weight, block.wk.weight)]
    return [weight.grad.to_local().cpu() for weight in weights]


def model_flops(args: Namespace, parameters: int) -> float:
    """The FLOPs of a step, without recomputation: 6 for each parameter and token, plus causal
    attention forward and 2.5 times that backward."""
    attention = 3.5 * 4 * args.dim * args.tokens**2 / 2 * args.layers
    return 6 * parameters * args.tokens + attention
