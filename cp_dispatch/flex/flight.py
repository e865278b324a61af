"""Transfers of keys and gradients that overlap with kernels ("flights").

Note [Tokens]
~~~~~~~~~~~~~
The ops of a graph are functional: one starts transfers and returns a *token*, a number on the host,
and a later one takes what arrived under that token. Between the two, no other stream may use the
graph's memory, because a graph reuses memory that it no longer needs. So all memory that a side
stream reads and writes was allocated in the op and belongs to the flight, until the current stream
has waited for it.

If a token is unknown, for example in a graph that saves the token and recomputes the rest, the keys
are fetched when they are asked for. A token only makes keys arrive early; results do not depend on
it.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.schedules.comm import Ring

_flights: dict[int, object] = {}
_numbers = itertools.count(1)


def register(flight) -> Tensor:
    """A token for a flight, which lives as long as the token."""
    number = next(_numbers)
    _flights[number] = flight
    token = torch.full((), number, dtype=torch.int64, device="cpu")
    weakref.finalize(token.untyped_storage(), _forget, number).atexit = False
    return token


def find(token: Tensor):
    """The flight of a token, None if it is unknown or gone."""
    return _flights.get(int(token))


def _forget(number: int) -> None:
    _flights.pop(number, None)


class Arrivals:
    """Transfers of keys and values to this rank, one group of heads after the other, for a forward
    or (``backward``) a backward."""

    def __init__(self, ring: Ring, carrier, backward: bool):
        # The carrier's indices were allocated on the current stream, and this may be the only
        # reference to them.
        self._ring, self.carrier, self.backward = ring, carrier, backward
        self._buffers, self._there = {}, {}

    def start(self, group: int, buffer: Tensor) -> None:
        """Start filling a buffer that already has this rank's own rows and was allocated on the
        current stream."""
        with self._ring.after(self._ring.mark()):
            self.carrier.fetch(buffer)
            self._buffers[group] = buffer
            self._there[group] = self._ring.mark()

    def take(self, group: int) -> Tensor | None:
        """The keys of a group, once they have arrived; can be taken only once."""
        self._ring.wait(self._there.get(group))
        return self._buffers.pop(group, None)

    def __del__(self):
        # Keys that were not taken are freed when the side stream no longer needs them.
        for group in list(self._buffers):
            self.take(group)


class Returns:
    """Transfers of gradients to the keys' owners, one group of heads after the other."""

    def __init__(self, ring: Ring, grads: tuple[Tensor, Tensor]):
        #: dK and dV of this rank's keys, of all heads.
        self.grads = grads
        self._ring, self._held, self._there = ring, [], None
        self.sent = 0

    def start(self, carrier, aside, grads: list[Tensor]) -> None:
        """Send the saved gradients, and write the sums to a part of ``grads``."""
        with self._ring.after(self._ring.mark()):
            carrier.give(aside, grads)
            self._there = self._ring.mark()
        self._held += [carrier, aside]
        self.sent += 1

    def take(self) -> tuple[Tensor, Tensor]:
        """dK and dV of all heads, once they have arrived."""
        self._ring.wait(self._there)
        grads, self.grads, self._there = self.grads, None, None
        self._held.clear()
        self.sent = 0
        return grads

    def __del__(self):
        if self._there is not None:
            self.take()


def returns_of(token: Tensor, groups: int) -> Returns:
    """The flight of a token, if this many groups have been sent.

    Raises:
        ContextParallelError: if there is no such flight.
    """
    found = find(token)
    if not isinstance(found, Returns) or found.sent != groups:
        raise ContextParallelError(
            "gradients of keys that were sent have not been kept: was a part of a backward "
            "graph run without the rest, or twice?"
        )
    return found
