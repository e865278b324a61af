"""How a call runs: which kernel and schedule, or why none, in data and in words."""
