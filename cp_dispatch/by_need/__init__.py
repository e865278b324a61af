"""Keys go to the ranks whose rows need them: what ``flex_attention`` and ``varlen_attn`` share."""
