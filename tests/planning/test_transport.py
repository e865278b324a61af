"""What explain() says about what carries the data on CUDA, tested without CUDA."""

from types import SimpleNamespace

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from cp_dispatch.flex import explain
from cp_dispatch.planning import transport
from tests.ranks import fake_ranks, outline


def mesh(device="cuda"):
    return SimpleNamespace(device_type=device)


def query(device="cuda"):
    return SimpleNamespace(device_mesh=mesh(device))


@pytest.mark.parametrize("reaches, words", [
    (None, "the first call finds out"), (False, "moved by NCCL"), (True, "moved by copy"),
])  # fmt: skip
def test_words(monkeypatch, reaches, words):
    monkeypatch.setattr(transport, "ring_group_name", lambda mesh, dims: "group")
    monkeypatch.setattr(transport, "reaches_peers", {"group": reaches}.get)
    for schedule in ("ring", "mirrored_ring", "gather", "mirrored_gather", "ulysses"):
        assert words in transport.carrier(mesh(), schedule, (0,))


def test_groups_are_not_made(monkeypatch):
    monkeypatch.delattr(transport, "ring_group_name")
    assert "finds out" in transport.carrier(mesh(), "ring", (0, 1))


@pytest.mark.parametrize("runs, reaches, words, may_gather", [
    (3, None, "the first call finds out", True), (3, False, "moved by NCCL: not", True),
    (3, True, "moved by copy engines", False), (64, True, "moved by copy engines", False),
    (65, True, "needs 65 runs of rows", True),
])  # fmt: skip
def test_words_of_flex_attention(monkeypatch, runs, reaches, words, may_gather):
    """Copy engines move only what is needed. A collective gathers everything if that pays."""
    monkeypatch.setattr(transport, "reaches_all", lambda mesh, dims: reaches)
    plan = SimpleNamespace(schedule="exchange", world_size=2, mesh_dims=(0,))
    ((found,), gathers) = explain._moved(plan, query(), runs)
    assert words in found and gathers == may_gather
    assert explain._moved(plan, query("cpu"), runs) == ((), True)
    plan.schedule = "ring"
    assert explain._moved(plan, query(), runs) == ((), False)


@pytest.mark.parametrize("call", [
    (mesh("cpu"), "ring", (0,)), (mesh(), "hybrid", (0,)), (mesh(), "replicated_keys", (0,)),
    (mesh(), "local", ()),
])  # fmt: skip
def test_where_there_is_no_choice(call):
    assert transport.carrier(*call) is None


def test_what_dtensor_redistributes():
    """Not what is whole, which each rank only cuts, nor along a mesh dim of one rank."""
    wanted = Shard(0), Shard(2), Shard(2)
    with fake_ranks(2, 2, 1, names=("a", "b", "c")) as mesh:
        tensors = {
            name: outline(mesh, (2, 1, 8, 4), placements)
            for name, placements in {
                "as wanted": wanted,
                "whole": (Replicate(),) * 3,
                "along one rank": (*wanted[:2], Shard(1)),
                "sum": (Shard(0), Partial(), Shard(2)),
            }.items()
        }
        (found,) = transport.redistributed(tensors, [wanted] * 4)
    assert f"sum from {(Shard(0), Partial(), Shard(2))} to {wanted}" in found
