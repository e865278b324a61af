"""``varlen_attn`` of this rank's shards inside ``context_parallel`` is refused.

It would attend to the shards alone and take cumulative lengths of the whole sequence for theirs.
DTensors are torch's own error, which has no rule for them.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import forget_resolved_kernels, is_fake, varlen_ops
from cp_dispatch.agreement import tell_refusal
from cp_dispatch.errors import ContextParallelError

_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
_installed: list[torch.library.Library] = []


def install(plain_context) -> None:
    """Stand before torch's kernels, from the first block on and for good: putting kernels there and
    taking them away takes a millisecond, at every block. Outside of blocks calls go on to torch's.

    ``plain_context()`` says whether plain tensors are shards.
    """
    ops = [] if _installed else varlen_ops()
    if not ops:
        return
    # All fetched first: a kernel at one key changes what torch computes for the others.
    kernels = {
        (op, key): torch.library.get_kernel(f"torch_attn::{op}", key) for op in ops for key in _KEYS
    }
    library = torch.library.Library("torch_attn", "IMPL")
    _installed.append(library)
    for (op, key), kernel in kernels.items():
        library.impl(op, _before(kernel, plain_context), key, with_keyset=True, allow_override=True)
    for op in ops:
        forget_resolved_kernels(getattr(torch.ops.torch_attn, op).default)


def _before(kernel, plain_context):
    def varlen_attn(keyset, *args, **kwargs):
        # A trace goes on to torch's, and its graph raises where it runs.
        ours = not any(isinstance(x, DTensor) or is_fake(x) for x in args)
        context = plain_context() if ours else None
        if context is not None:
            error = ContextParallelError(
                "varlen_attn of plain tensors inside context_parallel, or in a module with the "
                "style ContextParallel, would attend to this rank's shard alone. Supported there: "
                "scaled_dot_product_attention, with documents as an attn_mask, and flex_attention, "
                "with documents in a BlockMask that is among the buffers. To attend to local "
                "tensors alone, call it outside of the block."
            )
            tell_refusal(context.mesh, error)
            raise error
        return kernel.call_boxed(keyset, *args, **kwargs)

    return varlen_attn
