"""What one rank does in one call: its kernel calls, and where their rows and keys are."""

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
from cp_dispatch.varlen.exchange import Exchange
from cp_dispatch.varlen.kernel import Kernel
from cp_dispatch.varlen.keys import Arrived, CallKeys, add_together
from cp_dispatch.varlen.traffic import Traffic, traffic_of

#: The largest number of pieces in a kernel call (a CUDA grid).
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
    """One kernel call: the pieces with the same shift, the places of their rows in the shard, and
    of their keys among the compact keys."""

    def __init__(
        self, pieces: Sequence[Piece], traffic: Traffic, window: Window, num_splits, device
    ):
        rows: list[Span] = []
        for piece in pieces:
            append(rows, piece.row, piece.rows)
        self.row_spans, self.rows = rows, Selector(tuple(rows), device)
        self.keys = CallKeys(pieces, traffic, device)
        sizes = [(piece.rows, piece.keys) for piece in pieces]
        self.kernel = Kernel(sizes, window.shifted(pieces[0].shift), num_splits, device)


class VarlenJob:
    """See :mod:`cp_dispatch.varlen.ops` for the arguments.

    Raises:
        ContextParallelError: on every rank, if the documents are not supported.
    """

    def __init__(
        self, documents: Documents, window: Window, query_length: int, key_length: int,
        covered: bool, num_splits: int | None, ring_shape: tuple[int, ...], rank: int, layout: str,
        device: torch.device,
    ):  # fmt: skip
        reasons = documents.reasons(window, query_length, key_length, covered)
        if reasons:
            raise ContextParallelError(
                "\n  - ".join(["cp_dispatch does not support this varlen_attn call:", *reasons])
            )
        queries, keys = (ownership(n, ring_shape, layout) for n in (query_length, key_length))
        self.rows, self.key_rows = queries.rows(rank), keys.rows(rank)
        self.traffic = traffic_of(documents, window, queries, keys, rank)
        groups: dict[tuple[int, int], list[Piece]] = {}
        for number, piece in enumerate(self.traffic.pieces):
            groups.setdefault((piece.shift, number // _MOST_PIECES), []).append(piece)
        self.calls = [
            Call(group, self.traffic, window, num_splits, device) for group in groups.values()
        ]
        order = None
        if len(self.calls) == 1 and self.calls[0].keys.are_all:
            order = self.calls[0].keys.sums
        self.exchange = Exchange(self.traffic, keys, rank, order, device)
        # The dtype in which gradients of keys travel, the same on all ranks: the kernel's, unless
        # some rank sums several of them, or the kernel is that for CPU, which returns them wide.
        self._wide_shares = device.type != "cuda" or self.traffic.shared
        # Whether there is a single call with all rows in their order.
        self._has_one_call = [x.row_spans for x in self.calls] == [[Span(0, self.rows)]]

    def share_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the gradients of keys of this dtype travel."""
        return wide_dtype(dtype) if self._wide_shares else dtype

    def forward(self, query: Tensor, keys: Arrived, scale: float) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of this rank's rows."""
        if self._has_one_call:
            (call,) = self.calls
            return call.kernel.forward(query, *keys.of(call.keys), scale)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        lse = query.new_full(
            (query.size(1), query.size(0)), torch.inf, dtype=wide_dtype(query.dtype)
        )
        for call in self.calls:
            own, own_lse = call.kernel.forward(call.rows.take(query), *keys.of(call.keys), scale)
            _put(call.rows, out, own)
            _put(call.rows, lse.t(), own_lse.t())
        return out, lse

    def backward(
        self, grad_output, query, keys: Arrived, output, logsumexp, scale: float
    ) -> tuple[Tensor, list[Tensor], bool]:
        """dQ of this rank's rows, its shares of dK and dV for its compact keys, and whether these
        are in the order of the kernel call, as ``keys`` are."""
        if self._has_one_call:
            (call,) = self.calls
            there = keys.of(call.keys)
            grad_query, *of_keys = call.kernel.backward(
                grad_output, query, *there, output, logsumexp, scale
            )
            return grad_query, *self._shares([of_keys], keys)
        grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        found = []
        for call in self.calls:
            *of_rows, lse = (call.rows.take(x) for x in (grad_output, query, output, logsumexp.t()))
            there = keys.of(call.keys)
            own, *of_keys = call.kernel.backward(*of_rows[:2], *there, of_rows[2], lse.t(), scale)
            _put(call.rows, grad_query, own)
            found.append(of_keys)
        return grad_query, *self._shares(found, keys)

    def _shares(
        self, grads: Sequence[Sequence[Tensor]], keys: Arrived
    ) -> tuple[list[Tensor], bool]:
        """From the kernel gradients of all calls."""
        like = [parts[0] for parts in keys.parts]
        dtype = self.share_dtype(like[0].dtype)
        if self._has_one_call and self.calls[0].keys.are_all and grads[0][0].dtype is dtype:
            if keys.are_ordered:
                return grads[0], True
            return [self.calls[0].keys.give_back(x) for x in grads[0]], False
        count = sum(self.traffic.takes)
        totals = [x.new_empty((count, *x.shape[1:]), dtype=dtype) for x in like]
        add_together([call.keys for call in self.calls], grads, totals)
        return totals, False


def _put(place: Selector, into: Tensor, rows: Tensor) -> None:
    for part, values in place.parts(into, rows):
        part.copy_(values)


def job_of(
    device: torch.device, cu_seq_q: Tensor, cu_seq_k: Tensor, window: Sequence[int],
    query_length: int, key_length: int, covered: bool, num_splits: int | None,
    ring_shape: Sequence[int], rank: int, layout: str,
) -> VarlenJob:  # fmt: skip
    """The job of these arguments, made once for each version of the tensors."""
    rest = (
        Window(*window), int(query_length), int(key_length), covered, num_splits,
        tuple(ring_shape), rank, layout, device,
    )  # fmt: skip

    def make() -> VarlenJob:
        return VarlenJob(documents_of(cu_seq_q, cu_seq_k), *rest)

    return _kept.get((cu_seq_q, cu_seq_k), rest, make)
