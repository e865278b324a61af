"""Ranks that share GPUs: a process group whose collectives go through host memory, by gloo.

NCCL needs one GPU for each rank. With this group, tests of several ranks run on a machine that has
fewer::

    CP_DISPATCH_TEST_RANKS=4 python -m pytest tests/gpu/test_layouts_cuda.py -k "4GPUs and flash"

It serves to test kernels on CUDA, and which rank computes what. Ranks that share one GPU also write
to each other's memory there, as peers do, in streams. Times mean nothing.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _create_work_from_future,
    _register_process_group,
    _resolve_process_group,
)

from cp_dispatch._compat import symmetric_memory
from cp_dispatch.schedules import room

NAME = "staged"


def ranks() -> int:
    """The number of ranks for tests: the number of GPUs, or that of the environment variable."""
    return int(os.environ.get("CP_DISPATCH_TEST_RANKS", torch.cuda.device_count()))


def is_staged() -> bool:
    """Whether ranks share GPUs."""
    return ranks() > torch.cuda.device_count()


def register() -> None:
    # torch's symmetric memory refuses ranks that share a GPU unless this is set.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    room.symmetric_memory = SharedMemory
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, Staged, devices=["cpu", "cuda"])


class SharedMemory:
    """torch's symmetric memory, which needs the store of a group; a group in Python has none."""

    empty_strided_p2p = staticmethod(getattr(symmetric_memory, "empty_strided_p2p", None))

    @staticmethod
    def rendezvous(own: torch.Tensor, name: str):
        return symmetric_memory.rendezvous(own, _resolve_process_group(name).meeting_place)


class Staged(dist.ProcessGroup):
    """Every collective waits for the current stream, and is complete when it returns."""

    def __init__(self, store, rank: int, size: int, timeout):
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._number = size
        self._store = dist.PrefixStore("symmetric", store)

    @functools.cached_property
    def meeting_place(self) -> str:
        """The name of a group of torch's own with the same ranks, without collectives."""
        name = f"{self.pg_name} of symmetric memory"
        self._met = dist.ProcessGroup(self._store, self.rank(), self._number)
        _register_process_group(name, self._met)  # which holds no reference to it
        return name

    def size(self) -> int:
        return self._number

    def getBackendName(self) -> str:
        return NAME

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        for tensor in tensors:
            # Gloo has no mean. 16-bit values are summed in 32 bits, as NCCL does within a GPU.
            whole = _to_host(tensor)
            wide = whole.float() if whole.dtype.itemsize == 2 else whole
            mean = opts.reduceOp == dist.ReduceOp.AVG
            self._inner.allreduce(
                [wide],
                _options(dist.AllreduceOptions, dist.ReduceOp.SUM if mean else opts.reduceOp),
            ).wait()
            tensor.copy_(wide / self._number if mean else wide)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors, opts):
        (tensor,) = tensors
        whole = _to_host(tensor)
        self._inner.broadcast([whole], opts).wait()
        tensor.copy_(whole)
        return _done(tensors)

    def allgather(self, outputs, inputs, opts=None):
        for output, tensor in zip(outputs, inputs, strict=True):
            parts = [_to_host(x) for x in output]
            self._inner.allgather([parts], [_to_host(tensor)]).wait()
            for x, part in zip(output, parts, strict=True):
                x.copy_(part)
        return _done(outputs)

    def _allgather_base(self, output, tensor, opts=None):
        return self.allgather([list(output.view(-1).chunk(self._number))], [tensor.reshape(-1)])

    all_gather_single = _allgather_base  # its name since torch 2.13

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def _reduce_scatter_base(self, output, tensor, opts):
        whole = tensor.clone()
        self.allreduce([whole], opts)
        output.copy_(whole.view(-1).chunk(self._number)[self.rank()].view_as(output))
        return _done([output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts):
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    def scatter(self, outputs, inputs, opts):
        (output,) = outputs
        whole = _to_host(output)
        parts = [[_to_host(x) for x in own] for own in inputs]
        self._inner.scatter([whole], parts, opts).wait()
        output.copy_(whole)
        return _done(outputs)

    def alltoall_base(self, output, tensor, output_sizes, input_sizes, opts=None):
        received = torch.empty_like(output, device="cpu", memory_format=torch.contiguous_format)
        self._inner.alltoall_base(
            received, _to_host(tensor), output_sizes, input_sizes, dist.AllToAllOptions()
        ).wait()
        output.copy_(received)
        return _done([output])

    def barrier(self, opts=None):
        self._inner.barrier().wait()
        return _done([])


def _options(kind, operation):
    options = kind()
    options.reduceOp = operation
    return options


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _done(result):
    """The work object of a collective that is complete, also on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)
