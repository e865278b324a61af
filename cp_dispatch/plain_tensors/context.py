"""``PlainContext``: what a ``context_parallel`` block says about plain tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_dispatch.call import Call
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Balancer, HeadTail, Span, shard
from cp_dispatch.layouts.spans import chunk

ORDERS = ("auto", "head-tail")
_SAY_THE_ORDER = (
    'pass context_parallel(..., balancer="head-tail"), a balancer, or balancer=None for natural '
    "order"
)


@dataclass(frozen=True)
class PlainContext:
    """The settings of one block.

    Attributes:
        mesh: the 1-D mesh over which sequences are sharded.
        schedule: as in ``enable``.
        balancer: one of ``ORDERS``, None for natural order, or a balancer.
        order_is_known: whether the order of the shards was given. Where buffers are in different
            orders, their lengths: the order of other sequences is unknown.
        uneven: ranks may hold different lengths, and exchange them.
        lengths: the local sequence lengths that calls may have, None for any.
        window: the sliding window or chunk of a module in the style, None for none.
        whole_lengths: lengths of whole sequences, as far as this rank knows them; only for
            explain().
        world_size: the number of ranks. Every call needs it, and the mesh multiplies it out.
    """

    mesh: DeviceMesh
    schedule: str
    balancer: Balancer | str | None
    order_is_known: bool | tuple[int, ...] = True
    uneven: bool = False
    lengths: frozenset[int] | None = None
    window: int | None = None
    whole_lengths: tuple[int, ...] = field(default=(), compare=False, repr=False)
    world_size: int = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "world_size", self.mesh.size())

    @classmethod
    def of(
        cls, mesh: DeviceMesh, schedule: str, balancer: Balancer | str | None,
        whole_lengths: Iterable[int], **rest,
    ) -> PlainContext:  # fmt: skip
        """A context for whole sequences of these lengths, and of the balancer's."""
        lengths = *whole_lengths, *([balancer.seq_len] if isinstance(balancer, Balancer) else [])
        uneven = any(length % mesh.size() for length in lengths)
        return cls(mesh, schedule, balancer, uneven=uneven, whole_lengths=lengths, **rest)

    def layout(self, length: int) -> Balancer | None:
        return layout_for(self.balancer, length, self.world_size)

    def unknown_order(self, *lengths: int) -> str | None:
        """Why the order of sequences of these lengths is unknown, None if it is known."""
        known, ranks = self.order_is_known, self.world_size
        if self.balancer != "auto" or ranks == 1:
            return None
        if known is False:
            return f"without buffers the order of the shards is unknown; {_SAY_THE_ORDER}"
        for length in lengths:
            if length % (2 * ranks) if known is True else length not in known:
                return (
                    f"the order of sequences of {length} positions is unknown: no buffer is that "
                    f"long, and those of other lengths do not tell it; {_SAY_THE_ORDER}"
                )
        return None


def order_of_buffers(lengths: list[int], world_size: int) -> tuple[str | None, bool | tuple]:
    """What ``"auto"`` means in a block with buffers of these lengths: the context's ``balancer``
    and ``order_is_known``.

    A sequence of another length was made from a buffer (patches of frames) or cut by the caller, so
    its own length says nothing about its order. It is in the order of all buffers, if they agree.
    """
    in_head_tail = {length: layout_for("auto", length, world_size) for length in lengths if length}
    if not lengths:
        return "auto", False
    if not any(in_head_tail.values()):
        return None, True
    return "auto", all(in_head_tail.values()) or tuple(sorted(in_head_tail))


def layout_for(balancer: Balancer | str | None, length: int, world_size: int) -> Balancer | None:
    """The layout of a sequence of ``length`` positions; ``"auto"`` is torch's default."""
    if not isinstance(balancer, str):
        return balancer
    if length == 0 or (balancer == "auto" and length % (2 * world_size)):
        return None
    return HeadTail(length, world_size)


def check_order(mesh: DeviceMesh, balancer) -> None:
    """Check that the mesh is 1-D and contains this rank, and that the balancer matches it."""
    check_balancer(balancer)
    shard(mesh, [], [], balancer if isinstance(balancer, Balancer) else None)


def check_balancer(balancer) -> None:
    """Raise a ContextParallelError if this is not a valid ``balancer`` of a block."""
    if balancer is None or isinstance(balancer, Balancer):
        return
    if not isinstance(balancer, str) or balancer not in ORDERS:
        raise ContextParallelError(
            "balancer must be 'auto', 'head-tail', None for natural order, or a balancer such as "
            f"cp_dispatch.HeadTail(seq_len, world_size), got {balancer!r}"
        )


def whole_of(mesh: DeviceMesh, shard: torch.Tensor, dim: int, length: int) -> DTensor:
    """The DTensor, of ``length`` along ``dim``, of which ``shard`` is this rank's part."""
    shape = torch.Size((*shard.shape[:dim], length, *shard.shape[dim + 1 :]))
    return DTensor.from_local(
        shard, mesh, [Shard(dim)], run_check=False,
        shape=shape, stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip


def outline(mesh, shape, dtype, requires_grad: bool, sharded_dim: int | None) -> DTensor:
    """A DTensor that holds a single element: plans do not read its data."""
    placement = Replicate() if sharded_dim is None else Shard(sharded_dim)
    with torch.no_grad():
        made = DTensor.from_local(
            torch.zeros(1, dtype=dtype, device=mesh.device_type), mesh, [placement],
            run_check=False, shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip
    return made.requires_grad_(requires_grad)


def rows_of_ranks(context: PlainContext, local: int, name: str, assumed: list[str]) -> list[int]:
    """How many rows of a sequence each rank holds, given that this one holds ``local`` and that
    they may be uneven. For plans, which do not communicate; adds what this rank cannot know to
    ``assumed``, in words."""
    mesh = context.mesh
    chunks = {n: [x.length for x in chunk(Span(0, n), mesh.size())] for n in context.whole_lengths}
    fitting = [own for own in chunks.values() if own[mesh.get_local_rank()] == local]
    if len(fitting) == 1:
        return fitting[0]
    assumed.append(
        f"assumed that every rank holds {local} rows of {name}, as this one does: explain() does "
        "not ask the other ranks, but the call will"
    )
    return [local] * mesh.size()


def words(context: PlainContext, call: Call) -> str:
    """The call on plain shards in words, for messages."""
    mesh, order = context.mesh, context.balancer
    return (
        f"{call.describe()}\nas this rank's shards inside context_parallel over {mesh.size()} "
        f"ranks, order {order if order is not None else 'natural'}"
    )


def refuse(context: PlainContext, call: Call, reason: str):
    """Raise a ContextParallelError that says what was given."""
    error = ContextParallelError(
        f"scaled_dot_product_attention on plain shards is refused: {reason}.\n"
        f"Given:\n{words(context, call)}"
    )
    error.reason = reason  # for explain()
    raise error
