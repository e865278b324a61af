"""What is sent, counted in bytes, and whether it arrives: the ops alone, with ranks as threads."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.by_need.kept import Kept
from cp_dispatch.by_need.ownership import ownership
from cp_dispatch.flex import exchange, hops, prepared
from cp_dispatch.flex import needs as needs_module
from cp_dispatch.flex.cut import Blocks, dense, unpack
from cp_dispatch.flex.hops import window
from cp_dispatch.flex.mask_job import MaskJob
from cp_dispatch.flex.needs import (
    everything,
    most_runs,
    moves,
    needs_of,
    packs,
    pays_to_gather,
    rows_sent,
)
from cp_dispatch.flex.pulled import PulledKeys
from cp_dispatch.flex.rows import split_rows
from cp_dispatch.groups import ring_group_name
from cp_dispatch.layouts import Span
from cp_dispatch.native.permute import span_indices
from tests.distributed.rooms import Rooms
from tests.distributed.threads import run_threads

OPS = torch.ops.cp_dispatch
B, HKV, D, DV = 2, 2, 3, 5
ROW = B * HKV * (D + DV) * 4  # bytes of one position's key and value


class Counter:
    """The bytes that each rank sends to others."""

    def __init__(self, monkeypatch):
        self.sent: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        swap, gather = dist.all_to_all_single, exchange.all_gather_single

        def count(size: int) -> None:
            with self._lock:
                self.sent.setdefault(dist.get_rank(), []).append(size)

        def counted_swap(receive, send, incoming, outgoing, group=None):
            assert sum(outgoing) == send.nbytes and sum(incoming) == receive.nbytes
            assert outgoing[dist.get_rank()] == 0
            count(send.nbytes)
            return swap(receive, send, incoming, outgoing, group=group)

        def counted_gather(receive, send, group=None):
            count(send.nbytes * (dist.get_world_size(group) - 1))
            return gather(receive, send, group=group)

        monkeypatch.setattr(exchange.dist, "all_to_all_single", counted_swap)
        monkeypatch.setattr(exchange, "all_gather_single", counted_gather)

    def of(self, rank: int) -> int:
        return sum(self.sent.get(rank, []))


def positions(owned, rank: int) -> torch.Tensor:
    """``(lanes, rows)``."""
    return torch.stack([span_indices(owned.spans(rank, lane)) for lane in range(owned.lanes)])


def run_ops(mask, length: int, ranks: int, layout="", whole=False, rooms=None):
    """Bring keys to the ranks and gradients back, and check every row of both.

    Rank r's gradient of the key at position p is p + 1000 r.
    """
    owned = ownership(length, (ranks,), layout, (0, B) if layout and _rows(layout) > 1 else None)
    generator = torch.Generator().manual_seed(length)
    key = torch.randn(B, HKV, length, D, generator=generator)
    value = torch.randn(B, HKV, length, DV, generator=generator)
    tensors = mask.as_tuple()[2:6]
    blocks = list(mask.BLOCK_SIZE)
    tables = (mask.to_dense() > 0).any(1)
    tables = tables.expand(owned.lanes, -1, -1) if owned.lanes > 1 else tables.any(0, keepdim=True)
    if whole:
        needs = everything(owned, owned)
    else:
        needs = needs_of(tables, owned, owned, tuple(blocks))

    def needed(rank: int, lane: int) -> torch.Tensor:
        return span_indices(needs[rank][lane])

    def take(x, rank):
        place = positions(owned, rank)
        return torch.stack([x[b][:, place[b if len(place) > 1 else 0]] for b in range(B)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        arguments = (
            *tensors, length, length, blocks, [0, B, 0, HKV], [ranks], rank,
            ring_group_name(mesh, (0,)), layout, False, whole,
        )  # fmt: skip
        own = take(key, rank), take(value, rank)
        for _ in range(2):  # the second time with what is cached
            buffer = OPS.flex_bring(*own, *arguments, True, False)
            got = split_rows(buffer, [D, DV])
        for lane in range(owned.lanes):
            rows = slice(lane, lane + 1) if owned.lanes > 1 else slice(None)
            index = needed(rank, lane)
            rest = torch.ones(length, dtype=torch.bool)
            rest[index] = rest[positions(owned, rank)[lane]] = False
            for mine, true in zip(got, (key, value), strict=True):
                assert torch.equal(mine[rows][:, :, index], true[rows][:, :, index])
                others = mine[rows][:, :, rest]
                # Copy engines move only needed rows, even if a collective gathers all.
                gathered = rooms is None and pays_to_gather(needs, owned)
                assert torch.equal(others, true[rows][:, :, rest] * float(gathered))
        # Kernels read every row of a block that this rank's mask lists, and other memory is never
        # written. So all rows of these blocks must be there.
        listed = listed_blocks(arguments)
        for b in range(B):
            blocks_of_row = listed[b if len(listed) > 1 else 0].nonzero().flatten()
            starts = (blocks_of_row * blocks[1]).view(-1, 1)
            index = (starts + torch.arange(blocks[1])).flatten()
            index = index[index < length]
            for mine, true in zip(got, (key, value), strict=True):
                assert torch.equal(mine[b][:, index], true[b][:, index])
        place = torch.arange(length).view(1, 1, -1, 1)
        grads = [(place * (rank + 1) * 1.0).expand(B, HKV, length, n).clone() for n in (D, DV)]
        for _ in range(1 if rooms is None else 2):
            got = OPS.flex_bring_back(*grads, *own, *arguments)
        mine = positions(owned, rank)
        for lane in range(owned.lanes):
            rows = slice(lane, lane + 1) if owned.lanes > 1 else slice(None)
            factor = torch.zeros(length)
            for taker in range(ranks):
                factor[needed(taker, lane)] += taker + 1
            want = (place.flatten() * factor)[mine[lane]]
            for x in got:
                assert torch.equal(x[rows], want.view(1, 1, -1, 1).expand_as(x[rows]))

    run_threads(ranks, body)
    return needs, owned


def listed_blocks(arguments) -> torch.Tensor:
    """``(B or 1, key blocks)``: the blocks that some row and head of the rank's mask computes."""
    job = MaskJob(*arguments)
    own = Blocks(*unpack(OPS.flex_cut(*arguments, -1, False), job.packed_shapes(-1)))
    columns = int(job.columns)
    table = dense(own.kv_num, own.kv_indices, columns)
    if own.full_kv_num is not None:
        table = table | dense(own.full_kv_num, own.full_kv_indices, columns)
    return table.any(2).any(1)


def _rows(layout: str) -> int:
    from cp_dispatch.layouts import from_text

    return from_text(layout).rows


def causal(b, h, q, k):
    return q >= k


@settings(max_examples=40)
@given(
    length=st.integers(1, 90), ranks=st.integers(2, 4), seed=st.integers(0, 20),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    kind=st.sampled_from(["", "head", "rows", "blocks"]), whole=st.booleans(),
    by_rooms=st.booleans(), long=st.booleans(), here=st.booleans(),
)  # fmt: skip
def test_rows_arrive(length, ranks, seed, density, kind, whole, by_rooms, long, here):
    layout = ""
    if kind == "head":
        layout = HeadTail(length, ranks).text
    elif kind == "rows" and length > 1:
        documents = [[1, length - 1], [length - 1, 1]]
        layout = PerDocumentHeadTail(documents, ranks).text
    elif kind == "blocks":
        length = -(-length // ranks) * ranks
        work = [1 + (seed + i) ** 2 % 13 for i in range(length)]
        layout = BlockBalanced(work, ranks, block_size=1).text
    stripes = torch.rand(B, 1, 12, 12, generator=torch.Generator().manual_seed(seed)) < density
    mask = create_block_mask(
        lambda b, h, q, k: stripes[b, 0, q // 8, k // 8], B, None, length, length, "cpu",
        BLOCK_SIZE=8,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        rooms = Rooms(patch) if by_rooms else None
        if rooms is not None:
            rooms.may_pull_here = here
        patch.setattr(prepared, "LONG_COPY", 0 if long else 2**40)
        run_ops(mask, length, ranks, layout, whole, rooms)
        if rooms is not None:
            rooms.assert_all_is_quiet()


@pytest.mark.parametrize("layout", ["", HeadTail(90, 3).text], ids=["natural", "head-tail"])
def test_rows_arrive_packed(layout, monkeypatch):
    monkeypatch.setattr(needs_module, "_WORTH_A_LAUNCH", 0)
    rooms, bring, packs = Rooms(monkeypatch), PulledKeys.bring, []
    monkeypatch.setattr(
        PulledKeys, "bring", lambda self, *x: (packs.append(self._packs), bring(self, *x))
    )
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (k % 32 < 16), B, None, 90, 90, "cpu", BLOCK_SIZE=8
    )
    run_ops(mask, 90, 3, layout, rooms=rooms)
    assert packs and all(packs)
    rooms.assert_all_is_quiet()


def test_a_window_moves_one_edge(monkeypatch):
    """A window of 128 on 4,096 tokens over 8 ranks: each rank sends its last rows to the next one,
    as many as a block has, and the backward returns the same number of gradients."""
    counter = Counter(monkeypatch)
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 128), None, None, 4096, 4096, "cpu"
    )
    run_ops(mask, 4096, 8)
    # Two forwards and one backward, with one collective each.
    for rank in range(8):
        forward = 128 * ROW if rank < 7 else 0
        backward = 128 * ROW if rank > 0 else 0
        assert counter.of(rank) == 2 * forward + backward, counter.sent
        assert len(counter.sent[rank]) == 3


def test_a_room_holds_what_others_need(monkeypatch):
    """For the same window it holds an edge, not the shard; and keys, then gradients."""
    rooms = Rooms(monkeypatch)
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 128), None, None, 4096, 4096, "cpu"
    )
    run_ops(mask, 4096, 8, rooms=rooms)
    sizes = {name: size for (_, name, _), size in rooms._sizes.items()}
    assert sizes == {"flex keys": 128 * ROW}


def test_documents_that_ranks_do_not_share_move_nothing(monkeypatch):
    counter = Counter(monkeypatch)
    ids = torch.arange(1024) // 256
    mask = create_block_mask(
        lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 1024, 1024, "cpu"
    )
    run_ops(mask, 1024, 4)
    assert not counter.sent, "no rank may even call a collective"
    # Two documents, each of which crosses one border: only the ranks at these borders send
    # anything.
    ids = torch.arange(1024) // 384
    mask = create_block_mask(
        lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 1024, 1024, "cpu"
    )
    run_ops(mask, 1024, 4)
    sent = [counter.of(rank) for rank in range(4)]
    # 0-383 | 384-767 | 768-1023 on ranks of 256: rank 1 needs the 256 rows of rank 0, rank 2 the
    # last 128 of rank 1, which come back as gradients.
    assert sent == [2 * 256 * ROW, (2 * 128 + 256) * ROW, 128 * ROW, 0]


def test_causal_moves_a_triangle(monkeypatch):
    counter = Counter(monkeypatch)
    mask = create_block_mask(causal, None, None, 512, 512, "cpu", BLOCK_SIZE=32)
    needs, owned = run_ops(mask, 512, 4)
    assert [rows_sent(needs, owned, rank) for rank in range(4)] == [384, 256, 128, 0]
    for rank in range(4):
        forward, backward = 128 * (3 - rank), 128 * rank
        assert counter.of(rank) == (2 * forward + backward) * ROW


@pytest.mark.parametrize("needed", [64, 56])
def test_all_keys_are_gathered(monkeypatch, needed):
    """Also those that nobody needs, if they are few."""
    counter = Counter(monkeypatch)
    mask = create_block_mask(lambda b, h, q, k: k < needed, None, None, 64, 64, "cpu", BLOCK_SIZE=8)
    needs, owned = run_ops(mask, 64, 4)
    assert [rows_sent(needs, owned, rank) for rank in range(4)] == [3 * 16] * 4
    assert all(sent[:2] == [3 * 16 * ROW] * 2 for sent in counter.sent.values())


def test_large_moves_go_one_distance_at_a_time(monkeypatch):
    """So a rank never holds a second copy of all other ranks' rows."""
    monkeypatch.setattr(exchange, "_AT_ONCE", 0)
    counter = Counter(monkeypatch)
    mask = create_block_mask(causal, None, None, 96, 96, "cpu", BLOCK_SIZE=8)
    run_ops(mask, 96, 3)
    # Rank 0 sends its 32 rows first to rank 1, then to rank 2.
    assert counter.sent[0][:2] == [32 * ROW, 32 * ROW]
    assert counter.sent[2][:2] == [0, 0]


@pytest.mark.parametrize("kind", ["", "head"])
@pytest.mark.parametrize("length, block", [(72, 8), (50, 8), (33, 16)])
def test_hops_bring_windows(kind, length, block, monkeypatch):
    """Every needed row of an owner arrives in its window, and gradients return to their owners. A
    hop at which no rank needs anything calls no collective."""
    ranks, edge = 3, block
    layout = HeadTail(length, ranks).text if kind else ""
    counter = Counter(monkeypatch)
    monkeypatch.setattr(hops.dist, "all_to_all_single", exchange.dist.all_to_all_single)
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < edge), None, None, length, length, "cpu",
        BLOCK_SIZE=block,
    )  # fmt: skip
    owned = ownership(length, (ranks,), layout)
    needs = needs_of((mask.to_dense() > 0).any(1), owned, owned, (block, block))
    table = moves(needs, owned)
    generator = torch.Generator().manual_seed(length)
    key, value = (torch.randn(B, HKV, length, n, generator=generator) for n in (D, DV))

    def body(rank: int) -> int:
        mesh, calls = init_device_mesh("cpu", (ranks,)), 0
        place = positions(owned, rank)[0]
        own = key[:, :, place], value[:, :, place]
        arguments = (
            *mask.as_tuple()[2:6], length, length, [block, block], [0, B, 0, HKV], [ranks], rank,
            ring_group_name(mesh, (0,)), layout, False, False,
        )  # fmt: skip
        for hop in range(ranks):
            owner, taker = (rank - hop) % ranks, (rank + hop) % ranks
            view = window(owned, owner, block)
            where = span_indices(view.runs)
            buffer = OPS.flex_hop(*own, *arguments, hop, True, False)
            got = split_rows(buffer, [D, DV])
            wanted = torch.isin(where, span_indices(table[owner][rank].places))
            for mine, true in zip(got, (key, value), strict=True):
                assert mine.size(2) == view.length == len(where)
                assert torch.equal(mine[:, :, wanted], true[:, :, where[wanted]])
            grads = [
                (where * (rank + 1.0)).view(1, 1, -1, 1).expand(B, HKV, -1, n) for n in (D, DV)
            ]
            shares = OPS.flex_hop_back(*grads, *own, *arguments, hop)
            given = torch.isin(place, span_indices(table[rank][taker].places))
            want = torch.where(given, place * (taker + 1.0), 0.0)
            for share in shares:
                assert torch.equal(share, want.view(1, -1, 1, 1, 1).expand_as(share))
            busy = any(table[o][(o + hop) % ranks].rows for o in range(ranks))
            calls += 2 * bool(busy and hop)
        return calls

    calls = run_threads(ranks, body)
    assert [len(counter.sent.get(rank, [])) for rank in range(ranks)] == calls
    if not kind and length % (ranks * block) == 0:
        assert calls == [2] * ranks, "keys come from the rank before alone"


def test_windows_of_blocks_on_a_border():
    owned = ownership(20, (2,))
    assert window(owned, 0, 8) == ((0, 1), (True, False), (Span(0, 16),), (Span(0, 10),))
    view = window(owned, 1, 8)
    assert view == ((1, 2), (False, True), (Span(8, 12),), (Span(10, 10),))
    assert view.places((Span(10, 3),)) == (Span(2, 3),)
    assert view.pieces(torch.arange(12)).tolist() == list(range(8, 20))
    laid = ownership(32, (2,), HeadTail(32, 2).text)
    view = window(laid, 0, 8)
    assert view.blocks == (0, 3) and view.runs == (Span(0, 8), Span(24, 8))
    assert view.own == (True, True), "full blocks stay full"
    assert view.pieces(torch.tensor([7, 8])).tolist() == [7, 24]


def test_moves_are_runs():
    """Rows that are adjacent both in the shard and among all positions are one run."""
    owned = ownership(16, (2,), HeadTail(16, 2).text)
    assert owned.spans(0) == (Span(0, 4), Span(12, 4))
    table = moves((((Span(0, 16),),), ((Span(2, 12),),)), owned)
    move = table[0][1]
    assert move.shard == (Span(2, 4),) and move.places == (Span(2, 2), Span(12, 2))
    assert table[1][1].places == (Span(4, 8),) and table[1][1].rows == 8


def test_kept_while_a_mask_lives_and_stays_as_it_is():
    kept, made = Kept(), []

    def make():
        made.append(None)
        return len(made)

    x = torch.arange(4, dtype=torch.int32)
    assert [kept.get([x, None], "key", make) for _ in range(2)] == [1, 1]
    assert kept.get([x.view(4), None], "key", make) == 1, "another tensor object, the same memory"
    assert kept.get([x], "other key", make) == 2
    assert kept.get([x[1:]], "key", make) == 3
    x.add_(1)
    assert kept.get([x], "key", make) == 4
    with torch.inference_mode():
        y = torch.arange(3)
        assert [kept.get([y], "key", make) for _ in range(2)] == [5, 6]
    del x
    kept.get([torch.arange(2)], "key", make)
    assert len(kept._entries) <= 1 and len(kept._near) <= 1, "what was of memory that is gone goes"


def test_kept_by_objects_only_as_they_were():
    """One tensor object whose memory, offset, shape or contents change; and memory that is reused
    at another object's address."""
    kept, made = Kept(), []

    def known(*tensors) -> bool:
        before = len(made)
        kept.get(tensors, "key", lambda: made.append(None))
        return len(made) == before

    x, y, memory = torch.arange(6), torch.arange(6), torch.arange(12)
    assert [known(x, None), known(x, None), known(None, x)] == [False, True, True]
    assert [known(x, y), known(x, y), known(y, x)] == [False, True, False]
    for change in (
        lambda: x.mul_(2),
        lambda: x.resize_(2, 3),
        lambda: x.t_(),
        lambda: setattr(x, "data", memory[:6]),
        lambda: setattr(x, "data", memory[3:9]),
        lambda: setattr(x, "data", memory[3:7]),
        lambda: setattr(x, "data", memory[3:11:2]),
    ):
        change()
        assert [known(x), known(x)] == [False, True]
    memory.add_(1)
    x = None
    for _ in range(200):
        assert not known(torch.arange(6)), "often at the same address as the one before"
    assert len(kept._near) <= 64 and len(kept._entries) <= 6


def test_kept_values_are_not_held_by_objects():
    kept = Kept()
    x = torch.arange(3)
    held = kept.get([x], "key", lambda: threading.Event())
    kept.get([x], "key", None)
    gone = weakref.ref(held)
    del held, x
    kept.get([torch.arange(3)], "key", lambda: None)
    assert gone() is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mask_of_other_contents_is_looked_at_anew(ranks, monkeypatch):
    """The same tensors, overwritten with another mask: no rank waits for the rows of the old
    one."""
    counter = Counter(monkeypatch)
    length = 16 * ranks
    near = create_block_mask(
        lambda b, h, q, k: q // 16 == k // 16, None, None, length, length, "cpu", BLOCK_SIZE=8
    )
    run_ops(near, length, ranks)
    assert not counter.sent
    far = create_block_mask(causal, None, None, length, length, "cpu", BLOCK_SIZE=8)
    for old, new in zip(near.as_tuple()[2:6], far.as_tuple()[2:6], strict=True):
        old.copy_(new)
    run_ops(near, length, ranks)
    assert counter.of(0) > 0


def test_rows_that_lie_side_by_side_come_in_one_copy():
    """The rows are scattered among all positions, but not in their owner's shard."""
    laid = BlockBalanced([1 + i * i % 13 for i in range(32)], 2, block_size=2).text
    owned = ownership(64, (2,), laid)
    table = moves(everything(owned, owned), owned)
    assert [len(table[0][1].pieces), len(table[0][1].shard)] == [12, 1]
    assert packs(table, 1) and most_runs(table, True) == 1 and most_runs(table, False) == 12
    owned = ownership(64, (2,), HeadTail(64, 2).text)
    table = moves(everything(owned, owned), owned)
    assert not packs(table, 1) and most_runs(table, True) == most_runs(table, False) == 2


def test_moves_are_worked_out_once_for_all_that_need_the_same(monkeypatch):
    """An exchange asks for those of everything, too. On 64 ranks they took 0.2 s for near blocks,
    and 14 s for documents in head-tail order."""
    overlaps, asked = needs_module._overlaps, []
    monkeypatch.setattr(needs_module, "_overlaps", lambda *x: asked.append(x) or overlaps(*x))
    lengths = [1 + 29 * i % 64 for i in range(60)]
    layout = PerDocumentHeadTail(lengths, 16)
    owned = ownership(layout.seq_len, (16,), layout.text)
    some = ((Span(3, 9),),)
    table = moves((*everything(owned, owned)[1:], some), owned)
    runs = sum(len(layout.spans(rank)[0]) for rank in range(16))
    assert len(asked) == 2 * runs
    for owner in range(16):
        assert all(table[owner][taker].places == owned.spans(owner) for taker in range(15))
        inside = [(max(a, 3), min(a + n, 12)) for a, n in owned.spans(owner)]
        assert table[owner][15].rows == sum(max(b - a, 0) for a, b in inside)
        assert [(x.owner, x.taker) for x in table[owner]] == [(owner, t) for t in range(16)]
