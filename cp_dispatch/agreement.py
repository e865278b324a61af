"""Debug mode: checks that all ranks make the same call.

With ``CP_DISPATCH_DEBUG=1`` every call begins with one exchange of 32 bytes per rank and mesh dim.
Ranks that disagree on shapes, dtypes, placements or options would otherwise wait for each other
forever; in debug mode all of them raise, and report what each one has. A rank that refuses its call
earlier reports that in the same exchange.
"""

from __future__ import annotations

import hashlib
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import dtensor_spec, is_tracing, local_tensor, outside_functorch
from cp_dispatch.call import Call
from cp_dispatch.costs import digest_of, kind_of
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.options import Options
from cp_dispatch.planning.choose import sdp_flags
from cp_dispatch.switches import is_on


def debug_is_on() -> bool:
    """Whether ``CP_DISPATCH_DEBUG`` is set; False in a trace, which cannot communicate."""
    return is_on("CP_DISPATCH_DEBUG", False) and not is_tracing()


def check_agreement(options: Options, call: Call) -> None:
    """Raise on every rank of the mesh if the ranks' calls differ.

    Raises:
        ContextParallelError: if they do, with the arguments of this rank and of its peers.
    """
    agree("scaled_dot_product_attention", _signature(options, call), _tensors(call))


def agree(what: str, text: str, tensors, mesh: DeviceMesh | None = None) -> None:
    """Raise on every rank of the mesh if its ranks' texts about a call differ, or if a DTensor
    among ``tensors`` has a shard that its global shape does not imply.

    ``mesh`` is that of the first DTensor, if it is not given.
    """
    wholes = [x for x in tensors if isinstance(x, DTensor)]
    # Shards of other shapes than their global shape implies are wrong even if all ranks agree.
    wrong = not all(map(local_shape_fits, wholes))
    # With its name, because ranks may call different functions.
    text = f"    {what}\n{text}"
    texts = _compare(wholes[0].device_mesh if mesh is None else mesh, text, wrong)
    if texts is None:
        return
    refusing = [rank for rank in sorted(texts) if _is_refusal(texts[rank])]
    shown = texts if refusing else _marked(texts)
    given = "\n".join(
        f"  rank {rank}{' refused' if rank in refusing else ''}:\n{shown[rank]}"
        for rank in sorted(texts)
    )
    if refusing:
        head, advice = (
            f"rank {', '.join(map(str, refusing))} refused this {what} call, so all ranks raise",
            "Make a supported call on every rank.",
        )
    else:
        head, advice = (
            f"the ranks do not agree on this {what} call",
            "Every rank of the mesh must use the same global shapes, dtypes, placements and "
            "options. Lines that are not the same on all ranks are marked with *. Shards of "
            "different lengths need the shape= and stride= of the whole in DTensor.from_local. "
            "Inside context_parallel shards have the same length on all ranks, unless that of a "
            "buffer or of the balancer is not a multiple of the number of ranks.",
        )
    raise ContextParallelError(
        f"{head} (found by CP_DISPATCH_DEBUG=1, nothing was computed).\n{given}\n  {advice}"
    )


def tell_refusal(mesh: DeviceMesh, error: ContextParallelError) -> None:
    """In debug mode, take part in the exchange at the start of the other ranks' call, so that they
    raise too; the caller raises ``error``."""
    if debug_is_on():
        with outside_functorch():
            _compare(mesh, f"{_REFUSAL}{_indented(str(error))}", False)


_REFUSAL = "    raised ContextParallelError:\n"


def _is_refusal(text: str) -> bool:
    return text.startswith(_REFUSAL)


def _marked(texts: dict[int, str]) -> dict[int, str]:
    """The texts with a star at lines that some rank does not have."""
    lines = {rank: text.splitlines() for rank, text in texts.items()}
    shared = set.intersection(*map(set, lines.values()))
    return {
        rank: "\n".join(
            line if line in shared else "  * " + line.removeprefix("    ") for line in own
        )
        for rank, own in lines.items()
    }


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def _compare(mesh: DeviceMesh, text: str, wrong: bool) -> dict[int, str] | None:
    """The texts of all ranks if they differ or something is ``wrong`` on one of them, else None.
    Also None on a rank that is not in the mesh."""
    if mesh.get_coordinate() is None:
        return None
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    digest = digest.to(mesh.device_type)
    differ = torch.full((), int(wrong), dtype=torch.int32, device=mesh.device_type)
    # One mesh dim after the other, so that a difference anywhere reaches every rank.
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        every = [torch.empty_like(digest) for _ in range(mesh.size(dim))]
        dist.all_gather(every, digest, group=group)
        differ += sum((other != digest).any().to(torch.int32) for other in every)
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=group)
    if not differ.item():
        return None
    texts = {}
    for dim in range(mesh.ndim):
        given = {dist.get_rank(): text} | texts
        for part in _gather(list(given.items()), mesh, dim):
            texts |= dict(part)
    return texts


def _gather(given: list, mesh: DeviceMesh, dim: int) -> list:
    """What each rank of a mesh dim has ``given``, which JSON can hold. Torch's own gathering of
    objects needs numpy."""
    group, size = mesh.get_group(dim), mesh.size(dim)
    data = bytearray(json.dumps(given).encode())
    length = torch.full((1,), len(data), dtype=torch.int64, device=mesh.device_type)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    lengths = [int(x) for x in lengths]
    sent = torch.zeros(max(lengths), dtype=torch.uint8)
    sent[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    sent = sent.to(mesh.device_type)
    received = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(received, sent, group=group)
    return [json.loads(bytes(x.tolist()[:n])) for x, n in zip(received, lengths, strict=True)]


def _tensors(call: Call) -> tuple:
    return call.query, call.key, call.value, call.attn_mask


def _signature(options: Options, call: Call) -> str:
    """Everything that must be the same on every rank, in words."""
    fits = all(local_shape_fits(x) for x in _tensors(call) if isinstance(x, DTensor))
    lines = [
        call.describe(),
        f"gradients wanted: {[getattr(x, 'requires_grad', None) for x in _tensors(call)]}, "
        f"grad mode {torch.is_grad_enabled()}",
        f"{options}, torch's switches {sdp_flags()}",
        f"device: {_device_kind(call)}",
        f"seed of dropout: {_seed(call) if call.dropout_p > 0 else None}",
        f"local shards have the shapes that the global shapes imply: {fits}",
    ]
    return _indented("\n".join(lines))


def _device_kind(call: Call) -> str:
    """The kind of GPU and its measured constants, which determine kernels and schedules."""
    if not call.query.is_cuda:
        return "CPU"
    name = torch.cuda.get_device_name()
    return f"{name}, constants {digest_of(kind_of(name))}"


def _seed(call: Call) -> int:
    return torch.cuda.initial_seed() if call.query.is_cuda else torch.initial_seed()


def local_shape_fits(tensor: DTensor) -> bool:
    """Whether this rank's shard has the shape that the global shape implies."""
    spec, shape = dtensor_spec(tensor), list(tensor.shape)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return True
    for mesh_dim, placement in enumerate(spec.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            size = -(-shape[dim] // spec.mesh.size(mesh_dim))
            shape[dim] = max(0, min(size, shape[dim] - size * coordinate[mesh_dim]))
    return tuple(shape) == tuple(local_tensor(tensor).shape)
