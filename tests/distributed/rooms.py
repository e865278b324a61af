"""Mailboxes for ranks in threads: memory, flags and the copies of a copy engine, without one.

Follows Note [Flags of a mailbox] exactly, except for streams: the thread itself waits for whatever
a stream would wait for.
"""

from __future__ import annotations

import threading

import pytest
import torch

from cp_dispatch.schedules import mailbox
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.mailbox import OPENED, PUSHED

_PATIENCE = 10  # seconds


class Rooms:
    """Gives every rank's ring mailboxes on CPU. One per test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.changed = threading.Condition()
        self._rooms: dict[tuple, list[torch.Tensor]] = {}
        self._boxes: dict[tuple, Box] = {}
        #: A larger box replaces a smaller one, on every rank at the same call.
        self._sizes: dict[tuple, int] = {}
        #: Bytes of the smallest box; even for zero bytes there is a room.
        self.least = 1
        #: The most views that a box caches: few, so that tests reach the limit.
        self.most_views = 3
        self.flags: dict[tuple, set] = {}
        #: Whether the current stream is the default one.
        self.may_pull_here = True
        #: Boxes that were released before their data was waited for.
        self.read_too_early: set[tuple] = set()
        #: Bytes that each rank pushed to others or pulled from them, by the box's name.
        self.sent: dict[tuple[str, int], int] = {}
        monkeypatch.setattr(Ring, "mailbox", self._mailbox_of())
        monkeypatch.setattr(Ring, "may_push", True)

    def _mailbox_of(self):
        def mailbox(ring, name, size):
            with self.changed:
                asked = ring.group.group_name, name, ring.rank
                before = self._sizes.get(asked, 0)
                size = self._sizes[asked] = max(size, before, self.least)
                key = ring.group.group_name, name, size
                if size > before > 0:
                    self._boxes[(*key[:2], before, ring.rank)].retire()
                if key not in self._rooms:
                    self._rooms[key] = [
                        torch.full((size,), 255, dtype=torch.uint8) for _ in range(ring.world_size)
                    ]
                    self.flags.setdefault(key, set())
                room = self._rooms[key]
                mine = *key, ring.rank
                if mine not in self._boxes:
                    self._boxes[mine] = Box(self, key, ring, room)
                box = self._boxes[mine]
                box.steps = ring.steps  # threads share the rings that Ring.of caches
                return box

        return mailbox

    def free(self) -> None:
        """Free the rooms of all ranks; one rank calls it while the others wait."""
        self._rooms.clear()
        self._boxes.clear()
        self._sizes.clear()

    @property
    def used(self) -> set[str]:
        """Names of the boxes that were pushed to."""
        return {name for name, _ in self.sent}

    def assert_all_is_quiet(self) -> None:
        """Check that no flag is left that would confuse a later call."""
        assert not any(self.flags.values()), self.flags

    def assert_all_was_read(self) -> None:
        """Check also that, if no rank has failed, received data was waited for and then released.
        Otherwise another stream might overwrite it."""
        self.assert_all_is_quiet()
        assert not self.read_too_early, self.read_too_early
        kept = [(*box._key, box._rank) for box in self._boxes.values() if box.is_unread]
        assert not kept, kept


def _is_slab(x: torch.Tensor) -> bool:
    """Whether cudaMemcpy2D can copy it: batch rows are contiguous and do not overlap."""
    return x.numel() == 0 or (x[0].is_contiguous() and (len(x) == 1 or x.stride(0) >= x[0].numel()))


def _copies(numbers, tensors):
    """``(target, source)`` of the copies with these numbers, as bytes."""
    numbers = iter(numbers)
    while (first := next(numbers, None)) is not None:
        places = [(first, next(numbers)), (next(numbers), next(numbers))]
        item, dims = next(numbers), next(numbers)
        loops = [[next(numbers) for _ in range(3)] for _ in range(dims)]
        sizes, *strides = zip(*loops, strict=True) if loops else ((), (), ())
        views = []
        for (i, at), steps in zip(places, strides, strict=True):
            flat = torch.empty(0, dtype=torch.uint8).set_(tensors[i].untyped_storage())
            at += tensors[i].storage_offset() * tensors[i].itemsize
            views.append(flat.as_strided((*sizes, item), (*steps, 1), at))
        yield views


class Box:
    """As :class:`cp_dispatch.schedules.mailbox.Mailbox`."""

    def __init__(self, rooms: Rooms, key: tuple, ring: Ring, memory: list[torch.Tensor]):
        self._rooms, self._key, self._memory = rooms, key, memory
        self._rank = ring.rank
        self._peers = [rank for rank in range(ring.world_size) if rank != ring.rank]
        self.views: dict = {}
        self.is_current, self._gave_way = True, False
        self.pulls = 0
        self.is_unread = self.is_under_way = False
        self._is_offered = False

    def at(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert offset + numel * dtype.itemsize <= len(self._memory[rank])
        return self._memory[rank][offset : offset + numel * dtype.itemsize].view(dtype)

    def forget_many(self, most: int = 64) -> None:
        if len(self.views) >= self._rooms.most_views:
            self.views.clear()

    def retire(self) -> None:
        self.is_current, self._gave_way = False, True
        self.views.clear()

    def _note(self, *steps: int) -> None:
        assert not self._gave_way, f"{self._key} gave way to another: nobody holds its memory"
        self.steps.extend((self._key[1], step) for step in steps)

    def open(self, peers=None) -> None:
        self._note(OPENED)
        self._raise("free", self._peers if peers is None else peers)

    def push(self, targets, sources, peers=None, coming=None, ready_at_open=False) -> None:
        peers = self._peers if peers is None else peers
        coming = peers if coming is None else coming
        self._note(PUSHED)
        self._take("free", peers)
        self._copy(targets, sources)
        self._raise("full", peers)
        self._take("full", coming)
        self.is_unread |= bool(coming)
        self.is_under_way = True

    def pull(self, targets, sources, then_wait=False) -> None:
        assert not self.is_under_way, "nobody has waited for what came last"
        assert not self._is_offered or not targets, "others may not have read what was here before"
        self._is_offered = True
        self.pulls += 1
        self.open()
        self.is_under_way = not then_wait
        self._take("free", self._peers)
        self._copy(targets, sources)
        self._raise("full", self._peers)
        self._take("full", self._peers)
        # NaN, so that a later read is noticed.
        self._memory[self._rank].fill_(255)

    @property
    def may_pull_here(self) -> bool:
        return self._rooms.may_pull_here

    def pull_numbers(self, copies, slabs) -> tuple:
        return copies, slabs

    def pull_here(self, tensors, numbers) -> None:
        own, slabs = (list(_copies(some, tensors)) for some in numbers)
        for target, source in own:
            target.copy_(source)
        self.pull(*zip(*slabs, strict=True) if slabs else ((), ()), then_wait=True)

    def _copy(self, targets, sources) -> None:
        own = self._memory[self._rank].untyped_storage().data_ptr()
        for target, source in zip(targets, sources, strict=True):
            assert target.shape == source.shape and target.dtype is source.dtype
            for x in (target, source):
                assert _is_slab(x), x.stride()
            target.copy_(source)
            if target.untyped_storage().data_ptr() != own:
                sent = self._rooms.sent
                name = self._key[1], self._rank
                sent[name] = sent.get(name, 0) + target.nbytes

    def address(self, rank, offset) -> int:
        return self._memory[rank].data_ptr() + offset

    def move(self, source, first, rows, rank, offset, stride) -> list[int]:
        return [source, first, rows, self.address(rank, offset), stride]

    def push_rows(
        self, sources, moves, ready_at_open=False, opens=False, peers=None, then_wait=False,
        opens_too=None,
    ) -> None:  # fmt: skip
        peers = self._peers if peers is None else peers
        if opens:
            self.open(peers)
        if opens_too is not None:
            opens_too.open()
        self._note(PUSHED)
        self._take("free", peers)
        own = self._memory[self._rank].data_ptr()
        assert all(map(_is_slab, sources)), [x.stride() for x in sources]
        for i in range(0, len(moves), 5):
            index, start, rows, address, stride = moves[i : i + 5]
            assert start + rows <= sources[index].size(1)
            slabs = sources[index][:, start : start + rows]
            if not slabs.numel():
                continue
            assert len(slabs) == 1 or stride >= slabs[0].nbytes
            target = self._at(address, (len(slabs), slabs[0].nbytes), stride)
            target.view(slabs.dtype).copy_(slabs.flatten(1))
            if not own <= address < own + len(self._memory[self._rank]):
                name = self._key[1], self._rank
                self._rooms.sent[name] = self._rooms.sent.get(name, 0) + slabs.nbytes
        self._raise("full", peers)
        self._take("full", peers)
        self.is_unread, self.is_under_way = True, not then_wait

    def _at(self, address: int, shape: tuple[int, int], stride: int) -> torch.Tensor:
        """A view of these bytes in the room that contains them."""
        size = (shape[0] - 1) * stride + shape[1]
        (found,) = (
            room for room in self._memory
            if room.data_ptr() <= address and address + size <= room.data_ptr() + len(room)
        )  # fmt: skip
        return found.as_strided(shape, (stride, 1), address - found.data_ptr())

    def numbers(self, moves, opens=()) -> tuple:
        return moves, opens

    def push_here(self, first, second, numbers, opens=()) -> None:
        numbers, opened = numbers
        assert opened == opens, "its flags are among the numbers"
        for box in opens:
            box.open()
        self.push_rows([x.transpose(1, 2) for x in (first, second)], numbers)
        self.is_unread = self.is_under_way = False  # it is read in the same stream

    def push_heads(self, sources, numbers, then_wait=False) -> None:
        assert not self.is_under_way, "nobody has waited for what came last"
        moves, views = [], []
        numbers, opened = numbers
        assert opened == (self,), "its flags are among the numbers"
        for i in range(0, len(numbers), 8):
            index, row, first, rows, head, heads, address, pitch = numbers[i : i + 8]
            x = sources[index]
            assert first + rows <= x.size(2) and head + heads <= x.size(1)
            part = x[row, head : head + heads, first : first + rows]
            if part.dim() == 3:  # rows of heads, one after the other
                assert _is_slab(x[row].transpose(0, 1)), x.stride()
                part = part.transpose(0, 1).flatten(1)
            assert part.size(1) == 1 or part.stride(1) == 1, x.stride()
            moves += [len(views), 0, part.size(1), address, pitch]
            views.append(part)
        self.push_rows(views, moves, opens=True, then_wait=then_wait)
        if then_wait and mailbox.on_default_stream(torch.device("cpu")):
            self.is_unread = self.is_under_way = False

    def push_heads_here(self, sources, numbers) -> None:
        assert mailbox.on_default_stream(torch.device("cpu"))
        self.push_heads(sources, numbers, True)

    def wait(self) -> None:
        self.is_under_way = False

    let_go = wait  # the current stream waits in a different way

    def wait_for_readers(self) -> None:
        self._is_offered = False

    def release(self) -> None:
        if self.is_under_way:
            self._rooms.read_too_early.add((*self._key, self._rank))
        self.is_unread = False
        # NaN, so that a later read is noticed. Peers may write again, but only after it is opened.
        self._memory[self._rank].fill_(255)

    def _raise(self, kind: str, peers) -> None:
        with self._rooms.changed:
            for peer in peers:
                flag = kind, self._rank, peer
                assert flag not in self._flags, f"{flag} of {self._key} is raised twice"
                self._flags.add(flag)
            self._rooms.changed.notify_all()

    def _take(self, kind: str, peers) -> None:
        with self._rooms.changed:
            for peer in peers:
                flag = kind, peer, self._rank
                found = self._rooms.changed.wait_for(lambda f=flag: f in self._flags, _PATIENCE)
                assert found, f"rank {self._rank} waits for {flag} of {self._key}"
                self._flags.remove(flag)

    @property
    def _flags(self) -> set:
        return self._rooms.flags[self._key]
