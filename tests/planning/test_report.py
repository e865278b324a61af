"""Plans in words: the exact expected texts of every schedule, of refusals, and of errors."""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from cp_dispatch import HeadTail, enabled, explain
from tests.ranks import fake_ranks, outline
from tests.test_plan import gqa

WHOLE = (Replicate(),)


@pytest.fixture
def mesh():
    with fake_ranks(4) as mesh:
        yield mesh


def test_a_causal_ring_with_grouped_heads(mesh):
    with enabled(schedule="natural_ring"):
        plan = explain(*gqa(mesh, length=16384), is_causal=True, enable_gqa=True)
    assert plan.handler == "cp_dispatch" and plan.backend == "cpu_flash" and plan.reasons == ()
    assert_expected_inline(
        str(plan),
        """\
handled by cp_dispatch: ring over 4 ranks, cpu_flash kernel
    query: (2, 8, 16384, 16) float32 on cpu mesh [cp=4: S(2)]
    key: (2, 2, 16384, 16) float32 on cpu mesh [cp=4: S(2)]
    value: (2, 2, 16384, 16) float32 on cpu mesh [cp=4: S(2)]
    dropout_p=0.0, is_causal=True, scale=None, enable_gqa=True
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                1/3               2.000 (    3)        10.000 (    7)
     1                2/2               4.000 (    3)        12.000 (    7)
     2                3/1               6.000 (    3)        14.000 (    7)
     3                4/0               0.000 (    3)         8.000 (    7)
  extra memory: about 16.750 MiB forward, 24.000 MiB backward
  not flash: it is a kernel for cuda
  not efficient: it is a kernel for cuda
  not cudnn: it is a kernel for cuda
  not math: it would work; torch prefers cpu_flash""",
    )


def costs(plan) -> str:
    """The plan without the lines about the call and the other kernels."""
    others = ("    query", "    key", "    value", "    dropout_p", "  not ")
    return "\n".join(x for x in str(plan).splitlines() if not x.startswith(others))


def test_a_balanced_ring(mesh):
    with enabled():
        plan = explain(*gqa(mesh, length=16384), is_causal=True, enable_gqa=True)
    assert_expected_inline(
        costs(plan),
        """\
handled by cp_dispatch: mirrored_ring over 4 ranks, cpu_flash kernel
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                4/0              11.125 (    5)        24.125 (    9)
     1                4/0              11.125 (    5)        24.125 (    9)
     2                4/0              11.125 (    5)        24.125 (    9)
     3                4/0              11.125 (    5)        24.125 (    9)
  extra memory: about 28.750 MiB forward, 52.000 MiB backward
  - balanced by exchanging half-shards with the mirror rank: saves about 859 ms of a forward, costs 7.24 ms""",  # noqa: E501
    )


def test_head_tail(mesh):
    with enabled(layout=HeadTail(16384, 4)):
        plan = explain(*gqa(mesh, length=16384), is_causal=True, enable_gqa=True)
    assert_expected_inline(
        costs(plan),
        """\
handled by cp_dispatch: ring over 4 ranks, cpu_flash kernel
  in the layout of HeadTail: 16384 positions on 4 ranks, rows per rank 4 x 4096
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                4/0               6.000 (    3)        14.000 (    7)
     1                4/0               6.000 (    3)        14.000 (    7)
     2                4/0               6.000 (    3)        14.000 (    7)
     3                4/0               6.000 (    3)        14.000 (    7)
  extra memory: about 16.750 MiB forward, 24.000 MiB backward""",
    )


def test_gather(mesh):
    with enabled(schedule="gather"):
        plan = explain(*gqa(mesh, length=16384), is_causal=True, enable_gqa=True)
    assert_expected_inline(
        costs(plan),
        """\
handled by cp_dispatch: mirrored_gather over 4 ranks, cpu_flash kernel
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                3/1               4.125 (    3)         8.000 (    4)
     1                2/2               6.125 (    3)        14.125 (    4)
     2                3/1               6.125 (    3)        16.125 (    4)
     3                4/0               4.000 (    3)        14.125 (    4)
  sent: for gathers and sums, what a rank contributes, counted once
  extra memory: about 34.750 MiB forward, 52.000 MiB backward
  - "gather" in natural order: half-shards of query and output are exchanged with the mirror rank""",  # noqa: E501
    )


def test_ulysses(mesh):
    with enabled(schedule="ulysses"):
        plan = explain(*gqa(mesh, length=16384), is_causal=True, enable_gqa=True)
    assert_expected_inline(
        costs(plan),
        """\
handled by cp_dispatch: ulysses over 4 ranks, cpu_flash kernel
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                1/0               9.375 (    2)        18.375 (    3)
     1                1/0               9.375 (    2)        18.375 (    3)
     2                1/0               9.375 (    2)        18.375 (    3)
     3                1/0               9.375 (    2)        18.375 (    3)
  extra memory: about 16.000 MiB forward, 33.000 MiB backward
  - 2 of 8 query heads on each of 4 ranks; some of the 2 key heads go to several ranks""",
    )


def test_hybrid(mesh):
    with enabled(schedule="hybrid"):
        plan = explain(*gqa(mesh, length=16384), is_causal=True, enable_gqa=True)
    assert_expected_inline(
        costs(plan),
        """\
handled by cp_dispatch: hybrid over 4 ranks, cpu_flash kernel
  heads among 2 consecutive ranks, mirrored_ring across the 2 groups
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                2/0              12.250 (    5)        26.250 (    7)
     1                2/0              12.250 (    5)        26.250 (    7)
     2                2/0              12.250 (    5)        26.250 (    7)
     3                2/0              12.250 (    5)        26.250 (    7)
  extra memory: about 41.500 MiB forward, 81.000 MiB backward
  - 4 of 8 query heads on each of 2 ranks
  - balanced by exchanging half-shards with the mirror rank: saves about 573 ms of a forward, costs 7.24 ms""",  # noqa: E501
    )


def test_heads_that_do_not_fit(mesh):
    with enabled(schedule="hybrid:3"):
        plan = explain(*gqa(mesh, length=64), enable_gqa=True)
    assert_expected_inline(
        costs(plan),
        """\
handled by cp_dispatch: ring over 4 ranks, cpu_flash kernel
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                4/0               0.023 (    3)         0.055 (    7)
     1                4/0               0.023 (    3)         0.055 (    7)
     2                4/0               0.023 (    3)         0.055 (    7)
     3                4/0               0.023 (    3)         0.055 (    7)
  extra memory: about 0.065 MiB forward, 0.094 MiB backward
  - heads are not exchanged: 4 ranks cannot be divided into groups of 3; with 8 query and 2 key heads, some of 3 ranks would call kernels, and with them rings, more often than others""",  # noqa: E501
    )


def test_a_full_ring_with_uneven_shards(mesh):
    with enabled(schedule="ring"):
        plan = explain(*gqa(mesh, length=9000, key_length=10), scale=0.5, enable_gqa=True)
    assert_expected_inline(
        str(plan),
        """\
handled by cp_dispatch: ring over 4 ranks, cpu_flash kernel
    query: (2, 8, 9000, 16) float32 on cpu mesh [cp=4: S(2)]
    key: (2, 2, 10, 16) float32 on cpu mesh [cp=4: S(2)]
    value: (2, 2, 10, 16) float32 on cpu mesh [cp=4: S(2)]
    dropout_p=0.0, is_causal=False, scale=0.5, enable_gqa=True
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                4/0               0.003 (    3)         0.008 (    7)
     1                4/0               0.003 (    3)         0.008 (    7)
     2                4/0               0.004 (    3)         0.009 (    7)
     3                4/0               0.003 (    3)         0.008 (    7)
  extra memory: about 7.007 MiB forward, 6.601 MiB backward
  not flash: it is a kernel for cuda
  not efficient: it is a kernel for cuda
  not cudnn: it is a kernel for cuda
  not math: it would work; torch prefers cpu_flash""",
    )


def test_a_refused_call(mesh):
    query, key, value = gqa(mesh)
    with enabled():
        plan = explain(query, key, value, torch.ones(64, 64), -0.1, True)
    assert plan.handler == "refused"
    assert_expected_inline(
        str(plan),
        """\
cp_dispatch does not support this scaled_dot_product_attention call.
  given:
    query: (2, 8, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    key: (2, 2, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    value: (2, 2, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    attn_mask: (64, 64) float32 Tensor (not a DTensor)
    dropout_p=-0.1, is_causal=True, scale=None, enable_gqa=False
  refused because:
    - dropout_p must be in [0, 1], got -0.1
    - attn_mask and is_causal are both given; put the causal part in the mask
    - query has 8 heads, key 2, and enable_gqa is False; pass enable_gqa=True""",
    )


def test_masks_and_orders_in_words(mesh):
    query, key, value = gqa(mesh)
    with enabled():
        text = str(explain(query, key, value, causal_lower_right(32, 64), enable_gqa=True))
    assert "attn_mask: causal_lower_right(32, 64)\n" in text
    _, *whole = gqa(mesh, (Replicate(),))
    with enabled(layout=HeadTail(64, 4)):
        text = str(explain(query, *whole, is_causal=True, enable_gqa=True))
    assert "key and value of length 64 are whole on every rank" in text


def test_own_rows_of_a_mask_in_a_layout_are_not_redistributed(mesh):
    def moved(placements) -> str:
        mask = outline(mesh, (2, 1, 64, 64), placements, torch.bool)
        with enabled(layout=HeadTail(64, 4)):
            plan = explain(*gqa(mesh), mask, enable_gqa=True)
        return "; ".join(x for x in plan.reasons if "redistributes" in x)

    assert moved((Shard(2),)) == moved(WHOLE) == ""
    assert "attn_mask from (Shard(dim=3),) to (Replicate(),)" in moved((Shard(3),))


def test_a_call_that_stays_on_its_rank():
    with fake_ranks(2, 2, names=("dp", "tp")) as mesh, enabled():
        plan = explain(*gqa(mesh, (Shard(0), Shard(1))), is_causal=True, enable_gqa=True)
    assert_expected_inline(
        str(plan),
        """\
handled by cp_dispatch: local, cpu_flash kernel
    query: (2, 8, 64, 16) float32 on cpu mesh [dp=2: S(0), tp=2: S(1)]
    key: (2, 2, 64, 16) float32 on cpu mesh [dp=2: S(0), tp=2: S(1)]
    value: (2, 2, 64, 16) float32 on cpu mesh [dp=2: S(0), tp=2: S(1)]
    dropout_p=0.0, is_causal=True, scale=None, enable_gqa=True
  extra memory: about 0.033 MiB forward, 0.055 MiB backward
  - the sequence is not sharded (it is dim -2 of query, key and value)
  not flash: it is a kernel for cuda
  not efficient: it is a kernel for cuda
  not cudnn: it is a kernel for cuda
  not math: it would work; torch prefers cpu_flash""",
    )


def test_a_call_that_is_not_ours(mesh):
    assert_expected_inline(
        str(explain(*gqa(mesh), enable_gqa=True)),
        """\
handled by unmodified torch
    query: (2, 8, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    key: (2, 2, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    value: (2, 2, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True
  - cp_dispatch is not enabled""",
    )


def test_replicated_keys(mesh):
    """Each rank has all keys. The backward sums their gradients."""
    query, _, _ = gqa(mesh, length=4096)
    _, key, value = gqa(mesh, WHOLE, length=4096)
    with enabled():
        plan = explain(query, key, value, is_causal=True, enable_gqa=True)
    assert_expected_inline(
        str(plan),
        """\
handled by cp_dispatch: replicated_keys over 4 ranks, cpu_flash kernel
    query: (2, 8, 4096, 16) float32 on cpu mesh [cp=4: S(2)]
    key: (2, 2, 4096, 16) float32 on cpu mesh [cp=4: R]
    value: (2, 2, 4096, 16) float32 on cpu mesh [cp=4: R]
    dropout_p=0.0, is_causal=True, scale=None, enable_gqa=True
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                1/0               0.000 (    0)         2.000 (    2)
     1                1/0               0.000 (    0)         2.000 (    2)
     2                1/0               0.000 (    0)         2.000 (    2)
     3                1/0               0.000 (    0)         2.000 (    2)
  sent: for gathers and sums, what a rank contributes, counted once
  extra memory: about 2.125 MiB forward, 8.000 MiB backward
  not flash: it is a kernel for cuda
  not efficient: it is a kernel for cuda
  not cudnn: it is a kernel for cuda
  not math: it would work; torch prefers cpu_flash""",
    )


def test_replicated_queries(mesh):
    """Decoding: one row against a sharded cache."""
    query, _, _ = gqa(mesh, WHOLE, length=1)
    _, key, value = gqa(mesh, length=5000)
    with enabled():
        plan = explain(query, key, value, enable_gqa=True)
    assert_expected_inline(
        str(plan),
        """\
handled by cp_dispatch: replicated_queries over 4 ranks, cpu_flash kernel
    query: (2, 8, 1, 16) float32 on cpu mesh [cp=4: R]
    key: (2, 2, 5000, 16) float32 on cpu mesh [cp=4: S(2)]
    value: (2, 2, 5000, 16) float32 on cpu mesh [cp=4: S(2)]
    dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                1/0               0.001 (    2)         0.001 (    1)
     1                1/0               0.001 (    2)         0.001 (    1)
     2                1/0               0.001 (    2)         0.001 (    1)
     3                1/0               0.001 (    2)         0.001 (    1)
  sent: for gathers and sums, what a rank contributes, counted once
  extra memory: about 0.006 MiB forward, 1.224 MiB backward
  not flash: it is a kernel for cuda
  not efficient: it is a kernel for cuda
  not cudnn: it is a kernel for cuda
  not math: it would work; torch prefers cpu_flash""",
    )


def test_a_causal_chunk_of_queries_leaves_ranks_idle(mesh):
    query, _, _ = gqa(mesh, WHOLE, length=1000)
    _, key, value = gqa(mesh, length=4000)
    with enabled():
        plan = explain(query, key, value, is_causal=True, enable_gqa=True)
    assert_expected_inline(
        "\n".join(str(plan).splitlines()[5:10]),
        """\
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                1/0               1.038 (    2)         0.977 (    1)
     1                0/1               1.038 (    2)         0.977 (    1)
     2                0/1               1.038 (    2)         0.977 (    1)
     3                0/1               1.038 (    2)         0.977 (    1)""",
    )


def test_a_ring_over_two_mesh_dims():
    with fake_ranks(2, 2, names=("node", "gpu")) as mesh, enabled():
        plan = explain(*gqa(mesh, (Shard(2), Shard(2)), length=4001), enable_gqa=True)
    assert plan.mesh_dims == (0, 1) and plan.ring_shape == (2, 2) and plan.world_size == 4
    assert_expected_inline(
        str(plan),
        """\
handled by cp_dispatch: ring over 4 ranks, cpu_flash kernel
    query: (2, 8, 4001, 16) float32 on cpu mesh [node=2: S(2), gpu=2: S(2)]
    key: (2, 2, 4001, 16) float32 on cpu mesh [node=2: S(2), gpu=2: S(2)]
    value: (2, 2, 4001, 16) float32 on cpu mesh [node=2: S(2), gpu=2: S(2)]
    dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                4/0               1.465 (    3)         3.419 (    7)
     1                4/0               1.465 (    3)         3.419 (    7)
     2                4/0               1.465 (    3)         3.419 (    7)
     3                4/0               1.465 (    3)         3.418 (    7)
  extra memory: about 4.093 MiB forward, 5.865 MiB backward
  not flash: it is a kernel for cuda
  not efficient: it is a kernel for cuda
  not cudnn: it is a kernel for cuda
  not math: it would work; torch prefers cpu_flash""",
    )


def test_a_mask_and_dropout(mesh):
    mask = outline(mesh, (2, 1, 1, 64), WHOLE, torch.bool)
    with enabled():
        plan = explain(*gqa(mesh), attn_mask=mask, dropout_p=0.25, enable_gqa=True)
    assert_expected_inline(
        str(plan),
        """\
handled by cp_dispatch: ring over 4 ranks, math kernel
    query: (2, 8, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    key: (2, 2, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    value: (2, 2, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    attn_mask: (2, 1, 1, 64) bool on cpu mesh [cp=4: R]
    dropout_p=0.25, is_causal=False, scale=None, enable_gqa=True
  rank  blocks computed/skipped  MiB sent fwd (calls)  MiB sent bwd (calls)
     0                4/0               0.023 (    3)         0.055 (    7)
     1                4/0               0.023 (    3)         0.055 (    7)
     2                4/0               0.023 (    3)         0.055 (    7)
     3                4/0               0.023 (    3)         0.055 (    7)
  extra memory: about 0.115 MiB forward, 0.125 MiB backward
  - math: only it draws dropout by (query, key) pair, independently of the sharding
  not flash: it is a kernel for cuda
  not efficient: it is a kernel for cuda
  not cudnn: it is a kernel for cuda
  not cpu_flash: its dropout cannot be drawn by (query, key) pair, independently of the sharding""",
    )


def test_no_backend_that_is_switched_on(mesh):
    bias = outline(mesh, (64, 64), WHOLE, requires_grad=True)
    with enabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        plan = explain(*gqa(mesh), attn_mask=bias, enable_gqa=True)
    lines = str(plan).splitlines()
    kept = [line for line in lines if "no enabled backend" not in line]
    assert len(kept) == len(lines) - 1
    assert_expected_inline(
        "\n".join(kept),
        """\
cp_dispatch does not support this scaled_dot_product_attention call.
  given:
    query: (2, 8, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    key: (2, 2, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    value: (2, 2, 64, 16) float32 on cpu mesh [cp=4: S(2)]
    attn_mask: (64, 64) float32 on cpu mesh [cp=4: R]
    dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True
  refused because:
    - math: only it computes the gradient of a bias
  not flash: it is a kernel for cuda
  not efficient: it is a kernel for cuda
  not cudnn: it is a kernel for cuda
  not cpu_flash: it does not compute the gradient of a bias
  not math: it is switched off (torch.backends.cuda.math_sdp_enabled())""",
    )


def test_a_table_of_many_ranks_leaves_out_the_middle():
    with fake_ranks(64) as mesh, enabled():
        plan = explain(*gqa(mesh, length=6400), is_causal=True, enable_gqa=True)
        lines = str(plan).splitlines()
    ranks = [line.split()[0] for line in lines if re.match(r" +(\d+ |\.\.\.)", line)]
    assert ranks == ["0", "1", "2", "3", "...", "60", "61", "62", "63"]


def test_the_text_of_a_plan_is_the_text_of_its_error(mesh):
    query, key, value = gqa(mesh)
    with enabled():
        plan = explain(query, key, value, torch.ones(3), dropout_p=2.0, is_causal=True)
        with pytest.raises(RuntimeError) as raised:
            F.scaled_dot_product_attention(
                query, key, value, torch.ones(3), dropout_p=2.0, is_causal=True
            )
    assert str(raised.value) == str(plan) and len(plan.reasons) == 4
