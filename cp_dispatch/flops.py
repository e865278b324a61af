"""FLOP formulas of the ops for ``torch.utils.flop_counter.FlopCounterMode``.

As torch counts its own kernels: 2 FLOPs per multiply-add, the mask not counted, 2 products
forward and 5 backward (one of them recomputes the scores). On DTensors a call counts for the
whole sequence, on local shards for the rank's rows against all ``key_length`` keys.
"""

from __future__ import annotations

from torch.utils.flop_counter import register_flop_formula

from cp_dispatch.backends import BACKENDS
from cp_dispatch.ops import backward_op, forward_op


def _forward_flops(
    query,
    key,
    value,
    attn_mask,
    dropout_seed,
    dropout_p,
    origin,
    is_causal,
    scale,
    query_length,
    key_length,
    *_,
    **__,
):
    batch, heads, rows, dim = query
    return 2 * batch * heads * rows * key_length * (dim + value[-1])


def _backward_flops(
    grad_output, query, key, value, output, logsumexp,
    attn_mask, dropout_seed, dropout_p, origin,
    is_causal, scale, query_length, key_length, *_, **__,
):  # fmt: skip
    batch, heads, rows, dim = query
    # Scores, dQ, dK over the head dim; dP, dV over the value's.
    return 2 * batch * heads * rows * key_length * (3 * dim + 2 * value[-1])


register_flop_formula([forward_op(name).overloadpacket for name in BACKENDS])(_forward_flops)
register_flop_formula([backward_op(name).overloadpacket for name in BACKENDS])(_backward_flops)
