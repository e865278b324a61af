"""Caches results computed from tensors for as long as these live and are not modified."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from cp_dispatch._compat import is_capturing, is_of_replays

_MAX_KEPT = 64


class Kept:
    """Results by the identity of tensors: their storages, versions and views of them.

    Models call attention once per layer with the same mask, and compiled graphs pass an op the same
    memory in different tensor objects, so identity is that of the storage. Usually the objects are
    the same too, and ops ask at every call, so these are looked up first, which is faster.
    """

    def __init__(self):
        self._entries: OrderedDict[tuple, tuple] = OrderedDict()
        self._lock = threading.Lock()
        #: The same results by tensor objects, with the properties of each tensor that must not have
        #: changed.
        self._near: dict[tuple, tuple[object, list]] = {}
        #: Results that captured CUDA graphs still read. Graphs do not report when they are freed.
        self._of_graphs: dict[int, object] = {}

    def get(self, tensors: Sequence[Tensor | None], key: Hashable, make: Callable[[], object]):
        """The result of ``make()``, cached for the same contents of the same tensors."""
        near_key = (key, *map(id, tensors))
        near = self._near.get(near_key)
        if near is not None and _are_as_they_were(tensors, near[1]):
            value = near[0]
        else:
            value = self._look(tensors, key, make, near_key)
        first = tensors[0] if tensors else None
        if (torch.cuda.is_initialized() if first is None else first.is_cuda) and is_capturing():
            self._of_graphs[id(value)] = value
        return value

    def _look(self, tensors, key: Hashable, make: Callable[[], object], near_key: tuple):
        given = [x for x in tensors if x is not None]
        if any(map(_is_uncounted, given)):
            return make()
        marks = [None if x is None else _mark(x) for x in tensors]
        value = self._find(given, key, make)
        if len(self._near) >= _MAX_KEPT:
            self._near.clear()
        self._near[near_key] = value, marks
        return value

    def _find(self, tensors: list[Tensor], key: Hashable, make: Callable[[], object]):
        storages = [x.untyped_storage() for x in tensors]
        full_key = (
            key,
            *((id(s), *_view_of(x), x._version) for s, x in zip(storages, tensors, strict=True)),
        )  # fmt: skip
        with self._lock:
            entry = self._entries.get(full_key)
            if entry is not None and all(
                ref() is s for ref, s in zip(entry[0], storages, strict=True)
            ):
                self._entries.move_to_end(full_key)
                return entry[1]
        value = make()
        with self._lock:
            self._near.clear()  # so that dropped entries are not held there
            self._entries[full_key] = [weakref.ref(s) for s in storages], value
            for old in [key for key, (refs, _) in self._entries.items() if _some_is_gone(refs)]:
                del self._entries[old]
            while len(self._entries) > _MAX_KEPT:
                self._entries.popitem(last=False)
        return value


class KeptByAll:
    """Results of exchanges between ranks about tensors, kept for as long as the tensors' memory
    lives. If a rank dropped one earlier, it would start an exchange in which the others take no
    part."""

    def __init__(self):
        self._of: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, tensors: Sequence[Tensor | None], key: Hashable, make: Callable[[], object]):
        """The result of ``make()``, cached for the same contents of the same tensors."""
        given = [x for x in tensors if x is not None]
        if any(map(_is_uncounted, given)):  # the same on all ranks
            return make()
        first, *others = (x.untyped_storage() for x in given)
        others = [s for s in others if s is not first]
        full_key = key, *((*map(id, others),), *(_view_of(x) for x in given))
        versions = [x._version for x in given]
        with self._lock:
            refs, *found = self._of.setdefault(first, {}).get(full_key, (None, None, None))
        known = refs is not None and all(ref() is s for ref, s in zip(refs, others, strict=True))
        if not known or found[0] != versions:
            found = versions, make()
            with self._lock:
                entries = self._of[first]
                for old in [key for key, (refs, *_) in entries.items() if _some_is_gone(refs)]:
                    del entries[old]
                entries[full_key] = [weakref.ref(s) for s in others], *found
        return found[1]


def _is_uncounted(x: Tensor) -> bool:
    """Whether a tensor has no version counter."""
    return x.is_inference() or is_of_replays(x)


def _view_of(x: Tensor) -> tuple:
    return x.storage_offset(), tuple(x.shape), x.stride()


def _some_is_gone(refs) -> bool:
    for ref in refs:  # a generator would take most of the time of a new mask
        if ref() is None:
            return True
    return False


def _mark(x: Tensor) -> tuple:
    storage = weakref.ref(x.untyped_storage())
    return weakref.ref(x), x._version, storage, x.storage_offset(), x.shape, x.stride()


def _are_as_they_were(tensors: Sequence[Tensor | None], marks: list[tuple | None]) -> bool:
    for x, mark in zip(tensors, marks, strict=True):
        if x is None:
            continue
        ref, version, storage, offset, shape, strides = mark
        if (
            ref() is not x
            or x._version != version
            or x.untyped_storage() is not storage()
            or x.storage_offset() != offset
            or x.shape != shape
            or x.stride() != strides
        ):
            return False
    return True
