"""Exchanges by groups of heads: what arrives, how many bytes are sent, and how long tokens live."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from cp_dispatch import BlockBalanced, ContextParallelError, HeadTail, PerDocumentHeadTail
from cp_dispatch.flex import flight, pulled, sums
from cp_dispatch.flex import group_ops as _ops  # noqa: F401  defines them
from cp_dispatch.flex.groups import count_groups, keys_travel, spans
from cp_dispatch.flex.mask_job import MaskJob
from cp_dispatch.flex.needs import Move
from cp_dispatch.groups import ring_group_name
from cp_dispatch.layouts import Span
from tests.distributed.rooms import Rooms
from tests.distributed.threads import run_threads
from tests.flex.test_exchange_threads import Counter

OPS = torch.ops.cp_dispatch
B, HKV, D, DV = 2, 4, 3, 5


def causal(b, h, q, k):
    return q >= k


def make_layout(kind: str, mask, length: int, ranks: int) -> str:
    return {
        "": lambda: "",
        "head-tail": lambda: HeadTail(length, ranks).text,
        "rows": lambda: PerDocumentHeadTail([[1, length - 1], [length - 1, 1]], ranks).text,
        "blocks": lambda: BlockBalanced(mask, ranks).text,
    }[kind]()


def run_groups(mask, length: int, ranks: int, layout="", whole=False, groups=2, twice=True):
    """Exchange all groups both ways, and compare with one exchange of all heads."""
    generator = torch.Generator().manual_seed(length)
    tensors = [torch.randn(ranks, B, HKV, length, n, generator=generator) for n in (D, DV)]
    grads = [torch.randn(ranks, B, HKV, length, n, generator=generator) for n in (D, DV)]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        arguments = (
            *mask.as_tuple()[2:6], length, length, list(mask.BLOCK_SIZE), [0, B, 0, HKV], [ranks],
            rank, ring_group_name(mesh, (0,)), layout, False, whole,
        )  # fmt: skip
        job = MaskJob(*arguments)
        rows = job.keys.rows(rank)
        own = [x[rank, :, :, :rows] for x in tensors]
        for _ in range(1 + twice):
            want = OPS.flex_bring(*own, *arguments, True, False)
            home = OPS.flex_bring_back(*(x[rank] for x in grads), *own, *arguments)
            token, given_token = OPS.flex_start(*own, *arguments, groups, True, False), None
            for group, heads in enumerate(spans(HKV, groups)):
                got = OPS.flex_arrive(token, None, *own, *arguments, groups, group, True)
                same = want.narrow(3, *heads)
                assert torch.equal(got, same) or arrived_by_need(job, got, same)
                parts = [x[rank].narrow(1, *heads) for x in grads]
                given_token = OPS.flex_give(given_token, *parts, *own, *arguments, groups, group)
            back = OPS.flex_collect(given_token, *own, *arguments, groups)
            for mine, theirs, like in zip(back, home, own, strict=True):
                assert (
                    torch.equal(mine, theirs) and mine.stride() == torch.empty_like(like).stride()
                )

    run_threads(ranks, body)
    assert not flight._flights


def arrived_by_need(job: MaskJob, got, want) -> bool:
    """Copy engines move only needed rows, even if a collective gathers all."""
    moved = job.new_exchange(got.device)
    flat, true = (x.flatten(2).flatten(0, 1) for x in (got, want))
    return moved.gathers and all(
        torch.equal(flat[place : place + count], true[place : place + count])
        for owner in range(job.keys.world_size)
        for _, place, count in moved.table[owner][job.ring_rank].pieces
    )


@pytest.fixture(params=[False, True], ids=["collectives", "rooms"])
def rooms(request, monkeypatch):
    return Rooms(monkeypatch) if request.param else None


@settings(max_examples=12)
@given(
    length=st.integers(2, 90), ranks=st.integers(2, 4), seed=st.integers(0, 20),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]), kind=st.sampled_from(["", "head-tail", "rows"]),
    whole=st.booleans(), groups=st.sampled_from([2, 4]), by_rooms=st.booleans(),
)  # fmt: skip
def test_groups_arrive(length, ranks, seed, density, kind, whole, groups, by_rooms):
    stripes = torch.rand(B, 1, 12, 12, generator=torch.Generator().manual_seed(seed)) < density
    mask = create_block_mask(
        lambda b, h, q, k: stripes[b, 0, q // 8, k // 8], B, None, length, length, "cpu",
        BLOCK_SIZE=8,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        rooms = Rooms(patch) if by_rooms else None
        run_groups(mask, length, ranks, make_layout(kind, mask, length, ranks), whole, groups)
        if rooms is not None:
            rooms.assert_all_is_quiet()


@pytest.mark.parametrize("kind", ["", "head-tail", "blocks"])
def test_no_more_bytes_by_collectives(kind, monkeypatch):
    """As many bytes as in one exchange, each way, with one collective for each group."""
    mask = create_block_mask(causal, None, None, 128, 128, "cpu", BLOCK_SIZE=8)
    counter = Counter(monkeypatch)
    run_groups(mask, 128, 4, make_layout(kind, mask, 128, 4), twice=False)
    for rank in range(4):
        there, back, *by_groups = counter.sent[rank]
        assert by_groups == [there // 2, there // 2, back // 2, back // 2], counter.sent


def test_rooms_hold_what_is_read(monkeypatch):
    """Copy engines move only needed rows, for keys and shares alike, even if a collective would
    gather all. For many runs, collectives are used instead."""
    rooms = Rooms(monkeypatch)
    mask = create_block_mask(causal, None, None, 128, 128, "cpu", BLOCK_SIZE=8)
    run_groups(mask, 128, 4, HeadTail(128, 4).text, twice=False)
    row = B * HKV * (D + DV) * 4
    # There are 8 pieces of 16 rows, and rank r owns r and 7 - r. It reads all pieces before 7 - r
    # except r. Of r and 7 - r others computed gradients: 3 ranks those of the first piece, and r
    # ranks those of the second.
    read, home = ([n * 16 * row for n in pieces] for pieces in ((6, 5, 4, 3), (3, 4, 5, 6)))
    # Once for all heads, by way of one room, and once by groups.
    by_keys = [2 * there + back for there, back in zip(read, home, strict=True)]
    assert [rooms.sent["flex keys", r] for r in range(4)] == by_keys
    assert [rooms.sent["flex gradients", r] for r in range(4)] == home
    rooms.assert_all_is_quiet()
    rooms.sent.clear()
    monkeypatch.setattr("cp_dispatch.flex.pulled.MOST_RUNS", 1)
    run_groups(mask, 128, 4, HeadTail(128, 4).text, twice=False)
    # Keys by collectives, gradients as before.
    assert [rooms.sent["flex keys", r] for r in range(4)] == home
    assert [rooms.sent["flex gradients", r] for r in range(4)] == home


@pytest.mark.parametrize("kind", ["", "head-tail"])
def test_gradients_of_many_runs_are_summed_by_row(kind, monkeypatch):
    """Each group's shares, those that arrive after the rank's own."""
    rooms = Rooms(monkeypatch)
    monkeypatch.setattr(sums, "MOST_STRETCHES", 0)
    by_row, summed = pulled.PulledGradients._sum_by_row, []
    monkeypatch.setattr(
        pulled.PulledGradients, "_sum_by_row", lambda *x: summed.append(0) or by_row(*x)
    )
    mask = create_block_mask(causal, None, None, 96, 96, "cpu", BLOCK_SIZE=8)
    run_groups(mask, 96, 3, make_layout(kind, mask, 96, 3), groups=2, twice=False)
    assert len(summed) == 3 * (1 + 2)  # of all heads, and of each group
    rooms.assert_all_is_quiet()


def test_tokens(rooms):
    """Keys also arrive without a flight, and a second time. Gradients do not."""
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 16), None, None, 64, 64, "cpu", BLOCK_SIZE=8
    )

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        arguments = (
            *mask.as_tuple()[2:6], 64, 64, [8, 8], [0, B, 0, HKV], [2], rank,
            ring_group_name(mesh, (0,)), "", False, False,
        )  # fmt: skip
        own = torch.randn(B, HKV, 32, D), torch.randn(B, HKV, 32, DV)
        want = OPS.flex_bring(*own, *arguments, True, False)[:, :, :, 2:]
        token = OPS.flex_start(*own, *arguments, 2, True, False)
        number = int(token)
        for _ in range(2):
            got = OPS.flex_arrive(token, None, *own, *arguments, 2, 1, True)
            assert torch.equal(got, want)
        unknown = torch.tensor(-1)
        assert torch.equal(OPS.flex_arrive(unknown, None, *own, *arguments, 2, 1, True), want)
        assert number in flight._flights
        del token
        assert number not in flight._flights, "and its memory goes"
        for call in (
            lambda: OPS.flex_collect(unknown, *own, *arguments, 2),
            lambda: OPS.flex_give(unknown, *own, *own, *arguments, 2, 1),
        ):
            with pytest.raises(ContextParallelError, match="have not been kept"):
                call()

    run_threads(2, body)
    if rooms is not None:
        rooms.assert_all_is_quiet()


def test_how_many_groups():
    mib = 2**20
    assert count_groups(32768, 32, 8, 384 * mib) == 4
    assert count_groups(32768, 32, 2, 384 * mib) == 2
    assert count_groups(32768, 32, 1, 384 * mib) == 1, "one key head"
    assert count_groups(16384, 32, 8, 192 * mib) == 2, "kernels would be small"
    assert count_groups(8192, 32, 8, 96 * mib) == 1
    assert count_groups(32768, 32, 8, 8 * mib) == 2, "little to bring"
    assert spans(8, 4) == ((0, 2), (2, 2), (4, 2), (6, 2))
    layout = HeadTail(64, 2)
    assert keys_travel("gather", None, True) and keys_travel("exchange", layout, True)
    assert keys_travel("exchange", None, False)
    assert not keys_travel("exchange", None, True), "a graph knows nothing of its masks"
    assert not keys_travel("ring", layout, True)
    near = BlockBalanced([1, 2, 3, 4], 2, block_size=16, near=True)
    assert not keys_travel("exchange", near, True)


def test_pieces_of_moves():
    move = Move(0, 1, (Span(0, 6), Span(8, 4)), (Span(10, 2), Span(20, 7), Span(40, 1)))
    assert move.pieces == [(0, 10, 2), (2, 20, 4), (8, 24, 3), (11, 40, 1)]
    assert Move(0, 1, (), ()).pieces == []
