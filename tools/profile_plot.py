"""Plot what the streams of one GPU do in a step, from a trace of torch's profiler.

    python tools/profile_plot.py trace.json.gz --out step.png [--steps 5] [--title WORDS]

The trace has ``--steps`` steps, of which the last is plotted: kernels and copies of every stream
over time, and above them the share of the step for each kind. ``--from`` and ``--to`` select a part
of the step, in microseconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pathlib

KINDS = {
    "attention": ("#4c72b0", ("flash", "fmha", "cudnn", "sdpa", "attention")),
    "to other GPUs": ("#c44e52", ("ptop", "nccl")),
    "merge": ("#8172b3", ("merge",)),
    "sums of shares": ("#937860", ("sum_parts",)),
    "copies": ("#dd8452", ("memcpy", "memset", "copy")),
    "other": ("#8c8c8c", ("",)),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=5, help="number of steps in the trace")
    parser.add_argument("--from", dest="start", type=float, default=0.0, metavar="US")
    parser.add_argument("--to", dest="stop", type=float, metavar="US")
    parser.add_argument("--title", default="")
    return parser.parse_args()


def kind_of(name: str) -> str:
    """The kind of a kernel or copy; a merge is no copy, whatever it is called."""
    name = name.lower()
    return next(kind for kind, (_, words) in KINDS.items() if any(word in name for word in words))


def last_step(path: pathlib.Path, steps: int) -> list[dict]:
    """The GPU's events of the last of ``steps`` equal steps, in order, with times in us from its
    start."""
    with (gzip.open if path.suffix == ".gz" else open)(path) as file:
        events = json.load(file)["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not events:
        raise SystemExit(f"{path} has no events of a GPU")
    events.sort(key=lambda e: e["ts"])
    # Attention kernels, of which every step has the same number, separate the steps.
    attention = [e for e in events if kind_of(e["name"]) == "attention"]
    count = max(1, len(attention) // steps)
    begin = attention[-count]["ts"]
    return [
        {"name": e["name"], "stream": e["args"].get("stream", 0), "start": e["ts"] - begin,
         "length": e["dur"]}
        for e in events if e["ts"] >= begin
    ]  # fmt: skip


def shares(events: list[dict]) -> dict[str, float]:
    """Time of each kind, in us."""
    found = dict.fromkeys(KINDS, 0.0)
    for event in events:
        found[kind_of(event["name"])] += event["length"]
    return {kind: time for kind, time in found.items() if time}


def draw(events: list[dict], args) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    total = max(e["start"] + e["length"] for e in events)
    start, stop = args.start, args.stop or total
    streams = sorted({e["stream"] for e in events})
    figure, axes = pyplot.subplots(figsize=(13, 1.6 + 0.6 * len(streams)))
    for row, stream in enumerate(streams):
        for kind, (color, _) in KINDS.items():
            bars = [
                (e["start"], max(e["length"], (stop - start) / 2000))
                for e in events
                if e["stream"] == stream and kind_of(e["name"]) == kind
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
    times = shares(events)
    labels = [f"{kind} {time / 1e3:.2f} ms" for kind, time in times.items()]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=KINDS[kind][0]) for kind in times]
    axes.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=8,
                bbox_to_anchor=(0.5, 1.25))  # fmt: skip
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.set_xlim(start, stop)
    axes.set_xlabel(f"us ({total / 1e3:.2f} ms in all)")
    if args.title:
        figure.suptitle(args.title, fontsize=10)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


def main() -> None:
    args = parse()
    draw(last_step(args.trace, args.steps), args)


if __name__ == "__main__":
    main()
