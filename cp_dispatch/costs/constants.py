"""``Constants``: the measured constants of one kind of GPU, and the files that hold them."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import re
import statistics
from dataclasses import dataclass

from cp_dispatch.errors import ContextParallelError

FOLDER = pathlib.Path(__file__).parent

#: What moves data, over the bytes that reach a rank from others: an all-gather, an all-to-all, a
#: shift to the next rank (NCCL), and copies into the memory of peers (copy engines).
MOVES = ("all_gather", "all_to_all", "shift", "push")
#: What kernels are measured at; "causal" is a square with a diagonal.
KERNELS = ("forward", "backward", "forward causal", "backward causal")


class Curve:
    """Seconds as a function of some amount: a power law between measured points, constant below the
    first one, proportional beyond the last one."""

    def __init__(self, points):
        self.points = tuple(sorted((float(x), float(y)) for x, y in points))
        if not self.points or any(x <= 0 or not 0 < y < math.inf for x, y in self.points):
            raise ValueError(f"a curve needs points above 0, got {points}")
        self._amounts = [x for x, _ in self.points]

    def __call__(self, amount: float) -> float:
        if amount <= 0:
            return 0.0
        at = bisect.bisect_left(self._amounts, amount)
        if at == 0:
            return self.points[0][1]
        x0, y0 = self.points[at - 1]
        if at == len(self.points):
            return y0 * amount / x0
        x1, y1 = self.points[at]
        share = math.log(amount / x0) / math.log(x1 / x0)
        return y0 * (y1 / y0) ** share

    def __eq__(self, other) -> bool:
        return isinstance(other, Curve) and self.points == other.points


@dataclass(frozen=True)
class Constants:
    """What ``calibrate`` found.

    Attributes:
        device: ``torch.cuda.get_device_name()``.
        about: torch, CUDA, date and ranks of the run.
        kernels: backend -> head dim -> query heads of a call -> name in ``KERNELS`` -> seconds over
            FLOPs (2 per multiply-add, half of them for causal; 2.5 times the forward's for a
            backward). Few heads have fewer blocks of rows to fill a GPU with.
        moves: name in ``MOVES`` -> seconds over bytes that reach a rank; "push" may be missing.
        copy: seconds over bytes copied by a kernel.
        merge: seconds over bytes of a 16-bit output merged with another.
        floors: backend -> schedule -> direction -> ``((ranks, seconds), ...)`` of a call with next
            to no work: the host's time and all latencies.
        slowdown: of a kernel beside a collective of NCCL.
    """

    device: str
    about: dict
    kernels: dict[str, dict[int, dict[int, dict[str, Curve]]]]
    moves: dict[str, Curve]
    copy: Curve
    merge: Curve
    floors: dict[str, dict[str, dict[str, tuple[tuple[int, float], ...]]]]
    slowdown: float

    def kernel(self, backend: str, dim: int, name: str, heads: float, flops: float) -> float:
        """Seconds of one call. Between measured numbers of heads it is interpolated linearly in the
        number of heads' blocks per processor of the GPU."""
        by_heads = self.kernels[backend][dim]
        few = max((n for n in by_heads if n <= heads), default=min(by_heads))
        many = min((n for n in by_heads if n >= heads), default=max(by_heads))
        seconds = by_heads[many][name](flops)
        if few < many:
            weight = (1 / heads - 1 / many) / (1 / few - 1 / many)
            seconds += weight * (by_heads[few][name](flops) - seconds)
        if flops <= by_heads[few][name].points[-1][0]:
            return seconds
        # Longer calls than were measured of so few: a GPU's clocks go down in long ones.
        return max(seconds, by_heads[max(by_heads)][name](flops))

    def floor(self, schedule: str, direction: str, ranks: int) -> float:
        """The median over backends, which differ less than repeated measurements do. For each
        backend: the line through the two points with the most ranks, never a falling one, or the
        only point."""
        found = [
            _line(sorted(schedules[schedule][direction]), ranks)
            for schedules in self.floors.values()
            if schedules.get(schedule, {}).get(direction)
        ]
        return statistics.median(found) if found else 0.0

    def to_json(self) -> str:
        def plain(x):
            if isinstance(x, Curve):
                return [[amount, float(f"{seconds:.4g}")] for amount, seconds in x.points]
            if isinstance(x, dict):
                return {str(k): plain(v) for k, v in x.items()}
            return x

        fields = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        text = json.dumps(fields, indent=1)
        # One line for a point.
        return re.sub(r"\[\s+([-\d.e+]+),\s+([-\d.e+]+)\s+\]", r"[\1, \2]", text) + "\n"

    @classmethod
    def from_json(cls, text: str, name: object = "this") -> Constants:
        """Raises ContextParallelError for anything that ``to_json`` does not write; ``name`` is the
        file's, for that."""
        try:
            fields = json.loads(text)
            return cls(
                device=fields["device"],
                about=fields["about"],
                kernels={
                    backend: {
                        int(dim): {
                            int(heads): {way: Curve(ways[way]) for way in KERNELS}
                            for heads, ways in by_heads.items()
                        }
                        for dim, by_heads in dims.items()
                    }
                    for backend, dims in fields["kernels"].items()
                },
                moves={name: Curve(points) for name, points in fields["moves"].items()},
                copy=Curve(fields["copy"]),
                merge=Curve(fields["merge"]),
                floors={
                    backend: {
                        schedule: {
                            way: tuple((int(r), float(s)) for r, s in points)
                            for way, points in ways.items()
                        }
                        for schedule, ways in schedules.items()
                    }
                    for backend, schedules in fields["floors"].items()
                },
                slowdown=float(fields["slowdown"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ContextParallelError(
                f"{name} is not a file of constants from `python -m cp_dispatch calibrate`, "
                f"{error!r}; measure them again, or remove it"
            ) from error


def _line(points: list[tuple[int, float]], ranks: int) -> float:
    (r1, s1), (r0, s0) = points[-1], points[-2] if len(points) > 1 else points[-1]
    slope = max(0.0, (s1 - s0) / (r1 - r0)) if r1 != r0 else 0.0
    return s1 + slope * (ranks - r1) if ranks >= r0 else s0


def kind_of(device_name: str) -> str:
    """The name of the file for a kind of GPU, ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


#: Kinds that count as fast as a measured one until they are measured. For 32,768 causal tokens
#: one H100 of 80 GB took 14.4 and 55.3 ms (cuDNN, forward and with backward), 25.3, 94.1 (flash),
#: one H200 15.1, 57.2, 25.6 and 94.5 (``tools/results/2026-11-28-4xh100-causal-8k-5steps.json``
#: and ``2026-11-28-4xh200-causal-8k-20steps.json``).
SIBLINGS = {"nvidia-h100-80gb-hbm3": "nvidia-h200"}


@functools.cache
def constants_of(kind: str) -> Constants | None:
    """The constants of a kind of GPU, or of one that is as fast; None if neither was measured."""
    for name in (kind, SIBLINGS.get(kind, kind)):
        path = FOLDER / f"{name}.json"
        if path.is_file():
            return Constants.from_json(path.read_text(), path)
    return None


@functools.cache
def digest_of(kind: str) -> str | None:
    """A short digest of the constants of a kind, because every host has its own file."""
    constants = constants_of(kind)
    if constants is None:
        return None
    return hashlib.sha256(constants.to_json().encode()).hexdigest()[:8]
