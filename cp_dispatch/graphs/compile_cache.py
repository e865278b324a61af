"""Makes torch.compile's on-disk cache keys depend on what cp_dispatch does to a graph.

The keys of those caches cover the call of scaled_dot_product_attention, but not the override in
front of it, torch's backend switches, or the process groups whose names a traced graph holds. All
of these can differ between runs, and between ranks that share a cache.
``torch.compiler.config.cache_key_tag`` is part of every key, so we put them into the tag. It has
the options while enabled. Each trace, which comes before its key is made, adds the switches, the
groups that traces have used, and which call of this trace used which group; otherwise a process
that has used two groups would confuse their graphs. A call that is left to torch is recorded too,
because the tag may belong to another thread's trace (it is process-wide before torch 2.13) or to an
earlier one, whose graph looks the same.
"""

from __future__ import annotations

import hashlib
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch._compat import disable_current_modes, dynamo_traces, resolve_group
from cp_dispatch.flex import groups
from cp_dispatch.flex.bring_and_cut import SCHEMA as BRING_AND_CUT
from cp_dispatch.flex.group_ops import SCHEMAS as GROUP_SCHEMAS
from cp_dispatch.flex.ops import SCHEMAS as FLEX_SCHEMAS
from cp_dispatch.flex.program_order import SOURCES
from cp_dispatch.graphs.ops import SCHEMA as KEEP
from cp_dispatch.graphs.order import keep_order
from cp_dispatch.groups import ring_group_name
from cp_dispatch.ops import BACKWARD_SCHEMA, FORWARD_SCHEMA
from cp_dispatch.planning.choose import sdp_flags
from cp_dispatch.planning.planner import constants_here
from cp_dispatch.varlen.ops import SCHEMAS as VARLEN_SCHEMAS

_MARK = "|cp_dispatch:"
# Increased when a trace gives different graphs than those that caches hold for the same version.
_GENERATION = 4
_groups: set[tuple] = set()
_calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each trace, as a hash


def tag(state: object | None, calls: str = "") -> None:
    """Put ``state``, groups and the calls of a trace into the tag; without state and calls, remove
    them."""
    own = torch.compiler.config.cache_key_tag.split(_MARK)[0]
    if state is not None or calls:
        flex = *FLEX_SCHEMAS, *GROUP_SCHEMAS, BRING_AND_CUT, *SOURCES
        schemas = FORWARD_SCHEMA, BACKWARD_SCHEMA, flex, VARLEN_SCHEMAS
        limits = groups.COUNTS, groups.LEAST_ROWS, groups.LEAST_BYTES
        from cp_dispatch import __version__  # set last

        # The choice of "auto" depends on the measured constants, the ops depend on the version.
        constants = constants_here("cuda") if torch.cuda.is_available() else None
        text = repr(
            (
                __version__, _GENERATION, *schemas, KEEP, limits, state, constants, sdp_flags(),
                sorted(_groups), calls,
            )
        )  # fmt: skip
        own += _MARK + _hash(text)
    torch.compiler.config.cache_key_tag = own


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def note_groups(query: DTensor, group_name: str, state: object) -> None:
    """:func:`note_group` for a call whose graph holds this rank's place in the ring's group and in
    those of all mesh dims that shard ``query``. Keeps masks and documents on a single rank too."""
    keep_order()
    for dim, placement in enumerate(query.placements):
        if isinstance(placement, Shard):
            note_group(ring_group_name(query.device_mesh, (dim,)), state)
    note_group(group_name, state)


def note_group(group_name: str, state: object) -> None:
    """Record that a call in a trace uses a group: its name, its ranks, this rank's place in it and
    the current switches become part of the tag. The graph keeps its order, see
    Note [Graphs of ranks]."""
    group = None
    if group_name:
        keep_order()
        with disable_current_modes():
            ranks = tuple(dist.get_process_group_ranks(resolve_group(group_name)))
            group = group_name, ranks, dist.get_rank()
            _groups.add(group)
    _note_call(group, state)


def note_decision(state: object | None) -> None:
    """Record that ``state`` decides about a call, if in a trace; None leaves the call to torch."""
    if dynamo_traces() is not None:
        _note_call(None, state)


def _note_call(group: tuple | None, state: object | None) -> None:
    trace = dynamo_traces()
    calls = _hash(repr((_calls.get(trace, "") if trace is not None else "", group, state)))
    if trace is not None:
        _calls[trace] = calls
    tag(state, calls)
