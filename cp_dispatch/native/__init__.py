"""The ops of ``csrc/`` and their Python twins: rows, permutations, sums, merges."""
