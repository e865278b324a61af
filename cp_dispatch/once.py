"""A cached property that does not deadlock if ranks, as threads, compute it together."""

from __future__ import annotations

from collections.abc import Callable


class once:  # noqa: N801  a decorator
    """Like ``functools.cached_property``, which before Python 3.12 holds a lock of the class during
    the computation. If ranks are threads, one would hold it and wait for the others, which wait for
    the lock."""

    def __init__(self, make: Callable):
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._make(instance)
        return value
