"""Creates and caches mailboxes: one per group and name, made by all ranks of the group together."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

import torch
import torch.distributed as dist

from cp_dispatch.graphs.memory import apart
from cp_dispatch.groups import exists
from cp_dispatch.schedules.mailbox import Mailbox
from cp_dispatch.schedules.reach import ask_peers, is_used_by
from cp_dispatch.schedules.room import HEADER

#: The largest room, in bytes: it is held until the process ends.
LARGEST = 2**30
_GRAIN = 2**21

_boxes: dict[tuple[str, str], tuple[dist.ProcessGroup, Mailbox]] = {}
_retired: list[Mailbox] = []


def mailbox(
    group: dist.ProcessGroup,
    stream: torch.cuda.Stream | None,
    name: str,
    size: int,
    steps: MutableSequence,
) -> Mailbox | None:
    """The group's mailbox of this name with room for ``size`` bytes, filled on ``stream``; None if
    there cannot be one. Every rank of the group must make the same call. The mailbox records
    ``(name, OPENED)`` and ``(name, PUSHED)`` in ``steps``.

    Mailboxes are kept, so there is one of each name; a larger one replaces a smaller one.
    """
    if stream is None or size > LARGEST:
        return None
    if is_used_by(group) is None and not torch.cuda.is_current_stream_capturing():
        apart(stream.device, ask_peers, group, stream.device)
    if not is_used_by(group):
        return None
    key = group.group_name, name
    known = _boxes.get(key)
    if known is not None and known[0] is group and known[1].size >= size:
        return known[1]
    if torch.cuda.is_current_stream_capturing():
        return None
    if known is not None:
        del _boxes[key]
        known[1].let_side_follow()
        known[1].retire()
        if known[1].is_in_a_graph:
            _retired.append(known[1])  # its replays still write there
    # Also for zero bytes: some ranks of another mesh dim may have no batch row or no head.
    room = max(1, -(-size // _GRAIN)) * _GRAIN
    readers = () if known is None else (torch.cuda.current_stream(stream.device), stream)
    box = apart(stream.device, _make, group, stream, room, readers, name, steps)
    _boxes[key] = group, box
    return box


def _make(
    group: dist.ProcessGroup,
    stream: torch.cuda.Stream,
    size: int,
    readers: Sequence[torch.cuda.Stream],
    *notes,
) -> Mailbox:
    if readers:
        _meet(group, stream.device, readers)  # nothing writes to, or reads, the old room now
    box = Mailbox(group, stream, size, *notes)
    _meet(group, stream.device, ())  # all flags are 0
    return box


def _meet(
    group: dist.ProcessGroup, device: torch.device, streams: Sequence[torch.cuda.Stream]
) -> None:
    """Return once every rank is here, and these streams and the current one are done.

    Does not wait for the whole GPU: a pipeline stage may be waiting for gradients that another
    stage sends only after it has received what is computed here.
    """
    _finish(device, streams)
    dist.barrier(group, device_ids=[device.index])
    torch.cuda.current_stream(device).synchronize()


def _finish(device: torch.device, streams: Sequence[torch.cuda.Stream]) -> None:
    for stream in (*streams, torch.cuda.current_stream(device)):
        stream.synchronize()


def held_bytes() -> int:
    """Bytes of GPU memory in mailboxes, which torch's memory statistics do not count."""
    boxes = [box for _, box in _boxes.values()] + _retired
    return sum(HEADER + box.size for box in boxes)


def free() -> None:
    """Free all rooms, except those of CUDA graphs. Every rank must call it. Rooms are created again
    when they are needed."""
    for key, (group, box) in list(_boxes.items()):
        box.let_side_follow()
        if exists(group):
            _meet(group, box.device, (box.side,))
        else:  # once all ranks are here, its last calls are over
            _finish(box.device, (box.side,))
        box.retire()
        if box.is_in_a_graph:
            _retired.append(box)
        del _boxes[key]
