"""Which rank computes which heads, and the order of rows, on integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_dispatch import HeadTail, PerDocumentHeadTail
from cp_dispatch.layouts import Geometry, Span, chunk_spans, laid_out
from cp_dispatch.schedules import SCHEDULES, mirrored_ring
from cp_dispatch.schedules.head_shares import (
    are_alike,
    grouped,
    head_shares,
    most_stages,
    true_order,
)

CPU = torch.device("cpu")


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_every_query_head_is_computed_once_with_its_key_head(key_heads, groups, ranks, wanted):
    heads = key_heads * groups
    stages = most_stages(heads, key_heads, ranks, wanted)
    assert 1 <= stages <= wanted
    computed = []
    for stage in head_shares(heads, key_heads, ranks, stages):
        assert len(stage) == ranks
        for share in stage:
            assert share.segments, "every rank takes part in what comes after"
            for segment in share.segments:
                query, key = segment
                assert query.position + query.length <= share.query.length
                assert key.position + key.length <= share.key.length
                if not query.length:
                    continue
                # Kernels pair query head i of n with key head i // (n / m).
                size, rest = divmod(query.length, key.length)
                assert rest == 0
                for i in range(query.length):
                    head = share.query.position + query.position + i
                    computed.append(head)
                    key_head = share.key.position + key.position + i // size
                    assert key_head == head // groups
    assert sorted(computed) == list(range(heads))


@given(st.integers(1, 40), st.integers(1, 8))
def test_shares_are_as_even_as_they_can_be(heads, ranks):
    (stage,) = head_shares(heads, heads, ranks)
    counts = [share.query.length for share in stage]
    assert max(counts) - min(counts) <= 1 and are_alike(heads, heads, ranks)


@pytest.mark.parametrize("heads, key_heads, ranks, wanted, stages", [
    (32, 8, 4, 4, 2), (32, 8, 4, 1, 1), (32, 8, 4, 0, 1), (32, 32, 4, 4, 4), (32, 32, 4, 3, 2),
    (16, 1, 4, 4, 1), (32, 8, 3, 4, 1), (0, 0, 2, 4, 1),
])  # fmt: skip
def test_stages(heads, key_heads, ranks, wanted, stages):
    assert most_stages(heads, key_heads, ranks, wanted) == stages


def test_a_tensor_parallel_rank_without_heads_has_none_to_share():
    (stage,) = head_shares(0, 0, 3)
    assert [(share.query.length, share.key.length) for share in stage] == [(0, 0)] * 3
    assert are_alike(0, 0, 3)


def test_a_group_that_is_cut_in_two():
    (stage,) = head_shares(12, 3, 2)
    assert [share.query for share in stage] == [(0, 6), (6, 6)]
    assert [share.key for share in stage] == [(0, 2), (1, 2)]
    assert [share.segments for share in stage] == [
        (((0, 4), (0, 1)), ((4, 2), (1, 1))), (((0, 2), (0, 1)), ((2, 4), (1, 1))),
    ]  # fmt: skip
    assert are_alike(12, 3, 2) and not are_alike(12, 3, 5)


def test_groups_own_what_their_ranks_own():
    natural = laid_out(16, 12, (4,), True, None)
    assert grouped(natural, 2) == laid_out(16, 12, (2,), True, None)
    assert grouped(natural, 4) == laid_out(16, 12, (1,), True, None)
    # A group of a head-tail layout is a head-tail layout of fewer ranks.
    assert grouped(laid_out(16, 16, (4,), True, HeadTail(16, 4)), 2) == laid_out(
        16, 16, (2,), True, HeadTail(16, 2)
    )
    # Without a mask by position the order stays as it is.
    full = grouped(laid_out(8, 8, (2,), False, HeadTail(8, 2)), 2)
    assert full.query_spans == ((Span(0, 2), Span(6, 2), Span(2, 4)),)


def test_a_mirrored_ring_across_groups_is_that_of_fewer_ranks():
    fine = laid_out(32, 32, (4,), True, None)
    coarse = SCHEDULES["hybrid:2:mirrored_ring"].coarse(fine)
    assert coarse == mirrored_ring.geometry(32, 32, (2,), True, None)
    assert SCHEDULES["hybrid:2:ring"].coarse(fine) == laid_out(32, 32, (2,), True, None)


@pytest.mark.parametrize("name", ["hybrid:2:gather", "hybrid:2", "ulyses", "ring:2:ring"])
def test_there_are_no_other_schedules(name):
    with pytest.raises((KeyError, ValueError)):
        SCHEDULES[name]


@pytest.mark.parametrize("ranks, first", [(4, 0), (2, 0), (2, 2)])
@pytest.mark.parametrize("layout", [
    HeadTail(61, 4), PerDocumentHeadTail([30, 31], 4), PerDocumentHeadTail([[30, 31], [7, 54]], 4),
], ids=["head-tail", "documents", "documents of each row"])  # fmt: skip
def test_the_order_of_a_layout_there_and_back(layout, ranks, first):
    geometry = laid_out(61, 61, (4,), True, layout)
    order = true_order(geometry, False, first, ranks, 0, 2, CPU)
    start = sum(layout.shard_lengths[:first])
    length = sum(layout.shard_lengths[first : first + ranks])
    held = layout.indices[:, start : start + length]
    there, back = (x if x.dim() == 2 else x[None] for x in order)
    assert there.size(0) == layout.rows
    ordered = held.gather(1, there)
    assert (ordered.diff(dim=1) > 0).all()
    assert torch.equal(ordered.gather(1, back), held)
    of_group = grouped(geometry, ranks)
    for row, own in enumerate(getattr(of_group, "rows", (of_group,))):
        spans = own.query_spans[first // ranks]
        assert [p for s in spans for p in range(s.position, sum(s))] == ordered[row].tolist()


def test_order_is_left_alone_where_it_is_true_or_does_not_matter():
    assert true_order(laid_out(61, 61, (4,), True, None), False, 0, 4, 0, 1, CPU) is None
    full = laid_out(61, 61, (4,), False, HeadTail(61, 4))
    assert true_order(full, True, 0, 4, 0, 1, CPU) is None
    # Queries in the layout, keys in natural order.
    own = tuple(HeadTail(16, 2).spans(r)[0] for r in range(2))
    mixed = Geometry(own, chunk_spans(16, (2,)), True)
    assert true_order(mixed, True, 0, 2, 0, 1, CPU) is None
    assert true_order(mixed, False, 0, 2, 0, 1, CPU) is not None
