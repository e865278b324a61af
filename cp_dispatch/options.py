"""The options of ``enable()`` and ``enabled()``, and which ones apply in which thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Balancer
from cp_dispatch.schedules import CHOICES


@dataclass(frozen=True)
class Options:
    """The arguments of ``enable``.

    Attributes:
        schedule: ``"auto"``, one of ``CHOICES``, or ``"hybrid:U"``, heads among U ranks.
        layout: the balancer that defines the order of every sharded sequence; None for natural
            order.
        of_shards: whether DTensors are made from a model's plain shards. Gradients of its plain
            tensors are then each rank's share, like those of its parameters.
    """

    schedule: str = "auto"
    layout: Balancer | None = None
    of_shards: bool = False
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # Every call needs it, and hashing a layout of many documents takes long.
        if self._hash is None:
            object.__setattr__(self, "_hash", hash((self.schedule, self.layout, self.of_shards)))
        return self._hash

    def __post_init__(self):
        choices = ("auto", *CHOICES)
        if self.schedule not in choices and head_ranks(self.schedule) is None:
            raise ContextParallelError(
                f'schedule must be one of {", ".join(map(repr, choices))}, or "hybrid:U" for '
                f"groups of U ranks, got {self.schedule!r}"
            )
        if self.layout is not None and not isinstance(self.layout, Balancer):
            raise ContextParallelError(
                "layout must be None (natural order) or a balancer such as "
                f"cp_dispatch.HeadTail(seq_len, world_size), got {self.layout!r}"
            )
        if self.layout is not None:
            object.__setattr__(self, "layout", self.layout.outline)

    @property
    def order(self) -> Balancer | None:
        """The layout, None if its order is the natural one, as that of one rank always is."""
        return None if self.layout is None or self.layout.world_size == 1 else self.layout


def head_ranks(schedule: str) -> int | None:
    """U of ``"hybrid:U"``, else None."""
    kind, _, ranks = schedule.partition(":") if isinstance(schedule, str) else ("", "", "")
    return int(ranks) if kind == "hybrid" and ranks.isdecimal() and int(ranks) else None


class Scope:
    """One ``with enabled(...)`` block; ``options`` None while turned off inside it."""

    def __init__(self, options: Options | None):
        self.options = options


class OptionStack:
    """Process-wide options below a stack of scopes.

    A thread inside a scope of its own has that scope's options. Any other thread has those of the
    scope entered last in any thread, because autograd recomputes checkpoints and runs backwards on
    its own threads. Without scopes, the process-wide options apply.
    """

    def __init__(self):
        self._process: Options | None = None
        self._scopes: list[Scope] = []
        self._thread = threading.local()

    def current(self) -> Options | None:
        # Guards of graphs call this at every call.
        scopes = self._scopes
        if not scopes:
            return self._process
        own = getattr(self._thread, "scopes", None)
        if own and own[-1] is scopes[-1]:
            return own[-1].options
        own = self._own()
        return own[-1].options if own else self.latest()

    def own(self) -> Options | None:
        """Options of this thread's innermost scope, None without one."""
        own = self._own()
        return own[-1].options if own else None

    def latest(self) -> Options | None:
        """Options of a thread without a scope of its own."""
        scopes = self._scopes
        return scopes[-1].options if scopes else self._process

    def set(self, options: Options | None) -> None:
        """Set the innermost scope of this thread, or the process outside any."""
        own = self._own()
        if own:
            own[-1].options = options
        else:
            self._process = options

    def snapshot(self) -> tuple:
        """The state that :meth:`restore` needs to undo a :meth:`set` or :meth:`push` of this
        thread."""
        own = self._own()
        return self._process, self._scopes, list(own), own[-1].options if own else None

    def restore(self, snapshot: tuple) -> None:
        self._process, self._scopes, own, options = snapshot
        self._thread.scopes = own
        if own:
            own[-1].options = options

    def push(self, options: Options) -> Scope:
        scope = Scope(options)
        if not hasattr(self._thread, "scopes"):
            self._thread.scopes = []
        self._thread.scopes.append(scope)
        # Rebound, not mutated: current() reads without the lock.
        self._scopes = [*self._scopes, scope]
        return scope

    def remove(self, scope: Scope) -> None:
        """End a scope, from any thread."""
        self._scopes = [other for other in self._scopes if other is not scope]
        self._own()  # drops it here too: its options may hold a mesh and its groups

    def _own(self) -> list[Scope]:
        """Scopes that this thread has entered and that have not ended."""
        own = getattr(self._thread, "scopes", None)
        if not own:
            return []
        while own and not any(own[-1] is scope for scope in self._scopes):
            own.pop()
        return own

    @property
    def everywhere(self) -> list[Options]:
        """The options that apply in some thread."""
        found = self._process, *(scope.options for scope in self._scopes)
        return [options for options in found if options is not None]

    @property
    def in_use(self) -> bool:
        return self._process is not None or bool(self._scopes)
