"""Calls that are refused, and for each reason what it names and what it advises."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.ranks import SEQUENCE, outline

QUERY, KEY = (2, 8, 64, 16), (2, 2, 64, 16)


def arguments(mesh, query=QUERY, key=KEY, value=None, placements=SEQUENCE, **options):
    """The arguments of a supported call, with the given changes."""
    defaults = {"enable_gqa": True}
    dtype = options.pop("dtype", torch.float32)
    shapes = {"query": query, "key": key, "value": value or key}
    key_placements = options.pop("key_placements", placements)
    tensors = {
        name: outline(mesh, shape, placements if name == "query" else key_placements, dtype)
        for name, shape in shapes.items()
    }
    return {**tensors, **defaults, **options}


def other_mesh(mesh):
    return DeviceMesh("cpu", torch.arange(mesh.size() - 1, -1, -1), mesh_dim_names=("other",))


def mask_over_descending_ranks(_):
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "cp"))
    mask = outline(mesh, (1, 1, 64, 64), (Shard(2), Shard(3)), torch.bool)
    return arguments(mesh, placements=(Shard(2), R), attn_mask=mask)


def replaced(mesh, **tensors):
    return {**arguments(mesh), **tensors}


R = Replicate()
# The call, and for each reason what it names and what it advises.
ONE_DIM = {
    "plain key": (
        lambda m: replaced(m, key=torch.ones(KEY)),
        [("key is a Tensor but other", "distribute_tensor or DTensor.from_local")],
    ),
    "two meshes": (
        lambda m: replaced(m, value=outline(other_mesh(m), KEY)),
        [("value is on DeviceMesh", "put all on one mesh")],
    ),
    "two dtypes": (
        lambda m: replaced(m, key=outline(m, KEY, dtype=torch.bfloat16)),
        [("key is torch.bfloat16, query is torch.float32", "cast to one dtype")],
    ),
    "mask and causal": (
        lambda m: arguments(m, attn_mask=torch.ones(64, 64), is_causal=True),
        [("attn_mask and is_causal are both given", "put the causal part in the mask")],
    ),
    "integer mask": (
        lambda m: arguments(m, attn_mask=torch.ones(64, 64, dtype=torch.int64)),
        [("attn_mask is torch.int64", "it must be bool, float32 or the query's torch.float32")],
    ),
    "wide mask": (
        lambda m: arguments(m, attn_mask=torch.ones(64, 64, dtype=torch.float64)),
        [("attn_mask is torch.float64", "it must be bool, float32 or the query's torch.float32")],
    ),
    "mask of another shape": (
        lambda m: arguments(m, attn_mask=torch.ones(64, 32)),
        [("attn_mask [1, 1, 64, 32] does not broadcast to the scores [2, 8, 64, 64]", "")],
    ),
    "mask of one rank's rows": (
        lambda m: arguments(m, attn_mask=torch.ones(16, 64)),
        [("attn_mask [1, 1, 16, 64] does not broadcast to the scores [2, 8, 64, 64]",
          "the mask of the whole sequence as a plain tensor")],
    ),
    "sparse mask": (
        lambda m: arguments(m, attn_mask=torch.ones(64, 64).to_sparse()),
        [("attn_mask is torch.sparse_coo", "pass a dense tensor")],
    ),
    "mask without dims": (
        lambda m: arguments(m, attn_mask=torch.ones(())),
        [("attn_mask [] does not broadcast to the scores [2, 8, 64, 64]", "dim by dim")],
    ),
    "plain bias with a gradient": (
        lambda m: arguments(m, attn_mask=torch.ones(64, 64, requires_grad=True)),
        [("attn_mask is a plain tensor that needs a gradient", "make it a replicated DTensor")],
    ),
    "mask on another mesh": (
        lambda m: arguments(m, attn_mask=outline(other_mesh(m), (1, 1, 64, 64), (R,))),
        [("attn_mask is on DeviceMesh", "query on DeviceMesh")],
    ),
    "mask of partial sums": (
        lambda m: arguments(m, attn_mask=outline(m, (1, 1, 64, 64), (Partial(),), torch.bool)),
        [("attn_mask has placements (Partial(sum),)", "Shard(dim), Replicate() and, for a bias")],
    ),
    "strided mask": (
        lambda m: arguments(
            m, attn_mask=outline(m, (1, 1, 64, 64), (_StridedShard(2, split_factor=2),))
        ),
        [("attn_mask has placements", "supported are Shard(dim), Replicate()")],
    ),
    "dropout below 0": (
        lambda m: arguments(m, dropout_p=-0.25),
        [("dropout_p must be in [0, 1], got -0.25", "")],
    ),
    "dropout above 1": (
        lambda m: arguments(m, dropout_p=1.5),
        [("dropout_p must be in [0, 1], got 1.5", "")],
    ),
    "integers": (
        lambda m: arguments(m, dtype=torch.int32),
        [(f"{x} is torch.int32", "cast to a real") for x in ("query", "key", "value")],
    ),
    "complex": (
        lambda m: arguments(m, dtype=torch.complex64),
        [(f"{x} is torch.complex64", "cast to a real") for x in ("query", "key", "value")],
    ),
    "three dims and four": (
        lambda m: arguments(m, (8, 64, 16), placements=(R,), key_placements=(R,)),
        [("query must have shape [B, H, S, D] like the others", "16] with placements (Repl")],
    ),
    "batch dims, and a mask that fits": (
        lambda m: arguments(m, (2, 4, 8, 64, 16), (2, 4, 2, 64, 16), placements=(Shard(1),),
                            attn_mask=torch.ones(64, 64)),
        [(f"{x} must have shape [B, H, S, D]", "DTensor can flatten")
         for x in ("query", "key", "value")],
    ),
    "one dim": (
        lambda m: arguments(m, (16,), (16,), placements=(R,)),
        [(f"{x} must have shape [B, H, S, D] like the others", "got [16] with placements (Repl")
         for x in ("query", "key", "value")],
    ),
    "batch sizes": (
        lambda m: arguments(m, query=(3, 8, 64, 16)),
        [("batch sizes differ: query 3, key 2, value 2", "expand them")],
    ),
    "key and value": (
        lambda m: arguments(m, value=(2, 2, 32, 16)),
        [("key and value must have the same number of heads", "[2, 2, 64, 16] and [2, 2, 32, 16]")],
    ),
    "head dims": (
        lambda m: arguments(m, query=(2, 8, 64, 32)),
        [("head dims differ: query 32, key 16", "")],
    ),
    "no head dim": (
        lambda m: arguments(m, (2, 8, 64, 0), (2, 8, 64, 0), value=(2, 8, 64, 16)),
        [("the head dim of query and key is 0", "must be at least 1")],
    ),
    "enable_gqa": (
        lambda m: arguments(m, enable_gqa=False),
        [("query has 8 heads, key 2, and enable_gqa is False", "pass enable_gqa=True")],
    ),
    "head groups": (
        lambda m: arguments(m, query=(2, 7, 64, 16)),
        [("query's 7 heads are not a multiple of key's 2", "")],
    ),
    "head dim sharded": (
        lambda m: arguments(m, placements=(Shard(3),)),
        [("query is S(3) on cp", "supported are Shard(0), Shard(1), Shard(2), Replicate()")],
    ),
    "strided shards": (
        lambda m: arguments(m, placements=(_StridedShard(2, split_factor=2),)),
        [("query is _S(2, 2) on cp", "supported are Shard(0)")],
    ),
    "key by heads": (
        lambda m: arguments(m, key_placements=(Shard(1),)),
        [(f"{x} is S(1) on cp, where query is S(2)", "redistribute it to S(2) or Replicate()")
         for x in ("key", "value")],
    ),
    "heads are not a multiple": (
        lambda m: arguments(m, query=(2, 6, 64, 16), placements=(Shard(1),)),
        [("query's 6 heads are not a multiple of the 4 ranks", "over fewer ranks"),
         ("key's 2 heads are not a multiple of the 4 ranks", "over fewer ranks")],
    ),
}  # fmt: skip
TWO_DIMS = {
    "sequence on different dims": (
        lambda m: arguments(m, placements=(Shard(2), R), key_placements=(R, Shard(2))),
        [("{'cp': 'replicated_keys', 'tp': 'replicated_queries'}", "place key and value like the")],
    ),
    "a ring whose keys are whole in part": (
        lambda m: arguments(m, placements=(Shard(2), Shard(2)), key_placements=(Shard(2), R)),
        [("{'cp': 'ring', 'tp': 'replicated_keys'}", "place key and value like the query")],
    ),
    "descending ranks": (
        lambda m: arguments(DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "cp")),
                            placements=(R, Shard(2))),
        [("share the sequence are not in ascending order, [1, 0]", "mesh with ascending ranks")],
    ),
    "mask over descending ranks": (
        mask_over_descending_ranks,
        [("attn_mask is S(3) on cp, whose ranks are not in ascending order", "replicate it")],
    ),
    "sums over descending ranks": (
        lambda m: arguments(DeviceMesh("cpu", [[0, 1], [2, 3]][::-1], mesh_dim_names=("tp", "cp")),
                            placements=(Shard(1), Shard(2)), key_placements=(Partial(), Shard(2))),
        [(f"{x} is a sum yet to be made on tp, whose ranks are not in ascending order",
          "redistribute it to Replicate()") for x in ("key", "value")],
    ),
    "columns of several mesh dims": (
        lambda m: arguments(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b")),
                            placements=(Shard(2), Shard(2))),
        [("the ranks that share the sequence are not in ascending order, [0, 2, 1, 3]",
          "mesh with ascending ranks")],
    ),
    "heads over two dims": (
        lambda m: arguments(m, query=(2, 6, 64, 16), placements=(Shard(1), Shard(1))),
        [("query's 6 heads are not a multiple of the 4 ranks", "over fewer ranks"),
         ("key's 2 heads are not a multiple of the 4 ranks", "over fewer ranks")],
    ),
}  # fmt: skip
