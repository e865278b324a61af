"""``varlen_attn`` where ranks read each other's rooms, against float64 and one rank.

Copy engines are emulated (:mod:`tests.distributed.rooms`), ranks are threads.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.by_need.here import MOST_RUNS
from cp_dispatch.by_need.ownership import ownership
from cp_dispatch.groups import ring_group_name
from cp_dispatch.layouts import Span
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.varlen import exchange, explain, keys, ops, pulled
from cp_dispatch.varlen.documents import Documents, Window
from cp_dispatch.varlen.traffic import most_runs, overlaps, rows_given, table_of, traffic_of
from tests.distributed.out_of_memory import failures
from tests.distributed.rooms import Rooms
from tests.distributed.sharded import distribute
from tests.distributed.test_errors_threads import Memory
from tests.distributed.threads import run_threads
from tests.varlen.problems import ROWS, VarlenProblem, run_in_block, run_sharded
from tests.varlen.test_varlen_threads import BF16, PROBLEMS, judge

LENGTHS = (5, 20, 1, 9, 13)


@pytest.fixture
def rooms(monkeypatch):
    """With copy engines alone."""
    monkeypatch.setattr(Ring, "exchange_all", lambda *_: pytest.fail("a collective"))
    return Rooms(monkeypatch)


def near(ranks: int) -> BlockBalanced:
    return BlockBalanced.from_documents(LENGTHS, ranks, 2, near=True)


LAYOUTS = {
    "natural": lambda ranks: None,
    "head-tail": lambda ranks: HeadTail(48, ranks),
    "documents": lambda ranks: PerDocumentHeadTail([list(LENGTHS)], ranks),
    "blocks": lambda ranks: BlockBalanced([float(i) for i in range(12)], ranks, 4),
    "near blocks": near,
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_natural_order(name, rooms):
    judge(PROBLEMS[name], 3)
    rooms.assert_all_was_read()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, window, ranks, rooms):
    problem = VarlenProblem(LENGTHS, window=window, key_heads=2)
    judge(problem, ranks, layout=LAYOUTS[layout](ranks))
    assert rooms.used == {"varlen"}
    rooms.assert_all_was_read()


@pytest.mark.parametrize("limit", ["_MOST_RUNS", "_MOST_SUMS", "_MOST_ORDERED"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_runs(monkeypatch, layout, limit, rooms):
    """The same as for few runs, which use different code."""
    (module,) = (x for x in (keys, exchange, pulled) if hasattr(x, limit))
    monkeypatch.setattr(module, limit, 0)
    judge(VarlenProblem(LENGTHS, key_heads=2), 3, layout=LAYOUTS[layout](3))
    judge(VarlenProblem(LENGTHS, dtype=BF16, dim=16), 3, layout=LAYOUTS[layout](3))
    assert rooms.used == {"varlen"}


def test_own_keys_are_in_several_runs_of_the_kernels_order(rooms):
    """Rank 0, which sends none, has another rank's keys between its own."""
    judge(VarlenProblem((4, 4, 8)), 2, layout=HeadTail(16, 2))
    assert rooms.used == {"varlen"}


def test_keys_arrive_in_the_order_of_the_only_kernel_call(monkeypatch, rooms):
    monkeypatch.setattr(keys.CallKeys, "take", lambda *_: pytest.fail("they are put in order"))
    problem, balancer = VarlenProblem((4, 4, 8)), HeadTail(16, 2)

    def body(rank):
        run_sharded(problem, init_device_mesh("cpu", (2,)), layout=balancer)

    with cp_dispatch.enabled(layout=balancer):
        run_threads(2, body)


@pytest.mark.parametrize("layout", ["natural", "documents"])
def test_on_another_stream(layout, rooms):
    """Than the default one, where copies and pull are separate."""
    rooms.may_pull_here = False
    judge(VarlenProblem(LENGTHS, window=(3, 2)), 3, layout=LAYOUTS[layout](3))
    assert rooms.used == {"varlen"}


def test_collectives_move_what_is_in_too_many_runs(monkeypatch):
    rooms = Rooms(monkeypatch)
    monkeypatch.setattr(exchange, "MOST_RUNS", 1)
    judge(VarlenProblem((48,)), 3)
    assert not rooms.used


def test_collectives_move_what_no_room_is_large_enough_for(monkeypatch):
    monkeypatch.setattr(Ring, "may_push", True)
    monkeypatch.setattr(Ring, "mailbox", lambda *_: None)
    judge(VarlenProblem(LENGTHS), 3)


def test_blocks_on_plain_shards(rooms):
    problem = VarlenProblem(LENGTHS)
    run_threads(2, lambda _: run_in_block(problem, init_device_mesh("cpu", (2,))))
    assert rooms.used == {"varlen"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_those_of_the_keys_that_are_needed(layout, rooms):
    """Each moves once in a forward, and twice with its backward, and its gradient once."""
    problem, balancer = VarlenProblem(LENGTHS), LAYOUTS[layout](4)
    judge(problem, 4, layout=balancer)
    owned = ownership(48, (4,), "" if balancer is None else balancer.text)
    starts = tuple(itertools.accumulate(LENGTHS, initial=0))
    rows = rows_given(Documents(starts, starts), Window(*problem.window), owned, owned)
    row = 2 * problem.key_heads * problem.dim * 4
    assert sum(rooms.sent.values()) == 3 * sum(rows) * row


def test_explain_says_what_moves_them(monkeypatch):
    def puller(mesh, mesh_dims, runs, most):
        return (f"{runs()} runs over {mesh_dims}, at most {most}",), True

    monkeypatch.setattr(explain, "puller", puller)
    problems = VarlenProblem(LENGTHS), VarlenProblem((24, 24))

    def body(rank):
        found, mesh = [], init_device_mesh("cpu", (2,))
        for problem in problems:
            *inputs, _ = (distribute(x, mesh, ROWS) for x in problem.tensors())
            plan = cp_dispatch.explain_varlen(*inputs, *problem.starts(), window_size=(-1, 0))
            found.append(str(plan))
        return found

    with cp_dispatch.enabled():
        some, nothing = run_threads(2, body)[1]
    assert f"2 runs over (0,), at most {MOST_RUNS}" in some  # rank 1: its own and rank 0's
    assert "runs over" not in nothing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_all_ranks(layout):
    balancer = LAYOUTS[layout](4)
    owned = ownership(48, (4,), "" if balancer is None else balancer.text)
    starts = tuple(itertools.accumulate(LENGTHS, initial=0))
    traffic = traffic_of(Documents(starts, starts), Window(3, 2), owned, owned, 2)
    table = table_of(traffic.needs, owned)
    for taker, owner in itertools.product(range(4), repeat=2):
        rows = [row + i for row, span in overlaps(owned.spans(owner), traffic.needs[taker])
                for i in range(span.length)]  # fmt: skip
        assert [r for start, count in table[taker][owner] for r in range(start, start + count)] == (
            rows
        )
    assert table[2][2] == traffic.home
    runs = most_runs(table)
    assert table_of(traffic.needs, owned, runs) == table
    assert table_of(traffic.needs, owned, runs - 1) is None


def test_rooms_do_not_grow_with_the_documents(rooms):
    """One document needs all keys of all ranks; the gradients then take several rounds."""
    sizes = []
    for lengths in ((9,) * 5 + (3,), (48,), LENGTHS):
        judge(VarlenProblem(lengths), 4)
        sizes.append(set(rooms._sizes.values()))
    assert sizes[0] == sizes[1] == sizes[2] == {12 * 2 * 4 * 8 * 4}


def test_rounds():
    """Of gradients; each is as large as fits for all ranks."""

    def pulls(*counts):
        table = [[(Span(0, n),) if n else () for n in of] for of in counts]
        return pulled.Pulls(table, 4, 0, None)

    causal = pulls((4, 0, 0, 0), (4, 4, 0, 0), (4, 4, 4, 0), (4, 4, 4, 4))
    assert causal.rounds(4) == [[1], [2], [3]]
    assert causal.rounds(8) == [[1, 2], [3]]
    assert causal.rounds(12) == [[1, 2, 3]]
    window = pulls((4, 0, 0, 1), (1, 4, 0, 0), (0, 1, 4, 0), (0, 0, 1, 4))
    assert window.rounds(4) == [[1]]
    assert pulls((4, 0), (0, 4)).rounds(4) == []


def test_keys_arrive_in_the_order_of_the_kernel(monkeypatch):
    """Unless they are in many runs there."""
    table = [[(Span(2, 4),), (Span(0, 3),)], [(), (Span(0, 4),)]]
    order = (4, 3, 0), (0, 4, 3)  # the second rank's keys first
    found = pulled.Pulls(table, 6, 0, order)
    assert found.ordered == [(0, 2, 3, 4), (1, 0, 0, 3)]
    assert found.compact == [(0, 2, 0, 4), (1, 0, 4, 3)]
    assert pulled.Pulls(table, 6, 0, ((4, 2, 0), (0, 4, 2), (6, 1, 6))).ordered == [
        (0, 2, 2, 4), (1, 0, 0, 2), (1, 2, 6, 1),
    ]  # fmt: skip
    assert pulled.Pulls(table, 6, 0, None).ordered is None
    monkeypatch.setattr(pulled, "_MOST_ORDERED", 2)
    assert pulled.Pulls(table, 6, 0, order).ordered == found.ordered
    monkeypatch.setattr(pulled, "_MOST_ORDERED", 1)
    assert pulled.Pulls(table, 6, 0, order).ordered is None


def test_numbers_are_worked_out_once(monkeypatch, rooms):
    """For documents, shapes and strides."""
    made, here_of = [], pulled.here_of
    monkeypatch.setattr(pulled, "here_of", lambda *x: made.append(1) or here_of(*x))
    rooms.most_views = 8
    problems = [VarlenProblem(x) for x in (LENGTHS, (24, 24), (23, 25))]
    starts = [x.starts() for x in problems]

    def body(rank):
        for number in (0, 0, 1, 2, 0):
            run_sharded(problems[number], init_device_mesh("cpu", (2,)), starts=starts[number])

    with cp_dispatch.enabled():
        run_threads(2, body)
    # Keys and gradients, on two ranks. The documents that end with the shards move nothing.
    assert len(made) == 2 * 2 * 2


class Limited(Memory):
    ALLOCATE = Memory.ALLOCATE | {"empty", "zeros", "zeros_like", "empty_like", "new_full"}


WAYS = "forward", "backward", "backward without keys"


def call_of(way: str, rank: int, ranks: int, mesh, layout: str, dtype=torch.float32):
    """A repeatable call of an op of one rank."""
    device, balancer = mesh.device_type, LAYOUTS[layout](ranks)
    starts = torch.tensor([0, 40, 48], dtype=torch.int32, device=device)
    options = (
        starts, starts, [-1, 0], None, 48, 48, False, None, [ranks], rank,
        ring_group_name(mesh, (0,)), "" if balancer is None else balancer.text,
    )  # fmt: skip
    # Strided in the head dim, so that a dense copy is made.
    query, key, value, grad = (
        torch.randn(48 // ranks, 4, 16, device=device, dtype=dtype)[..., ::2] for _ in range(4)
    )
    out, lse = ops._forward(query, key, value, *options)
    if way == "forward":
        return lambda: ops._forward(query, key, value, *options)
    tensors = grad.contiguous(), query, key, value, out, lse
    return lambda: ops._backward(*tensors, *options, way == "backward")


@pytest.mark.parametrize("layout", ["natural", "head-tail", "near blocks"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("failing", [(1,), (0, 2)], ids=str)
def test_memory_runs_out_anywhere(failing, way, layout, rooms):
    """Then the other ranks do not wait, and the next call finds no flag."""
    ranks = 3

    def make(rank: int):
        return call_of(way, rank, ranks, init_device_mesh("cpu", (ranks,)), layout), None

    found = failures(rooms, ranks, failing, Limited, make)
    assert all((found[rank] > 2) == (rank in failing) for rank in range(ranks)), found
    assert rooms.used == {"varlen"}
