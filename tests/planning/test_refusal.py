"""Every reason to refuse a call, what the message says to do, and that no reason is left out."""

import ast
import contextlib
import inspect
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.tensor import Partial, Shard, distribute_tensor

from cp_dispatch import ContextParallelError, HeadTail, enabled, explain
from cp_dispatch.planning import refusal
from tests.ranks import SEQUENCE, fake_ranks, outline
from tests.refusal_cases import KEY, ONE_DIM, TWO_DIMS, R, arguments


def assert_refused(call: dict, expected) -> None:
    """All the expected reasons, in order, and no others, in the plan and in the error."""
    with enabled():
        plan = explain(**call)
        # The override does not get tensors of other devices.
        if call["query"].device.type == "cpu":
            with pytest.raises(ContextParallelError) as raised:
                F.scaled_dot_product_attention(**call)
            assert str(raised.value) == str(plan)
    assert plan.handler == "refused"
    assert len(plan.reasons) == len(expected), plan.reasons
    for reason, (what, to_do) in zip(plan.reasons, expected, strict=True):
        assert what in reason and to_do in reason
        assert reason in str(plan)


@pytest.mark.parametrize("case", ONE_DIM)
def test_one_mesh_dim(case):
    with fake_ranks(4) as mesh:
        build, expected = ONE_DIM[case]
        assert_refused(build(mesh), expected)


@pytest.mark.parametrize("case", TWO_DIMS)
def test_two_mesh_dims(case):
    with fake_ranks(2, 2, names=("cp", "tp")) as mesh:
        build, expected = TWO_DIMS[case]
        assert_refused(build(mesh), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plain_bias_is_fine_where_no_gradient_is_wanted(mode):
    bias = torch.ones(1, 1, 64, 64, requires_grad=True)
    with fake_ranks(4) as mesh, enabled(), mode():
        assert explain(**arguments(mesh, attn_mask=bias)).handler == "cp_dispatch"


def test_a_plain_bias_with_a_tangent():
    """Forward-mode AD: the mask is detached to be a DTensor, and would lose the tangent."""
    bias = torch.ones(1, 1, 64, 64)
    with fake_ranks(4) as mesh, forward_ad.dual_level():
        dual = forward_ad.make_dual(bias, bias.clone())
        _, expected = ONE_DIM["plain bias with a gradient"]
        assert_refused(arguments(mesh, attn_mask=dual), expected)


def test_layouts_over_two_mesh_dims():
    """Shards of shards may differ from the layout's, and a tensor that is whole over one dim would
    be cut in true order there."""
    rows, part = (Shard(2), Shard(2)), (Shard(2), R)
    with fake_ranks(2, 2, names=("a", "b")) as mesh, enabled(layout=HeadTail(10, 4)):
        plan = explain(*[outline(mesh, (2, 2, 10, 16), rows)] * 3, is_causal=True)
        assert plan.handler == "refused"
        assert "mesh dims of sizes [2, 2] gives the ranks (3, 2, 3, 2)" in plan.reasons[0]
    with fake_ranks(2, 2, names=("a", "b")) as mesh, enabled(layout=HeadTail(16, 4)):
        whole, key = (outline(mesh, (2, 2, 16, 16), places) for places in (rows, part))
        assert explain(whole, whole, whole, is_causal=True).handler == "cp_dispatch"
        plan = explain(whole, key, whole, is_causal=True)
        assert plan.handler == "refused" and plan.reasons[0].startswith("key has placements")


def test_whole_keys_of_another_length_than_the_layout_have_an_order():
    with fake_ranks(4) as mesh, enabled(layout=HeadTail(64, 4)):
        query = outline(mesh, (2, 2, 64, 16))
        for length, handler in ((32, "cp_dispatch"), (64, "refused")):
            key = outline(mesh, (2, 2, length, 16), (R,))
            mask = torch.ones(64, length, dtype=torch.bool)
            assert explain(query, key, key, mask).handler == handler
        # The mask is the same for all keys, so their order does not matter.
        assert explain(query, key, key, mask[:, :1]).handler == "cp_dispatch"
        assert explain(query, key, key, mask[:1]).handler == "refused"


def test_a_mask_without_dims_beside_a_layout():
    with fake_ranks(4) as mesh, enabled(layout=HeadTail(64, 4)):
        plan = explain(**arguments(mesh, placements=(R,), attn_mask=torch.ones(())))
    assert plan.handler == "refused" and "does not broadcast" in str(plan)


def test_the_call_that_the_cases_change_is_fine():
    for shape, names, placements in (
        ((4,), ("cp",), SEQUENCE),
        ((2, 2), ("cp", "tp"), (Shard(2), Shard(1))),
    ):
        with fake_ranks(*shape, names=names) as mesh, enabled():
            assert explain(**arguments(mesh, placements=placements)).handler == "cp_dispatch"


@pytest.mark.parametrize(
    "query, keys, schedule",
    [
        (SEQUENCE, SEQUENCE, "ring"),
        (SEQUENCE, (Partial(),), "ring"),
        (SEQUENCE, (R,), "replicated_keys"),
        ((R,), SEQUENCE, "replicated_queries"),
        ((Partial(),), SEQUENCE, "replicated_queries"),
    ],
)
def test_placements_that_dtensor_can_make_fit_are_taken(query, keys, schedule):
    with fake_ranks(4) as mesh, enabled():
        plan = explain(**arguments(mesh, placements=query, key_placements=keys))
    assert (plan.handler, plan.schedule) == ("cp_dispatch", schedule)


@pytest.mark.parametrize(
    "change",
    [
        {"query": (2, 8, 0, 16)},
        {"query": (0, 8, 64, 16), "key": (0, 2, 64, 16)},
        {"query": (2, 8, 64, 16), "key": (2, 2, 0, 16)},
        {"query": (2, 8, 1, 16)},
        {"query": (2, 8, 3, 16), "key": (2, 2, 2, 16)},
        {"value": (2, 2, 64, 24)},
        {"query": (2, 5, 64, 16), "key": (2, 1, 64, 16), "enable_gqa": False},
        {"dropout_p": 0.0}, {"dropout_p": 1.0},
        {"attn_mask": torch.ones(64, 64)},
        {"attn_mask": torch.ones(8, 64, 64, dtype=torch.bool)},
        {"attn_mask": torch.ones(2, 1, 1, 64)},
        {"dtype": torch.bfloat16, "attn_mask": torch.ones(1, 1, dtype=torch.bfloat16)},
        {"dtype": torch.bfloat16, "attn_mask": torch.ones(1, 1)},
    ],
)  # fmt: skip
def test_what_one_device_takes_is_taken(change):
    with fake_ranks(4) as mesh, enabled():
        assert explain(**arguments(mesh, **change)).handler == "cp_dispatch"


@pytest.mark.parametrize("placements", [(Shard(0),), (R,)])
@pytest.mark.parametrize(
    "case", ["mask and causal", "dropout above 1", "integers", "batch sizes", "enable_gqa"]
)
def test_unsharded_sequences_are_checked_too_on_cpu(case, placements):
    """On CPU, stock DTensor has no rule to fall back on."""
    build, expected = ONE_DIM[case]
    with fake_ranks(4) as mesh:
        call = build(mesh)
        for name in ("query", "key", "value"):
            call[name] = outline(mesh, call[name].shape, placements, call[name].dtype)
        assert_refused(call, expected)


@pytest.mark.parametrize(
    "lead, query, key, words",
    [
        ((2,), 1, 0, "key is S(0) on cp, where query is S(1); redistribute it to S(1) or"),
        ((2,), 2, 1, "query is S(2) on cp; supported are Shard(0), Shard(1), Replicate()"),
        ((), 1, 0, "query is S(1) on cp; supported are Shard(0), Replicate()"),
        ((2, 2, 8), 2, 3, "redistribute it to S(2) or Replicate()"),
        ((2, 2, 8), 4, 3, "supported are Shard(0), Shard(2), Shard(3), Replicate()"),
    ],
)
def test_other_numbers_of_dims_are_named_as_given(lead, query, key, words):
    whole = torch.zeros(*lead, 64, 16)  # with data, because batch dims are flattened
    with fake_ranks(4) as mesh, enabled():
        tensors = (distribute_tensor(whole, mesh, [Shard(dim)]) for dim in (query, key, key))
        plan = explain(*tensors)
    assert plan.handler == "refused" and words in plan.reasons[0], plan


def test_a_mask_that_is_sharded_on_another_batch_dim_than_the_first():
    with fake_ranks(2) as mesh, enabled():
        tensors = [distribute_tensor(torch.zeros(2, 4, 4, 8, 8), mesh, [Shard(3)])] * 3
        for dim, handler in ((0, "cp_dispatch"), (1, "refused")):
            mask = distribute_tensor(torch.zeros(2, 4, 1, 8, 8), mesh, [Shard(dim)])
            plan = explain(*tensors, mask)
            assert plan.handler == handler, plan
    # Torch 2.11 does not flatten it.
    (reason,) = plan.reasons
    words = "only the first may be sharded", "attn_mask must have shape"
    assert any(x in reason for x in words), reason


def test_several_reasons_at_once():
    with fake_ranks(4) as mesh:
        call = arguments(
            mesh, query=(3, 7, 64, 32), key_placements=(Shard(1),),
            attn_mask=torch.ones(32, 64, dtype=torch.int64), dropout_p=2.0, is_causal=True,
        )  # fmt: skip
        assert_refused(
            call,
            [
                ("dropout_p must be in [0, 1], got 2.0", ""),
                *ONE_DIM["mask and causal"][1],
                *ONE_DIM["integer mask"][1],
                ("attn_mask [1, 1, 32, 64] does not broadcast", "[3, 7, 64, 64]"),
                ONE_DIM["batch sizes"][1][0],
                ONE_DIM["head dims"][1][0],
                ONE_DIM["head groups"][1][0],
                *ONE_DIM["key by heads"][1],
            ],
        )


def test_a_mask_alone_may_be_the_dtensor():
    with fake_ranks(4) as mesh:
        plain = torch.ones(KEY)
        call = {"query": plain, "key": plain, "value": plain}
        call["attn_mask"] = outline(mesh, (64, 64), (R,))
        assert_refused(call, [(f"{x} is a Tensor", "DTensor") for x in ("query", "key", "value")])


def lines_of_reasons() -> set[int]:
    """The lines in which refusal.py adds a reason."""
    lines = set()
    for node in ast.walk(ast.parse(inspect.getsource(refusal))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "append":
                lines.add(node.lineno)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.ListComp):
            lines.add(node.lineno)
    return lines


def test_the_cases_above_reach_every_reason():
    reached = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename == refusal.__file__:
            reached.add(frame.f_lineno)
            return trace
        return None

    before = sys.gettrace()
    for shape, names, cases in (((4,), ("cp",), ONE_DIM), ((2, 2), ("cp", "tp"), TWO_DIMS)):
        with fake_ranks(*shape, names=names) as mesh, enabled():
            for build, _ in cases.values():
                call = build(mesh)
                with contextlib.ExitStack() as stack:
                    stack.callback(sys.settrace, before)
                    sys.settrace(trace)
                    explain(**call)
    assert len(lines_of_reasons()) > 10
    assert lines_of_reasons() <= reached
