"""DTensor rules of the ops: known answers, and the placements of the ops' results."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema

import cp_dispatch
from cp_dispatch import PerDocumentHeadTail
from cp_dispatch.backends import BACKENDS
from cp_dispatch.ops import backward_op, forward_op
from cp_dispatch.sharding import (
    mask_grad_placements,
    mask_placements,
    sequence_kinds,
    target_placements,
)
from tests.ranks import fake_ranks

B, H, S, D = map(Shard, range(4))
R, P = Replicate(), Partial()

# On one mesh dim: placements of query, key and value as given; those while the op runs; the
# schedule.
TARGETS = [
    (S, S, S, S, S, "ring"),
    (S, R, R, S, R, "replicated_keys"),
    (R, S, S, R, S, "replicated_queries"),
    (P, S, S, R, S, "replicated_queries"),
    (R, R, R, R, R, None),
    (P, P, P, R, R, None),
    (B, B, B, B, B, None),
    (H, H, H, H, H, None),
    # What does not fit is redistributed, preferring the query's placement.
    (B, R, R, B, B, None),
    (H, P, R, H, H, None),
    (B, S, S, B, B, None),
    (S, P, P, S, S, "ring"),
    (S, S, R, S, S, "ring"),
    (S, R, S, S, S, "ring"),
    (S, H, H, S, S, "ring"),
    (R, S, R, R, S, "replicated_queries"),
    (R, R, S, R, S, "replicated_queries"),
    (R, B, H, R, R, None),
]


@pytest.mark.parametrize("query, key, value, query_target, key_target, kind", TARGETS)
def test_targets_on_one_mesh_dim(query, key, value, query_target, key_target, kind):
    given = (query,), (key,), (value,)
    assert target_placements(*given) == ((query_target,), (key_target,))
    assert sequence_kinds(*given) == ({} if kind is None else {0: kind})


def test_mesh_dims_are_decided_one_by_one():
    for first in TARGETS:
        for second in TARGETS:
            pairs = list(zip(first, second, strict=True))
            assert target_placements(*pairs[:3]) == (pairs[3], pairs[4])
            kinds = {dim: kind for dim, kind in enumerate(pairs[5]) if kind is not None}
            assert sequence_kinds(*pairs[:3]) == kinds


def test_targets_stay_where_they_are():
    for *_, query, key, kind in TARGETS:
        assert target_placements((query,), (key,), (key,)) == ((query,), (key,))
        assert sequence_kinds((query,), (key,), (key,)) == ({} if kind is None else {0: kind})


FULL = (2, 4, 8, 12)
PADDING, ROWS, PER_HEAD, ONE = (2, 1, 1, 12), (1, 1, 8, 12), (1, 4, 8, 12), (1, 1, 1, 1)


@pytest.mark.parametrize(
    "query, shape, wanted",
    [
        (B, FULL, B), (H, FULL, H), (S, FULL, S), (R, FULL, R),
        (B, PADDING, B), (H, PADDING, R), (S, PADDING, R), (R, PADDING, R),
        (B, ROWS, R), (H, ROWS, R), (S, ROWS, S),
        (B, PER_HEAD, R), (H, PER_HEAD, H), (S, PER_HEAD, S),
        (B, ONE, R), (H, ONE, R), (S, ONE, R), (R, ONE, R),
    ],
)  # fmt: skip
def test_a_mask_follows_the_query_where_it_is_not_broadcast(query, shape, wanted):
    assert mask_placements((query,), shape) == (wanted,)
    assert mask_placements((R, query), shape) == (R, wanted)


@pytest.mark.parametrize(
    "query, key, shape, wanted",
    [
        # Each rank has different rows, or adds to rows that all ranks share.
        (S, S, FULL, S), (S, S, ROWS, S), (S, S, PADDING, P), (S, S, ONE, P),
        (S, R, FULL, S), (S, R, PADDING, P),
        # Each rank has all rows. It knows the columns of its own keys, and the others are zeros.
        (R, S, FULL, P), (R, S, PADDING, P), (R, S, ONE, P),
        (B, B, FULL, B), (B, B, PADDING, B), (B, B, ROWS, P), (B, B, PER_HEAD, P),
        (H, H, FULL, H), (H, H, PER_HEAD, H), (H, H, PADDING, P), (H, H, ROWS, P),
        # Every rank computes the same.
        (R, R, FULL, R), (R, R, ONE, R),
    ],
)  # fmt: skip
def test_a_masks_gradient_is_a_sum_over_ranks_that_share_what_it_broadcasts(
    query, key, shape, wanted
):
    assert mask_grad_placements((query,), (key,), shape) == (wanted,)
    assert mask_grad_placements((R, query), (R, key), shape) == (R, wanted)


def sharded(mesh, shape, placements, dtype=torch.float32):
    """A DTensor with a real shard, that of rank 0. Other ranks do not exist."""
    local = list(shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size(dim)  # all sizes are divisible
    tensor = torch.ones(local, dtype=dtype)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


@pytest.mark.parametrize(
    "query, key, mask_shape, mask, grad_mask, schedule",
    [
        ((S, H), (S, H), FULL, (S, H), (S, H), "ring"),
        ((S, H), (S, H), FULL, (R, R), (S, H), "ring"),
        ((S, H), (S, H), PADDING, (R, R), (P, P), "ring"),
        ((B, S), (B, S), PADDING, (B, R), (B, P), "ring"),
        ((S, S), (S, S), ROWS, (S, S), (S, S), "ring"),
        ((R, B), (S, B), FULL, (R, B), (P, B), "replicated_queries"),
        ((S, B), (R, B), ROWS, (S, R), (S, P), "replicated_keys"),
        # The columns of a mask are never sharded while an op runs.
        ((S, R), (S, R), FULL, (D, D), (S, R), "ring"),
    ],
)  # fmt: skip
def test_ops_place_what_they_return(query, key, mask_shape, mask, grad_mask, schedule):
    """Without a group, each rank is a ring of one. The values are wrong, but the placements are
    right."""
    q_shape, k_shape = (2, 4, 8, 16), (2, 4, 12, 16)
    with fake_ranks(2, 2, names=("a", "b")) as mesh:
        tensors = [
            sharded(mesh, shape, placements)
            for shape, placements in ((q_shape, query), (k_shape, key), (k_shape, key))
        ]
        bias = sharded(mesh, mask_shape, mask)
        local = [tensors[0].to_local().shape, tensors[1].to_local().shape]
        # A call whose lengths are those of the shard, so that a ring of one fits.
        options = (
            bias, None, 0.0, [], False, None, local[0][2], local[1][2], schedule, [], "",
            "", "rows",
        )  # fmt: skip
        out, lse = forward_op("math")(*tensors, *options)
        grads = backward_op("math")(out, *tensors, out, lse, *options, True, True)
    assert out.placements == lse.placements == query
    assert out.shape == q_shape and lse.shape == q_shape[:3]
    assert [x.placements for x in grads] == [query, key, key, grad_mask]
    assert [x.shape for x in grads] == [q_shape, k_shape, k_shape, mask_shape]
    for grad in grads:
        assert grad.to_local().shape == sharded(mesh, grad.shape, grad.placements).to_local().shape


@pytest.mark.parametrize("whole_rows, placed, gradient", [
    (False, (S, R), (S, P)),
    # By position: a rank's gradient is zero except for its own rows.
    (True, (R, R), (P, P)),
])  # fmt: skip
def test_in_a_layout_a_mask_may_have_whole_rows(whole_rows, placed, gradient):
    assert mask_placements((S, B), ROWS, whole_rows) == placed
    assert mask_grad_placements((S, B), (S, B), ROWS, whole_rows) == gradient
    # A mask that is broadcast along the rows has no rows to select.
    assert mask_placements((S, B), PADDING, whole_rows) == (R, B)
    assert mask_grad_placements((S, B), (S, B), PADDING, whole_rows) == (P, B)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_op_has_a_rule(name):
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    assert forward_op(name) in strategies and backward_op(name) in strategies


def test_torch_remembers_a_call_once_for_all_layouts():
    """Torch's cache evicts nothing, and documents may have another layout at every step."""

    def remembered() -> int:
        gc.collect()
        ours = (x for x in gc.get_objects() if type(x) is OpSchema and "ring_" in str(x.op))
        return sum(1 for _ in ours)

    counts = []
    with fake_ranks(2) as mesh:
        for document in range(1, 7):
            layout = PerDocumentHeadTail([document, 16 - document], 2)
            query = sharded(mesh, (1, 2, 16, 8), (S,)).requires_grad_()
            with cp_dispatch.enabled(layout=layout):
                output = F.scaled_dot_product_attention(query, query, query, is_causal=True)
                output.sum().backward()
            counts.append(remembered())
    assert counts[1:] == counts[1:2] * 5 and counts[1] > 0
