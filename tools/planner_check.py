"""Whether ``auto`` took the right schedule, and how far predictions were off, in kept results.

    python tools/planner_check.py tools/results/2026-11-28-2xh200-grid-*.json

The files are those of ``tools/bench.py --out``, made where the kind of GPU had constants. A
point is a kernel, a shape, an order and a direction; ``auto`` stands beside the schedules that it
chose from. Of a schedule that was measured twice, once because ``auto`` took it, the mean counts:
the same code ran.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import NamedTuple

GOOD_CHOICE, GOOD_PREDICTION = 1.05, 0.2


class Point(NamedTuple):
    """``seconds`` and ``predicted`` by schedule."""

    shape: tuple
    chosen: str
    seconds: dict[str, float]
    predicted: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def loss(self) -> float:
        """The chosen schedule's time over the best one's."""
        return self.seconds[self.chosen] / self.seconds[self.best]

    @property
    def errors(self) -> dict[str, float]:
        return {name: x / self.seconds[name] - 1 for name, x in self.predicted.items()}


def points(rows: list[dict]) -> list[Point]:
    """The points in which ``auto`` was measured beside something else."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row.get("schedule") and "seconds" in row:
            order = "head-tail" if "head-tail" in row["implementation"] else "natural"
            order = f"causal, {order}" if row["causal"] else "full"
            heads = "/".join(map(str, row["heads"]))
            shape = row["backend"], row["mode"], row["tokens_per_rank"], heads, order
            groups.setdefault(shape, []).append(row)
    found = []
    for shape, members in groups.items():
        chosen = {row["schedule"] for row in members if " auto" in row["implementation"]}
        times: dict[str, list[float]] = {}
        for row in members:
            times.setdefault(row["schedule"], []).append(row["seconds"])
        if len(chosen) == 1 and len(times) > 1:
            predicted = {r["schedule"]: r["predicted"] for r in members if r.get("predicted")}
            means = {name: statistics.mean(x) for name, x in times.items()}
            found.append(Point(shape, chosen.pop(), means, predicted))
    return found


def show(point: Point) -> str:
    backend, mode, tokens, heads, order = point.shape
    cells = [
        f"{name} {seconds * 1e3:.2f}"
        + (f" ({point.errors[name]:+.0%})" if name in point.errors else "")
        for name, seconds in sorted(point.seconds.items(), key=lambda x: x[1])
    ]
    mark = "" if point.loss <= GOOD_CHOICE else f"  <- {point.loss - 1:.0%} slower than the best"
    return (
        f"{backend:9s} {mode:8s} {tokens:7d} {heads:7s} {order:18s} took {point.chosen}: "
        f"{', '.join(cells)}{mark}"
    )


def summary(found: list[Point]) -> str:
    choices = [point.loss <= GOOD_CHOICE for point in found]
    errors = [abs(error) <= GOOD_PREDICTION for point in found for error in point.errors.values()]
    own = [
        abs(point.errors[point.chosen]) <= GOOD_PREDICTION
        for point in found
        if point.chosen in point.errors
    ]
    if not errors or not own:
        return f"{len(found)} points, without predictions: the bench ran without constants"
    return (
        f"auto within {GOOD_CHOICE - 1:.0%} of the best schedule in {sum(choices)} of "
        f"{len(choices)} points ({statistics.mean(choices):.0%}); predicted within "
        f"{GOOD_PREDICTION:.0%}: {sum(own)} of {len(own)} chosen ({statistics.mean(own):.0%}), "
        f"{sum(errors)} of {len(errors)} of all ({statistics.mean(errors):.0%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="+")
    rows = [x for path in parser.parse_args().results for x in json.loads(path.read_text())["rows"]]
    found = points(rows)
    print("\n".join(map(show, sorted(found, key=lambda point: str(point.shape)))))
    print(summary(found))


if __name__ == "__main__":
    main()
