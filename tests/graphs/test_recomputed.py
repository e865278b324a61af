"""The errors of :mod:`cp_dispatch.graphs.recomputed`."""

from cp_dispatch import BlockBalanced, HeadTail
from cp_dispatch.graphs.recomputed import in_another_order


def test_orders_are_named_in_short():
    blocks = BlockBalanced([1 + i % 7 for i in range(1000)], 4, 128).text
    words = str(in_another_order(blocks, "", HeadTail(64, 4).text))
    assert len(blocks) > 2000 > 500 > len(words)
    assert '["BlockBalanced"' in words and "..." in words
    assert 'instead of natural order (layout=None) or ["HeadTail"' in words
