"""Completes the flags of a call whose ranks pull from each other's rooms, after an error on this
rank.

Like :mod:`cp_dispatch.schedules.flags_alone` for schedules: the other ranks read whatever is in
this rank's room, do not hang, and find no stale flag at the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cp_dispatch.schedules.mailbox import Mailbox

_log = logging.getLogger("cp_dispatch")


def finish(box: Mailbox, before: int, rest: Iterable[Mailbox | None] = ()) -> None:
    """Complete the flags of ``box``, which had made ``before`` pulls when the op began, and then
    those of the ``rest``, the mailboxes of later pulls of the call, each requested after the
    previous pull; None if collectives would come next."""
    try:
        if box.pulls == before:
            _flags_of(box)
        else:  # the copies write to memory that may be freed now
            box.wait()
        for later in rest:
            if later is None:
                return
            _flags_of(later)
    except Exception:  # the call's own error is the one to raise
        _log.exception("after an error in attention: the other ranks may wait for this one")


def _flags_of(box: Mailbox) -> None:
    box.pull([], [], then_wait=True)
