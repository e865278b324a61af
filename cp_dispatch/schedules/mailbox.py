"""``Mailbox``: a room (:mod:`room`) that the other ranks of a host fill by copy engines.

NCCL's kernels take SMs, and attention kernels leave none free: on an H100 a gather that should
overlap with them takes as much extra time as one that runs alone. Copy engines cost almost nothing.
They need memory that peers can address (torch's symmetric memory, without multicast) and a way to
wait for each other without a kernel: flags that a stream writes into a peer's memory and for which
the peer's stream waits. One stream carries all copies of a device, so they stay in order. If the
default stream would wait for copies immediately, it makes them itself, with a kernel.

Note [Flags of a mailbox]: each pair of ranks has two flags, each with one writer and one reader,
who resets it to 0. One step of the protocol, the same on every rank and in one stream::

    open     raise "free for you" at every peer
    push     take "free for me" of every peer, copy, raise "full" at every peer,
             copy what stays here, take "full" of every peer
    wait     (the current stream waits for this stream)
    release  (this stream waits until the current stream has read the received data)

Flags do not count, so a CUDA graph can replay a step. A rank waits only for work that its peers
enqueue before they wait themselves, so there is no cycle, whatever else the ranks do in the same
order. Mailboxes record the steps that a call has done, so that a failed call can complete its flags
(:mod:`flags_alone`).
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dispatch._compat import current_raw_stream
from cp_dispatch.schedules.copy_ops import (
    CURRENT,
    copy_and_pull,
    join_streams,
    load_kernels,
    numbers_of,
    push_heads,
    push_pair,
    push_rows,
    push_slabs,
    raise_flags,
)
from cp_dispatch.schedules.room import HEADER, Room, memory


class Mailbox(Room):
    """One room of ``size`` bytes on every rank of a group. Made by all ranks together."""

    def __init__(
        self, group: dist.ProcessGroup, stream: torch.cuda.Stream, size: int, name: str,
        steps: MutableSequence,
    ):  # fmt: skip
        self._steps, self._marks = steps, [(name, step) for step in (OPENED, PUSHED)]
        self.device, self.side, self._stream = stream.device, stream, stream.cuda_stream
        own = memory(group, size, stream.device)
        load_kernels(own, HEADER, self._stream)
        super().__init__(group, own)
        #: Whether a CUDA graph has captured steps of this box.
        self.is_in_a_graph = False
        # Whether the default stream has waited for all work queued on the box's stream.
        self._is_quiet = False
        # Whether the default stream itself has pushed and read, so that another stream has to wait
        # for it.
        self._is_ahead = False
        #: The number of pulls so far (see :mod:`cp_dispatch.by_need.to_the_end`).
        self.pulls = 0
        # Recorded when all ranks have read what was offered here last, if that is known.
        self._were_read: torch.cuda.Event | None = None

    def _begin(self) -> None:
        """Called before the first flag of a step is raised."""
        if torch.cuda.is_current_stream_capturing():
            self.is_in_a_graph = True
        self._is_quiet = False
        self.let_side_follow()

    def open(self, peers: Sequence[int] | None = None) -> None:
        """Tell the peers (all, or those given) that they may write here."""
        self._begin()
        self._steps.append(self._marks[OPENED])
        there, _ = self._flags(peers)
        raise_flags(self._own, there.free, self._stream)

    def push(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        peers: Sequence[int] | None = None,
        coming: Sequence[int] | None = None,
        ready_at_open: bool = False,
    ) -> None:
        """Start copying to rooms of peers (and the own room), and receiving what other ranks (by
        default the same ones) copy here; after :meth:`open` with those.

        ``sources`` come from :func:`~cp_dispatch.schedules.copy_ops.rows_for`. If they were ready
        at :meth:`open`, the copies do not wait for work queued on the current stream since then.
        """
        there, here = self._flags(peers)
        taken = here.full if coming is None else self._flags(coming)[1].full
        self._is_quiet = False
        self._steps.append(self._marks[PUSHED])
        push_slabs(
            targets, sources, self._own, (), here.free, there.full, taken, self._stream,
            not ready_at_open,
        )  # fmt: skip
        # Another stream reads memory that the current stream would otherwise reuse once it is
        # freed.
        self._reading = sources

    def push_rows(
        self,
        sources: Sequence[Tensor],
        moves: list[int],
        ready_at_open: bool = False,
        opens: bool = False,
        peers: Sequence[int] | None = None,
        then_wait: bool = False,
        opens_too: Mailbox | None = None,
    ) -> None:
        """Like :meth:`push`, for moves that are the same at every call: the numbers that
        :meth:`move` returned, concatenated. ``opens``: also does :meth:`open`, possibly of another
        mailbox of the same ranks and stream. ``then_wait``: also does :meth:`wait`."""
        there, here = self._flags(peers)
        raise_first: list[int] = []
        if opens:
            self._begin()
            raise_first += there.free
            self._steps.append(self._marks[OPENED])
        if opens_too is not None:
            opens_too._begin()
            raise_first += opens_too._all[0].free
            self._steps.append(opens_too._marks[OPENED])
        self._steps.append(self._marks[PUSHED])
        push_rows(
            sources, self._own, moves, raise_first, here.free, there.full, here.full, self._stream,
            not ready_at_open, then_wait,
        )  # fmt: skip
        self._reading = None if then_wait else sources
        self._is_quiet = then_wait and on_default_stream(self.device)

    def pull(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        then_wait: bool = False,
    ) -> None:
        """Offer the own room, which is full, and start copying from the rooms of all peers.

        The flags have exchanged roles: "free" means that a room can be read, "full" that it has
        been. The stream is done once all peers have read this room. ``then_wait``: also does
        :meth:`wait`. Then nothing can overlap, so the default stream itself pulls if it is the
        current one.
        """
        there, here = self._all
        flags = there.free, here.free, there.full, here.full
        self.pulls += 1
        self._were_read = None
        if then_wait and on_default_stream(self.device):
            self._go_ahead()
            push_slabs(targets, sources, self._own, *flags, CURRENT, False, False)
            return
        self._begin()
        push_slabs(targets, sources, self._own, *flags, self._stream, True, then_wait)
        if self._is_carried_by_the_current_stream():
            self._were_read = torch.cuda.current_stream(self.device).record_event()

    @property
    def may_pull_here(self) -> bool:
        """Whether :meth:`pull_here` can be called now."""
        return on_default_stream(self.device)

    def pull_numbers(self, copies: list[int], slabs: list[int]) -> Tensor:
        """The constant numbers of a call of :meth:`pull_here`, from those of
        :func:`~cp_dispatch.schedules.copy_ops.copies_of`."""
        there, here = self._all
        return numbers_of(copies, slabs, there.free, here.free, there.full, here.full)

    def pull_here(self, tensors: Sequence[Tensor], numbers: Tensor) -> None:
        """Copy within this GPU, then :meth:`pull` and :meth:`wait`, all on the default stream
        itself, which must be the current one; as :meth:`pull_numbers` says."""
        self.pulls += 1
        self._were_read = None
        self._go_ahead()
        copy_and_pull(tensors, self._own, numbers)

    def _is_carried_by_the_current_stream(self) -> bool:
        """Whether the current stream is the box's own and is not being captured in a graph."""
        is_own = current_raw_stream(self.device) == self._stream
        return is_own and not torch.cuda.is_current_stream_capturing()

    def numbers(self, moves: list[int], opens: Sequence[Mailbox] = ()) -> Tensor:
        """The constant numbers of a call of :meth:`push_here` or :meth:`push_heads`; ``opens``:
        boxes that the call opens."""
        there, here = self._all
        raised = [flag for box in opens for flag in box._all[0].free]
        return numbers_of(moves, raised, here.free, there.full, here.full)

    def push_here(
        self, first: Tensor, second: Tensor, numbers: Tensor, opens: Sequence[Mailbox] = ()
    ) -> None:
        """Open the boxes ``opens``, then :meth:`push_rows` of two token-major tensors ``(B, H, S,
        D)``, then :meth:`wait`, all on the default stream itself, which must be the current one.

        No stream waits for another, and received data need not be released. This is for calls so
        short that this matters, and therefore :meth:`numbers` are computed in advance.
        """
        for box in (self, *opens):
            box._go_ahead()
        for box in opens:
            self._steps.append(box._marks[OPENED])
        self._steps.append(self._marks[PUSHED])
        push_pair(first, second, self._own, numbers)

    def push_heads(
        self, sources: Sequence[Tensor], numbers: Tensor, then_wait: bool = False
    ) -> None:
        """As :meth:`push_rows`, for heads in place (see :data:`push_heads`), with ``numbers`` from
        :meth:`numbers`; it opens this box alone. With ``then_wait`` the default stream itself
        pushes if it is the current one, and received data need not be released."""
        if then_wait and on_default_stream(self.device):
            self.push_heads_here(sources, numbers)
            return
        self._steps += self._marks
        self._begin()
        push_heads(sources, self._own, numbers, self._stream, then_wait)
        self._reading = None if then_wait else sources

    def push_heads_here(self, sources: Sequence[Tensor], numbers: Tensor) -> None:
        """:meth:`push_heads` on the default stream itself, which must be the current one."""
        self._steps += self._marks
        self._go_ahead()
        push_heads(sources, self._own, numbers, CURRENT, False)

    def _go_ahead(self) -> None:
        """Called before the default stream itself pushes or pulls."""
        if not self._is_quiet:
            self.wait()
        self._is_ahead = True

    def let_side_follow(self) -> None:
        """If the current stream is not the default one, make the box's stream wait until the
        default stream has read what it pushed here or pulled. (Not needed in a capture: it has read
        before that.)"""
        if not self._is_ahead:
            return
        self._is_ahead = False
        if on_default_stream(self.device) or torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.stream(torch.cuda.default_stream(self.device)):
            self.release()

    def wait(self) -> None:
        """Let the current stream wait for everything that was pushed to and from this room."""
        join_streams(self._own, self._stream, False)
        self._reading = None
        self._is_quiet = on_default_stream(self.device)

    def wait_for_readers(self) -> None:
        """Let the current stream wait until all ranks have read what was offered here before, but
        not for other work on the box's stream, such as gradients in transit.

        If the capture of a CUDA graph has not queued anything on the box's stream yet, the last
        offer was before the graph, or in its last replay, which ends after it. A capture must not
        wait for that.
        """
        if not on_default_stream(self.device):
            self.let_side_follow()
        elif self._is_quiet:
            return
        if torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(self.side):
                if not torch.cuda.is_current_stream_capturing():
                    return
        elif self._were_read is not None:
            torch.cuda.current_stream(self.device).wait_event(self._were_read)
            return
        self.wait()

    def let_go(self) -> None:
        """Allow the pushed tensors to be freed: the current stream waits for it by other means."""
        self._reading = None

    def release(self) -> None:
        """Mark the room's data as read once the current stream reaches this point."""
        join_streams(self._own, self._stream, True)


#: The steps of a call that mailboxes record. OPENED: raised "free" for the peers. PUSHED: taken
#: their "free", raised "full", and taken their "full".
OPENED, PUSHED = range(2)


def on_default_stream(device: torch.device) -> bool:
    """Whether the current stream is CUDA's default stream, which cannot be destroyed or
    captured."""
    return current_raw_stream(device) == 0
