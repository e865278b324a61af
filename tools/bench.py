"""Time sharded attention: this project, torch's own context parallel and stock DTensor, in one run.

    torchrun --nproc-per-node 4 tools/bench.py --tokens 8192 --backend cudnn --backend flash

Every implementation gets the same DTensors and the same ``F.scaled_dot_product_attention``
call. ``--tokens``, ``--backend`` and ``--heads`` may be given several times. With ``--out`` rows
go to a JSON file as they come and to a CSV beside it, with ``--plot`` curves to a PNG; what runs
out of memory is a row too.

"kept" is (one GPU's time for the whole sequence / ranks) / time, with the same kernel in the same
run; 100% means that nothing was lost by distributing. Times are CUDA events (host clock on CPU),
the median of rounds, and the slowest rank counts. With ``--steps 1`` each round starts on idle GPUs
and pays for the host's latency; more steps a round let the host run ahead, as it does in training;
``--cuda-graph`` replays steps without the host.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import gc
import itertools
import json
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import cp_dispatch
from cp_dispatch.backends import BACKENDS
from cp_dispatch.layouts import laid_out
from cp_dispatch.schedules import mailboxes

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
KERNELS_ALONE = "block kernels alone"
FLOP_FORMULA = "4 * B * H * S * S * D forward, 2.5 times that backward; halved for causal"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=KERNELS)
    parser.add_argument("--tokens", type=int, action="append", help="per rank")
    parser.add_argument("--heads", type=int, nargs=2, action="append", metavar=("H", "HKV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="back to back in a timed round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--cuda-graph", action="store_true", help="time replays of captured steps")
    parser.add_argument("--skip", action="append", default=[], help="an implementation to skip")
    parser.add_argument(
        "--only", action="append", help="an implementation to run, beside one device"
    )
    parser.add_argument("--profile", action="store_true", help="kernel time by kind, rank 0")
    parser.add_argument(
        "--out", type=pathlib.Path, help="write rows as JSON here, and as CSV beside"
    )
    parser.add_argument("--plot", action="store_true", help="and draw them beside; needs --out")
    args = parser.parse_args()
    if args.plot and not args.out:
        parser.error("--plot needs --out")
    unknown = {*args.skip, *(args.only or [])} - {*IMPLEMENTATIONS, KERNELS_ALONE}
    if unknown:
        names = [*IMPLEMENTATIONS, KERNELS_ALONE]
        parser.error(f"no implementation {sorted(unknown)}; there are {names}")
    args.heads = args.heads or [[32, 8]]
    return args


class Problem:
    """One shape: local shards and the whole sequence's tensors, made on demand."""

    def __init__(self, args, tokens: int, heads, mesh):
        self.args, self.tokens, self.heads, self.mesh = args, tokens, heads, mesh
        self.world_size = mesh.size()
        self.device = torch.device(mesh.device_type, torch.cuda.current_device()
                                   if mesh.device_type == "cuda" else 0)  # fmt: skip
        self.dtype = getattr(torch, args.dtype)

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
            query, key, value, is_causal=self.args.causal, enable_gqa=gqa
        )

    def flops(self, backward: bool) -> float:
        length = self.tokens * self.world_size
        forward = 4 * self.args.batch * self.heads[0] * length**2 * self.args.head_dim
        return forward * (3.5 if backward else 1) * (0.5 if self.args.causal else 1)


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
    yield _sharded(problem)


@contextlib.contextmanager
def ours(problem: Problem, schedule: str, balancer=None):
    layout = balancer and balancer(problem.tokens * problem.world_size, problem.world_size)
    with cp_dispatch.enabled(schedule=schedule, layout=layout):
        yield _sharded(problem)


@contextlib.contextmanager
def torch_cp(problem: Problem, rotate_method: str):
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

    # Its causal work is balanced for head-tail data; without a mask that changes nothing.
    torch_cp._cp_options.enable_load_balance = problem.args.causal
    torch_cp.set_rotate_method(rotate_method)
    torch_cp._enable_context_parallel_dispatcher()
    try:
        yield _sharded(problem)
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


# Without a mask they are the ring.
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


def _mailbox_bytes() -> int:
    """What mailboxes hold beside torch's statistics, while this project is the one that runs."""
    return mailboxes.held_bytes() if cp_dispatch.is_enabled() else 0


def measure(step, args, cuda: bool) -> dict:
    """Seconds (median of rounds, worst rank), host seconds and peak extra memory in MiB."""
    for _ in range(args.warmup):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if args.cuda_graph:
            step = captured(step)
    times, host = [], []
    for _ in range(args.rounds):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        begin = time.perf_counter()
        for _ in range(args.steps):
            result = step()
        host.append((time.perf_counter() - begin) / args.steps)
        if cuda:
            end.record()
            end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / args.steps if cuda else host[-1])
        del result
    extra = (torch.cuda.max_memory_allocated() - before + _mailbox_bytes()) / 2**20 if cuda else 0.0
    row = worst_rank([statistics.median(times), statistics.median(host), extra], cuda)
    return dict(zip(("seconds", "host_seconds", "extra_mib"), row, strict=True))


def captured(step):
    """The step as a CUDA graph: what replays it, and what it has allocated stays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made at a first call must not be captured
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay():
        graph.replay()
        return kept

    return replay


def worst_rank(values: list[float], cuda: bool) -> list[float]:
    """The largest of each value among the ranks."""
    row = torch.tensor(values, device="cuda" if cuda else "cpu", dtype=torch.float64)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    return row.tolist()


def kernel_time(problem: Problem, backend: str, args) -> dict:
    """The block kernels of a balanced ring back to back: no merge, no communication.

    Causal work is that of rank 0 in head-tail order; every rank has as much.
    """
    kernel, world_size = BACKENDS[backend], problem.world_size
    query, key, value, grad = problem.tensors(problem.tokens)
    scale = problem.args.head_dim**-0.5
    length = problem.tokens * world_size
    layout = cp_dispatch.HeadTail(length, world_size)
    geometry = laid_out(length, length, (world_size,), args.causal, layout)
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

    return {"fwd": measure(forward, args, True), "fwd+bwd": measure(both, args, True)}


def planned(problem: Problem, inputs, mode: str) -> dict:
    """What the plan says about a call of ours: its schedule, and the seconds that the constants of
    this kind of GPU predict, where there are some."""
    gqa = inputs[0].shape[1] != inputs[1].shape[1]
    if mode != "fwd":  # what is faster may depend on whether there is a backward
        inputs = [x.detach().requires_grad_() for x in inputs]
    plan = cp_dispatch.explain(*inputs, is_causal=problem.args.causal, enable_gqa=gqa)
    found = {"schedule": plan.op_schedule}
    for name, forward, backward in plan.predictions or ():
        if name == plan.op_schedule:
            found["predicted"] = forward if mode == "fwd" else forward + backward
    return found


def profile_step(step) -> dict[str, float]:
    """Milliseconds of GPU kernels of one step on this rank, by kind."""
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name.lower()
        if "nccl" in name:
            kind = "communication"
        elif "merge" in name:
            kind = "merge"
        elif any(word in name for word in ("flash", "fmha", "cudnn", "sdpa")):
            kind = "attention"
        elif "memcpy" in name or "memset" in name or "copy" in name:
            kind = "copies"
        else:
            kind = "other"
        kinds[kind] = kinds.get(kind, 0.0) + event.device_time / 1e3
    return kinds


def run_point(problem: Problem, backend: str, args, cuda: bool) -> list[dict]:
    rows, alone = [], {}
    shape = {
        "backend": backend,
        "tokens_per_rank": problem.tokens,
        "ranks": problem.world_size,
        "heads": list(problem.heads),
        "head_dim": args.head_dim,
        "batch": args.batch,
        "causal": args.causal,
        "dtype": args.dtype,
        "steps": args.steps,
        "cuda_graph": args.cuda_graph,
    }
    for name, implementation in wanted(args):
        for mode in ("fwd", "fwd+bwd"):
            row = shape | {"implementation": name, "mode": mode}
            try:
                with sdpa_kernel(KERNELS[backend]), implementation(problem) as parts:
                    if name.startswith("cp_dispatch"):
                        row |= planned(problem, parts[0], mode)
                    step = steps(problem, *parts)[mode]
                    row |= measure(step, args, cuda)
                    if args.profile and cuda and name.startswith("cp_dispatch"):
                        row["kernel_ms"] = profile_step(step)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                row |= failure(error)
            step = parts = None
            if "seconds" in row:
                if name == "one device":
                    alone[mode] = row["seconds"]
                row["tflops_per_rank"] = (
                    problem.flops(mode != "fwd") / problem.world_size / row["seconds"] / 1e12
                )
                if name == "one device":
                    row["tflops_per_rank"] *= problem.world_size
                elif mode in alone:
                    row["kept"] = alone[mode] / problem.world_size / row["seconds"]
            rows.append(row)
            if cuda:
                gc.collect()
                torch.cuda.empty_cache()
                mailboxes.free()  # the next one's memory is its own
    if cuda and KERNELS_ALONE not in args.skip:
        name = {"implementation": KERNELS_ALONE}
        try:
            for mode, row in kernel_time(problem, backend, args).items():
                if mode in alone:
                    row["kept"] = alone[mode] / problem.world_size / row["seconds"]
                rows.append(shape | name | {"mode": mode} | row)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            rows += [shape | name | {"mode": mode} | failure(error) for mode in ("fwd", "fwd+bwd")]
    return rows


def wanted(args) -> list:
    """Names and implementations of this run."""
    return [
        (name, implementation)
        for name, implementation in IMPLEMENTATIONS.items()
        if name not in args.skip
        and (args.causal or name not in ONLY_CAUSAL)
        and (not args.only or name in args.only or name == "one device")
    ]


def failure(error: RuntimeError) -> dict:
    """A row's words about a run that failed. (All ranks hold as much, and run out alike.)"""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return {"error": "out of memory"}
    return {"error": " ".join(str(error).split())[:160]}


def show(row: dict) -> str:
    text = f"{row['tokens_per_rank']:7d} {row['backend']:9s} {row['mode']:8s} "
    text += f"{'/'.join(map(str, row['heads'])):7s} {row['implementation']:30s} "
    if "error" in row:
        return text + row["error"]
    text += f"{row['seconds'] * 1e3:9.3f} ms"
    if "kept" in row:
        text += f"  kept {row['kept'] * 100:5.1f}%"
    if "tflops_per_rank" in row:
        text += f"  {row['tflops_per_rank']:6.1f} TFLOP/s"
    text += f"  host {row['host_seconds'] * 1e3:6.3f} ms  extra {row['extra_mib']:7.0f} MiB"
    for kind, value in row.get("kernel_ms", {}).items():
        text += f"\n{'':58s}{kind}: {value:.3f} ms"
    return text


COLUMNS = (
    "implementation", "mode", "backend", "tokens_per_rank", "ranks", "heads", "head_dim", "batch",
    "causal", "dtype", "steps", "cuda_graph", "schedule", "seconds", "predicted", "host_seconds",
    "extra_mib", "kept", "tflops_per_rank", "error", "card", "torch", "cuda", "date",
)  # fmt: skip


def keep(record: dict, path: pathlib.Path, plot: bool) -> None:
    """Write the rows as JSON, as CSV, and as curves where asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    common = {name: record[name] for name in ("card", "torch", "cuda", "date")}
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in record["rows"]:
            writer.writerow(row | common | {"heads": "/".join(map(str, row["heads"]))})
    if plot:
        import bench_plot  # this script's folder is on the path

        caption = f"{record['card']}, torch {record['torch']}, {record['date']}"
        bench_plot.draw(record["rows"], path.with_suffix(".png"), caption)


def progress(points, rank: int):
    """The points, with a bar on the first rank where there is tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return points
    return tqdm(points, unit="point", disable=rank != 0)


def about(cuda: bool) -> dict:
    """What a record says about where it was made."""
    return {
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    args = parse()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    if cuda:
        torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda" if cuda else "cpu", (dist.get_world_size(),))
    torch.manual_seed(rank)
    record = about(cuda) | {"flop_formula": FLOP_FORMULA, "rows": []}
    if rank == 0:
        print(f"{record['card']} x {mesh.size()}, torch {torch.__version__}, FLOPs: {FLOP_FORMULA}")
    points = list(itertools.product(args.heads, args.tokens or [8192], args.backend or ["flash"]))
    for heads, tokens, backend in progress(points, rank):
        rows = run_point(Problem(args, tokens, heads, mesh), backend, args, cuda)
        record["rows"] += rows
        if rank == 0:
            print("\n".join(map(show, rows)), flush=True)
            if args.out:
                keep(record, args.out, False)
    if rank == 0 and args.plot:
        keep(record, args.out, True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
