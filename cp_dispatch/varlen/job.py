"""What one rank does in one call: its kernel calls, and where their rows and keys lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.by_need.kept import Kept
from cp_dispatch.by_need.ownership import ownership
from cp_dispatch.by_need.selector import Selector
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import append
from cp_dispatch.varlen.documents import Documents, Piece, Window
from cp_dispatch.varlen.exchange import Exchange, add
from cp_dispatch.varlen.kernel import Kernel
from cp_dispatch.varlen.traffic import Traffic, traffic_of

#: The most pieces of a kernel call: a size of a CUDA grid.
_MOST_PIECES = 65535

_kept, _known = Kept(), Kept()


def documents_of(cu_seq_q: Tensor, cu_seq_k: Tensor) -> Documents:
    """The documents on the host, which waits for the device once for each version of the
    tensors."""

    def make() -> Documents:
        queries = tuple(cu_seq_q.tolist())
        return Documents(queries, queries if cu_seq_k is cu_seq_q else tuple(cu_seq_k.tolist()))

    return _known.get((cu_seq_q, cu_seq_k), "documents", make)


class Call:
    """The pieces of one shift: one kernel call. Where their rows are in the shard, and their keys
    among the compact ones."""

    def __init__(self, pieces: Sequence[Piece], traffic: Traffic, window: Window, device):
        rows: list[Span] = []
        keys: list[Span] = []
        places = [traffic.compact(piece.key, piece.keys) for piece in pieces]
        for piece, spans in zip(pieces, places, strict=True):
            append(rows, piece.row, piece.rows)
            for span in spans:
                append(keys, *span)
        self.rows, self.keys = Selector(tuple(rows), device), Selector(tuple(keys), device)
        self.row_spans, self.key_spans = tuple(rows), tuple(keys)
        self.kernel = Kernel(
            [(piece.rows, piece.keys) for piece in pieces], window.shifted(pieces[0].shift), device
        )
        self.layers = _layers(pieces, places, device)


def _layers(
    pieces: Sequence[Piece], places: Sequence[list[Span]], device
) -> list[tuple[Selector, Selector]]:
    """Pieces so that no two of a layer have keys in common: where their keys are among those of the
    kernel, and among the compact ones. Pieces of several documents never share any."""
    layers: list[tuple[list[Span], list[Span]]] = []
    of_document: dict[int, int] = {}
    start = 0
    for piece, spans in zip(pieces, places, strict=True):
        layer = of_document.get(piece.document, 0)
        of_document[piece.document] = layer + 1
        if layer == len(layers):
            layers.append(([], []))
        append(layers[layer][0], start, piece.keys)
        for span in spans:
            append(layers[layer][1], *span)
        start += piece.keys
    return [tuple(Selector(tuple(spans), device) for spans in both) for both in layers]


class VarlenJob:
    """See :mod:`cp_dispatch.varlen.ops` for the arguments.

    Raises:
        ContextParallelError: the documents are not supported; on every rank.
    """

    def __init__(
        self, documents: Documents, window: Window, query_length: int, key_length: int,
        ring_shape: tuple[int, ...], rank: int, layout: str, device: torch.device,
    ):  # fmt: skip
        reasons = documents.reasons(window, query_length, key_length)
        if reasons:
            raise ContextParallelError(
                "\n  - ".join(["cp_dispatch does not support this varlen_attn call:", *reasons])
            )
        queries, keys = (ownership(n, ring_shape, layout) for n in (query_length, key_length))
        self.rows, self.key_rows = queries.rows(rank), keys.rows(rank)
        self.traffic = traffic_of(documents, window, queries, keys, rank)
        self.exchange = Exchange(self.traffic, rank, device)
        groups: dict[tuple[int, int], list[Piece]] = {}
        for number, piece in enumerate(self.traffic.pieces):
            groups.setdefault((piece.shift, number // _MOST_PIECES), []).append(piece)
        self.calls = [Call(group, self.traffic, window, device) for group in groups.values()]
        count = sum(self.traffic.takes)
        # In what gradients of keys travel, for all ranks alike: as the kernel gives them, unless
        # several calls of some rank add up, or the kernel is that for CPU, which has them wide.
        one_call = not layout and (window.is_full or window.right == 0)
        self._wide_shares = device.type != "cuda" or not one_call
        # One call, of all rows and of all compact keys as they lie.
        self.is_plain = len(self.calls) == 1 and (
            self.calls[0].row_spans == (Span(0, self.rows),)
            and self.calls[0].key_spans in ((Span(0, count),), ())
        )

    def forward(self, query: Tensor, keys: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of this rank's rows, from its compact keys and values."""
        if self.is_plain:
            return self.calls[0].kernel.forward(query, *keys, scale)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        lse = query.new_full(
            (query.size(1), query.size(0)), torch.inf, dtype=wide_dtype(query.dtype)
        )
        for call in self.calls:
            there = [call.keys.take(x) for x in keys]
            own, own_lse = call.kernel.forward(call.rows.take(query), *there, scale)
            _put(call.rows, out, own)
            _put(call.rows, lse.t(), own_lse.t())
        return out, lse

    def backward(
        self, grad_output, query, keys: Sequence[Tensor], output, logsumexp, scale: float
    ) -> tuple[Tensor, list[Tensor]]:
        """dQ of this rank's rows, and its shares of dK and dV of its compact keys."""
        if self.is_plain:
            grads = self.calls[0].kernel.backward(
                grad_output, query, *keys, output, logsumexp, scale
            )
            return grads[0], [self._share(grad, x) for grad, x in zip(grads[1:], keys, strict=True)]
        grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        sums = [x.new_zeros(x.shape, dtype=wide_dtype(x.dtype)) for x in keys]
        for call in self.calls:
            of_rows = [call.rows.take(x) for x in (grad_output, query, output, logsumexp.t())]
            there = [call.keys.take(x) for x in keys]
            *of_rows, lse = of_rows
            grads = call.kernel.backward(*of_rows[:2], *there, of_rows[2], lse.t(), scale)
            _put(call.rows, grad_query, grads[0])
            for total, grad in zip(sums, grads[1:], strict=True):
                for of_kernel, compact in call.layers:
                    add(compact, total, of_kernel.take(grad))
        return grad_query, [self._share(total, x) for total, x in zip(sums, keys, strict=True)]

    def _share(self, grad: Tensor, key: Tensor) -> Tensor:
        return grad.to(wide_dtype(key.dtype) if self._wide_shares else key.dtype)


def _put(place: Selector, into: Tensor, rows: Tensor) -> None:
    for part, values in place.parts(into, rows):
        part.copy_(values)


def job_of(
    device: torch.device, cu_seq_q: Tensor, cu_seq_k: Tensor, window: Sequence[int],
    query_length: int, key_length: int, ring_shape: Sequence[int], rank: int, layout: str,
) -> VarlenJob:  # fmt: skip
    """The job of these arguments, made once for each version of the tensors."""
    rest = (
        Window(*window), int(query_length), int(key_length), tuple(ring_shape), rank, layout, device
    )  # fmt: skip

    def make() -> VarlenJob:
        return VarlenJob(documents_of(cu_seq_q, cu_seq_k), *rest)

    return _kept.get((cu_seq_q, cu_seq_k), rest, make)
