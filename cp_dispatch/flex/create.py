"""``create_cp_block_mask()`` and other block masks that cover one rank's rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_mask

from cp_dispatch._compat import disable_current_modes, in_fake_mode
from cp_dispatch.by_need.ownership import Ownership, ownership, rank_at
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.cut import Blocks, cut, of_tables
from cp_dispatch.flex.own_rows import note_order
from cp_dispatch.layouts import Balancer
from cp_dispatch.layouts.balancer import positive_int
from cp_dispatch.native.permute import span_indices

# The most elements of the dense mask that exist at a time.
_AT_ONCE = 2**26


def create_cp_block_mask(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    mesh: DeviceMesh,
    *,
    layout: Balancer | str | None = "enabled",
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """Create the block mask of this rank's rows, without creating that of the whole sequence.

    For ``flex_attention`` on DTensors that are ``Shard(2)`` over ``mesh``. Arguments are those of
    ``create_block_mask``, with global B, H and lengths. With such a mask a rank does not know which
    keys the others need, so the ranks exchange that once per mask, at its first use.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx) -> bool``, on global indices in the original order
            of the sequence.
        B, H: batch size and number of heads of the mask; None for 1.
        Q_LEN, KV_LEN: global lengths.
        mesh: the ranks that share the sequence; several dims are flattened.
        layout: the order of the sequence: a balancer, None for natural order, or ``"enabled"`` for
            the layout of ``cp_dispatch.enable``.
        device: the mask's device; by default the mesh's.
        BLOCK_SIZE: block size of rows and keys, one int or a pair.
        separate_full_blocks: as for ``create_block_mask``.

    Returns:
        A ``BlockMask`` with global lengths and this rank's rows of blocks.

    Raises:
        ContextParallelError: if mesh, lengths and layout do not match, or a length or block size
            is not an int.
    """
    Q_LEN = 0 if Q_LEN == 0 else positive_int(Q_LEN, "Q_LEN")
    KV_LEN = 0 if KV_LEN == 0 else positive_int(KV_LEN, "KV_LEN")
    q_block, kv_block = _block_sizes(BLOCK_SIZE)
    if layout == "enabled":
        from cp_dispatch.toggle import current_options

        options = current_options()
        layout = None if options is None else options.layout
    queries = _owned(mesh, Q_LEN, layout, B)
    rank, device = _rank(mesh), mesh.device_type if device is None else device
    with disable_current_modes():
        place = [span_indices(queries.spans(rank, lane)) for lane in range(queries.lanes)]
        place = torch.stack(place)
    place = in_fake_mode(place).to(device, torch.int32)
    B, H = max(B or 1, queries.lanes), H or 1
    rows = place.size(1)
    step = max(1, _AT_ONCE // (B * H * max(KV_LEN, 1)) // q_block) * q_block
    tables = [
        _tables(mask_mod, B, H, place[:, start : start + step], KV_LEN, q_block, kv_block)
        for start in range(0, rows, step)
    ]
    if not tables:
        tables = [_tables(mask_mod, B, H, place, KV_LEN, q_block, kv_block)]
    some, every = (torch.cat(parts, 2) for parts in zip(*tables, strict=True))
    if not separate_full_blocks:
        blocks = of_tables(some, None)
    else:
        blocks = of_tables(some & ~every, every)
    return of_rows(blocks, queries, (Q_LEN, KV_LEN), (q_block, kv_block), mask_mod)


def _block_sizes(given) -> tuple[int, int]:
    sizes = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(sizes) != 2:
        raise ContextParallelError(
            f"BLOCK_SIZE must be an int or a pair of them, of rows and of keys, got {given!r}"
        )
    rows, keys = (positive_int(size, "BLOCK_SIZE") for size in sizes)
    return rows, keys


def _tables(mask_mod, B, H, place: Tensor, keys: int, q_block: int, kv_block: int):
    """``(B, H, blocks of rows, blocks of keys)`` bool tables: blocks with at least one pair that
    attends, and blocks in which all do."""
    rows = place.size(1)

    def mod(b, h, row, kv_idx):
        return mask_mod(b, h, place[b, row] if place.size(0) > 1 else place[0][row], kv_idx)

    if rows and keys:
        mask = create_mask(mod, B, H, rows, keys, device=place.device)
    else:
        mask = torch.zeros((B, H, rows, keys), dtype=torch.bool, device=place.device)
    mask = torch.nn.functional.pad(mask, (0, -keys % kv_block, 0, -rows % q_block))
    blocks = mask.unflatten(3, (-1, kv_block)).unflatten(2, (-1, q_block))
    return blocks.any(5).any(3), blocks.all(5).all(3)


def cut_block_mask(mask: BlockMask, mesh: DeviceMesh, layout: Balancer | None) -> BlockMask:
    """This rank's rows of the mask of a whole sequence; ``.cp_whole`` holds the whole mask."""
    lengths = tuple(mask.seq_lengths)
    queries = _owned(mesh, lengths[0], layout, mask.kv_num_blocks.size(0))
    rank, sizes = _rank(mesh), tuple(mask.BLOCK_SIZE)
    rows = -(-lengths[0] // sizes[0])
    if mask.kv_num_blocks.size(2) != rows:
        raise ContextParallelError(
            f"the BlockMask has {mask.kv_num_blocks.size(2)} rows of blocks, but its length "
            f"{lengths[0]} and block size {sizes[0]} make {rows}; does it already hold one rank's "
            "rows?"
        )
    blocks = Blocks(*mask.as_tuple()[2:10])
    if queries.world_size > 1:
        blocks = cut(blocks, queries, rank, sizes[0], -(-lengths[1] // sizes[1]))
    own = of_rows(blocks, queries, lengths, sizes, mask.mask_mod)
    own.cp_whole = mask
    return own


def of_rows(blocks: Blocks, queries: Ownership, lengths, block_sizes, mask_mod) -> BlockMask:
    """A ``BlockMask`` of a rank's rows, with that rank's number of rows of blocks, or one more if
    the whole sequence has the same number, so that the two can be distinguished."""
    whole = -(-lengths[0] // block_sizes[0])
    if queries.world_size > 1 and blocks.kv_num.size(2) == whole:
        pad = torch.nn.functional.pad
        blocks = blocks._replace(
            kv_num=pad(blocks.kv_num, (0, 1)),
            kv_indices=pad(blocks.kv_indices, (0, 0, 0, 1)),
        )
        if blocks.full_kv_num is not None:
            blocks = blocks._replace(
                full_kv_num=pad(blocks.full_kv_num, (0, 1)),
                full_kv_indices=pad(blocks.full_kv_indices, (0, 0, 0, 1)),
            )
    if queries.world_size > 1:
        note_order(blocks.kv_num, queries)
    names = (
        "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
        "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
    )  # fmt: skip
    return BlockMask(
        seq_lengths=tuple(lengths),
        BLOCK_SIZE=tuple(block_sizes),
        mask_mod=mask_mod,
        **dict(zip(names, blocks, strict=True)),
    )


def _owned(mesh: DeviceMesh, length: int, layout: Balancer | None, batch) -> Ownership:
    if not isinstance(mesh, DeviceMesh):
        raise ContextParallelError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if layout is None:
        return ownership(length, tuple(mesh.shape))
    if not isinstance(layout, Balancer):
        raise ContextParallelError(
            f'layout must be a balancer, None for natural order or "enabled", got {layout!r}'
        )
    if (layout.seq_len, layout.world_size) != (length, mesh.size()):
        raise ContextParallelError(
            f"{layout} is for {layout.seq_len} positions on {layout.world_size} ranks, but the "
            f"mask is for {length} positions and the mesh has {mesh.size()} ranks"
        )
    if layout.rows > 1 and batch not in (1, None, layout.rows):
        raise ContextParallelError(
            f"{layout} has a layout for each of {layout.rows} batch rows, but the mask is for "
            f"{batch}"
        )
    return ownership(length, tuple(mesh.shape), layout.text)


def _rank(mesh: DeviceMesh) -> int:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ContextParallelError(f"this rank is not part of the mesh {mesh.mesh.tolist()}")
    return rank_at(coordinate, mesh.shape)
