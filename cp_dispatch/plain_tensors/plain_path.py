"""Fast path for eager calls on plain shards, which skips the dispatch of our own ops.

As :mod:`cp_dispatch.fast_path` for DTensors, see Note [Eager calls]: the same kernels run inside an
``autograd.Function`` that saves the same tensors as the op's own. Results have no specs that a
first call would have to find out, so the first call takes this path too. Calls with a mask or
dropout, under a dispatch mode, with tensors of other types, and with ``create_graph=True`` go to
the op.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from cp_dispatch._compat import dispatch_modes_are_on, resolve_group, run_uncompiled
from cp_dispatch.backends import BACKENDS
from cp_dispatch.bounded import keep
from cp_dispatch.fast_path import Attention, scope_of
from cp_dispatch.graphs import recomputed
from cp_dispatch.groups import exists
from cp_dispatch.kernels import Repeated
from cp_dispatch.ops import backward_op

_known: dict[tuple, _Kind] = {}
_MAX_KNOWN = 256


def attend(backend: str, arguments: tuple, query, key, value) -> Tensor | None:
    """Output of the op with ``arguments`` after the tensors; None if the call has to go to it."""
    mask, seed, *rest = arguments
    if mask is not None or seed is not None or dispatch_modes_are_on():
        return None
    if not _are_plain(query, key, value):
        return None
    group_name = rest[-3]
    # Names of groups repeat after destroy_process_group, and if ranks are threads.
    group = resolve_group(group_name) if group_name else None
    slot = (
        backend, group, query.device, query.size(-1),
        *[tuple(x) if isinstance(x, list) else x for x in rest],
    )  # fmt: skip
    kind = _known.get(slot)
    if kind is None:
        for old in [old for old, other in list(_known.items()) if other.is_gone]:
            _known.pop(old, None)
        kind = _Kind(backend, arguments, group)
        keep(_known, slot, kind, _MAX_KNOWN)
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        return _Attention.apply(kind, query, key, value)
    return kind.forward(query, key, value)[0]


def _are_plain(*tensors: Tensor) -> bool:
    """Whether no tensor has a dispatch of its own, as subclasses may."""
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return False
    return True


class _Kind:
    """Calls of one kind: those of an op with the same arguments, group, device and head dim."""

    def __init__(self, backend: str, arguments: tuple, group):
        self._backend, self._arguments = backend, arguments
        self._thread, self._group = threading.get_ident(), group
        self._kernels = Repeated(BACKENDS[backend], arguments)

    @property
    def is_gone(self) -> bool:
        """Whether the group is one from before destroy_process_group."""
        # Ranks that are threads have a world each.
        is_ours = self._group is not None and self._thread == threading.get_ident()
        return is_ours and not exists(self._group)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        with scope_of(self._backend, ""):
            return self._kernels.forward(query, key, value)

    def backward(self, grad_output: Tensor, saved, key_grad: bool) -> tuple[Tensor, ...]:
        tensors = grad_output, *saved
        if torch.is_grad_enabled() or dispatch_modes_are_on() or not _are_plain(*tensors):
            op = backward_op(self._backend)
            return op(*tensors, *self._arguments, key_grad, False)[:3]
        with scope_of(self._backend, "_backward"):
            return self._kernels.backward(*tensors, key_grad)


class _Attention(Attention):
    """As for DTensors; only what is saved differs."""

    @staticmethod
    @run_uncompiled
    def forward(ctx, kind, query, key, value):
        output, logsumexp = kind.forward(query, key, value)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        recomputed.watch(output)
        ctx.prepared = kind
        ctx.set_materialize_grads(False)
        return output
