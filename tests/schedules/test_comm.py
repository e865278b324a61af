"""A ring's streams and its communicator, together with those of others."""

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cp_dispatch.schedules import comm
from cp_dispatch.schedules.comm import Ring
from tests.ranks import one_rank


@contextlib.contextmanager
def ring_on_cuda():
    """A ring that assumes it has a side stream, and the current stream."""
    ring, current = object.__new__(Ring), mock.Mock()
    ring.stream = mock.Mock()
    with (
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: current),
    ):
        yield ring, current


def test_after_an_error_memory_goes_when_the_side_stream_is_done():
    """Code that raises while it starts a move keeps nothing alive. Otherwise the side stream would
    write to memory that the current stream has passed on."""
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


def test_streams_are_those_of_the_tensors_device():
    """Without set_device, another device may be the current one. Waiting for its stream would not
    wait for the data that the move reads."""
    streams = {None: mock.Mock(), (device := torch.device("cuda", 1)): mock.Mock()}
    with (
        ring_on_cuda() as (ring, _),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: streams[device]),
    ):
        ring.stream.device = device
        with pytest.raises(MemoryError), ring.after(ring.mark()):
            ring.wait(ring.mark())
            raise MemoryError
    assert not streams[None].method_calls
    names = [name for name, *_ in streams[device].method_calls]
    assert names == ["record_event", "record_event", "wait_event", "wait_stream"]


@pytest.mark.parametrize("config, device, own", [
    ("cuda:nccl", "cuda", True),
    ("cpu:gloo,cuda:nccl", "cuda", True),
    ("cpu:gloo,cuda:nccl", "cpu", False),
    ("cpu:gloo,cuda:gloo", "cuda", False),
])  # fmt: skip
def test_a_ring_on_nccl_has_a_communicator_of_its_own(config, device, own):
    """Also next to gloo for CPU. The user's own communicator can deadlock if two streams use it."""
    made = mock.Mock()
    with (
        one_rank() as mesh,
        mock.patch.object(dist, "get_backend_config", lambda group: config),
        mock.patch.object(dist, "ProcessGroupNCCL", mock.Mock(), create=True),
        mock.patch.object(comm, "new_group_of_these", lambda ranks, **_: made),
        mock.patch.dict(comm._ring_groups),
    ):
        group = mesh.get_group()
        assert comm._communicator(group, torch.device(device)) is (made if own else group)
        if own:  # names of groups repeat after destroy_process_group
            made_again = mock.Mock()
            with mock.patch.object(comm, "new_group_of_these", lambda ranks, **_: made_again):
                assert comm._communicator(group, torch.device(device)) is made
                comm._ring_groups[group.group_name] = mock.Mock(), made
                assert comm._communicator(group, torch.device(device)) is made_again


def test_a_group_goes_when_it_is_destroyed():
    """Otherwise its threads and sockets would stay forever, for every group that a process
    creates."""
    with one_rank():
        group = dist.new_group([0])
        ring, seen = Ring.of(group, torch.device("cpu")), weakref.ref(group)
        assert ring.group is group and Ring.of(group, torch.device("cpu")) is ring
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert seen() is None
        with pytest.raises(RuntimeError, match="resolve the process group"):
            ring.group  # noqa: B018  not None, which would mean all ranks
