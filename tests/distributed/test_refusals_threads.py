"""What is not supported raises one error, the same on every rank and before anything is sent."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention import SDPBackend, sdpa_kernel

import cp_dispatch
from tests.distributed.recorder import Recorder
from tests.distributed.sharded import distribute
from tests.distributed.threads import run_threads
from tests.ranks import fake_ranks, with_rows

B, H, S, D = 2, 4, 32, 16
SEQ = [Shard(2)]


def normal(*shape, dtype=torch.float32):
    return torch.ones(shape or (B, H, S, D), dtype=dtype)


def make(mesh, shape=(B, H, S, D), placements=SEQ, dtype=torch.float32, strided=False):
    tensor = distribute(normal(*shape, dtype=dtype), mesh, placements)
    if strided:
        local, placements = tensor.to_local(), [_StridedShard(2, split_factor=2)]
        tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor


def three(mesh, **fields):
    return [make(mesh, **fields) for _ in range(3)]


# name: (arguments from the mesh, words of the reason)
CALLS = {
    "mask beside causal": (
        lambda m: (three(m), {"attn_mask": torch.zeros(S, S), "is_causal": True}),
        "attn_mask and is_causal are both given",
    ),
    "integer mask": (
        lambda m: (three(m), {"attn_mask": torch.ones(S, S, dtype=torch.int64)}),
        "as on one device it must be bool",
    ),
    "mask of other rows": (
        lambda m: (three(m), {"attn_mask": torch.zeros(S - 1, S)}),
        r"attn_mask \[1, 1, 31, 32\] does not broadcast to the scores \[2, 4, 32, 32\]",
    ),
    "mask of other columns": (
        lambda m: (three(m), {"attn_mask": make(m, (B, 1, 1, 5), [Replicate()])}),
        "does not broadcast",
    ),
    "mask of other heads": (
        lambda m: (three(m), {"attn_mask": torch.zeros(2, 1, 1)}),
        "does not broadcast",
    ),
    "plain bias with a gradient": (
        lambda m: (three(m), {"attn_mask": torch.zeros(S, S, requires_grad=True)}),
        "make it a replicated DTensor",
    ),
    "partial boolean mask": (
        lambda m: (
            three(m),
            {
                "attn_mask": DTensor.from_local(
                    torch.ones(S, S, dtype=torch.bool), m, [Partial()], run_check=False
                )
            },
        ),
        "attn_mask has placements",
    ),
    "dropout below 0": (lambda m: (three(m), {"dropout_p": -0.1}), "dropout_p must be in"),
    "dropout above 1": (lambda m: (three(m), {"dropout_p": 1.5}), "dropout_p must be in"),
    "one dim": (
        lambda m: (three(m, shape=(S,), placements=[Shard(0)]), {}),
        r"must have shape \[B, H, S, D\]",
    ),
    "dims that differ": (
        lambda m: ([make(m), make(m, (B, S, D), [Shard(1)]), make(m)], {}),
        r"must have shape \[B, H, S, D\]",
    ),
    "strided shard": (
        lambda m: (three(m, placements=[Shard(2)], strided=True), {}),
        "query is _?S",
    ),
    "plain key": (lambda m: ([make(m), normal(), make(m)], {}), "key is a Tensor but other"),
    "plain query": (
        lambda m: ([normal(), make(m), make(m)], {}),
        "query is a Tensor but other",
    ),
    "complex": (lambda m: (three(m, dtype=torch.complex64), {}), "cast to a real floating dtype"),
    "integer": (lambda m: (three(m, dtype=torch.int64), {}), "cast to a real floating dtype"),
    "8 bits": (lambda m: (three(m, dtype=torch.float8_e4m3fn), {}), "dtype of 16 bits or more"),
    "two dtypes": (
        lambda m: ([make(m), make(m, dtype=torch.bfloat16), make(m)], {}),
        "cast to one dtype",
    ),
    "query on batch, key on sequence": (
        lambda m: ([make(m, placements=[Shard(0)]), make(m), make(m)], {}),
        "redistribute it",
    ),
    "key on batch": (
        lambda m: ([make(m), make(m, placements=[Shard(0)]), make(m)], {}),
        "redistribute it",
    ),
    "head dim sharded": (
        lambda m: ([make(m), make(m, placements=[Shard(3)]), make(m)], {}),
        "redistribute it",
    ),
    "heads without enable_gqa": (
        lambda m: ([make(m), *(make(m, (B, 2, S, D)) for _ in range(2))], {}),
        "pass enable_gqa=True",
    ),
    "heads no multiple": (
        lambda m: ([make(m), *(make(m, (B, 3, S, D)) for _ in range(2))], {"enable_gqa": True}),
        "not a multiple",
    ),
    "head dims": (
        lambda m: ([make(m), make(m, (B, H, S, 8)), make(m)], {}),
        "head dims differ",
    ),
    "key and value lengths": (
        lambda m: ([make(m), make(m, (B, H, 16, D)), make(m)], {}),
        "key and value must have the same number of heads",
    ),
    "batch sizes": (
        lambda m: ([make(m), *(make(m, (1, H, S, D)) for _ in range(2))], {}),
        "batch sizes differ",
    ),
    "unsharded with a bad mask": (
        lambda m: (three(m, placements=[Replicate()]), {"attn_mask": torch.zeros(3, S)}),
        "does not broadcast",
    ),
}
CALLS_2D = {
    "key sequence on the other mesh dim": (
        lambda m: (
            [
                make(m, placements=[Shard(2), Replicate()]),
                *(make(m, placements=[Replicate(), Shard(2)]) for _ in range(2)),
            ],
            {},
        ),
        "place key and value like the query",
    ),
    "sequence on both, keys on one": (
        lambda m: (
            [
                make(m, placements=[Shard(2), Shard(2)]),
                *(make(m, placements=[Shard(2), Replicate()]) for _ in range(2)),
            ],
            {},
        ),
        "place key and value like the query",
    ),
    "grouped heads that ranks do not divide": (
        lambda m: (
            [
                make(m, placements=[Shard(2), Shard(1)]),
                *(make(m, (B, 1, S, D), [Shard(2), Replicate()]) for _ in range(2)),
            ],
            {"enable_gqa": True},
        ),
        "are not a multiple of the 2 ranks",
    ),
}


def refused(monkeypatch, arguments, shape) -> str:
    """The single text that all ranks raise, without a collective."""
    recorder = Recorder(monkeypatch)

    def rank_body(rank: int) -> str:
        mesh = init_device_mesh("cpu", shape)
        tensors, options = arguments(mesh)
        plan = cp_dispatch.explain(*tensors, **options)
        assert plan.handler == "refused"
        with (
            recorder.record() as record,
            pytest.raises(cp_dispatch.ContextParallelError) as error,
        ):
            F.scaled_dot_product_attention(*tensors, **options)
        assert record.sent == [] and record.collectives == [] and record.peak == 0
        assert str(error.value) == str(plan)
        return str(error.value)

    with cp_dispatch.enabled():
        texts = run_threads(torch.Size(shape).numel(), rank_body)
    assert len(set(texts)) == 1, texts
    return texts[0]


@pytest.mark.parametrize("name", CALLS)
def test_refused(monkeypatch, name):
    arguments, words = CALLS[name]
    assert re.search(words, refused(monkeypatch, arguments, (3,)))


@pytest.mark.parametrize("name", CALLS_2D)
def test_refused_on_two_dims(monkeypatch, name):
    arguments, words = CALLS_2D[name]
    assert words in refused(monkeypatch, arguments, (2, 2))


def test_batch_dims_that_are_cut_unevenly(monkeypatch):
    """Over two mesh dims, one of them of a single rank: torch raised only on the ranks with
    data."""
    placements = [Shard(0), Shard(3), Shard(0)]

    def arguments(mesh):
        return three(mesh, shape=(2, 3, H, S, D), placements=placements), {}

    assert "batch dims that DTensor can flatten" in refused(monkeypatch, arguments, (1, 1, 4))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_refused_without_gradients(monkeypatch, mode):
    with mode():
        assert "dropout_p must be in" in refused(monkeypatch, CALLS["dropout above 1"][0], (2,))


def test_all_reasons_are_named(monkeypatch):
    def arguments(mesh):
        tensors = [make(mesh), make(mesh, (B, H, 16, D)), make(mesh)]
        return tensors, {"dropout_p": 2.0, "attn_mask": torch.zeros(S, S), "is_causal": True}

    text = refused(monkeypatch, arguments, (2,))
    for words in (
        "attn_mask and is_causal",
        "dropout_p must be",
        "key and value must have the same",
        "given:",
    ):
        assert words in text


def test_no_backend_that_is_on_fits(monkeypatch):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        text = refused(monkeypatch, lambda m: (three(m), {}), (2,))
    assert "no enabled backend" in text


def test_two_meshes(monkeypatch):
    def arguments(mesh):
        other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        placements = [Replicate(), Shard(2)]
        return [make(mesh), make(other, placements=placements), make(mesh)], {}

    assert "put all on one mesh" in refused(monkeypatch, arguments, (2,))


@pytest.mark.parametrize("rows, keys", [(7, 8), (8, 7)])
def test_shards_must_be_as_long_as_the_global_shape_says(rows, keys):
    with fake_ranks(2) as mesh, cp_dispatch.enabled():
        query, key = (with_rows(mesh, n, (1, 2, 16, 4), 2) for n in (rows, keys))
        words = f"holds {rows} query rows and {keys} keys, but .* it should hold 8 and 8"
        with pytest.raises(cp_dispatch.ContextParallelError, match=words):
            F.scaled_dot_product_attention(query, key, key)
