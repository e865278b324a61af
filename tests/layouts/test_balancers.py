"""Balancers on integers: known answers, permutations, and how well they balance."""

import copy
import itertools
import pickle
import random
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from cp_dispatch import (
    BlockBalanced,
    ContextParallelError,
    HeadTail,
    PerDocumentHeadTail,
    create_cp_block_mask,
)
from cp_dispatch.bounded import ByWeight
from cp_dispatch.layouts import Span, documents, from_text
from cp_dispatch.layouts.balancer import Balancer, _make_spans
from tests.ranks import fake_ranks

world_sizes = st.integers(1, 9)
doc_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@st.composite
def cut_rows(draw):
    """Documents of two or three batch rows with the same total."""
    length = draw(st.integers(1, 60))
    rows = []
    for _ in range(draw(st.integers(2, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=6)) - {length})
        rows.append([b - a for a, b in itertools.pairwise([0, *cuts, length])])
    return rows


@st.composite
def block_balancers(draw, near=None):
    world_size = draw(st.integers(1, 5))
    count = world_size * draw(st.integers(1, 6))
    number = st.one_of(st.integers(0, 50), st.floats(0, 1e6))
    rows = draw(st.lists(st.lists(number, min_size=count, max_size=count), min_size=1, max_size=3))
    return BlockBalanced(rows, world_size, draw(st.integers(1, 4)), near is not None and draw(near))


any_balancers = st.one_of(
    st.builds(HeadTail, st.integers(1, 80), world_sizes),
    st.builds(PerDocumentHeadTail, st.one_of(doc_lengths, cut_rows()), world_sizes),
    block_balancers(near=st.booleans()),
)


def owners(balancer, row: int = 0) -> str:
    """The rank of every position, as a string of digits."""
    owner = [" "] * balancer.seq_len
    for rank in range(balancer.world_size):
        for span in balancer.spans(rank)[row]:
            for position in range(span.position, span.position + span.length):
                owner[position] = str(rank)
    return "".join(owner)


def random_documents(rng: random.Random, length: int) -> list[int]:
    """Lengths like those of a text corpus: many short ones, and a few long ones."""
    lengths = []
    while length:
        lengths.append(min(length, 1 + int(rng.lognormvariate(6, 1.5))))
        length -= lengths[-1]
    return lengths


# -- Known answers ------------------------------------------------------------------------------


def test_head_tail():
    balancer = HeadTail(16, 2)
    assert owners(balancer) == "0000111111110000"
    assert balancer.spans(0) == ((Span(0, 4), Span(12, 4)),)
    assert balancer.spans(1) == ((Span(4, 8),),)
    assert balancer.indices.tolist() == [[*range(4), *range(12, 16), *range(4, 12)]]
    assert balancer.inverse.tolist() == [[*range(4), *range(8, 16), *range(4, 8)]]
    assert balancer.positions(1).tolist() == [[*range(4, 12)]]
    assert balancer.work(0) == balancer.work(1) == 68
    assert (balancer.natural_work(0), balancer.natural_work(1)) == (36, 100)
    assert balancer.natural_imbalance() == 100 / 68
    assert balancer.shard_lengths == (8, 8) and balancer.rows == 1


@pytest.mark.parametrize(
    ("length", "world_size", "want"),
    [(7, 1, "0000000"), (7, 2, "0011100"), (10, 4, "0011223210"), (3, 5, "012"), (5, 4, "01210")],
)
def test_head_tail_of_any_length(length, world_size, want):
    assert owners(HeadTail(length, world_size)) == want


def test_documents():
    assert owners(PerDocumentHeadTail([8, 4], 2)) == "001111000110"
    balancer = PerDocumentHeadTail([[8, 4], [4, 8]], 2)
    assert [owners(balancer, row) for row in range(2)] == ["001111000110", "011000111100"]
    assert balancer.rows == 2 and balancer.indices.shape == (2, 12)
    assert balancer.work(0) == balancer.work(1) == 46


def test_documents_of_any_length():
    balancer = PerDocumentHeadTail([37, 91, 128], 2)
    assert balancer.document_rows == (((19, 18), (45, 46), (64, 64)),)
    assert balancer.shard_lengths == (128, 128)
    assert balancer.work(0) + balancer.work(1) == sum(n * (n + 1) // 2 for n in (37, 91, 128))
    assert balancer.imbalance() < 1.01
    assert balancer.explain().splitlines()[2:] == [
        "row 0, document 0: 37 positions are not a multiple of 2 x 2 ranks, which own 19, 18",
        "row 0, document 1: 91 positions are not a multiple of 2 x 2 ranks, which own 45, 46",
    ]


def test_documents_shorter_than_the_ranks():
    assert owners(PerDocumentHeadTail([1] * 6, 3)) == "012012"
    # torch.chunk gives 5 rows to 4 ranks as 2, 2, 1 and 0.
    assert sorted(owners(PerDocumentHeadTail([1] * 5, 4))) == [*"00112"]


def test_blocks():
    balancer = BlockBalanced([1, 2, 3, 4, 5, 6], 2, block_size=2)
    # With a total of 21, and three blocks each, nothing is better than 10 and 11.
    assert sorted(map(balancer.work, range(2))) == [10, 11]
    assert balancer.seq_len == 12 and balancer.blocks == 6
    assert sorted(itertools.chain(*(balancer.owned_blocks(r)[0] for r in range(2)))) == [*range(6)]
    # Sorted greedy assigns 4 + 2 + 1 and 2 + 2 + 1, head-tail 7 and 5. One swap evens that out.
    assert [*map(BlockBalanced([4, 2, 2, 2, 1, 1], 2).work, range(2))] == [6, 6]
    assert owners(BlockBalanced([4, 2, 2, 2, 1, 1], 2, 1)) == "011100"


def test_blocks_of_several_rows_even_each_other_out():
    balancer = BlockBalanced([[3, 1], [1, 3], [2, 2]], 2, 4)
    assert balancer.work(0) == balancer.work(1) == 6


def test_blocks_from_a_block_mask():
    lengths = [300, 84, 640]
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))

    def mask(b, h, q, k):
        return (q >= k) & ((document[q] == document[k]) | (b == 1))

    for heads in 1, 3:
        block_mask = create_block_mask(mask, 2, heads, 1024, 1024, device="cpu", BLOCK_SIZE=64)
        balancer = BlockBalanced(block_mask, 4)
        assert (balancer.block_size, balancer.blocks, balancer.rows) == (64, 16, 2)
        first = [i + 1 - (0 if i < 5 else 4 if i < 6 else 6) for i in range(16)]
        assert balancer.block_work == (
            tuple(heads * n for n in first),
            tuple(heads * (i + 1) for i in range(16)),
        )
    same = create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 256, 256, device="cpu")
    assert BlockBalanced(same, 2) == BlockBalanced([1, 2], 2, 128)


def test_blocks_from_documents():
    assert BlockBalanced.from_documents([8], 2, 2).block_work == ((3, 7, 11, 15),)
    assert BlockBalanced.from_documents([3, 5], 2, 2).block_work == ((3, 4, 5, 9),)
    assert BlockBalanced.from_documents([[3, 5], [8]], 2, 2).rows == 2


def test_explain():
    assert HeadTail(10, 4).explain().splitlines() == [
        "HeadTail: 10 positions on 4 ranks, rows per rank 3 x 3 + 1 x 1",
        "imbalance 1.3818 (natural order 1.7455), work per rank 7 to 19",
        "10 positions are not a multiple of 2 x 4 ranks: odd shares take one more row from the "
        "front; nothing is padded",
    ]
    assert len(HeadTail(16, 4).explain().splitlines()) == 2
    assert PerDocumentHeadTail([3] * 9, 2).explain().endswith("... and 4 more")


# -- What holds for all of them -------------------------------------------------------------------


@given(any_balancers)
def test_layout(balancer):
    length, world = balancer.seq_len, range(balancer.world_size)
    natural = torch.arange(length).expand(balancer.rows, -1)
    assert torch.equal(balancer.indices.sort(1).values, natural)
    assert torch.equal(balancer.indices.gather(1, balancer.inverse), natural)
    assert torch.equal(balancer.inverse.gather(1, balancer.indices), natural)
    assert balancer.indices.dtype == balancer.inverse.dtype == torch.int64
    chunks = [chunk.numel() for chunk in torch.arange(length).chunk(balancer.world_size)]
    assert balancer.shard_lengths == (*chunks, *[0] * (balancer.world_size - len(chunks)))
    positions = [balancer.positions(rank) for rank in world]
    assert torch.equal(torch.cat(positions, 1), balancer.indices)
    for rank in world:
        assert positions[rank].shape == (balancer.rows, balancer.shard_lengths[rank])
        for row, spans in enumerate(balancer.spans(rank)):
            assert positions[rank][row].tolist() == [p + i for p, n in spans for i in range(n)]
            # Ascending, merged if adjacent, none empty.
            assert all(a.position + a.length < b.position for a, b in itertools.pairwise(spans))
            assert all(span.length for span in spans)


@given(any_balancers)
def test_is_a_value(balancer):
    assert from_text(balancer.text) == balancer
    again = pickle.loads(pickle.dumps(balancer))
    assert again == balancer == copy.deepcopy(balancer) and hash(again) == hash(balancer)
    assert torch.equal(again.indices, balancer.indices)
    assert balancer != HeadTail(81, 1) and balancer != balancer.text


@given(any_balancers)
def test_work(balancer):
    """No work is lost, and imbalance is the maximum over the mean."""
    work = [balancer.work(rank) for rank in range(balancer.world_size)]
    natural = [balancer.natural_work(rank) for rank in range(balancer.world_size)]
    assert sum(work) == pytest.approx(sum(natural))
    if sum(work):
        assert balancer.imbalance() == max(work) * len(work) / sum(work)
    assert 1 <= balancer.imbalance() + 1e-12


@given(st.one_of(doc_lengths, cut_rows()), world_sizes)
def test_work_counts_pairs(lengths, world_size):
    balancer = PerDocumentHeadTail(lengths, world_size)
    for rank in range(world_size):
        pairs = 0
        for row, spans in enumerate(balancer.spans(rank)):
            within = [i for n in balancer.doc_lengths[row] for i in range(n)]
            pairs += sum(within[p + i] + 1 for p, n in spans for i in range(n))
        assert balancer.work(rank) == pairs


@given(st.integers(1, 200), world_sizes)
def test_one_document_is_head_tail(length, world_size):
    one, whole = PerDocumentHeadTail([length], world_size), HeadTail(length, world_size)
    assert torch.equal(one.indices, whole.indices)
    assert [one.work(r) for r in range(world_size)] == [whole.work(r) for r in range(world_size)]


@given(doc_lengths, world_sizes)
def test_documents_are_shared_fairly(lengths, world_size):
    """In every document, ranks with full shards own the same number of rows, within 2."""
    balancer = PerDocumentHeadTail(lengths, world_size)
    full = [n == balancer.shard_lengths[0] for n in balancer.shard_lengths]
    for counts in balancer.document_rows[0]:
        counts = [count for count, is_full in zip(counts, full, strict=True) if is_full]
        assert max(counts) - min(counts) <= 2


# -- How well they balance ------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64))
def test_head_tail_is_exact_where_2w_divides(pieces, world_size):
    assert HeadTail(2 * world_size * pieces, world_size).imbalance() == 1.0


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), world_sizes)
def test_documents_are_exact_where_2w_divides(pieces, world_size):
    lengths = [2 * world_size * n for n in pieces]
    assert PerDocumentHeadTail(lengths, world_size).imbalance() == 1.0


@given(st.integers(1, 5000), st.integers(1, 64))
def test_head_tail_is_near_that_elsewhere(length, world_size):
    full = -(-length // world_size)
    uneven_shares = full * world_size / length
    assert HeadTail(length, world_size).imbalance() <= uneven_shares * (1 + 1 / full)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_hundred_document_mixes(world_size):
    """At 64 blocks per rank. Head-tail alone is far off, and so is natural order."""
    rng = random.Random(0)
    length = 64 * 128 * world_size
    for _ in range(100):
        lengths = random_documents(rng, length)
        blocks = BlockBalanced.from_documents(lengths, world_size)
        assert blocks.imbalance() <= 1.001  # the requirement: 1.05
        assert blocks.imbalance() <= head_tail_imbalance(blocks)
        assert PerDocumentHeadTail(lengths, world_size).imbalance() <= 1.001


def head_tail_imbalance(blocks: BlockBalanced) -> float:
    spans = HeadTail(blocks.seq_len, blocks.world_size)
    work = [
        sum(sum(blocks.block_work[0][p // 128 : (p + n) // 128]) for p, n in spans.spans(rank)[0])
        for rank in range(blocks.world_size)
    ]
    return max(work) * len(work) / sum(work)


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
@pytest.mark.parametrize("each", [64, 65, 128])
def test_blocks_of_a_causal_mask(world_size, each):
    blocks = BlockBalanced.from_documents([each * 128 * world_size], world_size)
    assert blocks.imbalance() <= (1.0 if each % 2 == 0 else 1.001)


@given(block_balancers())
def test_blocks_are_never_worse_than_head_tail(balancer):
    if balancer.rows == 1 and balancer.blocks % (2 * balancer.world_size) == 0:
        by_blocks = HeadTail(balancer.blocks, balancer.world_size)
        work = [
            sum(sum(balancer.block_work[0][p : p + n]) for p, n in by_blocks.spans(rank)[0])
            for rank in range(balancer.world_size)
        ]
        best = max(balancer.work(rank) for rank in range(balancer.world_size))
        assert best <= max(work) * (1 + 1e-12)


# -- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadTail(0, 2), "seq_len must be a positive int, got 0"),
        (lambda: HeadTail(8, 2.0), "world_size must be a positive int, got 2.0"),
        (lambda: HeadTail(8, True), "world_size must be a positive int, got True"),
        (lambda: PerDocumentHeadTail([8], 0), "world_size must be a positive int, got 0"),
        (lambda: BlockBalanced([1, 2], -1), "world_size must be a positive int, got -1"),
        (lambda: HeadTail(8, 2).positions(2), r"rank must be in 0..1, got 2"),
        (lambda: HeadTail(8, 2).work(-1), r"rank must be in 0..1, got -1"),
        (
            lambda: PerDocumentHeadTail([3, -1], 2),
            r"doc_lengths\[1\] must be .* got -1",
        ),
        (lambda: PerDocumentHeadTail([[3], [2, 0]], 2), r"doc_lengths\[1\]\[1\] .* got 0"),
        (lambda: PerDocumentHeadTail([0, 3, 5], 2), r"got \[0, 3, 5\]; if these are cumul.*diff"),
        (lambda: PerDocumentHeadTail(8, 2), "must be a sequence of ints, got 8"),
        (lambda: PerDocumentHeadTail([], 2), "at least one document"),
        (lambda: PerDocumentHeadTail([8, 0], 2), r"doc_lengths\[1\] must be a positive int, got 0"),
        (lambda: PerDocumentHeadTail([3, [2]], 2), "must be ints, or one sequence"),
        (lambda: PerDocumentHeadTail([[3, 4], [8]], 2), r"the same length, got totals \[7, 8\]"),
        (lambda: BlockBalanced([1, 2, 3], 2, 16), "3 blocks of 16 .* 2 x 16 = 32 .* block_size"),
        (lambda: BlockBalanced(1024, 2), "one number per block, got 1024"),
        (lambda: BlockBalanced([], 2), r"got rows of \[0\]"),
        (lambda: BlockBalanced([[1, 2], [3]], 1), r"got rows of \[2, 1\]"),
        (lambda: BlockBalanced([1, -2], 2), "work of block 1 must be >= 0 and .* got -2"),
        (lambda: BlockBalanced([1, float("nan")], 2), "work of block 1 .* got nan"),
        (lambda: BlockBalanced([1, 2], 2, 0), "block_size must be a positive int, got 0"),
        (lambda: BlockBalanced.from_documents([100], 2, 64), "2 x 64 = 128 .* block_size"),
        (lambda: from_text('["Zigzag",8,2]'), "is not the text of a balancer, .*BlockBalanced"),
        (lambda: from_text("HeadTail"), "is not the text of a balancer"),
        (lambda: from_text('["HeadTail",8]'), "is not the text of a balancer"),
        (lambda: from_text('["HeadTail",8,0]'), "world_size must be a positive int"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ContextParallelError, match=message):
        make()


def test_messages_do_not_list_thousands_of_documents():
    few = PerDocumentHeadTail([8, 4], 2)
    assert str(few) == repr(few) == "PerDocumentHeadTail(doc_lengths=((8, 4),), world_size=2)"
    many = PerDocumentHeadTail([[8] * 4000, [16] * 2000], 2)
    assert str(many) == "PerDocumentHeadTail(6000 documents in 2 batch rows, world_size=2)"


def test_documents_are_dealt_once(monkeypatch):
    """Also for the balancer that ops read from its text. A report deals out what it shows."""
    dealt, of = [], documents.head_tail
    monkeypatch.setattr(documents, "head_tail", lambda *x: dealt.append(x) or of(*x))
    lengths = [1 + i % 7 for i in range(1003)]
    balancer = PerDocumentHeadTail(lengths, 4)
    from_text.cache_clear()
    assert from_text(balancer.text).spans(1) == balancer.outline.spans(1) == balancer.spans(1)
    assert len(dealt) == len(lengths)
    assert balancer.explain().endswith("... and 998 more")
    assert len(dealt) < len(lengths) + 10
    assert len(balancer.document_rows[0]) == len(lengths)


def test_layouts_of_past_steps_keep_no_spans(monkeypatch):
    """Plans keep layouts. With 1,000 documents on 64 ranks each held 13 MB."""
    spans = ByWeight(_make_spans, lambda found: sum(map(len, found)), most=3)
    monkeypatch.setattr("cp_dispatch.layouts.balancer._assigned", spans)
    layouts = [PerDocumentHeadTail([i, 20 - i], 2) for i in range(1, 9)]
    first = [layout.spans(1) for layout in layouts]
    assert len(spans._known) == 1
    known = [kept for layout in layouts for kept in (*vars(layout), *vars(layout.outline))]
    assert not any("spans" in name for name in known)
    assert [layout.spans(1) for layout in layouts] == first


def test_balancers_with_one_text_may_be_of_two_classes():
    """Classes that somebody defines anew, as in a notebook."""

    def mine(of_rank):
        class Mine(Balancer):
            seq_len, world_size = 4, 2

            def _arguments(self):
                return [4, 2]

            def _assign(self):
                return [[[Span(2 * of_rank(rank), 2)] for rank in range(2)]]

        return Mine()

    first, last = mine(lambda rank: rank), mine(lambda rank: 1 - rank)
    assert first.text == last.text
    assert first.spans(0) == last.spans(1) == ((Span(0, 2),),)


def test_refuses_block_masks_that_do_not_fit():
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 500, 500, device="cpu")
    with pytest.raises(ContextParallelError, match="500 query positions .* block size 128"):
        BlockBalanced(mask, 2)
    with pytest.raises(ContextParallelError, match="block_size=64 differs from .* 128"):
        BlockBalanced(mask, 2, 64)
    with fake_ranks(2) as mesh:
        own = create_cp_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, mesh)
    with pytest.raises(ContextParallelError, match="has 2 rows of blocks, .* make 4; pass that"):
        BlockBalanced(own, 2)


def test_positions_are_the_callers_own():
    balancer = HeadTail(8, 2)
    balancer.positions(0).zero_()
    assert balancer.positions(0).tolist() == [[0, 1, 6, 7]]
    assert balancer.positions(0, device="meta").is_meta


def test_modes_at_first_use_do_not_stick():
    fake, inference, device = HeadTail(12, 3), HeadTail(20, 2), HeadTail(28, 2)
    with FakeTensorMode():
        assert fake.inverse.shape == (1, 12)
    with torch.inference_mode():
        assert inference.inverse.shape == (1, 20)
    with torch.device("meta"):
        assert device.inverse.shape == (1, 28)
    for balancer in fake, inference, device:
        natural = torch.arange(balancer.seq_len)
        for x in balancer.indices, balancer.inverse:
            assert type(x) is torch.Tensor and not x.is_inference() and x.device.type == "cpu"
            assert torch.equal(x[0].sort().values, natural)


def test_numbers_of_any_kind():
    numbers = torch.tensor([1, 2, 3, 4])
    assert (
        BlockBalanced(numbers, 2)
        == BlockBalanced([1.0, 2, 3, 4], 2)
        == BlockBalanced([numbers, numbers], 2)
    )
    assert PerDocumentHeadTail(torch.tensor([[3, 5], [3, 5]]), 2) == PerDocumentHeadTail((3, 5), 2)
    rows = [torch.tensor([3, 5]), torch.tensor([4, 2, 2])]  # as cu_seq.diff() returns them
    assert PerDocumentHeadTail(rows, 2) == PerDocumentHeadTail([[3, 5], [4, 2, 2]], 2)
    with pytest.raises(ContextParallelError, match="at least one document"):
        PerDocumentHeadTail([torch.tensor([])], 2)
    assert HeadTail(torch.tensor(8), 2) == HeadTail(8, 2)
    assert repr(BlockBalanced(numbers, 2)).startswith(
        "BlockBalanced(4 blocks of 128, world_size=2,"
    )
    # Caches of compiled graphs distinguish layouts by their representations.
    assert repr(BlockBalanced(numbers, 2)) != repr(BlockBalanced([4, 3, 2, 1], 2))


def test_outlines_are_made_while_other_threads_work_things_out():
    """This raised RuntimeError, because a dict changed during iteration."""
    balancer, number, before = HeadTail(16, 2), itertools.count(), sys.gettrace()

    def another_thread(*_):
        vars(balancer)[f"worked out {next(number)}"] = None
        return another_thread

    sys.settrace(another_thread)
    try:
        outline = balancer.outline
    finally:
        sys.settrace(before)
    assert outline == balancer and outline is not balancer


def test_an_outline_has_no_indices():
    layout = HeadTail(16, 2)
    assert layout.indices.numel() == layout.inverse.numel() == 16
    outline = layout.outline
    assert outline == layout and outline.spans(1) == layout.spans(1)
    assert not {"indices", "inverse"} & vars(outline).keys()
    assert outline.outline is outline


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_owns_nothing(rank):
    for balancer in (HeadTail(8, 2), PerDocumentHeadTail([3, 5], 2), BlockBalanced([1, 2], 2, 4)):
        with pytest.raises(ContextParallelError, match=rf"rank must be in 0..1, got {rank}"):
            balancer.positions(rank)


def test_positions_in_a_compiled_function():
    """As in a model that computes its RoPE there; without a graph break, once they were made."""
    layout = HeadTail(16, 2)
    own = layout.positions(1)
    taken = torch.compile(lambda x: x[layout.positions(1)], fullgraph=True, backend="eager")
    assert torch.equal(taken(torch.arange(16)), own)
