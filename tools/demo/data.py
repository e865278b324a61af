"""Real text that every CPython ships: the topics of its interactive help, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor


def load_corpus() -> Tensor:
    """The whole text as one int64 tensor of byte values."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def batches(
    corpus: Tensor, seq_len: int, batch_size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets) pairs of shape (B, S), the same for the same seed."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(corpus) - seq_len, (batch_size,), generator=rng)
        windows = torch.stack([corpus[i : i + seq_len + 1] for i in starts.tolist()])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
