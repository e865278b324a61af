"""``planning/decide.py`` logs each distinct plan once; TORCH_LOGS=cp_dispatch turns it on."""

import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch import enabled
from cp_dispatch.planning import decide
from tests.ranks import one_rank


@pytest.fixture
def mesh():
    decide._told.clear()
    decide._plans.clear()
    with one_rank() as mesh:
        yield mesh
    decide._told.clear()


def attend(mesh, length, compiled=False, dynamic=None, **options):
    x = DTensor.from_local(torch.randn(1, 2, length, 4), mesh, [Shard(2)])
    function = F.scaled_dot_product_attention
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)
    return function(x, x, x, **options)


def test_each_plan_is_told_once(mesh, caplog):
    with caplog.at_level(logging.INFO, "cp_dispatch.decide"), enabled():
        for told, options in enumerate(({}, {"is_causal": True}), 1):
            for compiled in (False, False, True):
                attend(mesh, 14, compiled, **options)
                assert len(caplog.records) == told
    text = caplog.records[1].getMessage()
    assert "handled by cp_dispatch" in text and "(1, 2, 14, 4)" in text and "causal=True" in text


def test_plans_that_were_told_are_forgotten(mesh, caplog, monkeypatch):
    monkeypatch.setattr(decide, "_MAX_PLANS", 2)
    with caplog.at_level(logging.INFO, "cp_dispatch.decide"), enabled():
        for length in (3, 4, 5, 5):
            attend(mesh, length)
    assert len(caplog.records) == 3 and len(decide._told) == 2


def test_symbolic_lengths_do_not_hinder_a_trace(mesh, caplog):
    with caplog.at_level(logging.INFO, "cp_dispatch.decide"), enabled():
        for length in (16, 18):
            assert attend(mesh, length, compiled=True, dynamic=True).shape[2] == length


def test_it_is_silent_otherwise(mesh, caplog):
    with enabled():
        attend(mesh, 15)
    assert not caplog.records


def test_torch_logs():
    code = (
        "import logging, cp_dispatch; from cp_dispatch.planning.decide import logger;"
        "print(logger.isEnabledFor(logging.INFO))"
    )
    for setting, on in (("aot", "False"), ("cp_dispatch", "True"), ("+cp_dispatch", "True")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"TORCH_LOGS": setting},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split()[-1] == on, (setting, done)
