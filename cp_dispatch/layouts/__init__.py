"""Layouts: which rank owns which positions of the sequence."""

from cp_dispatch.layouts.balancer import Balancer, from_text
from cp_dispatch.layouts.block_balanced import BlockBalanced
from cp_dispatch.layouts.buffers import shard, unshard
from cp_dispatch.layouts.documents import PerDocumentHeadTail
from cp_dispatch.layouts.geometry import Geometry, RowGeometry, laid_out, natural, of_spans
from cp_dispatch.layouts.head_tail import HeadTail
from cp_dispatch.layouts.labels import next_token_labels
from cp_dispatch.layouts.select import positions, selector
from cp_dispatch.layouts.spans import Span, chunk_spans
from cp_dispatch.layouts.tiles import Tile

__all__ = [
    "Balancer",
    "BlockBalanced",
    "Geometry",
    "HeadTail",
    "PerDocumentHeadTail",
    "RowGeometry",
    "Span",
    "Tile",
    "chunk_spans",
    "from_text",
    "laid_out",
    "natural",
    "next_token_labels",
    "of_spans",
    "positions",
    "selector",
    "shard",
    "unshard",
]
