"""``Plan``: how one call is handled, as plain data for ops and reports."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch

from cp_dispatch.backends import BACKENDS, wide_dtype
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Balancer, Geometry, RowGeometry
from cp_dispatch.planning.collectives import (
    backward_transfers,
    extra_bytes,
    forward_transfers,
)
from cp_dispatch.planning.report import describe
from cp_dispatch.schedules import SCHEDULES
from cp_dispatch.schedules.transfer import Transfer


@dataclass(frozen=True)
class Plan:
    """How one call of ``F.scaled_dot_product_attention`` is handled.

    Attributes:
        handler: ``"cp_dispatch"``, ``"stock"`` (unmodified torch) or ``"refused"``.
        backend: the kernel, ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"cpu_flash"`` or
            ``"math"``; None unless ``handler`` is ``"cp_dispatch"``.
        schedule: how the work is distributed.

            - ``"ring"``: keys and values travel from rank to rank.
            - ``"mirrored_ring"``: a ring that first balances causal work in natural order by
              exchanging half-shards.
            - ``"gather"`` and ``"mirrored_gather"``: likewise, but with all keys in one buffer, in
              ``head_groups`` groups of key heads, one after the other.
            - ``"one_call"``: all keys are gathered for a single kernel call.
            - ``"ulysses"``: heads are exchanged by all-to-all.
            - ``"hybrid"``: heads are exchanged among ``head_ranks`` consecutive ranks, with the
              schedule ``across`` between these groups.
            - ``"replicated_keys"``, ``"replicated_queries"``: no key needs to move.
            - ``"local"``: the sequence is not sharded.
        backward_schedule: the schedule of the backward if it differs, else empty.
        layout: the order of the shards, None for natural order.
        mask_order: the dims of the mask that are in this order too, see
            :mod:`cp_dispatch.planning.layout_rules`.
        is_causal: the argument of the call.
        mesh_dims: mesh dims whose ranks share the sequence; empty if the schedule is ``"local"``.
        ring_shape: their sizes.
        query_length, key_length: global lengths in positions.
        reasons: why this plan was made; for ``"refused"`` all the reasons, each with what to do.
        backends_refused: every other backend with all the reasons against it. Only in plans of
            ``explain`` and of errors.
        call: the call in words.
        shards: local shapes of query, key and value on the rank with the largest ones.
        dtype: their dtype.
        owners: the geometry, if it is that of groups of ranks and not the schedule's.
        wide_key_grads: dK and dV are returned in the wide dtype, because ranks have yet to sum
            them.
        predictions: ``(schedule, seconds forward, seconds backward)`` of every schedule that the
            call could use. Only in plans of ``explain``, if the kind of GPU has been measured.
    """

    handler: str
    backend: str | None = None
    schedule: str | None = None
    layout: Balancer | None = None
    mask_order: str = ""
    is_causal: bool = False
    mesh_dims: tuple[int, ...] = ()
    ring_shape: tuple[int, ...] = ()
    query_length: int = 0
    key_length: int = 0
    reasons: tuple[str, ...] = ()
    backends_refused: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    call: str = field(default="", compare=False)
    shards: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = None
    head_ranks: int = 1
    head_groups: int = 1
    across: str = ""
    backward_schedule: str = ""
    owners: Geometry | RowGeometry | None = None
    wide_key_grads: bool = False
    predictions: tuple[tuple[str, float, float], ...] = field(default=(), compare=False)

    @property
    def world_size(self) -> int:
        """How many ranks share the sequence."""
        return math.prod(self.ring_shape)

    @property
    def has_lengths(self) -> bool:
        """Whether lengths are ints. Symbolic ones must not be evaluated, or a trace would guard on
        them."""
        return isinstance(self.query_length, int) and isinstance(self.key_length, int)

    @property
    def can_choose(self) -> bool:
        """Whether query and key are sharded in the same way, so that several schedules apply."""
        return self.schedule not in (None, "local", "replicated_keys", "replicated_queries")

    @property
    def of_forward(self) -> Plan:
        """The plan with the forward's schedule for both directions."""
        return dataclasses.replace(self, backward_schedule="") if self.backward_schedule else self

    @property
    def of_backward(self) -> Plan:
        """The plan with the backward's schedule for both directions."""
        if not self.backward_schedule:
            return self
        return dataclasses.replace(
            self, schedule=self.backward_schedule, backward_schedule="", head_groups=1
        )

    @property
    def op_schedule(self) -> str:
        """The schedules in the form of the op's argument."""
        other = f"+{self.backward_schedule}" if self.backward_schedule else ""
        return self.schedule_name + other

    @property
    def schedule_name(self) -> str:
        """The forward's schedule as a key of ``SCHEDULES``; ``"local"`` is a ring of one rank."""
        if self.schedule == "hybrid":
            return f"hybrid:{self.head_ranks}:{self.across}"
        if self.head_groups > 1:
            return f"{self.schedule}:{self.head_groups}"
        return "ring" if self.schedule == "local" else self.schedule

    @property
    def geometry(self) -> Geometry | RowGeometry:
        """Which rank owns which rows and keys, and computes which tiles."""
        if self.owners is not None:
            return self.owners
        return SCHEDULES[self.schedule_name].geometry(
            self.query_length, self.key_length, self.ring_shape, self.is_causal, self.layout
        )

    @property
    def padded_shards(self) -> tuple[tuple[int, ...], ...]:
        """The shards with head dims padded for the kernel, as they also travel."""
        multiple = BACKENDS[self.backend].head_dim_multiple
        return tuple((*shape[:3], -(-shape[3] // multiple) * multiple) for shape in self.shards)

    @property
    def key_row_bytes(self) -> int:
        """Bytes of one position of key and value on a rank."""
        _, key, value = self.padded_shards
        return key[0] * key[1] * (key[3] + value[3]) * self.dtype.itemsize

    @property
    def output_itemsize(self) -> int:
        """Bytes per element of an output while partial outputs are merged."""
        return wide_dtype(BACKENDS[self.backend].output_dtype(self.dtype)).itemsize

    @property
    def kernel_itemsize(self) -> int:
        """Bytes per element of an output as the op returns it."""
        return BACKENDS[self.backend].output_dtype(self.dtype).itemsize

    @property
    def gradient_itemsize(self) -> int:
        """Bytes per element of a kernel's gradients."""
        return BACKENDS[self.backend].gradient_dtype(self.dtype).itemsize

    @property
    def lse_itemsize(self) -> int:
        """Bytes per element of a logsumexp."""
        return BACKENDS[self.backend].logsumexp_dtype(self.dtype).itemsize

    def bytes_sent(self, rank: int) -> int:
        """Bytes that ``rank`` sends or contributes in a forward, if no input has to be
        redistributed first."""
        return sum(transfer.bytes for transfer in self.transfers(rank)[0])

    def transfers(self, rank: int) -> tuple[list[Transfer], list[Transfer]]:
        """The collectives of ``rank`` in a forward and in a backward, in order of execution; none
        if cp_dispatch does not take the call."""
        if self.schedule is None:
            return [], []
        return forward_transfers(self, rank), backward_transfers(self, rank)

    def extra_bytes(self) -> tuple[int, int]:
        """Peak extra bytes of a forward and of a backward, see
        :func:`cp_dispatch.planning.collectives.extra_bytes`; 0 if cp_dispatch does not take the
        call."""
        return (0, 0) if self.schedule is None else extra_bytes(self)

    def error(self) -> ContextParallelError:
        """The error for a refused call: what was given, all reasons, and what to do."""
        return ContextParallelError(str(self))

    def __str__(self) -> str:
        return describe(self)
