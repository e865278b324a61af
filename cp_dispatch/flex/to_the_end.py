"""Completes the flags of a FlexAttention op by copy engines that failed on this rank.

Like :mod:`cp_dispatch.schedules.flags_alone` for schedules: the other ranks read whatever is in
this rank's room, do not hang, and find no stale flag at the next call. Each op pulls once; if a
call has several ops, each op says which pulls the call has yet to make. An error between two ops,
in the graph's own part, is not noticed here.
"""

from __future__ import annotations

from collections.abc import Iterable

from cp_dispatch.by_need.to_the_end import finish
from cp_dispatch.schedules.mailbox import Mailbox


class ToTheEnd:
    """A context manager around an op, up to the end of its pull.

    Args:
        box: the mailbox whose rooms are read; None if collectives move rows, which end with their
            group.
        rest: the mailboxes of later pulls of the call, each requested after the previous pull; None
            if collectives would come next.
    """

    def __init__(self, box: Mailbox | None, rest: Iterable[Mailbox | None] = ()):
        self._box, self._rest = box, rest

    def __enter__(self) -> None:
        if self._box is not None:
            self._before = self._box.pulls

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None and self._box is not None:
            finish(self._box, self._before, self._rest)


def pulls_after(groups: int, backward: bool, gradients: bool, group: int) -> list[bool]:
    """For each pull after that of a group's keys, or gradients: whether it pulls gradients. The
    order is that of :mod:`cp_dispatch.flex.grouped`, where the transfer of the next group's keys
    starts before a kernel."""
    order = [(False, 0)]
    for i in range(groups):
        if i + 1 < groups:
            order.append((False, i + 1))
        if backward:
            order.append((True, i))
    return [of_gradients for of_gradients, _ in order[order.index((gradients, group)) + 1 :]]
