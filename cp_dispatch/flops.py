"""FLOP formulas of the ops for ``torch.utils.flop_counter.FlopCounterMode``.

They count as torch counts its own kernels: 2 FLOPs per multiply-add, without regard to the mask, 2
products forward and 5 backward (one of them recomputes the scores). A call on DTensors counts for
the whole sequence, a call on local shards for the rank's rows with all ``key_length`` keys.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from cp_dispatch._compat import is_fake, local_tensor
from cp_dispatch.backends import BACKENDS
from cp_dispatch.ops import backward_op, forward_op
from cp_dispatch.varlen.ops import BACKWARD, FORWARD


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


def _pairs(query, cu_seq_q, cu_seq_k, query_length: int, key_length: int) -> float:
    """Pairs of a row of ``query`` with a key of its document; with any key where the documents have
    no data."""
    starts = [local_tensor(x) if isinstance(x, DTensor) else x for x in (cu_seq_q, cu_seq_k)]
    if any(map(is_fake, starts)):
        return query.shape[0] * key_length
    rows, keys = (x.diff().tolist() for x in starts)
    everything = sum(n * m for n, m in zip(rows, keys, strict=True))
    return everything * query.shape[0] / max(1, query_length)


def _varlen_flops(query, key, value, cu_seq_q, cu_seq_k, window, scale, *lengths, **_):
    _, heads, dim = query.shape
    pairs = _pairs(query, cu_seq_q, cu_seq_k, *lengths[:2])
    return int(2 * heads * pairs * 2 * dim)


def _varlen_backward_flops(grad_output, query, key, value, output, logsumexp, *rest, **_):
    return int(_varlen_flops(query, key, value, *rest) * 2.5)


register_flop_formula([forward_op(name).overloadpacket for name in BACKENDS])(_forward_flops)
register_flop_formula([backward_op(name).overloadpacket for name in BACKENDS])(_backward_flops)
register_flop_formula(FORWARD.overloadpacket, get_raw=True)(_varlen_flops)
register_flop_formula(BACKWARD.overloadpacket, get_raw=True)(_varlen_backward_flops)
