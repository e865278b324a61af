"""Debug mode for FlexAttention: checks that all ranks make the same call with the same mask."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from cp_dispatch.agreement import agree, local_shape_fits
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.call import FlexCall
from cp_dispatch.flex.local import LocalFlex
from cp_dispatch.flex.plan import make_plan
from cp_dispatch.options import Options


def check_flex_agreement(options: Options, call: FlexCall, scale: float) -> None:
    """Raise on every rank of the mesh if the ranks' calls differ (``CP_DISPATCH_DEBUG=1``).

    A mask of the whole sequence must be the same on every rank, because each rank derives from it
    what the others send. So its blocks are compared too.

    Raises:
        ContextParallelError: if they do, with the arguments of this rank and of its peers.
    """
    tensors = list(call.tensors.values())
    fits = all(local_shape_fits(x) for x in tensors if hasattr(x, "device_mesh"))
    rows = _rows(options, call)
    lines = [
        call.describe(own_rows=rows == _OWN),
        f"gradients wanted: {[x.requires_grad for x in tensors]}, scale={scale}",
        f"{options}",
        f"local shards have the shapes that the global shapes imply: {fits}",
        f"rows of blocks of the mask: {rows}",
        f"blocks of the mask: {_digest(call)}",
    ]
    text = "\n".join("    " + line for part in lines for line in part.splitlines())
    agree("flex_attention", text, tensors)


_OWN = "this rank's"


def _rows(options: Options, call: FlexCall) -> str:
    """Which rows a mask has, in words. They may be wrong on some ranks only."""
    plan = make_plan(options, call)
    if plan.handler == "refused":
        return "the call is refused"
    try:
        return _OWN if LocalFlex(call, plan).has_local_rows else "of the whole sequence"
    except ContextParallelError:
        return "neither this rank's nor of the whole sequence"


def _digest(call: FlexCall) -> str:
    """A digest of a mask's blocks, if it has those of the whole sequence."""
    mask = call.mask
    if mask.lists.kv_num.size(2) != -(-int(mask.lengths[0]) // mask.block_size[0]):
        return _OWN
    parts = []
    for num, indices in (mask.tensors[:2], mask.tensors[2:4]):
        if num is not None:
            listed = torch.arange(indices.size(-1), device=num.device) < num.unsqueeze(-1)
            parts += [num, torch.where(listed, indices, -1)]
    found = hashlib.sha256()
    for x in parts:
        x = x.cpu().contiguous()
        found.update(ctypes.string_at(x.data_ptr(), x.nbytes))  # numpy may be missing
    return found.hexdigest()[:16]
