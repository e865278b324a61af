"""Context parallelism for chosen modules, as a style of ``parallelize_module``."""

from __future__ import annotations

import inspect
import types
import weakref
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dispatch._compat import in_backward
from cp_dispatch.agreement import tell_refusal
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.style import (
    as_dtensors,
    find_inputs,
    global_lengths,
    lengths_of_masks,
    value_at,
)
from cp_dispatch.flex.traced_style import NO_ORDER, plain
from cp_dispatch.flex.traced_style import traced_forward as traced_flex_forward
from cp_dispatch.fused_modules import no_fast_path
from cp_dispatch.hf_masks import check_implementation, sliding_window
from cp_dispatch.layouts import Balancer, Span
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.plain import current_schedule
from cp_dispatch.plain_context import PlainContext, check_balancer, check_order, whole_of
from cp_dispatch.style_mark import mark
from cp_dispatch.toggle import (
    current_options,
    enabled,
    enabled_for_shards,
    plain_context,
    plain_shards,
)
from cp_dispatch.traced_style import map_tensors, traced_forward

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
    ``Shard(seq_dim)`` on the mesh; the module gets their local tensors, and its outputs, whose
    sequence has to be that dim too, become DTensors again.

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
        self._forwards: dict[tuple, types.FunctionType] = {}
        self._orders = weakref.WeakKeyDictionary()  # in which each module ran last

    def __reduce__(self):
        # Without what it keeps of modules: groups and weak references, which nothing can copy.
        make = partial(type(self), balancer=self.balancer, schedule=self.schedule)
        return make, (self.seq_dim, self.attention_type)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_order(device_mesh, self.balancer)
        mark(
            module, device_mesh,
            seq_dim=self.seq_dim, attention_type=self.attention_type, balancer=self.balancer,
            schedule=self.schedule,
        )  # fmt: skip
        # Meshes that are equal may have other groups, as those before destroy_process_group.
        group = None if device_mesh.get_coordinate() is None else device_mesh.get_group()
        if getattr(module.forward, "in_style_on", None) == (device_mesh, group):
            return module  # applied again, as to one that two parents share
        if self.attention_type == "flex":
            kind = tuple(inspect.signature(module.forward).parameters)
        else:
            check_implementation(module, device_mesh)
            kind = sliding_window(module)
        # Bound, so that a copy of the module has its own. No hooks: dynamo guards on their ids,
        # and would compile every layer of a model anew.
        forward = self._forward(device_mesh, group, kind, _own_forward(module))
        module.forward = types.MethodType(forward, module)
        if self.attention_type == "sdpa" and isinstance(module, nn.MultiheadAttention):
            # An encoder layer in eval mode takes its attention's parameters for a kernel of its
            # own and never calls it, unless something is hooked to it.
            module.register_forward_pre_hook(_no_fused_kernel)
        return module

    def _forward(self, mesh: DeviceMesh, group, kind, own):
        """The same function for modules that are alike, for their graphs are. ``kind``: their
        window or, of modules around ``flex_attention``, the names of their arguments."""
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
        forward.in_style_on = mesh, group
        if own is None:
            self._forwards[key] = forward
        return forward

    @torch.compiler.disable
    def _run(self, mesh: DeviceMesh, module: nn.Module, forward, args: tuple, kwargs: dict):
        """The module's forward in a block of its own."""
        try:
            args, kwargs, wholes, context = self._prepared(mesh, module, args, kwargs)
        except ContextParallelError as error:
            tell_refusal(mesh, error)
            raise
        with plain_shards(context), no_fast_path():
            output = forward(module, *args, **kwargs)
        if not wholes:
            return output
        return map_tensors(partial(self._whole, mesh, wholes[0].shape[self.seq_dim]), output)

    def _prepared(self, mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict):
        """Local inputs, those that were DTensors, and the block."""
        check_implementation(module, mesh)
        given: list[torch.Tensor] = []
        map_tensors(given.append, (args, kwargs))
        wholes = self._wholes(mesh, given)
        own: list[torch.Tensor] = []

        def local(x):
            own.append(x.to_local() if isinstance(x, DTensor) else x)
            return own[-1]

        masks = lengths_of_masks(args, kwargs)
        args, kwargs = map_tensors(local, (args, kwargs))
        lengths = [x.shape[self.seq_dim] for x in own if self._has_sequence(x)]
        if lengths and masks and max(masks) > max(lengths):  # torch would say: crop it
            raise ContextParallelError(
                f"ContextParallel(attention_type='sdpa') takes no BlockMask of {max(masks)} "
                f"positions beside shards of {max(lengths)}; a module around flex_attention takes "
                "ContextParallel(attention_type='flex'), and with it the BlockMask of the whole "
                "sequence"
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
        """The forward of a module around ``flex_attention``, on DTensors."""
        try:
            places, given, context = self._found_in_flex(mesh, names, module, args, kwargs)
        except ContextParallelError as error:
            tell_refusal(mesh, error)
            raise
        known = [context.balancer.seq_len] if isinstance(context.balancer, Balancer) else []
        known += lengths_of_masks(args, kwargs)
        uneven = context.uneven or any(length % mesh.size() for length in known)
        lengths = global_lengths(given, mesh, self.seq_dim, uneven)
        args, kwargs = as_dtensors(places, args, kwargs, mesh, self.seq_dim, lengths)
        were_plain = any(not isinstance(x, DTensor) for x in given)
        scope = enabled_for_shards if were_plain else enabled
        with scope(context.schedule, context.layout(lengths[0])):
            output = forward(module, *args, **kwargs)
        return map_tensors(plain, output) if were_plain else output

    def _found_in_flex(self, mesh: DeviceMesh, names, module: nn.Module, args, kwargs):
        """Where query, key and value are, they, and the block."""
        places = find_inputs(type(module).__name__, names, args, kwargs)
        given = [value_at(place, args, kwargs) for place in places]
        wholes = self._wholes(mesh, given)
        context = self._context(mesh, None, None, [x.shape[self.seq_dim] for x in wholes])
        if not context.order_is_known:
            raise ContextParallelError(NO_ORDER)
        self._check_recomputed(module, context)
        return places, given, context

    def _wholes(self, mesh: DeviceMesh, given: list) -> list[DTensor]:
        """The inputs that are DTensors, which must be sharded along the sequence."""
        wholes = [x for x in given if isinstance(x, DTensor)]
        for x in wholes:
            fits = self._has_sequence(x) and x.device_mesh == mesh
            if not fits or list(x.placements) != [Shard(self.seq_dim % x.ndim)]:
                raise ContextParallelError(
                    f"ContextParallel(seq_dim={self.seq_dim}) takes plain shards, or DTensors "
                    f"Shard({self.seq_dim}) on {mesh}; an input of shape {list(x.shape)} is placed "
                    f"{x.placements} on {x.device_mesh}"
                )
        return wholes

    def _check_recomputed(self, module: nn.Module, context: PlainContext) -> None:
        """A checkpoint that is recomputed after the block around has ended would find another
        order, and its gradients would be wrong."""
        order = context.balancer, context.order_is_known
        if not in_backward():
            self._orders[module] = order
        elif self._orders.get(module, order) != order:
            raise ContextParallelError(
                f"a module in ContextParallel(balancer='auto') ran in the order "
                f"{self._orders[module][0]!r} and is recomputed in the order {order[0]!r}: the "
                "block of context_parallel, or the scope of enabled(layout=...), has ended. Run "
                "the backward inside, or name the order, ContextParallel(balancer=...)"
            )

    def _context(self, mesh, window, own: list[int] | None, whole: list[int]) -> PlainContext:
        """The block for inputs of these local and global lengths; local ones None for any."""
        schedule = current_schedule() if self.schedule is None else self.schedule
        uneven = any(length % mesh.size() for length in whole)
        balancer, known = self.balancer, True
        if balancer == "auto":
            around, options = plain_context(), current_options()
            if around is not None and around.mesh == mesh:
                balancer, known = around.balancer, around.order_is_known
                uneven |= around.uneven
                whole = [*whole, *around.whole_lengths]
            else:
                balancer = None if options is None else options.layout
        own = None if own is None else frozenset(own)
        return PlainContext(mesh, schedule, balancer, known, uneven, own, window, tuple(whole))

    def _has_sequence(self, x: torch.Tensor) -> bool:
        return -x.ndim <= self.seq_dim < x.ndim

    def _whole(self, mesh, length: int, x: torch.Tensor):
        """An output as the DTensor of which it is this rank's part."""
        if not self._has_sequence(x):
            return x
        own = chunk(Span(0, length), mesh.size())[mesh.get_local_rank()].length
        if x.shape[self.seq_dim] != own:
            raise ContextParallelError(
                f"ContextParallel(seq_dim={self.seq_dim}) makes DTensors of outputs again where "
                f"inputs are, but one of shape {list(x.shape)} does not have this rank's {own} of "
                f"{length} positions along dim {self.seq_dim}; give the module plain shards, or "
                "apply the style to a smaller one, whose outputs lie like its inputs"
            )
        return whole_of(mesh, x, self.seq_dim % x.ndim, length)


def _own_forward(module: nn.Module):
    """The forward that a module has instead of its class's, as a function of the module: a copy of
    the module takes a method along, as its own."""
    own = vars(module).get("forward")
    if own is None:
        return None
    if isinstance(own, types.MethodType) and own.__self__ is module:
        return own.__func__
    return lambda _, *args, **kwargs: own(*args, **kwargs)


def _no_fused_kernel(module: nn.Module, args: tuple) -> None:
    pass
