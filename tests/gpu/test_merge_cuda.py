"""The Triton merge against its specification, :func:`cp_dispatch.native.merge.merge_eager`."""

from __future__ import annotations

import itertools

import pytest
import torch

from cp_dispatch.native.merge import merge_eager, merge_partials, token_major

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def merge_triton():
    pytest.importorskip("triton")
    from cp_dispatch.native.merge_triton import merge_triton

    return merge_triton


def partials(shape, dtype_a, dtype_b):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(shape, dtype):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    lse_a, lse_b = (4 * normal(shape[:3], torch.float32) for _ in range(2))
    return normal(shape, dtype_a), lse_a, normal(shape, dtype_b), lse_b


def both(merge, parts, dtype):
    """``(out, lse)`` of the kernel and of the specification."""
    out_a, lse_a = parts[:2]
    results = []
    for function in (merge, merge_eager):
        out = torch.full(out_a.shape, NAN, dtype=dtype, device="cuda")
        lse = torch.full_like(lse_a, NAN)
        function(*parts, out, lse)
        results.append((out, lse))
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (2, 3, 5, 7), (1, 8, 1000, 64), (2, 4, 33, 96), (1, 2, 70, 128),
     (3, 1, 129, 192), (1, 2, 257, 256), (1, 1, 3, 512)],
    ids=str,
)  # fmt: skip
def test_equals_eager(merge_triton, shape, dtype):
    for dtypes in itertools.product((dtype, torch.float32), repeat=2):
        mine, eager = both(merge_triton, partials(shape, *dtypes), dtype)
        torch.testing.assert_close(mine, eager)


def test_infinities(merge_triton):
    """Every pair of logsumexps. A row whose own logsumexp is -inf may contain anything."""
    values = [-INF, -1e30, -100.0, 0.0, 100.0, 1e30, INF]
    pairs = torch.tensor(list(itertools.product(values, values)), device="cuda")
    lse_a, lse_b = (pairs[:, i].reshape(1, 1, -1).contiguous() for i in range(2))
    out_a = torch.randn(1, 1, len(pairs), 24, device="cuda")
    out_b = torch.randn_like(out_a)
    out_a[lse_a == -INF] = NAN
    out_b[lse_b == -INF] = INF
    mine, eager = both(merge_triton, (out_a, lse_a, out_b, lse_b), torch.float32)
    torch.testing.assert_close(mine, eager)
    assert not mine[0].isnan().any() and not mine[1].isnan().any()
    nothing = (lse_a == -INF) & (lse_b == -INF)
    assert (mine[0][nothing] == 0).all() and (mine[1][nothing] == -INF).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_on_a_window(merge_triton, dtype):
    """What the accumulator does: some rows of a token-major buffer in a wide dtype, merged in
    place."""
    out_a, lse_a, out_b, lse_b = partials((2, 4, 50, 64), torch.float32, dtype)
    out_b, lse_b = out_b[:, :, :17], lse_b[:, :, :17]
    got = []
    for function in (merge_triton, merge_eager):
        wide = token_major(2, 4, 50, 64, like=out_a).copy_(out_a)
        lse = lse_a.clone()
        window = slice(20, 37)
        rows, row_lse = wide[:, :, window], lse[:, :, window]
        function(rows, row_lse, out_b, lse_b, rows, row_lse)
        got.append((wide, lse))
        for outside in (slice(0, 20), slice(37, 50)):
            assert torch.equal(wide[:, :, outside], out_a[:, :, outside])
            assert torch.equal(lse[:, :, outside], lse_a[:, :, outside])
    torch.testing.assert_close(*got)


def test_strided_inputs(merge_triton):
    out_a, lse_a, out_b, lse_b = partials((2, 4, 40, 32), torch.bfloat16, torch.bfloat16)
    out_a = out_a.mT.contiguous().mT  # the head dim is not the innermost in memory
    lse_b = lse_b.transpose(1, 2).contiguous().transpose(1, 2)
    mine, eager = both(merge_triton, (out_a, lse_a, out_b, lse_b), torch.bfloat16)
    torch.testing.assert_close(mine, eager)


def test_empty(merge_triton):
    parts = partials((2, 4, 0, 32), torch.bfloat16, torch.bfloat16)
    both(merge_triton, parts, torch.bfloat16)


def test_more_than_two_billion_elements(merge_triton):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    shape = (1, 1, 2**24 + 5, 130)
    out_a = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    out_b = torch.full(shape, 3.0, dtype=torch.bfloat16, device="cuda")
    lse_a, lse_b = (torch.zeros(shape[:3], device="cuda") for _ in range(2))
    merge_triton(out_a, lse_a, out_b, lse_b, out_a, lse_a)
    assert bool((out_a[..., -7:, :] == 2).all()) and bool((out_a[..., :7, :] == 2).all())
    assert bool((out_a.sum(-1, dtype=torch.float32) == 2 * shape[-1]).all())


def test_public_function_picks_triton_without_the_extension(merge_triton, monkeypatch):
    import cp_dispatch.native.merge_triton as module

    monkeypatch.setattr("cp_dispatch.native.merge.has_kernel", lambda *args: False)
    calls = []
    monkeypatch.setattr(module, "merge_triton", lambda *args: calls.append(args))
    parts = partials((1, 1, 4, 8), torch.bfloat16, torch.bfloat16)
    out, lse = torch.empty(1, 1, 4, 8, device="cuda"), torch.empty(1, 1, 4, device="cuda")
    merge_partials(*parts, out, lse)
    assert len(calls) == 1
