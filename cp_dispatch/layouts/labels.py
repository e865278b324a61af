"""Labels for next-token prediction, whatever order the tokens will be in."""

from __future__ import annotations

import itertools

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts.balancer import Balancer
from cp_dispatch.layouts.documents import DocLengths, PerDocumentHeadTail, document_rows


def next_token_labels(
    tokens: torch.Tensor,
    balancer: Balancer | None = None,
    doc_lengths: DocLengths | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The token after each one: labels of a whole sequence in natural order.

    A rank's rows have their neighbours on other ranks, so labels are made first and sharded like
    the tokens::

        labels = next_token_labels(tokens, balancer)
        tokens, labels = shard(mesh, [tokens, labels], 1, balancer)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        # Ranks hold different numbers of labels: add up losses and counts, then divide.

    Args:
        tokens: ``(..., S)`` of any integer dtype, in natural order.
        balancer: checked against S; of a ``PerDocumentHeadTail`` the documents are used.
        doc_lengths: lengths of packed documents, for all rows or one sequence for each row of
            ``(B, S)``. The last token of a document has no label.
        ignore_index: the label of positions without one.

    Returns:
        int64 of the shape of ``tokens``; the last position is ``ignore_index``.

    Raises:
        ContextParallelError: where lengths or batch rows do not fit the tokens, and for what is no
            plain tensor.
    """
    if not isinstance(tokens, torch.Tensor) or isinstance(tokens, DTensor):
        raise ContextParallelError(
            f"tokens must be a plain tensor of the whole sequence, got a {type(tokens).__name__}; "
            "labels are made before tokens become DTensors or shards"
        )
    if tokens.ndim == 0 or tokens.is_floating_point():
        raise ContextParallelError(
            f"tokens must be integers of shape (..., S), got {tokens.dtype} of shape "
            f"{list(tokens.shape)}"
        )
    length = tokens.shape[-1]
    if balancer is not None and balancer.seq_len != length:
        raise ContextParallelError(
            f"{balancer} is for {balancer.seq_len} positions, tokens have {length}; labels are "
            "made from whole sequences, before shard()"
        )
    if doc_lengths is None and isinstance(balancer, PerDocumentHeadTail):
        doc_lengths = balancer.doc_lengths
    rows = document_rows([length] if doc_lengths is None else doc_lengths) if length else ()
    for row in rows:
        if sum(row) != length:
            raise ContextParallelError(
                f"documents of {sum(row)} tokens together, but tokens have {length}"
            )
    if len(rows) > 1 and list(tokens.shape[:-1]) != [len(rows)]:
        raise ContextParallelError(
            f"doc_lengths has {len(rows)} batch rows, tokens have shape {list(tokens.shape)}"
        )
    labels = tokens.to(torch.int64).roll(-1, -1)
    for row, lengths in enumerate(rows):
        ends = torch.tensor(list(itertools.accumulate(lengths)), device=tokens.device) - 1
        (labels if len(rows) == 1 else labels[row])[..., ends] = ignore_index
    return labels
