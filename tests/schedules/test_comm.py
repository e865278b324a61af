"""What a ring's stream and its communicator have to do with others."""

import contextlib
from unittest import mock

import pytest
import torch

from cp_dispatch.schedules.comm import Ring


@contextlib.contextmanager
def ring_on_cuda():
    """A ring that thinks it has a side stream, and the current stream."""
    ring, current = object.__new__(Ring), mock.Mock()
    ring.stream = mock.Mock()
    with (
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", lambda: current),
    ):
        yield ring, current


def test_after_an_error_memory_goes_when_the_side_stream_is_done():
    """Who raises while starting a move holds on to nothing: the side stream would write to what
    the current one has given to others."""
    with ring_on_cuda() as (ring, current):
        with pytest.raises(MemoryError), ring.after(ring.mark()):
            raise MemoryError
        current.wait_stream.assert_called_once_with(ring.stream)


def test_moves_that_start_are_not_waited_for():
    with ring_on_cuda() as (ring, current):
        with ring.after(ring.mark()):
            pass
        current.wait_stream.assert_not_called()
        ring.stream.wait_event.assert_called_once()
