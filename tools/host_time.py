"""Measure the host time of one eager attention call on tiny DTensors, ours against torch's.

    torchrun --nproc-per-node 4 tools/host_time.py              # CUDA if available, else gloo
    torchrun --nproc-per-node 4 tools/host_time.py --device cpu --profile gather

The tensors are so small that the device does almost nothing. On CUDA the time between two calls is
the host's, measured without synchronization in between. On CPU kernels and gloo count too; "kernels
alone" and a fake group (--fake) show how much. Times are medians over the calls, of the slowest
rank.

A backward switches to a thread of autograd and back once, however many attention calls it has. "one
of a chain" is the time of one attention, forward and backward, in a chain of 8, as in a model.
"empty function, local" is an autograd function in Python that only allocates its results: less is
not possible here for any attention whose backward is Python.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import functools
import json
import os
import pathlib
import pstats
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import cp_dispatch

MODES = "forward", "both", "both_one_thread", "both_of_chain"
CHAIN = 8
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def options():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="Run it with torchrun, or with --fake."
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", default="flash", choices=KERNELS)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=32, help="per rank")
    parser.add_argument("--fake", type=int, metavar="RANKS", help="one process, no communication")
    parser.add_argument(
        "--only", action="append", help="run only candidates whose name contains this"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the rows to this JSON file")
    parser.add_argument(
        "--profile", metavar="SCHEDULE", help="run cProfile on this schedule, on rank 0"
    )
    return parser.parse_args()


class Empty(torch.autograd.Function):
    """What autograd and Python take for an attention that does nothing."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output.detach())
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Case:
    """Tiny causal attention, forward and with its backward."""

    def __init__(self, mesh, args, dtype):
        shape = 1, args.tokens, 8, 64
        device = mesh.device_type

        def sharded(needs):
            own = torch.randn(shape, device=device, dtype=dtype).transpose(1, 2)
            whole = DTensor.from_local(own, mesh, [Shard(2)], run_check=False)
            return whole.detach().requires_grad_(needs)

        self.plain = [sharded(False) for _ in range(3)]
        self.leaves = [sharded(True) for _ in range(3)]
        self.grad = sharded(False)
        self.pairs = [[sharded(True), sharded(True)] for _ in range(CHAIN)]
        self.shard_pairs = [
            [x.to_local().detach().requires_grad_() for x in pair] for pair in self.pairs
        ]
        self.shards = [x.to_local().detach() for x in self.plain]
        self.shard_leaves = [x.clone().requires_grad_() for x in self.shards]

    def forward(self):
        return F.scaled_dot_product_attention(*self.plain, is_causal=True)

    def both(self):
        output = F.scaled_dot_product_attention(*self.leaves, is_causal=True)
        return torch.autograd.grad(output, self.leaves, self.grad)

    def local(self):
        return F.scaled_dot_product_attention(*self.shards, is_causal=True)

    def local_both(self):
        output = F.scaled_dot_product_attention(*self.shard_leaves, is_causal=True)
        return torch.autograd.grad(output, self.shard_leaves, self.shards[0])

    def empty(self):
        return Empty.apply(*self.shards)

    def empty_both(self):
        output = Empty.apply(*self.shard_leaves)
        return torch.autograd.grad(output, self.shard_leaves, self.shards[0])

    def empty_chain(self):
        return self._chain(self.shard_leaves[0], self.shard_pairs, self.shards[0], Empty.apply)

    def chain(self):
        return self._chain(self.leaves[0], self.pairs, self.grad)

    def local_chain(self):
        return self._chain(self.shard_leaves[0], self.shard_pairs, self.shards[0])

    @staticmethod
    def _chain(query, pairs, grad, attention=None):
        attention = attention or functools.partial(F.scaled_dot_product_attention, is_causal=True)
        output = query
        for key, value in pairs:
            output = attention(output, key, value)
        return torch.autograd.grad(output, [query, *sum(pairs, [])], grad)


def measure(call, args) -> float:
    """Median seconds of a call on the slowest rank."""
    for _ in range(20):
        call()
    times = []
    for i in range(args.calls):
        if i % 20 == 0:
            # Otherwise the device's queue fills up and the host waits for it.
            if args.device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            call()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times), device=args.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


@contextlib.contextmanager
def torchs(rotate: str):
    """Torch's own context parallelism on DTensors."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp

    before = cp._cp_options.enable_load_balance, cp._cp_options.rotate_method
    cp._cp_options.enable_load_balance = True
    cp.set_rotate_method(rotate)
    cp._enable_context_parallel_dispatcher()
    try:
        yield
    finally:
        cp._disable_context_parallel_dispatcher()
        cp._cp_options.enable_load_balance, cp._cp_options.rotate_method = before


def candidates(args, world_size: int):
    layout = cp_dispatch.HeadTail(args.tokens * world_size, world_size)
    for schedule in ("natural_ring", "gather"):
        for order in (None, layout):
            if schedule == "gather" or order is not None:
                name = f"cp_dispatch {schedule}" + (", head-tail" if order is not None else "")
                yield name, cp_dispatch.enabled(schedule=schedule, layout=order)
    for order in (None, layout):
        name = "cp_dispatch auto" + (", head-tail" if order is not None else "")
        yield name, cp_dispatch.enabled(layout=order)
    yield "cp_dispatch ring, mirrored", cp_dispatch.enabled(schedule="mirrored_ring")
    for rotate in ("allgather", "alltoall"):
        yield f"torch cp {rotate}", torchs(rotate)


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    if args.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.fake)
    else:
        rank = int(os.environ["LOCAL_RANK"])
        if args.device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if args.device == "cuda" else "gloo",
            device_id=torch.device("cuda", rank) if args.device == "cuda" else None,
        )
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    case = Case(mesh, args, torch.bfloat16 if args.device == "cuda" else torch.float32)
    tell = print if dist.get_rank() == 0 else lambda *_, **__: None
    record = {
        "kind": "host",
        "card": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "ranks": mesh.size(),
        "tokens": args.tokens,
        "kernel": args.kernel if args.device == "cuda" else None,
        "rows": [],
    }
    tell(
        f"{mesh.size()} x {record['card']}, torch {torch.__version__}, {args.tokens} tokens a "
        "rank, us a call"
    )
    tell(
        f"| {'':36} | forward | forward + backward | same, no autograd threads | one of a chain |\n"
        "|---|---|---|---|---|"
    )

    def timed(name: str, *calls) -> None:
        cells = {}
        threads = True, True, False, True
        for mode, call, threaded in zip(MODES, calls, threads, strict=True):
            torch.autograd.set_multithreading_enabled(threaded)
            cells[mode] = measure(call, args) * 1e6 / (CHAIN if mode == "both_of_chain" else 1)
        torch.autograd.set_multithreading_enabled(True)
        record["rows"].append({"name": name, **cells})
        tell(f"| {name:36} | {' | '.join(f'{x:.0f}' for x in cells.values())} |", flush=True)

    only = sdpa_kernel(KERNELS[args.kernel]) if args.device == "cuda" else contextlib.nullcontext()
    with only:
        timed("empty function, local", case.empty, *[case.empty_both] * 2, case.empty_chain)
        timed("kernels alone, local", case.local, *[case.local_both] * 2, case.local_chain)
        ways = dict(candidates(args, mesh.size()))
        chosen = [n for n in ways if not args.only or any(part in n for part in args.only)]
        if not chosen:
            raise SystemExit(f"--only: expected parts of {', '.join(ways)}; got {args.only}")
        for name in chosen:
            way = ways[name]
            try:
                with way:
                    timed(name, case.forward, *[case.both] * 2, case.chain)
            except Exception as error:
                # This fails on every rank alike: for example, torch's has no CPU kernel.
                tell(
                    f"| {name:36} | {type(error).__name__} | {str(error).split(chr(10))[0][:60]} |"
                )
        if args.profile:
            layout = cp_dispatch.HeadTail(args.tokens * mesh.size(), mesh.size())
            with cp_dispatch.enabled(schedule=args.profile, layout=layout):
                for call in (case.forward, case.both):
                    profile(call, args, tell)
    if args.out and dist.get_rank() == 0:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if not args.fake:
        dist.barrier()
    dist.destroy_process_group()


def profile(call, args, tell) -> None:
    measure(call, args)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(args.calls):
        call()
    profiler.disable()
    if dist.get_rank() == 0:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
