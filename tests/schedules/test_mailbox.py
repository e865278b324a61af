"""What the ranks of a mailbox wait for when they create one."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cp_dispatch.schedules import mailbox, mailboxes
from cp_dispatch.schedules import room as rooms
from cp_dispatch.schedules.copy_ops import CURRENT

OPS = (
    "raise_flags", "push_slabs", "push_rows", "push_pair", "push_heads", "copy_and_pull",
    "join_streams",
)  # fmt: skip


class Stream:
    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]):
        self._name, self._log = name, log

    def synchronize(self) -> None:
        self._log.append(self._name)


def made(size: int, log: list[str], current: Stream, side: Stream):
    """Create a mailbox of that size. ``log`` gets what was waited for."""

    def apart(device, function, *args):
        own = Stream("the thread's", log)
        with mock.patch.object(torch.cuda, "current_stream", lambda device=None: own):
            return function(*args)

    box = mock.Mock(size=size, is_in_a_graph=False)
    group = mock.Mock(group_name="cp")
    with (
        mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError("all streams")),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: current),
        mock.patch.object(dist, "barrier", lambda group, **_: log.append("ranks")),
        mock.patch.object(mailboxes, "is_used_by", lambda group: True),
        mock.patch.object(mailboxes, "Mailbox", lambda *_: log.append("made") or box),
        mock.patch.object(mailboxes, "apart", apart),
    ):
        return mailboxes.mailbox(group, side, "keys", size, [])


def test_ranks_wait_for_no_stream_but_those_that_use_the_room():
    """If a stage of a pipeline waited for all of its GPU's streams, it would wait for gradients
    that it has requested from another stage. That stage may wait for what this one is about to
    compute."""
    log: list[str] = []
    current, side = Stream("current", log), Stream("side", log)
    meeting = ["the thread's", "ranks", "the thread's"]
    with mock.patch.dict(mailboxes._boxes, clear=True):
        made(2**21, log, current, side)
        assert log == ["made", *meeting]
        log.clear()
        made(2**22, log, current, side)  # its readers and writers finish before it is freed
        assert log == ["current", "side", *meeting, "made", *meeting]


def test_a_room_for_nothing_is_a_room():
    """A rank without batch rows or heads takes part in what the others do."""
    log: list[str] = []
    sizes = []
    with mock.patch.dict(mailboxes._boxes, clear=True):
        with mock.patch.object(mailboxes, "_make", lambda *args: sizes.append(args[2])):
            made(0, log, Stream("current", log), Stream("side", log))
    assert sizes == [mailboxes._GRAIN]


def test_rooms_of_a_group_that_is_gone_are_freed_without_it(monkeypatch):
    """After destroy_process_group, the ranks cannot synchronize."""
    log: list[str] = []
    gone, box = mock.Mock(group_name="cp"), mock.Mock(side=Stream("side", log), is_in_a_graph=False)
    monkeypatch.setattr(mailboxes, "_boxes", {("cp", "keys"): (gone, box)})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current", log))
    mailboxes.free()
    assert log == ["side", "current"] and not mailboxes._boxes
    box.retire.assert_called_once_with()


@pytest.mark.parametrize("tries, others, error", [
    (1, 0, None), (2, 0, None), (3, 0, "out of memory"), (1, 1, "1 of 4 ranks"),
])  # fmt: skip
def test_ranks_have_room_or_raise(monkeypatch, tries, others, error):
    """If a rank has no memory, even after torch's caches are freed, no rank is left waiting."""
    emptied, agreed, room = mock.Mock(), mock.Mock(), torch.ones(rooms.HEADER + 1)
    memory = mock.Mock()
    memory.empty_strided_p2p.side_effect = [*[RuntimeError("out of memory")] * (tries - 1), room]
    monkeypatch.setattr(rooms, "symmetric_memory", memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: agreed(x.item()) and x.add_(others))
    with contextlib.nullcontext() if error is None else pytest.raises(RuntimeError, match=error):
        assert rooms.memory(mock.Mock(), 1, torch.device("cpu")) is room
    agreed.assert_called_once_with(int(tries == 3))
    assert emptied.called == (tries > 1)


class Boxes:
    """How :mod:`mailboxes` answers requests, with boxes that hold nothing."""

    def __init__(self, monkeypatch):
        self.made: list[mock.Mock] = []
        self.capturing, self.used, self.error, self.asked = False, True, None, mock.Mock()
        self.group, self.stream = mock.Mock(group_name="cp"), mock.Mock()
        for name, value in (("_boxes", {}), ("_retired", []), ("ask_peers", self.asked)):
            monkeypatch.setattr(mailboxes, name, value)
        monkeypatch.setattr(mailboxes, "_make", self._make)
        monkeypatch.setattr(mailboxes, "_meet", mock.Mock())
        monkeypatch.setattr(mailboxes, "exists", lambda group: True)
        monkeypatch.setattr(mailboxes, "apart", lambda device, call, *args: call(*args))
        monkeypatch.setattr(mailboxes, "is_used_by", lambda group: self.used)
        monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def _make(self, group, stream, size, *_):
        if self.error is not None:
            raise self.error
        self.made.append(mock.Mock(size=size, is_in_a_graph=False))
        return self.made[-1]

    def get(self, size: int = 1, group=None, stream=True):
        stream = self.stream if stream else None
        return mailboxes.mailbox(group or self.group, stream, "keys", size, [])


@pytest.fixture
def boxes(monkeypatch):
    return Boxes(monkeypatch)


def test_a_room_is_used_again_until_it_is_too_small(boxes):
    grain = mailboxes._GRAIN
    first = boxes.get(grain - 1)
    assert boxes.get(grain) is first and boxes.get() is first
    second = boxes.get(grain + 1)
    assert second is not first and second.size == 2 * grain
    # What was pushed on the default stream is read before others create the larger one.
    assert [call[0] for call in first.method_calls] == ["let_side_follow", "retire"]
    assert boxes.get() is second and not mailboxes._retired, "the first one is forgotten"
    assert mailboxes.held_bytes() == rooms.HEADER + 2 * grain


def test_groups_of_one_name_have_rooms_of_their_own(boxes):
    """A group that was destroyed, and one that was created since."""
    assert boxes.get() is not boxes.get(group=mock.Mock(group_name="cp"))


def test_no_room_where_there_cannot_be_one(boxes):
    assert boxes.get(stream=False) is None
    assert boxes.get(mailboxes.LARGEST + 1) is None and boxes.get(mailboxes.LARGEST)
    boxes.used = False
    assert boxes.get() is None
    boxes.used, boxes.capturing = None, True
    assert boxes.get() is None and not boxes.asked.called, "peers answer no capture"


def test_a_capture_makes_no_room_and_its_graph_keeps_its_own(boxes):
    boxes.capturing = True
    assert boxes.get() is None and not boxes.made
    boxes.capturing = False
    room = boxes.get()
    boxes.capturing = True
    assert boxes.get() is room and boxes.get(2 * room.size) is None
    assert not room.retire.called
    boxes.capturing, room.is_in_a_graph = False, True
    larger = boxes.get(2 * room.size)
    assert mailboxes._retired == [room], "replays go on writing there"
    larger.is_in_a_graph = True
    mailboxes.free()
    assert mailboxes._retired == [room, larger] and not mailboxes._boxes
    assert [call[0] for call in larger.method_calls] == ["let_side_follow", "retire"]
    assert mailboxes.held_bytes() == 2 * rooms.HEADER + room.size + larger.size


def test_a_room_that_others_could_not_take_the_place_of_is_gone(boxes):
    room, boxes.error = boxes.get(), RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        boxes.get(2 * room.size)
    boxes.error = None
    assert boxes.get() is not room


def without_peers(name: str, steps: list) -> mailbox.Mailbox:
    box = object.__new__(mailbox.Mailbox)
    box.device, box._own, box._stream, box._is_quiet = torch.device("cuda", 0), None, 1, False
    none = rooms.Flags([], [])
    box._peers, box._there, box._here, box._all = (), none, none, (none, none)
    box.side, box.is_in_a_graph = mock.Mock(), False
    box._is_ahead, box._were_read, box.pulls = False, None, 0
    box._steps, box._marks = steps, [(name, step) for step in range(2)]
    return box


def test_steps_are_noted_down(monkeypatch):
    """For both boxes, if a push to one opens the other."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(mailbox, "on_default_stream", lambda device: True)
    for name in OPS:
        monkeypatch.setattr(mailbox, name, lambda *_: None)
    steps: list = []
    box, other = (without_peers(name, steps) for name in ("keys", "gradients"))
    opened, pushed = (("keys", step) for step in range(2))
    here = functools.partial(box.push_here, None, None, None, (box, other))
    for step, noted in (
        (lambda: box.open(), [opened]),
        (lambda: box.push([], []), [pushed]),
        (lambda: box.push_rows([], [], opens=True), [opened, pushed]),
        (lambda: box.push_rows([], [], opens_too=other), [("gradients", 0), pushed]),
        (here, [opened, ("gradients", 0), pushed]),
        (lambda: box.push_heads([], None), [opened, pushed]),
        (lambda: box.push_heads([], None, then_wait=True), [opened, pushed]),
    ):
        step()
        assert steps == noted
        steps.clear()


def test_flags_of_some_peers_are_found_once():
    box = object.__new__(rooms.Room)
    box._some = {}
    box._there, box._here = rooms.Flags([1, 2, 3], [4, 5, 6]), rooms.Flags([7, 8, 9], [10, 11, 12])
    found = box._flags([2, 0])
    assert found == (([3, 1], [6, 4]), ([9, 7], [12, 10])) and box._flags((2, 0)) is found


@pytest.mark.parametrize("on_default", [True, False], ids=["default stream", "another stream"])
@pytest.mark.parametrize("then_wait", [True, False])
def test_what_ops_are_told(monkeypatch, on_default, then_wait):
    """What the default stream would wait for runs on it directly. Flags are in the protocol's
    order, also in the numbers that are cached."""
    log: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(mailbox, "on_default_stream", lambda device: on_default)
    monkeypatch.setattr(mailbox, "current_raw_stream", lambda device: 0 if on_default else 7)
    for name in OPS:
        monkeypatch.setattr(mailbox, name, lambda *args, name=name: log.append((name, *args)))
    box, other = without_peers("keys", []), without_peers("gradients", [])
    box._all = rooms.Flags([10, 11], [12, 13]), rooms.Flags([14, 15], [16, 17])
    other._all = rooms.Flags([20], [21]), rooms.Flags([22], [23])
    raised, *flags = [10, 11], [14, 15], [12, 13], [16, 17]
    moves = [1, 2, 3, 4, 5]
    for opens, first in (((), []), ((box,), raised), ((box, other), [*raised, 20])):
        lists = [moves, first, *flags]
        numbers = box.numbers(moves, opens).tolist()
        assert numbers == [*map(len, lists), *sum(lists, [])]
    by_itself = on_default and then_wait
    stream, side_waits = (CURRENT, False) if by_itself else (1, True)
    waits = then_wait and not by_itself
    box._is_quiet, box._reading, sources = True, None, []
    box.push_heads(sources, numbers, then_wait)
    assert log == [("push_heads", sources, None, numbers, stream, waits)]
    assert box._reading is (None if then_wait else sources), "what another stream may still read"
    log.clear()
    box._is_quiet = True
    box.pull([], sources, then_wait)
    assert log == [("push_slabs", [], sources, None, raised, *flags, stream, side_waits, waits)]
    assert box.may_pull_here == on_default
    lists = [[1, 2], [3], raised, *flags]
    assert box.pull_numbers(*lists[:2]).tolist() == [*map(len, lists), *sum(lists, [])]


def test_the_default_stream_waits_for_readers_once(monkeypatch):
    """After a pull that it has waited for, no reads are outstanding until something is queued. Any
    other stream waits again, because nothing shows whether it came after that wait."""
    log: list[str] = []
    box, current = without_peers("keys", []), 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(mailbox, "on_default_stream", lambda device: current == 0)
    monkeypatch.setattr(mailbox, "current_raw_stream", lambda device: current)
    for name in OPS:
        monkeypatch.setattr(mailbox, name, lambda *_, name=name: log.append(name))

    def waits() -> bool:
        log.clear()
        box.wait_for_readers()
        return log == ["join_streams"]

    queue = [
        lambda: box.open(),
        lambda: box.pull([], []),
        lambda: box.push([], []),
        lambda: box.push_rows([], []),
    ]
    box.pull_here([], None)
    assert not waits(), "what the default stream itself has pulled"
    box._is_quiet = False
    assert waits(), "nothing is known yet"
    for something in queue:
        something()
        assert waits() and not waits()
        something()
        box.wait()
        assert not waits()
        current = 7
        assert waits() and waits()
        current = 0
        assert waits() and not waits(), "what another stream waited for is not the default's"


@pytest.mark.parametrize("push, op", [
    (lambda box: box.push_here(None, None, None, (box,)), "push_pair"),
    (lambda box: box.push_heads([], None, then_wait=True), "push_heads"),
    (lambda box: box.pull([], [], then_wait=True), "push_slabs"),
    (lambda box: box.pull_here([], None), "copy_and_pull"),
], ids=["pair", "heads", "pull", "pull here"])  # fmt: skip
def test_another_stream_opens_once_the_default_one_has_read(monkeypatch, push, op):
    """Calls on the default stream do not signal other streams when they have read what arrived."""
    log: list[object] = []
    box, current, capturing = without_peers("keys", []), 0, False
    default = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: log.append(stream) or default)
    monkeypatch.setattr(mailbox, "on_default_stream", lambda device: current == 0)
    monkeypatch.setattr(mailbox, "current_raw_stream", lambda device: current)
    for name in OPS:
        monkeypatch.setattr(mailbox, name, lambda *_, name=name: log.append(name))

    def logged(action) -> list[object]:
        log.clear()
        action()
        return log.copy()

    pushes = functools.partial(push, box)
    ways = [
        (box.open, ["raise_flags"]),
        (lambda: box.push_rows([], [], opens=True), ["push_rows"]),
        (lambda: box.push_heads([], None), ["push_heads"]),
        (lambda: box.pull([], []), ["push_slabs"]),
    ]
    for way, alone in ways:
        assert logged(pushes) == ["join_streams", op], "others' work on the box first"
        assert logged(pushes) == [op]
        assert logged(way) == alone, "in one stream"
        current = 7
        assert logged(way) == alone, "the default stream has told"
        current = 0
        pushes()
        current = 7
        assert logged(way) == [default, "join_streams", *alone]
        assert logged(way) == alone
        current = 0
        pushes()
        current, capturing = 7, True
        assert logged(way) == alone, "before a capture it has read"
        current, capturing = 0, False
    pushes()
    current = 7
    assert logged(box.wait_for_readers) == [default, "join_streams", "join_streams"]
    assert logged(box.wait_for_readers) == ["join_streams"], "the default stream has told"


def test_readers_are_waited_for_and_not_what_comes_after_them(monkeypatch):
    """Keys of a group wait until the previous ones were read, but not for gradients on the same
    stream."""
    box, current, capturing, side = without_peers("keys", []), 1, False, mock.Mock()
    log: list[str] = []
    nothing_on_side = False

    @contextlib.contextmanager
    def on_side(stream):
        nonlocal capturing
        before, capturing = capturing, capturing and not nothing_on_side
        yield
        capturing = before

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", on_side)
    monkeypatch.setattr(mailbox, "on_default_stream", lambda device: current == 0)
    monkeypatch.setattr(mailbox, "current_raw_stream", lambda device: current)
    for name in ("push_slabs", "join_streams"):
        monkeypatch.setattr(mailbox, name, lambda *_, name=name: log.append(name))

    def pulls(stream: int) -> None:
        nonlocal current
        current = stream
        box.pull([], [], then_wait=True)
        current = 0

    def waits() -> list:
        log.clear()
        side.wait_event.reset_mock()
        box.wait_for_readers()
        return [*log, *(call.args[0] for call in side.wait_event.call_args_list)]

    pulls(1)
    assert waits() == waits() == [side.record_event.return_value]
    pulls(0)
    assert waits() == [], "the default stream has waited for all"
    pulls(7)
    assert waits() == ["join_streams"], "nothing tells when"
    capturing = True
    pulls(1)
    assert waits() == ["join_streams"], "events of a graph are its own"
    pulls(1)
    capturing = False
    assert waits() == ["join_streams"], "also after it"
    pulls(1)
    capturing, nothing_on_side = True, True
    assert waits() == [], "it was before the graph"
