"""``ContextParallel``: context parallelism for chosen modules, as a ``ParallelStyle``."""

from __future__ import annotations

import enum
import inspect
import types
import weakref
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dispatch._compat import in_backward
from cp_dispatch.agreement import tell_refusal
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.plain import no_order
from cp_dispatch.flex.style import (
    MIXED,
    as_dtensors,
    find_inputs,
    global_lengths,
    lengths_of_masks,
    on_dtensors,
    value_at,
)
from cp_dispatch.flex.traced_style import plain
from cp_dispatch.flex.traced_style import traced_forward as traced_flex_forward
from cp_dispatch.fused_modules import check_weights, no_fast_path
from cp_dispatch.graphs.checkpoints import repeats
from cp_dispatch.hugging_face.modules import check_implementation, sliding_window
from cp_dispatch.layouts import Balancer
from cp_dispatch.plain import current_schedule
from cp_dispatch.plain_tensors.context import PlainContext, check_balancer, check_order
from cp_dispatch.plain_tensors.style_dtensors import has_sequence, whole_output, wholes_among
from cp_dispatch.plain_tensors.style_forward import own_forward, take_off
from cp_dispatch.plain_tensors.style_mark import mark
from cp_dispatch.plain_tensors.traced_style import map_tensors, traced_forward
from cp_dispatch.toggle import (
    current_options,
    enabled,
    enabled_for_shards,
    plain_context,
    plain_shards,
)

# Our names and the values of torch's enum.
_TYPES = {
    "sdpa": "sdpa",
    "scaled_dot_product_attention": "sdpa",
    "flex": "flex",
    "flex_attention": "flex",
}


class ContextParallel(ParallelStyle):
    """Make the attention of a module context-parallel, given inputs that are sharded along the
    sequence::

        parallelize_module(model, mesh["cp"], {"layers.*.attention.inner": ContextParallel()})

    Plain inputs, positional or by keyword, stay plain. Every ``F.scaled_dot_product_attention`` and
    ``varlen_attn`` that the module calls on plain tensors treats them as this rank's shards, as in
    :func:`cp_dispatch.context_parallel`. The module may have plain parameters; their gradients
    cover this rank's rows only. DTensor inputs must be ``Shard(seq_dim)`` on the mesh: the module
    gets their local tensors, and its outputs become DTensors again. The sequence of an output must
    be in the same dim. ``nn.MultiheadAttention`` needs ``need_weights=False``. As in a block, other
    attention stays local.

    ``attention_type="flex"`` is for a module around ``flex_attention``. Query, key and value are
    the arguments with these names (or q, k, v), positional or by keyword, else the first three
    tensors. Plain shards become DTensors for the forward, and the outputs plain tensors again, so
    the module cannot combine them with plain parameters. All other arguments are left alone, so a
    ``BlockMask`` has to be that of the whole sequence or come from
    :func:`cp_dispatch.create_cp_block_mask`.

    Args:
        seq_dim: the sequence dim of the inputs: 2 for ``(B, H, L, D)``, 1 for ``(B, L, E)``.
        attention_type: ``"sdpa"``, or ``"flex"`` for ``flex_attention``.
        balancer: as for :func:`cp_dispatch.context_parallel`. ``"auto"``: that of the
            ``context_parallel`` block around, else the ``layout`` of ``cp_dispatch.enable``, else
            natural order.
        schedule: as for :func:`cp_dispatch.enable`. None: the one that ``set_rotate_method``
            selected.

    Raises:
        ContextParallelError: if an argument is invalid, if the mesh is not 1-D, if the module has
            no forward, if a DTensor has another placement, or if a call is not supported.
    """

    def __init__(
        self,
        seq_dim: int = 2,
        attention_type: str | enum.Enum = "sdpa",
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
        self._forwards: dict[tuple, types.FunctionType] = {}
        self._orders = weakref.WeakKeyDictionary()  # the order in which each module last ran

    def __reduce__(self):
        # Leaves out process groups and weak references to modules, which cannot be copied.
        make = partial(type(self), balancer=self.balancer, schedule=self.schedule)
        return make, (self.seq_dim, self.attention_type)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_order(device_mesh, self.balancer)
        mark(
            module, device_mesh,
            seq_dim=self.seq_dim, attention_type=self.attention_type, balancer=self.balancer,
            schedule=self.schedule,
        )  # fmt: skip
        # Equal meshes may have different groups, such as those from before destroy_process_group.
        group = device_mesh.get_group()
        before = getattr(module.forward, "in_style_on", None)
        if before == (device_mesh, group):
            return module  # applied before, for example because two parents share the module
        if before is not None:
            take_off(module)
        if self.attention_type == "flex":
            kind = tuple(inspect.signature(module.forward).parameters)
        else:
            check_implementation(module, device_mesh)
            kind = sliding_window(module)
        # Bound, so that a copy of the module has its own. No hooks: dynamo guards on their ids,
        # and would compile every layer of a model anew.
        forward = self._forward(device_mesh, group, kind, own_forward(module))
        module.forward = types.MethodType(forward, module)
        if self.attention_type == "sdpa" and isinstance(module, nn.MultiheadAttention):
            # In eval mode an encoder layer passes its attention's parameters to a fused kernel and
            # never calls the attention, unless that has a hook.
            module.register_forward_pre_hook(_no_fused_kernel)
        return module

    def _forward(self, mesh: DeviceMesh, group, kind, own):
        """The forward of a module, shared by all modules of the same ``kind`` so that they share
        compiled graphs. ``kind`` is the module's window or, around ``flex_attention``, the names of
        its arguments."""
        key = mesh, kind, group
        if own is None and key in self._forwards:
            return self._forwards[key]
        if self.attention_type == "flex":
            decide = partial(self._context, mesh, None, None, [])
            run = partial(self._run_flex, mesh, kind)
            forward = traced_flex_forward(kind, self.seq_dim, mesh, decide, run, own)
        else:
            decide = partial(self._context, mesh, kind, None, [])
            forward = traced_forward(decide, partial(self._run, mesh), own)
        forward.in_style_on, forward.own = (mesh, group), own
        if own is None:
            self._forwards[key] = forward
        return forward

    @torch.compiler.disable
    def _run(self, mesh: DeviceMesh, module: nn.Module, forward, args: tuple, kwargs: dict):
        """Run the module's forward in a block of its own."""
        try:
            args, kwargs, wholes, context = self._prepared(mesh, module, args, kwargs)
        except ContextParallelError as error:
            tell_refusal(mesh, error)
            raise
        with plain_shards(context), no_fast_path():
            output = forward(module, *args, **kwargs)
        if not wholes:
            return output
        length = wholes[0].shape[self.seq_dim]
        return map_tensors(lambda x: whole_output(x, mesh, self.seq_dim, length), output)

    def _prepared(self, mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict):
        """The local inputs, the inputs that were DTensors, and the block's context."""
        check_implementation(module, mesh)
        if mesh.size() > 1:
            check_weights(module, args, kwargs)
        given: list[torch.Tensor] = []
        map_tensors(given.append, (args, kwargs))
        wholes = wholes_among(given, mesh, self.seq_dim)
        own: list[torch.Tensor] = []

        def local(x):
            own.append(x.to_local() if isinstance(x, DTensor) else x)
            return own[-1]

        masks = lengths_of_masks(args, kwargs)
        args, kwargs = map_tensors(local, (args, kwargs))
        lengths = [x.shape[self.seq_dim] for x in own if has_sequence(x, self.seq_dim)]
        if lengths and masks and max(masks) > max(lengths):  # torch would advise to crop it
            raise ContextParallelError(
                f"ContextParallel(attention_type='sdpa') got a BlockMask of {max(masks)} positions "
                f"with shards of {max(lengths)}; for a module around flex_attention use "
                "ContextParallel(attention_type='flex') with the BlockMask of the whole sequence"
            )
        context = self._context(
            mesh,
            sliding_window(module),
            lengths,
            [x.shape[self.seq_dim] for x in wholes],
        )
        self._check_recomputed(module, context)
        return args, kwargs, wholes, context

    @torch.compiler.disable
    def _run_flex(self, mesh, names, module: nn.Module, forward, args: tuple, kwargs: dict):
        """Run the forward of a module around ``flex_attention``, on DTensors."""
        try:
            places, given, context = self._found_in_flex(mesh, names, module, args, kwargs)
        except ContextParallelError as error:
            tell_refusal(mesh, error)
            raise
        known = lengths_of_masks(args, kwargs)
        uneven = context.uneven or any(length % mesh.size() for length in known)
        lengths = global_lengths(given, mesh, self.seq_dim, uneven)
        if reason := no_order(context, *lengths[:2]):
            error = ContextParallelError(f"flex_attention on plain shards is refused: {reason}")
            tell_refusal(mesh, error)
            raise error
        args, kwargs = as_dtensors(places, args, kwargs, mesh, self.seq_dim, lengths)
        were_plain = any(not isinstance(x, DTensor) for x in given)
        scope = enabled_for_shards if were_plain else enabled
        try:
            with scope(context.schedule, context.layout(lengths[0])):
                output = forward(module, *args, **kwargs)
        except RuntimeError as error:
            if not were_plain or MIXED not in str(error):
                raise
            raise ContextParallelError(on_dtensors(module)) from error
        return map_tensors(plain, output) if were_plain else output

    def _found_in_flex(self, mesh: DeviceMesh, names, module: nn.Module, args, kwargs):
        """The places of query, key and value, these tensors, and the block's context."""
        places = find_inputs(type(module).__name__, names, args, kwargs)
        given = [value_at(place, args, kwargs) for place in places]
        wholes = wholes_among(given, mesh, self.seq_dim)
        context = self._context(mesh, None, None, [x.shape[self.seq_dim] for x in wholes])
        if reason := context.unknown_order():
            raise ContextParallelError(reason)
        self._check_recomputed(module, context)
        return places, given, context

    def _check_recomputed(self, module: nn.Module, context: PlainContext) -> None:
        """Refuse to recompute a checkpoint in a different order, as after the block around has
        ended: its gradients would be wrong."""
        order = context.balancer, context.order_is_known
        if not in_backward():
            self._orders[module] = order
        elif not repeats() and self._orders.get(module, order) != order:
            raise ContextParallelError(
                f"a module in ContextParallel(balancer='auto') ran in the order "
                f"{self._orders[module][0]!r} and is recomputed in the order {order[0]!r}: the "
                "context_parallel block, or the scope of enabled(layout=...), has ended. Run "
                "the backward inside it, or state the order with ContextParallel(balancer=...)"
            )

    def _context(self, mesh, window, own: list[int] | None, whole: list[int]) -> PlainContext:
        """The block's context for inputs of these local (None: any) and global lengths."""
        schedule = current_schedule() if self.schedule is None else self.schedule
        balancer, known = self.balancer, True
        if balancer == "auto":
            around, options = plain_context(), current_options()
            if around is not None and around.mesh == mesh:
                balancer, known = around.balancer, around.order_is_known
                whole = [*whole, *around.whole_lengths]
            else:
                balancer = None if options is None else options.layout
        own = None if own is None else frozenset(own)
        return PlainContext.of(
            mesh, schedule, balancer, whole, order_is_known=known, lengths=own, window=window
        )


def _no_fused_kernel(module: nn.Module, args: tuple) -> None:
    pass
