"""Layouts for which few keys have to be sent: which ranks need which keys, and which of these have
to be sent."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from cp_dispatch import BlockBalanced, ContextParallelError
from cp_dispatch.layouts import balancer, deal_blocks, from_text
from cp_dispatch.layouts.deal_blocks import _even_out
from cp_dispatch.layouts.near_blocks import _Search
from cp_dispatch.layouts.near_keys import NearKeys, Traffic
from tests.layouts.test_balancers import owners, random_documents

ROWS = 128  # of one block


def first_keys(lengths: list[int]) -> list[int]:
    """The first key block that each query block needs, causal within documents."""
    edges = list(itertools.accumulate(lengths, initial=0))
    blocks = range(edges[-1] // ROWS)
    starts = (max(edge for edge in edges if edge <= block * ROWS) for block in blocks)
    return [start // ROWS for start in starts]


def mask_work(lengths: list[int]) -> list[int]:
    """The number of key blocks of each query block."""
    return [block - first + 1 for block, first in enumerate(first_keys(lengths))]


def blocks_moved(owned, first: list[int]) -> int:
    """The largest number of key blocks that a rank sends or receives."""
    owner = {block: rank for rank, blocks in enumerate(owned) for block in blocks}
    sent, got = [0] * len(owned), [0] * len(owned)
    for rank, blocks in enumerate(owned):
        for key in {key for block in blocks for key in range(first[block], block + 1)}:
            if owner[key] != rank:
                sent[owner[key]] += 1
                got[rank] += 1
    return max(sent + got)


def owned_by(balancer: BlockBalanced) -> list[tuple[int, ...]]:
    return [balancer.owned_blocks(rank)[0] for rank in range(balancer.world_size)]


def swapped(work: list, world_size: int) -> list[list[int]]:
    """Natural order, in which single blocks are swapped until the work is within 1%."""
    each = len(work) // world_size
    natural = [list(range(rank * each, (rank + 1) * each)) for rank in range(world_size)]
    return _even_out(natural, work, [0] * world_size, len(work), 1.01)


def uniform_documents(length: int, mean: int = 4096) -> list[int]:
    """The documents of tools/flex_bench.py."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while left := length - sum(lengths):
        lengths.append(min(left, int(torch.randint(1, 2 * mean, (), generator=generator))))
    return lengths


# -- Known answers ------------------------------------------------------------------------------


def test_whole_documents_change_places():
    work = [*range(1, 9), *range(1, 9), *[1, 2] * 8]
    balancer = BlockBalanced(work, 2, 1, near=True)
    assert owners(balancer) == "11111111" + "0" * 16 + "11111111"
    assert balancer.imbalance() == 1.0


def test_the_cut_of_the_note():
    balancer = BlockBalanced([*range(1, 7), 1, 2, *range(1, 5)], 2, 1, near=True)
    assert [*map(balancer.work, range(2))] == [17, 17]
    assert blocks_moved(owned_by(balancer), [0] * 6 + [6] * 2 + [8] * 4) <= 4


def test_one_swap():
    balancer = BlockBalanced([1, 1, 2, 2], 2, 1, near=True)
    assert [*map(balancer.work, range(2))] == [3, 3]
    assert sum(a != b for a, b in zip(owners(balancer), "0011", strict=True)) == 2
    assert balancer.text == '["BlockBalanced",[[1,1,2,2]],2,1,true]'
    assert balancer != BlockBalanced([1, 1, 2, 2], 2, 1)


@pytest.mark.parametrize("work, world_size", [
    ([2, 1, 1, 2], 2), ([0] * 8, 4), ([*range(1, 9), *[8] * 1016], 4), (mask_work([4096] * 16), 4),
    ([*range(1, 9)], 1),
], ids=["even", "none", "window", "equal documents", "one rank"])  # fmt: skip
def test_stays_in_natural_order(work, world_size):
    blocks = range(len(work))
    balancer = BlockBalanced(work, world_size, 1, near=True)
    assert [x for owned in owned_by(balancer) for x in owned] == [*blocks]


@pytest.mark.parametrize("tokens, world_size, mib, before", [
    (32768, 4, 5, 186), (8192, 4, 20, 72), (8192, 2, 16, 23),
])  # fmt: skip
def test_documents_of_the_benchmark(tokens, world_size, mib, before):
    """MiB that a rank sends or receives, at 4 KiB per row."""
    lengths = uniform_documents(tokens * world_size)
    first, work = first_keys(lengths), mask_work(lengths)
    balancer = BlockBalanced(work, world_size, ROWS, near=True)
    assert blocks_moved(owned_by(balancer), first) <= 2 * mib
    assert blocks_moved(swapped(work, world_size), first) >= 2 * before
    assert balancer.imbalance() <= 1.01
    assert max(len(balancer.spans(rank)[0]) for rank in range(world_size)) <= 8


# -- The estimate of who needs what ---------------------------------------------------------------


def test_work_of_several_heads():
    """A BlockMask's work counts key blocks of all its heads, which are cut at the same places."""
    work = mask_work(uniform_documents(16384))
    of_heads = BlockBalanced([8 * x for x in work], 4, ROWS, near=True)
    assert owned_by(of_heads) == owned_by(BlockBalanced(work, 4, ROWS, near=True))


def mask_of(kind: str, lengths: list[int]):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def mod(b, h, q, k):
        return {
            "documents": (q >= k) & (ids[q] == ids[k]),
            "window": (q >= k) & (q - k < 300),
            "windows in documents": (q >= k) & (q - k < 300) & (ids[q] == ids[k]),
            "whole documents": ids[q] == ids[k],
        }[kind]

    length = sum(lengths)
    return create_block_mask(mod, 1, 1, length, length, device="cpu", BLOCK_SIZE=64)


@pytest.mark.parametrize("kind", ["documents", "window", "windows in documents"])
def test_keys_guessed_from_work(kind):
    mask = mask_of(kind, [300, 84, 640, 1000, 24])
    keys = NearKeys(BlockBalanced(mask, 2).block_work[0])
    assert [*zip(keys.first, keys.last, strict=True)] == ends(mask)


def test_keys_of_whole_documents():
    """To within one block, because it is not known whether adjacent documents share a block."""
    mask = mask_of("whole documents", [300, 84, 640, 1000, 24])
    keys = NearKeys(BlockBalanced(mask, 2).block_work[0])
    for first, last, end in zip(keys.first, keys.last, ends(mask), strict=True):
        assert abs(first - end[0]) <= 1 and abs(last - end[1]) <= 1


def ends(mask) -> list[tuple[int, int]]:
    """The first and the last key block of each query block."""
    needed = [row.nonzero().flatten().tolist() for row in mask.to_dense()[0, 0]]
    return [(row[0], row[-1]) for row in needed]


def test_keys_guessed_from_pairs():
    blocks = BlockBalanced.from_documents([1024, 2048 + 24, 1024 - 24], 2, 128)
    keys = NearKeys(blocks.block_work[0])
    assert keys.documents == ((0, 8), (8, 25), (25, 32)), "block 24 goes with what it needs"
    assert keys.first == [0] * 8 + [8] * 17 + [24] * 7
    assert keys.last == [*range(32)]


def test_traffic_known_answer():
    keys = NearKeys([1, 2, 3, 4, 1, 2])  # documents of blocks 0 to 3 and 4 to 5
    traffic = Traffic(keys, [((0, 2), (4, 5)), ((2, 4), (5, 6))])
    # Rank 1 needs blocks 0, 1 and 4. Rank 0 has what it needs.
    assert (traffic.got, traffic.sent) == ([0, 3], [3, 0])
    assert traffic.price == (3, 3)
    assert keys.cut == [0, 1, 2, 3, 0, 1]
    traffic.give({0: ((0, 3),), 1: ((3, 6),)})
    assert (traffic.got, traffic.sent) == ([0, 3], [3, 0])
    assert keys.join([(3, 4), (4, 6), (1, 3)]) == ((1, 4), (4, 6))


@given(st.data())
def test_traffic_keeps_count(data):
    world_size = data.draw(st.integers(2, 4))
    work = data.draw(st.lists(st.integers(0, 9), min_size=8, max_size=24))
    keys = NearKeys(work)

    def deal(ranks):
        owner = [data.draw(st.sampled_from(ranks)) for _ in work]
        return {r: keys.join((i, i + 1) for i, x in enumerate(owner) if x == r) for r in ranks}

    # Ranks that exchange blocks with each other, as in a search.
    before = deal(range(world_size))
    traffic = Traffic(keys, [before[rank] for rank in range(world_size)])
    pair = data.draw(st.permutations(range(world_size)))[:2]
    both = keys.join(before[pair[0]] + before[pair[1]])
    blocks = [i for start, stop in both for i in range(start, stop)]
    some = set(data.draw(st.lists(st.sampled_from(blocks)))) if blocks else set()
    after = dict(before)
    after[pair[0]] = keys.join((i, i + 1) for i in some)
    after[pair[1]] = keys.join((i, i + 1) for i in blocks if i not in some)
    traffic.give({rank: after[rank] for rank in pair})
    anew = Traffic(keys, [after[rank] for rank in range(world_size)])
    assert (traffic.got, traffic.sent) == (anew.got, anew.sent)


# -- What holds for all of them -------------------------------------------------------------------


@given(
    st.integers(2, 5),
    st.sampled_from([500, 2000, 8000]),
    st.integers(4, 24),
    st.randoms(use_true_random=False),
)
def test_documents_never_move_more_than_single_swaps(world_size, most, each, rng):
    length, lengths = world_size * each * ROWS, []
    while left := length - sum(lengths):
        lengths.append(min(left, rng.randint(1, most)))
    first, work = first_keys(lengths), mask_work(lengths)
    old, balancer = swapped(work, world_size), BlockBalanced(work, world_size, ROWS, near=True)
    owned = owned_by(balancer)
    assert sorted(itertools.chain(*owned)) == [*range(len(work))]
    assert {len(blocks) for blocks in owned} == {each}
    imbalance = max(sum(work[i] for i in blocks) for blocks in old) * world_size / sum(work)
    assert balancer.imbalance() <= max(imbalance, 1.01)
    if imbalance <= 1.01 or balancer.imbalance() > 1.01:
        assert blocks_moved(owned, first) <= blocks_moved(old, first)


def test_mixes_of_documents():
    """Within 1%, also from pairs of rows, and with far less traffic than by single swaps."""
    rng = random.Random(0)
    for world_size in (2, 4, 8):
        moved = before = 0
        for _ in range(8):
            lengths = random_documents(rng, 256 * ROWS * world_size)
            blocks = BlockBalanced.from_documents(lengths, world_size)
            near = BlockBalanced.from_documents(lengths, world_size, near=True)
            assert near.near and near.block_work == blocks.block_work
            assert near.imbalance() <= 1.01
            moved += blocks_moved(owned_by(near), first_keys(lengths))
            before += blocks_moved(swapped(blocks.block_work[0], world_size), first_keys(lengths))
        assert moved <= before / 2


@given(st.integers(0, 11), st.integers(1, 11), st.permutations([(0, 5), (5, 8), (8, 9), (9, 12)]))
def test_a_window_and_what_is_not_in_it(start, size, order):
    search = _Search([1] * 12, NearKeys([1, 2, 3, 4, 5, 1, 2, 3, 1, 1, 2, 3]), [12], 0)
    circle = [block for run in order for block in range(*run)] * 2
    inside, outside = search.cut(order, start, size)
    blocks = [[block for run in runs for block in range(*run)] for runs in (inside, outside)]
    assert blocks == [
        sorted(circle[start : start + size]),
        sorted(circle[start + size : start + 12]),
    ]
    assert all(first < last for first, last in inside + outside)


def test_the_same_everywhere(monkeypatch):
    """Whatever the state of the random number generators."""
    work = mask_work(uniform_documents(4 * 8192))
    one = BlockBalanced(work, 4, ROWS, near=True)
    random.seed(7)
    spans = [one.spans(rank) for rank in range(4)]
    random.seed(8)
    from_text.cache_clear()
    monkeypatch.setattr(balancer, "_assigned", balancer._make_spans)  # not from a cache
    other = from_text(one.text)
    assert other is not one and [other.spans(rank) for rank in range(4)] == spans


def test_as_balanced_as_without_near():
    """If whole documents and swaps do not get within 1%, heaviest blocks first may."""
    work = [x for length in (2, 6, 10, 4, 10) for x in range(1, length + 1)]
    assert BlockBalanced(work, 8, 1).imbalance() == 1.0
    assert BlockBalanced(work, 8, 1, near=True).imbalance() == 1.0


def test_numbers_of_all_sizes():
    """Also if their quotients are not floats."""
    for work in ([1e-300, 1e199, 0, 1.5], [0, 5e-324, 1e199, 3], [10**199, 1, 0, 10**18]):
        owned = owned_by(BlockBalanced(work, 2, 1, near=True))
        assert sorted(itertools.chain(*owned)) == [*range(4)]
    for much in (1e200, 10**400, float("inf")):
        with pytest.raises(ContextParallelError, match="block 1 must be >= 0 and below 1e"):
            BlockBalanced([1, much], 2, 1, near=True)


def test_long_sequences_are_dealt_out_quickly(monkeypatch):
    """If no swap is too large, they are found without a search. Searches end."""
    looks = 0
    search = deal_blocks._best_swap

    def counted(heavy, *args):
        nonlocal looks
        looks += len(heavy)
        return search(heavy, *args)

    monkeypatch.setattr(deal_blocks, "_best_swap", counted)
    each, world_size = 512, 8
    balancer = BlockBalanced(range(1, each * world_size + 1), world_size, 1, near=True)
    assert balancer.imbalance() <= 1.01 and looks < 2**17, looks
    looks = 0
    monkeypatch.setattr(deal_blocks, "_MOST_LOOKS", 2**14)
    rng = random.Random(5)
    work = [rng.random() ** -1.5 for _ in range(each * world_size)]
    owned = owned_by(BlockBalanced(work, world_size, 1, near=True))
    assert sorted(itertools.chain(*owned)) == [*range(len(work))]
    evenly = 16 * world_size * (world_size - 1) * each
    assert looks <= 3 * (2**14 + each) + evenly, looks


@given(st.data())
def test_the_largest_swap_is_the_best(data):
    """If none is too large."""
    numbers = st.lists(st.integers(0, 12) | st.floats(0, 12), min_size=1, max_size=6)
    heavy, light = (sorted((x, i) for i, x in enumerate(data.draw(numbers))) for _ in range(2))
    gap = data.draw(st.integers(1, 60))
    found = deal_blocks._largest_swap(heavy, light, gap)
    assert found is None or found == deal_blocks._best_swap(heavy, light, gap)


def test_rows_of_a_batch_even_each_other_out():
    rows = [mask_work(uniform_documents(2 * 8192)), mask_work([16384]), mask_work([4096] * 4)]
    balancer = BlockBalanced(rows, 2, ROWS, near=True)
    assert balancer.imbalance() <= 1.01
    balancer = BlockBalanced([[3, 1], [1, 3]], 2, 1, near=True)
    assert balancer.work(0) == balancer.work(1) == 4


def test_rows_of_their_own_are_evened_out_together():
    """With three blocks per rank, each row alone is balanced well enough, but both together are
    not."""
    first = [1] * 6 + [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 1, 2, 3, 1, 2, 3]
    second = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 2, 1]
    assert BlockBalanced([first, second], 8, 1, near=True).imbalance() <= 1.01
