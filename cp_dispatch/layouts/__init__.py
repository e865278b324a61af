"""Who owns which positions of the sequence."""

from cp_dispatch.layouts.balancer import Balancer, from_text
from cp_dispatch.layouts.block_balanced import BlockBalanced
from cp_dispatch.layouts.buffers import shard, unshard
from cp_dispatch.layouts.documents import PerDocumentHeadTail
from cp_dispatch.layouts.head_tail import HeadTail
from cp_dispatch.layouts.labels import next_token_labels
from cp_dispatch.layouts.spans import Geometry, Span, Tile, chunk_spans, natural

__all__ = [
    "Balancer",
    "BlockBalanced",
    "Geometry",
    "HeadTail",
    "PerDocumentHeadTail",
    "Span",
    "Tile",
    "chunk_spans",
    "from_text",
    "natural",
    "next_token_labels",
    "shard",
    "unshard",
]
