"""Loads the optional extension: kernels in C++ (``cp_dispatch._C``) and CUDA (``._C_cuda``).

They register themselves for ``torch.ops.cp_dispatch``. Without them the ops run their Python
equivalents ("twins"), which are also their specification, and the log says why, once per host under
torchrun.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os

import torch

from cp_dispatch._compat import kernel_is_registered
from cp_dispatch.switches import is_on

logger = logging.getLogger("cp_dispatch")

#: The oldest torch that can load the kernels: that of the stable ABI they were built for.
REQUIRED_TORCH = "2.10"

#: The newest CUDA kernel that copy engines need: a build that lacks it is older than the package.
NEWEST_CUDA_KERNEL = "copy_and_pull"

#: Named in messages: in a checkout, Python finds the sources before an installed package.
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _where(compiler: str) -> str:
    """What to do for a package that is not built."""
    if os.path.exists(os.path.join(os.path.dirname(_FOLDER), "setup.py")):
        return (
            "this is a source tree: run outside it to use an installed package, or run "
            f"pip install -e . --no-build-isolation where there is {compiler}"
        )
    return f"install cp_dispatch where there is {compiler}"


def _load() -> str:
    """Load the extension. Returns "" if it is loaded, else the reason why not."""
    if not is_on("CP_DISPATCH_USE_CPP", True):
        return "CP_DISPATCH_USE_CPP=0"
    if importlib.util.find_spec("cp_dispatch._C") is None:
        return f"it is not built in {_FOLDER}; {_where('a C++ compiler')}"
    return _load_module("cp_dispatch._C")


def _load_cuda() -> str:
    """Load the CUDA kernels. Returns "" if they are loaded or not needed, else the reason."""
    if torch.version.cuda is None:
        return ""
    if importlib.util.find_spec("cp_dispatch._C_cuda") is None:
        return f"they are not built in {_FOLDER}; {_where('nvcc')}"
    return _load_module("cp_dispatch._C_cuda")


def _load_module(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:
        required = f"torch >= {REQUIRED_TORCH} on the platform it was built for"
        return f"it needs {required}, found torch {torch.__version__}: {error}"
    return ""


def _report(what: str, reason: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # only the first rank of a host logs it
    # No warning if the user switched it off.
    level = logging.INFO if reason.startswith("CP_DISPATCH_USE_CPP") else logging.WARNING
    logger.log(level, "cp_dispatch runs without its %s: %s", what, reason)


_reason = _load()
_cuda_reason = "" if _reason else _load_cuda()
if _reason:
    _report("C++ extension", _reason)


def is_loaded() -> bool:
    """Whether the C++ extension is loaded. Its CUDA kernels may be missing even so."""
    return not _reason


def why_not_loaded() -> str:
    """The reason that is logged, "" if nothing is missing."""
    return _reason or _why_no_cuda()


def state() -> str:
    """One line for reports: what is loaded, and why the rest is not."""
    if _reason:
        return f"not loaded: {_reason}"
    reason = _why_no_cuda()
    return f"loaded; its CUDA kernels: {reason}" if reason else "loaded"


def _why_no_cuda() -> str:
    """Why CUDA kernels are missing. Valid only once all ops are defined, after loading."""
    if _reason or _cuda_reason or torch.version.cuda is None:
        return _cuda_reason
    if kernel_is_registered(f"cp_dispatch::{NEWEST_CUDA_KERNEL}", "CUDA"):
        return ""
    return "they are older than the package, so copy engines are off; install cp_dispatch again"


@functools.cache
def has_kernel(op: str, device_type: str) -> bool:
    """Whether ``torch.ops.cp_dispatch.<op>`` has a kernel for a device, other than its twin."""
    if device_type == "cuda":
        _mention_cuda()
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    return is_loaded() and key is not None and kernel_is_registered(f"cp_dispatch::{op}", key)


@functools.cache
def _mention_cuda() -> None:
    # Not at import: most users of a torch with CUDA but without a GPU need not know.
    if reason := _why_no_cuda():
        _report("CUDA kernels", reason)
