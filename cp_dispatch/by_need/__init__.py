"""Sends keys only to ranks that need them; shared by ``flex_attention`` and ``varlen_attn``."""
