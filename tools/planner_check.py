"""Compare the schedules that ``"auto"`` chooses from a GPU's constants with measured times.

    python tools/planner_check.py nvidia-h200 tools/results/2026-11-30-2xh200-grid-*.json

The files are those of ``tools/bench.py --out``. A point is a kernel, a shape, an order and a
direction for which several schedules were measured. The planner computes what ``"auto"`` chooses
there, which is the same on every machine, and predicts the time of each schedule. If a schedule was
measured twice, once because ``"auto"`` chose it, the mean counts, since the same code ran.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import NamedTuple

import torch

from cp_dispatch import HeadTail
from cp_dispatch.costs import Constants, constants_of
from cp_dispatch.plan import Plan
from cp_dispatch.planning.planner import PAIRS, alternatives, choose

GOOD_CHOICE, GOOD_PREDICTION = 1.05, 0.2


class Point(NamedTuple):
    """``seconds`` and ``predicted`` by schedule.

    ``waiting``: the host took nearly all of the time of the best schedule, so the result would
    differ with a faster or slower host.
    """

    shape: tuple
    chosen: str
    seconds: dict[str, float]
    predicted: dict[str, float]
    waiting: bool

    @property
    def best(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def loss(self) -> float:
        """The chosen schedule's time divided by the best one's."""
        return self.seconds[self.chosen] / self.seconds[self.best]

    @property
    def errors(self) -> dict[str, float]:
        return {n: x / self.seconds[n] - 1 for n, x in self.predicted.items() if n in self.seconds}


def plan_of(row: dict) -> Plan:
    """The call of a row, as a ring."""
    length, (heads, key_heads) = row["tokens_per_rank"] * row["ranks"], row["heads"]
    permuted = row["causal"] and "head-tail" in row["implementation"]
    return Plan(
        "cp_dispatch",
        backend=row["backend"],
        schedule="ring",
        layout=HeadTail(length, row["ranks"]) if permuted else None,
        is_causal=row["causal"],
        mesh_dims=(0,),
        ring_shape=(row["ranks"],),
        query_length=length,
        key_length=length,
        shards=tuple(
            (row["batch"], h, row["tokens_per_rank"], row["head_dim"])
            for h in (heads, key_heads, key_heads)
        ),
        dtype=getattr(torch, row["dtype"]),
    )


def points(rows: list[dict], constants: Constants) -> list[Point]:
    """The points where both the schedule that ``auto`` chooses and another one were measured."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        # The schedule of auto's own rows is not known for certain.
        if row.get("schedule") and "seconds" in row and " auto" not in row["implementation"]:
            order = "head-tail" if "head-tail" in row["implementation"] else "natural"
            order = f"causal, {order}" if row["causal"] else "full"
            heads = "/".join(map(str, row["heads"]))
            shape = row["backend"], row["mode"], row["tokens_per_rank"], heads, order
            groups.setdefault(shape, []).append(row)
    found = []
    for shape, members in groups.items():
        training, plan = members[0]["mode"] != "fwd", plan_of(members[0])
        chosen = choose(plan, "auto", "cuda", False, False, constants, training).op_schedule
        times: dict[str, list[float]] = {}
        for row in members:
            times.setdefault(row["schedule"], []).append(row["seconds"])
        seconds = {name: statistics.mean(x) for name, x in times.items()}
        if training:
            _add_two(seconds, groups.get((shape[0], "fwd", *shape[2:]), []))
        if chosen not in seconds or len(seconds) < 2:
            continue
        predicted = {
            candidate.op_schedule: prediction.forward + training * prediction.backward
            for candidate, prediction in alternatives(plan, "cuda", False, constants)
        }
        fastest = min(members, key=lambda row: row["seconds"])
        waiting = fastest["host_seconds"] > 0.9 * fastest["seconds"]
        found.append(Point(shape, chosen, seconds, predicted, waiting))
    return found


def _add_two(seconds: dict[str, float], forwards: list[dict]) -> None:
    """Add the time of the forward of one schedule with the backward of another, from the
    measurements of both."""
    alone = {row["schedule"]: row["seconds"] for row in forwards}
    for first, second in PAIRS:
        if first in alone and second in alone and second in seconds:
            seconds[f"{first}+{second}"] = alone[first] + seconds[second] - alone[second]


def show(point: Point) -> str:
    backend, mode, tokens, heads, order = point.shape
    cells = [
        f"{name} {seconds * 1e3:.2f}"
        + (f" ({point.errors[name]:+.0%})" if name in point.errors else "")
        for name, seconds in sorted(point.seconds.items(), key=lambda x: x[1])
    ]
    mark = "" if point.loss <= GOOD_CHOICE else f"  <- {point.loss - 1:.0%} slower than the best"
    return (
        f"{backend:9s} {mode:8s} {tokens:7d} {heads:7s} {order:18s} takes {point.chosen}: "
        f"{', '.join(cells)}{mark}"
    )


def summary(found: list[Point]) -> str:
    if not found:
        return "no points"
    choices = [point.loss <= GOOD_CHOICE for point in found]
    errors = [abs(error) <= GOOD_PREDICTION for point in found for error in point.errors.values()]
    own = [
        abs(point.errors[point.chosen]) <= GOOD_PREDICTION
        for point in found
        if point.chosen in point.errors
    ]
    return (
        f"auto within {GOOD_CHOICE - 1:.0%} of the best schedule at {sum(choices)} of "
        f"{len(choices)} points ({statistics.mean(choices):.0%}); predicted within "
        f"{GOOD_PREDICTION:.0%}: {sum(own)} of {len(own)} that it takes, {sum(errors)} of "
        f"{len(errors)} in all"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", help="name of a file in cp_dispatch/costs, or a path to one")
    parser.add_argument("results", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    path = pathlib.Path(args.kind)
    constants = Constants.from_json(path.read_text()) if path.is_file() else constants_of(args.kind)
    if constants is None:
        parser.error(f"no constants of {args.kind}; run `python -m cp_dispatch calibrate`")
    rows = [row for path in args.results for row in json.loads(path.read_text())["rows"]]
    found = points(rows, constants)
    print("\n".join(map(show, sorted(found, key=lambda point: str(point.shape)))))
    waiting = [point for point in found if point.waiting]
    print(f"bound by the host: {summary(waiting)}")
    print(f"bound by the GPUs: {summary([point for point in found if not point.waiting])}")
    print(f"all: {summary(found)}")


if __name__ == "__main__":
    main()
