"""Makes the masks of Hugging Face transformers right inside a ``context_parallel`` block.

Note [Masks of transformers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model of transformers makes its masks from the lengths that it sees, which inside a block are
those of a shard. A sliding window longer than the shard would be left out; a shorter one would be
``(L, L)``, with only this rank's keys; and ranks could disagree on whether there are packed
documents or padding. So while a block is on, we replace the function that makes masks for
``"sdpa"``, for which transformers has a public table. The ranks first exchange what they have, in
one small collective per mask (one or two in a forward, none in a layer). Then all ranks leave the
mask out, or all make ``(B, 1, L, S)``, this rank's rows and all keys by their original positions,
or all raise. They also raise if the model has wrong positions, which masks do not show
(positions.py), or depends on its shard in other ways (configs.py). Attention other than
``F.scaled_dot_product_attention`` would silently stay within a shard, so the functions that make
masks for it raise. Attention that users have registered counts as SDPA if ``sdpa_mask`` makes its
masks.

Masks that the caller prepares (4-D, or a dict with one for each kind of layer) do not come here.
"""

from __future__ import annotations

import inspect
import sys
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.hugging_face import laid_out
from cp_dispatch.hugging_face.configs import by_longest, wrong_in_a_shard
from cp_dispatch.hugging_face.modules import drops_masks, why_refused
from cp_dispatch.hugging_face.positions import (
    asking_model,
    begin_elsewhere,
    count_from_zero,
    generates,
    longest,
    taken_by_the_model,
)
from cp_dispatch.layouts import Span, unshard
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.plain_tensors.context import PlainContext
from cp_dispatch.plain_tensors.uneven import told_by_ranks

_MODULE = "transformers.masking_utils"
_NAMES = {
    "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask", "local_size",
    "allow_is_causal_skip", "allow_is_bidirectional_skip", "device", "mask_function",
}  # fmt: skip
_NO_SKIPS = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
_installed: list[tuple] = []  # transformers' table, a key in it, its function, ours

READY = (
    "pass the model a prebuilt attention mask: a 4-D boolean tensor [B, 1, S, S] or, for a model "
    "with several kinds of layers, a dict of such masks by the names in config.layer_types"
)


def install(plain_context, current_options) -> None:
    """Replace transformers' mask functions, if it is imported. ``plain_context()`` returns the
    block in effect, ``current_options()`` what DTensors are in."""
    module = sys.modules.get(_MODULE)
    table = getattr(module, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    if table is None or _installed:
        return
    for kind, theirs in list(table.items()):
        if (why := why_refused(kind, theirs, module)) is None:
            ours = _sdpa_mask(theirs, plain_context)
        else:
            ours = _refusing(kind, why, theirs, plain_context)
        ours = _checked(kind, ours, module, current_options)
        _installed.append((table, kind, theirs, ours))
        table[kind] = ours


def remove() -> None:
    """Put transformers' functions back, unless they have been replaced by others since."""
    while _installed:
        table, kind, theirs, ours = _installed.pop()
        if table[kind] is ours:
            del table[kind]
            if table[kind] is not theirs:
                table[kind] = theirs


def _checked(kind: str, ours, module, current_options):
    causal = getattr(module, "causal_mask_function", None)

    def mask(*args, **kwargs):
        if not torch.compiler.is_compiling():
            window, config = kwargs.get("local_size") is not None, kwargs.get("config")
            is_causal = window or kwargs.get("mask_function") is causal
            given = kwargs.get("attention_mask")
            laid_out.check(current_options(), kind, is_causal, config, given)
        return ours(*args, **kwargs)

    return mask


def _sdpa_mask(theirs, plain_context):
    def sdpa_mask(*args, **kwargs):
        # A trace cannot ask the other ranks; the call refuses the (L, L) mask that it makes. A
        # window longer than the shard must not be left out, so that there is a mask to refuse.
        if torch.compiler.is_compiling():
            window = kwargs.get("local_size") is not None
            return theirs(*args, **kwargs | (_NO_SKIPS if window else {}))
        context = plain_context()
        if context is None or context.world_size == 1:
            return theirs(*args, **kwargs)
        given = inspect.signature(theirs).bind(*args, **kwargs)
        given.apply_defaults()
        return _mask(context, theirs, given.arguments)

    return sdpa_mask


def _refusing(kind: str, why: str, theirs, plain_context):
    def mask(*args, **kwargs):
        context = None if torch.compiler.is_compiling() else plain_context()
        if context is None or context.world_size == 1:
            return theirs(*args, **kwargs)
        raise ContextParallelError(
            f"attn_implementation={kind!r} is refused inside context_parallel over "
            f"{context.world_size} ranks: {why}"
        )

    return mask


class _Ranks(NamedTuple):
    """What the ranks have, a list with one number per rank of each.

    Attributes:
        rows, keys: how many there are for the model.
        special: whether the mask depends on more than positions.
        cached: whether rows or keys do not begin with the sequence.
        padded, widths: whether there is an ``attention_mask``, and how many columns it has.
        counted: whether positions count from 0.
    """

    rows: list[int]
    keys: list[int]
    special: list[int]
    cached: list[int]
    padded: list[int]
    widths: list[int]
    counted: list[int]


def _mask(context: PlainContext, theirs, given: dict):
    """The mask of this rank's rows, from the arguments of transformers' function; None if none is
    needed. See Note [Masks of transformers]."""
    if not _NAMES <= given.keys():
        raise ContextParallelError(
            "this version of transformers makes its masks from arguments that cp_dispatch does not "
            f"know, {sorted(given)}; use transformers 5.24, or {READY}"
        )
    if generates():
        raise ContextParallelError(
            "generate() is refused inside context_parallel: each rank would choose the token after "
            "its own shard. Call it outside the block with the whole sequence"
        )
    mesh, config = context.mesh, given.get("kwargs", {}).get("config")
    ranks, seen = _told(mesh, given, config)
    total = sum(ranks.rows)
    _check_alike(ranks, total)
    layout, padding = context.layout(total), given["attention_mask"]
    if padding is not None and ranks.widths == ranks.rows:
        (padding,) = unshard(mesh, [padding], [1], layout)
    unknown = context.unknown_order(total)
    if unknown is None and (layout is None or layout.seq_len == total):
        _check_positions(layout, padding, ranks)
    wrong = wrong_in_a_shard(config, total, seen)
    if wrong is not None:
        _refuse(wrong, ranks, None)  # prebuilt masks would not help
    window, plain = given["local_size"], padding is None or bool(padding.all())
    causal = given["allow_is_causal_skip"] and (window is None or total < window)
    by_flag = causal and plain
    if not all(ranks.rows) or (by_flag and 1 in ranks.rows):
        _refuse(
            "transformers treats a shard of one row as decoding and leaves is_causal out, and its "
            "layers do not support a shard without rows; pad the sequence, or use fewer ranks",
            ranks,
        )
    if not by_flag and not (causal and _ends(padding)) and drops_masks(asking_model()):
        _refuse(
            "Accelerate's hooks would replace it by is_causal=True. Before accelerator.prepare(), "
            "set accelerate.accelerator._attach_context_parallel_hooks = lambda model: None",
            ranks,
            None,
        )
    if by_flag or (plain and given["allow_is_bidirectional_skip"] and not window):
        return None
    if window and not plain and getattr(config, "attention_chunk_size", None) == window:
        _refuse("with padding, chunks of attention would start where this rank's shard does", ranks)
    if unknown is not None:
        _refuse(unknown, ranks)
    if layout is not None and layout.rows > 1:
        _refuse(
            f"a mask by positions cannot differ by batch row, as {type(layout).__name__}", ranks
        )
    positions = _positions(mesh, layout, total, given["device"])
    rows = torch.arange(given["q_length"], device=positions.device)
    own = {"kv_length": total, "q_offset": positions - rows, "attention_mask": padding}
    return theirs(**given | own | _NO_SKIPS)


def _told(mesh: DeviceMesh, given: dict, config) -> tuple[_Ranks, list[int]]:
    """What the ranks have, and the longest position that each is given, if that matters to the
    model; by a collective."""
    rows, padding = given["q_length"], given["attention_mask"]
    skips = given["allow_is_causal_skip"] or given["allow_is_bidirectional_skip"]
    # Some models ask for a mask where none is needed. Other mask functions than the causal one may
    # depend on more than positions.
    module = sys.modules.get(_MODULE)
    causal = given["mask_function"] is getattr(module, "causal_mask_function", None)
    offsets = any(not isinstance(given[x], int) or given[x] for x in ("q_offset", "kv_offset"))
    width = 0 if padding is None else padding.shape[-1]
    own = (
        rows, given["kv_length"], not skips and not causal, offsets, padding is not None, width,
        count_from_zero(rows), longest() if by_longest(config) else 0,
    )  # fmt: skip
    *ranks, seen = told_by_ranks(mesh, own)
    return _Ranks(*ranks), seen


def _check_alike(ranks: _Ranks, total: int) -> None:
    """Refuse what no mask of ``total`` positions can be made from."""
    if any(ranks.cached):
        _refuse("a cache already holds keys; run whole sequences, use_cache=False", ranks)
    if any(ranks.special):
        _refuse(
            "a mask depends on more than positions, but its function knows only this rank's shard. "
            "If position_ids jump on some rank because of the order of the shards, not because of "
            "packed documents, pass an attention_mask of ones, also as one of the buffers",
            ranks,
        )
    # If the model makes a cache, the number of keys says nothing about the padding mask.
    fits = ranks.rows, [total] * len(ranks.rows)
    padding_fits = not all(ranks.padded) or ranks.widths in fits
    if len(set(ranks.padded)) > 1 or ranks.keys not in fits or not padding_fits:
        _refuse(
            "attention_mask must be this rank's part on every rank, or the whole mask on every "
            "rank, and a cache must not have room for more keys; pass use_cache=False",
            ranks,
        )


def _check_positions(layout, padding, ranks: _Ranks) -> None:
    """Refuse positions that count from 0 on ranks that hold other positions."""
    wrong = [rank for rank in begin_elsewhere(layout, ranks.rows) if ranks.counted[rank]]
    if layout is None and padding is not None:
        # They do count from 0 if only padding comes before.
        wrong = [r for r in wrong if padding[:, : sum(ranks.rows[:r])].any()]
    if wrong and not taken_by_the_model():
        _refuse(
            "this model takes no position_ids, and would count positions from 0 in each shard, "
            f"which is wrong on ranks {wrong}; use DTensors and cp_dispatch.enable() instead, "
            "inside torch.distributed.tensor.experimental.implicit_replication()",
            ranks,
            ". If it needs no positions, ",
        )
    if wrong:
        _refuse(
            f"position_ids count from 0 on ranks {wrong}, which hold other positions. The model "
            "does this if none are passed; pass position_ids of the whole sequence, also as one "
            "of the buffers",
            ranks,
            ". If they are right, because packed documents begin there, ",
        )


def _ends(padding: torch.Tensor) -> bool:
    """Whether all padding comes after the tokens, where no token attends to it anyway."""
    seen = padding.bool()
    return bool((seen[:, 1:] <= seen[:, :-1]).all())


def _positions(mesh: DeviceMesh, layout, total: int, device) -> torch.Tensor:
    """``(L,)``: the original positions of this rank's rows, the same in every batch row."""
    rank = mesh.get_local_rank()
    if layout is not None:
        return layout.positions(rank, device)[0]
    own = chunk(Span(0, total), mesh.size())[rank]
    return torch.arange(own.position, own.position + own.length, device=device)


def _refuse(reason: str, ranks: _Ranks, otherwise: str | None = "; or "):
    names = (
        "rows", "keys", "more than positions", "cached", "attention_mask", "its columns",
        "positions from 0",
    )  # fmt: skip
    given = ", ".join(f"{name} {own}" for name, own in zip(names, ranks, strict=True))
    ready = "" if otherwise is None else otherwise + READY
    raise ContextParallelError(
        f"a mask that transformers makes inside context_parallel is refused: {reason}{ready}.\n"
        f"Given, rank by rank: {given}"
    )
