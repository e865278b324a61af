"""Context parallelism for chosen modules, as a style of ``parallelize_module``."""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.style import (
    as_dtensors,
    find_inputs,
    global_lengths,
    lengths_of_masks,
    value_at,
)
from cp_dispatch.layouts import Balancer
from cp_dispatch.plain import current_schedule
from cp_dispatch.plain_context import PlainContext, check_balancer, check_order
from cp_dispatch.toggle import current_options, enabled, plain_context, plain_shards

# Our words and the values of torch's enum.
_TYPES = {
    "sdpa": "sdpa",
    "scaled_dot_product_attention": "sdpa",
    "flex": "flex",
    "flex_attention": "flex",
}


class ContextParallel(ParallelStyle):
    """The module's inputs are shards of sequences, and its attention goes over all of them::

        parallelize_module(model, mesh["cp"], {"layers.*.attention.inner": ContextParallel()})

    Plain inputs, positional or by keyword, stay plain, and every
    ``F.scaled_dot_product_attention`` that the module calls on plain tensors takes them for this
    rank's shards, as inside :func:`cp_dispatch.context_parallel`; so the module may have plain
    parameters, whose gradients are those of this rank's rows. DTensor inputs must be
    ``Shard(seq_dim)`` on the mesh; the module gets their local tensors, and its outputs become
    DTensors again.

    With ``attention_type="flex"`` the module is one around ``flex_attention``, and query, key and
    value are found among its arguments, by these names (or q, k, v), positional or by keyword,
    else as the first three tensors. Plain shards become DTensors for the forward, and DTensors that
    come out plain ones again; all other arguments are left alone, so a ``BlockMask`` is that of the
    whole sequence or :func:`cp_dispatch.create_cp_block_mask`'s.

    Args:
        seq_dim: the sequence dim of the inputs: 2 for ``(B, H, L, D)``, 1 for ``(B, L, E)``.
        attention_type: ``"sdpa"``, or ``"flex"`` for ``flex_attention``.
        balancer: as for :func:`cp_dispatch.context_parallel`. ``"auto"``: as a
            ``context_parallel`` block around says, else the ``layout`` of ``cp_dispatch.enable``,
            else natural order.
        schedule: as for :func:`cp_dispatch.enable`; None: what ``set_rotate_method`` said.

    Raises:
        ContextParallelError: for other arguments, meshes that do not have one dim, DTensors placed
            otherwise, and calls that are not supported.
    """

    def __init__(
        self,
        seq_dim: int = 2,
        attention_type="sdpa",
        *,
        balancer: Balancer | str | None = "auto",
        schedule: str | None = None,
    ):
        super().__init__()
        if isinstance(seq_dim, bool) or not isinstance(seq_dim, int):
            raise ContextParallelError(f"seq_dim must be an int, got {seq_dim!r}")
        kind = _TYPES.get(getattr(attention_type, "value", attention_type))
        if kind is None:
            raise ContextParallelError(
                f"attention_type must be 'sdpa' or 'flex', got {attention_type!r}"
            )
        check_balancer(balancer)
        self.seq_dim = seq_dim
        self.attention_type = kind
        self.balancer = balancer
        self.schedule = schedule

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_order(device_mesh, self.balancer)
        module.register_forward_pre_hook(partial(self._enter, device_mesh), with_kwargs=True)
        module.register_forward_hook(partial(self._leave, device_mesh), always_call=True)
        return module

    @torch.compiler.disable
    def _enter(self, mesh: DeviceMesh, module: nn.Module, args, kwargs):
        if self.attention_type == "flex":
            return self._enter_flex(mesh, module, args, kwargs)
        given: list[torch.Tensor] = []
        _map(given.append, (args, kwargs))
        wholes = self._wholes(mesh, given)
        own: list[torch.Tensor] = []

        def local(x):
            own.append(x.to_local() if isinstance(x, DTensor) else x)
            return own[-1]

        inputs = _map(local, (args, kwargs))
        context = self._context(
            mesh,
            [x.shape[self.seq_dim] for x in own if self._has_sequence(x)],
            [x.shape[self.seq_dim] for x in wholes],
        )
        block = plain_shards(context)
        block.__enter__()
        finish = None
        if wholes:
            finish = partial(self._whole, mesh, wholes[0].shape[self.seq_dim])
        _stack().append((module, block, finish))
        return inputs

    def _enter_flex(self, mesh: DeviceMesh, module: nn.Module, args, kwargs):
        places = find_inputs(module, args, kwargs)
        given = [value_at(place, args, kwargs) for place in places]
        wholes = self._wholes(mesh, given)
        own = [x for x in given if not isinstance(x, DTensor)]
        context = self._context(mesh, [], [x.shape[self.seq_dim] for x in wholes])
        if not context.order_is_known:
            raise ContextParallelError(
                "there is no telling in which order the shards lie, without buffers; pass "
                'balancer="head-tail", a balancer, or None for natural order'
            )
        known = [context.balancer.seq_len] if isinstance(context.balancer, Balancer) else []
        known += lengths_of_masks(args, kwargs)
        uneven = context.uneven or any(length % mesh.size() for length in known)
        lengths = global_lengths(given, mesh, self.seq_dim, uneven)
        inputs = as_dtensors(places, args, kwargs, mesh, self.seq_dim, lengths)
        block = enabled(schedule=context.schedule, layout=context.layout(lengths[0]))
        block.__enter__()
        _stack().append((module, block, _plain if own else None))
        return inputs

    def _wholes(self, mesh: DeviceMesh, given: list) -> list[DTensor]:
        """The inputs that are DTensors, which must be sharded along the sequence."""
        wholes = [x for x in given if isinstance(x, DTensor)]
        for x in wholes:
            if x.device_mesh != mesh or list(x.placements) != [Shard(self.seq_dim % x.ndim)]:
                raise ContextParallelError(
                    f"ContextParallel(seq_dim={self.seq_dim}) takes plain shards, or DTensors "
                    f"Shard({self.seq_dim}) on {mesh}; an input of shape {list(x.shape)} is placed "
                    f"{x.placements} on {x.device_mesh}"
                )
        return wholes

    @torch.compiler.disable
    def _leave(self, mesh: DeviceMesh, module: nn.Module, args, output):
        stack = _stack()
        # A module whose forward never began, because another hook failed, comes here too.
        if not stack or stack[-1][0] is not module:
            return output
        _, block, finish = stack.pop()
        block.__exit__(None, None, None)
        return output if finish is None else _map(finish, output)

    def _context(self, mesh, own: list[int], whole: list[int]) -> PlainContext:
        schedule = current_schedule() if self.schedule is None else self.schedule
        uneven = any(length % mesh.size() for length in whole)
        balancer, known = self.balancer, True
        if balancer == "auto":
            around, options = plain_context(), current_options()
            if around is not None and around.mesh == mesh:
                balancer, known = around.balancer, around.order_is_known
                uneven |= around.uneven
            else:
                balancer = None if options is None else options.layout
        return PlainContext(mesh, schedule, balancer, known, uneven, frozenset(own))

    def _has_sequence(self, x: torch.Tensor) -> bool:
        return -x.ndim <= self.seq_dim < x.ndim

    def _whole(self, mesh, length: int, x: torch.Tensor):
        """An output as the DTensor of which it is this rank's part."""
        if not self._has_sequence(x):
            return x
        shape = list(x.shape)
        shape[self.seq_dim] = length
        return DTensor.from_local(
            x, mesh, [Shard(self.seq_dim % x.ndim)], run_check=False,
            shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _map(function, value):
    """``function`` of every tensor in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map(function, x) for x in value)
    if isinstance(value, tuple):  # a named one
        return type(value)(*(_map(function, x) for x in value))
    if type(value) is dict:
        return {key: _map(function, x) for key, x in value.items()}
    return value


_thread = threading.local()


def _stack() -> list:
    """The modules of this thread that are in their forward: module, block, and what to do with
    outputs."""
    if not hasattr(_thread, "stack"):
        _thread.stack = []
    return _thread.stack
