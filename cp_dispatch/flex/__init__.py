"""FlexAttention on sequence-sharded DTensors."""
