"""Placeholders for the random state of calls without dropout, which kernels do not read."""

import torch
from torch import Tensor

from cp_dispatch.graphs.memory import apart

_coins: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}


def no_coins(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A pair of numbers, and the first of them alone; the same for all calls."""
    found = _coins.get((device, dtype))
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return _pair(device, dtype)
        found = _coins[device, dtype] = apart(device, _pair, device, dtype)
    return found


def _pair(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pair = torch.empty(2, dtype=dtype, device=device)
    return pair, pair[0]
