"""``varlen_attn`` on plain shards inside ``context_parallel``."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from cp_dispatch import (
    BlockBalanced,
    ContextParallel,
    ContextParallelError,
    HeadTail,
    PerDocumentHeadTail,
    context_parallel,
    context_parallel_unshard,
)
from cp_dispatch.varlen.ops import FORWARD
from tests.distributed.threads import run_threads
from tests.varlen.problems import ROWS, VarlenProblem, check, exact, one_device, run_in_block

BASE = VarlenProblem(key_heads=2)
ODD = VarlenProblem((5, 20, 1, 9, 12), key_heads=2)  # 47 positions


def on_mesh(ranks: int, body):
    return run_threads(ranks, lambda rank: body(init_device_mesh("cpu", (ranks,))))


def blocks(lengths, ranks: int):
    return BlockBalanced.from_documents(list(lengths), ranks, block_size=4, near=True)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0), (2, 4)], ids=str)
def test_orders(ranks, window):
    problem = VarlenProblem(key_heads=2, window=window)
    want, single = exact(problem), one_device(problem)
    orders = (
        "auto", None, "head-tail", PerDocumentHeadTail(list(problem.lengths), ranks),
        blocks(problem.lengths, ranks),
    )  # fmt: skip

    def body(mesh):
        for order in orders:
            check(run_in_block(problem, mesh, order), want, single)

    on_mesh(ranks, body)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_uneven_shards(ranks):
    want, single = exact(ODD), one_device(ODD)

    def body(mesh):
        for order in ("auto", None, HeadTail(47, ranks)):
            check(run_in_block(ODD, mesh, order), want, single)

    on_mesh(ranks, body)


def test_keys_of_another_length():
    problem = VarlenProblem((8, 0, 24), (8, 16, 40))

    def body(mesh):
        check(run_in_block(problem, mesh, None), exact(problem), one_device(problem))
        with pytest.raises(ContextParallelError, match="32 queries and 64 keys are in different"):
            run_in_block(problem, mesh)

    on_mesh(2, body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    want = exact(BASE)["output"].float()

    def body(mesh):
        inputs = BASE.tensors()[:3]
        with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[0] * 3), mode():
            out, _ = BASE.attend(*inputs, BASE.starts())
            (whole,) = context_parallel_unshard(mesh, [out], [0])
        torch.testing.assert_close(whole, want)

    on_mesh(2, body)


def test_the_backward_may_run_after_the_block():
    want = exact(BASE)

    def body(mesh):
        *inputs, grad = BASE.tensors()
        with context_parallel(mesh, buffers=[*inputs, grad], buffer_seq_dims=[0] * 4):
            leaves = [x.clone().requires_grad_() for x in inputs]
            own = grad.clone()
            out, _ = BASE.attend(*leaves, BASE.starts())
        return context_parallel_unshard(mesh, torch.autograd.grad(out, leaves, own), [0] * 3)

    for found in on_mesh(2, body):
        for name, got in zip(("dQ", "dK", "dV"), found, strict=True):
            torch.testing.assert_close(got, want[name].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_inside_the_block(reentrant):
    want = exact(BASE)

    def body(mesh):
        *inputs, grad = BASE.tensors()
        with context_parallel(mesh, buffers=[*inputs, grad], buffer_seq_dims=[0] * 4):
            leaves = [x.clone().requires_grad_() for x in inputs]

            def attend(*tensors):
                return BASE.attend(*tensors, BASE.starts())[0]

            for inside in (True, False):
                out = checkpoint(attend, *leaves, use_reentrant=reentrant)
                if inside:
                    out.backward(own := grad.clone())
        with pytest.raises(ContextParallelError, match="is recomputed outside"):
            out.backward(own)
        return context_parallel_unshard(mesh, [x.grad for x in leaves], [0] * 3)

    for found in on_mesh(2, body):
        for name, got in zip(("dQ", "dK", "dV"), found, strict=True):
            torch.testing.assert_close(got, want[name].float(), rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    def forward(self, query, key, value, *, starts):
        return varlen_attn(query, key, value, starts, starts, 20, 20, window_size=(-1, 0))


def test_modules_in_the_style():
    """As torchtitan's: plain shards, or DTensors."""
    problem = VarlenProblem()
    want, (starts, _) = exact(problem)["output"].float(), problem.starts()

    def body(mesh):
        inputs = problem.tensors()[:3]
        for order in (None, "head-tail"):
            layout = None if order is None else HeadTail(48, 2)
            shards = cp_dispatch.shard(mesh, inputs, 0, layout)
            style = ContextParallel(seq_dim=0, balancer=order)
            module = parallelize_module(Attention(), mesh, style)
            wrapped = [DTensor.from_local(x, mesh, ROWS) for x in shards]
            outputs = module(*shards, starts=starts), module(*wrapped, starts=starts).to_local()
            for out in outputs:
                torch.testing.assert_close(cp_dispatch.unshard(mesh, out, 0, layout), want)

    on_mesh(2, body)


def test_one_rank_is_torchs():
    def body(mesh):
        with context_parallel(mesh, balancer=None):
            with pytest.raises(NotImplementedError) as found:  # no kernel for CPU
                BASE.attend(*BASE.tensors()[:3], BASE.starts())
            assert not isinstance(found.value, ContextParallelError)

    on_mesh(1, body)


LOCAL = torch.tensor([0, 5, 24], dtype=torch.int32)
REFUSED = {
    "lengths of a shard": ("ends at 24, but the shards of all ranks are 48", {
        "starts": [LOCAL] * 2}),
    "int64": ("cu_seq_q must be int32", {"starts": [x.long() for x in BASE.starts()]}),
    "no buffers": ("without buffers the order of the shards is unknown", {"buffers": False}),
    "four dims": ("query must have shape \\[L, H, D\\], got \\[1, 24, 4, 8\\]", {
        "shards": lambda x: x[None]}),
    "longer values": ("same length, got 24 and 48 rows", {
        "value": lambda x: torch.cat([x, x])}),
    "num_splits": ("num_splits is 2; pass 1", {"num_splits": 2}),
}  # fmt: skip


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, debug, monkeypatch):
    """On all ranks; explain tells them too."""
    reason, given = REFUSED[case]
    if debug:
        monkeypatch.setenv("CP_DISPATCH_DEBUG", "1")
    if "num_splits" in given and "num_splits" not in varlen_attn.__annotations__:
        pytest.skip("this torch has no num_splits")

    def body(mesh):
        with contextlib.ExitStack() as stack:
            shards = [x.chunk(2)[mesh.get_local_rank()] for x in VarlenProblem().tensors()[:3]]
            around = {"buffers": [torch.zeros(48)], "buffer_seq_dims": [0]}
            stack.enter_context(context_parallel(mesh, **around if given.get("buffers", 1) else {}))
            starts = given.get("starts", BASE.starts())
            shards = list(map(given.get("shards", lambda x: x), shards))
            shards[2] = given.get("value", lambda x: x)(shards[2])
            if "num_splits" not in given:
                plan = cp_dispatch.explain_varlen(*shards, *starts)
                assert plan.handler == "refused"
                assert "as this rank's shards inside context_parallel over 2 ranks" in str(plan)
            more = {k: v for k, v in given.items() if k == "num_splits"}
            with pytest.raises(ContextParallelError, match=reason):
                varlen_attn(*shards, *starts, 20, 20, **more)

    on_mesh(2, body)


def test_transforms_and_tangents_are_refused():
    """The op has no rule for them; it would return results without tangents."""
    problem = VarlenProblem()

    def body(mesh):
        query, *others = (x[:24] for x in problem.tensors()[:3])

        def attend(query):
            return problem.attend(query, *others, problem.starts())[0]

        with context_parallel(mesh, balancer=None):
            with pytest.raises(ContextParallelError, match="forward-mode AD is on"):
                attend(forward_ad.make_dual(query, query))
            with pytest.raises(ContextParallelError, match="torch.func transforms"):
                torch.func.vjp(attend, query)

    with forward_ad.dual_level():  # of the process
        on_mesh(2, body)


def test_ops_refuse_tangents():
    """Compiled graphs call them with whatever the graph is given."""
    problem = VarlenProblem()
    query, key, value, _ = problem.tensors()
    options = [-1, 0], None, 48, 48, False, None, [], 0, "", ""
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        FORWARD(forward_ad.make_dual(query, query), key, value, *problem.starts(), *options)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no such variant")
def test_out_variant_is_refused():
    def body(mesh):
        inputs = VarlenProblem().tensors()[:3]
        with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[0] * 3), torch.no_grad():
            with pytest.raises(ContextParallelError, match="not supported on shards"):
                varlen.varlen_attn_out(torch.empty_like(inputs[0]), *inputs, *BASE.starts(), 20, 20)

    on_mesh(2, body)


def test_shards_of_other_lengths_are_refused_on_all_ranks():
    """Where a length is not divisible, ranks tell each other how many rows they hold."""

    def body(mesh):
        rows = (20, 27)[mesh.get_local_rank()]
        shards = [torch.zeros(rows, 4, 8) for _ in range(3)]
        (starts, _) = ODD.starts()
        with (
            context_parallel(mesh, buffers=[torch.zeros(47)], buffer_seq_dims=[0], balancer=None),
            pytest.raises(ContextParallelError, match="the ranks hold .20, 27. rows"),
        ):
            varlen_attn(*shards, starts, starts, 20, 20)

    on_mesh(2, body)


def test_a_graph_made_outside_has_no_backward_inside():
    """Of another maker than torch.compile, whose graphs are guarded."""

    def body(mesh):
        *inputs, grad = BASE.tensors()
        (starts, _) = BASE.starts()
        rest = 20, 20, False, None, [-1, 0]
        attend = torch.ops.torch_attn._varlen_attn
        backward = torch.ops.torch_attn._varlen_attn_backward
        with context_parallel(mesh, buffers=[*inputs, grad], buffer_seq_dims=[0] * 4):
            own = [x.clone() for x in (*inputs, grad)]
            gqa = [True] if "enable_gqa" in str(attend.default._schema) else []
            out, lse, state = attend(*own[:3], starts, starts, *rest, *gqa)
        with pytest.raises(ContextParallelError, match="whose backward would stay within"):
            backward(own[3], *own[:3], out, lse, starts, starts, *rest[:3], state, *rest[3:])

    on_mesh(2, body)


def test_explain():
    def body(mesh):
        inputs = BASE.tensors()[:3]
        with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[0] * 3):
            mine = cp_dispatch.explain_varlen(*inputs, *BASE.starts(), window_size=(-1, 0))
        odd = ODD.tensors()[:3]
        with context_parallel(mesh, buffers=odd, buffer_seq_dims=[0] * 3):
            uneven = cp_dispatch.explain_varlen(*odd, *ODD.starts(), window_size=(-1, 0))
        return mine, uneven

    assert HeadTail(48, 2) in {plan.layout for plan, _ in on_mesh(2, body)}
    for mine, uneven in on_mesh(2, body):
        assert (mine.handler, mine.ring_shape, mine.rows_sent) == ("cp_dispatch", (2,), (7, 1))
        assert uneven.handler == "cp_dispatch" and len(uneven.rows_sent) == 2


def test_explain_takes_the_length_of_the_documents():
    """Where buffers of several lengths give a rank as many rows."""
    problem = VarlenProblem((5, 20, 8), (5, 20, 9))  # 33 rows and 34 keys

    def body(mesh):
        inputs = problem.tensors()[:3]
        with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[0] * 3, balancer=None):
            return cp_dispatch.explain_varlen(*inputs, *problem.starts(), window_size=(-1, 0))

    assert [(x.handler, x.rows_sent) for x in on_mesh(2, body)] == [("cp_dispatch", (12, 0))] * 2
