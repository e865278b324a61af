"""The random bits of dropout: unbiased, one for each (query, key) pair, the same however the work
is split."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from cp_dispatch.dispatch import _origin
from cp_dispatch.dropout import Dropout
from cp_dispatch.layouts import Span, Tile, natural, selector
from cp_dispatch.layouts.tiles import Part, ShardSpans
from tests.ranks import fake_ranks, outline

CPU = torch.device("cpu")
# The number of standard deviations that a fair coin exceeds once in ten million tests. The seeds
# are fixed.
SIGMAS = 5.3
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def dropout(p=0.5, seed=1, batch_start=0, head_start=0, heads=1, query_length=64):
    return Dropout(p, torch.tensor(seed), batch_start, head_start, heads, query_length)


def block(rows: int, keys: int, row=0, key=0) -> Tile:
    """A tile that starts at these global positions."""
    at_row, at_key = (
        Part(ShardSpans((Span(*own),)), 0, own[1]) for own in ((row, rows), (key, keys))
    )
    return Tile(0, rows, 0, keys, False, at_row, at_key)


def coins(rows, keys, batch=1, heads=1, row=0, key=0, **options) -> torch.Tensor:
    """The dropout mask: True where a pair is kept, ``(batch, heads, rows, keys)``."""
    options = {"heads": heads, "query_length": row + rows} | options
    return dropout(**options).factors(block(rows, keys, row, key), batch, heads) != 0


def assert_rate(sample: torch.Tensor, rate: float) -> None:
    """Check that the share of True is ``rate``, as far as this many independent coins can show."""
    sigma = math.sqrt(rate * (1 - rate) / sample.numel())
    assert abs(sample.double().mean().item() - rate) <= SIGMAS * sigma


def reference(seed, p, batch, head, heads, row, query_length, key) -> bool:
    """The coin of one pair by the definition of SplitMix64, on unsigned integers."""

    def mix(x):
        x = (x ^ x >> 30) * MIX_1 % 2**64
        x = (x ^ x >> 27) * MIX_2 % 2**64
        return x ^ x >> 31

    stream = mix(((batch * heads + head) * query_length + row + seed * GAMMA) % 2**64)
    return (mix((stream + key * GAMMA) % 2**64) >> 11) / 2**53 >= p


@given(
    seed=st.integers(0, 2**62 - 1),
    p=st.floats(0.01, 0.99),
    batch=st.integers(0, 2**16),
    head=st.integers(0, 255),
    row=st.integers(0, 2**40),
    key=st.integers(0, 2**40),
)
def test_coins_are_those_of_splitmix64(seed, p, batch, head, row, key):
    """Also far beyond 2**31, where a 32-bit index would wrap."""
    heads, length = 256, 2**40 + 2
    own = dropout(p, seed, batch, head, heads, length)
    got = own.factors(block(2, 3, row, key), 1, 1)[0, 0] != 0
    for i in range(2):
        for j in range(3):
            wanted = reference(seed, p, batch, head, heads, row + i, length, key + j)
            assert got[i, j].item() == wanted


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
def test_pairs_are_kept_with_probability_one_minus_p(p, seed):
    kept = coins(256, 512, batch=2, heads=4, p=p, seed=seed)
    assert_rate(kept, 1 - p)
    # No row, key, head or batch row has a different rate.
    for dim in range(4):
        for part in kept.unbind(dim):
            assert_rate(part, 1 - p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7, 1 / 3])
def test_factors_are_zero_or_the_nearest_float32_of_the_scale(p):
    factors = dropout(p).factors(block(64, 64), 2, 3)
    assert factors.dtype is torch.float32 and factors.shape == (2, 3, 64, 64)
    assert torch.equal(factors.unique(), torch.tensor([0.0, 1 / (1 - p)], dtype=torch.float32))


def test_probabilities_zero_and_one():
    everything = block(64, 64)
    assert torch.equal(dropout(0.0).factors(everything, 2, 3), torch.ones(2, 3, 64, 64))
    assert torch.equal(dropout(1.0).factors(everything, 2, 3), torch.zeros(2, 3, 64, 64))


def test_the_mean_of_the_factors_is_one():
    """What is kept is scaled up to make up for what is dropped."""
    p, count = 0.3, 4 * 256 * 256
    factors = dropout(p, heads=4, query_length=256).factors(block(256, 256), 1, 4)
    sigma = math.sqrt(p / (1 - p) / count)
    assert abs(factors.double().mean().item() - 1) <= SIGMAS * sigma


@given(st.data())
def test_any_cut_of_the_work_gives_the_coins_of_the_whole(data):
    batch, heads, rows, keys = (data.draw(st.integers(1, n)) for n in (3, 4, 12, 12))
    whole = dropout(0.5, 7, heads=heads, query_length=rows).factors(block(rows, keys), batch, heads)
    cut = []
    for size in (batch, heads, rows, keys):
        start = data.draw(st.integers(0, size - 1))
        cut.append((start, data.draw(st.integers(1, size - start))))
    (b, batches), (h, some), (row, height), (key, width) = cut
    own, tile = dropout(0.5, 7, b, h, heads, rows), block(height, width, row, key)
    part = own.factors(tile, batches, some)
    index = tuple(slice(start, start + length) for start, length in cut)
    assert torch.equal(part, whole[index])
    # In layouts with an order for each batch row, a tile belongs to one batch row.
    one = data.draw(st.integers(0, batches - 1))
    assert torch.equal(own.factors(tile._replace(row=one), 1, some), part[one : one + 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ring_shape", [(1,), (3,), (2, 2), (7,)])
def test_every_ring_draws_the_coins_of_one_device(ring_shape, causal):
    rows, keys = 13, 17
    own = dropout(0.5, 3, heads=2, query_length=rows)
    whole = own.factors(block(rows, keys), 2, 2)
    geometry = natural(rows, keys, ring_shape, causal)
    for rank in range(geometry.world_size):
        for owner in range(geometry.world_size):
            for tile in geometry.tiles(rank, owner):
                at_row = selector(tile.query_spans, CPU)
                at_key = selector(tile.key_spans, CPU)
                assert torch.equal(own.factors(tile, 2, 2), whole[:, :, at_row, at_key])


def test_coins_of_other_rows_keys_heads_batches_and_seeds_are_independent():
    """Independent fair coins agree half of the time."""
    kept = coins(128, 128, batch=4, heads=4)
    for dim in range(4):
        size = kept.size(dim)
        for step in (1, 2, size // 2):
            agree = kept.narrow(dim, 0, size - step) == kept.narrow(dim, step, size - step)
            assert_rate(agree, 0.5)
    for seed in (2, 3, 2**32 + 1, 2**61):
        assert_rate(kept == coins(128, 128, batch=4, heads=4, seed=seed), 0.5)
    # A pair and its mirror image; then a pair and the next one along the diagonal.
    assert_rate(kept.mT[..., :64, 64:] == kept[..., :64, 64:], 0.5)
    assert_rate(kept[..., :-1, :-1] == kept[..., 1:, 1:], 0.5)


def words(kept: torch.Tensor) -> torch.Tensor:
    """63 consecutive coins as one integer."""
    width = kept.size(-1) // 63 * 63
    bits = kept[..., :width].unflatten(-1, (-1, 63)).to(torch.int64)
    return (bits << torch.arange(63)).sum(-1).flatten()


def test_no_run_of_coins_repeats_along_the_sequence_or_anywhere_else():
    """Among 2**15 random words of 63 bits, two agree with probability below 2**-33."""
    for shape in ((1, 1, 1, 2**20), (1, 1, 2**14, 63), (64, 64, 4, 63)):
        batch, heads, rows, keys = shape
        seen = words(coins(rows, keys, batch=batch, heads=heads))
        assert len(seen.unique()) == len(seen) == batch * heads * rows * (keys // 63)


@pytest.mark.parametrize("far", [2**31, 2**32, 2**33, 2**40])
def test_positions_beyond_32_bits(far):
    length = far + 64
    near = coins(64, 64, query_length=length)
    for row, key in ((far, 0), (0, far), (far, far)):
        kept = coins(64, 64, row=row, key=key, query_length=length)
        assert_rate(kept, 0.5)
        assert_rate(kept == near, 0.5)  # no wrap-around
        # No seam either where the number of bits grows.
        over = coins(8, 8, row=max(row - 4, 0), key=max(key - 4, 0), query_length=length)
        down, right = 4 * (row > 0), 4 * (key > 0)
        assert torch.equal(over[..., down:, right:], kept[..., : 8 - down, : 8 - right])


def test_no_rows_and_no_keys():
    assert dropout().factors(block(0, 4), 2, 3).shape == (2, 3, 0, 4)
    assert dropout().factors(block(4, 0), 2, 3).shape == (2, 3, 4, 0)


def test_one_seed_repeats_and_nothing_is_drawn_from_torch():
    before = torch.get_rng_state()
    assert torch.equal(coins(32, 32, seed=5), coins(32, 32, seed=5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("placements, origin", [
    ((Shard(0), Shard(2)), [3, 0, 6]), ((Shard(1), Shard(2)), [0, 3, 6]),
    ((Shard(0), Shard(1)), [3, 3, 6]), ((Shard(0), Shard(0)), [4, 0, 6]),
    ((Shard(2), Shard(0)), [3, 0, 6]), ((Shard(2), Replicate()), [0, 0, 6]),
], ids=str)  # fmt: skip
def test_coins_and_layouts_of_rows_go_by_where_a_shard_begins(placements, origin):
    """The last of 2 x 2 ranks, with a batch of 5 and 6 heads."""
    with fake_ranks(2, 2, names=("a", "b"), rank=3) as mesh:
        assert _origin(outline(mesh, (5, 6, 64, 16), placements)) == origin
