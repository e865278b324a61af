"""``FlexCall``: the arguments of one ``flex_attention`` call on DTensors as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cp_dispatch.call import describe_tensor
from cp_dispatch.flex.mask_tuple import MaskTuple


@dataclass(frozen=True)
class FlexCall:
    """query ``(B, H, Sq, D)``, key ``(B, Hkv, Sk, D)``, value ``(B, Hkv, Sk, Dv)``, the block mask
    as the higher-order op takes it, and the tensors that the mods capture."""

    query: Any
    key: Any
    value: Any
    mask: MaskTuple
    score_buffers: tuple = ()
    mask_buffers: tuple = ()

    @property
    def tensors(self) -> dict[str, Any]:
        return {"query": self.query, "key": self.key, "value": self.value}

    @property
    def is_masked(self) -> bool:
        return self.mask.block_size[0] < 2**30  # torch's stand-in for no mask

    @property
    def captured(self) -> dict[str, Any]:
        names = ("score_mod", self.score_buffers), ("mask_mod", self.mask_buffers)
        return {
            f"tensor {i} that {mod} captures": x
            for mod, buffers in names
            for i, x in enumerate(buffers)
            if isinstance(x, torch.Tensor)
        }

    @property
    def needs_gradients(self) -> bool:
        tensors = *self.tensors.values(), *self.score_buffers
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)

    def describe(self, own_rows: bool = False) -> str:
        """The call in words, one line per tensor, for messages. With ``own_rows``, without the
        number of rows of blocks, which may differ between ranks with their own rows."""
        lines = [f"{name}: {describe_tensor(x)}" for name, x in self.tensors.items()]
        blocks = tuple(self.mask.lists.kv_indices.shape)
        if own_rows:
            blocks = (*blocks[:2], "own rows", blocks[3])
        lines.append(
            f"block_mask: lengths {tuple(map(int, self.mask.lengths))}, blocks "
            f"{self.mask.block_size}, kv_indices {blocks}"
            if self.is_masked
            else "no block_mask"
        )
        lines += [f"{name}: {describe_tensor(x)}" for name, x in self.captured.items()]
        return "\n".join(lines)


def global_shape(tensor) -> tuple[int, ...]:
    return tuple(map(int, tensor.shape))
