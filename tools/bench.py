"""Time sharded attention: this project, torch's own context parallel and stock DTensor.

    torchrun --nproc-per-node 4 tools/bench.py --tokens 8192 --backend cudnn --backend flash

Every implementation gets the same DTensors and the same ``F.scaled_dot_product_attention`` call, in
the same run. ``--tokens``, ``--backend`` and ``--heads`` may be repeated. With ``--out``, each row
is written as soon as it is measured, to a JSON file and a CSV file next to it; with ``--plot``,
curves are written to a PNG too. A case that runs out of memory is a row too.

"kept" is (one GPU's time for the whole sequence / ranks) / time, with the same kernel in the same
run; 100% means that distribution costs nothing. Times are measured with CUDA events (on CPU with
the host's clock). They are medians of several rounds, of the slowest rank. With ``--steps 1`` each
round starts on idle GPUs and includes the host's latency. With more steps per round the host can
run ahead, as in training. ``--cuda-graph`` replays steps without the host.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import pathlib

import torch
import torch.distributed as dist
from bench_record import about, failure, keep, progress, show
from bench_timing import measure, profile_step
from bench_ways import (
    IMPLEMENTATIONS,
    KERNELS,
    KERNELS_ALONE,
    ONLY_CAUSAL,
    Problem,
    kernels_alone,
    planned,
    steps,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import sdpa_kernel

from cp_dispatch.schedules import mailboxes

FLOP_FORMULA = (
    "4 * B * H * S * S * D forward, 2.5 times that backward; halved for causal, and summed over "
    "documents"
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=KERNELS)
    parser.add_argument("--tokens", type=int, action="append", help="per rank")
    parser.add_argument("--heads", type=int, nargs=2, action="append", metavar=("H", "HKV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true")
    masks.add_argument(
        "--documents", type=int, default=0, metavar="MEAN",
        help="use a boolean (S, S) mask, causal within documents of MEAN tokens on average",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps per timed round, back to back")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--cuda-graph", action="store_true", help="time replays of captured steps")
    parser.add_argument("--skip", action="append", default=[], help="an implementation to skip")
    parser.add_argument(
        "--only", action="append", help="an implementation to run, besides one device"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print rank 0's kernel time by kind of kernel"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="write rows to this JSON file, and to a CSV next to it"
    )
    parser.add_argument(
        "--plot",
        action="store_true",
        help="plot the rows to a PNG next to --out, which is required",
    )
    args = parser.parse_args()
    if args.plot and not args.out:
        parser.error("--plot needs --out")
    unknown = {*args.skip, *(args.only or [])} - {*IMPLEMENTATIONS, KERNELS_ALONE}
    if unknown:
        names = [*IMPLEMENTATIONS, KERNELS_ALONE]
        parser.error(f"no implementation {sorted(unknown)}; there are {names}")
    args.heads = args.heads or [[32, 8]]
    return args


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
        "documents": args.documents,
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
                mailboxes.free()  # so that the next one's memory is counted alone
    if cuda and not args.documents and KERNELS_ALONE not in args.skip:
        name = {"implementation": KERNELS_ALONE}
        try:
            alone_steps = kernels_alone(problem, backend)
            times = {mode: measure(step, args, True) for mode, step in alone_steps.items()}
            for mode, row in times.items():
                if mode in alone:
                    row["kept"] = alone[mode] / problem.world_size / row["seconds"]
                rows.append(shape | name | {"mode": mode} | row)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            rows += [shape | name | {"mode": mode} | failure(error) for mode in ("fwd", "fwd+bwd")]
    return rows


def wanted(args) -> list:
    """The names and implementations of this run."""
    return [
        (name, implementation)
        for name, implementation in IMPLEMENTATIONS.items()
        if name not in args.skip
        and (args.causal or name not in ONLY_CAUSAL)
        and (not args.only or name in args.only or name == "one device")
    ]


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
