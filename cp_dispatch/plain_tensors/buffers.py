"""Buffers of :func:`~cp_dispatch.plain.context_parallel`, which are shards inside a block."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from cp_dispatch._compat import run_uncompiled
from cp_dispatch.errors import ContextParallelError, ContextParallelValueError
from cp_dispatch.flex.plain import local_form, swap
from cp_dispatch.layouts import Balancer, Span, shard
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.plain_tensors.sharded_buffers import sharded

_lock = threading.Lock()


def shard_of(mesh: DeviceMesh, buffer, dim: int, layout: Balancer | None):
    """A buffer's shard; for a BlockMask, its fields inside the block."""
    own = shard(mesh, buffer, dim, layout)
    if not isinstance(buffer, BlockMask):
        return own
    rank, size = mesh.get_local_rank(), mesh.size()
    rows, keys = (chunk(Span(0, length), size)[rank].length for length in buffer.seq_lengths)
    return local_form(own, rows, keys)


def length_of(buffer, dim: int) -> int:
    """The length of a buffer's sequence; for a BlockMask, that of its queries."""
    return buffer.seq_lengths[0] if isinstance(buffer, BlockMask) else buffer.shape[dim]


def listed(given, name: str) -> list:
    """An argument as a list, empty for None; a single buffer or dim is refused."""
    if isinstance(given, (torch.Tensor, BlockMask, int)):
        raise ContextParallelValueError(f"{name} must be a list, got one {type(given).__name__}")
    return [] if given is None else list(given)


def checked(buffers, dims, no_restore) -> tuple[list, list, set[int]]:
    """Buffers, their sequence dims, and the ids of those that are not to be restored."""
    buffers, dims = listed(buffers, "buffers"), listed(dims, "buffer_seq_dims")
    if len(buffers) != len(dims):
        raise ContextParallelValueError(
            f"buffers holds {len(buffers)} tensors, but buffer_seq_dims holds {len(dims)} ints"
        )
    ids = [id(buffer) for buffer in buffers]
    keep = {id(buffer) for buffer in listed(no_restore, "no_restore_buffers")}
    if not keep <= set(ids):
        raise ContextParallelValueError("no_restore_buffers must be a subset of buffers")
    for i, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        name = f"buffers[{i}]"
        if not isinstance(buffer, (torch.Tensor, BlockMask)):
            raise ContextParallelValueError(f"{name} must be a tensor, got {type(buffer).__name__}")
        is_mask = isinstance(buffer, BlockMask)
        if ids.index(id(buffer)) != i or id(buffer) in sharded:
            what = f"{name}, a BlockMask," if is_mask else f"{name} {list(buffer.shape)}"
            raise ContextParallelError(
                f"{what} is already a buffer of this block or of one around it; pass each buffer "
                "once"
            )
        if is_mask:
            continue
        if buffer.requires_grad:
            raise ContextParallelError(
                f"{name} {list(buffer.shape)} needs a gradient, which would be that of the whole "
                "tensor; call requires_grad_() on the shard inside the block, or use "
                "cp_dispatch.shard"
            )
        if (
            isinstance(dim, bool)
            or not isinstance(dim, int)
            or not -buffer.ndim <= dim < buffer.ndim
        ):
            raise ContextParallelValueError(
                f"{name} has shape {list(buffer.shape)}, which has no dim {dim!r}"
            )
    return buffers, dims, keep


@contextlib.contextmanager
def swapped(buffers: list, shards: list, keep: set[int]):
    """Within it the buffers hold the shards; afterwards they have their own storage again.

    Autograd saves a buffer by reference, and would find the whole tensor in a backward after the
    block. So tensors that autograd saves inside are saved as aliases, which keep the shard.
    """
    block = _Swap(buffers, shards, keep)
    try:
        with block.put():
            yield
    finally:
        block.put_back()


class _Swap:
    @run_uncompiled
    def __init__(self, buffers: list, shards: list, keep: set[int]):
        pairs = list(zip(buffers, shards, strict=True))
        self._keep = keep
        self._masks = [pair for pair in pairs if isinstance(pair[0], BlockMask)]
        self._tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
        self._ids = {id(x) for x, _ in self._masks + self._tensors}
        self._originals = [None if id(x) in keep else x.detach() for x, _ in self._tensors]
        self._fields = []
        with _lock:
            sharded.update(self._ids)

    @run_uncompiled
    def put(self):
        """Put the shards into the buffers. Returns a context manager to enter for the block."""
        for buffer, own in self._tensors:
            _put(buffer, own)
        for mask, own in self._masks:
            self._fields.append((mask, swap(mask, own)))
        kept = all(x is None for x in self._originals)
        return contextlib.nullcontext() if kept else _aliases(self._ids)

    @run_uncompiled
    def put_back(self) -> None:
        for (buffer, _), original in zip(self._tensors, self._originals, strict=True):
            if original is not None:
                buffer.data = original
        for mask, before in self._fields:
            if id(mask) not in self._keep:
                swap(mask, before)
        with _lock:
            sharded.difference_update(self._ids)


def _put(buffer: torch.Tensor, own: torch.Tensor) -> None:
    counts_versions = not buffer.is_inference()  # before it looks like the shard
    buffer.data = own
    if counts_versions:
        increment_version(buffer)  # a backward of an earlier graph must not find the shard


def _aliases(ids: set[int]):
    @run_uncompiled
    def pack(tensor):
        # No version for a buffer: putting the original back does not modify the shard.
        return tensor.detach(), None if id(tensor) in ids else tensor._version

    @run_uncompiled
    def unpack(saved):
        alias, version = saved
        if version is not None and alias._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {list(alias.shape)} saved inside "
                f"context_parallel is at version {alias._version}; expected version {version}"
            )
        return alias

    return saved_tensors_hooks(pack, unpack)
