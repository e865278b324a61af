"""Time the extension's kernels against their equivalents in plain torch, on CPU or on a GPU.

    python tools/bench_extension.py [--device cuda] [--out tools/results/DATE-extension-CARD.json]

Every kernel must be at least 1.5 times as fast as its equivalent ("twin") at 8192 tokens x 32 query
and 8 key/value heads x 128. Kernels that only move memory should reach 70% of the bandwidth of
``copy_`` with the same number of bytes on the same device, which is measured next to each of them.
Times are the best of several rounds (CUDA events over several calls; the host's clock on CPU),
since other processes can only make a round slower. A twin is what one would write without the
extension: ``index_select`` and ``cat``, ``index_copy_``, ``index_add_``, the eager merge, and
Triton's merge where available.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import sys
import time

import torch

from cp_dispatch import extension
from cp_dispatch.native import permute as P
from cp_dispatch.native import rows
from cp_dispatch.native.merge import merge_eager, merge_partials, token_major
from cp_dispatch.native.parts import sum_parts, sum_parts_eager
from cp_dispatch.native.permute_ops import sources_of

GOAL_SPEEDUP, GOAL_FRACTION = 1.5, 0.7


class Case:
    """One kernel, its twins by name, and the bytes it reads and writes (0: not memory-bound)."""

    def __init__(self, name: str, kernel, twins: dict, moved: int = 0):
        self.name, self.kernel, self.twins, self.moved = name, kernel, twins, moved


def numel(*tensors) -> int:
    return sum(x.numel() for x in tensors)


def size(*tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def head_tail(length: int, ranks: int, device) -> torch.Tensor:
    """The index by which a head-tail balancer reorders a sequence."""
    chunk = length // (2 * ranks)
    order = [c for r in range(ranks) for c in (r, 2 * ranks - 1 - r)]
    return P.span_indices([(c * chunk, chunk) for c in order]).to(device)


def move_cases(args, q, k, v):
    device, length = q.device, q.size(2)
    index = head_tail(length, 4, device)
    padded = torch.cat([index, index.new_full((length // 64,), -1)])
    qkv = [q, k, v]
    tokens = [x.transpose(1, 2) for x in qkv]  # contiguous, which is best for a twin
    flat = q.new_empty(numel(*qkv))

    def cat(parts):
        return torch.cat([x.reshape(-1) for x in parts])

    yield Case(
        "pack q, k, v by an index, new buffer",
        lambda: P.pack_sequence(qkv, index, checked=True),
        {"index_select + cat": lambda: cat([x.index_select(1, index) for x in tokens])},
        2 * size(*qkv),
    )
    yield Case(
        "pack q, k, v by an index",
        lambda: P.pack_sequence(qkv, index, out=flat, checked=True),
        {"index_select + cat": lambda: torch.cat(
            [x.index_select(1, index).reshape(-1) for x in tokens], out=flat)},
        2 * size(*qkv),
    )  # fmt: skip
    outs = [x.new_empty(x.size(0), len(padded), *x.shape[2:]) for x in tokens]
    views_of_outs = [x.transpose(1, 2) for x in outs]
    missing = (padded < 0).view(1, -1, 1, 1)

    def select_padded():
        for x, out in zip(tokens, outs, strict=True):
            torch.index_select(x, 1, padded.clamp(min=0), out=out).masked_fill_(missing, 0)

    yield Case(
        "permute q, k, v with padding",
        lambda: rows.copy_rows(views_of_outs, qkv, padded, [2] * 3, False),
        {"index_select + masked_fill_": select_padded},
        2 * size(*qkv) + size(*qkv) // 64,
    )
    targets = [torch.empty_like(x) for x in qkv]
    into = [x.transpose(1, 2) for x in targets]
    cuts = [numel(x) for x in qkv]

    def index_copy():
        for x, part, like in zip(into, flat.split(cuts), tokens, strict=True):
            x.index_copy_(1, index, part.view(like.shape))

    yield Case(
        "unpack q, k, v by an index",
        lambda: P.unpack_sequence(flat, targets, index, checked=True),
        {"index_copy_": index_copy},
        2 * size(*qkv),
    )

    def inverse_gather():
        rows.copy_rows(targets, qkv, rows.invert_index(index, length), [2] * 3, False)

    yield Case(
        "backward of a permutation",
        inverse_gather,
        {"zero_ + index_add_": lambda: [
            y.zero_().index_add_(1, index, x) for x, y in zip(tokens, into, strict=True)]},
        2 * size(*qkv),
    )  # fmt: skip
    twice = index // 2 * 2
    wides = [x.new_empty(x.shape, dtype=torch.float32) for x in tokens]

    def sum_rows():
        rows.sum_rows(targets, qkv, *sources_of(twice, length), [2] * 3)

    def index_add():
        for x, y, wide in zip(tokens, into, wides, strict=True):
            y.copy_(wide.zero_().index_add_(1, twice, x.float()))

    yield Case(
        "backward of an index with repeats",
        sum_rows,
        {"zero_ + index_add_ in float32": index_add},
    )
    sources = sources_of(twice, length)

    yield Case(
        "backward of an index with repeats, its sources known",
        lambda: rows.sum_rows(targets, qkv, *sources, [2] * 3),
        {"zero_ + index_add_ in float32": index_add},
        2 * size(*qkv),
    )


def part_cases(args, k):
    parts = [torch.randn_like(k) for _ in range(6)]
    total = token_major(*k.shape, like=k)
    pieces = [0, 0, k.size(2), 6, *(x for i in range(6) for x in (i, 0))]
    yield Case(
        "sum of 6 shares of dK",
        lambda: sum_parts(parts, total),
        {"eager": lambda: sum_parts_eager(parts, pieces, [total])},
        size(*parts, total),
    )


def index_cases(args, device):
    length = 1 << 20
    spans = torch.tensor([(i * 16, 16) for i in reversed(range(length // 16))], device=device)
    index = torch.randperm(length, device=device)
    yield Case(
        "positions of 65536 spans",
        lambda: rows.span_indices(spans, length),
        {"repeat_interleave": lambda: rows.span_indices_eager(spans, length)},
    )
    yield Case(
        "inverse of a permutation",
        lambda: rows.invert_index(index, length),
        {"scatter_": lambda: rows.invert_index_eager(index, length),
         "argsort": lambda: index.argsort()},
    )  # fmt: skip


def merge_cases(args, q):
    device, wide = q.device, torch.float32
    batch, heads, length, dim = q.shape
    lse_a, lse_b = torch.randn(2, batch, heads, length, device=device).unbind(0)
    a, b = q, q.clone()
    first, first_lse = a.to(wide), lse_a.clone()
    out, lse = token_major(*q.shape, like=q), torch.empty_like(lse_a)
    for name, arguments in (
        ("merge two into a third", (a, lse_a, b, lse_b, out, lse)),
        ("merge into a float32 accumulator", (first, first_lse, b, lse_b, first, first_lse)),
        ("merge the last of a ring", (first, first_lse, b, lse_b, out, lse)),
    ):
        twins = {"eager": lambda arguments=arguments: merge_eager(*arguments)}
        if device.type == "cuda":
            try:
                from cp_dispatch.native.merge_triton import merge_triton
            except ImportError:
                pass
            else:
                twins["triton"] = lambda arguments=arguments: merge_triton(*arguments)
        moved = size(*arguments)
        yield Case(name, lambda arguments=arguments: merge_partials(*arguments), twins, moved)


def best(functions: list, device, rounds: int) -> list[float]:
    """Seconds of one call of each function. They take turns, so that a disturbance affects all
    alike."""
    calls = 20 if device.type == "cuda" else 1
    times = [[] for _ in functions]
    for _ in range(rounds + 1):  # the first one warms up
        for function, its in zip(functions, times, strict=True):
            its.append(timed(function, calls, device))
    return [min(its[1:]) for its in times]


def timed(function, calls: int, device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def host_time(function) -> float:
    """Seconds of host time of one call that only queues work."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def row_of(case: Case, device, rounds: int) -> dict:
    functions = [case.kernel, *case.twins.values()]
    if case.moved:
        source = torch.ones(case.moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        functions.append(lambda: target.copy_(source))
    kernel, *others = best(functions, device, rounds)
    row = {"case": case.name, "kernel_us": 1e6 * kernel}
    row["twins_us"] = {name: 1e6 * t for name, t in zip(case.twins, others, strict=False)}
    # Triton's merge is itself the second choice of kernel, so it is shown but is no twin.
    row["speedup"] = min(t for n, t in row["twins_us"].items() if n != "triton") / row["kernel_us"]
    if device.type == "cuda":
        row["kernel_host_us"] = 1e6 * host_time(case.kernel)
        row["twins_host_us"] = {n: 1e6 * host_time(twin) for n, twin in case.twins.items()}
    if case.moved:
        row["GB/s"] = case.moved / kernel / 1e9
        row["copy_GB/s"] = case.moved / others[-1] / 1e9
        row["fraction_of_copy"] = others[-1] / kernel
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("H", "HKV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--threads", type=int, action="append", help="number of threads (CPU only); repeatable"
    )
    parser.add_argument("--only", help="run only cases whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, help="write the results as JSON here")
    args = parser.parse_args()
    device = torch.device(args.device)
    if not extension.is_loaded():
        sys.exit(f"the extension is not loaded: {extension.why_not_loaded()}")

    cuda = device.type == "cuda"
    card = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    result = {
        "date": datetime.date.today().isoformat(), "card": card, "torch": torch.__version__,
        "python": platform.python_version(), "tokens": args.tokens, "heads": list(args.heads),
        "head_dim": args.head_dim, "dtype": args.dtype, "rows": [],
    }  # fmt: skip
    print(f"{card}, torch {torch.__version__}, {args.tokens} tokens, heads {args.heads}")
    for threads in [None] if cuda else args.threads or [torch.get_num_threads()]:
        if threads is not None:
            torch.set_num_threads(threads)
            print(f"\n{threads} threads")
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, args.tokens, h, args.head_dim, device=device)
            .to(getattr(torch, args.dtype)).transpose(1, 2)
            for h in (args.heads[0], args.heads[1], args.heads[1])
        )  # fmt: skip
        cases = [
            *move_cases(args, q, k, v),
            *merge_cases(args, q),
            *part_cases(args, k),
            *index_cases(args, device),
        ]
        for case in cases:
            if args.only and args.only not in case.name:
                continue
            row = {"threads": threads, **row_of(case, device, args.rounds)}
            result["rows"].append(row)
            show(row)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def show(row: dict) -> None:
    twins = ", ".join(f"{name} {us:.0f}" for name, us in row["twins_us"].items())
    line = f"{row['case']:48s} {row['kernel_us']:8.0f} us; {twins} us: x{row['speedup']:.2f}"
    if "GB/s" in row:
        line += f"; {row['GB/s']:.0f} GB/s, {100 * row['fraction_of_copy']:.0f}% of copy_"
    if "kernel_host_us" in row:
        hosts = ", ".join(f"{us:.0f}" for us in row["twins_host_us"].values())
        line += f"; host {row['kernel_host_us']:.0f} us against {hosts}"
    if row["speedup"] < GOAL_SPEEDUP:
        line += "  < goal"
    elif row.get("fraction_of_copy", 1) < GOAL_FRACTION:
        line += "  < 70% of copy_"
    print(line, flush=True)


if __name__ == "__main__":
    main()
