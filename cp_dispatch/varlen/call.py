"""``VarlenCall``: the arguments of one ``varlen_attn`` call as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cp_dispatch.call import describe_tensor
from cp_dispatch.varlen.documents import Window


@dataclass(frozen=True)
class VarlenCall:
    """The arguments of the op behind ``varlen_attn``, in its order; query ``(T, H, D)``, key and
    value ``(M, Hkv, D)``. The maximum lengths are not read, because they follow from the cumulative
    ones."""

    query: Any
    key: Any
    value: Any
    cu_seq_q: Any
    cu_seq_k: Any
    max_q: Any = None
    max_k: Any = None
    is_causal: bool = False
    scale: float | None = None
    window_size: Any = None
    enable_gqa: bool = False
    seqused_k: Any = None
    block_table: Any = None
    num_splits: int | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        return {"query": self.query, "key": self.key, "value": self.value}

    @property
    def starts(self) -> dict[str, Any]:
        return {"cu_seq_q": self.cu_seq_q, "cu_seq_k": self.cu_seq_k}

    @property
    def window(self) -> Window:
        left, right = self.window_size or (-1, -1)
        # The kernel treats any negative number as no limit.
        return Window(max(-1, int(left)), 0 if self.is_causal else max(-1, int(right)))

    def describe(self) -> str:
        """The call in words, one line per tensor, for messages."""
        lines = [
            f"{name}: {describe_tensor(x)}" for name, x in (self.tensors | self.starts).items()
        ]
        causal = "is_causal=True, " if self.is_causal else ""
        window = tuple(self.window_size or (-1, -1))
        lines.append(f"window_size={window}, {causal}scale={self.scale}")
        given = {
            name: describe_tensor(getattr(self, name))
            for name in ("seqused_k", "block_table", "num_splits")
            if getattr(self, name) is not None
        }
        return "\n".join([*lines, *(f"{name}: {x}" for name, x in given.items())])
