"""Eager calls that repeat an earlier one: the same bits as the first, without the op, and only if
nothing has changed."""

from __future__ import annotations

import gc
import threading
import types
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cp_dispatch
from cp_dispatch import dispatch, fast_path, kernels
from cp_dispatch.kernels import Repeated
from tests.distributed.reference import Problem
from tests.distributed.sharded import distribute, run_sharded
from tests.distributed.threads import run_threads
from tests.ranks import one_rank

BASE = {"batch": 2, "length": 128, "dim": 16}
CAUSAL = Problem(**BASE, causal=True)
ROWS, WHOLE = (Shard(2),), (Replicate(),)
HEAD_TAIL = cp_dispatch.HeadTail(128, 4)


def counted(monkeypatch) -> list:
    """Count how often a call went through DTensor's dispatch to an op, forward or backward."""
    calls = []
    for module, name in ((dispatch, "forward_op"), (fast_path, "backward_op")):
        real = getattr(module, name)

        def count(backend, real=real, name=name):
            calls.append(name)
            return real(backend)

        monkeypatch.setattr(module, name, count)
    return calls


def on_ranks(function, ranks: int = 4, shape=None, names=None):
    def body(rank: int):
        return function(init_device_mesh("cpu", shape or (ranks,), mesh_dim_names=names))

    return run_threads(ranks, body)


@pytest.mark.parametrize(
    "problem, options, placements",
    [
        (CAUSAL, {}, {}),
        (CAUSAL, {"schedule": "natural_ring"}, {}),
        (CAUSAL, {"schedule": "mirrored_ring"}, {}),
        (CAUSAL, {"schedule": "gather"}, {}),
        (CAUSAL, {"schedule": "gather", "layout": HEAD_TAIL}, {}),
        (CAUSAL, {"layout": HEAD_TAIL}, {}),
        (Problem(**BASE | {"length": 130}, causal=True), {}, {}),
        (Problem(**BASE | {"length": 3}), {}, {}),
        (Problem(**BASE, heads=8, key_heads=2), {}, {}),
        (Problem(**BASE, dtype=torch.bfloat16, scale=0.2), {}, {}),
        (Problem(**BASE, key_length=200), {}, {"key_placements": WHOLE}),
        (Problem(**BASE, key_length=200), {}, {"placements": WHOLE, "key_placements": ROWS}),
        (Problem(**BASE, heads=4), {}, {"placements": (Shard(1),)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("needs", [(True,) * 3, (True, False, False), (False,) * 3], ids=str)
def test_a_second_call_gives_the_same_bits(monkeypatch, problem, options, placements, needs):
    calls = counted(monkeypatch)
    tensors = problem.tensors()

    def body(mesh):
        first, again, third = (
            run_sharded(problem, tensors, mesh, needs=needs, **placements) for _ in range(3)
        )
        for a, b, c in zip(first, again, third, strict=True):
            assert (a is None and b is None) or (torch.equal(a, b) and torch.equal(a, c))

    with cp_dispatch.enabled(**options):
        on_ranks(body)
    assert calls.count("forward_op") >= 4
    # A rank's first call goes through DTensor's dispatch, and its backward through the op's own
    # autograd. The second call's backward is the first that takes the fast path.
    assert len(calls) == 4 + 4 * any(needs)


def test_inputs_that_are_redistributed_go_the_whole_way_again(monkeypatch):
    """The caller's shards are not those that the kernels of the first call got."""
    calls = counted(monkeypatch)
    tensors = CAUSAL.tensors()[:3]

    def body(mesh):
        rows, whole = ([distribute(x, mesh, how) for x in tensors] for how in (ROWS, WHOLE))
        want = attend(*rows).full_tensor()
        for query, key, value in ((*rows[:2], whole[2]), (rows[0], whole[1], rows[2])):
            for _ in range(3):
                assert torch.equal(attend(query, key, value).full_tensor(), want)

    with cp_dispatch.enabled():
        on_ranks(body)
    assert len(calls) == 4 * 7


def test_a_second_output_has_the_dtype_of_the_query_too():
    """Also if the op's own output has another one."""

    def body(mesh):
        tensors = inputs(mesh, Problem(**BASE, dtype=torch.bfloat16, causal=True), needs=False)[:3]
        first, again = (attend(*tensors) for _ in range(2))
        assert first.dtype is again.dtype is torch.bfloat16 and torch.equal(first, again)

    with sdpa_kernel(SDPBackend.MATH), cp_dispatch.enabled():
        on_ranks(body, 2)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("needs", [(True,) * 3, (False,) * 3], ids=str)
def test_a_second_call_of_other_ranks_than_four_is_as_right_as_the_first(lead, needs):
    """What the op got, four dims, was taken for what the caller gives."""
    problem = Problem(lead=lead, length=66, dim=16, causal=True)
    tensors = problem.tensors()
    where = (Shard(problem.sequence_dim),)

    def body(mesh):
        first, again = (run_sharded(problem, tensors, mesh, where, needs=needs) for _ in range(2))
        for a, b in zip(first, again, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)

    with cp_dispatch.enabled():
        on_ranks(body)


def inputs(mesh, problem=CAUSAL, needs=True, count=4):
    tensors = problem.tensors()[:count]
    return [
        distribute(x, mesh, ROWS).requires_grad_(needs and i < 3) for i, x in enumerate(tensors)
    ]


def attend(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def warm(mesh, **options):
    query, key, value, grad = inputs(mesh, **options)
    for _ in range(2):
        output = attend(query, key, value)
        if output.requires_grad:
            torch.autograd.grad(output, (query, key, value), grad)
    return query, key, value, grad


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_gradient_that_is_placed_otherwise(placement):
    def body(mesh):
        query, key, value, grad = warm(mesh)
        want = torch.autograd.grad(attend(query, key, value), (query, key, value), grad)
        other = grad.redistribute(placements=[placement])
        for _ in range(2):  # such a call is not taken for a known one either
            got = torch.autograd.grad(attend(query, key, value), (query, key, value), other)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.full_tensor(), b.full_tensor())

    with cp_dispatch.enabled():
        on_ranks(body)


def test_fewer_gradients_than_at_the_calls_before(monkeypatch):
    of_keys, real = [], fast_path.backward_op

    def backward_op(backend):
        return lambda *args: of_keys.append(args[-2]) or real(backend)(*args)

    monkeypatch.setattr(fast_path, "backward_op", backward_op)

    def body(mesh):
        query, key, value, grad = warm(mesh)
        want = torch.autograd.grad(attend(query, key, value), (query, key, value), grad)
        for inputs in ((0,), (1,), (2,), (0, 2)):
            own = [x if i in inputs else x.detach() for i, x in enumerate((query, key, value))]
            output = attend(*own)
            got = torch.autograd.grad(output, [own[i] for i in inputs], grad)
            assert all(torch.equal(x, want[i]) for x, i in zip(got, inputs, strict=True))

    with cp_dispatch.enabled():
        on_ranks(body, 2)
    assert of_keys.count(False) == 2, "of the query alone nothing has to be sent home"


def test_what_changes_a_plan_changes_the_call(monkeypatch):
    monkeypatch.setattr(fast_path, "_known", {})  # it drops everything when it is full
    calls = counted(monkeypatch)

    def body(mesh):
        query, key, value, _ = warm(mesh, needs=False)
        with sdpa_kernel(SDPBackend.MATH):
            attend(query, key, value)
        with cp_dispatch.enabled(schedule="gather"):
            attend(query, key, value)
        F.scaled_dot_product_attention(query, key, value)
        F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        for _ in range(2):  # the dropout mask is drawn anew
            F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.5)
        attend(query.detach().requires_grad_(), key, value)
        attend(*inputs(mesh, Problem(**BASE | {"length": 64}, causal=True), needs=False)[:3])
        other = DeviceMesh.from_group(dist.new_group([0]), "cpu")
        attend(*inputs(other, needs=False)[:3])
        attend(query, key, value)

    with cp_dispatch.enabled():
        on_ranks(body, 1)
    assert len(calls) == 11


@pytest.mark.parametrize("modes", [(False, True), (True, False)], ids=["before", "after"])
def test_validation_beside_training(modes):
    """What was learned without a graph makes none."""

    def body(mesh):
        inputs = [distribute(x, mesh, ROWS).requires_grad_() for x in CAUSAL.tensors()[:3]]
        for wanted in modes:
            with torch.set_grad_enabled(wanted):
                assert [attend(*inputs).requires_grad for _ in range(3)] == [wanted] * 3

    with cp_dispatch.enabled():
        on_ranks(body, 2)


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_one_input_that_needs_a_gradient_beside_none(alone):
    def body(mesh):
        whole = CAUSAL.tensors()[:3]
        for needs in (False, True):
            inputs = [
                distribute(x, mesh, ROWS).requires_grad_(needs and i == alone)
                for i, x in enumerate(whole)
            ]
            assert [attend(*inputs).requires_grad for _ in range(3)] == [needs] * 3

    with cp_dispatch.enabled():
        on_ranks(body, 2)


@pytest.mark.parametrize("groups, whole_ways", [("the same", 2), ("others", 4)])
def test_slices_of_a_mesh_are_one_and_meshes_of_other_groups_are_not(
    monkeypatch, groups, whole_ways
):
    calls = counted(monkeypatch)

    def body(mesh):
        for _ in range(2):
            if groups == "the same":
                part = mesh["cp"]
            else:
                part = DeviceMesh.from_group(dist.new_group([0]), "cpu", mesh_dim_names=("cp",))
            query, key, value, grad = inputs(part)
            for _ in range(2):
                torch.autograd.grad(attend(query, key, value), (query, key, value), grad)

    with cp_dispatch.enabled():
        on_ranks(body, 1, (1, 1), ("dp", "cp"))
    assert len(calls) == whole_ways


def test_calls_on_a_mesh_whose_groups_are_destroyed_are_forgotten():
    """They hold the mesh, the mesh its groups, and the groups their threads and sockets."""
    fast_path._known.clear()
    for _ in range(3):
        with one_rank() as mesh, cp_dispatch.enabled():
            warm(mesh, needs=False)
    assert len(fast_path._known) == 1


def test_watchers_see_the_op():
    def body(mesh):
        query, key, value, grad = warm(mesh)
        with FlopCounterMode(display=False) as counter:
            output = attend(query, key, value)
            torch.autograd.grad(output, (query, key, value), grad)
        output = attend(query, key, value)
        with FlopCounterMode(display=False) as backward:  # of a known forward
            torch.autograd.grad(output, (query, key, value), grad)
        return counter.get_total_flops(), backward.get_total_flops()

    one = 2 * 2 * 4 * 128 * 128 * 16
    with cp_dispatch.enabled():
        assert set(on_ranks(body, 2)) == {(7 * one, 5 * one)}


def test_other_tensors_inside_a_dtensor_go_the_whole_way():
    class Other(torch.Tensor):
        pass

    local = torch.ones(1, 2, 4, 8)
    with one_rank() as mesh, cp_dispatch.enabled():
        plain, other = (
            DTensor.from_local(x, mesh, ROWS) for x in (local, local.as_subclass(Other))
        )
        slots = [
            fast_path.slot(None, *tensors, True, None, False)
            for tensors in ((plain,) * 3, (plain, other, plain), (other, plain, plain))
        ]
    assert [x is None for x in slots] == [False, True, True]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("first, second", [(None, HEAD_TAIL), (HEAD_TAIL, None)])
def test_a_checkpoint_recomputed_in_another_order_raises(known, first, second):
    """Its gradients would be wrong: the backward belongs to the first forward, but the tensors do
    not."""
    fast_path._known.clear()

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query.sin(), key, value, is_causal=True)

    def body(mesh):
        leaves = [distribute(x, mesh, ROWS).requires_grad_() for x in CAUSAL.tensors()[:3]]
        for layout in (first, second) if known else ():
            with cp_dispatch.enabled(layout=layout):
                attend(*leaves)
        with cp_dispatch.enabled(layout=first):
            outs = [checkpoint(attend, *leaves, use_reentrant=False) for _ in range(2)]
        with cp_dispatch.enabled(layout=second):
            with pytest.raises(cp_dispatch.ContextParallelError, match="in a different order"):
                outs[0].sum().backward()
        with cp_dispatch.enabled(layout=first):
            outs[1].sum().backward()

    on_ranks(body)


def test_a_checkpoint_records_one_way_and_recomputes_the_other(monkeypatch):
    def body(mesh):
        query, key, value, grad = inputs(mesh)
        results = []
        for _ in range(2):  # records by the op, recomputes on the fast path; then both on it
            output = checkpoint(attend, query, key, value, use_reentrant=False)
            results.append(torch.autograd.grad(output, (query, key, value), grad))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())

    with cp_dispatch.enabled():
        on_ranks(body, 2)


def test_writing_into_what_was_saved_is_noticed():
    def body(mesh):
        query, key, value, grad = warm(mesh)
        for touch in (
            lambda out: out.mul_(2),
            lambda out: out.detach().mul_(2),
            lambda out: out.transpose(1, 2)[0].mul_(2),
            lambda out: key.detach().mul_(2),
        ):
            output = attend(query, key, value)
            later = output * 1.0
            with torch.no_grad():
                touch(output)
            del output
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(later, (query, key, value), grad)

    with cp_dispatch.enabled():
        on_ranks(body, 1)


def test_writing_into_a_plain_mask_is_noticed():
    """Gradients were silently those of the new mask."""

    def body(mesh):
        query, key, value, grad = warm(mesh)
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()

        def masked(query):
            return F.scaled_dot_product_attention(query, key, value, mask)

        output, again = masked(query), checkpoint(masked, query, use_reentrant=False)
        want = torch.autograd.grad(masked(query), query, grad)[0]
        mask.fill_(True)
        with pytest.raises(RuntimeError, match="attn_mask.* is at version 1; expected version 0"):
            torch.autograd.grad(output, query, grad)
        mask.tril_()  # a checkpoint uses the mask as it is in the backward
        got = torch.autograd.grad(again, query, grad)[0]
        assert torch.equal(got.to_local(), want.to_local())

    with cp_dispatch.enabled():
        on_ranks(body, 2)


@pytest.mark.parametrize("known", [False, True])
def test_writing_into_what_hooks_have_copied_is_fine(known):
    """A model that writes into the output raised at its second step, but not at its first."""
    fast_path._known.clear()

    def written(query, key, value):
        return attend(query, key, value).add_(1.0)

    def written_and_read(query, key, value):
        return written(query, key, value).sin()

    def body(mesh):
        *leaves, grad = warm(mesh)
        want = torch.autograd.grad(attend(*leaves), leaves, grad)
        if not known:
            fast_path._known.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            copied = written(*leaves)
        # The checkpoint recomputes up to what attention saves.
        for output in (copied, checkpoint(written, *leaves, use_reentrant=False)):
            for a, b in zip(torch.autograd.grad(output, leaves, grad), want, strict=True):
                assert torch.equal(a.to_local(), b.to_local())
        if not known:
            fast_path._known.clear()
        # Up to what sin() saves, which comes after the write into the output.
        output = checkpoint(written_and_read, *leaves, use_reentrant=False)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output, leaves, grad)

    with cp_dispatch.enabled():
        on_ranks(body, 2)


def test_what_remembers_calls_holds_no_indices_of_positions():
    """With long rows these take MiBs, and documents may have another layout at every step."""
    fast_path._known.clear()

    def indices_of_what_ran():
        layout = cp_dispatch.PerDocumentHeadTail([30, 98], 2)
        with cp_dispatch.enabled(layout=layout):
            on_ranks(warm, 2)
        return [weakref.ref(x) for x in (layout.indices, layout.inverse)]

    indices = indices_of_what_ran()
    gc.collect()
    assert fast_path._known and [x() for x in indices] == [None, None]


def test_a_second_derivative_is_refused():
    def body(mesh):
        query, key, value, grad = warm(mesh)
        output = attend(query, key, value)
        (dq,) = torch.autograd.grad(output, query, grad, create_graph=True)
        with pytest.raises(cp_dispatch.ContextParallelError, match="no second derivative"):
            dq.to_local().sum().backward()

    with cp_dispatch.enabled():
        on_ranks(body, 1)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_and_none_wanted():
    def body(mesh):
        query, key, value, grad = warm(mesh)
        output = attend(query, key, value)
        assert output.requires_grad and not attend(query.detach(), key.detach(), value).is_leaf
        with torch.no_grad():
            assert not attend(query, key, value).requires_grad
        with torch.inference_mode():
            first, again = attend(query, key, value), attend(query, key, value)
            assert again.is_inference() and first.is_inference()
            assert torch.equal(first.to_local(), again.to_local())
        assert torch.equal(output.detach().to_local(), again.to_local().clone())
        (dv,) = torch.autograd.grad(output, value, grad)
        assert isinstance(dv, DTensor)
        # The function after attention returns no gradient for it.
        after = NoGradient.apply(attend(query, key, value))
        grads = torch.autograd.grad(after, (query, key, value), grad, allow_unused=True)
        assert grads == (None, None, None)

    with cp_dispatch.enabled():
        on_ranks(body, 2)


def test_equal_meshes_do_not_share(monkeypatch):
    """Each mesh has its own groups. A call on one mesh must not wait in the groups of the other."""
    thread = threading.local()
    forward = Repeated.forward

    def seen(self, *tensors):
        results = forward(self, *tensors)
        thread.seen.append(self._ways[False][0].ring.group)
        return results

    monkeypatch.setattr(Repeated, "forward", seen)

    def body(mesh):
        other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"]
        for own in (mesh, other):
            query, key, value, _ = inputs(own, needs=False)
            thread.seen = []
            for _ in range(3):
                attend(query, key, value)
            assert len(thread.seen) == 2
            assert all(group is own.get_group() for group in thread.seen)

    with cp_dispatch.enabled(schedule="natural_ring"):
        on_ranks(body, 2)


def test_after_an_error_no_job_of_an_earlier_group_answers(monkeypatch):
    """Names of groups repeat. What could not be looked up for the new group is looked up again."""
    found = types.SimpleNamespace(group="first")

    def job_of(*_, backward):
        if found.group == "broken":
            raise RuntimeError("no communicator")
        return types.SimpleNamespace(group=found.group, ring=None), None

    monkeypatch.setattr(kernels, "resolve_group", lambda name: found.group)
    monkeypatch.setattr(kernels, "job_of", job_of)
    sizes = (1.0, 8, 8, "ring", [2])
    repeated = Repeated(None, (None, None, 0.0, [0, 0, 1], True, *sizes, "name", "", "rows"))
    repeated._find(torch.zeros(1), False)
    assert repeated._ways[False][0].group == "first"
    found.group = "broken"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no communicator"):
            repeated._find(torch.zeros(1), False)
    found.group = "second"
    repeated._find(torch.zeros(1), False)
    assert repeated._ways[False][0].group == "second"
