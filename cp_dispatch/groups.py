"""Process groups of the ranks that share a sequence."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import disable_current_modes, group_name, new_group_of_these

#: Groups by their world and their ranks. Rank numbers have a different meaning after
#: destroy_process_group, and ranks that are threads have separate worlds.
_joint_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def ring_group_name(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> str:
    """Name of the group of this rank and those that differ from it in ``mesh_dims`` alone.

    "" without mesh dims, and for a rank outside the mesh, which takes no part. The group of
    several mesh dims is made at its first use, on its ranks alone; the first dim is the slowest.
    """
    if not mesh_dims or mesh.get_coordinate() is None:
        return ""
    if len(mesh_dims) == 1:
        return group_name(mesh.get_group(mesh_dims[0]))
    # In a trace too, the mesh's ranks are numbers and the group is a real one.
    with disable_current_modes():
        index = tuple(
            slice(None) if dim in mesh_dims else at for dim, at in enumerate(mesh.get_coordinate())
        )
        ranks = tuple(mesh.mesh[index].flatten().tolist())
        known = _joint_groups.setdefault(dist.group.WORLD, {})
        if ranks not in known:
            known[ranks] = new_group_of_these(ranks)
    return group_name(known[ranks])


def exists(group: dist.ProcessGroup) -> bool:
    """Whether a group has not been destroyed; to be called by a thread of its world."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True
