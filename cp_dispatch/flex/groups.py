"""Into how many groups of heads a call is cut, so that keys travel while kernels compute.

Note [Groups of heads]
~~~~~~~~~~~~~~~~~~~~~~
Where ranks need many keys of each other, a single kernel would wait for all of them. So the key
heads, with the query heads that attend them, are cut into equal groups, each with a kernel of its
own::

    side stream   | keys 0 | keys 1 | keys 2 | ...
    kernels                | heads 0        | heads 1        | ...
                             (of a backward:)   shares 0 go home ...

What is exposed is the first group's way, and in a backward the last group's way home. Heads have
nothing to do with each other, so nothing is merged: results are those of one kernel bit by bit, and
no more bytes travel. All groups but for constants of the mods are the same kernel. A rank holds the
keys of two groups at a time, and what others read has room for one: the next group is put there
when all have read the last.

A graph does not know what its masks will hold, so the number follows from lengths, heads and the
setting alone. Keys are taken to travel where ``schedule="gather"`` sends them, where there is no
mask, and in layouts that scatter what attends each other; not in natural order and with
``BlockBalanced(near=True)``, which one takes for masks near the diagonal. Then there are 4 groups,
or 2, if they divide the key heads, if each has ``LEAST_ROWS`` query rows times heads, so many that
a GPU which runs out of rows at the end of each kernel costs little, and ``LEAST_BYTES`` of keys to
fetch, which take as long as a few launches.
"""

from __future__ import annotations

from cp_dispatch.layouts import Balancer, Span

#: Query rows times heads of a group: 2,048 blocks of 128 rows, about 16 for each SM of an H100.
#: Of a quarter as many, 4 groups of a causal mask took 3.3 ms where one kernel took 2.8, and 10.8
#: where it took 10.4 with the backward (2 H200s, 8,192 tokens each, 32/8 heads, 2026-11-28).
LEAST_ROWS = 2**18
#: Bytes that a group brings from other ranks; NVLink takes 20 us for them.
LEAST_BYTES = 2**22
#: The numbers of groups that are tried.
COUNTS = (4, 2)


def keys_travel(schedule: str, layout: Balancer | None, masked: bool) -> bool:
    """Whether most keys are taken to go to most ranks."""
    scattered = layout is not None and not getattr(layout, "near", False)
    return schedule == "gather" or (schedule == "exchange" and (scattered or not masked))


def count_groups(rows: int, heads: int, key_heads: int, bytes_to_come: int) -> int:
    """How many groups, for so many query rows, query heads and key heads of a rank."""
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
