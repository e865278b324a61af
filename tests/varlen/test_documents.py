"""Pieces and moves on integers, the ops by torch's own checks, and the text of
``explain_varlen``."""

from __future__ import annotations

from itertools import accumulate
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cp_dispatch
from cp_dispatch import HeadTail
from cp_dispatch._compat import dtensor_spec
from cp_dispatch.by_need.ownership import ownership
from cp_dispatch.layouts import Span
from cp_dispatch.options import Options
from cp_dispatch.varlen import exchange, job
from cp_dispatch.varlen import kernel as kernel_module
from cp_dispatch.varlen import keys as keys_module
from cp_dispatch.varlen import plan as plan_module
from cp_dispatch.varlen import traffic as traffic_module
from cp_dispatch.varlen.call import VarlenCall
from cp_dispatch.varlen.documents import Documents, Window, pieces_of, union
from cp_dispatch.varlen.keys import CallKeys
from cp_dispatch.varlen.ops import BACKWARD, FORWARD
from cp_dispatch.varlen.traffic import overlaps, rows_given, traffic_of
from tests.ranks import fake_ranks, outline
from tests.varlen.problems import VarlenProblem


def starts(lengths) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def band(rows: int, keys: int, window) -> torch.Tensor:
    """What rows see in torch's kernel, aligned at the bottom right."""
    after = torch.arange(keys) - torch.arange(rows).unsqueeze(1) - (keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if window.left >= 0:
        seen &= after >= -window.left
    if window.right >= 0:
        seen &= after <= window.right
    return seen


@st.composite
def calls(draw):
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    window = Window(draw(st.integers(-1, 6)), draw(st.integers(-1, 6)))
    fewer = window.right == 0 or window.is_full
    keys = [n + draw(st.integers(-9 if fewer else 0, 5)) for n in lengths]
    keys = lengths if draw(st.booleans()) else [max(0, n) for n in keys]
    ranks = draw(st.integers(1, 4))
    rest = draw(st.integers(0, 3))
    layout = ""
    if sum(lengths) == sum(keys) and sum(lengths) + rest >= 1 and draw(st.booleans()):
        layout = cp_dispatch.HeadTail(sum(lengths) + rest, ranks).text
    return lengths, keys, window, ranks, rest, layout


@settings(max_examples=300)
@given(calls())
def test_pieces_see_what_their_rows_see(call):
    lengths, key_lengths, window, ranks, rest, layout = call
    documents = Documents(starts(lengths), starts(key_lengths))
    queries, keys = (ownership(sum(n) + rest, (ranks,), layout) for n in (lengths, key_lengths))
    assert documents.reasons(window, queries.length, keys.length) == []
    whole = torch.zeros(queries.length, keys.length, dtype=torch.bool)
    for i, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        row, start = documents.queries[i], documents.keys[i]
        whole[row : row + n, start : start + m] = band(n, m, window)
    sent, taken = [], 0
    for rank in range(ranks):
        owned = [p for span in queries.spans(rank) for p in range(span[0], sum(span))]
        mine = torch.zeros(len(owned), keys.length, dtype=torch.bool)
        for piece in pieces_of(documents, window, queries.spans(rank)):
            part = band(piece.rows, piece.keys, window.shifted(piece.shift))
            rows = slice(piece.row, piece.row + piece.rows)
            mine[rows, piece.key : piece.key + piece.keys] |= part
        assert torch.equal(mine, whole[owned])
        traffic = traffic_of(documents, window, queries, keys, rank)
        # Exactly the keys that some row sees arrive, and they are in the place where they are
        # looked up.
        needed = mine.any(0).nonzero().flatten().tolist()
        compact = {}
        for (position, length), row in traffic.places:
            compact |= {position + i: row + i for i in range(length)}
        assert sorted(compact) == needed
        assert (
            sorted(compact.values()) == list(range(len(needed))) == list(range(sum(traffic.takes)))
        )
        sent.append(sum(span.length for spans in traffic.gives for span in spans))
        taken += sum(traffic.takes) - traffic.takes[rank]
        for piece in traffic.pieces:
            found = [r for s in traffic.compact(piece.key, piece.keys) for r in range(s[0], sum(s))]
            assert found == [compact[piece.key + i] for i in range(piece.keys)]
        assert traffic.moves or not taken
    assert sum(sent) == taken
    assert list(rows_given(documents, window, queries, keys)) == sent


def many_documents(ranks: int):
    lengths = [1 + 29 * i % 64 for i in range(200)]
    layout = cp_dispatch.PerDocumentHeadTail(lengths, ranks).text
    return Documents(starts(lengths), starts(lengths)), ownership(sum(lengths), (ranks,), layout)


def test_what_all_ranks_send_is_worked_out_once(monkeypatch):
    """``explain_varlen`` of 1,002 documents on 64 ranks took 80 s: all of it for each rank."""
    asked = []
    for name in ("pieces_of", "overlaps"):
        of = getattr(traffic_module, name)
        monkeypatch.setattr(traffic_module, name, lambda *x, of=of: asked.append(of) or of(*x))
    documents, owned = many_documents(8)
    rows_given(documents, Window(-1, 0), owned, owned)
    assert len(asked) == 2 * 8


def test_owners_of_many_runs_of_keys_are_not_looked_up(monkeypatch):
    """They are taken by an index. On 64 ranks that took half the time of a new call."""
    found, of = [], keys_module._by_owner

    def by_owner(*args):
        for run in of(*args):
            found.append(run)
            yield run

    monkeypatch.setattr(keys_module, "_by_owner", by_owner)
    documents, owned = many_documents(8)
    traffic = traffic_of(documents, Window(-1, 0), owned, owned, 3)
    keys = CallKeys(traffic.pieces, traffic, torch.device("cpu"))
    assert len(keys.sums) > 1000 and len(found) < 50


def test_windows_are_causal_or_full():
    """CUDA kernels are selected by that."""
    windows = [Window(left, right) for left in (-1, 0, 2) for right in (-1, 0, 2)]
    assert [x for x in windows if x.is_causal] == [Window(-1, 0)]
    assert [x for x in windows if x.is_full] == [Window(-1, -1)]


def test_rows_may_see_no_key():
    """Those of a document with fewer keys than rows, as far as they come before its first key."""
    documents, runs = Documents((0, 9), (0, 2)), [Span(0, 3), Span(3, 3), Span(6, 3)]
    pieces = [pieces_of(documents, Window(-1, 0), [run]) for run in runs]
    assert pieces == [[(0, 3, 0, 0, 0, 0)], [(0, 3, 0, 0, 0, 0)], [(0, 3, 0, 2, 0, 0)]]


def test_all_ranks_know_whether_some_rank_has_a_key_several_times():
    """So that they send gradients in one dtype."""
    found = []
    for lengths in ([8], [2, 4, 2]):
        documents = Documents(starts(lengths), starts(lengths))
        owned = ownership(8, (2,), cp_dispatch.HeadTail(8, 2).text)
        both = (traffic_of(documents, Window(-1, 0), owned, owned, rank) for rank in range(2))
        found.append([traffic.shared for traffic in both])
    assert found == [[True, True], [False, False]]


def test_gradients_of_keys_travel_wide_where_several_are_summed(monkeypatch):
    """And on CPU, whose kernel returns them wide."""
    monkeypatch.setattr(job, "Kernel", mock.Mock())
    layout = cp_dispatch.HeadTail(8, 2).text
    found = []
    for device, lengths in (("cuda", [8]), ("cuda", [2, 4, 2]), ("cpu", [2, 4, 2])):
        documents = Documents(starts(lengths), starts(lengths))
        options = Window(-1, 0), 8, 8, False, None, (2,), 0, layout, torch.device(device)
        found.append(job.VarlenJob(documents, *options).share_dtype(torch.bfloat16))
    assert found == [torch.float32, torch.bfloat16, torch.float32]


def test_no_key_is_twice_in_a_layer():
    """Sums are the same in every run, because no row gets contributions from two sides at once."""
    lengths = [8, 3, 13]
    documents = Documents(starts(lengths), starts(lengths))
    layout = cp_dispatch.PerDocumentHeadTail(lengths, 2).text
    owned = ownership(24, (2,), layout)
    for rank in range(2):
        traffic = traffic_of(documents, Window(-1, 0), owned, owned, rank)
        layers = CallKeys(traffic.pieces, traffic, torch.device("cpu")).layers
        rows = torch.arange(sum(traffic.takes))
        found = [compact.take(rows).tolist() for _, compact in layers]
        # Rank 0 has two runs of a document, and rank 1 has what is between them.
        assert len(found) == 2 - rank and all(len(set(x)) == len(x) for x in found)
        assert sum(map(len, found)) == sum(piece.keys for piece in traffic.pieces)


def test_union_and_overlaps():
    spans = [Span(5, 3), Span(0, 2), Span(6, 6), Span(2, 1), Span(20, 0)]
    assert union(spans) == (Span(0, 3), Span(5, 7))
    owned = (Span(1, 3), Span(8, 10))
    assert list(overlaps(owned, union(spans))) == [(0, Span(1, 2)), (3, Span(8, 4))]
    assert list(overlaps(owned, (Span(0, 1), Span(6, 2), Span(18, 2)))) == []


def test_opcheck():
    problem = VarlenProblem((3, 0, 5), (4, 2, 5), heads=2, key_heads=1, rest=1)
    *tensors, grad = problem.tensors()
    leaves = [x.requires_grad_() for x in tensors]
    options = [*problem.starts(), [2, 0], None, *problem.totals, False, None, [], 0, "", ""]
    torch.library.opcheck(FORWARD, (*leaves, *options))
    out, lse = (x.detach() for x in FORWARD(*leaves, *options))
    for key_grad in (True, False):
        arguments = grad, *(x.detach() for x in leaves), out, lse, *options, key_grad
        torch.library.opcheck(BACKWARD, arguments)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(lambda *x: FORWARD(*x, *options)[0], wide)


@pytest.mark.parametrize("rest, most", [(0, 32), (1, 32), (1, 0)])
def test_gradients_are_in_the_dtypes_of_their_tensors(monkeypatch, rest, most):
    """The kernel for CPU returns wider ones. Also for keys of no document, and for many runs."""
    monkeypatch.setattr(exchange, "_MOST_SUMS", most)
    of, name = (exchange, "add_up") if most == 0 else (exchange.Exchange, "_wide_sum")
    monkeypatch.setattr(of, name, lambda *_: pytest.fail("that is for another number of runs"))
    problem = VarlenProblem((3, 5), dtype=torch.bfloat16, rest=rest)
    *tensors, grad = problem.tensors()
    options = [*problem.starts(), [-1, 0], None, *problem.totals, False, None, [], 0, "", ""]
    grads = BACKWARD(grad, *tensors, *FORWARD(*tensors, *options), *options, True)
    assert [x.dtype for x in grads] == [torch.bfloat16] * 3


def test_explain():
    cu_seq = torch.tensor([0, 6, 16, 24, 39, 48], dtype=torch.int32)
    other = torch.tensor([0, 6, 16, 24, 39, 50], dtype=torch.int32)
    with fake_ranks(4) as mesh:
        query = outline(mesh, (48, 4, 8), (Shard(0),))
        key = outline(mesh, (48, 2, 8), (Shard(0),))
        stock = cp_dispatch.explain_varlen(query, key, key, cu_seq, cu_seq)
        with cp_dispatch.enabled(schedule="ring"):
            plan = cp_dispatch.explain_varlen(query, key, key, cu_seq, cu_seq, window_size=(-1, 0))
            wrong = cp_dispatch.explain_varlen(query, key, key, cu_seq, other)
            refused = cp_dispatch.explain_varlen(query.double(), key, key, cu_seq, cu_seq)
            plain = cp_dispatch.explain_varlen(*(torch.zeros(1, 1, 1),) * 3, cu_seq, cu_seq)
        many = cp_dispatch.PerDocumentHeadTail([4] * 12, 4)
        with cp_dispatch.enabled(layout=many):
            whole = torch.tensor([0, 48], dtype=torch.int32)
            cut = cp_dispatch.explain_varlen(query, key, key, whole, whole, window_size=(-1, 0))
        whole = [outline(mesh, x.shape, (Replicate(),)) for x in (query, key, key)]
        with cp_dispatch.enabled():
            local = cp_dispatch.explain_varlen(*whole, cu_seq, cu_seq)
            auto = cp_dispatch.explain_varlen(query, key, key, cu_seq, cu_seq)
        blocks = cp_dispatch.BlockBalanced.from_documents([6, 42], 4, 2, near=True)
        with cp_dispatch.enabled(layout=blocks):
            laid_out = str(cp_dispatch.explain_varlen(query, key, key, cu_seq, cu_seq))
    assert (plan.handler, plan.schedule, plan.rows_sent) == (
        "cp_dispatch",
        "exchange",
        (6, 0, 12, 0),
    )
    assert plan.bytes_sent(2) == 12 * 2 * 2 * 8 * 4
    assert "rank 2 sends 12 rows of keys" in str(plan) and "schedule='ring' does" in str(plan)
    assert "  in the layout of BlockBalanced: 48 positions on 4 ranks" in laid_out
    assert blocks.text not in laid_out, "the work of every block"
    assert wrong.handler == refused.handler == "refused"
    assert (local.schedule, local.reasons) == ("local", ("the sequence is not sharded",))
    assert auto.schedule == "exchange" and "does not apply" not in str(auto)
    assert plain.handler == "stock" and "no block of context_parallel is on" in plain.reasons[0]
    assert "window_size=(-1, -1), scale=None" in str(plain)
    assert stock.handler == "stock" and "torch has no rule for DTensors" in stock.reasons[0]
    assert "query: (48, 4, 8)" in str(stock) and "query: (1, 1, 1)" in str(plain)
    assert cut.handler == "refused" and "a copy of the keys for each run" in str(cut)
    assert "cu_seq_k ends at 50" in str(wrong) and "key is torch.float32" in str(refused)


def test_a_plan_is_made_once(monkeypatch):
    """For calls that are alike. Whether the documents are DTensors is part of the comparison."""
    made, make_plan = [], plan_module.make_plan
    monkeypatch.setattr(plan_module, "make_plan", lambda *x: made.append(x) or make_plan(*x))
    monkeypatch.setattr(plan_module, "_plans", {})
    cu_seq = torch.tensor([0, 48], dtype=torch.int32)
    with fake_ranks(4) as mesh:
        tensors = [outline(mesh, (48, 4, 8), (Shard(0),)) for _ in range(3)]
        placed = [
            DTensor.from_local(cu_seq, mesh, [p], run_check=False, shape=(2,), stride=(1,))
            for p in (Replicate(), Shard(0))
        ]
        for starts in (cu_seq, *placed):
            made.clear()
            call = VarlenCall(*tensors, starts, starts)
            handlers = {plan_module.known_plan(Options(), call).handler for _ in range(3)}
            is_cut = starts is placed[1]
            assert handlers == ({"refused"} if is_cut else {"cp_dispatch"})
            assert len(made) == (3 if is_cut else 1)
        one = VarlenCall(*tensors, cu_seq, cu_seq, num_splits=1)
        assert plan_module.known_plan(Options(), one).handler == "cp_dispatch"
        for name in ("seqused_k", "block_table", "num_splits"):
            call = VarlenCall(*tensors, cu_seq, cu_seq, **{name: 2})
            plan = plan_module.known_plan(Options(), call)
            assert plan.handler == "refused" and name in plan.reasons[0]


def test_explain_refuses_orders_that_differ():
    """The order of the ranks from that of the shards, and the shards of shards from a layout's."""
    cu_seq = torch.tensor([0, 10], dtype=torch.int32)
    with fake_ranks(2, 2, names=("a", "b")) as mesh:
        falling = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("a", "b"))
        for over, rows, layout, words in (
            (falling, (Replicate(), Shard(0)), None, "not in ascending order, [1, 0]"),
            (mesh, (Shard(0), Shard(0)), HeadTail(10, 4), "gives the ranks (3, 2, 3, 2)"),
        ):
            x = outline(over, (10, 4, 8), rows)
            with cp_dispatch.enabled(layout=layout):
                plan = cp_dispatch.explain_varlen(x, x, x, cu_seq, cu_seq)
            (reason,) = plan.reasons
            assert plan.handler == "refused" and words in reason, plan


def test_explain_refuses_shapes_and_arguments():
    """With exactly one reason each, in words."""
    cu_seq = torch.tensor([0, 20, 48], dtype=torch.int32)
    shape, float16 = (48, 4, 8), torch.float16
    cases = [
        ("must have the same shape, got [48, 4, 8] and [48, 4, 4]", (shape, shape, (48, 4, 4)), {}),
        ("head dims differ: query 8, key 4", (shape, *[(48, 4, 4)] * 2), {}),
        ("query's 4 heads are not a multiple of key's 3", (shape, *[(48, 3, 8)] * 2), {}),
        ("query's 4 heads are not a multiple of key's 0", (shape, *[(48, 0, 8)] * 2), {}),
        ("query is torch.int64; cast to a floating dtype", [shape] * 3, {"dtype": torch.int64}),
        ("cu_seq_k is None; pass the cumulative lengths", [shape] * 3, {"cu_seq_k": None}),
        ("must be int32 of shape", [shape] * 3, {"cu_seq_k": cu_seq[:0]}),
        ("must be int32 of shape", [shape] * 3, {"cu_seq_k": cu_seq[None]}),
        ("must be (left, right), got (1, 2, 3)", [shape] * 3, {"window_size": (1, 2, 3)}),
        ("supports float16 and bfloat16", [shape] * 3, {"device": "cuda"}),
        ("the head dim is 12", [(48, 4, 12)] * 3, {"device": "cuda", "dtype": float16}),
        ("the head dim is 264", [(48, 4, 264)] * 3, {"device": "cuda", "dtype": float16}),
    ]
    with fake_ranks(4) as mesh, cp_dispatch.enabled():
        # A mesh of GPUs need not have any; only its name is used.
        meshes = {"cpu": mesh, "cuda": DeviceMesh("cuda", torch.arange(4), _init_backend=False)}
        for words, shapes, how in cases:
            device, dtype = how.pop("device", "cpu"), how.pop("dtype", torch.float32)
            tensors = []
            for size in shapes:
                spec = dtensor_spec(outline(mesh, size, (Shard(0),), dtype))
                spec = type(spec)(meshes[device], spec.placements, tensor_meta=spec.tensor_meta)
                tensors.append(DTensor(torch.zeros(1, dtype=dtype), spec, requires_grad=False))
            given = {"cu_seq_q": cu_seq, "cu_seq_k": cu_seq} | how
            plan = cp_dispatch.explain_varlen(*tensors, **given)
            (reason,) = plan.reasons
            assert plan.handler == "refused" and words in reason, plan


@pytest.mark.parametrize("given", [None, 1])
def test_the_kernel_gets_num_splits(monkeypatch, given):
    """Where it was given: torch 2.11 does not have it."""
    aten, x = mock.Mock(), torch.zeros(2, 1, 8)
    aten._flash_attention_forward.return_value = x, x
    monkeypatch.setattr(kernel_module, "aten", aten)
    kernel = kernel_module.Kernel([(2, 2)], Window(-1, 0), given, torch.device("cpu"))
    kernel._starts, kernel._longest = (x, x), [2, 2]
    kernel.forward(x, x, x, 1.0)
    assert aten._flash_attention_forward.call_args.kwargs.get("num_splits") == given
