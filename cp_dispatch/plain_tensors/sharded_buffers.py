"""Which tensors a ``context_parallel`` block has sharded, and whether DDP overwrote the shards."""

from __future__ import annotations

from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import active_ddp_module

sharded: set[int] = set()  # ids of the buffers of all blocks


def overwritten_by_ddp(mesh: DeviceMesh) -> str | None:
    """Why buffers of the module that runs do not hold this rank's shards, None if they do.

    Before each forward ``DistributedDataParallel`` copies its first rank's buffers of the module to
    all others, without a new version that would tell.
    """
    ddp = active_ddp_module()
    if ddp is None or not ddp.will_sync_module_buffers():
        return None
    written = {id(x) for x in ddp.modules_buffers} & sharded
    both = {*get_process_group_ranks(ddp.process_group)} & {*mesh.mesh.flatten().tolist()}
    if not written or len(both) == 1:
        return None
    names = [name for name, x in ddp.module.named_buffers() if id(x) in written]
    return (
        f"DistributedDataParallel has copied one rank's shard of {', '.join(names)} to the other "
        "ranks, as it does with buffers of a module before each forward; make it with "
        "broadcast_buffers=False (forward_sync_buffers=False from torch 2.13 on)"
    )
