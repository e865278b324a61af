"""Context parallelism for plain attention calls on sequence-sharded DTensors:
``F.scaled_dot_product_attention``, ``flex_attention`` and ``varlen_attn``.

    import cp_dispatch
    cp_dispatch.enable()

Importing the package does not change torch. ``enable()`` does, and ``disable()`` undoes it.
"""

from cp_dispatch import flops as _flops  # noqa: F401  registers the FLOP formulas
from cp_dispatch import sharding as _sharding  # noqa: F401  registers the DTensor rules
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.create import create_cp_block_mask
from cp_dispatch.flex.explain import explain_flex
from cp_dispatch.flex.plan import FlexPlan
from cp_dispatch.layouts import (
    BlockBalanced,
    HeadTail,
    PerDocumentHeadTail,
    next_token_labels,
    shard,
    unshard,
)
from cp_dispatch.native import merge_ops as _merge_ops  # noqa: F401  registers the merge
from cp_dispatch.ops import ops_to_save
from cp_dispatch.plain import context_parallel, context_parallel_unshard, set_rotate_method
from cp_dispatch.plain_tensors.parallel_style import ContextParallel
from cp_dispatch.plan import Plan
from cp_dispatch.planning.explain import explain
from cp_dispatch.toggle import disable, enable, enabled, is_enabled
from cp_dispatch.varlen.explain import explain_varlen
from cp_dispatch.varlen.plan import VarlenPlan

__version__ = "0.1.0"

__all__ = [
    "BlockBalanced",
    "ContextParallel",
    "ContextParallelError",
    "FlexPlan",
    "HeadTail",
    "PerDocumentHeadTail",
    "Plan",
    "VarlenPlan",
    "context_parallel",
    "context_parallel_unshard",
    "create_cp_block_mask",
    "disable",
    "enable",
    "enabled",
    "explain",
    "explain_flex",
    "explain_varlen",
    "is_enabled",
    "next_token_labels",
    "ops_to_save",
    "set_rotate_method",
    "shard",
    "unshard",
]
