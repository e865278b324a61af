"""Backends: one file per attention kernel, with one block forward and backward, no communication.

To add a backend, write a module with a :class:`Backend` and add it to ``BACKENDS``. Its ops, fakes,
autograd and DTensor rules are derived from the entry.
"""

from cp_dispatch.backends.base import Backend
from cp_dispatch.backends.cpu_flash import CpuFlash
from cp_dispatch.backends.cudnn import Cudnn
from cp_dispatch.backends.efficient import Efficient
from cp_dispatch.backends.flash import Flash
from cp_dispatch.backends.math import Math
from cp_dispatch.native.parts import wide_dtype

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Flash(), Efficient(), Cudnn(), CpuFlash(), Math())
}

__all__ = ["BACKENDS", "Backend", "wide_dtype"]
