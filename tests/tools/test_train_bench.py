"""The bench of a whole model, at a tiny size: its table and record, and the losses with any number
of ranks."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TINY = ("--device cpu --dtype float32 --tokens 256 --layers 2 --dim 64 --heads 4 2 --vocab 256 "
        "--chunk 48 --steps 3 --lr 3e-3").split()  # fmt: skip


def start(ranks: int, out: pathlib.Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(ranks), str(ROOT / "tools" / "train_bench.py"),
               *TINY, "--out", str(out), *options]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.timeout(180)
def test_whole_model(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    processes = [
        start(1, one, "--way", "ours", "--no-compile"),
        start(2, two, "--compiler", "aot_eager"),
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert "256 tokens on 2 x cpu" in said[1] and "| ours | whole blocks, loss (" in said[1]
    alone = json.loads(one.read_text())["rows"][0]
    ours, torchs = json.loads(two.read_text())["rows"]
    assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert ours["losses"][-1] < ours["losses"][0]
    # One graph for all blocks, and two for the loss, whose last chunk is shorter.
    assert ours["graphs"] == 3 and ours["tokens_per_second_per_rank"] > 0
    assert torchs["way"] == "torch" and ("error" in torchs or torchs["losses_differ"] < 1e-4)


def test_what_fails(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    bench = importlib.import_module("train_bench")
    assert not bench.failed({"way": "ours", "losses": [1.0]}, "float32")
    assert not bench.failed({"way": "ours", "error": "out of memory"}, "float32")
    assert bench.failed({"way": "ours", "error": "anything else"}, "float32")
    assert not bench.failed({"way": "torch", "error": "no kernel"}, "float32")
    assert bench.failed({"way": "torch", "losses": [1.0], "losses_differ": 1e-3}, "float32")
    assert bench.failed({"way": "torch", "losses": [1.0], "gradients_differ": 1.0}, "bfloat16")
    assert bench.failed({"way": "ours", "losses": [float("nan")]}, "bfloat16")
