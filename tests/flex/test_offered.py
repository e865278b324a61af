"""Which rows of its shard an owner of keys offers, on integers."""

from hypothesis import given
from hypothesis import strategies as st

from cp_dispatch.flex.needs import Move
from cp_dispatch.flex.offered import Offered
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.balancer import coalesce


@given(st.lists(st.sets(st.integers(0, 15)), max_size=4))
def test_every_needed_row_is_offered_once_in_ascending_order(needed):
    moves = []
    for taker, rows in enumerate(needed):
        spans = coalesce([Span(row, 1) for row in sorted(rows)])
        moves.append(Move(9, taker, spans, spans))
    offered = Offered(moves)
    rows = [row for start, count in offered.spans for row in range(start, start + count)]
    assert rows == sorted(set().union(*needed)) and offered.rows == len(rows)
    assert [offered.place(row) for row in rows] == list(range(len(rows)))
