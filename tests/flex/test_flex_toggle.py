"""Rules are installed and removed with the toggle. Refusals come before any communication."""

from __future__ import annotations

import gc
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from cp_dispatch import ContextParallelError, HeadTail, PerDocumentHeadTail
from cp_dispatch._compat import add_subclass_rule, remove_subclass_rule
from cp_dispatch.flex.call import FlexCall
from cp_dispatch.flex.mask_tuple import MaskTuple
from cp_dispatch.flex.mods import Pieces, Place, pieces
from cp_dispatch.flex.plan import make_plan
from cp_dispatch.flex.remember import remember, remembered, users, when_none_is_left
from cp_dispatch.groups import ring_group_name
from cp_dispatch.layouts import Span
from cp_dispatch.options import Options
from tests.flex.problems import gradients_on_cpu
from tests.ranks import fake_ranks, one_rank, outline, with_rows

FORWARD = torch.ops.higher_order.flex_attention
BACKWARD = torch.ops.higher_order.flex_attention_backward
ROWS = (Shard(2),)
OPS = torch.ops.cp_dispatch


def causal(b, h, q, k):
    return q >= k


class Attend(nn.Module):
    def forward(self, query, key, value, **options):
        return flex_attention(query, key, value, **options)


def mask_of(length: int, batch=None, heads=None):
    return create_block_mask(causal, batch, heads, length, length, "cpu")


def test_rules_are_there_while_enabled_alone():
    before = [dict(op.python_key_table) for op in (FORWARD, BACKWARD)]
    assert not any(DTensor in table for table in before)
    with cp_dispatch.enabled():
        assert all(DTensor in op.python_key_table for op in (FORWARD, BACKWARD))
    assert [dict(op.python_key_table) for op in (FORWARD, BACKWARD)] == before


def test_off_is_torchs_own_error():
    with one_rank() as mesh:
        x = outline_of_data(mesh)
        with pytest.raises(Exception, match="no rule registered|not supported"):
            flex_attention(x, x, x)
        with cp_dispatch.enabled():
            got = flex_attention(x, x, x)
        assert isinstance(got, DTensor)
        with pytest.raises(Exception, match="no rule registered|not supported"):
            flex_attention(x, x, x)


def test_a_checkpoint_in_another_order_is_noticed():
    """The backward would be that of the first forward, with tensors of the second."""
    with fake_ranks(2) as mesh, gradients_on_cpu():
        x = DTensor.from_local(torch.ones(1, 1, 8, 16), mesh, ROWS).requires_grad_()
        orders = None, HeadTail(16, 2)
        for layout, other in (orders, orders[::-1]):
            for now in (layout, other):
                with cp_dispatch.enabled(layout=layout):
                    y = checkpoint(flex_attention, x, x, x, use_reentrant=False)
                raises = pytest.raises(ContextParallelError, match="in a different order")
                with cp_dispatch.enabled(layout=now), nullcontext() if now == layout else raises:
                    y.sum().backward()


def outline_of_data(mesh) -> DTensor:
    return DTensor.from_local(torch.randn(1, 1, 8, 4), mesh, ROWS, run_check=False)


def test_plain_calls_are_left_alone():
    x = torch.randn(1, 2, 40, 8)
    mask = mask_of(40)
    want = flex_attention(x, x, x, block_mask=mask)
    with cp_dispatch.enabled():
        assert torch.equal(flex_attention(x, x, x, block_mask=mask), want)


def test_cpu_gradients_are_refused_by_torch():
    with one_rank() as mesh, cp_dispatch.enabled():
        x = outline_of_data(mesh).requires_grad_()
        with pytest.raises(NotImplementedError, match="CPU"):
            flex_attention(x, x, x)


def test_what_a_forward_leaves():
    """The backward's rule stays until no forward waits for its backward."""
    removed = []
    options = Options()
    kernel_options = {"BLOCK_M": 64}
    remember(kernel_options, options)
    assert remembered(kernel_options) is options
    assert users(kernel_options) == {"BLOCK_M": 64}
    when_none_is_left(lambda: removed.append(None))
    assert not removed
    del kernel_options
    gc.collect()
    assert removed
    assert remembered({}) is None
    # A graph's own dict cannot be written to, and need not be.
    frozen = torch.fx.immutable_collections.immutable_dict({"a": 1})
    remember(frozen, options)
    assert frozen == {"a": 1}


def test_a_rule_is_replaced():
    class Kind(torch.Tensor):
        pass

    add_subclass_rule(FORWARD, Kind, "first")
    add_subclass_rule(FORWARD, Kind, "second")
    assert FORWARD.python_key_table[Kind] == "second"
    remove_subclass_rule(FORWARD, Kind)
    remove_subclass_rule(FORWARD, Kind)
    assert Kind not in FORWARD.python_key_table


def reasons(mesh, query, key=None, value=None, mask=None, layout=None, captured=()) -> str:
    key = query if key is None else key
    value = key if value is None else value
    mask = mask or mask_of(query.shape[2])
    call = FlexCall(query, key, value, MaskTuple(mask.as_tuple()), captured)
    plan = make_plan(Options(layout=layout), call)
    assert plan.handler == "refused", plan
    text = str(plan)
    assert "given:" in text and "refused because:" in text
    assert all(f"\n    - {line}" in text for line in plan.reasons)
    assert isinstance(plan.error(), ContextParallelError)
    return text


SHAPE = (2, 4, 64, 8)


@pytest.mark.parametrize("placed, match", [
    ((Shard(3),), "query is S.*3.* on .*supported are"),
    ((Partial(),), "query is P.* on .*supported are"),
])  # fmt: skip
def test_query_placements(placed, match):
    with fake_ranks(2) as mesh:
        whole = outline(mesh, SHAPE, (Replicate(),))
        assert re.search(match, reasons(mesh, outline(mesh, SHAPE, placed), whole))


def test_refusals_name_every_reason():
    with fake_ranks(2) as mesh:
        rows, whole = outline(mesh, SHAPE), outline(mesh, SHAPE, (Replicate(),))
        heads = outline(mesh, SHAPE, (Shard(1),))
        assert "key is" in reasons(mesh, rows, heads, rows)
        text = reasons(mesh, rows, rows, whole)
        assert "give them the same placement" in text
        plain = torch.randn(SHAPE)
        assert "key is a Tensor but other" in reasons(mesh, rows, plain, rows)
        assert "cast to one dtype" in reasons(mesh, rows, outline(mesh, SHAPE, dtype=torch.float64))
        grouped = outline(mesh, (2, 1, 64, 8), (Shard(1),))
        assert "are not a multiple of the 2 ranks" in reasons(mesh, heads, grouped)
        batch, one = outline(mesh, SHAPE, (Shard(0),)), outline(mesh, (1, 4, 64, 8), (Shard(0),))
        assert "expand key and value" in reasons(mesh, batch, one)
        assert "must agree in all but" in reasons(mesh, rows, rows, outline(mesh, (2, 4, 60, 8)))
        assert "block_mask is for 3 batch rows" in reasons(mesh, rows, mask=mask_of(64, 3))
        placed = mask_of(64)
        placed.kv_num_blocks = DTensor.from_local(placed.kv_num_blocks, mesh, (Replicate(),))
        assert "block_mask holds DTensors" in reasons(mesh, rows, mask=placed)
        both = reasons(mesh, outline(mesh, SHAPE, (Shard(3),)), heads, mask=mask_of(64, 3))
        assert "supported are" in both and "3 batch rows" in both


def test_refusals_of_captured_tensors():
    with fake_ranks(2, 2, names=("a", "b")) as mesh:
        rows = outline(mesh, SHAPE, (Shard(2), Replicate()))
        other = outline(mesh["a"], (64,), (Replicate(),))
        assert "tensor 0 that score_mod captures is on" in reasons(mesh, rows, captured=(other,))
        turned = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("a", "b"))
        heads = outline(turned, SHAPE, (Shard(1), Shard(2)))
        part = outline(turned, (64,), (Shard(0), Replicate()))
        text = reasons(turned, heads, captured=(part,))
        assert "S(0) on a, whose ranks are not in ascending order" in text, text
        strided = outline(mesh, (64,), (_StridedShard(0, split_factor=2), Replicate()))
        text = reasons(mesh, rows, captured=(strided,))
        assert "tensor 0 that score_mod captures has placements" in text


def test_a_key_that_is_whole_on_one_of_two_sequence_dims_is_refused():
    with fake_ranks(2, 2, names=("a", "b")) as mesh:
        rows, part = (outline(mesh, SHAPE, (Shard(2), p)) for p in (Shard(2), Replicate()))
        assert "on only some of the mesh dims" in reasons(mesh, rows, part)


def test_refusals_of_layouts():
    with fake_ranks(2) as mesh:
        rows = outline(mesh, SHAPE)
        for ranks in (1, 4):
            assert "; make one for 2" in reasons(mesh, rows, layout=HeadTail(64, ranks))
        assert "enabled(layout=None)" in reasons(mesh, rows, layout=HeadTail(60, 2))
        own_rows = PerDocumentHeadTail([[4, 60], [60, 4], [30, 34]], 2)
        assert "batch rows" in reasons(mesh, rows, layout=own_rows)
        odd = outline(mesh, (30, 64), (Shard(0),))
        text = reasons(mesh, rows, layout=HeadTail(64, 2), captured=(odd,))
        assert "should be in the layout" in text
    with fake_ranks(2, 2, names=("a", "b")) as mesh:
        both = outline(mesh, (2, 4, 5, 8), (Shard(2), Shard(2)))
        text = reasons(mesh, both, mask=mask_of(5), layout=HeadTail(5, 4))
        assert "a multiple of the number of ranks" in text


@pytest.mark.parametrize("schedule", ["auto", "gather", "ring"])
def test_shards_must_be_as_long_as_the_global_shape_says(schedule):
    with fake_ranks(2) as mesh, cp_dispatch.enabled(schedule=schedule):
        query, key = (with_rows(mesh, n, (1, 2, 16, 4), 2) for n in (8, 7))
        with pytest.raises(ContextParallelError, match="holds 7 keys, but .* it should hold 8"):
            flex_attention(query, key, key)
        whole = outline(mesh, (1, 2, 16, 4), (Replicate(),))
        for other in (query, whole):
            with pytest.raises(ContextParallelError, match="holds 7 query rows, but .* hold 8"):
                flex_attention(key, other, other)


def test_a_mask_of_another_rank_is_refused():
    """One whose rows of blocks are neither those of the whole sequence nor this rank's."""
    with fake_ranks(3) as mesh, cp_dispatch.enabled():
        x = [outline(mesh, (1, 1, 1000, 8))] * 3
        own = cp_dispatch.create_cp_block_mask(causal, None, None, 1000, 1000, mesh, BLOCK_SIZE=32)
        plan = cp_dispatch.explain_flex(*x, own)
        assert plan.handler == "cp_dispatch" and plan.rows_sent is None
    with fake_ranks(4) as mesh, cp_dispatch.enabled():
        x = [outline(mesh, (1, 1, 1000, 8))] * 3
        plan = cp_dispatch.explain_flex(*x, own)
        assert plan.handler == "refused" and "natural order, 1000 positions on 3" in str(plan)
        own.kv_num_blocks.add_(0)  # overwritten: it is unknown whose rows it has
        plan = cp_dispatch.explain_flex(*x, own)
        assert plan.handler == "refused" and "(rank 0 of 4)" in str(plan)


def test_own_rows_of_a_short_sequence_are_not_taken_for_the_whole_mask():
    """The rank has as many rows of blocks as the whole sequence, and gets one more."""
    whole = create_block_mask(causal, None, None, 8, 8, "cpu", BLOCK_SIZE=8)
    with fake_ranks(2, rank=1) as mesh, cp_dispatch.enabled():
        x = [outline(mesh, (1, 1, 8, 8))] * 3
        (cut,) = cp_dispatch.shard(mesh, [whole], [2])
        own = cp_dispatch.create_cp_block_mask(causal, None, None, 8, 8, mesh, BLOCK_SIZE=8)
        for mask in (cut, own):
            assert [n.size(2) for n in mask.as_tuple()[2:6] if n is not None] == [2] * 4
            assert cp_dispatch.explain_flex(*x, mask).rows_sent is None
        assert cp_dispatch.explain_flex(*x, whole).rows_sent is not None


def test_own_rows_must_match_mesh_lengths_and_layout():
    def refused(words, layout, B=None, mesh=None, length=64):
        with pytest.raises(ContextParallelError, match=words):
            cp_dispatch.create_cp_block_mask(causal, B, None, length, length, mesh, layout=layout)

    with fake_ranks(2) as mesh:
        refused("must be a DeviceMesh, got NoneType", None)
        refused("must be a balancer, None .* got 'head-tail'", "head-tail", mesh=mesh)
        for layout in (HeadTail(64, 4), HeadTail(32, 2)):
            refused("the mask is for 64 positions and the mesh has 2", layout, mesh=mesh)
        rows = PerDocumentHeadTail([[4, 60], [60, 4], [30, 34]], 2)
        refused("each of 3 batch rows, but the mask is for 2", rows, B=2, mesh=mesh)
        for batch in (None, 1, 3):
            own = cp_dispatch.create_cp_block_mask(causal, batch, None, 64, 64, mesh, layout=rows)
            assert own.kv_num_blocks.size(0) == 3


def test_own_rows_of_another_order_are_refused():
    """Before they are taken for other rows; and if a graph runs, before anything is sent."""
    layout, keys = HeadTail(64, 2), [torch.zeros(1, 1, 32, 8)] * 2
    same = PerDocumentHeadTail([[64]], 2)
    with fake_ranks(2) as mesh:
        x = [outline(mesh, (1, 1, 64, 8))] * 3
        group = ring_group_name(mesh, (0,))

        def made(layout):
            return cp_dispatch.create_cp_block_mask(
                causal, None, None, 64, 64, mesh, layout=layout, BLOCK_SIZE=8
            )

        whole = create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=8)
        cut = cp_dispatch.shard(mesh, [whole], [2], layout)[0]
        for given, called in ((None, layout), (layout, None), (cut, None)):
            own = cut if given is cut else made(given)
            with cp_dispatch.enabled(layout=called):
                plan = cp_dispatch.explain_flex(*x, own)
            assert plan.handler == "refused" and "the call's rows are of" in plan.reasons[0]
            arguments = (
                *own.as_tuple()[2:6], 64, 64, [8, 8], [0, 1, 0, 1], [2], 0, group,
                "" if called is None else called.text, True,
            )  # fmt: skip
            for op, gather, rest in (
                (OPS.flex_bring, False, (True, False)), (OPS.flex_bring, True, (True, False)),
                (OPS.flex_hop, False, (0, True, False)),
            ):  # fmt: skip
                with pytest.raises(ContextParallelError, match="the call's rows are of"):
                    op(*keys, *arguments, gather, *rest)
        for given, called in ((layout, layout), (layout, same), (None, None)):
            own = made(given)
            with cp_dispatch.enabled(layout=called):
                assert cp_dispatch.explain_flex(*x, own).handler == "cp_dispatch"


@pytest.mark.parametrize("window", [None, 9])
def test_own_rows_of_another_order_are_refused_by_graphs_that_send_no_keys(window):
    """Because all ranks have them. No other op of the graph reads the mask."""
    torch._dynamo.reset()
    layout, compiled = HeadTail(64, 2), torch.compile(flex_attention, backend="aot_eager")

    def mod(b, h, q, k):
        return q >= k if window is None else (q >= k) & (q - k < window)

    with fake_ranks(2, rank=1) as mesh, torch.no_grad():
        query = DTensor.from_local(torch.randn(1, 2, 32, 16), mesh, ROWS)
        key = DTensor.from_local(torch.randn(1, 2, 64, 16), mesh, [Replicate()])
        for called, made in ((layout, layout), (None, None), (None, layout), (layout, None)):
            own = cp_dispatch.create_cp_block_mask(
                mod, None, None, 64, 64, mesh, layout=made, BLOCK_SIZE=8
            )
            with cp_dispatch.enabled(layout=called):
                if called is made:
                    want = flex_attention(query, key, key, block_mask=own).to_local()
                    got = compiled(query, key, key, block_mask=own).to_local()
                    torch.testing.assert_close(got, want)
                    continue
                with pytest.raises(ContextParallelError, match="the call's rows are of"):
                    compiled(query, key, key, block_mask=own)


def test_explain_tells_what_torch_refuses():
    """Before torch calls the op, so on every rank alike."""
    with fake_ranks(2) as mesh, cp_dispatch.enabled():

        def said(query, key, mask=None):
            x = [outline(mesh, shape) for shape in (query, key, key)]
            plan = cp_dispatch.explain_flex(*x, mask)
            assert len(plan.reasons) == 1 or plan.handler == "cp_dispatch"
            with pytest.raises((ValueError, RuntimeError), match="Expect|block_mask was created"):
                flex_attention(*x, block_mask=mask, enable_gqa=query[1] != key[1])
            return f"{plan.handler}: {plan.reasons[0]}"

        shape = (2, 4, 64, 8)
        assert "head dims differ" in said(shape, (2, 4, 64, 16))
        assert "not a multiple" in said(shape, (2, 3, 64, 8))
        assert "batch rows" in said(shape, (1, 4, 64, 8), mask_of(64))
        for lengths in ((128, 128), (32, 64), (64, 128)):
            mask = create_block_mask(causal, None, None, *lengths, "cpu")
            assert "make it for these lengths" in said(shape, shape, mask)
        x = [outline(mesh, n) for n in (shape, (1, 4, 64, 8), (1, 4, 64, 8))]
        assert cp_dispatch.explain_flex(*x, mask_of(64, batch=2)).handler == "cp_dispatch"


def test_explain_tells_what_moves():
    with fake_ranks(8) as mesh:
        x = [outline(mesh, (1, 2, 4096, 16))] * 3
        mask = create_block_mask(
            lambda b, h, q, k: (q >= k) & (q - k < 128), None, None, 4096, 4096, "cpu"
        )
        off = cp_dispatch.explain_flex(*x, mask)
        assert off.handler == "stock" and "not enabled" in str(off)
        with cp_dispatch.enabled():
            plan = cp_dispatch.explain_flex(*x, mask)
            whole = cp_dispatch.explain_flex(*x)
        with cp_dispatch.enabled(schedule="gather"):
            gather = cp_dispatch.explain_flex(*x, mask)
        assert plan.schedule == "exchange" and plan.rows_sent == (128,) * 7 + (0,)
        assert plan.bytes_sent(0) == 128 * 2 * (16 + 16) * 4
        assert "rank    0 sends     128 rows" in str(plan)
        assert gather.schedule == "gather" and whole.rows_sent == gather.rows_sent
        assert gather.rows_sent == (7 * 512,) * 8
        assert plan.extra_bytes() == (4096 * plan.key_row_bytes, 2 * 4096 * plan.key_row_bytes)
    plain = cp_dispatch.explain_flex(*[torch.randn(1, 1, 8, 4)] * 3)
    assert plain.handler == "stock"


@pytest.mark.parametrize("length, rows", [(64, 32), (63, 32)])
def test_explain_of_shards_in_a_block(length, rows):
    mask = mask_of(length)
    plain = [torch.randn(1, 2, rows, 8) for _ in range(3)]
    with fake_ranks(2) as mesh:
        block = cp_dispatch.context_parallel(
            mesh, buffers=[mask], buffer_seq_dims=[0], balancer="head-tail"
        )
        with block:
            plan = cp_dispatch.explain_flex(*plain, mask)
            whole = cp_dispatch.explain_flex(*plain)
            no_buffer = cp_dispatch.explain_flex(*plain, mask_of(length))
            other = cp_dispatch.explain_flex(*plain, create_block_mask(
                causal, None, None, rows, rows, "cpu", BLOCK_SIZE=16))  # fmt: skip
        with cp_dispatch.context_parallel(mesh):
            no_order = cp_dispatch.explain_flex(*plain)
    assert plan.handler == "cp_dispatch" and plan.query_length == length
    assert plan.layout == HeadTail(length, 2) and "inside context_parallel over 2" in str(plan)
    assert whole.rows_sent == (32, length - 32)
    assert no_buffer.handler == "cp_dispatch" and "refuses this block_mask" in str(no_buffer)
    assert not any("refuses this block_mask" in str(x) for x in (plan, whole))
    assert other.handler == "refused" and "as one of the buffers" in str(other)
    assert no_order.handler == "refused" and "order of the shards is" in str(no_order)


@pytest.mark.parametrize("lengths", [(6, 8), (8, 6), (8, 16)])
def test_queries_and_keys_in_different_orders_are_refused_in_a_block(lengths):
    """Keys in head-tail order were taken as in natural order if the queries were."""
    whole = [torch.randn(1, 2, n, 8) for n in (lengths[0], lengths[1], lengths[1])]
    mask, own = (
        create_block_mask(causal, None, None, *lengths, "cpu", BLOCK_SIZE=4) for _ in range(2)
    )
    with fake_ranks(2) as mesh:
        style = cp_dispatch.ContextParallel(attention_type="flex")
        module = parallelize_module(Attend(), mesh, style)
        with (
            pytest.warns(match="cut it to the sequence"),
            cp_dispatch.context_parallel(
                mesh, buffers=[*whole, own], buffer_seq_dims=[2] * 3 + [0]
            ),
        ):
            assert cp_dispatch.explain_flex(*whole, own).handler == "refused"
            for call, given in ((flex_attention, own), (module, mask)):
                order = "natural" if lengths[0] == 6 else "HeadTail"
                words = f"{lengths[0]} queries are in the order {order}"
                with pytest.raises(ContextParallelError, match=words):
                    call(*whole, block_mask=given)


def test_a_plain_parameter_in_a_style_is_explained():
    """Such as the sinks of GPT-OSS, which rescale the output."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, query, key, value, block_mask):
            return flex_attention(query * self.scale, key, value, block_mask=block_mask)

    own = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    with fake_ranks(2) as mesh:
        module = parallelize_module(
            Scaled(), mesh, cp_dispatch.ContextParallel(attention_type="flex", balancer=None)
        )
        words = "runs Scaled on DTensors.* stay plain"
        with gradients_on_cpu(), pytest.raises(ContextParallelError, match=words):
            module(*own, mask_of(16))


def test_explain_in_a_layout_of_each_batch_row():
    """In such a layout a row is of one batch row: each rank sends its 8 positions of both."""
    with (
        fake_ranks(2) as mesh,
        cp_dispatch.enabled(layout=PerDocumentHeadTail([[7, 9], [9, 7]], 2)),
    ):
        plan = cp_dispatch.explain_flex(*[outline(mesh, (2, 1, 16, 8))] * 3)
        assert plan.rows_sent == (16, 16)
        assert plan.bytes_sent(0) == 8 * plan.key_row_bytes == 8 * 2 * (8 + 8) * 4
        assert "sends      16 rows of keys, 0.001 MiB" in str(plan)


def test_explain_tells_groups():
    """By lengths, heads and the setting alone. The sizes are those of 32,768 rows of 32 heads, with
    fewer rows and more heads instead."""
    shapes = [(1, heads, 4096, 128) for heads in (1024, 256, 256)]
    mask = create_block_mask(causal, None, None, 4096, 4096, "cpu")
    with fake_ranks(4) as mesh:
        x = [outline(mesh, shape) for shape in shapes]

        reasons = []

        def groups(schedule="auto", layout=None, mask=mask, tensors=x) -> int:
            with cp_dispatch.enabled(schedule=schedule, layout=layout):
                plan = cp_dispatch.explain_flex(*tensors, mask)
            assert (f"{plan.groups} groups of key heads" in str(plan)) == (plan.groups > 1)
            reasons.append(str(plan))
            return plan.groups

        layout = HeadTail(4096, 4)
        assert groups() == 1, "who knows what a mask in natural order will hold"
        assert "natural order it is assumed to be a window or short documents" in reasons[-1]
        assert groups(layout=layout) == groups(schedule="gather") == groups(mask=None) == 4
        assert groups(schedule="ring", layout=layout) == 1
        few = [x[0], *(outline(mesh, (1, 2, 4096, n)) for n in (128, 1024))]
        assert groups(layout=layout, tensors=few) == 2
        short = [outline(mesh, (1, n, 1024, 128)) for n in (1024, 256, 256)]
        small = create_block_mask(causal, None, None, 1024, 1024, "cpu")
        assert groups(layout=HeadTail(1024, 4), mask=small, tensors=short) == 1
        assert "too few rows, key heads or bytes" in reasons[-1]
        whole = (Replicate(),)
        keys = [x[0], *(outline(mesh, shape, whole) for shape in shapes[1:])]
        assert groups(layout=layout, tensors=keys) == 1, "they are there"


def test_explain_of_a_ring():
    with fake_ranks(2) as mesh, cp_dispatch.enabled(schedule="natural_ring"):
        plan = cp_dispatch.explain_flex(*[outline(mesh, SHAPE)] * 3, mask_of(64))
        assert plan.schedule == "ring" and plan.rows_sent == (32, 32)
        assert plan.extra_bytes() == (64 * plan.key_row_bytes, 3 * 64 * plan.key_row_bytes)
        odd = [outline(mesh, (2, 1, 64, 8), (Shard(1),))] * 3
        assert cp_dispatch.explain_flex(*odd).schedule == "local"
    with fake_ranks(4) as mesh, cp_dispatch.enabled(schedule="ring"):
        plan = cp_dispatch.explain_flex(*[outline(mesh, (1, 1, 5, 8))] * 3)
        assert plan.schedule == "exchange" and "because some rank has no rows" in str(plan)
    with fake_ranks(2, 2, names=("a", "b")) as mesh, cp_dispatch.enabled(schedule="ring"):
        for batch, heads, dim in ((1, 2, 0), (2, 1, 1), (2, 2, 0)):
            x = outline(mesh, (batch, heads, 64, 8), (Shard(2), Shard(dim)))
            plan = cp_dispatch.explain_flex(x, x, x)
            some_has_none = batch == 1 or heads == 1
            assert plan.schedule == ("exchange" if some_has_none else "ring")
            assert ("some rank has no batch row or head" in str(plan)) == some_has_none


def test_auto_is_a_ring_where_memory_asks_for_it():
    """From 8 GiB of keys and values on, by lengths and layout alone."""
    with fake_ranks(64) as mesh:

        def plan(length: int, layout=None):
            with cp_dispatch.enabled(layout=layout):
                return cp_dispatch.explain_flex(*[outline(mesh, (1, 8, length, 128))] * 3)

        half = 2**19  # 8 KiB per position
        assert plan(2 * half).schedule == "exchange"
        assert plan(2 * half + 64).schedule == "ring"
        assert "8.0 GiB of keys and values are too much" in str(plan(2 * half + 64))
        length = 2 * half + 1024
        assert plan(length, HeadTail(length, 64)).schedule == "ring"
        documents = plan(length, PerDocumentHeadTail([length // 8] * 8, 64))
        assert documents.schedule == "exchange" and "no ring, because some rank" in str(documents)


def test_local_rows_to_positions():
    spans = (Span(4, 3), Span(20, 2))
    place = pieces(spans)
    assert place == Pieces((0, 3), (4, 17))
    rows = torch.arange(5)
    assert place(rows).tolist() == [4, 5, 6, 20, 21]
    many = tuple(Span(10 * i, 1) for i in range(17))
    assert pieces(many[:16])(torch.arange(16)).tolist() == list(range(0, 160, 10))
    assert pieces(many) is None
    assert pieces(()) == Pieces((0,), (0,))


def test_mods_with_a_table_take_it_last():
    table = torch.tensor([[5, 6], [7, 8]])
    place = Place(1, 2, None, table_lanes=2)
    b, h, row, k = (torch.tensor(i) for i in (1, 0, 1, 3))
    seen = place.mask_mod(lambda *args: args)(b, h, row, k, "mine", table)
    assert [int(x) for x in seen[:4]] == [2, 2, 8, 3] and seen[4:] == ("mine",)
    grads = place.joint_graph(lambda *args: [args[0], None, None, None, None, "dmine"])(
        torch.tensor(0.5), b, h, row, k, torch.tensor(1.0), "mine", table
    )
    assert grads[5:] == ["dmine", None]
    assert Place().is_identity and not place.is_identity
    mod = object()
    assert Place().mask_mod(mod) is mod
