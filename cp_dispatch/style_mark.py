"""What a module in the style ``ContextParallel`` says of itself."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch.errors import ContextParallelError

_NAME = "in_context_parallel"


class _Mark:
    """``how`` a module is in the style. Not to be pickled: a pickle would hold the module's forward
    by its name alone, and what is loaded would have the class's."""

    def __init__(self, mesh: DeviceMesh, how: dict):
        self.mesh, self.how = mesh, how

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        raise ContextParallelError(
            "a module in ContextParallel cannot be pickled, nor saved by torch.save: where it is "
            "loaded its attention would be local. Save its state_dict(), or pickle the model "
            "before parallelize_module"
        )


def mark(module: nn.Module, mesh: DeviceMesh, **how) -> None:
    """Note down that a module is in the style, with these arguments.

    Raises:
        ContextParallelError: it is with others, and of two orders of its shards one is wrong.
    """
    before = vars(module).get(_NAME)
    if before is not None and (before.mesh, before.how) != (mesh, how):
        words = (", ".join(f"{k}={v!r}" for k, v in x.items()) for x in (before.how, how))
        first, second = words
        raise ContextParallelError(
            f"{type(module).__name__} is in the style ContextParallel({first}) on {before.mesh}, "
            f"and cannot be in ContextParallel({second}) on {mesh} as well; apply it once"
        )
    setattr(module, _NAME, _Mark(mesh, how))
