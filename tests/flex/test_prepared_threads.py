"""What is worked out once (:mod:`cp_dispatch.flex.prepared`): when it is reused, and when not."""

from __future__ import annotations

import gc
import pathlib
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail
from cp_dispatch._compat import group_name, resolve_group
from cp_dispatch.by_need.kept import Kept
from cp_dispatch.flex import mask_job, ops, prepared, sums
from cp_dispatch.flex.mask_job import exchange_of
from cp_dispatch.groups import ring_group_name
from tests.distributed.rooms import Box, Rooms
from tests.distributed.threads import run_threads

OPS = torch.ops.cp_dispatch
RANKS, LENGTH, HEADS, D = 2, 64, 2, 4


def window_mask(window: int = 24):
    return create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < window), None, None, LENGTH, LENGTH, "cpu",
        BLOCK_SIZE=8,
    )  # fmt: skip


def arguments_of(mask, rank: int, layout: str = "") -> tuple:
    mesh = init_device_mesh("cpu", (RANKS,))
    return (
        *mask.as_tuple()[2:6], LENGTH, LENGTH, [8, 8], [0, 1, 0, HEADS], [RANKS], rank,
        ring_group_name(mesh, (0,)), layout, False, False,
    )  # fmt: skip


def shards(rank: int, dtype=torch.float32, step: int = 0) -> list[torch.Tensor]:
    """Key and value of a rank, and the gradients of all positions."""
    generator = torch.Generator().manual_seed(rank + 10 * step)
    sizes = [LENGTH // RANKS] * 2 + [LENGTH] * 2
    return [torch.randn(1, HEADS, n, D, generator=generator).to(dtype) for n in sizes]


def both(tensors, arguments) -> list[torch.Tensor]:
    key, value, *grads = tensors
    keys = OPS.flex_bring(key, value, *arguments, True, False)
    return [keys, *OPS.flex_bring_back(*grads, key, value, *arguments)]


@pytest.fixture
def made(monkeypatch):
    """How often each rank worked something out."""
    mask_job._exchange.cache_clear()
    found = dict.fromkeys(range(RANKS), 0)
    for name in ("keys_by", "sums_by"):
        function = getattr(ops, name)

        def counted(*args, function=function):
            found[dist.get_rank()] += 1
            return function(*args)

        monkeypatch.setattr(ops, name, counted)
    return found


# In the last layout a rank's rows are many runs, as if documents were assigned by blocks.
LAYOUTS = {
    "natural": "",
    "head-tail": HeadTail(LENGTH, RANKS).text,
    "blocks": BlockBalanced([1 + i * i % 13 for i in range(LENGTH // 2)], RANKS, block_size=2).text,
}
of_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.mark.parametrize("layout, long, here", [
    *((layout, False, True) for layout in LAYOUTS.values()), (LAYOUTS["blocks"], True, True),
    ("", False, False),
], ids=[*LAYOUTS, "long copies", "another stream"])  # fmt: skip
def test_a_way_serves_its_own_kind(made, monkeypatch, layout, long, here):
    """Other strides, dtypes and contents of a mask are worked out separately. Another mask that
    needs the same is not. All results are bitwise equal to those without caching."""
    pulls, pull_here = [], Box.pull_here
    monkeypatch.setattr(Box, "pull_here", lambda *given: pulls.append(pull_here(*given)))
    mask, other, alike = window_mask(), window_mask(40), window_mask()
    if long:  # own rows are copied while those of others arrive
        monkeypatch.setattr(prepared, "LONG_COPY", 0)
    # With scattered blocks, either window needs all rows.
    differs = layout != LAYOUTS["blocks"]

    def strided(rank):
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shards(rank)]

    # Tensors, the mask, and how many ops are new.
    steps = [
        (lambda rank: shards(rank), mask, 2),
        (lambda rank: shards(rank, step=1), mask, 0),
        (strided, mask, 2),
        (lambda rank: shards(rank, torch.bfloat16), mask, 2),
        (lambda rank: shards(rank), other, 2 * differs),
        (lambda rank: shards(rank), alike, 0),
    ]

    def body(rank: int) -> list:
        found = []
        for tensors, own, new in [*steps, *((*step[:2], 0) for step in steps)]:
            before = made[rank]
            found.append(both(tensors(rank), arguments_of(own, rank, layout)))
            assert made[rank] - before == (new if keeps else 2)
        return found

    rooms = Rooms(monkeypatch)
    rooms.least = 2**16  # a larger box would drop what a smaller one had cached
    rooms.may_pull_here = here
    # Boxes in tests drop all views whenever a new one arrives.
    monkeypatch.setattr(Box, "forget_many", lambda box, most: None)
    keeps = True
    got = run_threads(RANKS, body)
    assert bool(pulls) == (here and layout != LAYOUTS["blocks"]), "few runs of rows: one op"
    keeps = False
    monkeypatch.setattr(ops, "find", lambda *_: (None, None))
    want = run_threads(RANKS, body)
    rooms.assert_all_is_quiet()
    for mine, theirs in zip(got, want, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert all(map(torch.equal, one, other))


@of_layouts
def test_sums_by_row_are_those_of_stretches(made, monkeypatch, layout):
    """Bitwise, also in 16 bits, the first time and from the cache, and if nobody attends the last
    keys."""
    first_keys = create_block_mask(
        lambda b, h, q, k: k < 40, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=8
    )
    masks = window_mask(), window_mask(64), first_keys

    def body(rank: int) -> list:
        found = []
        for mask in masks:
            exchange = exchange_of(arguments_of(mask, rank, layout), torch.device("cpu"))
            assert (exchange.sums.by_row is None) == (most > 0)
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                for step in range(2):
                    found += both(shards(rank, dtype, step), arguments_of(mask, rank, layout))
        return found

    results = []
    for most in (0, 10**6):
        monkeypatch.setattr(sums, "MOST_STRETCHES", most)
        monkeypatch.setattr(sums, "MOST_RUNS", most)
        mask_job._exchange.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mask_job, "kept", Kept())
            rooms = Rooms(patch)
            results.append(run_threads(RANKS, body))
            rooms.assert_all_is_quiet()
    for one, other in zip(*results, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_mask_that_is_written_over_is_looked_at_anew(made, monkeypatch):
    mask, other = window_mask(8), window_mask(40)

    def body(rank: int):
        own = [x.clone() for x in mask.as_tuple()[2:6]]
        for new in (True, False):
            if not new:
                for x, y in zip(own, other.as_tuple()[2:6], strict=True):
                    x.copy_(y)
            arguments = (*own, *arguments_of(mask, rank)[4:])
            got = both(shards(rank), arguments)
            got = both(shards(rank), arguments)
        return got, both(shards(rank), arguments_of(other, rank))

    Rooms(monkeypatch)
    for got, want in run_threads(RANKS, body):
        assert all(map(torch.equal, got, want))


def test_a_way_ends_with_its_room_and_with_its_group(made, monkeypatch):
    mask = window_mask()
    rooms = Rooms(monkeypatch)
    # Room for the views of all ways, and no larger box for gradients, which would take its place.
    rooms.least, rooms.most_views = 2**16, 8

    def body(rank: int) -> None:
        arguments = arguments_of(mask, rank)

        def new(arguments=arguments) -> int:
            before = made[rank]
            both(shards(rank), arguments)
            return made[rank] - before

        assert (new(), new()) == (2, 0), "groups of an earlier run have the same names"
        found = exchange_of(arguments, torch.device("cpu")).ways.values()
        ways = [ref() for ref in found if ref() is not None]
        ways = [way for way in ways if way.group is resolve_group(arguments[10])]
        assert len(ways) == 2
        (box,) = {way.box for way in ways}
        box.is_current = False
        assert new() == 2, "another room took its place"
        box.is_current = True
        name = group_name(dist.new_group(list(range(RANKS))))
        other = (*arguments[:10], name, *arguments[11:])
        assert [new(other), new(), new(other)] == [2, 0, 0], "each group has its own"

    for _ in range(2):
        run_threads(RANKS, body)


def test_what_is_kept_holds_no_room(made, monkeypatch):
    """A mask that lives on does not keep alive what it found in a room once the room drops it. What
    it caches is bounded."""
    mask = window_mask()
    Rooms(monkeypatch)

    def body(rank: int) -> None:
        arguments = arguments_of(mask, rank)
        both(shards(rank), arguments)
        exchange = exchange_of(arguments, torch.device("cpu"))
        ways = list(exchange.ways.values())
        boxes = {ref().box for ref in ways if ref() is not None}
        room = weakref.ref(next(iter(boxes))._memory[0])
        for box in boxes:
            box.views.clear()
        gc.collect()
        assert ways and all(ref() is None for ref in ways) and room() is not None
        for heads in range(1, 20):
            x = torch.zeros(1, heads, LENGTH // RANKS, D)
            OPS.flex_bring(x, x, *arguments, True, False)
        assert len(exchange.ways) <= prepared._MOST_WAYS

    run_threads(RANKS, body)


def python_calls(function) -> int:
    """The number of calls, in Python, of functions of the package."""
    package, count = str(pathlib.Path(ops.__file__).parents[1]), 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


# For an op that cuts, one that brings keys, one that does both, and one that brings gradients back.
MOST_CALLS = {  # two of each forward's tell checkpoints the order
    "natural": (8, 18, 18, 21), "head-tail": (8, 18, 18, 23), "blocks": (8, 24, 24, 20),
}  # fmt: skip


@pytest.mark.parametrize("order", LAYOUTS)
def test_what_is_known_takes_little_python(monkeypatch, order):
    """Short kernels wait for the host, which does this at each call."""
    mask = window_mask()
    Rooms(monkeypatch)

    def body(rank: int) -> None:
        key, value, *grads = shards(rank)
        arguments = arguments_of(mask, rank, LAYOUTS[order])
        calls = {
            "cut": lambda: OPS.flex_cut(*arguments, -1, False),
            "bring": lambda: OPS.flex_bring(key, value, *arguments, False, False),
            "both": lambda: OPS.flex_bring_and_cut(key, value, *arguments, False, False),
            "back": lambda: OPS.flex_bring_back(*grads, key, value, *arguments),
        }
        for most, call in zip(MOST_CALLS[order], calls.values(), strict=True):
            call()
            dist.barrier()  # when another rank works something out, all check again
            call()
            found = python_calls(call)
            assert found <= most, (found, most)
            dist.barrier()

    run_threads(RANKS, body)


def test_a_guard_takes_little_python():
    """It asks at each call."""
    with cp_dispatch.enabled():
        assert python_calls(cp_dispatch.toggle.current_options) <= 2
