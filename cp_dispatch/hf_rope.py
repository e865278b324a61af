"""Rotary embeddings of transformers whose frequencies go by the longest position that they see.

``"dynamic"`` and ``"longrope"`` take others beyond some length. Inside a block a rank sees the
positions of its shard, and would choose by those alone, in silence.
"""

from __future__ import annotations


def chosen_apart(config, longest: list[int]) -> tuple[str, int] | None:
    """The kind of rotary embedding, and the length beyond which it takes other frequencies, where
    ranks that see so many positions would not choose alike; else None."""
    for rope in _ropes(config):
        kind = rope.get("rope_type")
        if kind == "longrope" and rope.get("short_factor") != rope.get("long_factor"):
            limit = rope.get("original_max_position_embeddings")
            if limit and len({n > limit for n in longest}) > 1:
                return kind, limit
        elif isinstance(kind, str) and "dynamic" in kind:
            limit = getattr(config, "max_position_embeddings", None)
            if limit and max(longest) > limit and len(set(longest)) > 1:
                return kind, limit
    return None


def by_length(config) -> bool:
    """Whether it depends on the longest position at all."""
    kinds = [rope.get("rope_type") for rope in _ropes(config)]
    return any(isinstance(x, str) and ("dynamic" in x or x == "longrope") for x in kinds)


def _ropes(config) -> list[dict]:
    """One, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]
