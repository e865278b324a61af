"""An op that keeps other ops in compiled graphs; see Note [Graphs of ranks]."""

from __future__ import annotations

import torch
from torch import Tensor

library = torch.library.Library("cp_dispatch", "FRAGMENT")
SCHEMA = "keep(Tensor x) -> Tensor"


def _keep(x: Tensor) -> Tensor:
    """Nothing, of which graphs do not know that nobody needs it."""
    return x.new_empty(0)


library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    library.impl("keep", _keep, _key)
torch.library.register_fake("cp_dispatch::keep", _keep, lib=library)
keep = torch.fx.has_side_effect(torch.ops.cp_dispatch.keep.default)
