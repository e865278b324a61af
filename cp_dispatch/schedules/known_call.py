"""Repeats earlier ``one_call`` calls with only the few ops that they need.

If shards are so short that only the host's time counts, most of it is spent on what follows from
shapes and strides alone: which rooms, which rows go where, which views of the received data. A
second call with tensors of the same kind needs none of that: it pushes the keys and calls the
kernel; a backward also pushes the shares and sums them.

Rooms are those of the first call, which all ranks made together. No rooms are created here; if one
has been replaced, or a CUDA graph is captured, a call takes the full path. Both paths send the same
data, so ranks may take different ones.

Nothing overlaps, so copies run on the default stream if that is the current one
(:meth:`Mailbox.push_here`). From another stream they use the side stream, like those of all other
schedules.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from cp_dispatch._compat import current_raw_stream, is_capturing
from cp_dispatch.native.merge import plain_batch, to_token_major, token_major
from cp_dispatch.native.parts import way_to_add
from cp_dispatch.schedules.copy_ops import can_be_copied, rows_for
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.key_shares import KeyShares
from cp_dispatch.schedules.mailbox import Mailbox, on_default_stream
from cp_dispatch.schedules.prefix_keys import PushedPrefixes, prefix_keys
from cp_dispatch.schedules.prefix_plan import gradient_parcels, prefixes_of


class Known:
    """The forward and the backward of one job, for tensors of the most recent kind. Schedules
    define ``learn_forward`` and ``learn_backward``, which are called after a call that took the
    full path and so has created the rooms."""

    def __init__(self, job: Job):
        self._job = job
        # Kind and way are stored together, because another thread may read them meanwhile.
        self._found: list[tuple[list, weakref.ref | None]] = [([], None), ([], None)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
        """Output and logsumexp of query, key and value; None if the call has to take the full path,
        after which ``learn_forward`` may learn it."""
        way = self._way(0, tensors)
        return None if way is None else way(*tensors)

    def backward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """dQ, dK and dV of grad_output, query, key, value, output and logsumexp, likewise."""
        way = self._way(1, tensors)
        return None if way is None else way(*tensors)

    def _may_learn(self, index: int, tensors: Sequence[Tensor]) -> bool:
        asked = _kind(tensors)
        if _is_captured(asked):
            return False
        # Do not try again for a kind that could not be learned.
        kind, reference = self._found[index]
        return reference is not None or kind != asked

    def _are_plain(self, tensors: Sequence[Tensor]) -> bool:
        """Whether kernels take the tensors as they are."""
        pad = self._job.backend.pad
        return all(0 not in x.shape and pad(x) is x for x in tensors)

    def _keep(self, index: int, tensors: Sequence[Tensor], way, box: Mailbox | None) -> None:
        reference = None
        if way is not None:
            # Stored in the room, so that a replaced room is not kept alive.
            box.forget_many()
            box.views["known call", self, index] = way
            reference = weakref.ref(way)
        self._found[index] = _kind(tensors), reference

    def _way(self, index: int, tensors: Sequence[Tensor]):
        kind, reference = self._found[index]
        way = None if reference is None else reference()
        if way is None or not way.is_current:
            return None
        asked = _kind(tensors)
        return way if kind == asked and not _is_captured(asked) else None


class KnownCalls(Known):
    """Known calls of ``one_call``."""

    def learn_forward(self, *tensors: Tensor) -> None:
        """See :class:`Known`."""
        if not self._may_learn(0, tensors):
            return
        keys = self._prefixes(*tensors)
        way = None if keys is None else _Forward(self._job, keys, *tensors)
        self._keep(0, tensors, way, None if keys is None else keys.box)

    def learn_backward(self, *tensors: Tensor) -> None:
        """See :class:`Known`; of a backward with gradients of keys."""
        if not self._may_learn(1, tensors):
            return
        way = box = None
        keys = self._prefixes(*tensors[:4])
        if keys is not None:
            job, (_, _, key, value, *_) = self._job, tensors
            dtype = job.backend.gradient_dtype(key.dtype)
            sums = KeyShares(key, value, job.geometry, job.ring, dtype, gradient_parcels)
            box = sums.box
            way = None if box is None else _Backward(job, keys, sums, *tensors)
        self._keep(1, tensors, way, box)

    def _prefixes(self, *tensors: Tensor) -> PushedPrefixes | None:
        """The prefixes of keys, if kernels take the tensors as they are and peers write to rooms;
        otherwise None."""
        *_, key, value = tensors
        if not self._are_plain(tensors):
            return None
        found = prefix_keys(key, value, self._job.geometry, self._job.ring)
        return found if isinstance(found, PushedPrefixes) else None


def _is_captured(kind: list) -> bool:
    # The default stream, number 0, cannot be captured.
    return kind[0] != 0 and is_capturing()


def _kind(tensors: Sequence[Tensor]) -> list:
    """What identifies calls of one kind: the current stream, and each tensor's shape, strides and
    dtype."""
    kind: list = [current_raw_stream(tensors[0].device)]
    for x in tensors:
        kind += (x.shape, x.stride(), x.dtype)
    return kind


class _TokenMajor:
    """Tensors ``(B, H, S, D)`` in the form for copies, of the same kind at every call. If the first
    ones could not be copied as they are, all are packed by kernels of the current stream."""

    def __init__(self):
        self._lie_so: bool | None = None

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        if self._lie_so is None:
            self._lie_so = all(can_be_copied(x.transpose(1, 2)) for x in tensors)
        return tensors if self._lie_so else [x.transpose(1, 2) for x in rows_for(tensors)]


class _Plain:
    """As :func:`plain_batch`, for tensors with the same strides as the first one."""

    def __init__(self, tensor: Tensor):
        plain = plain_batch(tensor)
        self._view = None if plain is tensor else (plain.shape, plain.stride())

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor if self._view is None else tensor.as_strided(*self._view)


class _Forward:
    def __init__(
        self, job: Job, keys: PushedPrefixes, query: Tensor, key: Tensor, value: Tensor,
        room: Mailbox | None = None,
    ):  # fmt: skip
        self._backend, self._scale = job.backend, job.scale
        self._box, self._moves, self._own = keys.box, keys.moves, keys.own
        #: The room for the data that is sent next.
        self._room = room
        self._opens = (self._box,) if room is None else (self._box, room)
        self._numbers = self._box.numbers(self._moves, self._opens)
        self._prefixes = prefixes_of(job.geometry, job.rank) if job.geometry.causal else None
        self._lengths = None
        if self._prefixes is not None:
            self._lengths = job.backend.prefix_lengths(query.size(0), self._prefixes, query.device)
        self._dtype = job.backend.output_dtype(query.dtype)
        self._lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        self._keys, self._plain_query = _TokenMajor(), _Plain(query)
        self._here = on_default_stream(query.device)

    @property
    def is_current(self) -> bool:
        return self._box.is_current

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._bring(key, value)
        query = self._plain_query(query)
        if self._prefixes is None:
            out, lse = self._backend.forward(query, *self._own, None, False, self._scale)
        else:
            out, lse = self._backend.prefix_forward(
                query, *self._own, self._prefixes, self._scale, self._lengths
            )
        self._release(self._box)
        if lse.dtype is not self._lse_dtype:  # to the same dtype takes as long as a view
            lse = lse.to(self._lse_dtype)
        return to_token_major(out, self._dtype), lse.contiguous()

    def _bring(self, key: Tensor, value: Tensor) -> None:
        """Bring the keys here. Opens the rooms for them and for the data that is sent next."""
        box, keys = self._box, self._keys(key, value)
        if self._here:
            box.push_here(*keys, self._numbers, self._opens)
        else:
            rows = [x.transpose(1, 2) for x in keys]
            box.push_rows(rows, self._moves, opens=True, then_wait=True, opens_too=self._room)

    def _release(self, box: Mailbox) -> None:
        if not self._here:
            box.release()


class _Backward(_Forward):
    def __init__(
        self, job: Job, keys: PushedPrefixes, sums: KeyShares, grad_output: Tensor, query: Tensor,
        key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
    ):  # fmt: skip
        super().__init__(job, keys, query, key, value, sums.box)
        self._sent = sums.moves()
        self._sent_numbers = sums.box.numbers(self._sent)
        self._arrived, home = sums.coming(), len(sums.own)
        self._places = sums.places(self._arrived)
        self._plain_grad, self._plain_output = _Plain(grad_output), _Plain(output)
        self._shares, self._add, self._pieces = _TokenMajor(), None, None
        # The parts whose sums are dK and dV.
        dks, dvs = ([x[index] for x in self._arrived] for index in (0, 1))
        self._flat = lambda dk, dv: [*(dk,) * home, *dks, *(dv,) * home, *dvs]
        totals = (token_major(*x.shape, like=x) for x in (key, value))
        self._totals = [(x.shape, x.stride()) for x in totals]

    @property
    def is_current(self) -> bool:
        return self._box.is_current and self._room.is_current

    def __call__(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        logsumexp: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        room = self._room
        self._bring(key, value)
        query = self._plain_query(query)
        inputs = (
            self._plain_grad(grad_output), query, *self._own, self._plain_output(output), logsumexp,
        )  # fmt: skip
        if self._prefixes is None:
            dq, dk, dv, _ = self._backend.backward(*inputs, None, False, self._scale)
        else:
            dq, dk, dv = self._backend.prefix_backward(
                *inputs, self._prefixes, self._scale, self._lengths
            )
        # The stream that brought the keys waits here until they have been read, so their box needs
        # no release of its own.
        shares = self._shares(dk, dv)
        if self._here:
            room.push_here(*shares, self._sent_numbers)
        else:
            room.push_rows([x.transpose(1, 2) for x in shares], self._sent, then_wait=True)
        totals = [
            x.new_empty_strided(*how) for x, how in zip((key, value), self._totals, strict=True)
        ]
        flat = self._flat(dk, dv)
        if self._add is None:
            self._add, self._pieces = way_to_add(flat, totals, self._places)
        self._add(flat, self._pieces, totals)
        self._release(room)
        return to_token_major(dq, query.dtype), *totals
