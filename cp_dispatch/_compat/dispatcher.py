"""Torch's dispatcher, autograd and kernels."""

import functools
from collections.abc import Callable

import torch
import torch.utils.checkpoint

# As kernels of torch's autograd: what is made below is no view of anything, so that users may write
# to results in place.
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch._C._dynamo.guards import _reinterpret_tensor as view_of
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as outside_functorch,
)
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from cp_dispatch._compat.static_method import StaticMethod

__all__ = [
    "CausalBiasDispatch",
    "PLAIN_KEYS",
    "ReentrantForward",
    "add_subclass_rule",
    "argument_names",
    "below_autograd",
    "composite_kernel",
    "cudnn_logsumexp_ndim",
    "current_raw_stream",
    "disable_current_modes",
    "dispatch_modes_are_on",
    "forget_resolved_kernels",
    "functorch_is_active",
    "fused_sdp_choice",
    "get_unwrapped",
    "has_tangent",
    "in_backward",
    "is_capturing",
    "is_functorch_wrapped_tensor",
    "kernel_is_registered",
    "outside_functorch",
    "plain_kernel",
    "profiler_is_on",
    "remove_subclass_rule",
    "sdp_priority_order",
    "set_plain_kernel",
    "varlen_ops",
    "version_witness",
    "view_of",
    "withdraw",
]


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode AD follows a tensor."""
    level = torch.autograd.forward_ad._current_level
    return level >= 0 and (
        torch.autograd.forward_ad.unpack_dual(tensor, level=level).tangent is not None
    )


functorch_is_active = torch._C._are_functorch_transforms_active

fused_sdp_choice = torch._fused_sdp_choice


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def sdp_priority_order() -> tuple[int, ...]:
    """The order in which torch tries its SDPA backends, as ``sdpa_kernel(set_priority=True)``
    leaves it."""
    return tuple(torch._C._get_sdp_priority_order())


def composite_kernel(dispatch_key: str):
    """Torch's own kernel of ``aten::scaled_dot_product_attention`` behind a dispatch key."""
    return torch.library.get_kernel("aten::scaled_dot_product_attention", dispatch_key)


def varlen_ops() -> list[str]:
    """The ops behind ``torch.nn.attention.varlen`` that this torch has."""
    try:
        import torch.nn.attention.varlen  # noqa: F401  defines them
    except ImportError:
        return []
    return [op for op in ("_varlen_attn", "_varlen_attn_out") if hasattr(torch.ops.torch_attn, op)]


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data that has a DTensor's version counter, also when that is gone."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def profiler_is_on() -> bool:
    """Whether a profiler records in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def forget_resolved_kernels(op: torch._ops.OpOverload) -> None:
    """Let the Python dispatcher, which traces go by, look up an op's kernels anew; registering and
    removing one does not. It would go on to a kernel of autograd's that is no longer there, whose
    stand-in computes no gradients."""
    op._dispatch_cache.clear()


def argument_names(op: torch._ops.OpOverload) -> list[str]:
    """The names of an op's arguments, in their order."""
    return [argument.name for argument in op._schema.arguments]


def withdraw(library: torch.library.Library) -> None:
    """Take out all that was registered with a library, now and not when it is collected."""
    library._destroy()


def kernel_is_registered(op: str, dispatch_key: str) -> bool:
    """Whether an op has a kernel of its own for a dispatch key, not by way of an alias key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, dispatch_key)


def dispatch_modes_are_on() -> bool:
    """Whether anybody watches or replaces operators in this thread, as any trace does."""
    return torch._C._len_torch_dispatch_stack() > 0


def current_raw_stream(device: torch.device) -> int:
    """The handle of a device's current stream; 0 on CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


#: Whether the current stream is captured by a CUDA graph, where CUDA is in use; as torch.cuda's
#: own, which is one more function of Python.
is_capturing: Callable[[], bool] = (
    torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else bool
)


def add_subclass_rule(op: torch._ops.HigherOrderOperator, kind: type, rule) -> None:
    """Let a higher-order op run ``rule`` where an argument is of a tensor subclass; a rule that
    returns NotImplemented leaves the call to others."""
    remove_subclass_rule(op, kind)
    op.py_impl(kind)(rule)


def remove_subclass_rule(op: torch._ops.HigherOrderOperator, kind: type) -> None:
    """As before :func:`add_subclass_rule`."""
    op.python_key_table.pop(kind, None)


# Where a higher-order op's kernels for plain tensors are: with autograd, and in inference mode.
PLAIN_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeExplicitAutograd)


def plain_kernel(op: torch._ops.HigherOrderOperator, dispatch_key):
    """The kernel of a higher-order op behind one of ``PLAIN_KEYS``."""
    return op.py_kernels[dispatch_key]


def set_plain_kernel(op: torch._ops.HigherOrderOperator, dispatch_key, kernel) -> None:
    """Put a kernel there, also where the op remembers the one before."""
    op.py_kernels[dispatch_key] = kernel
    op._dispatch_cache.clear()


class CausalBiasDispatch(StaticMethod):
    """The function that ``CausalBias`` hands its calls to."""

    def __init__(self):
        super().__init__(CausalBias, "_dispatch")


class ReentrantForward(StaticMethod):
    """The forward of checkpoints with ``use_reentrant=True``: ``forward(ctx, function, preserve,
    *args)``, whose backward calls ``function`` a second time."""

    def __init__(self):
        super().__init__(torch.utils.checkpoint.CheckpointFunction, "forward")


@functools.cache
def cudnn_logsumexp_ndim() -> int:
    """Dims of the logsumexp that cuDNN attention returns: 4 with a trailing 1, or 3."""
    query = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, query, query, None, True, 0.0, False, False
    )
    return out[1].dim()
