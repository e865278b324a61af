"""Groups of the ranks that share a sequence, on meshes whose other ranks do not exist."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch import groups
from cp_dispatch._compat import group_name, new_group_of_these, resolve_group
from cp_dispatch.groups import ring_group_name
from tests.ranks import fake_ranks, one_rank


@pytest.fixture(autouse=True)
def _forget_groups():
    yield
    groups._joint_groups.clear()


def ranks_of(name: str) -> list[int]:
    return dist.get_process_group_ranks(resolve_group(name))


def test_without_mesh_dims_there_is_no_group():
    with fake_ranks(4) as mesh, mock.patch.object(dist, "new_group", side_effect=AssertionError):
        assert ring_group_name(mesh, ()) == ""


def test_one_mesh_dim_has_the_meshs_own_group():
    with (
        fake_ranks(2, 2, names=("dp", "cp"), rank=3) as mesh,
        mock.patch.object(dist, "new_group", side_effect=AssertionError),
    ):
        for dim, ranks in ((0, [1, 3]), (1, [2, 3])):
            name = ring_group_name(mesh, (dim,))
            assert name == group_name(mesh.get_group(dim)) and ranks_of(name) == ranks


def test_a_rank_outside_the_mesh_has_no_group_and_waits_for_none():
    with fake_ranks(4, rank=3):
        mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "cp"))
        with mock.patch.object(dist, "new_group", side_effect=AssertionError):
            for dims in ((), (0,), (1,), (0, 1)):
                assert ring_group_name(mesh, dims) == ""


@pytest.mark.parametrize(
    "rank, dims, ranks",
    [
        (0, (0, 1), [0, 2, 4, 6]),
        (5, (0, 1), [1, 3, 5, 7]),
        (5, (1, 2), [4, 5, 6, 7]),
        (5, (0, 2), [0, 1, 4, 5]),
        (6, (0, 1, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_several_mesh_dims_share_a_group_of_their_ranks_alone(rank, dims, ranks):
    with fake_ranks(2, 2, 2, names=("a", "b", "c"), rank=rank) as mesh:
        assert ranks_of(ring_group_name(mesh, dims)) == ranks


def test_a_group_is_made_once_and_by_its_ranks_alone():
    with fake_ranks(2, 2, names=("a", "b")) as mesh:
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            first = ring_group_name(mesh, (0, 1))
            assert ring_group_name(mesh, (0, 1)) == first
            other_mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("x", "y"))
            made = new_group.call_count
            assert ring_group_name(other_mesh, (0, 1)) == first
        assert new_group.call_count == made
        ours = [c for c in new_group.call_args_list if c.kwargs.get("use_local_synchronization")]
        assert len(ours) == 1 and tuple(ours[0].args[0]) == (0, 1, 2, 3)


def test_the_ring_order_is_the_order_of_the_shards():
    """The first mesh dim varies slowest, as for a tensor sharded over both."""
    for rank in range(4):
        with fake_ranks(2, 2, names=("a", "b"), rank=rank) as mesh:
            group = resolve_group(ring_group_name(mesh, (0, 1)))
            first, second = mesh.get_coordinate()
            assert dist.get_group_rank(group, rank) == 2 * first + second
        groups._joint_groups.clear()


def names_of(rank: int, attends: bool) -> tuple[str, str]:
    """The names of the ring's group, and of a group that all ranks create later."""
    with fake_ranks(2, 2, names=("a", "b"), rank=rank) as mesh:
        dist.new_group([0, 2])
        ring = ring_group_name(mesh, (0, 1)) if attends else ""
        later = group_name(dist.new_group([0, 1, 2, 3]))
    groups._joint_groups.clear()
    return ring, later


def test_ranks_give_a_group_one_name_whatever_else_they_are_in():
    """Torch's name counts the groups that a rank is in, so the ranks of one group waited for each
    other under two names."""
    assert names_of(0, True)[0] == names_of(3, True)[0]


def test_groups_made_later_are_called_alike_where_nobody_attends():
    """On torch 2.14 a group of some ranks was counted only on those, so later groups had two
    names."""
    assert names_of(0, True)[1] == names_of(0, False)[1]


def test_groups_of_the_same_ranks_have_names_of_their_own():
    with fake_ranks(2, 2, names=("a", "b")):
        names = [group_name(new_group_of_these((0, 1))) for _ in range(3)]
        assert len(set(names)) == 3


def test_after_destroy_process_group_a_new_group_is_made():
    known = []
    for _ in range(2):
        with fake_ranks(2, 2, names=("a", "b")) as mesh:
            known.append(resolve_group(ring_group_name(mesh, (0, 1))))
            assert known[-1].size() == 4
    assert known[0] is not known[1]


def test_a_real_mesh_of_one_rank():
    with one_rank() as mesh:
        assert ranks_of(ring_group_name(mesh, (0,))) == [0]
        square = DeviceMesh("cpu", [[0]], mesh_dim_names=("a", "b"))
        assert ranks_of(ring_group_name(square, (0, 1))) == [0]
