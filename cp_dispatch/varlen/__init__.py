"""``torch.nn.attention.varlen.varlen_attn`` on DTensors whose packed sequence is sharded."""
