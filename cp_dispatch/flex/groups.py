"""Decides into how many groups of heads a call is split, so that transfers overlap with kernels.

Note [Groups of heads]
~~~~~~~~~~~~~~~~~~~~~~
If ranks need many keys from each other, a single kernel would wait for all of them. So the key
heads, with the query heads that attend them, are split into equal groups, each with its own
kernel::

    side stream   | keys 0 | keys 1 | keys 2 | ...
    kernels                | heads 0        | heads 1        | ...
                             (in a backward:)   shares 0 sent back ...

Only the first group's transfer is exposed, and in a backward the last group's transfer back. Heads
are independent, so nothing is merged: results are those of one kernel bit for bit, and no more
bytes travel. All groups use the same kernel, apart from constants of the mods. A rank holds the
keys of two groups at a time. The buffer that other ranks read has room for one group: the next one
is put there when all have read the last.

A graph does not know what its masks will hold, so the number of groups depends only on lengths,
heads and the options. Keys are assumed to travel if ``schedule="gather"`` sends them, if there is
no mask, and in layouts that scatter rows that attend each other; not in natural order or with
``BlockBalanced(near=True)``, which are used for masks near the diagonal. Then there are 4 groups,
or 2, if they divide the key heads and if each group has at least ``LEAST_ROWS`` (query rows times
heads), so that the idle end of each kernel costs little, and at least ``LEAST_BYTES`` of keys to
fetch, which take as long as a few launches.
"""

from __future__ import annotations

from cp_dispatch.layouts import Balancer, Span

#: Query rows times heads of a group: 2,048 blocks of 128 rows, about 16 for each SM of an H100.
#: With a fourth of this, 4 groups of a causal mask took 3.3 ms instead of 2.8 with one kernel, and
#: 10.8 instead of 10.4 with the backward (2 H200s, 8,192 tokens each, 32/8 heads, 2026-11-28).
LEAST_ROWS = 2**18
#: Bytes that a group fetches from other ranks; NVLink takes 20 us for them.
LEAST_BYTES = 2**22
#: The numbers of groups to try.
COUNTS = (4, 2)


def keys_travel(schedule: str, layout: Balancer | None, masked: bool) -> bool:
    """Whether it is assumed that most keys go to most ranks."""
    scattered = layout is not None and not getattr(layout, "near", False)
    return schedule == "gather" or (schedule == "exchange" and (scattered or not masked))


def count_groups(rows: int, heads: int, key_heads: int, bytes_to_come: int) -> int:
    """The number of groups for a rank with this many query rows, query heads and key heads."""
    for count in COUNTS:
        if (
            key_heads % count == 0
            and rows * heads >= count * LEAST_ROWS
            and bytes_to_come >= count * LEAST_BYTES
        ):
            return count
    return 1


def spans(heads: int, count: int) -> tuple[Span, ...]:
    """The heads of each group."""
    size = heads // count
    return tuple(Span(i * size, size) for i in range(count))
