"""``varlen_attn`` on DTensors, ranks as threads, against float64 and one rank."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cp_dispatch
from cp_dispatch import (
    BlockBalanced,
    ContextParallel,
    ContextParallelError,
    HeadTail,
    PerDocumentHeadTail,
)
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.varlen import exchange, keys
from cp_dispatch.varlen.kernel import Kernel
from tests.distributed.sharded import distribute
from tests.distributed.threads import run_threads
from tests.ranks import fake_ranks, with_rows
from tests.varlen.problems import (
    GQA,
    NAMES,
    ROWS,
    VarlenProblem,
    check,
    exact,
    one_device,
    run_sharded,
)

BASE = VarlenProblem()
BF16 = torch.bfloat16


def judge(problem, ranks, placements=ROWS, shape=None, layout=None, schedule="auto", **how):
    def body(rank):
        names = tuple("abc"[: len(shape or (ranks,))])
        mesh = init_device_mesh("cpu", shape or (ranks,), mesh_dim_names=names)
        return run_sharded(problem, mesh, placements, layout=layout, **how)

    with cp_dispatch.enabled(schedule=schedule, layout=layout):
        results = run_threads(ranks, body)
    for got in results[1:]:
        assert all(torch.equal(got[name], results[0][name]) for name in got)
    check(results[0], exact(problem), one_device(problem))


def close(got, want):
    torch.testing.assert_close(got, want.to(got.dtype))


PROBLEMS = {
    "causal": BASE,
    "full": VarlenProblem(window=(-1, -1)),
    "window (3, 0)": VarlenProblem(window=(3, 0)),
    "window (2, 4)": VarlenProblem(window=(2, 4)),
    "window (0, 1)": VarlenProblem(window=(0, 1)),
    "window (4, -1)": VarlenProblem(window=(4, -1)),
    "window (-1, 3)": VarlenProblem(window=(-1, 3)),
    "window (100, 100)": VarlenProblem(window=(100, 100)),
    "gqa": VarlenProblem(key_heads=2),
    "mqa, full": VarlenProblem(key_heads=1, window=(-1, -1)),
    "one document": VarlenProblem((48,)),
    "one document, window": VarlenProblem((48,), window=(5, 7)),
    "short documents": VarlenProblem((1,) * 7 + (2,) * 9 + (3,)),
    "empty documents": VarlenProblem((0, 7, 0, 0, 21, 3, 0)),
    "documents end with shards": VarlenProblem((12, 24, 12)),
    "rows after the documents": VarlenProblem((7, 20), rest=9),
    "fewer rows than ranks": VarlenProblem((2, 1)),
    "more keys, causal": VarlenProblem((5, 20, 9), (8, 41, 9)),
    "more keys, full": VarlenProblem((5, 20, 9), (8, 41, 9), (-1, -1)),
    "more keys, window": VarlenProblem((5, 20, 9), (8, 41, 9), (3, 2)),
    "fewer keys, causal": VarlenProblem((15, 20, 9), (8, 31, 0)),
    "fewer keys, window": VarlenProblem((15, 20, 9), (8, 31, 0), (4, 0)),
    "fewer keys than ranks": VarlenProblem((9,), (2,), (-1, -1)),
    "no keys at all": VarlenProblem((4, 5), (0, 0), (-1, -1)),
    "bfloat16": VarlenProblem((30, 45, 21), dtype=BF16, key_heads=2, dim=16),
    "bfloat16, full": VarlenProblem((30, 45, 21), dtype=BF16, window=(-1, -1), dim=16),
    "float64": VarlenProblem(dtype=torch.float64),
    "scale": VarlenProblem(scale=0.3),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", PROBLEMS)
def test_natural_order(name, ranks):
    judge(PROBLEMS[name], ranks)


@pytest.mark.parametrize("schedule", ["gather", "ring", "ulysses", "hybrid:2"])
def test_schedules_have_no_choice(schedule):
    judge(BASE, 2, schedule=schedule)


@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(0))],
    ids=str,
)
def test_meshes(placements):
    problem = VarlenProblem((5, 20, 1, 9, 12), key_heads=2)
    judge(problem, 4, placements, (2, 2))


def test_without_a_sharded_sequence():
    judge(BASE, 2, (Shard(1),))
    judge(VarlenProblem(heads=3, key_heads=3), 2, (Shard(1),))
    judge(VarlenProblem(heads=1, key_heads=1), 2, (Shard(1),))
    judge(BASE, 2, (Replicate(),))


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 2)], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_layouts(ranks, window):
    for lengths in ((48,), (5, 20, 1, 9, 13), (30, 18)):
        problem = VarlenProblem(lengths, window=window, key_heads=2)
        judge(problem, ranks, layout=HeadTail(48, ranks))
        judge(problem, ranks, layout=PerDocumentHeadTail([list(lengths)], ranks))
        judge(problem, ranks, layout=BlockBalanced([float(i) for i in range(12)], ranks, 4))
        near = BlockBalanced.from_documents(lengths, ranks, 2, near=True)
        judge(problem, ranks, layout=near)


@pytest.mark.parametrize("window", [(-1, 0), (3, 2)], ids=str)
def test_many_runs_of_keys(monkeypatch, window):
    """The same as for few runs, which use different code."""
    monkeypatch.setattr(keys, "_MOST_RUNS", 0)
    monkeypatch.setattr(exchange, "_MOST_SUMS", 0)
    problem = VarlenProblem((5, 20, 1, 9, 13), window=window, key_heads=2)
    judge(problem, 2)
    judge(problem, 3)
    judge(problem, 3, layout=PerDocumentHeadTail([[5, 20, 1, 9, 13]], 3))
    problem = VarlenProblem((40, 56), dtype=BF16, window=window, key_heads=2, dim=16)
    judge(problem, 4, layout=HeadTail(96, 4))


@pytest.mark.parametrize("ranks", [2, 4])
def test_layouts_in_16_bits(ranks):
    """Gradients of several runs of rows are added and sent in float32."""
    problem = VarlenProblem((40, 56), dtype=BF16, key_heads=2, dim=16)
    judge(problem, ranks, layout=HeadTail(96, ranks))


def test_a_rank_that_sums_nothing_sends_wide_gradients_too(monkeypatch):
    """To ranks that sum several of them, from a kernel that returns narrow ones, as on CUDA."""
    backward, sent, moved = Kernel.backward, set(), Ring.exchange_all

    def narrow(*args):
        return [x.to(BF16) for x in backward(*args)]

    def exchanged(ring, send, *rest):
        sent.add(send.dtype)
        return moved(ring, send, *rest)

    monkeypatch.setattr(Kernel, "backward", narrow)
    monkeypatch.setattr(Ring, "exchange_all", exchanged)
    problem, balancer = VarlenProblem((16, 8, 24), dtype=BF16, dim=16), HeadTail(48, 3)

    def body(rank):
        run_sharded(problem, init_device_mesh("cpu", (3,)), layout=balancer)

    with cp_dispatch.enabled(layout=balancer):
        run_threads(3, body)
    assert sent == {BF16, torch.float32}, "keys, and their gradients"


def test_gradients_of_some():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        *inputs, grad = (distribute(x, mesh, ROWS) for x in BASE.tensors())
        found = []
        for wanted in ([0], [1], [2], [0, 2]):
            leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
            out, _ = BASE.attend(*leaves, BASE.starts())
            grads = torch.autograd.grad(out, [leaves[i] for i in wanted], grad)
            found.append([x.full_tensor() for x in grads])
        return found

    with cp_dispatch.enabled():
        (dq,), (dk,), (dv,), (dq2, dv2) = run_threads(2, body)[0]
    want = exact(BASE)
    for got, name in ((dq, "dQ"), (dk, "dK"), (dv, "dV"), (dq2, "dQ"), (dv2, "dV")):
        close(got, want[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    with mode():
        judge_forward(BASE)


def judge_forward(problem):
    def body(rank):
        return run_sharded(problem, init_device_mesh("cpu", (2,)), needs_grad=False)

    with cp_dispatch.enabled():
        got = run_threads(2, body)[0]
    with torch.inference_mode(False), torch.enable_grad():
        want = exact(problem)
    for name, x in got.items():
        close(x, want[name])


def test_whole_keys_and_sums():
    """Whole keys are cut and partial sums are summed. dK and dV are sharded."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        query, key, value, grad = BASE.tensors()
        leaves = [
            distribute(query, mesh, ROWS).requires_grad_(),
            distribute(key, mesh, [Replicate()]).requires_grad_(),
            DTensor.from_local(value / 2, mesh, [Partial()], run_check=False).requires_grad_(),
        ]
        out, _ = BASE.attend(*leaves, BASE.starts())
        grads = torch.autograd.grad(out, leaves, distribute(grad, mesh, [Replicate()]))
        return [x.full_tensor().detach() for x in (out, *grads)]

    with cp_dispatch.enabled():
        got = run_threads(2, body)[0]
    want = exact(BASE)
    for x, name in zip(got, ("output", "dQ", "dK", "dV"), strict=True):
        close(x, want[name])


def test_cu_seq_changes_between_calls():
    """New tensors, the same ones overwritten, and DTensors. Cached values are found again."""
    problems = [VarlenProblem(x) for x in ((48,), (5, 20, 1, 9, 13), (24, 24))]
    made = []
    from cp_dispatch.varlen import job

    class Counted(job.VarlenJob):
        def __init__(self, *args):
            made.append(args)
            super().__init__(*args)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        found = [run_sharded(problem, mesh) for problem in problems]
        three = [dataclasses.replace(x, lengths=(*x.lengths, 0, 0, 0, 0, 0)[:5]) for x in problems]
        starts = torch.zeros(6, dtype=torch.int32)
        kept = distribute(starts.clone(), mesh, [Replicate()])
        for problem in three:
            starts.copy_(problem.starts()[0])
            placed = distribute(starts, mesh, [Replicate()])
            kept.copy_(placed)
            for whole in (starts, placed, kept):
                found.append(run_sharded(problem, mesh, starts=[whole] * 2))
        return found

    with pytest.MonkeyPatch.context() as patch, cp_dispatch.enabled():
        patch.setattr(job, "VarlenJob", Counted)
        results = run_threads(2, body)[0]
    wants = [exact(x) for x in (*problems, *(p for p in problems for _ in range(3)))]
    for got, want in zip(results, wants, strict=True):
        for name, x in got.items():
            close(x, want[name])
    # A forward and its backward share what was worked out.
    assert len(made) <= 2 * len(results)


class Counter:
    """Bytes that ranks send to others, by rank, and the number of all-to-alls."""

    def __init__(self, monkeypatch):
        self.sent, self.calls = {}, 0
        lock, exchange = threading.Lock(), Ring.exchange_all

        def counted(ring, send, sizes, receive, coming):
            assert sizes[ring.rank] == coming[ring.rank] == 0
            with lock:
                self.calls += 1
                for to, size in enumerate(sizes):
                    key = ring.rank, to
                    self.sent[key] = self.sent.get(key, 0) + size * send.itemsize
            return exchange(ring, send, sizes, receive, coming)

        monkeypatch.setattr(Ring, "exchange_all", counted)


def test_bytes_go_where_they_are_needed(monkeypatch):
    """Four ranks of 12 rows. The first two and the last two share a document each."""
    problem, counter = VarlenProblem((6, 10, 8, 15, 9)), Counter(monkeypatch)
    row = 2 * problem.key_heads * problem.dim * 4
    judge(problem, 4)
    # Rank 1 sees 6 keys of rank 0, and rank 3 sees 12 of rank 2, forward and backward. They return
    # the same number of gradients.
    assert {pair: size for pair, size in counter.sent.items() if size} == {
        (0, 1): 2 * 6 * row, (1, 0): 6 * row, (2, 3): 2 * 12 * row, (3, 2): 12 * row,
    }  # fmt: skip
    assert counter.calls == 4 * 3


def test_windows_move_their_edge(monkeypatch):
    problem, counter = VarlenProblem((48,), window=(5, 2)), Counter(monkeypatch)
    row = 2 * problem.key_heads * problem.dim * 4
    judge(problem, 4)
    for rank in range(3):
        assert counter.sent[rank, rank + 1] == 2 * 5 * row + 2 * row
        assert counter.sent[rank + 1, rank] == 2 * 2 * row + 5 * row
    assert all(size == 0 for (a, b), size in counter.sent.items() if abs(a - b) > 1)


def test_nothing_moves_where_no_document_is_shared(monkeypatch):
    counter = Counter(monkeypatch)
    judge(VarlenProblem((12, 5, 7, 12, 4, 8)), 4)
    assert counter.calls == 0


REFUSED = {
    "plain key": ("key is a Tensor but other", {"key": lambda x: x.full_tensor()}),
    "dtypes": ("value is torch.float64", {"value": lambda x: x.double()}),
    "4-D": ("must have shape", {"query": lambda x: x.unsqueeze(3)}),
    "key placement": ("key is S", {"key": lambda x: x.redistribute(placements=[Shard(1)])}),
    "query whole": ("key is S", {"query": lambda x: x.redistribute(placements=[Replicate()])}),
    "features": ("query is S", {"query": lambda x: x.redistribute(placements=[Shard(2)])}),
    "int64 starts": ("must be int32", {"cu_seq_q": lambda x: x.long()}),
    "sharded starts": (
        "replicated DTensor",
        {"cu_seq_k": lambda x: distribute(x, init_device_mesh("cpu", (2,)), [Shard(0)])},
    ),
    "no 0 at first": ("must begin with 0", {"cu_seq_q": lambda x: x + 1}),
    "descending": ("must not decrease", {"cu_seq_k": lambda x: x * torch.tensor([1, -1, 1, 1, 1, 1],
                   dtype=torch.int32)}),
    "too long": ("the packed sequence has 48", {"cu_seq_k": lambda x: x * 2}),
    "other number": ("pass the same number", {"cu_seq_k": lambda x: x[:-1]}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_on_all_ranks(name, monkeypatch):
    words, changes = REFUSED[name]
    counter = Counter(monkeypatch)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        query, key, value = (distribute(x, mesh, ROWS) for x in BASE.tensors()[:3])
        cu_seq_q, cu_seq_k = (x.clone() for x in BASE.starts())
        call = {
            "query": query, "key": key, "value": value, "cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k,
        }  # fmt: skip
        call |= {name: change(call[name]) for name, change in changes.items()}
        with pytest.raises(ContextParallelError, match=words):
            varlen_attn(**call, max_q=20, max_k=20, window_size=(-1, 0))

    with cp_dispatch.enabled():
        run_threads(2, body)
    assert counter.calls == 0


def refused(problem, words, layout=None, ranks=2, **how):
    def body(rank):
        with pytest.raises(ContextParallelError, match=words):
            run_sharded(problem, init_device_mesh("cpu", (ranks,)), **how)

    with cp_dispatch.enabled(layout=layout):
        run_threads(ranks, body)


def test_more_refusals():
    refused(VarlenProblem((9, 30), (5, 30), (2, 3)), "document 0 has 9 queries and 5 keys")
    refused(VarlenProblem((9, 30), (5, 30), (2, -1)), "includes keys after the diagonal")
    refused(VarlenProblem(heads=3, key_heads=1), "are not a multiple", placements=(Shard(1),))
    refused(BASE, "the layout is HeadTail", HeadTail(32, 2))
    for ranks in (1, 4):
        words = "2 ranks share the sequence.*; make one for 2"
        refused(BASE, words, HeadTail(48, ranks))
    refused(BASE, "key has placements .* but the other shards are in the layout", HeadTail(48, 2),
            key_placements=(Replicate(),))  # fmt: skip
    refused(BASE, "for 2 batch rows", PerDocumentHeadTail([[48], [24, 24]], 2))
    many = PerDocumentHeadTail([[4] * 12], 2)
    refused(VarlenProblem((48,)), "a copy of the keys for each run", layout=many)
    judge(VarlenProblem((48,), window=(-1, -1)), 2, layout=many)


def test_sums_over_descending_ranks_are_refused():
    """DTensor would scatter them to the wrong ranks."""

    def body(rank):
        mesh = DeviceMesh("cpu", [1, 0])
        query = distribute(BASE.tensors()[0], mesh, [Shard(1)])
        key = DTensor.from_local(BASE.tensors()[1], mesh, [Partial()], run_check=False)
        plan = cp_dispatch.explain_varlen(query, key, key, *BASE.starts())
        assert len(plan.reasons) == 2 and "not in ascending order" in plan.reasons[0], plan

    with cp_dispatch.enabled():
        run_threads(2, body)


def test_documents_are_refused_before_keys_are_summed():
    problem = VarlenProblem((9, 30), (5, 30), (2, 3))

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        query, *keys = (distribute(x, mesh, ROWS) for x in problem.tensors()[:3])
        keys = [x.redistribute(placements=[Replicate()]).to_local() / 2 for x in keys]
        keys = [DTensor.from_local(x, mesh, [Partial()], run_check=False) for x in keys]
        fine = cp_dispatch.explain_varlen(query, *keys, *problem.starts())
        assert "redistributes value from (Partial(sum),) to (Shard(dim=0),)" in str(fine)
        with CommDebugMode() as moved, pytest.raises(ContextParallelError, match="5 keys"):
            problem.attend(query, *keys, problem.starts())
        assert moved.get_total_counts() == 0

    with cp_dispatch.enabled():
        run_threads(2, body)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 does not have them")
def test_inference_arguments_are_refused():
    from torch.nn.attention.varlen import varlen_attn_out

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        tensors = [distribute(x, mesh, ROWS) for x in BASE.tensors()[:3]]
        starts = BASE.starts()
        varlen_attn(*tensors, *starts, 20, 20, num_splits=1)
        for extra in ({"num_splits": 2}, {"seqused_k": starts[0][1:]}):
            with pytest.raises(ContextParallelError, match=next(iter(extra))):
                varlen_attn(*tensors, *starts, 20, 20, **extra)
        with pytest.raises(ContextParallelError, match="varlen_attn_out"):
            varlen_attn_out(torch.empty_like(tensors[0]), *tensors, *starts, 20, 20)

    with cp_dispatch.enabled():
        run_threads(2, body)


def test_torch_func_transforms_are_refused():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        query, key, value = (distribute(x, mesh, ROWS) for x in BASE.tensors()[:3])
        starts = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        length = query.shape[0]

        def loss(query):
            return varlen_attn(query, key, value, starts, starts, length, length).sum()

        with cp_dispatch.enabled(), pytest.raises(ContextParallelError, match="torch.func"):
            torch.func.grad(loss)(query)

    run_threads(2, body)


def test_second_derivatives_are_refused():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        *inputs, grad = (distribute(x, mesh, ROWS) for x in BASE.tensors())
        leaves = [x.requires_grad_() for x in inputs]
        out, _ = BASE.attend(*leaves, BASE.starts())
        (dq,) = torch.autograd.grad(out, leaves[:1], grad, create_graph=True)
        with pytest.raises(ContextParallelError, match="no second derivative"):
            torch.autograd.grad(dq.sum(), leaves[1:2])

    with cp_dispatch.enabled():
        run_threads(2, body)


def test_disabled_is_torchs():
    """Before the first use and after it. Torch has no rule for DTensors, and no kernel for CPU."""

    def torchs(rank):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(Exception) as found:
            run_sharded(BASE, mesh)
        assert not isinstance(found.value, ContextParallelError)

    def plain():
        with pytest.raises(NotImplementedError) as found:
            BASE.attend(*BASE.tensors()[:3], BASE.starts())
        assert not isinstance(found.value, ContextParallelError)

    run_threads(2, torchs)
    judge(BASE, 2)
    run_threads(2, torchs)
    plain()
    with cp_dispatch.enabled():
        plain()


def test_backward_after_the_block():
    """In a layout, which the backward gets from its forward."""
    layout = HeadTail(48, 2)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        *inputs, grad = (
            distribute(x.index_select(0, layout.indices[0]), mesh, ROWS) for x in BASE.tensors()
        )
        leaves = [x.requires_grad_() for x in inputs]
        with cp_dispatch.enabled(layout=layout):
            out, _ = BASE.attend(*leaves, BASE.starts())
        grads = torch.autograd.grad(out, leaves, grad)
        return [x.full_tensor().index_select(0, layout.inverse[0]) for x in grads]

    want = exact(BASE)
    for got, name in zip(run_threads(2, body)[0], ("dQ", "dK", "dV"), strict=True):
        close(got, want[name])


def test_debug_mode_compares_documents(monkeypatch):
    monkeypatch.setenv("CP_DISPATCH_DEBUG", "1")
    judge(BASE, 2)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        starts = VarlenProblem((24, 24) if rank else (20, 28)).starts()
        with pytest.raises(ContextParallelError, match="do not agree on this varlen_attn call"):
            run_sharded(VarlenProblem((24, 24)), mesh, starts=starts)

    with cp_dispatch.enabled():
        run_threads(2, body)


@pytest.mark.parametrize("first, second", [(None, HeadTail(48, 2)), (HeadTail(48, 2), None)])
def test_a_checkpoint_recomputed_in_another_order_raises(first, second):
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        leaves = [distribute(x, mesh, ROWS).requires_grad_() for x in BASE.tensors()[:3]]

        def attend(query, *keys):
            return BASE.attend(query.sin(), *keys, BASE.starts())[0]

        with cp_dispatch.enabled(layout=first):
            outs = [checkpoint(attend, *leaves, use_reentrant=False) for _ in range(2)]
        with cp_dispatch.enabled(layout=second):
            with pytest.raises(ContextParallelError, match="in a different order"):
                outs[0].sum().backward()
        with cp_dispatch.enabled(layout=first):
            outs[1].sum().backward()

    run_threads(2, body)


def test_flops_are_counted():
    """For the whole sequence, each row with the keys of its document, as torch counts."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        *inputs, grad = (distribute(x, mesh, ROWS) for x in BASE.tensors())
        leaves = [x.requires_grad_() for x in inputs]
        with cp_dispatch.enabled(), FlopCounterMode(display=False) as forward:
            out, _ = BASE.attend(*leaves, BASE.starts())
        with cp_dispatch.enabled(), FlopCounterMode(display=False) as backward:
            torch.autograd.grad(out, leaves, grad)
        return forward.get_total_flops(), backward.get_total_flops()

    want = 4 * BASE.heads * BASE.dim * sum(n * n for n in BASE.lengths)
    assert run_threads(2, body) == [(want, want * 5 // 2)] * 2


class Attend(torch.nn.Module):
    def __init__(self, problem):
        super().__init__()
        self.problem = problem

    def forward(self, q_TNH, k_TNH, v_TNH, *, starts):
        return self.problem.attend(q_TNH, k_TNH, v_TNH, starts)


@pytest.mark.parametrize("problem, ranks, layout", [
    (BASE, 2, HeadTail(48, 2)),
    (BASE, 3, None),
    (VarlenProblem((7, 20), rest=8), 2, HeadTail(35, 2)),
])  # fmt: skip
def test_modules_in_the_flex_style(problem, ranks, layout):
    """It passes plain shards on as DTensors, whatever the module calls, as torchtitan's does."""

    def body(rank):
        mesh = init_device_mesh("cpu", (ranks,))
        style = ContextParallel(seq_dim=0, attention_type="flex", balancer=layout)
        module = parallelize_module(Attend(problem), mesh, style)
        *inputs, grad = cp_dispatch.shard(mesh, problem.tensors(), 0, layout)
        leaves = [x.requires_grad_() for x in inputs]
        out, lse = module(*leaves, starts=problem.starts())
        own = [out.detach(), lse, *torch.autograd.grad(out, leaves, grad)]
        assert all(type(x) is torch.Tensor for x in own)
        return dict(
            zip(NAMES, cp_dispatch.unshard(mesh, own, [0, 1, 0, 0, 0], layout), strict=True)
        )

    for got in run_threads(ranks, body):
        check(got, exact(problem), one_device(problem))


@pytest.mark.parametrize("rows, keys", [(7, 8), (8, 7)])
def test_shards_must_be_as_long_as_the_global_shape_says(rows, keys):
    cu_seq = torch.tensor([0, 10, 16], dtype=torch.int32)
    with fake_ranks(2) as mesh, cp_dispatch.enabled():
        query, key = (with_rows(mesh, n, (16, 2, 4), 0) for n in (rows, keys))
        words = f"holds {rows} queries and {keys} keys, but .* it should hold 8 and 8"
        with pytest.raises(ContextParallelError, match=words):
            varlen_attn(query, key, key, cu_seq, cu_seq, 10, 10)


def test_a_rank_outside_the_mesh_takes_no_part():
    cu_seq = torch.tensor([0, 10, 16], dtype=torch.int32)
    with fake_ranks(3, rank=2), cp_dispatch.enabled(), CommDebugMode() as moved:
        mesh = DeviceMesh("cpu", [0, 1])
        query, key = (
            distribute(torch.zeros(16, heads, 8), mesh, ROWS).requires_grad_() for heads in (4, 2)
        )
        how = {"return_aux": AuxRequest(lse=True)} | GQA
        output, logsumexp = varlen_attn(query, key, key, cu_seq, cu_seq, 10, 10, **how)
        assert output.shape == query.shape and logsumexp.shape == (4, 16)
        assert output.placements == (Shard(0),) and logsumexp.placements == (Shard(1),)
        output.backward(torch.zeros_like(output))
    for x in (output, logsumexp, query.grad, key.grad):
        assert x.to_local().numel() == 0
    assert query.grad.shape == query.shape and key.grad.shape == key.shape
    assert moved.get_total_counts() == 0
