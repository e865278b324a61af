"""Block masks of one rank's rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_mask

from cp_dispatch.by_need.ownership import Ownership, ownership, rank_at
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.cut import Blocks, cut, of_tables
from cp_dispatch.flex.own_rows import note_order
from cp_dispatch.layouts import Balancer
from cp_dispatch.permute import span_indices

# Elements of the mask itself that are made at a time.
_AT_ONCE = 2**26


def create_cp_block_mask(
    mask_mod,
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
    """The block mask of this rank's rows, without ever making the mask of the whole sequence.

    For ``flex_attention`` on DTensors that are ``Shard(2)`` over ``mesh``. Takes what
    ``create_block_mask`` takes; B, H and lengths are global. A rank that uses such a mask does not
    know what the others need, so they tell each other once for each mask, at its first use.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx) -> bool``, of true, global indices.
        B, H: batch rows and heads that the mask tells apart; None for 1.
        Q_LEN, KV_LEN: global lengths.
        mesh: the ranks that share the sequence, in one dim or, flattened, in several.
        layout: the order of the sequence; ``"enabled"``: that of ``cp_dispatch.enable``, None for
            natural order.
        device: of the mask; by default the mesh's.
        BLOCK_SIZE: rows and keys of a block.
        separate_full_blocks: as for ``create_block_mask``.

    Returns:
        A ``BlockMask`` whose lengths are the global ones and whose rows of blocks are this rank's.

    Raises:
        ContextParallelError: where mesh, lengths and layout do not fit.
    """
    if layout == "enabled":
        from cp_dispatch.toggle import current_options

        options = current_options()
        layout = None if options is None else options.layout
    queries = _owned(mesh, Q_LEN, layout, B)
    rank, device = _rank(mesh), mesh.device_type if device is None else device
    q_block, kv_block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    place = [span_indices(queries.spans(rank, lane)) for lane in range(queries.lanes)]
    place = torch.stack(place).to(device, torch.int32)
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


def _tables(mask_mod, B, H, place: Tensor, keys: int, q_block: int, kv_block: int):
    """``(B, H, blocks of rows, blocks of keys)`` bool: with some pair in it, and with all."""
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
    """This rank's rows of the mask of a whole sequence; ``.cp_whole`` holds that one."""
    lengths = tuple(mask.seq_lengths)
    queries = _owned(mesh, lengths[0], layout, mask.kv_num_blocks.size(0))
    rank, sizes = _rank(mesh), tuple(mask.BLOCK_SIZE)
    rows = -(-lengths[0] // sizes[0])
    if mask.kv_num_blocks.size(2) != rows:
        raise ContextParallelError(
            f"the BlockMask has {mask.kv_num_blocks.size(2)} rows of blocks, its length "
            f"{lengths[0]} and block size {sizes[0]} make {rows}; is it a rank's own already?"
        )
    blocks = Blocks(*mask.as_tuple()[2:10])
    if queries.world_size > 1:
        blocks = cut(blocks, queries, rank, sizes[0], -(-lengths[1] // sizes[1]))
    own = of_rows(blocks, queries, lengths, sizes, mask.mask_mod)
    own.cp_whole = mask
    return own


def of_rows(blocks: Blocks, queries: Ownership, lengths, block_sizes, mask_mod) -> BlockMask:
    """A ``BlockMask`` of a rank's rows, with as many rows of blocks as that rank has; one more
    where the whole sequence has as many, so that the two can be told apart."""
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
            f"{layout} is for {layout.seq_len} positions on {layout.world_size} ranks, the mask "
            f"for {length} positions, the mesh has {mesh.size()} ranks"
        )
    if layout.rows > 1 and batch not in (1, None, layout.rows):
        raise ContextParallelError(
            f"{layout} has a layout for each of {layout.rows} batch rows, the mask is for {batch}"
        )
    return ownership(length, tuple(mesh.shape), layout.text)


def _rank(mesh: DeviceMesh) -> int:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ContextParallelError(f"this rank is not part of the mesh {mesh.mesh.tolist()}")
    return rank_at(coordinate, mesh.shape)
