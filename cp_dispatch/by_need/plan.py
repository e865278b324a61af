"""What the plans of ``flex_attention`` and ``varlen_attn`` have in common."""

from __future__ import annotations

import math

from cp_dispatch.errors import ContextParallelError


class PlanByNeed:
    """A mixin for plans that have ``handler``, ``schedule``, ``layout``, ``ring_shape``,
    ``rows_sent``, ``key_row_bytes``, ``reasons`` and ``call``."""

    @property
    def world_size(self) -> int:
        """The number of ranks that share the sequence."""
        return math.prod(self.ring_shape)

    def bytes_sent(self, rank: int) -> int | None:
        """Bytes of keys and values that ``rank`` sends in a forward. A backward sends them again,
        and returns the gradients of what the rank received. None if the mask or the documents,
        which determine this, were not read."""
        return None if self.rows_sent is None else self.rows_sent[rank] * self.sent_row_bytes

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of one of the rows that :attr:`rows_sent` counts."""
        return self.key_row_bytes

    def error(self) -> ContextParallelError:
        """The error for a refused call."""
        return ContextParallelError(str(self))

    @property
    def _given(self) -> list[str]:
        return ["    " + line for line in self.call.splitlines()]

    @property
    def _why(self) -> list[str]:
        return [f"  - {reason}" for reason in self.reasons]

    def _head(self, function: str) -> list[str]:
        """The first lines of a report: what is handled and how, and the order of the shards."""
        lines = [
            f"handled by cp_dispatch: {function}, {self.schedule} over {self.world_size} ranks"
        ]
        if self.layout is not None:
            lines.append(f"  in the layout of {self.layout.explain().splitlines()[0]}")
        return [*lines, *self._given]

    def _words_of_others(self, function: str) -> str | None:
        """The plan in words if cp_dispatch does not handle the call, else None."""
        if self.handler == "refused":
            head = f"cp_dispatch does not support this {function} call."
            why = ["  refused because:", *("  " + line for line in self._why)]
            return "\n".join([head, "  given:", *self._given, *why])
        if self.handler == "stock":
            return "\n".join(["handled by unmodified torch", *self._given, *self._why])
        return None
