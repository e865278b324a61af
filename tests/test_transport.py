"""What explain() says of the carrier of moves on CUDA, without one."""

from types import SimpleNamespace

import pytest

from cp_dispatch import transport


def query(device="cuda"):
    return SimpleNamespace(device_mesh=SimpleNamespace(device_type=device))


@pytest.mark.parametrize("reaches, words", [
    (None, "find out at their first call"), (False, "moved by NCCL"), (True, "moved by copy"),
])  # fmt: skip
def test_words(monkeypatch, reaches, words):
    monkeypatch.setattr(transport, "ring_group_name", lambda mesh, dims: "group")
    monkeypatch.setattr(transport, "reaches_peers", {"group": reaches}.get)
    for schedule in ("ring", "mirrored_ring", "gather", "mirrored_gather", "ulysses"):
        assert words in transport.carrier(query(), schedule, (0,))


def test_groups_are_not_made(monkeypatch):
    monkeypatch.delattr(transport, "ring_group_name")
    assert "find out" in transport.carrier(query(), "ring", (0, 1))


@pytest.mark.parametrize("call", [
    (query("cpu"), "ring", (0,)), (query(), "hybrid", (0,)), (query(), "replicated_keys", (0,)),
    (query(), "local", ()),
])  # fmt: skip
def test_where_there_is_no_choice(call):
    assert transport.carrier(*call) is None
