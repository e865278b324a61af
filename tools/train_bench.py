"""Train a whole Llama on several ranks: this project against torch's own context parallel.

    torchrun --nproc-per-node 4 tools/train_bench.py --tokens 131072

The model has the shape of Llama 3.2 1B, with FSDP2, master weights in float32, compiled blocks,
activation checkpointing and AdamW. Every way starts from the same weights, sees the same data in
torch's default order (head-tail), and runs forward and backward inside its
``context_parallel(...)``. Only what is compiled differs. Torch's attention cannot be compiled
through this API, so it stays eager between the two compiled parts of a block (``torch-whole`` tries
to compile it anyway); ``ours-parts`` is compiled in the same two parts. Torch's ranks exchange keys
by its default, allgather.

A step's time is the median on the slowest rank after ``--warmup`` steps; all steps run back to
back. Memory is the peak after the warmup. The exit status is 1 if losses or the first gradients of
attention differ by more than the dtype's noise (``NOISE``), or if a way of ours fails for another
reason than memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_record import about, failure, progress
from bench_table import train_table
from bench_timing import worst_rank
from bench_ways import KERNELS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torchs_context_parallel
from torch.nn.attention import sdpa_kernel
from train_model import NOTHING, PARTS, WHOLE, attention_gradients, batches, build, model_flops

import cp_dispatch
from cp_dispatch.schedules import mailboxes

OUT_OF_MEMORY = failure(torch.OutOfMemoryError())["error"]
RESULTS = pathlib.Path(__file__).parent / "results"
#: How much losses may differ, relative, and the first step's gradients of query and key projections
#: (the norm of the difference). On CPU in bfloat16, schedules and kernels of this project differ by
#: a tenth of this. A causal mask by the wrong positions makes the gradients differ by more than
#: three times this, but the losses only by about this.
NOISE = {"bfloat16": (2e-3, 5e-2), "float32": (1e-4, 1e-3)}


@contextlib.contextmanager
def torch_block(*args, **kwargs):
    """Torch's block, which up to 2.11 stays enabled after an error inside."""
    stock = F.scaled_dot_product_attention
    try:
        with torchs_context_parallel(*args, **kwargs):
            yield
    finally:
        if F.scaled_dot_product_attention is not stock:
            from torch.distributed.tensor.experimental._context_parallel import _attention

            _attention._disable_context_parallel_dispatcher_impl()


@dataclass(frozen=True)
class Way:
    block: Callable[..., contextlib.AbstractContextManager]
    compiled: str


WAYS = {
    "ours": Way(cp_dispatch.context_parallel, WHOLE),
    "ours-parts": Way(cp_dispatch.context_parallel, PARTS),
    "ours-eager": Way(cp_dispatch.context_parallel, NOTHING),
    "torch": Way(torch_block, PARTS),
    "torch-whole": Way(torch_block, WHOLE),
    "torch-eager": Way(torch_block, NOTHING),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", action="append", choices=WAYS, help="default: ours, torch")
    parser.add_argument("--tokens", type=int, default=131072, help="over all ranks")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("H", "HKV"))
    parser.add_argument("--ffn", type=int, help="default: 4 times --dim")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument(
        "--chunk", type=int, default=2048, help="rows whose logits are in memory at a time"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="how many of --steps are warmup")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=NOISE, default="bfloat16", help="dtype of the computation"
    )
    parser.add_argument("--kernel", choices=KERNELS, help="default: cudnn; on CPU torch's choice")
    parser.add_argument("--compiler", default="inductor", help="a backend of torch.compile")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-checkpoint", dest="checkpoint", action="store_false")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=pathlib.Path, help="default: a dated file in tools/results")
    args = parser.parse_args()
    args.way = args.way or ["ours", "torch"]
    args.ffn = args.ffn or 4 * args.dim
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda":
        args.kernel = args.kernel or "cudnn"
    if args.tokens % (2 * int(os.environ.get("WORLD_SIZE", 1))):
        parser.error("2 x ranks must divide --tokens: torch balances no other lengths")
    if not 0 <= args.warmup < args.steps:
        parser.error("--warmup must leave a step to time")
    return args


class Clock:
    """Times between marks, without a wait on CUDA."""

    def __init__(self, cuda: bool):
        self.cuda, self.marks = cuda, []

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.cuda:
            return [end - start for start, end in pairs]
        self.marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def train(args: argparse.Namespace, way: Way, compiled: str, mesh: DeviceMesh):
    """The measurements of a run, the same on all ranks, and the gradients of the first step."""
    cuda = mesh.device_type == "cuda"
    model = build(args, mesh, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), fused=cuda)
    clock, losses = Clock(cuda), []
    for step, (tokens, labels) in enumerate(batches(args, model.turns.device)):
        if step == args.warmup and cuda:
            torch.cuda.reset_peak_memory_stats()
        clock.mark()
        optimizer.zero_grad()
        with way.block(
            mesh, buffers=[tokens, labels, model.turns], buffer_seq_dims=[1, 1, 0],
            no_restore_buffers={tokens, labels},
        ):  # fmt: skip
            loss = model(tokens, labels)
            loss.backward()  # inside the block, because checkpoints recompute in it
        optimizer.step()
        losses.append(loss.detach())
        if step == 0:
            gradients = attention_gradients(model)
    clock.mark()
    seconds = statistics.median(clock.seconds()[args.warmup :])
    # Torch does not count the rooms that ranks write to.
    rooms = mailboxes.held_bytes() if cuda and way.block is cp_dispatch.context_parallel else 0
    peak = torch.cuda.max_memory_allocated() + rooms if cuda else 0
    seconds, peak = worst_rank([seconds, peak / 2**20], cuda)
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    flops = model_flops(args, sum(p.numel() for p in model.parameters()))
    return {
        "seconds": seconds,
        "tokens_per_second_per_rank": args.tokens / seconds / mesh.size(),
        "peak_mib": peak,
        "model_tflops_per_rank": flops / seconds / mesh.size() / 1e12,
        "losses": (mean / mesh.size()).tolist(),
    }, gradients


def run(args: argparse.Namespace, name: str, mesh: DeviceMesh):
    """The row of a way, and its gradients; nothing else is left afterwards."""
    way = WAYS[name]
    compiled = NOTHING if args.no_compile else way.compiled
    row: dict = {"way": name, "compiled": compiled}
    gradients: list[torch.Tensor] = []
    torch._dynamo.utils.counters.clear()
    try:
        with sdpa_kernel(KERNELS[args.kernel]) if args.kernel else contextlib.nullcontext():
            measured, gradients = train(args, way, compiled, mesh)
        row |= measured
        row["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    except Exception as error:  # torch's raises many kinds for unsupported calls
        row["error"] = failure(error)["error"].replace("|", "/") or type(error).__name__
    torch._dynamo.reset()
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    errors: list = [None] * mesh.size()
    dist.all_gather_object(errors, row.get("error"))
    if any(errors):
        row = {"way": name, "compiled": compiled, "error": next(filter(None, errors))}
    return row, gradients


def compare(row: dict, first: dict, gradients: list, firsts: list, cuda: bool) -> None:
    """Add to the row how much a way differs from the first one that ran."""
    pairs = zip(row["losses"], first["losses"], strict=True)
    # A nan must not count as a small difference.
    apart = [abs(a - b) / abs(b) if a == a and b == b else math.inf for a, b in pairs]
    row["losses_differ"] = max(apart)
    squares = [
        sum((a - b).double().square().sum().item() for a, b in zip(gradients, firsts, strict=True)),
        sum(b.double().square().sum().item() for b in firsts),
    ]
    total = torch.tensor(squares, device="cuda" if cuda else "cpu", dtype=torch.float64)
    dist.all_reduce(total)
    ratio = (total[0] / total[1]).sqrt().item()
    row["gradients_differ"] = ratio if ratio == ratio else math.inf


def failed(row: dict, dtype: str) -> bool:
    if row.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY:
        return row["way"].startswith("ours")
    losses, gradients = NOISE[dtype]
    return (
        not all(map(math.isfinite, row.get("losses", ())))
        or row.get("losses_differ", 0) > losses
        or row.get("gradients_differ", 0) > gradients
    )


def main() -> None:
    args = parse()
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # If only some ranks run out of memory, the others should not wait for long.
    timeout = datetime.timedelta(minutes=3)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(args.device, (size,), mesh_dim_names=("cp",))
    settings = ("tokens", "layers", "dim", "heads", "ffn", "vocab", "steps", "warmup", "lr", "seed",
                "dtype", "kernel", "compiler", "checkpoint")  # fmt: skip
    record = about(cuda) | {
        "kind": "train",
        "ranks": size,
        "noise": NOISE[args.dtype],
        "settings": {name: getattr(args, name) for name in settings},
        "rows": [],
    }
    card = record["card"].split()[1].lower() if cuda else "cpu"
    out = args.out or RESULTS / f"{record['date']}-{size}x{card}-train.json"
    first = None
    for name in progress(args.way, rank):
        row, gradients = run(args, name, mesh)
        record["rows"].append(row)
        if "error" not in row:
            first = first or (row, gradients)
            if first[0] is not row:
                compare(row, first[0], gradients, first[1], cuda)
        if rank == 0:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1) + "\n")
    if rank == 0:
        print(train_table(record))
        print(f"wrote {out}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if any(failed(row, args.dtype) for row in record["rows"]):
        sys.exit("Losses or gradients differ, or a way of ours failed." if rank == 0 else 1)


if __name__ == "__main__":
    main()
