"""Who owns which positions of the sequence."""

from cp_dispatch.layouts.spans import Geometry, Span, Tile, chunk_spans, natural

__all__ = ["Geometry", "Span", "Tile", "chunk_spans", "natural"]
