"""The calibration command with small sizes, on gloo processes, and on GPUs if there are any."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cp_dispatch import HeadTail
from cp_dispatch.costs import Constants, calibrate, predict
from cp_dispatch.costs.constants import KERNELS, MOVES
from cp_dispatch.planning.settle import settle
from cp_dispatch.schedules import CHOICES
from tests.distributed.spawn import Env, run_asked
from tests.planning.test_settle import ring


def quick(env: Env) -> None:
    """Every number that a prediction needs is in the file, and equal in all ranks' files."""
    said = []
    constants = calibrate.measure(env.device, quick=True, say=said.append)
    assert Constants.from_json(constants.to_json()).to_json() == constants.to_json()
    assert any("kernels of" in words for words in said)
    moves = set(constants.moves)
    assert moves == set(MOVES) or moves == set(MOVES) - {"push"}
    assert constants.about["ranks"] == env.world_size and constants.slowdown >= 1
    assert set(constants.floors) == set(constants.kernels)
    for floors in constants.floors.values():
        assert {"ring", "mirrored_ring", "gather", "mirrored_gather", "ulysses"} <= set(floors)
        for ways in floors.values():
            assert set(ways) == {"forward", "backward"} and all(ways.values())
    for backend, dims in constants.kernels.items():
        (dim,) = dims
        assert set(dims[dim]) == set(calibrate.MANY_AND_FEW)
        assert all(set(ways) == set(KERNELS) for ways in dims[dim].values())
        shards = tuple((1, heads, 64, dim) for heads in (32, 8, 8))
        for layout in (None, HeadTail(64 * env.world_size, env.world_size)):
            base = ring(tokens=64, ranks=env.world_size, backend=backend, shards=shards)
            base = dataclasses.replace(base, layout=layout)
            for wish in CHOICES:
                prediction = predict(settle(base, wish, env.device.type), constants)
                assert all(0 < seconds < 60 for seconds in prediction), (wish, prediction)
    known = dataclasses.replace(constants, floors={}, slowdown=7.0)
    host = calibrate.measure_host(env.device, known, quick=True)
    assert host.slowdown == 7.0 and host.kernels == known.kernels
    assert host.about["floors"].startswith("2 ranks, torch") and known.about == constants.about
    assert {b: set(floors) for b, floors in host.floors.items()} == {
        b: set(floors) for b, floors in constants.floors.items()
    }


CASES = {"quick": quick}


@pytest.fixture(scope="module", params=[2])
def outcomes(request) -> dict[str, str]:
    backend = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    return run_asked(request, request.param, backend, 120)


@pytest.mark.parametrize("case", CASES)
def test_calibrate(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
