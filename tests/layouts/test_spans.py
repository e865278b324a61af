"""Integer geometry, checked by painting: every score is computed exactly once, by tiles that
kernels support."""

import math

import expecttest
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from cp_dispatch.layouts import (
    Geometry,
    HeadTail,
    PerDocumentHeadTail,
    RowGeometry,
    Span,
    Tile,
    chunk_spans,
    laid_out,
    natural,
)
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.layouts.tiles import Part, ShardSpans, tiles
from cp_dispatch.schedules import mirrored_ring

lengths = st.integers(1, 24)
world_sizes = st.integers(1, 9)
ring_shapes = st.one_of(st.tuples(world_sizes), st.lists(st.integers(1, 4), max_size=3).map(tuple))


@st.composite
def layouts(draw, length: int, world_size: int):
    """Any partition of ``[0, length)`` into spans, assigned to the ranks in any order."""
    cuts = draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=2 * world_size))
    edges = [0, *sorted(cuts - {length}), length]
    spans = [Span(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
    ranks: list[list[Span]] = [[] for _ in range(world_size)]
    for span in draw(st.permutations(spans)):
        ranks[draw(st.integers(0, world_size - 1))].append(span)
    return tuple(map(tuple, ranks))


@st.composite
def natural_geometries(draw):
    return natural(draw(lengths), draw(lengths), draw(ring_shapes), draw(st.booleans()))


@st.composite
def any_geometries(draw):
    world_size = draw(world_sizes)
    query, key = (draw(layouts(draw(lengths), world_size)) for _ in range(2))
    return Geometry(query, key, draw(st.booleans()))


def positions(spans) -> list[int]:
    """The global position of every local row."""
    return [span.position + i for span in spans for i in range(span.length)]


def painted(geometry: Geometry) -> torch.Tensor:
    """How often each score ``[query position, key position]`` is computed."""
    world = range(geometry.world_size)
    board = torch.zeros(
        sum(map(geometry.query_length, world)), sum(map(geometry.key_length, world)), dtype=int
    )
    for rank in world:
        rows = positions(geometry.query_spans[rank])
        for owner in world:
            columns = positions(geometry.key_spans[owner])
            for tile in geometry.tiles(rank, owner):
                assert tile.query_start >= 0 and tile.key_start >= 0
                assert tile.query_length > 0 and tile.key_length > 0
                at = slice(tile.query_start, tile.query_start + tile.query_length)
                assert rows[at] == positions(tile.query_spans)
                at = slice(tile.key_start, tile.key_start + tile.key_length)
                assert columns[at] == positions(tile.key_spans)
                before = sum(map(geometry.key_length, range(owner)))
                assert tile.key_place == before + tile.key_start and tile.row is None
                for i in range(tile.query_length):
                    seen = i + 1 if tile.causal else tile.key_length
                    for j in range(seen):
                        board[rows[tile.query_start + i], columns[tile.key_start + j]] += 1
    return board


@given(st.one_of(natural_geometries(), any_geometries()))
def test_tiles_compute_every_score_of_the_mask_once(geometry):
    board = painted(geometry)
    mask = torch.ones_like(board)
    assert torch.equal(board, mask.tril() if geometry.causal else mask)


@given(st.one_of(natural_geometries(), any_geometries()))
def test_causal_tiles_are_square_and_only_in_causal_geometries(geometry):
    world = range(geometry.world_size)
    tiles = [t for rank in world for owner in world for t in geometry.tiles(rank, owner)]
    causal = [tile for tile in tiles if tile.causal]
    assert all(tile.query_length == tile.key_length for tile in causal)
    # Position 0 sees only itself, so a causal mask needs a causal tile.
    assert bool(causal) == geometry.causal


@pytest.mark.parametrize(
    "query, key, tiles",
    [
        # Both start at the same position: the square, then the rows past the last key.
        (Span(4, 4), Span(4, 4), [(0, 4, 0, 4, True)]),
        (Span(4, 4), Span(4, 2), [(0, 2, 0, 2, True), (2, 2, 0, 2, False)]),
        (Span(4, 2), Span(4, 4), [(0, 2, 0, 2, True)]),
        # Keys before the rows are seen completely, and those after them not at all.
        (Span(4, 4), Span(0, 4), [(0, 4, 0, 4, False)]),
        (Span(0, 4), Span(4, 4), []),
        # They neither start nor end together.
        (Span(4, 4), Span(2, 4), [
            (0, 4, 0, 2, False), (0, 2, 2, 2, True), (2, 2, 2, 2, False),
        ]),
        (Span(2, 4), Span(4, 4), [(2, 2, 0, 2, True)]),
    ],
)  # fmt: skip
def test_known_tiles(query, key, tiles):
    geometry = Geometry(((query,),), ((key,),), causal=True)
    assert [tile[:5] for tile in geometry.tiles(0, 0)] == tiles


@given(st.integers(1, 60), world_sizes, st.booleans(), st.data())
def test_balancers_are_painted_once_too(length, world_size, causal, data):
    """Also with a different layout for each batch row."""
    cut = data.draw(st.integers(0, length - 1))
    documents = [length - cut, cut] if cut else [length]
    for balancer in (
        HeadTail(length, world_size),
        PerDocumentHeadTail([documents, documents[::-1], [length]], world_size),
    ):
        geometry = laid_out(length, length, (world_size,), causal, balancer)
        rows = getattr(geometry, "rows", (geometry,))
        for row in rows:
            mask = torch.ones(length, length, dtype=int)
            assert torch.equal(painted(row), mask.tril() if causal else mask)
        for rank in range(world_size):
            for owner in range(world_size):
                tiles = geometry.tiles_of(rank, owner, 1, len(rows)) if len(rows) > 1 else ()
                expected = [
                    t._replace(row=i) for i, r in enumerate(rows[1:]) for t in r.tiles(rank, owner)
                ]
                assert list(tiles) == expected


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_head_tail_is_the_whole_block_and_then_halves(world_size):
    """The number of rows times keys is the same at every hop and on every rank, in one kernel
    call."""
    half = 3
    length = 2 * half * world_size
    geometry = laid_out(length, length, (world_size,), True, HeadTail(length, world_size))
    mirrored = mirrored_ring.geometry(length, length, (world_size,), True, None)
    for rank in range(world_size):
        for owner in range(world_size):
            (tile,) = [tile[:5] for tile in geometry.tiles(rank, owner)]
            if owner == rank:
                assert tile == (0, 2 * half, 0, 2 * half, True)
            elif owner < rank:
                assert tile == (0, 2 * half, 0, half, False)
            else:
                assert tile == (half, half, 0, 2 * half, False)
            work = [t.query_length * t.key_length for t in mirrored.tiles(rank, owner)]
            assert sum(work) == (4 if owner == rank else 2) * half**2 and len(work) == 1


@pytest.mark.parametrize("world_size", range(1, 10))
def test_mirrored_pieces_are_head_tail_pairs_of_the_mirror(world_size):
    length = 6 * world_size
    geometry = mirrored_ring.geometry(length, length, (world_size,), True, None)
    assert torch.equal(painted(geometry), torch.ones(length, length, dtype=int).tril())
    for rank, own in enumerate(geometry.query_spans):
        mine = {p for span in chunk_spans(length, (world_size,))[rank] for p in positions([span])}
        kept = mine & set(positions(own))
        assert len(kept) == (6 if 2 * rank == world_size - 1 else 3)


def test_full_mask_is_one_tile_of_the_two_shards():
    geometry = natural(10, 6, (4,), causal=False)
    row, keys = ShardSpans((Span(9, 1),)), ShardSpans((Span(0, 2),))
    assert geometry.tiles(3, 0) == (Tile(0, 1, 0, 2, False, Part(row, 0, 1), Part(keys, 0, 2)),)
    assert geometry.tiles(0, 3) == ()  # 6 keys in chunks of 2 leave none for rank 3


@given(lengths, world_sizes)
def test_chunk_spans_are_those_of_torch_and_dtensor(length, world_size):
    spans = chunk_spans(length, (world_size,))
    sizes = [sum(span.length for span in own) for own in spans]
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(world_size)]
    assert sizes == chunks + [0] * (world_size - len(chunks))
    for rank, own in enumerate(spans):
        size, offset = Shard.local_shard_size_and_offset(length, world_size, rank)
        assert sizes[rank] == size
        assert own == ((Span(offset, size),) if size else ())


@given(st.integers(0, 40), ring_shapes)
def test_chunk_spans_of_several_mesh_dims_chunk_each_chunk_again(length, ring_shape):
    parts = [torch.arange(length)]
    for size in ring_shape:
        # torch.chunk returns fewer chunks, and Shard returns empty ones.
        chunks = [list(part.chunk(size)) if len(part) else [] for part in parts]
        parts = [x for own in chunks for x in own + [torch.arange(0)] * (size - len(own))]
    spans = chunk_spans(length, ring_shape)
    assert len(spans) == math.prod(ring_shape)
    assert [positions(own) for own in spans] == [part.tolist() for part in parts]


@given(st.integers(0, 9), st.integers(0, 99), st.integers(1, 9))
def test_chunk_cuts_a_span_where_it_lies(position, length, count):
    parts = chunk(Span(position, length), count)
    assert len(parts) == count
    assert positions(parts) == list(range(position, position + length))
    sizes = [part.length for part in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == -(-length // count)


def test_known_chunks_of_two_mesh_dims():
    """Two nodes of two ranks: 10 positions are split into 5 and 5, and each 5 into 3 and 2."""
    assert chunk_spans(10, (2, 2)) == (
        (Span(0, 3),), (Span(3, 2),), (Span(5, 3),), (Span(8, 2),),
    )  # fmt: skip
    assert chunk_spans(10, (4,)) != chunk_spans(10, (2, 2))
    assert chunk_spans(1, (2, 2)) == ((Span(0, 1),), (), (), ())
    assert chunk_spans(7, ()) == ((Span(0, 7),),)
    assert chunk_spans(0, (2,)) == ((), ())


@given(st.one_of(natural_geometries(), any_geometries()))
def test_last_hop_is_the_last_rank_that_needs_the_keys(geometry):
    size = geometry.world_size
    for owner in range(size):
        needed = [h for h in range(size) if geometry.tiles((owner + h) % size, owner)]
        assert geometry.last_hop(owner) == max(needed, default=0)
    assert geometry.key_transitions == max(map(geometry.last_hop, range(size)))


@pytest.mark.parametrize(
    "query_length, key_length, world_size, causal, last_hops",
    [
        (16, 16, 4, False, [3, 3, 3, 3]),
        (16, 16, 4, True, [3, 2, 1, 0]),
        (16, 16, 1, True, [0]),
        # No rank needs the keys past the last query.
        (4, 8, 4, True, [3, 2, 0, 0]),
        # Two queries and one key per rank: row 1 of rank 0 needs key 1, at hop 3, and so on.
        (8, 4, 4, True, [3, 3, 3, 3]),
        # Five positions in chunks of two: rank 3 owns none and needs none.
        (5, 5, 4, True, [2, 1, 0, 0]),
        (5, 5, 4, False, [2, 3, 3, 0]),
    ],
)
def test_known_last_hops(query_length, key_length, world_size, causal, last_hops):
    geometry = natural(query_length, key_length, (world_size,), causal)
    assert [geometry.last_hop(owner) for owner in range(world_size)] == last_hops
    assert geometry.key_transitions == max(last_hops)


@given(lengths, lengths, world_sizes)
def test_causal_natural_order_never_crosses_the_end_of_the_ring(one, other, size):
    # If there are no more queries than keys, a rank's keys start no earlier than its queries, so
    # only higher ranks see them.
    geometry = natural(min(one, other), max(one, other), (size,), causal=True)
    assert all(owner + geometry.last_hop(owner) < size for owner in range(size))


class TestBoards(expecttest.TestCase):
    """Which rank computes what: ``#`` whole, ``o`` a causal diagonal, ``%`` both, ``.`` skipped."""

    def board(self, geometry: Geometry) -> str:
        marks = {frozenset(): ".", frozenset({False}): "#", frozenset({True}): "o"}
        lines = []
        for rank in range(geometry.world_size):
            kinds = (
                frozenset(tile.causal for tile in geometry.tiles(rank, owner))
                for owner in range(geometry.world_size)
            )
            lines.append(f"rank {rank}  " + " ".join(marks.get(kind, "%") for kind in kinds))
        return "\n".join(lines)

    def test_causal(self):
        self.assertExpectedInline(
            self.board(natural(16, 16, (4,), True)),
            """\
rank 0  o . . .
rank 1  # o . .
rank 2  # # o .
rank 3  # # # o""",
        )

    def test_more_keys_than_queries(self):
        self.assertExpectedInline(
            self.board(natural(8, 16, (4,), True)),
            """\
rank 0  o . . .
rank 1  % . . .
rank 2  # o . .
rank 3  # % . .""",
        )

    def test_fewer_keys_than_queries(self):
        self.assertExpectedInline(
            self.board(natural(16, 8, (4,), True)),
            """\
rank 0  % o . .
rank 1  # # % o
rank 2  # # # #
rank 3  # # # #""",
        )


def test_rows_that_do_not_ascend_are_no_diagonal_of_their_own():
    """Rows of the second half come first here. The rows after them do not see the keys before."""
    spans = Span(4, 4), Span(0, 4)
    found = [tile[:5] for tile in tiles(spans, spans, True, 0)]
    assert sorted(found) == [(0, 4, 0, 4, True), (0, 4, 4, 4, False), (4, 4, 4, 4, True)]


def test_a_span_of_rows_looks_at_the_keys_beside_it_alone():
    """With a layout of 250 documents on 8 ranks, the tiles of one rank and one owner took 0.9 s."""
    asked = []

    class Counted(Span):
        @property
        def position(self):
            asked.append(self)
            return self[0]

    keys = tuple(Counted(4 * i, 2) for i in range(200))
    rows = tuple(Span(4 * i + 2, 2) for i in range(200))
    found = [tile[:5] for tile in tiles(rows, keys, True, 0)]
    assert found == [(2 * i, 2, 0, 2 * i + 2, False) for i in range(200)]
    assert len(asked) < 10 * len(keys)


def many_documents(ranks: int) -> Geometry:
    lengths = [1 + 29 * i % 64 for i in range(1000)]
    layout = PerDocumentHeadTail(lengths, ranks)
    return laid_out(layout.seq_len, layout.seq_len, (ranks,), True, layout)


def test_tiles_of_many_documents_are_kept(monkeypatch):
    """Every call made them anew, because the spans of all their keys were too many to keep."""
    geometry, made = many_documents(8), []
    monkeypatch.setattr(
        "cp_dispatch.layouts.geometry.tiles", lambda *key: made.append(key) or tiles(*key)
    )
    for _ in range(2):
        assert sum(len(geometry.tiles(1, owner)) for owner in range(8)) > 7000
    assert len(made) == 8


def test_spans_of_tiles_are_worked_out_only_where_they_are_read(monkeypatch):
    """With 1,000 documents on 8 ranks, those of one rank's tiles were 6 million and took 2 s."""
    cut = []
    monkeypatch.setattr(ShardSpans, "cut", lambda *part: cut.append(part) or ())
    found = many_documents(2).tiles(1, 0)
    assert len(found) > 500 and not cut
    assert found[0].query_spans == found[0].key_spans == () and len(cut) == 2


@given(st.one_of(natural_geometries(), any_geometries()))
def test_who_sees_whose_keys(geometry):
    rows = RowGeometry((geometry, geometry))
    for rank in range(geometry.world_size):
        for owner in range(geometry.world_size):
            found = bool(geometry.tiles(rank, owner))
            assert geometry.sees(rank, owner) == rows.sees(rank, owner) == found


def test_who_sees_whose_keys_takes_no_tiles(monkeypatch):
    """``explain()`` took 12 s to count blocks for 1,000 documents on 8 ranks."""
    monkeypatch.delattr(Geometry, "tiles")
    geometry = many_documents(8)
    for one in (geometry, RowGeometry((geometry,))):
        assert one.key_transitions == 7 and one.last_hop(3) == 7 and one.sees(3, 4)


def test_what_follows_from_all_ranks_is_worked_out_once(monkeypatch):
    """A ring asks for these at every hop. On 512 ranks a prediction took 20 seconds."""
    geometry, asked = natural(64 * 37, 64 * 37, (64,), True), []
    for name in ("key_length", "last_hop"):
        method = getattr(Geometry, name)

        def asks(self, rank, method=method, name=name):
            asked.append((name, rank))
            return method(self, rank)

        monkeypatch.setattr(Geometry, name, asks)
    for rank in range(64):
        assert geometry.key_transitions == 63
        assert all(geometry.tiles(rank, owner) for owner in range(rank + 1))
    assert len(asked) == len(set(asked)) == 2 * 64


@given(any_geometries())
def test_what_a_geometry_remembers_is_not_part_of_it(geometry):
    other = Geometry(geometry.query_spans, geometry.key_spans, geometry.causal)
    for rank in range(geometry.world_size):
        assert geometry.query_length(rank) == len(positions(geometry.query_spans[rank]))
        assert geometry.key_length(rank) == len(positions(geometry.key_spans[rank]))
    assert geometry == other and hash(geometry) == hash(other)


def test_lengths_are_added_up_once():
    """Every call checks its shards, which may have thousands of spans."""

    class Spans(tuple):
        times_read = 0

        def __iter__(self):
            self.times_read += 1
            return super().__iter__()

    spans = Spans(((Span(0, 4),), (Span(4, 4),)))
    geometry = Geometry(spans, spans, True)
    for _ in range(3):
        assert geometry.query_length(1) == geometry.key_length(0) == 4
    assert spans.times_read == 2
