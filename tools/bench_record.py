"""Rows of the benchmarks: error and machine descriptions, printing, and files."""

from __future__ import annotations

import csv
import datetime
import json
import pathlib

import torch


def failure(error: RuntimeError) -> dict:
    """The fields of a row for a run that failed. (All ranks hold the same amount of memory, so all
    run out of it alike.)"""
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
    "causal", "documents", "dtype", "steps", "cuda_graph", "schedule", "seconds", "predicted",
    "host_seconds",
    "extra_mib", "kept", "tflops_per_rank", "error", "card", "torch", "cuda", "date",
)  # fmt: skip


def keep(record: dict, path: pathlib.Path, plot: bool) -> None:
    """Write the rows as JSON, as CSV and, with ``plot``, as curves."""
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
    """The points, with a progress bar on the first rank if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return points
    return tqdm(points, unit="point", disable=rank != 0)


def about(cuda: bool) -> dict:
    """The fields of a record that describe the machine and the versions."""
    return {
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
    }
