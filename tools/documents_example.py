"""Train on packed documents with the sequence sharded over ranks, and check it against one device.

    torchrun --nproc-per-node 2 tools/documents_example.py

A batch is one sequence of several documents, one after the other. Tokens attend within their own
document (``varlen_attn``), positions start again at each document, and the last token of a document
has no label. Blocks of the sequence are given to ranks so that all have the same work and few keys
move. All of that is in ``batch_of_rank``; the model is written for one device. On GPUs it computes
in bfloat16, because ``varlen_attn`` takes nothing wider there; on CPU in float32.
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.nn.attention.varlen import varlen_attn

import cp_dispatch

VOCABULARY, WIDTH, HEADS, LAYERS, STEPS = 256, 128, 4, 2, 5
LENGTH = 1536
BLOCK = 64  # the sequence is divided into blocks of so many tokens: LENGTH = ranks * n * BLOCK


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x, rotation, attend):
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value)
        )
        return self.out(attend(rotate(query, rotation), rotate(key, rotation), value).flatten(1))


class Model(nn.Module):
    """A small Llama-like model of packed tokens ``(T,)``."""

    def __init__(self):
        super().__init__()
        half = WIDTH // HEADS // 2
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(half) / half))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS))
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, positions, attend):
        angles = positions.unsqueeze(-1) * self.frequencies
        x = self.embedding(tokens)
        rotation = [f(angles).unsqueeze(1).to(x.dtype) for f in (torch.cos, torch.sin)]
        for i in range(LAYERS):
            x = x + self.attentions[i](self.norms[2 * i](x), rotation, attend)
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.logits(x).float()


def rotate(x, rotation):
    """Rotary position embedding of ``(T, H, D)``."""
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def within_documents(lengths: list[int], device):
    """Causal attention within documents, by ``varlen_attn``."""
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def attend(query, key, value):
        return varlen_attn(query, key, value, edges, edges, longest, longest, window_size=(-1, 0))

    return attend


def within_documents_by_mask(lengths: list[int], device):
    """The same on one device with a mask of all pairs, to compare with."""
    documents = torch.repeat_interleave(torch.tensor(lengths)).to(device)
    mask = (documents[:, None] == documents[None]).tril()

    def attend(*tensors):
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return out.squeeze(0).transpose(0, 1)

    return attend


def packed(step: int) -> tuple[torch.Tensor, list[int]]:
    """Tokens ``(T,)`` of documents of any lengths, and these lengths: the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    cuts = torch.randperm(LENGTH - 1, generator=generator)[:6].sort().values + 1
    edges = [0, *cuts.tolist(), LENGTH]
    lengths = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    starts = [torch.randint(VOCABULARY, (), generator=generator) for _ in lengths]
    documents = [
        (s + 3 * torch.arange(n)) % VOCABULARY for s, n in zip(starts, lengths, strict=True)
    ]
    return torch.cat(documents), lengths


def batch_of_rank(mesh: DeviceMesh, tokens: torch.Tensor, lengths: list[int], device):
    """This rank's tokens, positions and labels, the order that they are in, and the number of all
    labels."""
    balancer = cp_dispatch.BlockBalanced.from_documents(lengths, mesh.size(), BLOCK, near=True)
    labels = cp_dispatch.next_token_labels(tokens, balancer, lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    whole = [x.to(device) for x in (tokens, positions, labels)]
    shards = cp_dispatch.shard(mesh, whole, 0, balancer)
    shards = [DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for x in shards]
    return *shards, balancer, (labels != -100).sum()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype, tolerance = (torch.bfloat16, 2e-2) if device == "cuda" else (torch.float32, 1e-4)

    torch.manual_seed(0)  # the same parameters on every rank
    alone = Model().to(device, dtype)
    model = Model().to(device, dtype)
    model.load_state_dict(alone.state_dict())
    model = distribute_module(model, mesh)  # replicated
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]

    for step in range(STEPS):
        tokens, lengths = packed(step)
        local, positions, labels, balancer, count = batch_of_rank(mesh, tokens, lengths, device)
        with cp_dispatch.enabled(layout=balancer):
            logits = model(local, positions, within_documents(lengths, device))
            # The sum divided by the number of all labels: ranks have different numbers of them.
            loss = F.cross_entropy(logits, labels, reduction="sum") / count.item()
            loss.backward()

        labels = cp_dispatch.next_token_labels(tokens, doc_lengths=lengths).to(device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        logits = alone(tokens.to(device), positions, within_documents_by_mask(lengths, device))
        want = F.cross_entropy(logits, labels)
        want.backward()

        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        got, want = loss.full_tensor().item(), want.item()
        if dist.get_rank() == 0:
            print(
                f"step {step}: {len(lengths)} documents, loss {got:.5f}, on one device {want:.5f}, "
                f"imbalance {balancer.imbalance():.3f} (natural order "
                f"{balancer.natural_imbalance():.3f})",
                flush=True,
            )
        if abs(got - want) > tolerance:
            raise SystemExit(f"the losses differ by {abs(got - want):.1e}")
    if dist.get_rank() == 0:
        print(f"equal to one device on {mesh.size()} x {device}")
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
