"""Process groups, the memory that their ranks share, and DTensor."""

import contextlib
import functools
import hashlib
import operator
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops.utils import (
    generate_redistribute_costs,
    register_op_strategy,
)

from cp_dispatch._compat.static_method import StaticMethod

__all__ = [
    "DTensorSpec",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "RuntimeSchemaInfo",
    "Unflatten",
    "all_gather_single",
    "dress",
    "dtensor_spec",
    "generate_redistribute_costs",
    "group_name",
    "local_tensor",
    "local_tensor_mode",
    "new_group_of_these",
    "register_op_strategy",
    "resolve_group",
    "symmetric_memory",
    "torch_context_parallel_is_on",
]


# all_gather_into_tensor until torch 2.12, which deprecates that name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def new_group_of_these(ranks: Sequence[int], **options) -> dist.ProcessGroup:
    """A group that its ranks make among themselves, whatever others do meanwhile.

    Where ``init_process_group`` got a ``device_id``, ``new_group`` splits a communicator off that
    of the world, which NCCL does with all its ranks together, also with local synchronization: a
    stage of a pipeline would wait for another that waits for it.
    """
    world = dist.distributed_c10d._get_default_group()
    device, apart = world.bound_device_id, len(ranks) < dist.get_world_size()
    if apart:
        world.bound_device_id = None
    try:
        with _named_by_ranks(ranks):
            return dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        if apart:
            world.bound_device_id = device


_group_names = threading.local()


@contextlib.contextmanager
def _named_by_ranks(ranks: Sequence[int]):
    """Inside, a group gets a name that follows from its ranks, by which they find each other.

    Torch's name counts the groups that a rank is in, or on torch 2.14 has made, of which another
    may have more: the ranks would wait for each other under two names. And there the count goes
    up on these ranks alone, so that a later group of more ranks would have two names as well.
    """
    c10d = dist.distributed_c10d
    if not hasattr(c10d._process_group_name, "of_cp_dispatch"):
        c10d._process_group_name = _or_torchs_name(c10d._process_group_name)
    text = "_".join(map(str, sorted(ranks)))
    start = f"cp_dispatch_{hashlib.sha256(text.encode()).hexdigest()[:16]}_"
    number = sum(name.startswith(start) for name in c10d._world.pg_names.values())
    _group_names.wanted = f"{start}{number}"
    try:
        yield
    finally:
        _group_names.wanted = None


def _or_torchs_name(torchs):
    """For good, as threads make groups side by side: whoever wants no name of ours gets torch's."""

    @functools.wraps(torchs)
    def name(ranks, use_hashed_name):
        return getattr(_group_names, "wanted", None) or torchs(ranks, use_hashed_name)

    name.of_cp_dispatch = True
    return name


# Buffers that the ranks of a group address; None in a torch without them.
try:
    from torch._C._distributed_c10d import _SymmetricMemory as symmetric_memory
except ImportError:
    symmetric_memory = None

#: Mesh, placements, global shape, strides and dtype of a DTensor, hashable.
dtensor_spec: Callable[[DTensor], DTensorSpec] = operator.attrgetter("_spec")

#: This rank's shard of a DTensor, without autograd and without a collective. (Both are asked for
#: many times a call, where a function of Python takes longer than what it does.)
local_tensor: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def dress(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """The DTensor of which ``local`` is this rank's part, a leaf, without the rest of the
    constructor, which does nothing and takes longer."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def group_name(group: dist.ProcessGroup) -> str:
    """The name by which :func:`resolve_group` finds a group."""
    return group.group_name


class Unflatten(StaticMethod):
    """The one by which compiled graphs make the DTensors that they return."""

    def __init__(self):
        super().__init__(DTensor, "__tensor_unflatten__")


def local_tensor_mode() -> type | None:
    """The class of torch's ``LocalTensorMode``, None where this torch has none."""
    try:
        from torch.distributed._local_tensor import LocalTensorMode
    except ImportError:
        return None
    return LocalTensorMode


def torch_context_parallel_is_on() -> bool:
    """Whether torch's experimental context-parallel dispatcher handles SDPA at present."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers
