"""The scripts in ``tools/``, which are no package, as modules."""

from __future__ import annotations

import importlib.util
import pathlib

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


def load(name: str):
    """A new module from ``tools/<name>.py``."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
