"""Train the demo model and record the loss of every step.

One process trains it as it is. Under torchrun with several processes the same model trains
with its sequence sharded over them: parameters become replicated DTensors, inputs become
DTensors sharded along the sequence, and the model's code stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import batches, load_corpus
from model import ModelConfig, Transformer, cross_entropy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from tqdm import tqdm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the losses")
    parser.add_argument("--weights", type=Path, help="file for the trained weights")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    return parser.parse_args()


def init_mesh(device: str) -> DeviceMesh | None:
    """A 1-D mesh over all processes, or None when there is only this one."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world_size == 1:
        return None
    return init_device_mesh(device, (world_size,), mesh_dim_names=("cp",))


def shard_sequence(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A (B, S) tensor as a DTensor sharded along S; every rank holds the same full tensor."""
    if mesh is None:
        return tensor
    return distribute_tensor(tensor, mesh, [Shard(1)], src_data_rank=None)


def reduce_gradients(model: nn.Module) -> None:
    """Sum the ranks' contributions; the optimizer would otherwise do so in each of its ops."""
    for p in model.parameters():
        if isinstance(p.grad, DTensor):
            p.grad = p.grad.redistribute(placements=[Replicate()])


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rank_spread(model: nn.Module, mesh: DeviceMesh) -> float:
    """The largest difference of any parameter between any two ranks."""
    flat = torch.cat([p.detach().to_local().flatten() for p in model.parameters()])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.get_group())
    dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.get_group())
    return (high - low).max().item()


def main() -> None:
    args = parse_args()
    mesh = init_mesh(args.device)
    rank, world_size = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())

    torch.manual_seed(args.seed)
    model = Transformer(ModelConfig()).to(args.device)
    if mesh is not None:
        import cp_dispatch

        cp_dispatch.enable()
        distribute_module(model, mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    warmup = 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / max(args.steps, 1))
        ),
    )
    # Parameters stay in float32: in bfloat16 an AdamW update of this size would round to nothing.
    dtype = DTYPES[args.dtype]
    precision = (
        contextlib.nullcontext()
        if dtype is torch.float32
        else torch.autocast(args.device, dtype=dtype)
    )

    data = batches(load_corpus(), args.seq_len, args.batch_size, args.seed)
    positions = torch.arange(args.seq_len, device=args.device).repeat(args.batch_size, 1)
    positions = shard_sequence(positions, mesh)

    losses: list[float] = []
    start = time.perf_counter()
    name = f"{world_size} x {args.device}, {args.dtype}"
    interval = 0.5 if sys.stderr.isatty() else 10.0  # a log file needs no animation
    progress = tqdm(range(args.steps), desc=name, disable=rank != 0, mininterval=interval)
    for _ in progress:
        tokens, targets = (shard_sequence(t.to(args.device), mesh) for t in next(data))
        with precision:
            loss = cross_entropy(model(tokens, positions), targets)
        loss.backward()
        reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(full(loss).item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    seconds = time.perf_counter() - start

    spread = 0.0 if mesh is None else rank_spread(model, mesh)
    weights = {key: full(value).cpu() for key, value in model.state_dict().items()}
    if rank == 0:
        record = {
            "name": name,
            "world_size": world_size,
            "seq_len": args.seq_len,
            "seconds": seconds,
            "parameters": sum(w.numel() for w in weights.values()),
            "rank_spread": spread,
            "losses": losses,
        }
        args.out.write_text(json.dumps(record))
        if args.weights:
            torch.save(weights, args.weights)
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
