"""Masks and biases in the backends that run on CPU: every broadcast shape, rows that see
nothing, the gradient of a bias, and tiles that add up to the whole."""

import pytest
import torch

from cp_dispatch.backends import BACKENDS, cudnn, efficient
from cp_dispatch.layouts import natural
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import Rows, backward_block, forward_block
from cp_dispatch.schedules.gradients import mask_gradient
from cp_dispatch.schedules.job import Job
from tests.backends.formula import BROADCASTS, Case, attention, exact, one_device
from tests.distributed.reference import check

CPU = [name for name, backend in BACKENDS.items() if "cpu" in backend.devices]
CASES = {
    "plain": Case(),
    "gqa": Case(key_heads=2),
    # In 16 bits, for the reason given in test_backends.py.
    "one row": Case(scores=(8, 8, 1, 19), key_heads=8, dtype=torch.bfloat16),
    "whole eights": Case(scores=(2, 2, 16, 32), key_heads=2),
    "float64": Case(dtype=torch.float64),
    "bfloat16": Case(scores=(2, 4, 40, 24), dtype=torch.bfloat16),
    "float16": Case(scores=(2, 4, 40, 23), dtype=torch.float16),
}


def block(backend, tensors, mask, scale, mask_grad=False):
    """One block forward and backward, with results in the inputs' dtype."""
    query, key, value, grad_output = tensors
    kernel = BACKENDS[backend]
    out, lse = kernel.forward(query, key, value, mask, False, scale)
    out = out.to(kernel.output_dtype(query.dtype))
    grads = kernel.backward(
        grad_output, query, key, value, out, lse, mask, False, scale, None, mask_grad
    )
    return out, lse, grads


def given(case: Case, results):
    return [x.to(case.dtype) for x in results]


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("broadcast", BROADCASTS)
@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("name", CASES)
def test_masks_are_as_exact_as_on_one_device(name, backend, broadcast, kind):
    case = CASES[name]
    tensors, mask = case.tensors(), case.mask(broadcast, kind)
    out, _, (*grads, no_bias) = block(backend, tensors, mask, case.scale)
    assert no_bias is None
    want = exact(tensors, mask, case.scale)[:4]
    # The kernel takes whole masks, and computes the same from them.
    whole = mask.expand(case.scores).contiguous()
    single = one_device(tensors, whole, case.scale, backend)
    if case.dtype is torch.float64:
        # Compared as torch compares float64; the exact answer is no better.
        for mine, true in zip((out, *grads), want, strict=True):
            torch.testing.assert_close(mine, true)
    else:
        check(given(case, (out, *grads)), want, single)


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("name", CASES)
def test_logsumexp_with_a_mask(name, backend, kind):
    case = CASES[name]
    tensors, mask = case.tensors(), case.mask("whole", kind)
    _, lse, _ = block(backend, tensors, mask, case.scale)
    wide = mask if kind == "bool" else mask.double()
    _, true = attention(*(x.double() for x in tensors[:3]), wide, case.scale)
    assert lse.dtype is BACKENDS[backend].logsumexp_dtype(case.dtype)
    assert torch.equal(lse == -torch.inf, true == -torch.inf)
    torch.testing.assert_close(lse.to(case.dtype), true.to(case.dtype))


@pytest.mark.parametrize("columns", [1, 3, 7, 8, 9, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("backend", CPU)
def test_any_number_of_columns_and_any_strides(backend, kind, columns):
    """For a mask that is expanded with stride 0, transposed, or cut from a larger one, as tiles
    are."""
    case = Case(scores=(2, 4, 12, columns), dtype=torch.bfloat16)
    tensors, mask = case.tensors(), case.mask("whole", kind)
    larger = torch.zeros(2, 4, 20, columns + 9, dtype=mask.dtype)
    cut = larger[:, :, 5:17, 3 : columns + 3].copy_(mask)
    transposed = mask.mT.contiguous().mT
    results = [
        block(backend, tensors, x, case.scale, mask_grad=False) for x in (mask, cut, transposed)
    ]
    for out, lse, grads in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
        assert all(map(torch.equal, grads[:3], results[0][2][:3]))
    row = case.mask("keys", kind)
    narrow, wide = (block(backend, tensors, x, case.scale) for x in (row, row.expand(case.scores)))
    assert torch.equal(narrow[0], wide[0]) and torch.equal(narrow[1], wide[1])


def blinded(mask: torch.Tensor, rows) -> torch.Tensor:
    mask = mask.clone()
    mask[:, :, rows] = False if mask.dtype is torch.bool else -torch.inf
    return mask


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("rows", [slice(3, 6), slice(0, 1), slice(None)])
@pytest.mark.parametrize("name", ["plain", "gqa", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", CPU)
def test_rows_that_see_nothing_give_zeros_and_no_nan(backend, name, rows, kind):
    case = CASES[name]
    tensors, mask = case.tensors(), blinded(case.mask("whole", kind), rows)
    out, lse, grads = block(backend, tensors, mask, case.scale)
    assert (out[:, :, rows] == 0).all() and (lse[:, :, rows] == -torch.inf).all()
    assert (grads[0][:, :, rows] == 0).all()
    for result in (out, *grads[:3]):
        assert result.isfinite().all()
    assert not lse.isnan().any()
    if rows == slice(None):
        assert all((grad == 0).all() for grad in grads[:3])


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("backend", CPU)
def test_rows_that_see_keys_with_low_scores_in_other_blocks_only(backend, kind):
    """exp(-logsumexp) is infinite here."""
    case = CASES["plain"]
    (query, key, value, grad_output), rows = case.tensors(), slice(3, 6)
    mask = blinded(case.mask("whole", kind), rows)
    kernel = BACKENDS[backend]
    out, lse = kernel.forward(query, key, value, mask, False, case.scale)
    lse[:, :, rows] = -1e3
    out = out.to(kernel.output_dtype(query.dtype))
    *grads, _ = kernel.backward(grad_output, query, key, value, out, lse, mask, False, case.scale)
    assert (grads[0][:, :, rows] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("backend", CPU)
def test_keys_that_nobody_sees_get_no_gradient_whatever_they_hold(backend, kind):
    case = CASES["plain"]
    tensors, mask = case.tensors(), case.mask("whole", kind)
    mask[..., 5:9] = False if kind == "bool" else -torch.inf
    _, _, grads = block(backend, tensors, mask, case.scale)
    for grad in grads[1:3]:
        assert (grad[:, :, 5:9] == 0).all() and grad.isfinite().all()


def test_blind_rows_of_a_bias_get_a_gradient_of_zero():
    case = CASES["plain"]
    mask = blinded(case.mask("whole", "bias"), slice(2, 5))
    _, _, grads = block("math", case.tensors(), mask, case.scale, mask_grad=True)
    assert (grads[3][:, :, 2:5] == 0).all() and grads[3].isfinite().all()
    assert (grads[3][mask == -torch.inf] == 0).all()


@pytest.mark.parametrize("backend", CPU)
def test_large_logits_and_biases_stay_finite(backend):
    case = Case(scale=1e3)
    for bias in (1e4, -1e4, 3e38):
        mask = case.mask("whole", "bias").sign() * bias
        tensors = case.tensors()
        out, lse, grads = block(backend, tensors, mask, case.scale)
        alone = one_device(tensors, mask, case.scale, backend)
        for mine, theirs in zip((out, *grads[:3]), alone, strict=True):
            assert torch.equal(mine.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_a_bias_for_every_score(dtype, key_heads):
    case = Case(scores=(2, 4, 64, 72), key_heads=key_heads, dtype=dtype)
    tensors, mask = case.tensors(), case.mask("whole", "bias")
    _, _, grads = block("math", tensors, mask, case.scale, mask_grad=True)
    single = one_device(tensors, mask, case.scale, "math", mask_grad=True)[4]
    true = exact(tensors, mask, case.scale)[4]
    check([grads[3].to(dtype)] * 4, [true] * 4, [single] * 4)


@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_the_gradient_of_a_bias_is_the_sum_over_what_it_broadcasts(broadcast):
    case = CASES["float64"]
    tensors, mask = case.tensors(), case.mask(broadcast, "bias")
    _, _, grads = block("math", tensors, mask, case.scale, mask_grad=True)
    assert grads[3].shape == case.scores
    true = exact(tensors, mask, case.scale)[4]
    torch.testing.assert_close(grads[3].sum_to_size(mask.shape), true)


def one_kernel_per_tile(backend, tensors, mask, scale, world_size, causal=False):
    """Output and gradients combined from every rank's tiles, as in a ring."""
    query, key, value, grad_output = tensors
    geometry = natural(query.size(2), key.size(2), (world_size,), causal)
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    bias_grad = mask.dtype is not torch.bool and BACKENDS[backend].mask_gradient
    sums = [torch.zeros_like(x, dtype=wide) for x in (key, value)]
    total = mask_gradient(mask, query.dtype) if bias_grad else None
    outputs, query_grads = [], []
    owned = [[slice(s[0].position, sum(s[0])) if s else slice(0, 0) for s in spans]
             for spans in (geometry.query_spans, geometry.key_spans)]  # fmt: skip
    for rank, rows in enumerate(owned[0]):
        mine = mask[:, :, rows] if mask.size(2) > 1 else mask
        job = Job(BACKENDS[backend], geometry, scale, None, mine)
        tiles = [geometry.tiles(rank, owner) for owner in range(world_size)]
        every = sum(tiles, ())
        dtype = job.backend.output_dtype(query.dtype)
        lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        result = OutputAccumulator(query[:, :, rows], value.size(-1), every, dtype, lse_dtype)
        dq = QueryGradient(query[:, :, rows], every)
        parts = [(key[:, :, columns], value[:, :, columns]) for columns in owned[1]]
        for part, todo in zip(parts, tiles, strict=True):
            forward_block(job, query[:, :, rows], *part, todo, result)
        out, lse = result.finish()
        outputs.append(out)
        own = None if total is None else (total[:, :, rows] if mask.size(2) > 1 else total)
        for owner, (part, todo) in enumerate(zip(parts, tiles, strict=True)):
            of_rows = Rows(grad_output[:, :, rows], query[:, :, rows], out, lse)
            shares = backward_block(job, of_rows, *part, todo, dq, own)
            for dk, dv, start, _ in shares:
                at = owned[1][owner].start + start
                for grad, share in zip(sums, (dk, dv), strict=True):
                    grad[:, :, at : at + share.size(2)] += share
        query_grads.append(dq.finish())
    results = [torch.cat(outputs, 2), torch.cat(query_grads, 2), *sums]
    return [x.to(query.dtype) for x in results], total


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("broadcast", BROADCASTS)
@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("backend", CPU)
def test_tiles_with_masks_add_up_to_the_whole(backend, world_size, broadcast, kind):
    """Also if some rank's rows, and some hop's keys, are fully masked."""
    case = Case(scores=(2, 4, 22, 31), key_heads=2)
    tensors, mask = case.tensors(), case.mask(broadcast, kind)
    if broadcast == "whole":
        mask = blinded(mask, slice(0, 22 // world_size + 1))
        mask[..., 20:] = False if kind == "bool" else -torch.inf
    got, bias_grad = one_kernel_per_tile(backend, tensors, mask, case.scale, world_size)
    *want, true = exact(tensors, mask, case.scale) + [None] * (kind == "bool")
    whole = mask.expand(case.scores).contiguous()
    check(got, want, one_device(tensors, whole, case.scale, backend))
    if bias_grad is not None and all(BROADCASTS[broadcast][2:]):
        # Sums over rows or keys cancel down to rounding errors. They are tested in float64, below.
        single = one_device(tensors, mask, case.scale, "math", mask_grad=True)[4]
        check([bias_grad] * 4, [true] * 4, [single] * 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_tiles_add_up_to_the_gradient_of_a_bias(broadcast, world_size):
    case = Case(scores=(2, 4, 9, 13), dtype=torch.float64)
    tensors, mask = case.tensors(), case.mask(broadcast, "bias")
    got, bias_grad = one_kernel_per_tile("math", tensors, mask, case.scale, world_size)
    for mine, true in zip((*got, bias_grad), exact(tensors, mask, case.scale), strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("columns", [1, 7, 8, 15, 16, 17, 33])
def test_the_efficient_kernel_gets_rows_that_start_at_multiples_of_16(columns):
    query, key = torch.empty(2, 4, 5, 8), torch.empty(2, 4, columns, 8)
    for shape in ((1, 1, 5, columns), (2, 1, 1, columns), (2, 4, 5, 1)):
        bias = torch.randn(shape)
        aligned = efficient._aligned(bias, query, key)
        assert torch.equal(aligned, bias.expand(2, 4, 5, columns))
        assert aligned.stride(-1) == 1
        assert all(stride % 16 == 0 for stride in aligned.stride()[:-1])
    assert efficient._aligned(None, query, key) is None


def test_cudnn_gets_masks_with_all_columns_in_one_piece():
    key = torch.empty(2, 4, 7, 8)
    for bias in (torch.randn(2, 1, 5, 1), torch.randn(1, 1, 9, 7)[:, :, 2:7]):
        whole = cudnn._whole(bias, key)
        assert torch.equal(whole, bias.expand(*bias.shape[:3], 7)) and whole.is_contiguous()
    assert cudnn._whole(None, key) is None
