"""Which flags a mailbox raises and takes, and where it copies to.

The real class, with ops that only record what they are given. tests/gpu tests the streams.
"""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cp_dispatch.schedules import mailbox, room
from cp_dispatch.schedules.mailbox import Mailbox
from cp_dispatch.schedules.room import HEADER

RANKS, SIZE, STREAM = 3, 1024, 5


@pytest.fixture
def told(monkeypatch):
    """Creates the boxes of a rank. ``told.calls`` are the calls of ops, with names instead of
    addresses."""
    memory = {
        name: [torch.zeros(HEADER + SIZE, dtype=torch.uint8) for _ in range(RANKS)]
        for name in ("keys", "gradients")
    }
    calls: list[tuple] = []

    def named(address: int) -> str:
        name, room, place = next(
            (name, room, address - x.data_ptr())
            for name, rooms in memory.items() for room, x in enumerate(rooms)
            if 0 <= address - x.data_ptr() < HEADER
        )  # fmt: skip
        kind, writer = divmod(place // 4, RANKS)
        return f"{name}: {('free', 'full')[kind]} {writer}->{room}"

    def op(name: str, flags: slice):
        return lambda *args: calls.append((
            name, *(sorted(map(named, x)) if isinstance(x, list | tuple) else x
                    for x in args[flags])
        ))  # fmt: skip

    monkeypatch.setattr(mailbox, "raise_flags", op("raise", slice(1, None)))
    monkeypatch.setattr(mailbox, "push_slabs", op("push", slice(3, None)))
    monkeypatch.setattr(mailbox, "push_rows", op("push", slice(3, None)))
    monkeypatch.setattr(mailbox, "join_streams", op("join", slice(1, None)))
    monkeypatch.setattr(mailbox, "numbers_of", op("numbers", slice(1, None)))
    monkeypatch.setattr(mailbox, "load_kernels", lambda *_: None)
    monkeypatch.setattr(mailbox, "current_raw_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: told.capturing)
    monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)

    def told(rank: int, name: str = "keys") -> Mailbox:
        rooms = memory[name]
        handle = mock.Mock(get_buffer=lambda rank, *_: rooms[rank])
        symmetric = mock.Mock(rendezvous=lambda *_: handle)
        monkeypatch.setattr(room, "symmetric_memory", symmetric)
        monkeypatch.setattr(mailbox, "memory", lambda *_: rooms[rank])
        stream = mock.Mock(cuda_stream=STREAM, device=torch.device("cuda", 0))
        box = Mailbox(mock.Mock(rank=rank), stream, SIZE, name, [])
        calls.clear()
        return box

    told.calls, told.memory, told.capturing = calls, memory, False
    return told


def flags(kind: str, *pairs: str, box: str = "keys") -> list[str]:
    return [f"{box}: {kind} {pair}" for pair in pairs]


# For rank 1: what it signals to the others, and what they signal to it.
THERE, HERE = ("1->0", "1->2"), ("0->1", "2->1")


def test_of_all_peers(told):
    """Note [Flags of a mailbox]. For a pull it is the other way round."""
    box, other = told(1), told(1, "gradients")
    free, frees = flags("free", *THERE), flags("free", *HERE)
    full, fulls = flags("full", *THERE), flags("full", *HERE)
    frees_too = flags("free", *THERE, box="gradients")
    both = frees_too + free
    for step, expected in (
        (lambda: box.push_rows([], [], opens=True, opens_too=other, then_wait=True),
         ("push", both, frees, full, fulls, STREAM, True, True)),
        (lambda: box.open(), ("raise", free, STREAM)),  # unaffected by the call before
        (lambda: box.push([], []), ("push", [], frees, full, fulls, STREAM, True)),
        (lambda: box.push([], [], ready_at_open=True),
         ("push", [], frees, full, fulls, STREAM, False)),
        (lambda: box.push_rows([], [], ready_at_open=True),
         ("push", [], frees, full, fulls, STREAM, False, False)),
        (lambda: box.push_rows([], [], opens_too=other),
         ("push", frees_too, frees, full, fulls, STREAM, True, False)),
        (lambda: box.pull([], []), ("push", free, frees, full, fulls, STREAM, True, False)),
        (lambda: box.wait(), ("join", STREAM, False)),
        (lambda: box.release(), ("join", STREAM, True)),
        (lambda: box.numbers([], (box, other)), ("numbers", both, frees, full, fulls)),
        (lambda: box.pull_numbers([], []), ("numbers", [], free, frees, full, fulls)),
    ):  # fmt: skip
        step()
        assert told.calls == [expected]
        told.calls.clear()


def test_of_some_peers(told):
    box = told(1)
    box.open([2])
    box.push([], [], [2], [0])
    box.push([], [], [2], [])  # nothing arrives
    box.push([], [], [], [0])
    box.push_rows([], [], opens=True, peers=(0,))
    assert [call[1:5] for call in told.calls] == [
        (flags("free", "1->2"), STREAM),
        ([], flags("free", "2->1"), flags("full", "1->2"), flags("full", "0->1")),
        ([], flags("free", "2->1"), flags("full", "1->2"), []),
        ([], [], [], flags("full", "0->1")),
        tuple(flags(*x) for x in (("free", "1->0"), ("free", "0->1"),
                                  ("full", "1->0"), ("full", "0->1"))),
    ]  # fmt: skip


def test_rooms_lie_behind_the_flags(told):
    box = told(1)
    start = told.memory["keys"][2].data_ptr() + HEADER
    assert box.at(2, 64, 4, torch.float32).data_ptr() == start + 64
    assert box.move(3, 5, 7, 2, 64, 16) == [3, 5, 7, start + 64, 16]


def test_what_is_copied_lives_until_it_is_waited_for(told):
    """Another stream reads it, so its memory must not be reused."""
    box = told(1)
    for push in (box.push, lambda targets, sources: box.push_rows(sources, [])):
        kept = weakref.ref(source := torch.zeros(1))
        push([], [source])
        del source
        assert kept() is not None
        box.wait()
        assert kept() is None


@pytest.mark.parametrize("step", ["open", "push_rows", "push_rows of another", "pull"])
def test_a_graph_that_captures_a_step_is_noted(told, step):
    """Its replays continue to write there."""
    box, other = told(1), told(1, "gradients")
    way = {
        "open": box.open,
        "push_rows": lambda: box.push_rows([], [], opens=True),
        "push_rows of another": lambda: other.push_rows([], [], opens_too=box),
        "pull": lambda: box.pull([], []),
    }[step]
    way()
    assert not box.is_in_a_graph
    told.capturing = True
    way()
    assert box.is_in_a_graph


def test_a_retired_box_holds_no_views(told):
    """Views may refer to the box."""
    box = told(1)
    box.views["of a call"] = box
    box.retire()
    assert not box.views and not box.is_current
