"""Cutting block masks, tested on integers: what a rank's rows compute is what the whole mask
says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from cp_dispatch import (
    ContextParallelError,
    HeadTail,
    PerDocumentHeadTail,
    create_cp_block_mask,
)
from cp_dispatch.by_need.ownership import ownership
from cp_dispatch.flex import create
from cp_dispatch.flex.cut import (
    Blocks,
    cut,
    dense,
    lists,
    pack,
    packed_shapes,
    packed_size,
    touched,
    unpack,
)
from cp_dispatch.flex.mask_job import MaskJob
from cp_dispatch.native.permute import span_indices
from tests.ranks import fake_ranks


def table_of(blocks: Blocks, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial and full blocks as tables."""
    partial = dense(blocks.kv_num, blocks.kv_indices, columns)
    if blocks.full_kv_num is None:
        return partial, torch.zeros_like(partial)
    return partial, dense(blocks.full_kv_num, blocks.full_kv_indices, columns)


@st.composite
def masks(draw):
    """A mask of pairs, its length, block sizes, ranks and layout."""
    length = draw(st.integers(1, 70))
    sizes = draw(st.sampled_from([(8, 8), (16, 4), (4, 16), (8, 32)]))
    ranks = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 2))
    pairs = torch.rand(
        rows, 2, length, length, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    # Whole stripes of rows and keys, so that some blocks are full and some empty.
    keep = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    stripes = (torch.arange(length)[:, None] // 16 + torch.arange(length) // 16) % 3
    pairs = torch.where(stripes == 0, pairs < keep, (stripes == 1).expand_as(pairs))
    kind = draw(st.sampled_from(["natural", "head-tail", "documents"]))
    layout = ""
    if kind == "head-tail":
        layout = HeadTail(length, ranks).text
    elif kind == "documents" and length > 1:
        cut_at = draw(st.integers(1, length - 1))
        documents = [[cut_at, length - cut_at], [length - cut_at, cut_at]][:rows]
        layout = PerDocumentHeadTail(documents, ranks).text
    return pairs, sizes, ranks, layout


@given(masks())
def test_what_is_computed_is_what_the_mask_says(case):
    pairs, (q_block, kv_block), ranks, layout = case
    batch, heads, length, _ = pairs.shape
    whole = create_block_mask(
        lambda b, h, q, k: pairs[b, h, q, k], batch, heads, length, length, "cpu",
        BLOCK_SIZE=(q_block, kv_block),
    )  # fmt: skip
    owned = ownership(length, (ranks,), layout)
    columns = -(-length // kv_block)
    for rank in range(ranks):
        own = cut(Blocks(*whole.as_tuple()[2:10]), owned, rank, q_block, columns)
        partial, full = table_of(own, columns)
        assert not (partial & full).any()
        for b in range(batch):
            place = span_indices(owned.spans(rank, b if owned.lanes > 1 else 0))
            mine = pairs[b][:, place]
            mine = torch.nn.functional.pad(mine, (0, -length % kv_block, 0, -len(place) % q_block))
            blocks = mine.unflatten(2, (-1, kv_block)).unflatten(1, (-1, q_block))
            some, every = blocks.any(4).any(2), blocks.all(4).all(2)
            row = b if partial.size(0) > 1 else 0
            # Nothing is left out, and no block counts as full that is not.
            assert not (some & ~(partial | full)[row]).any()
            assert not (full[row] & ~every).any()


@given(masks())
def test_both_directions_agree(case):
    pairs, (q_block, kv_block), ranks, layout = case
    batch, heads, length, _ = pairs.shape
    whole = create_block_mask(
        lambda b, h, q, k: pairs[b, h, q, k], batch, heads, length, length, "cpu",
        BLOCK_SIZE=(q_block, kv_block),
    )  # fmt: skip
    owned, columns = ownership(length, (ranks,), layout), -(-length // kv_block)
    own = cut(Blocks(*whole.as_tuple()[2:10]), owned, ranks - 1, q_block, columns)
    rows = own.kv_num.size(2)
    for kv, q in (
        ((own.kv_num, own.kv_indices), (own.q_num, own.q_indices)),
        ((own.full_kv_num, own.full_kv_indices), (own.full_q_num, own.full_q_indices)),
    ):
        assert torch.equal(dense(*kv, columns), dense(*q, rows).transpose(2, 3))
        assert all(x.dtype is torch.int32 and x.is_contiguous() for x in (*kv, *q))


@pytest.mark.parametrize("ranks", [2, 4])
def test_aligned_shards_keep_full_blocks_full(ranks):
    """If shards begin at a block, a rank's block rows are those of the whole mask."""
    whole = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 70), None, None, 256, 256, "cpu", BLOCK_SIZE=32
    )
    given = Blocks(*whole.as_tuple()[2:10])
    want = table_of(given, 8)
    parts = [
        table_of(cut(given, ownership(256, (ranks,)), rank, 32, 8), 8) for rank in range(ranks)
    ]
    for i in (0, 1):
        assert torch.equal(torch.cat([part[i] for part in parts], 2), want[i])
    assert want[1].any()


def test_touched_blocks_of_uneven_shards():
    owned = ownership(14 * 2, (2,))
    assert touched(owned, 1, 4) == (
        (((3, 4), (4, 5), (5, 6), (6, 6)),),
        (True, True, True, False),
    )


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 50))
def test_lists_are_the_inverse_of_tables(rows, columns, seed):
    table = torch.rand(2, 1, rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.4
    num, indices = lists(table)
    assert torch.equal(dense(num, indices, columns), table)
    # Also beyond a list's end there are valid block indices, because kernels may read them ahead of
    # time.
    assert torch.equal(
        indices.sort(-1).values, torch.arange(columns, dtype=torch.int32).expand_as(indices)
    )


@pytest.mark.parametrize("has_full", [True, False])
def test_packing(has_full):
    owned = ownership(40, (2,))
    whole = create_block_mask(
        lambda b, h, q, k: q >= k, 2, 3, 40, 40, "cpu", BLOCK_SIZE=8,
    )  # fmt: skip
    given = Blocks(*whole.as_tuple()[2:10])
    if not has_full:
        given = given._replace(full_kv_num=None, full_kv_indices=None)
    own = cut(given, owned, 1, 8, 5)
    shapes = packed_shapes(2, 3, 3, 5, has_full)
    packed = pack(own)
    assert packed.shape == (packed_size(shapes),)
    for a, b in zip(unpack(packed, shapes), own, strict=True):
        assert a is b is None or torch.equal(a, b)
    assert (own.full_kv_num is not None) == has_full


def test_a_rank_without_rows():
    owned = ownership(5, (4,))
    assert owned.rows(3) == 0
    whole = create_block_mask(lambda b, h, q, k: q >= k, None, None, 5, 5, "cpu")
    own = cut(Blocks(*whole.as_tuple()[2:10]), owned, 3, 128, 1)
    assert own.kv_indices.shape == (1, 1, 0, 1) and own.q_num.tolist() == [[[0]]]


@pytest.mark.parametrize(
    "lengths, block, words",
    [
        ((-1, 50), 8, "Q_LEN must be a positive int"),
        ((50, 25.0), 8, "KV_LEN must be a positive int"),
        ((None, 50), 8, "Q_LEN must be a positive int"),
        ((50, 50), 0, "BLOCK_SIZE must be a positive int"),
        ((50, 50), (8, 8, 8), "BLOCK_SIZE must be an int or a pair"),
    ],
)
def test_the_helper_names_sizes_that_are_wrong(lengths, block, words):
    with fake_ranks(2) as mesh, pytest.raises(ContextParallelError, match=words):
        create_cp_block_mask(lambda b, h, q, k: q >= k, 1, 1, *lengths, mesh, BLOCK_SIZE=block)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("heads", [1, 6])
def test_a_rank_takes_its_batch_rows_and_heads_of_a_mask(batch, heads):
    """Of dims that the mask has; others hold for all."""
    mask = create_block_mask(
        lambda b, h, q, k: q >= k + 8 * b + 16 * h, batch, heads, 64, 64, "cpu", BLOCK_SIZE=8
    )
    tensors = mask.as_tuple()[2:6]
    part = [1, 2, 3, 1]  # batch rows 1 and 2, head 3
    job = MaskJob(*tensors, 64, 64, [8, 8], part, [2], 0, "", "", False, False)
    rows = slice(1, 3) if batch > 1 else slice(None)
    own = slice(3, 4) if heads > 1 else slice(None)
    for x, whole in zip(job.own_part()[:4], tensors, strict=True):
        assert torch.equal(x, whole[rows, own])


@pytest.mark.parametrize("at_once", [2**26, 1])
def test_the_mask_of_the_helper_is_exact(at_once, monkeypatch):
    """``create_cp_block_mask`` evaluates pairs, so it finds more full blocks than a cut does; long
    masks are made in several parts."""
    monkeypatch.setattr(create, "_AT_ONCE", at_once)

    def mod(b, h, q, k):
        return (q >= k + 3 * b) | (h == 1)

    pairs = create_mask(mod, 2, 2, 50, 50, device="cpu")
    for rank in range(3):
        with fake_ranks(3, rank=rank) as mesh:
            own = create_cp_block_mask(mod, 2, 2, 50, 50, mesh, BLOCK_SIZE=8)
        rows = pairs[:, :, 17 * rank : min(17 * (rank + 1), 50)]
        rows = torch.nn.functional.pad(rows, (0, 6, 0, -rows.size(2) % 8))
        blocks = rows.unflatten(3, (7, 8)).unflatten(2, (-1, 8))
        partial, full = table_of(Blocks(*own.as_tuple()[2:10]), 7)
        assert torch.equal(full, blocks.all(5).all(3))
        assert torch.equal(partial | full, blocks.any(5).any(3))
        assert own.shape == (2, 2, 50, 50)
        # Kernels on GPUs step through both kinds of lists with stride 1.
        assert all(x.is_contiguous() for x in own.as_tuple()[2:10])
        with fake_ranks(3, rank=rank) as mesh:
            joined = create_cp_block_mask(
                mod, 2, 2, 50, 50, mesh, BLOCK_SIZE=8, separate_full_blocks=False
            )
        listed, full = table_of(Blocks(*joined.as_tuple()[2:10]), 7)
        assert torch.equal(listed, blocks.any(5).any(3)) and not full.any()
        assert joined.full_kv_num_blocks is None and joined.full_q_num_blocks is None


@pytest.mark.parametrize("queries, keys", [(0, 24), (24, 0), (0, 0)])
def test_the_helper_takes_lengths_of_0(queries, keys):
    with fake_ranks(3) as mesh:
        own = create_cp_block_mask(lambda b, h, q, k: q >= k, None, None, queries, keys, mesh)
    assert own.seq_lengths == (queries, keys) and own.kv_indices.shape[3] == (keys > 0)
    assert not own.kv_num_blocks.any() and not own.full_kv_num_blocks.any()
