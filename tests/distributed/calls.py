"""Calls beyond plain attention, by name: the same ones for ranks in threads and for GPUs."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention import sdpa_kernel

import cp_dispatch
from cp_dispatch.schedules import head_costs
from tests.distributed.reference import (
    KERNELS,
    Mask,
    Problem,
    check,
    exact,
    one_device,
    rounding,
    yardstick,
)
from tests.distributed.sharded import distributed_inputs, run_sharded

# The placements of a mask; None is a plain tensor.
PLAIN, WHOLE = None, (Replicate(),)

S0, S1, S2, S3, R = Shard(0), Shard(1), Shard(2), Shard(3), Replicate()


@dataclass(frozen=True)
class Case:
    """A problem and how its tensors are placed; ``how`` are arguments of ``run_sharded``.

    ``mesh`` None is one dim over all ranks, else the mesh's shape.
    """

    problem: Problem
    placements: tuple | None = None
    how: dict = field(default_factory=dict)
    mesh: tuple[int, ...] | None = None


@functools.lru_cache(maxsize=4)
def _judged(problem: Problem, device: torch.device):
    tensors = problem.tensors(device)
    return tensors, exact(problem, tensors)


@functools.lru_cache(maxsize=4)
def _yardstick(problem: Problem, device: torch.device, kernel: str):
    return yardstick(problem, _judged(problem, device)[0], kernel)


def run(case: Case, mesh, device: torch.device):
    """``(results, backend)``, or ``(None, the refusing plan)``."""
    problem = case.problem
    tensors = problem.tensors(device)
    where = {k: v for k, v in case.how.items() if k.endswith("_placements")}
    inputs, masks, _ = distributed_inputs(problem, tensors, mesh, case.placements, **where)
    plan = cp_dispatch.explain(
        *inputs, *masks,
        is_causal=problem.causal, scale=problem.scale, enable_gqa=problem.grouped,
    )  # fmt: skip
    if plan.handler == "refused":
        with pytest.raises(cp_dispatch.ContextParallelError):
            run_sharded(problem, tensors, mesh, case.placements, **case.how)
        return None, plan
    return run_sharded(problem, tensors, mesh, case.placements, **case.how), plan.backend


def judge(case: Case, device: torch.device, kernel: str | None, results, backend) -> None:
    """Check that ``results`` are as exact as their backend on one device. A call that it refuses
    may be refused."""
    tensors, want = _judged(case.problem, device)
    if results is None:
        assert kernel is not None, backend
        with pytest.raises(RuntimeError):
            one_device(case.problem, tensors, kernel)
        print(f"both refuse: {backend}")
        return
    assert kernel in (None, backend), backend
    single = _yardstick(case.problem, device, backend or "math")
    try:
        floors, few = rounding(case.problem, tensors)
        check(results, want, single, floors=floors, few=few)
    except AssertionError as error:
        raise AssertionError(f"{backend}: {error}") from None


def only(kernel: str | None):
    """Select one kernel, or torch's choice for None. The switches belong to the process, not to a
    thread."""
    return sdpa_kernel(KERNELS[kernel]) if kernel else contextlib.nullcontext()


def masked(problem: Problem, placed=PLAIN, placements=None, mesh=None, **mask) -> Case:
    return Case(replace(problem, mask=Mask(**mask)), placements, {"mask_placements": placed}, mesh)


def masks(problem: Problem) -> dict[str, Case]:
    """Masks of every shape that broadcasts, boolean and bias, in every placement."""
    cases = {}
    for label, dtype in (("bool", torch.bool), ("bias", None)):
        add = functools.partial(masked, problem, dtype=dtype)
        for shape in ("qk", "1k", "q1", "bhqk", "b1qk", "1hqk", "11qk", "b11k", "bh1k", "b1q1",
                      "1111", "hqk"):  # fmt: skip
            cases[f"{label} {shape}"] = add(shape=shape)
        cases[f"{label} qk whole"] = add(WHOLE, shape="qk")
        cases[f"{label} qk on rows"] = add((S0,), shape="qk")
        cases[f"{label} qk on columns"] = add((S1,), shape="qk")
        cases[f"{label} bhqk on rows"] = add((S2,), shape="bhqk")
        cases[f"{label} bhqk on columns"] = add((S3,), shape="bhqk")
        cases[f"{label} bhqk on batch"] = add((S0,), shape="bhqk")
        cases[f"{label} bhqk on heads"] = add((S1,), shape="bhqk")
        cases[f"{label} b11k on columns"] = add((S3,), shape="b11k")
        for placed in (PLAIN, WHOLE):
            where = "plain" if placed is None else "whole"
            cases[f"{label} expanded {where}"] = add(placed, shape="bhqk", expanded=True)
        for shape in ("qk", "b1qk", "b11k"):
            cases[f"{label} blind {shape}"] = add(shape=shape, blind=True)
    return cases


def uneven_masks(problem: Problem) -> dict[str, Case]:
    """Masks with numbers of columns that suit no kernel."""
    cases = {}
    for label, dtype in (("bool", torch.bool), ("bias", None)):
        for length, key_length in ((250, 250), (131, 203), (64, 37), (5, 70), (1, 33)):
            other = replace(problem, length=length, key_length=key_length)
            name = f"{label} {length} x {key_length}"
            cases[name] = masked(other, shape="b1qk", dtype=dtype)
            cases[f"{name} on rows"] = masked(other, (S2,), shape="11qk", dtype=dtype)
    return cases


def bias_gradients(problem: Problem) -> dict[str, Case]:
    """The gradient of a bias, in the bias's own placement."""
    cases = {}
    for shape, placed in (
        ("qk", WHOLE), ("qk", (S0,)), ("qk", (S1,)), ("1hqk", WHOLE), ("1hqk", (S2,)),
        ("1hqk", (S1,)), ("bhqk", (S2,)), ("b1qk", WHOLE), ("b11k", WHOLE), ("b11k", (S3,)),
        ("1hq1", WHOLE), ("1111", WHOLE), ("hqk", WHOLE),
    ):  # fmt: skip
        where = "whole" if placed == WHOLE else f"shard {placed[0].dim}"
        cases[f"bias gradient {shape} {where}"] = masked(
            problem, placed, shape=shape, dtype=None, needs_grad=True
        )
    cases["bias gradient blind"] = masked(
        problem, WHOLE, shape="b1qk", dtype=None, needs_grad=True, blind=True
    )
    cases["bias gradient decode"] = masked(
        replace(problem, length=32, key_length=problem.length),
        WHOLE,
        (R,),
        shape="1hqk",
        dtype=None,
        needs_grad=True,
    )
    cases["bias gradient decode"].how["key_placements"] = (S2,)
    cases["bias gradient replicated keys"] = masked(
        problem, WHOLE, (S2,), shape="1hqk", dtype=None, needs_grad=True
    )
    cases["bias gradient replicated keys"].how["key_placements"] = (R,)
    return cases


def one_sided(problem: Problem) -> dict[str, Case]:
    """Decoding with a replicated query, and replicated keys."""
    cases = {}
    long = problem.length
    for causal in (False, True):
        label = "causal" if causal else "full"
        for rows in (1, 7, long):
            other = replace(problem, causal=causal, length=rows, key_length=long)
            cases[f"decode {label} {rows} rows"] = Case(other, (R,), {"key_placements": (S2,)})
        grouped = replace(problem, causal=causal, key_heads=2, length=5, key_length=long - 3)
        cases[f"decode {label} gqa uneven"] = Case(grouped, (R,), {"key_placements": (S2,)})
        few = replace(problem, causal=causal, length=3, key_length=1)
        cases[f"decode {label} one key"] = Case(few, (R,), {"key_placements": (S2,)})
        for name, other in {
            "": replace(problem, causal=causal),
            " gqa uneven": replace(grouped, length=long - 5),
            " cross": replace(problem, causal=causal, length=long // 2, key_length=long),
            " long": replace(problem, causal=causal, length=long, key_length=long // 2),
        }.items():
            cases[f"replicated keys {label}{name}"] = Case(other, (S2,), {"key_placements": (R,)})
        both = {"key_placements": (R,), "value_placements": (S2,)}
        cases[f"key whole, value sharded {label}"] = Case(
            replace(problem, causal=causal), (S2,), both
        )
        both = {"key_placements": (S2,), "value_placements": (R,)}
        cases[f"key sharded, value whole {label}"] = Case(
            replace(problem, causal=causal), (S2,), both
        )
        cases[f"decode {label} key sharded, value whole"] = Case(
            replace(problem, causal=causal, length=5, key_length=long), (R,), both
        )
    short = replace(problem, length=5, key_length=long)
    for placed, where in ((PLAIN, "plain"), (WHOLE, "whole"), ((S3,), "on columns")):
        cases[f"decode mask {where}"] = masked(short, placed, (R,), shape="b1qk")
        cases[f"decode mask {where}"].how["key_placements"] = (S2,)
        cases[f"replicated keys mask {where}"] = masked(problem, placed, (S2,), shape="b1qk")
        cases[f"replicated keys mask {where}"].how["key_placements"] = (R,)
    cases["decode blind"] = masked(short, PLAIN, (R,), shape="b1qk", blind=True)
    cases["decode blind"].how["key_placements"] = (S2,)
    return cases


def two_dims(problem: Problem, shape=(2, 2)) -> dict[str, Case]:
    """Meshes of two dims; the sequence is over both only with real processes."""
    cases = {}
    other = replace(problem, length=problem.length - 3)
    for causal in (False, True):
        label = "causal" if causal else "full"
        for name, problem_, q, k in (
            ("sequence on both", other, (S2, S2), (S2, S2)),
            ("sequence on both gqa", replace(other, key_heads=2), (S2, S2), (S2, S2)),
            ("sequence on both, cross", replace(other, key_length=97), (S2, S2), (S2, S2)),
            ("sequence on both, replicated keys", other, (S2, S2), (R, R)),
            ("sequence on both, decode", replace(other, length=3), (R, R), (S2, S2)),
            ("sequence on both, 3 rows", replace(other, length=3), (S2, S2), (S2, S2)),
            ("batch x decode", replace(other, length=3), (S0, R), (S0, S2)),
            ("heads x decode", replace(other, length=3), (R, S1), (S2, S1)),
            ("batch x replicated keys", other, (S0, S2), (R, R)),
        ):
            cases[f"{name} {label}"] = Case(
                replace(problem_, causal=causal), q, {"key_placements": k}, shape
            )
    for name, q, placed in (
        ("batch x sequence", (S0, S2), (S0, R)),
        ("sequence x heads", (S2, S1), (R, S1)),
        ("heads x sequence", (S1, S2), (R, S3)),
        ("batch x sequence whole", (S0, S2), (R, R)),
        ("sequence on both", (S2, S2), (R, R)),
        ("sequence on both on rows", (S2, S2), (S2, S2)),
    ):
        for kind, fields in (
            ("mask", {}),
            ("bias gradient", {"dtype": None, "needs_grad": True}),
        ):
            cases[f"{kind} {name}"] = masked(other, placed, q, shape, shape="bhqk", **fields)
    cases["bias gradient batch x sequence, broadcast"] = masked(
        other, (R, R), (S0, S2), shape, shape="1hqk", dtype=None, needs_grad=True
    )
    return cases


def ranks_of_tensors(problem: Problem) -> dict[str, Case]:
    """2-D, 3-D, 5-D and 6-D inputs, also with masks."""
    cases = {}
    for name, lead, shapes in (
        ("2-D", (), ("qk", "1k")),
        ("3-D", (3,), ("qk", "bqk", "1qk", "b1k")),
        ("5-D", (2, 3, 4), ("qk", "1hqk", "abhqk", "ab11k", "111qk")),
        ("6-D", (2, 1, 2, 3), ("qk", "abchqk")),
    ):
        other = replace(problem, lead=lead)
        for causal in (False, True):
            label = "causal" if causal else "full"
            cases[f"{name} {label}"] = Case(replace(other, causal=causal))
        sequence = Shard(len(lead))
        cases[f"{name} replicated keys"] = Case(other, (sequence,), {"key_placements": (R,)})
        cases[f"{name} decode"] = Case(
            replace(other, length=1), (R,), {"key_placements": (sequence,)}
        )
        for shape in shapes:
            cases[f"{name} mask {shape}"] = masked(other, shape=shape)
            cases[f"{name} bias {shape}"] = masked(other, WHOLE, shape=shape, dtype=None)
    return cases


def extremes(problem: Problem) -> dict[str, Case]:
    """Extreme sizes and numbers."""
    cases = {}
    for causal in (False, True):
        label = "causal" if causal else "full"
        base = replace(problem, causal=causal)
        cases[f"length 1 {label}"] = Case(replace(base, length=1, heads=64))
        cases[f"3 rows {label}"] = Case(replace(base, length=3, heads=64))
        cases[f"1 x 50 {label}"] = Case(replace(base, length=1, key_length=50, heads=64))
        cases[f"50 x 1 {label}"] = Case(replace(base, length=50, key_length=1))
        cases[f"zero batch {label}"] = Case(replace(base, batch=0))
        for amplitude in (30.0, 1e3):
            cases[f"logits x {amplitude:g} {label}"] = Case(replace(base, amplitude=amplitude))
    cases["zero batch mask"] = masked(replace(problem, batch=0), shape="b1qk")
    cases["zero batch bias gradient"] = masked(
        replace(problem, batch=0), WHOLE, shape="11qk", dtype=None, needs_grad=True
    )
    cases["zero batch decode"] = Case(replace(problem, batch=0), (R,), {"key_placements": (S2,)})
    return cases


def in_stages(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """Heads are exchanged in ``stages`` stages, if the number of heads allows it, however short the
    shards."""
    monkeypatch.setattr(head_costs, "_wanted", lambda *_: stages)
    monkeypatch.setattr(head_costs, "deal", head_costs.deal.__wrapped__)  # the uncached function
