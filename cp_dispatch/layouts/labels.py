"""``next_token_labels()``: labels for next-token prediction, made before tokens are sharded."""

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
    """Labels of a whole sequence in natural order: for each token, the one after it.

    The next token of a rank's rows may be on another rank, so make the labels first and shard them
    like the tokens::

        labels = next_token_labels(tokens, balancer)
        tokens, labels = shard(mesh, [tokens, labels], 1, balancer)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        # Ranks hold different numbers of labels: add up losses and counts, then divide.

    Args:
        tokens: ``(..., S)`` of any integer dtype, in natural order.
        balancer: checked against S. If it is a ``PerDocumentHeadTail`` and ``doc_lengths`` is None,
            its documents are used.
        doc_lengths: lengths of packed documents: one sequence for all batch rows, or one for each
            row of ``(B, S)``. The last token of a document has no label.
        ignore_index: the label of positions that have none.

    Returns:
        int64 labels of the shape of ``tokens``. The last position is ``ignore_index``.

    Raises:
        ContextParallelError: if lengths or batch rows do not match the tokens, if ``tokens`` is not
            a plain tensor, or if ``balancer`` is not a balancer.
    """
    if not isinstance(tokens, torch.Tensor) or isinstance(tokens, DTensor):
        raise ContextParallelError(
            f"tokens must be a plain tensor of the whole sequence, got a {type(tokens).__name__}; "
            "make labels before tokens become DTensors or shards"
        )
    if tokens.ndim == 0 or tokens.is_floating_point():
        raise ContextParallelError(
            f"tokens must be integers of shape (..., S), got {tokens.dtype} of shape "
            f"{list(tokens.shape)}"
        )
    if not isinstance(balancer, Balancer | None):
        raise ContextParallelError(
            "balancer must be None or a balancer such as "
            f"cp_dispatch.HeadTail(seq_len, world_size), got {balancer!r}; "
            "pass the lengths of documents as doc_lengths="
        )
    length = tokens.shape[-1]
    if balancer is not None and balancer.seq_len != length:
        raise ContextParallelError(
            f"{balancer} is for {balancer.seq_len} positions, tokens have {length}; make labels "
            "from whole sequences, before shard()"
        )
    if doc_lengths is None and isinstance(balancer, PerDocumentHeadTail):
        doc_lengths = balancer.doc_lengths
    rows = document_rows([length] if doc_lengths is None else doc_lengths) if length else ()
    for row in rows:
        if sum(row) != length:
            raise ContextParallelError(
                f"the documents have {sum(row)} positions in total, but tokens have {length}"
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
