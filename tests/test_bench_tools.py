"""The bench's rows as CSV and as curves."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import pathlib
import sys

import pytest
import torch

from tests.test_costs import constants

TOOLS = pathlib.Path(__file__).parents[1] / "tools"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(implementation="cp_dispatch ring", **fields):
    return {
        "implementation": implementation, "mode": "fwd", "backend": "flash", "ranks": 4,
        "tokens_per_rank": 8192, "heads": [32, 8], "head_dim": 128, "batch": 1, "causal": True,
        "dtype": "bfloat16", "steps": 1,
    } | fields  # fmt: skip


ROWS = [
    row(kept=0.5),
    row(kept=0.75, tokens_per_rank=16384),
    row(error="out of memory", tokens_per_rank=32768),
    row("torch cp allgather", kept=0.4),
    row("one device", seconds=1.0),
    row(kept=0.6, ranks=2),
]


def test_curves():
    plot = load("bench_plot")
    (panel,) = plot.curves(ROWS, "tokens_per_rank").values()
    # A point that failed is at 0; a curve has two points.
    assert panel == {"cp_dispatch ring": [(8192, 0.5), (16384, 0.75), (32768, 0.0)]}
    (panel,) = plot.curves(ROWS, "ranks").values()
    assert panel == {"cp_dispatch ring": [(2, 0.6), (4, 0.5)]}
    # Other shapes are other panels.
    others = [row(kept=0.5, heads=[8, 8]), row(kept=0.5, heads=[8, 8], ranks=8)]
    assert len(plot.curves(ROWS + others, "ranks")) == 2
    with pytest.raises(SystemExit, match="nothing to plot"):
        plot.draw(ROWS[:1], pathlib.Path("unused.png"))


def test_results_are_kept(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    bench = load("bench")
    monkeypatch.setitem(sys.modules, "bench_plot", load("bench_plot"))
    record = {"card": "card", "torch": "2", "cuda": None, "date": "today", "rows": ROWS}
    bench.keep(record, tmp_path / "x" / "results.json", plot=True)
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {"results.json", "results.csv", "results.png"}
    with open(tmp_path / "x" / "results.csv", newline="") as file:
        kept = list(csv.DictReader(file))
    assert len(kept) == len(ROWS)
    assert kept[2]["error"] == "out of memory" and kept[2]["kept"] == ""
    assert kept[1] | {"kept": "0.75", "heads": "32/8", "card": "card"} == kept[1]


def test_failures_are_rows():
    bench = load("bench")
    assert bench.failure(torch.OutOfMemoryError("CUDA out of memory. Tried")) == {
        "error": "out of memory"
    }
    assert bench.failure(RuntimeError("a\n  b")) == {"error": "a b"}


def test_predicted_table():
    """Every schedule that fits, the best one bold; more ranks than heads leave no ulysses."""
    predict = load("predict_table")
    predict.RANKS = (8, 64)
    args = argparse.Namespace(backend="flash", heads=(32, 8), head_dim=128, tokens=[1024])
    few, many = predict.table(constants(), args).splitlines()[2:4]
    assert few.startswith("| 1,024 | 8 |") and few.count("**") == 2 and "not fit" not in few
    assert many.split("|")[5].strip() == "does not fit" and many.count("%") == 3
    predict.MEMORY = 0
    assert not predict.row(constants(), 1024, 8, args)


def test_planner_check():
    """What auto took against the best, and predictions against times."""
    check = load("planner_check")
    rows = [
        row("cp_dispatch auto", schedule="ring", seconds=1.2, predicted=1.0),
        row("cp_dispatch ring", schedule="ring", seconds=1.0, predicted=1.0),
        row("cp_dispatch gather", schedule="gather", seconds=1.0, predicted=1.5),
        row("cp_dispatch auto, head-tail", schedule="gather", seconds=1.0, predicted=1.1),
        row("cp_dispatch ring, head-tail", schedule="ring", seconds=2.0, predicted=1.7),
        row("cp_dispatch ulysses", schedule="ulysses", error="out of memory"),
        row("stock DTensor", seconds=0.5),
        row("cp_dispatch auto", schedule="ring", seconds=1.0, mode="fwd+bwd"),
    ]
    natural, permuted = check.points(rows)
    assert natural.seconds == {"ring": 1.1, "gather": 1.0} and natural.chosen == "ring"
    assert natural.best == "gather" and natural.loss == pytest.approx(1.1)
    assert permuted.loss == 1 and permuted.errors == pytest.approx({"gather": 0.1, "ring": -0.15})
    assert "took ring: gather 1000.00 (+50%)" in check.show(natural)
    assert "10% slower" in check.show(natural) and "slower" not in check.show(permuted)
    words = check.summary([natural, permuted])
    assert "in 1 of 2 points (50%)" in words and "2 of 2 chosen (100%), 3 of 4 of all" in words
    assert "without predictions" in check.summary(
        check.points([x | {"predicted": 0} for x in rows])
    )
