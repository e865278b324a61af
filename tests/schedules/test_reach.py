"""Which ranks write to each other's memory: all of a group or none, whichever rank cannot."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cp_dispatch.schedules import reach
from tests.distributed.threads import run_threads

CASES = {
    "nothing": ({}, True),
    "a host": ({"hosts": [1, 1, 2]}, False),
    "kernels": ({"able": [True, True, False]}, False),
    "a GPU for each": ({"devices": [0, 1, 1]}, False),
    "a GPU for each, as told": ({"devices": [0, 1, 1], "shared": "1"}, True),
    "a GPU that others see": ({"counts": [3, 2, 3]}, False),
    "access one way": ({"closed": {(2, 0)}}, False),
}


@pytest.mark.parametrize("lacking", CASES)
def test_ranks_reach_each_other_alike(monkeypatch, lacking):
    """If one rank cannot, no rank does. Otherwise they would wait for each other's flags."""
    differs, reaches = CASES[lacking]
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", differs.get("shared", "0"))
    for module, name, values in (
        (reach, "number_of_host", differs.get("hosts", [1, 1, 1])),
        (reach, "_can_try", differs.get("able", [True] * 3)),
        (torch.cuda, "device_count", differs.get("counts", [3] * 3)),
    ):
        monkeypatch.setattr(module, name, lambda values=values: values[dist.get_rank()])
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer",
        lambda device, peer: (device, peer) not in differs.get("closed", ()),
    )  # fmt: skip
    devices = differs.get("devices", [0, 1, 2])

    told = [None] * 3

    class Told(dict):
        """For ranks in threads, whose groups have the same name."""

        def __setitem__(self, name, found):
            told[dist.get_rank()] = found

    monkeypatch.setattr(reach, "_reachable", Told())

    def body(rank):
        reach.ask_peers(dist.group.WORLD, torch.device("cpu", devices[rank]))

    run_threads(3, body)
    assert [verdict for _, verdict in told] == [reaches] * 3


def test_what_ranks_found_out_is_their_groups(monkeypatch):
    """Names of groups repeat after destroy_process_group."""
    group, another = (mock.Mock(group_name="cp") for _ in range(2))
    monkeypatch.setattr(reach, "_reachable", {"cp": (group, True)})
    assert reach.is_used_by(group) is True and reach.is_used_by(another) is None
