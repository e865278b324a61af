"""Marks modules that are in the style ``ContextParallel``, and keeps them from being pickled."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch.errors import ContextParallelError

_NAME = "in_context_parallel"


class _Mark:
    """``how`` a module is in the style. Cannot be pickled: a pickle would hold only the name of the
    module's forward, and the loaded module would have its class's."""

    def __init__(self, mesh: DeviceMesh, how: dict):
        self.mesh, self.how = mesh, how

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        raise ContextParallelError(
            "a module in ContextParallel cannot be pickled or saved whole by torch.save: once "
            "loaded, its attention would be local. Save its state_dict(), or pickle the model "
            "before parallelize_module"
        )


def mark(module: nn.Module, mesh: DeviceMesh, **how) -> None:
    """Record that a module is in the style, with these arguments.

    Raises:
        ContextParallelError: if it already is with different arguments, which could contradict
            these about the order of its shards; if it has no forward, as ``nn.ModuleList``, whose
            style would have no effect on the modules inside; if it is in TorchScript.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ContextParallelError(
            f"the forward of {module.original_name}, a TorchScript module, cannot be replaced by "
            "that of ContextParallel; call it inside context_parallel instead"
        )
    if "forward" not in vars(module) and type(module).forward is nn.Module.forward:
        raise ContextParallelError(
            f"{type(module).__name__} has no forward, so ContextParallel would have no effect on "
            'it; apply the style to the modules inside, such as "layers.*" instead of "layers"'
        )
    before = vars(module).get(_NAME)
    if before is not None and (before.mesh, before.how) != (mesh, how):
        words = (", ".join(f"{k}={v!r}" for k, v in x.items()) for x in (before.how, how))
        first, second = words
        raise ContextParallelError(
            f"{type(module).__name__} already is in the style ContextParallel({first}) on "
            f"{before.mesh}, so ContextParallel({second}) on {mesh} cannot be applied; apply the "
            "style once"
        )
    setattr(module, _NAME, _Mark(mesh, how))
