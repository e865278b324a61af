"""Fast path for repeated eager calls, which skips DTensor's dispatch.

Note [Eager calls]
~~~~~~~~~~~~~~~~~~
The first call of its kind takes the full path: plan, op, DTensor's rule, sharding cache. Its plan,
job and output specs depend only on what :func:`slot` contains. A second call runs the same kernels
on the local tensors and gives the results the same specs, inside an ``autograd.Function`` that
saves the same tensors as the op's own, so checkpoints may record one and recompute with the other.

Dispatch modes (FLOP counters, selective checkpointing, fake tensors, any trace) see the op, because
calls then take the full path. So do calls whose inputs have to be redistributed, with masks or
dropout, with other tensor types inside a DTensor, with an incoming gradient of a different
placement, and with ``create_graph=True``.
"""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import (
    below_autograd,
    dispatch_modes_are_on,
    dress,
    dtensor_spec,
    groups_of,
    local_tensor,
    profiler_is_on,
    run_uncompiled,
)
from cp_dispatch.backends import BACKENDS
from cp_dispatch.bounded import keep
from cp_dispatch.graphs import recomputed
from cp_dispatch.groups import exists
from cp_dispatch.kernels import Repeated, without_autocast
from cp_dispatch.ops import backward_op
from cp_dispatch.planning.choose import sdp_flags
from cp_dispatch.sharding import target_placements

_known: dict[tuple, Prepared] = {}
_MAX_KNOWN, _MAX_GRADIENTS = 256, 16


def slot(options, query, key, value, is_causal: bool, scale, enable_gqa: bool) -> tuple | None:
    """Everything that a call without mask and dropout depends on; None if it has to take the full
    path.

    The mesh is represented by its groups. Slices of one mesh may be created again and again, and
    are equivalent; but equal meshes may have different groups.
    """
    if dispatch_modes_are_on() or not _are_plain_dtensors(query, key, value):
        return None
    if query.ndim != 4:  # what is learned is about the tensors that the op gets
        return None
    query_spec = dtensor_spec(query)
    mesh = query_spec.mesh
    needs = query.requires_grad or key.requires_grad or value.requires_grad
    return (
        options, groups_of(mesh), query_spec, dtensor_spec(key), dtensor_spec(value), is_causal,
        scale, enable_gqa, needs and torch.is_grad_enabled(), sdp_flags(),
        torch.cuda.current_device() if mesh.device_type == "cuda" else None,
    )  # fmt: skip


def known(slot: tuple) -> Prepared | None:
    """What :func:`learn` stored for calls like this one."""
    return _known.get(slot)


def learn(slot: tuple, plan, query, key, value, arguments, output, logsumexp) -> None:
    """Store the results of a call that took the full path; ``arguments`` are those of the op."""
    placements = [x.placements for x in (query, key, value)]
    target, key_target = target_placements(*placements)
    mesh = query.device_mesh
    if (
        placements != [target, key_target, key_target]
        or mesh.get_coordinate() is None
        or output.dtype is not query.dtype
        or not _are_plain_dtensors(output, logsumexp)
    ):
        return
    prepared = Prepared(plan.backend, mesh, arguments, output, logsumexp)
    for old in [old for old, other in list(_known.items()) if other.is_gone]:
        _known.pop(old, None)
    keep(_known, slot, prepared, _MAX_KNOWN)


def _are_plain_dtensors(*tensors) -> bool:
    """DTensors around plain tensors: not around an unfinished collective, nor another wrapper."""
    for x in tensors:  # a generator would cost the host as much again
        if type(x) is not DTensor or type(local_tensor(x)) is not Tensor:
            return False
    return True


class Prepared:
    """A prepared kind of call."""

    def __init__(self, backend: str, mesh, arguments: tuple, output: DTensor, logsumexp: DTensor):
        self.backend = backend
        self._mesh = mesh
        self._arguments = arguments
        self._specs = dtensor_spec(output), dtensor_spec(logsumexp)
        self._gradients: dict[tuple, tuple] = {}
        self._builds_graph = output.requires_grad
        self._thread, self._groups = threading.get_ident(), groups_of(mesh)
        self._kernels = Repeated(BACKENDS[backend], arguments)

    @property
    def is_gone(self) -> bool:
        """Whether the mesh is one from before destroy_process_group, whose groups it holds."""
        # Ranks that are threads have a world each.
        return self._thread == threading.get_ident() and not exists(self._groups[0])

    def __call__(self, query: DTensor, key: DTensor, value: DTensor) -> DTensor:
        if self._builds_graph:
            return Attention.apply(self, query, key, value)
        return self.forward(query, key, value)[0]

    def forward(self, query, key, value) -> tuple[DTensor, DTensor]:
        own = local_tensor(query), local_tensor(key), local_tensor(value)
        with scope_of(self.backend, ""):
            results = self._kernels.forward(*own)
        return tuple(map(dress, results, self._specs))

    def backward(self, grad_output, saved, key_grad: bool) -> tuple[DTensor, ...]:
        known = slot = None
        tensors = grad_output, *saved
        if (
            not torch.is_grad_enabled()
            and not dispatch_modes_are_on()
            and _are_plain_dtensors(*tensors)
            and self._are_alike(dtensor_spec(grad_output), self._specs[0])
        ):
            slot = *map(dtensor_spec, tensors), key_grad
            known = self._gradients.get(slot)
        if known is None:
            grads = backward_op(self.backend)(*tensors, *self._arguments, key_grad, False)
            if slot is not None and _are_plain_dtensors(*grads[:3]):
                specs = tuple(map(dtensor_spec, grads[:3]))
                keep(self._gradients, slot, specs, _MAX_GRADIENTS)
            return grads[:3]
        own = map(local_tensor, tensors)
        with scope_of(self.backend, "_backward"):
            grads = self._kernels.backward(*own, key_grad)
        return tuple(map(dress, grads, known))

    def _are_alike(self, spec, other) -> bool:
        return spec is other or (spec.placements == other.placements and self._is_on(spec.mesh))

    def _is_on(self, mesh) -> bool:
        return mesh is self._mesh or groups_of(mesh) == self._groups


def scope_of(backend: str, way: str):
    """Below autograd and, while a profiler is on, inside a range that it shows in place of the
    op."""
    if not profiler_is_on():
        return below_autograd()
    scope = contextlib.ExitStack()
    scope.enter_context(below_autograd())
    name = f"cp_dispatch::ring_{backend}_attention{way}"
    scope.enter_context(torch.profiler.record_function(name))
    return scope


class Attention(torch.autograd.Function):
    """As the op's own, in :mod:`cp_dispatch.ops`."""

    @staticmethod
    @run_uncompiled
    def forward(ctx, prepared, query, key, value):
        output, logsumexp = prepared.forward(query, key, value)
        # Neither the output itself, which autograd would detach twice, nor a detached one, because
        # both go through DTensor's dispatch. Autograd cannot see writes into this one.
        saved = dress(local_tensor(output), dtensor_spec(output))
        ctx.save_for_backward(query, key, value, saved, logsumexp)
        recomputed.watch(output)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @run_uncompiled
    def backward(ctx, grad_output):
        if grad_output is None:
            return None, None, None, None
        _, *needs = ctx.needs_input_grad
        saved = ctx.saved_tensors  # once, see cp_dispatch.ops
        recomputed.check_unwritten(saved[3])
        with without_autocast(grad_output):
            grads = ctx.prepared.backward(grad_output, saved, needs[1] or needs[2])
        return None, *(g if need else None for g, need in zip(grads, needs, strict=True))
