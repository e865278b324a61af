"""Process groups of the ranks that share a sequence."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import disable_current_modes, group_name, new_group_of_these

_joint_groups: dict[tuple, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


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
        world = dist.group.WORLD
        known = _joint_groups.get(ranks)
        # Ranks mean others after destroy_process_group.
        if known is None or known[0] is not world:
            joint = new_group_of_these(ranks)
            known = _joint_groups[ranks] = (world, joint)
    return group_name(known[1])
