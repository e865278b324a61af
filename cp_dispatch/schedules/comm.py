"""``Ring``: communication among the ranks of a ring, on a stream and communicator of its own."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dispatch._compat import (
    all_gather_single,
    group_name,
    new_group_of_these,
    resolve_group,
)
from cp_dispatch.schedules.mailbox import Mailbox
from cp_dispatch.schedules.mailboxes import mailbox
from cp_dispatch.schedules.reach import is_used_by

_MOST_STEPS = 2**16

_ring_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}

# Weak references: torch holds groups until destroy_process_group, and another reference would keep
# a group's threads and sockets alive. (On CUDA a ring's own group is held until its name is
# reused.)
_rings: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Ring]] = (
    weakref.WeakKeyDictionary()
)


class Ring:
    """The ranks of one process group in a circle: rank r sends to r + 1, receives from r - 1.

    A shift is one ``all_to_all_single`` whose splits are zero except for the neighbours. On NCCL
    that is the same grouped send and receive as batched point-to-point calls, at the host cost
    of one call, and it needs no extra communicator per pair of ranks.

    On CUDA shifts run on a separate stream. A shift waits for the work that was queued before
    :meth:`mark`, not for later work. So the host can launch a kernel first and then the shift that
    overlaps with it, and the GPU does not idle while the host prepares the shift.
    """

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Ring:
        """The ring of a group, one for each and device."""
        rings = _rings.setdefault(group, {})
        if device not in rings:
            rings[device] = cls(group, device)
        return rings[device]

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        own = _communicator(group, device)
        self._group, self._group_name = weakref.ref(own), group_name(own)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.stream = _side_stream(device.index) if device.type == "cuda" else None
        #: The steps that this call has taken with mailboxes (see :mod:`flags_alone`); the oldest
        #: are dropped if nothing clears it.
        self.steps: collections.deque[tuple[str, int]] = collections.deque(maxlen=_MOST_STEPS)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group that carries the traffic."""
        group = self._group()
        # For a group that torch made in C++, the Python object may have been freed.
        return resolve_group(self._group_name) if group is None else group

    def mark(self) -> torch.cuda.Event | None:
        """This point of the current stream, for :meth:`after`; None on CPU, which runs in order."""
        if self.stream is None:
            return None
        return self._current_stream().record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Let the current stream wait for the work before ``mark``, if there is any."""
        if mark is not None:
            self._current_stream().wait_event(mark)

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event | None):
        """Inside this context, copies and shifts wait only for the work before ``mark``."""
        if mark is None:
            yield
            return
        try:
            with torch.cuda.stream(self.stream):
                self.stream.wait_event(mark)
                yield
        except BaseException:
            # Work queued on the side stream may use memory that is freed now.
            self._current_stream().wait_stream(self.stream)
            raise

    def _current_stream(self) -> torch.cuda.Stream:
        # The tensors' device, which is not the current one if set_device was not called.
        return torch.cuda.current_stream(self.stream.device)

    def shift(self, send: Tensor, receive: Tensor) -> dist.Work:
        """Start sending ``send`` to the next rank while ``receive`` comes from the previous one.

        Both are flat and contiguous, possibly empty. Every rank of the ring must call. Neither
        buffer may be touched until ``wait()`` of the returned work; on CUDA that makes the
        current stream wait and not the host.
        """
        return self._move(send, (self.rank + 1) % self.world_size, receive, self.rank - 1)

    def exchange(self, peer: int, send: Tensor, receive: Tensor) -> dist.Work:
        """Start sending ``send`` to ``peer`` while ``receive`` comes from it. As :meth:`shift`."""
        return self._move(send, peer, receive, peer)

    def _move(self, send: Tensor, to: int, receive: Tensor, source: int) -> dist.Work:
        send, receive = send.view(torch.uint8), receive.view(torch.uint8)
        outgoing, incoming = [0] * self.world_size, [0] * self.world_size
        outgoing[to], incoming[source] = send.numel(), receive.numel()
        return self._all_to_all(send, receive, outgoing, incoming)

    def _all_to_all(self, send, receive, outgoing, incoming) -> dist.Work:
        return dist.all_to_all_single(
            receive, send, incoming, outgoing, group=self.group, async_op=True
        )

    def start_all_gather(self, send: Tensor, receive: Tensor) -> dist.Work:
        """Start gathering the flat ``send`` of all ranks into ``receive``, one after the other."""
        return all_gather_single(receive, send, group=self.group, async_op=True)

    def exchange_all(
        self, send: Tensor, sizes: list[int], receive: Tensor, coming: list[int]
    ) -> dist.Work:
        """Start sending ``sizes[r]`` elements of the flat ``send`` to each rank r, and receiving
        ``coming[r]`` elements from it, in the order of the ranks. As :meth:`shift`."""
        sizes, coming = ([n * send.itemsize for n in x] for x in (sizes, coming))
        return self._all_to_all(send.view(torch.uint8), receive.view(torch.uint8), sizes, coming)

    @property
    def may_push(self) -> bool:
        """Whether this ring can have mailboxes, as far as is known; the same on every rank."""
        return self.stream is not None and is_used_by(self.group) is not False

    def mailbox(self, name: str, size: int) -> Mailbox | None:
        """See :func:`cp_dispatch.schedules.mailboxes.mailbox`."""
        return mailbox(self.group, self.stream, name, size, self.steps)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, which have the same shape, stacked in a new first dim."""
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        all_gather_single(gathered.flatten(0, 1), tensor.contiguous(), group=self.group)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; the tensor's memory must be dense."""
        dist.all_reduce(tensor, group=self.group)
        return tensor


def reaches_peers(group_name: str) -> bool | None:
    """Whether the ranks of a group can write to each other's memory; None if not yet known."""
    known = _ring_groups.get(group_name)
    return is_used_by(known[1]) if known is not None else None


class SubRing(Ring):
    """Some ranks of a ring as a ring of their own, for moves and all-to-alls.

    These run in the whole ring's group, where ranks outside send and receive nothing. So no group
    has to be created, but every rank of the whole ring must take part in the same moves.
    """

    def __init__(self, whole: Ring, members: range):
        self.stream = whole.stream
        self.rank, self.world_size = members.index(whole.rank), len(members)
        self._whole, self._members = whole, members

    @property
    def group(self) -> dist.ProcessGroup:
        return self._whole.group

    def _all_to_all(self, send, receive, outgoing, incoming) -> dist.Work:
        spread = []
        for sizes in (outgoing, incoming):
            everyone = [0] * self._whole.world_size
            for member, size in zip(self._members, sizes, strict=True):
                everyone[member] = size
            spread.append(everyone)
        return self._whole._all_to_all(send, receive, *spread)

    #: False, because not every rank of the group would request the same mailbox.
    may_push = False

    def mailbox(self, name: str, size: int) -> None:
        """None."""

    def _refuse(self, *_):
        raise NotImplementedError("the group is the whole ring's; only moves and all-to-alls fit")

    start_all_gather = all_gather = all_reduce = _refuse


@functools.cache
def _side_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index, priority=-1)


def _communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group that carries the ring's traffic.

    On NCCL the ring has a communicator of its own, on a stream of high priority: one communicator
    used from two streams, ours and that of a user's collective, can deadlock, and a hop must not
    queue behind the kernels that it should overlap with.
    """
    # Also if NCCL is one of several backends, as with ``init_process_group()`` without a backend.
    if device.type != "cuda" or "cuda:nccl" not in dist.get_backend_config(group).split(","):
        return group
    known = _ring_groups.get(group.group_name)
    # Group names repeat after destroy_process_group.
    if known is None or known[0] is not group:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        own = new_group_of_these(
            dist.get_process_group_ranks(group),
            backend="nccl",
            pg_options=options,
            group_desc="cp_dispatch_ring",
        )
        known = _ring_groups[group.group_name] = (group, own)
    return known[1]
