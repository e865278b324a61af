"""Loads the optional extension ``cp_dispatch._C``: kernels in C++ and CUDA for the small ops.

They register themselves for ``torch.ops.cp_dispatch``. Without them the ops run their Python
twins, which are their specification, and one line of the log says why.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os

import torch

from cp_dispatch._compat import kernel_is_registered

logger = logging.getLogger("cp_dispatch")

#: The oldest torch that the kernels load in: that of the stable ABI they were built for.
REQUIRED_TORCH = "2.10"


def _load() -> str:
    """Load the extension. Returns "" if it is loaded, else why not."""
    if os.environ.get("CP_DISPATCH_USE_CPP", "1") == "0":
        return "CP_DISPATCH_USE_CPP=0"
    if importlib.util.find_spec("cp_dispatch._C") is None:
        return "it is not built; install cp_dispatch where there is a C++ compiler"
    try:
        importlib.import_module("cp_dispatch._C")
    except Exception as error:
        required = f"torch >= {REQUIRED_TORCH} on the platform it was built for"
        return f"it needs {required}, found torch {torch.__version__}: {error}"
    return ""


def _report(reason: str) -> None:
    # What was asked for is no reason to warn.
    level = logging.INFO if reason.startswith("CP_DISPATCH_USE_CPP") else logging.WARNING
    logger.log(level, "cp_dispatch runs without its C++ extension: %s", reason)


_reason = _load()
if _reason:
    _report(_reason)


def is_loaded() -> bool:
    """Whether the extension's kernels are in use."""
    return not _reason


def why_not_loaded() -> str:
    """The logged reason, "" if the extension is loaded."""
    return _reason


@functools.cache
def has_kernel(op: str, device_type: str) -> bool:
    """Whether ``torch.ops.cp_dispatch.<op>`` has a kernel for a device, other than its twin."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    return is_loaded() and key is not None and kernel_is_registered(f"cp_dispatch::{op}", key)
