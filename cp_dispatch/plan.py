"""A plan: what happens to one call, as pure data that ops, reports and people read."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch

from cp_dispatch.backends import BACKENDS, wide_dtype
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Balancer, Geometry, RowGeometry
from cp_dispatch.report import (
    Transfer,
    backward_transfers,
    describe,
    extra_bytes,
    forward_transfers,
)
from cp_dispatch.schedules import SCHEDULES


@dataclass(frozen=True)
class Plan:
    """What happens to one call.

    Attributes:
        handler: ``"cp_dispatch"``, ``"stock"`` (torch as it is) or ``"refused"``.
        backend: the kernel, ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"cpu_flash"``,
            ``"math"``; None unless ``handler`` is ``"cp_dispatch"``.
        schedule: ``"ring"``; ``"mirrored_ring"``, a ring that first balances causal work in natural
            order by exchanging half-shards; ``"gather"`` and ``"mirrored_gather"``, alike but with
            all keys in one buffer, ``head_groups`` groups of key heads one after the other;
            ``"one_call"``, all keys for one kernel call; ``"ulysses"``,
            heads by all-to-all, and ``"hybrid"``, among ``head_ranks`` consecutive ranks and with
            the schedule ``across`` among these groups; ``"replicated_keys"`` or
            ``"replicated_queries"`` where no key needs to move; ``"local"`` if the sequence is not
            sharded.
        backward_schedule: that of its backward, where it is another one.
        layout: in which order the shards lie, None for natural order.
        mask_order: which dims of the mask lie so too, see :mod:`cp_dispatch.layout_rules`.
        is_causal: the argument of the call.
        mesh_dims: mesh dims whose ranks share the sequence; none if the schedule is ``"local"``.
        ring_shape: their sizes.
        query_length, key_length: global lengths in positions.
        reasons: why it is so; for ``"refused"`` all the reasons, each with what to do.
        backends_refused: every other backend with all the reasons against it; ``explain`` and
            errors have it, a plan on its way to an op does not.
        call: the call in words.
        shards: local shapes of query, key and value on the rank that has most.
        dtype: theirs.
        owners: the geometry, where it is not that of the schedule but of groups of ranks.
        wide_key_grads: dK and dV come out wide, for ranks have yet to add theirs up.
        predictions: ``(schedule, seconds forward, seconds backward)`` of every schedule that the
            call could have, where its kind of GPU has been measured; ``explain`` has it.
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
        """Whether lengths are numbers; of symbolic ones no number may be asked, or a trace would
        guard them."""
        return isinstance(self.query_length, int) and isinstance(self.key_length, int)

    @property
    def can_choose(self) -> bool:
        """Whether query and key are sharded alike, so that there are several schedules."""
        return self.schedule not in (None, "local", "replicated_keys", "replicated_queries")

    @property
    def of_forward(self) -> Plan:
        """The plan with the forward's schedule for both."""
        return dataclasses.replace(self, backward_schedule="") if self.backward_schedule else self

    @property
    def of_backward(self) -> Plan:
        """The plan with the backward's schedule for both."""
        if not self.backward_schedule:
            return self
        return dataclasses.replace(
            self, schedule=self.backward_schedule, backward_schedule="", head_groups=1
        )

    @property
    def op_schedule(self) -> str:
        """The schedules as the op takes them."""
        other = f"+{self.backward_schedule}" if self.backward_schedule else ""
        return self.schedule_name + other

    @property
    def schedule_name(self) -> str:
        """The forward's, as ``SCHEDULES`` has it: one rank is a ring of one."""
        if self.schedule == "hybrid":
            return f"hybrid:{self.head_ranks}:{self.across}"
        if self.head_groups > 1:
            return f"{self.schedule}:{self.head_groups}"
        return "ring" if self.schedule == "local" else self.schedule

    @property
    def geometry(self) -> Geometry | RowGeometry:
        """Who owns which rows and keys, and computes which tiles."""
        if self.owners is not None:
            return self.owners
        return SCHEDULES[self.schedule_name].geometry(
            self.query_length, self.key_length, self.ring_shape, self.is_causal, self.layout
        )

    @property
    def padded_shards(self) -> tuple[tuple[int, ...], ...]:
        """The shards with head dims as the kernel takes them, and as they travel."""
        multiple = BACKENDS[self.backend].head_dim_multiple
        return tuple((*shape[:3], -(-shape[3] // multiple) * multiple) for shape in self.shards)

    @property
    def key_row_bytes(self) -> int:
        """Bytes that one position of key and value takes on a rank."""
        _, key, value = self.padded_shards
        return key[0] * key[1] * (key[3] + value[3]) * self.dtype.itemsize

    @property
    def output_itemsize(self) -> int:
        """Bytes of an element of an output while partial ones are merged."""
        return wide_dtype(BACKENDS[self.backend].output_dtype(self.dtype)).itemsize

    @property
    def kernel_itemsize(self) -> int:
        """Bytes of an element of an output as the op gives it."""
        return BACKENDS[self.backend].output_dtype(self.dtype).itemsize

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of a kernel's gradients."""
        return BACKENDS[self.backend].gradient_dtype(self.dtype).itemsize

    @property
    def lse_itemsize(self) -> int:
        """Bytes of an element of a logsumexp."""
        return BACKENDS[self.backend].logsumexp_dtype(self.dtype).itemsize

    def bytes_sent(self, rank: int) -> int:
        """Bytes that ``rank`` sends or contributes in a forward whose inputs lie as the op takes
        them."""
        return sum(transfer.bytes for transfer in forward_transfers(self, rank))

    def transfers(self, rank: int) -> tuple[list[Transfer], list[Transfer]]:
        """The collectives of ``rank`` in a forward and in a backward, in order."""
        return forward_transfers(self, rank), backward_transfers(self, rank)

    def extra_bytes(self) -> tuple[int, int]:
        """Peak extra bytes of a forward and of a backward, see :func:`report.extra_bytes`."""
        return extra_bytes(self)

    def error(self) -> ContextParallelError:
        """The error of a refused call: what was given, all reasons, what to do."""
        return ContextParallelError(str(self))

    def __str__(self) -> str:
        return describe(self)
