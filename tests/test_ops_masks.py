"""The custom ops with masks and dropout, on plain tensors of one rank."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import cp_dispatch
import cp_dispatch.ops as ops
from cp_dispatch import HeadTail
from cp_dispatch.backends import BACKENDS
from cp_dispatch.dropout import Dropout
from cp_dispatch.layouts import natural
from tests.backends.formula import BROADCASTS, Case, attention, with_gradients
from tests.distributed.sharded import distribute
from tests.ranks import SEQUENCE, fake_ranks
from tests.test_ops import CPU, OPCHECKS, inputs

CASE = Case(scores=(2, 4, 6, 9), key_heads=2, dim=8, value_dim=8)
SHAPES = ((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 8))
ORIGIN = [3, 2, 8]  # as if in the middle of a larger batch with more heads


def options(mask=None, seed=None, p=0.0, causal=False, scale=CASE.scale):
    """What follows query, key and value: one rank holds 6 rows and 9 keys."""
    origin = [] if seed is None else ORIGIN
    return mask, seed, p, origin, causal, scale, 6, 9, "ring", [], "", "", ""


def factors(seed: torch.Tensor, p: float) -> torch.Tensor:
    return Dropout(p, seed, *ORIGIN, 6).factors(
        natural(6, 9, (1,), False).tiles(0, 0)[0], 2, 4, torch.float64
    )


def masks(kind: str, requires_grad=False, dtype=torch.float32) -> dict[str, torch.Tensor]:
    case = Case(scores=CASE.scores, dtype=dtype)
    return {name: case.mask(name, kind).requires_grad_(requires_grad) for name in BROADCASTS}


OPCHECKED = {
    "bool": lambda: options(masks("bool")["whole"]),
    "padding": lambda: options(masks("bool")["padding"]),
    "bias": lambda: options(masks("bias")["heads"]),
    "bias with gradient": lambda: options(masks("bias", True)["rows and keys"]),
    "dropout": lambda: options(seed=torch.tensor(5), p=0.5),
    "causal dropout": lambda: options(seed=torch.tensor(5), p=0.5, causal=True),
    "all": lambda: options(masks("bias", True)["padding"], torch.tensor(5), 0.5),
}
ONLY_MATH = ("bias with gradient", "dropout", "causal dropout", "all")
CASES = [
    (backend, name)
    for backend in CPU
    for name in OPCHECKED
    if backend == "math" or name not in ONLY_MATH
]


@pytest.mark.parametrize("backend, name", CASES)
def test_opcheck_forward(backend, name):
    args = (*inputs(SHAPES, requires_grad=True), *OPCHECKED[name]())
    results = torch.library.opcheck(ops.forward_op(backend), args)
    assert results == dict.fromkeys(OPCHECKS, "SUCCESS")


def backward_args(backend, tensors, arguments, key_grad=True, mask_grad=None):
    mask = arguments[0]
    if mask_grad is None:
        mask_grad = mask is not None and mask.requires_grad
    with torch.no_grad():
        out, lse = ops.forward_op(backend)(*tensors, *arguments)
    mask = None if mask is None else mask.detach()
    return (
        torch.randn(out.shape).to(out.dtype), *tensors, out, lse, mask, *arguments[1:],
        key_grad, mask_grad,
    )  # fmt: skip


@pytest.mark.parametrize("key_grad", [False, True])
@pytest.mark.parametrize("backend, name", CASES)
def test_opcheck_backward(backend, name, key_grad):
    args = backward_args(backend, inputs(SHAPES), OPCHECKED[name](), key_grad)
    results = torch.library.opcheck(ops.backward_op(backend), args)
    assert results == dict.fromkeys(OPCHECKS, "SUCCESS")


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_gradcheck_with_a_bias(broadcast, p):
    """Finite differences, also for the bias, except where it is -inf."""
    shapes = ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3))
    tensors = inputs(shapes, requires_grad=True, dtype=torch.float64)
    case = Case(scores=(1, 2, 3, 4), dtype=torch.float64)
    bias = torch.randn(case.mask(broadcast, "bias").shape, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(11) if p else None

    def call(query, key, value, bias):
        return ops.forward_op("math")(
            query, key, value, bias, seed, p, [0, 0, 2] if p else [],
            False, None, 3, 4, "ring", [], "", "", "",
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(call, (*tensors, bias))


@pytest.mark.parametrize("p", [0.25, 0.9, 1.0])
@pytest.mark.parametrize("mask", [None, "bool", "bias"])
def test_dropout_is_that_of_the_formula(mask, p):
    """Probabilities times factors, forward and backward, also if a call starts in the middle."""
    case = Case(CASE.scores, 2, 8, 8, torch.float64, CASE.scale)
    tensors = case.tensors()
    seed = torch.tensor(2**61 + 5)
    kept = factors(seed, p)
    mask = None if mask is None else case.mask("whole", mask)

    def op(query, key, value, mask):
        return ops.forward_op("math")(query, key, value, *options(mask, seed, p))[0]

    def formula(query, key, value, mask):
        return attention(query, key, value, mask, case.scale, kept)[0]

    got, want = (with_gradients(call, tensors, mask) for call in (op, formula))
    assert len(got) == (5 if mask is not None and mask.dtype is not torch.bool else 4)
    for mine, true in zip(got, want, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)
    if p == 1.0:
        assert all((x == 0).all() for x in got)


def test_the_logsumexp_knows_nothing_of_dropout():
    tensors = inputs(SHAPES)
    _, lse = ops.forward_op("math")(*tensors, *options(seed=torch.tensor(1), p=0.9))
    _, without = ops.forward_op("math")(*tensors, *options())
    assert torch.equal(lse, without)


def test_other_seeds_drop_other_pairs_and_one_seed_the_same():
    tensors = inputs(SHAPES)

    def out(seed):
        return ops.forward_op("math")(*tensors, *options(seed=torch.tensor(seed), p=0.5))[0]

    assert torch.equal(out(1), out(1)) and not torch.equal(out(1), out(2))


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("broadcast", BROADCASTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fake_gradient_of_a_mask_has_its_shape_and_dtype(backend, broadcast, kind):
    device = BACKENDS[backend].devices[0]
    with FakeTensorMode():
        tensors = inputs(SHAPES, dtype=torch.bfloat16, device=device)
        like = masks(kind, dtype=torch.bfloat16)[broadcast]
        mask = torch.empty(like.shape, dtype=like.dtype, device=device)
        args = backward_args(backend, tensors, options(mask), mask_grad=kind == "bias")
        *_, grad_mask = ops.backward_op(backend)(*args)
    # It still has to be summed over ranks, so a 16-bit bias has a float32 gradient here.
    assert grad_mask.shape == mask.shape
    assert grad_mask.dtype is (torch.float32 if kind == "bias" else mask.dtype)
    assert grad_mask.device == mask.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_the_gradient_of_a_bias_is_laid_out_as_its_fake_says(broadcast, dtype):
    def run():
        mask = Case(scores=CASE.scores, dtype=dtype).mask(broadcast, "bias")
        args = backward_args("math", inputs(SHAPES, dtype=dtype), options(mask), mask_grad=True)
        return ops.backward_op("math")(*args)[3], mask

    with FakeTensorMode():
        fake, _ = run()
    real, mask = run()
    assert real.shape == fake.shape == mask.shape
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert real.dtype is fake.dtype is wide and real.stride() == fake.stride()


@pytest.mark.parametrize("needs", [(0, 0, 0, 1), (1, 0, 0, 1), (0, 0, 1, 1), (1, 1, 1, 0)])
def test_only_what_needs_a_gradient_gets_one(needs):
    case = Case(CASE.scores, 2, 8, 8, torch.float64, CASE.scale)
    *tensors, grad_output = case.tensors()
    tensors.append(case.mask("padding", "bias"))

    def grads(call):
        leaves = [x.clone().requires_grad_(bool(n)) for x, n in zip(tensors, needs, strict=True)]
        call(*leaves).backward(grad_output)
        return [x.grad for x in leaves]

    got = grads(lambda q, k, v, m: ops.forward_op("math")(q, k, v, *options(m))[0])
    want = grads(lambda q, k, v, m: attention(q, k, v, m, case.scale)[0])
    assert [x is not None for x in got] == [bool(n) for n in needs]
    for mine, true in zip(got, want, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("schedule, in_layout", [("gather", False), ("auto", True)])
def test_plain_masks_in_graphs_of_lengths_that_change(schedule, in_layout):
    """Here the lengths are constants, but the mask's sizes are symbols."""

    def attend(query, mask):
        return F.scaled_dot_product_attention(query, query, query, mask)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    with fake_ranks(2) as mesh:
        for length in (8, 12):
            query = distribute(torch.randn(1, 2, length, 4), mesh, SEQUENCE)
            mask = torch.ones(length, length, dtype=torch.bool)
            layout = HeadTail(length, 2) if in_layout else None
            with cp_dispatch.enabled(schedule, layout):
                assert compiled(query, mask).shape == query.shape
