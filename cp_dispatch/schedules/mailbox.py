"""Memory that the other ranks of a host write to, filled by copy engines.

NCCL's kernels take SMs, and attention kernels leave none free: on an H100 a gather that is to run
beside them costs as much time as one that runs alone. Copy engines cost next to nothing. What they
need is memory that peers can address (torch's symmetric memory, without multicast) and a way to
wait for each other without a kernel: flags that a stream writes in a peer's memory and that the
peer's stream waits for.

Note [Flags of a mailbox]: for each pair of ranks there are two, each with one writer and one
reader, who puts it back to 0. One step of the protocol, alike on every rank and in one stream::

    open   raise "free for you" at every peer, once what was here has been read
    push   take "free for me" of every peer, copy, raise "full" at every peer
           take "full" of every peer

No flag counts, so that a step can be replayed by a CUDA graph. A rank waits only for what its
peers enqueue before they wait themselves: no cycle, whatever else the ranks do in one order.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dispatch import extension as _extension  # noqa: F401  loads the kernels
from cp_dispatch._compat import all_gather_single, symmetric_memory
from cp_dispatch.extension import has_kernel

library = torch.library.Library("cp_dispatch", "FRAGMENT")
for _schema in (
    # Once the stream's earlier work is done, put 1 in each flag, an int32 of any GPU.
    "raise_flags(Tensor(a!)[] flags) -> ()",
    # The stream waits until each flag is 1, and puts 0 there.
    "take_flags(Tensor(a!)[] flags) -> ()",
    # Copy tensors (B, ...) whose batch rows are contiguous, without a kernel.
    "copy_slabs(Tensor(a!)[] targets, Tensor[] sources) -> ()",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

_raise = torch.ops.cp_dispatch.raise_flags.default
_take = torch.ops.cp_dispatch.take_flags.default
_copy = torch.ops.cp_dispatch.copy_slabs.default

#: Bytes of the flags, ahead of the room.
_HEADER = 4096
#: The largest room, in bytes: it is held until the process ends.
LARGEST = 2**30
_GRAIN = 2**21


class Mailbox:
    """One room of ``size`` bytes on every rank of a group. Made by all ranks together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int):
        self.size, self._rank = size, dist.get_rank(group)
        ranks = range(dist.get_world_size(group))
        memory = symmetric_memory.empty_strided_p2p((_HEADER + size,), (1,), torch.uint8, device)
        memory[:_HEADER].zero_()
        handle = symmetric_memory.rendezvous(memory, group.group_name)
        self._keep = memory, handle
        shape = (_HEADER + size,)
        self._memory = [handle.get_buffer(rank, shape, torch.uint8) for rank in ranks]
        self._peers = [rank for rank in ranks if rank != self._rank]
        # By kind, free or full: flags of this rank at its peers, and of the peers here.
        self._there = [[self._flag(x, kind, self._rank) for x in ranks] for kind in (0, 1)]
        self._here = [[self._flag(self._rank, kind, x) for x in ranks] for kind in (0, 1)]
        self._read: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        self.is_in_a_graph = False

    def _flag(self, rank: int, kind: int, other: int) -> Tensor:
        flags = self._memory[rank][:_HEADER].view(torch.int32)
        at = kind * len(self._memory) + other
        return flags[at : at + 1]

    def at(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat part of a rank's room, ``offset`` in bytes."""
        start = _HEADER + offset
        return self._memory[rank][start : start + numel * dtype.itemsize].view(dtype)

    def open(self, peers: Sequence[int] | None = None) -> None:
        """On the current stream, tell the peers (all, or those given) that they may write here,
        once what they wrote last has been read."""
        if torch.cuda.is_current_stream_capturing():
            # Events from outside say nothing in a graph, which comes after all that was queued.
            self.is_in_a_graph = True
        elif self._read is not None:
            torch.cuda.current_stream().wait_event(self._read)
        _raise(_chosen(self._there[_FREE], self._peers if peers is None else peers))

    def push(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        peers: Sequence[int] | None = None,
    ) -> None:
        """On the current stream, copy to rooms of peers (and one's own) and wait for theirs; after
        :meth:`open` with the same peers.

        ``sources`` ``(B, ...)`` whose batch rows are not contiguous are packed by a kernel first.
        """
        packed = [_dense(source) for source in sources]
        peers = self._peers if peers is None else peers
        _take(_chosen(self._here[_FREE], peers))
        _copy(targets, packed)
        _raise(_chosen(self._there[_FULL], peers))
        _take(_chosen(self._here[_FULL], peers))
        self._arrived = torch.cuda.current_stream().record_event()
        # This stream reads memory that other streams may be given when it is freed.
        self._reading = sources, packed

    def wait(self) -> None:
        """Let the current stream wait for everything that was pushed here, and from here."""
        torch.cuda.current_stream().wait_event(self._arrived)
        self._reading = None

    def release(self) -> None:
        """What lies here has been read once the current stream gets to this point."""
        capturing = torch.cuda.is_current_stream_capturing()
        self._read = None if capturing else torch.cuda.current_stream().record_event()


def _dense(tensor: Tensor) -> Tensor:
    row = tensor[:1] if tensor.size(0) else tensor
    return tensor if row.is_contiguous() else tensor.contiguous()


_FREE, _FULL = 0, 1


def _chosen(flags: list[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    return [flags[rank] for rank in ranks]


_boxes: dict[tuple[str, str], tuple[dist.ProcessGroup, Mailbox]] = {}
_reachable: dict[str, tuple[dist.ProcessGroup, bool]] = {}
_retired: list[Mailbox] = []


def mailbox(group: dist.ProcessGroup, device: torch.device, name: str, size: int) -> Mailbox | None:
    """The group's mailbox of that name with room for ``size`` bytes; None where there cannot be
    one. Every rank of the group must ask alike.

    Mailboxes are held, so that there is one of each name; a larger one takes its place.
    """
    if device.type != "cuda" or size > LARGEST or not _peers_are_reachable(group, device):
        return None
    key = group.group_name, name
    known = _boxes.get(key)
    if known is not None and known[0] is group and known[1].size >= size:
        return known[1]
    if torch.cuda.is_current_stream_capturing():
        return None
    if known is not None:
        del _boxes[key]
        if known[1].is_in_a_graph:
            _retired.append(known[1])  # its replays go on writing there
        # Nobody writes to, or reads, what goes now.
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index])
        torch.cuda.synchronize(device)
    box = Mailbox(group, device, -(-size // _GRAIN) * _GRAIN)
    dist.barrier(group, device_ids=[device.index])  # all flags are 0
    torch.cuda.synchronize(device)
    _boxes[key] = group, box
    return box


def held_bytes() -> int:
    """Bytes of GPU memory in mailboxes, which torch's memory statistics do not count."""
    boxes = [box for _, box in _boxes.values()] + _retired
    return sum(_HEADER + box.size for box in boxes)


def is_used_by(group: dist.ProcessGroup) -> bool | None:
    """Whether a group's ranks reach each other so; None as long as they have not tried."""
    known = _reachable.get(group.group_name)
    return known[1] if known is not None and known[0] is group else None


def _peers_are_reachable(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks agree that each can write to the memory of each."""
    known = is_used_by(group)
    if known is not None:
        return known
    if torch.cuda.is_current_stream_capturing():
        return False
    host = _hash_of(socket.gethostname() + _boot_id())
    mine = torch.tensor([host, device.index, _can_try()], device=device)
    everyone = mine.new_empty((dist.get_world_size(group), 3))
    all_gather_single(everyone.flatten(), mine, group=group)
    hosts, devices, able = everyone.T.tolist()
    reaches = len(set(hosts)) == 1 and all(able) and len(set(devices)) == len(devices)
    count = torch.cuda.device_count()
    reaches = reaches and all(
        other < count and torch.cuda.can_device_access_peer(device.index, other)
        for other in devices
        if other != device.index
    )
    verdict = torch.tensor(int(reaches), device=device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=group)
    answer = bool(verdict)
    _reachable[group.group_name] = group, answer
    return answer


def _can_try() -> bool:
    wanted = os.environ.get("CP_DISPATCH_COPY_ENGINES", "1") != "0"
    return wanted and symmetric_memory is not None and has_kernel("raise_flags", "cuda")


def _hash_of(text: str) -> int:
    """A number below 2**62, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return ""
