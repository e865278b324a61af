"""The bench's rows as CSV and as curves."""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys

import pytest
import torch

from cp_dispatch.plan import Plan
from tests.costs.test_costs import constants
from tests.tools.scripts import TOOLS, load


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
    # A point that failed is at 0. A curve has two points.
    assert panel == {"cp_dispatch ring": [(8192, 0.5), (16384, 0.75), (32768, 0.0)]}
    (panel,) = plot.curves(ROWS, "ranks").values()
    assert panel == {"cp_dispatch ring": [(2, 0.6), (4, 0.5)]}
    # Other shapes get other panels.
    others = [row(kept=0.5, heads=[8, 8]), row(kept=0.5, heads=[8, 8], ranks=8)]
    assert len(plot.curves(ROWS + others, "ranks")) == 2
    with pytest.raises(SystemExit, match="nothing to plot"):
        plot.draw(ROWS[4:5], pathlib.Path("unused.png"))


def test_one_length_is_drawn_as_points(tmp_path):
    pytest.importorskip("matplotlib")
    assert load("bench_plot").draw(ROWS[2:5], tmp_path / "points.png") == 1


def test_results_are_kept(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rows = load("bench_record")
    monkeypatch.setitem(sys.modules, "bench_plot", load("bench_plot"))
    record = {"card": "card", "torch": "2", "cuda": None, "date": "today", "rows": ROWS}
    rows.keep(record, tmp_path / "x" / "results.json", plot=True)
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {"results.json", "results.csv", "results.png"}
    with open(tmp_path / "x" / "results.csv", newline="") as file:
        kept = list(csv.DictReader(file))
    assert len(kept) == len(ROWS)
    assert kept[2]["error"] == "out of memory" and kept[2]["kept"] == ""
    assert kept[1] | {"kept": "0.75", "heads": "32/8", "card": "card"} == kept[1]


def test_a_refused_call_has_no_schedule(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    ways, query = load("bench_ways"), torch.ones(1, 2, 4, 8)
    monkeypatch.setattr(ways.cp_dispatch, "explain", lambda *args, **kwargs: Plan("refused"))
    problem = argparse.Namespace(args=argparse.Namespace(causal=True), mask=None)
    assert ways.planned(problem, [query] * 3, "fwd") == {}


def test_documents_are_a_mask(monkeypatch):
    """Every row sees the keys of its document up to its own position, and these are counted."""
    monkeypatch.syspath_prepend(TOOLS)
    args = argparse.Namespace(
        batch=2, head_dim=8, causal=False, documents=6, dtype="bfloat16"
    )  # fmt: skip
    mesh = argparse.Namespace(size=lambda: 2, device_type="cpu")
    problem = load("bench_ways").Problem(args, 16, (4, 2), mesh)
    lengths, start = problem.documents, 0
    assert sum(lengths) == 32 and len(lengths) > 2
    want = torch.zeros(32, 32, dtype=torch.bool)
    for length in lengths:
        want[start : start + length, start : start + length] = True
        start += length
    assert torch.equal(problem.mask, want.tril())
    assert problem.flops(False) == 4 * 2 * 4 * 8 * sum(n * n for n in lengths) / 2


def test_failures_are_rows():
    rows = load("bench_record")
    assert rows.failure(torch.OutOfMemoryError("CUDA out of memory. Tried")) == {
        "error": "out of memory"
    }
    assert rows.failure(RuntimeError("a\n  b")) == {"error": "a b"}


def test_predicted_table():
    """It lists every schedule that fits, with the best one in bold. With more ranks than heads
    there is no ulysses."""
    predict = load("predict_table")
    predict.RANKS = (8, 64)
    args = argparse.Namespace(backend="flash", heads=(32, 8), head_dim=128, tokens=[1024])
    few, many = predict.table(constants(), args).splitlines()[2:4]
    assert few.startswith("| 1,024 | 8 |") and few.count("**") == 2 and "not fit" not in few
    assert many.split("|")[5].strip() == "does not fit" and many.count("%") == 3
    predict.MEMORY = 0
    assert not predict.row(constants(), 1024, 8, args)


def test_planner_check():
    """What auto selects against the best, and predictions against measured times."""
    check = load("planner_check")
    known = constants(push=True)
    shape = {"host_seconds": 0.0, "mode": "fwd"}
    order = row("cp_dispatch ring, head-tail", **shape)
    predicted = {
        candidate.op_schedule: prediction.forward
        for candidate, prediction in check.alternatives(check.plan_of(order), "cuda", False, known)
    }
    least = min(predicted, key=predicted.__getitem__)
    other = next(name for name in predicted if name != least)
    rows = [
        order | {"schedule": least, "seconds": predicted[least] * 1.1},
        order | {"schedule": other, "seconds": predicted[least], "host_seconds": predicted[least]},
        row("cp_dispatch auto, head-tail", **shape, schedule=other, seconds=1e-9),
        row("cp_dispatch ulysses, head-tail", **shape, schedule="ulysses", error="out of memory"),
        row("stock DTensor", **shape, seconds=0.5),
    ]
    (point,) = check.points(rows, known)
    assert point.chosen == least and point.best == other and point.waiting
    assert point.loss == pytest.approx(1.1)
    assert point.errors[least] == pytest.approx(1 / 1.1 - 1) and set(point.errors) == {least, other}
    assert "10% slower" in check.show(point)
    words = check.summary([point])
    assert "at 0 of 1 points (0%)" in words and "1 of 1 that it takes" in words
    assert check.points(rows[:1], known) == [] and check.summary([]) == "no points"
