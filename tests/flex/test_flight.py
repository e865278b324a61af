"""What a flight keeps alive while another stream reads and writes."""

import contextlib
import weakref

import torch

from cp_dispatch.by_need.ownership import ownership
from cp_dispatch.flex.carriers import Collectives
from cp_dispatch.flex.exchange import Exchange
from cp_dispatch.flex.flight import Arrivals, Returns
from cp_dispatch.flex.needs import everything

LENGTH, COLUMNS, GROUPS = 8, 4, 2


class OneRank:
    """A ring of one rank that records which marks are waited for."""

    def __init__(self):
        self.group, self.marks, self._marked = None, [], 0

    def mark(self):
        self._marked += 1
        return self._marked

    @contextlib.contextmanager
    def after(self, mark):
        yield

    def wait(self, mark):
        if mark is not None:
            self.marks.append(mark)


def make_carrier() -> Collectives:
    """A carrier to which nothing else holds a reference, as if a mask was made in inference
    mode."""
    keys = ownership(LENGTH, (1,), "")
    return Collectives(Exchange(everything(keys, keys), keys, 0, torch.device("cpu")), OneRank())


def test_indices_stay_until_keys_have_come():
    carrier, ring = make_carrier(), OneRank()
    held = weakref.ref(carrier._exchange)
    flight = Arrivals(ring, carrier, False)
    del carrier
    for group in range(GROUPS):
        flight.start(group, torch.zeros(1, LENGTH, 1, 1, COLUMNS))
        assert held() is not None
    flight.take(0)
    assert held() is not None
    del flight
    assert held() is None and len(ring.marks) == GROUPS


def test_indices_stay_until_gradients_have_come():
    carrier, ring = make_carrier(), OneRank()
    held = weakref.ref(carrier._exchange)
    flight = Returns(ring, (torch.zeros(1), torch.zeros(1)))
    grads = [torch.zeros(1, 1, LENGTH, COLUMNS)]
    flight.start(carrier, carrier.put_aside(grads, grads), grads)
    del carrier
    assert held() is not None
    flight.take()
    assert held() is None and ring.marks
