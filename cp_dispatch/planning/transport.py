"""Describes for reports what carries a plan's transfers on CUDA, and what moves before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from cp_dispatch.groups import ring_group_name
from cp_dispatch.schedules.comm import reaches_peers

UNKNOWN = (
    "moved by copy engines if every rank can write to every other's memory, which the first call "
    "finds out, else by NCCL"
)
NOT_REACHED = (
    "moved by NCCL: not every rank can write to every other's memory, or copy engines are "
    "switched off"
)
_PUSHED = ("ring", "mirrored_ring", "gather", "mirrored_gather", "one_call", "ulysses")


def carrier(mesh: DeviceMesh, schedule: str | None, mesh_dims: tuple[int, ...]) -> str | None:
    """Whether copy engines or NCCL carry a schedule's data; None where there is no choice."""
    if mesh.device_type != "cuda" or schedule not in _PUSHED:
        return None
    reaches = reaches_all(mesh, mesh_dims)
    if reaches is None:
        return UNKNOWN
    if not reaches:
        return NOT_REACHED
    return (
        "moved by copy engines if a buffer of 1 GiB suffices: only what the receiver needs, and "
        "gradients in the kernels' dtype (the bytes above are NCCL's)"
    )


def puller(
    mesh: DeviceMesh, mesh_dims: tuple[int, ...], most_runs: Callable[[], int], most: int
) -> tuple[tuple[str, ...], bool]:
    """What moves the keys that ranks need, in words, and whether copy engines do.

    ``most_runs`` gives the runs of rows that the rank needs which needs the most; copy engines move
    at most ``most``.
    """
    if mesh.device_type != "cuda":
        return (), False
    reaches = reaches_all(mesh, mesh_dims)
    if not reaches:
        return (UNKNOWN if reaches is None else NOT_REACHED,), False
    runs = most_runs()
    if runs > most:
        words = (
            f"moved by NCCL: some rank needs {runs} runs of rows, and copy engines move at most "
            f"{most}"
        )
        return (words,), False
    return ("moved by copy engines if a buffer of 1 GiB suffices, else by NCCL",), True


def reaches_all(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> bool | None:
    """Whether the ranks of these mesh dims can write to each other's memory; None if unknown."""
    # The group of several mesh dims is created at its first call, and this must not communicate.
    name = ring_group_name(mesh, mesh_dims) if len(mesh_dims) == 1 else ""
    return reaches_peers(name) if name else None


def redistributed(tensors: dict[str, DTensor], wanted: Sequence[tuple]) -> list[str]:
    """What DTensor has to redistribute to the placements that an op takes, in words."""
    return [
        f"first DTensor redistributes {name} from {x.placements} to {target}, and again in a "
        "backward; this is not counted above"
        for (name, x), target in zip(tensors.items(), wanted, strict=True)
        if any(
            given != placed and given != Replicate() and size > 1
            for given, placed, size in zip(x.placements, target, x.device_mesh.shape, strict=True)
        )
    ]
