"""How transformers handles a shard of a sequence: masks, positions, configs, attention modules."""
