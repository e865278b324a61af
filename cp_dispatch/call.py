"""``Call``: the arguments of one ``scaled_dot_product_attention`` call as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn.attention.bias import CausalBias


@dataclass(frozen=True)
class Call:
    """The arguments of one call, with torch's defaults and meaning.

    query ``(B, H, Sq, D)``, key ``(B, Hkv, Sk, D)``, value ``(B, Hkv, Sk, Dv)``. They may have been
    given with another number of dims, ``given_dims``.
    """

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    given_dims: int = 4

    @property
    def tensors(self) -> dict[str, Any]:
        return {"query": self.query, "key": self.key, "value": self.value}

    def as_given(self, placement: Placement) -> Placement:
        """A placement of a tensor, for messages, with the dim that its user knows: the last dims
        keep their places from the end, and the first is that of the batch."""
        if type(placement) is not Shard or not placement.dim:
            return placement
        return Shard(placement.dim + self.given_dims - 4)

    def describe(self) -> str:
        """The call in words, one line per tensor, for messages."""
        lines = [f"{name}: {describe_tensor(x)}" for name, x in self.tensors.items()]
        if self.attn_mask is not None:
            lines.append(f"attn_mask: {describe_tensor(self.attn_mask)}")
        lines.append(
            f"dropout_p={self.dropout_p}, is_causal={self.is_causal}, scale={self.scale}, "
            f"enable_gqa={self.enable_gqa}"
        )
        return "\n".join(lines)


def sharded_dims(tensor: DTensor, tensor_dim: int) -> tuple[int, ...]:
    """Mesh dims over which a dim is sharded, with any kind of shard placement."""
    return tuple(
        i for i, p in enumerate(tensor.placements) if getattr(p, "dim", None) == tensor_dim
    )


def describe_tensor(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} {tensor!r}"
    if isinstance(tensor, CausalBias):  # whose shape and dtype are not those of a mask
        return f"causal_{tensor.variant.name.lower()}({tensor.seq_len_q}, {tensor.seq_len_kv})"
    text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if not isinstance(tensor, DTensor):
        return f"{text} {type(tensor).__name__} (not a DTensor)"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    placements = ", ".join(
        f"{name}={size}: {placement}"
        for name, size, placement in zip(names, mesh.shape, tensor.placements, strict=True)
    )
    return f"{text} on {mesh.device_type} mesh [{placements}]"
