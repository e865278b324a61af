"""The custom ops ``torch.ops.cp_dispatch.*``: schemas, fakes, kernels and autograd.

For each backend ``X`` there are ``ring_X_attention`` and ``ring_X_attention_backward``. On plain
tensors an op takes this rank's shards and communicates over ``group_name``. On DTensors it follows
the rules in :mod:`cp_dispatch.sharding`. Everything that the backward needs is an argument or a
saved tensor, so no op depends on the enabled options.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from cp_dispatch._compat import below_autograd, has_tangent, local_tensor_mode, run_uncompiled
from cp_dispatch.backends import BACKENDS, Backend
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs import recomputed
from cp_dispatch.graphs.checkpoints import attends_in
from cp_dispatch.graphs.order import keep_in_graph, stay_in_backward
from cp_dispatch.kernels import (
    job_of,
    no_mask_grad,
    order_of,
    placeholder,
    run_backward,
    run_forward,
    without_autocast,
)
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules.gradients import mask_gradient

NAMESPACE = "cp_dispatch"

# Shapes, for a rank that owns Sq of query_length rows and Sk of key_length keys:
#   query, grad_output, output (B, H, Sq, D), (B, H, Sq, Dv), (B, H, Sq, Dv)
#   key, value                 (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)
#   attn_mask                  (B or 1, H or 1, Sq or 1, key_length or 1), bool or a bias
#   logsumexp                  (B, H, Sq), natural log, float32; float64 for float64 and math
# layout "" is natural order, else the text of the balancer (see layouts/balancer.py) that defines
# the order of the shards. Then a mask's rows and keys are those of the whole sequence by original
# position, except those in mask_order: "rows", "keys" or "rows,keys" are in the order of the
# shards, and there are Sq rows. In natural order mask_order is "rows". The sharding rule places a
# mask by mask_order, not by the layout.
# All tensors have one dtype, except that output and grad_output of ring_math_attention are float64,
# and the gradient of a bias is float32 for 16-bit inputs, because ranks have yet to sum it.
# scale None is 1 / sqrt(D). ring_shape holds the sizes of the mesh dims that share the sequence,
# and group_name is the group of their ranks; [] and "" mean that this rank holds all of it.
# dropout_seed is one int64; origin is the global [first batch row, first head, number of heads].
# schedule "a+b" is a for the forward and b for the backward.
# key_grad False: grad_key and grad_value are placeholders without meaning; mask_grad likewise.
_OPTIONS = (
    "Tensor? attn_mask, Tensor? dropout_seed, float dropout_p, int[] origin, "
    "bool is_causal, float? scale, SymInt query_length, SymInt key_length, "
    "str schedule, int[] ring_shape, str group_name, str layout, str mask_order"
)
FORWARD_SCHEMA = (
    f"ring_{{}}_attention(Tensor query, Tensor key, Tensor value, {_OPTIONS})"
    " -> (Tensor output, Tensor logsumexp)"
)
BACKWARD_SCHEMA = (
    "ring_{}_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value,"
    f" Tensor output, Tensor logsumexp, {_OPTIONS}, bool key_grad, bool mask_grad)"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask)"
)

library = torch.library.Library(NAMESPACE, "DEF")


def forward_op(backend: str) -> torch._ops.OpOverload:
    """``torch.ops.cp_dispatch.ring_<backend>_attention.default``."""
    return getattr(torch.ops.cp_dispatch, f"ring_{backend}_attention").default


def backward_op(backend: str) -> torch._ops.OpOverload:
    """``torch.ops.cp_dispatch.ring_<backend>_attention_backward.default``."""
    return getattr(torch.ops.cp_dispatch, f"ring_{backend}_attention_backward").default


def _define(backend: Backend) -> None:
    """Define both ops of one backend."""

    @run_uncompiled
    def forward(query, key, value, *options):
        if (order := order_of(*options)) is not None:
            attends_in(*order)
        job, schedule = job_of(backend, query, *options)
        return run_forward(job, schedule, query, key, value)

    @run_uncompiled
    def backward(grad_output, query, key, value, output, logsumexp, *options):
        *options, key_grad, mask_grad = options
        job, schedule = job_of(backend, query, *options, backward=True)
        tensors = grad_output, query, key, value, output, logsumexp
        with without_autocast(query):
            return run_backward(job, schedule, *tensors, key_grad, mask_grad)

    def forward_fake(query, key, value, *options):
        batch, heads, length, _ = query.shape
        dtype = backend.output_dtype(query.dtype)
        output = token_major(batch, heads, length, value.size(-1), like=query, dtype=dtype)
        return output, query.new_empty(query.shape[:3], dtype=backend.logsumexp_dtype(query.dtype))

    def backward_fake(grad_output, query, key, value, output, logsumexp, attn_mask, *options):
        key_grad, mask_grad = options[-2:]
        return (
            token_major(*query.shape, like=query),
            token_major(*key.shape, like=key) if key_grad else placeholder(key),
            token_major(*value.shape, like=value) if key_grad else placeholder(value),
            mask_gradient(attn_mask, query.dtype) if mask_grad else no_mask_grad(attn_mask, query),
        )

    for schema, kernel, fake in (
        (FORWARD_SCHEMA, forward, forward_fake),
        (BACKWARD_SCHEMA, backward, backward_fake),
    ):
        schema = schema.format(backend.name)
        name = schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            library.impl(name, kernel, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        refuse_local_tensor_mode(name)
    library.impl(f"ring_{backend.name}_attention", _autograd(backend.name), "Autograd")
    library.impl(
        f"ring_{backend.name}_attention_backward",
        _refuse_double_backward(backend.name),
        "Autograd",
    )


def _autograd(name: str):
    """The Autograd kernel of a forward op, for DTensors and for plain tensors."""

    class RingAttention(torch.autograd.Function):
        @staticmethod
        @run_uncompiled
        def forward(ctx, query, key, value, attn_mask, dropout_seed, *options):
            with below_autograd():
                mask = _on_mesh(query, attn_mask)
                output, logsumexp = forward_op(name)(
                    query, key, value, mask, dropout_seed, *options
                )
            ctx.save_for_backward(query, key, value, output, logsumexp, attn_mask, dropout_seed)
            recomputed.watch(output)
            ctx.mask_version = recomputed.version_of_local(attn_mask)
            ctx.options = options
            ctx.mark_non_differentiable(logsumexp)
            ctx.set_materialize_grads(False)
            return output, logsumexp

        @staticmethod
        @run_uncompiled
        def backward(ctx, grad_output, _):
            rest = (None,) * (1 + len(ctx.options))
            if grad_output is None:
                return (None,) * 4 + rest
            needs = ctx.needs_input_grad[:4]
            # Only once: a checkpoint recomputes at the first access and refuses a second one.
            saved = ctx.saved_tensors
            recomputed.check_unwritten(saved[3])
            recomputed.check_unwritten_mask(saved[5], ctx.mask_version)
            if _is_outside(saved[0]):
                inputs = *saved[:3], saved[5]
                zeros = (
                    torch.zeros_like(x) if need else None
                    for x, need in zip(inputs, needs, strict=True)
                )
                return (*zeros, *rest)
            tensors = *saved[:5], _on_mesh(grad_output, saved[5]), saved[6]
            grads = backward_op(name)(
                grad_output, *tensors, *ctx.options, needs[1] or needs[2], needs[3]
            )
            stay_in_backward(backward_op(name))
            keep_in_graph(grads[0], saved[:2], backward=True)
            grads = [g if need else None for g, need in zip(grads, needs, strict=True)]
            if needs[3]:
                grads[3] = _placed_like(grads[3], saved[5])
            return (*grads, *rest)

    @run_uncompiled
    def autograd_kernel(*args):
        if needs_autograd(args):
            return RingAttention.apply(*args)
        with below_autograd():
            return forward_op(name)(*args[:3], _on_mesh(args[0], args[3]), *args[4:])

    return autograd_kernel


def _placed_like(grad: Tensor, mask: Tensor) -> Tensor:
    """A bias's gradient with the bias's own placements and dtype, since a bias is usually a
    parameter. It is summed over ranks before it is rounded."""
    if isinstance(mask, DTensor) and grad.placements != mask.placements:
        wanted = [Replicate() if isinstance(p, Partial) else p for p in mask.placements]
        grad = grad.redistribute(placements=wanted)
    return grad.to(mask.dtype)


def _on_mesh(query: Tensor, mask: Tensor | None) -> Tensor | None:
    """A plain mask beside DTensors as a replicated DTensor. Only in traces; in eager mode it is one
    already. Torch's ``implicit_replication`` fails for symbolic sizes."""
    if isinstance(query, DTensor) and mask is not None and not isinstance(mask, DTensor):
        mesh = query.device_mesh
        return DTensor.from_local(mask, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return mask


def _is_outside(query: Tensor) -> bool:
    """Whether this rank is not in the mesh. Its gradients need the strides of their leaves, or
    torch fails to copy them."""
    return isinstance(query, DTensor) and query.device_mesh.get_coordinate() is None


def needs_autograd(args: tuple) -> bool:
    """Whether a gradient is wanted, or a tangent has come in, which an autograd.Function refuses
    and the op below it would drop. Compiled graphs pass them on."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return True
    return any(isinstance(x, Tensor) and has_tangent(x) for x in args)


def _refuse_double_backward(name: str):
    """The Autograd kernel of a backward op."""

    class RingAttentionBackward(torch.autograd.Function):
        @staticmethod
        @run_uncompiled
        def forward(ctx, *args):
            with below_autograd():
                return backward_op(name)(*args)

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            raise ContextParallelError(
                f"cp_dispatch::ring_{name}_attention has no second derivative. "
                "Given: a backward through the gradients of attention (create_graph=True). "
                "Supported: first derivatives. For a second derivative call "
                "F.scaled_dot_product_attention on unsharded tensors under "
                "sdpa_kernel(SDPBackend.MATH), with cp_dispatch.disable()."
            )

    @run_uncompiled
    def autograd_kernel(*args):
        if needs_autograd(args):
            return RingAttentionBackward.apply(*args)
        with below_autograd():
            return backward_op(name)(*args)

    return autograd_kernel


def refuse_local_tensor_mode(name: str) -> None:
    """``LocalTensorMode`` cannot see collectives inside an op and would answer wrongly."""
    mode = local_tensor_mode()
    if mode is None:
        return

    def rule(mode, func, types, args=(), kwargs=None):
        raise ContextParallelError(
            f"cp_dispatch::{name} does not run under LocalTensorMode, which cannot see the "
            "collectives inside an op. Use torch's threaded process group or real processes."
        )

    torch.library.register_torch_dispatch(f"{NAMESPACE}::{name}", mode, rule, lib=library)


def ops_to_save() -> list[torch._ops.OpOverload]:
    """The ops whose outputs selective activation checkpointing should save.

    With them saved, the recomputation in the backward neither repeats attention nor its
    communication. Covers ``F.scaled_dot_product_attention`` and ``varlen_attn``, not
    ``flex_attention``::

        context_fn = functools.partial(
            torch.utils.checkpoint.create_selective_checkpoint_contexts, cp_dispatch.ops_to_save()
        )
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
    """
    return [*map(forward_op, BACKENDS), torch.ops.cp_dispatch.varlen_attention.default]


for _backend in BACKENDS.values():
    _define(_backend)
