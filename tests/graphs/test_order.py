"""What :mod:`cp_dispatch.graphs.order` can determine without a graph. The spawned tests have
graphs."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from cp_dispatch.graphs.order import communicates, leaves_a_rank_without
from cp_dispatch.ops import backward_op, forward_op

SHARD = Shard(0)


@pytest.mark.parametrize(
    ("length", "ranks", "placements", "want"),
    [
        (8, (4,), (SHARD,), False),
        (13, (4,), (SHARD,), False),  # 4, 4, 4, 1
        (5, (4,), (SHARD,), True),  # 2, 2, 1, 0
        (3, (4,), (SHARD,), True),
        (5, (4,), (Replicate(),), False),
        (5, (4,), (Shard(1),), False),
        (6, (2, 2), (SHARD, SHARD), False),  # 2, 1, 2, 1
        (4, (2, 3), (SHARD, SHARD), True),
        (5, (2, 2), (Replicate(), SHARD), False),
        (0, (2,), (SHARD,), True),
    ],
)
def test_leaves_a_rank_without(length, ranks, placements, want):
    """It uses only a DTensor's shape, its mesh's shape and its placements."""

    class Like:
        shape = (length, 8)
        device_mesh = torch.empty(ranks)

    Like.placements = placements
    assert leaves_a_rank_without(Like) is want


def test_communicates():
    ops = torch.ops.cp_dispatch
    assert all(map(communicates, (forward_op("math"), backward_op("math"), ops.flex_hop.default)))
    assert communicates(ops.varlen_attention.default) and communicates(ops.flex_start.default)
    others = ops.keep.default, ops.copy_rows.default, torch.ops.aten.mm.default, None
    assert not any(map(communicates, others))
