"""Compare the losses of one process with those of several: table, plot, verdict, sample."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from model import ModelConfig, Transformer, generate

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen first

FLOAT32_LIMIT = 1e-4
# The package's accuracy rule: several ranks may be this much less exact than one device.
LOW_PRECISION_FACTOR = 1.3
PROMPT = "The statement "


@dataclass(frozen=True)
class Run:
    name: str
    world_size: int
    seq_len: int
    seconds: float
    parameters: int
    rank_spread: float
    losses: list[float]

    @classmethod
    def load(cls, path: Path) -> Run:
        return cls(**json.loads(path.read_text()))


def differences(a: Run, b: Run) -> list[float]:
    return [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]


def print_table(one: Run, sharded: Run) -> None:
    print(f"\n{'step':>6}  {one.name:>20}  {sharded.name:>20}  {'difference':>10}")
    last = len(one.losses) - 1
    for step, diff in enumerate(differences(one, sharded)):
        if step % 10 == 0 or step == last:
            row = f"{step:>6}  {one.losses[step]:>20.6f}  {sharded.losses[step]:>20.6f}"
            print(f"{row}  {diff:>10.1e}")
    for run in (one, sharded):
        tokens = run.seq_len * len(run.losses) / run.seconds
        print(f"{run.name}: {run.seconds:.1f} s, {tokens:,.0f} tokens/s")


def rms(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))


def plot(one: Run, sharded: Run, path: Path, limit: float | None = None) -> None:
    fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
    top.plot(one.losses, label=one.name, linewidth=3, alpha=0.4)
    top.plot(sharded.losses, label=sharded.name, linewidth=1)
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    # A difference of exactly zero has no place on a logarithmic axis.
    bottom.semilogy([diff or float("nan") for diff in differences(one, sharded)], ".")
    if limit is not None:
        bottom.axhline(limit, color="tab:red", linestyle="--", label=f"limit {limit:.0e}")
        bottom.legend()
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def verdict(what: str, value: float, limit: float) -> bool:
    agree = value <= limit  # False for NaN
    print(f"{'OK    ' if agree else 'FAILED'} {what}: {value:.2e} (limit {limit:.2e})")
    return agree


def check_float32(one: Run, sharded: Run) -> bool:
    diffs = differences(one, sharded)
    worst = max(diffs) if all(map(math.isfinite, diffs)) else math.nan
    return verdict("float32, largest loss difference", worst, FLOAT32_LIMIT)


def check_low_precision(reference: Run, one: Run, sharded: Run) -> bool:
    """Rounding sends every bfloat16 run its own way, so that a fixed limit on the difference of
    two would say little. How far one device strays from its own float32 run is measured here."""
    limit = LOW_PRECISION_FACTOR * rms(differences(reference, one))
    stray = rms(differences(reference, sharded))
    return verdict("bfloat16, RMS loss difference from one device's float32", stray, limit)


def sample(weights: Path, n_bytes: int) -> str:
    """Text from the model that was trained with its sequence sharded, run on one device."""
    model = Transformer(ModelConfig())
    model.load_state_dict(torch.load(weights))
    prompt = torch.tensor(list(PROMPT.encode()))
    return bytes(generate(model, prompt, n_bytes).tolist()).decode("utf-8", errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder that the runs were written to")
    parser.add_argument("--sample-bytes", type=int, default=300)
    args = parser.parse_args()

    runs = {path.stem: Run.load(path) for path in args.out.glob("*.json")}
    one, sharded = runs["one_float32"], runs["sharded_float32"]
    print_table(one, sharded)
    plot(one, sharded, args.out / "loss_float32.png", FLOAT32_LIMIT)
    checks = [check_float32(one, sharded)]
    if "one_bfloat16" in runs:
        low_one, low_sharded = runs["one_bfloat16"], runs["sharded_bfloat16"]
        print_table(low_one, low_sharded)
        plot(low_one, low_sharded, args.out / "loss_bfloat16.png")
        checks.append(check_low_precision(one, low_one, low_sharded))
    spread = max(run.rank_spread for run in runs.values())
    checks.append(verdict("largest difference of a parameter between ranks", spread, 0.0))

    print("plots:", *sorted(map(str, args.out.glob("loss_*.png"))))
    text = sample(args.out / "weights.pt", args.sample_bytes)
    print(f"\ntext from the model trained on {sharded.world_size} ranks:\n{text}")
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
