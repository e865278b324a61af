"""All keys for one kernel call on each rank, by an all-gather and by (emulated) copy engines.

The CPU kernel has no bottom-right causal mask. A twin of what flash does on CUDA replaces it.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import cp_dispatch
from cp_dispatch import HeadTail
from cp_dispatch.backends import flash
from cp_dispatch.backends.cpu_flash import CpuFlash
from cp_dispatch.backends.math import Math
from cp_dispatch.layouts import laid_out
from cp_dispatch.planning.settle import settle
from cp_dispatch.schedules import prefix_plan
from cp_dispatch.schedules.known_call import Known
from cp_dispatch.schedules.prefix_plan import pairs_of, prefix_parcels, prefixes_of
from tests.distributed.calls import only
from tests.distributed.permuted import balancers, run_permuted
from tests.distributed.recorder import Recorder
from tests.distributed.reference import Mask, Problem, check, exact, one_device, rounding
from tests.distributed.rooms import Rooms
from tests.distributed.sharded import run_sharded
from tests.distributed.test_communication import shard_bytes, traffic
from tests.distributed.threads import run_threads

KERNELS = {"cpu_flash": CpuFlash, "math": Math}


def _runs(prefixes):
    row = start = 0
    for rows, keys in prefixes:
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)[None, None]
        yield slice(row, row + rows), slice(start, start + keys), mask
        row, start = row + rows, start + keys


def prefix_forward(self, query, key, value, prefixes, scale, lengths=None):
    results = [
        self.forward(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask, False, scale)
        for rows, keys, mask in _runs(prefixes)
    ]
    return tuple(torch.cat(x, 2) for x in zip(*results, strict=True))


def prefix_backward(
    self, go, query, key, value, output, logsumexp, prefixes, scale, lengths=None
):  # fmt: skip
    results = [
        self.backward(
            go[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys],
            output[:, :, rows], logsumexp[:, :, rows], mask, False, scale,
        )[:3]
        for rows, keys, mask in _runs(prefixes)
    ]  # fmt: skip
    return tuple(torch.cat(x, 2) for x in zip(*results, strict=True))


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    for kernel in KERNELS.values():
        monkeypatch.setattr(kernel, "takes_prefixes", True)
        monkeypatch.setattr(kernel, "prefix_forward", prefix_forward)
        monkeypatch.setattr(kernel, "prefix_backward", prefix_backward)


@pytest.fixture(params=["rooms", "all-gather"])
def rooms(request, monkeypatch):
    return Rooms(monkeypatch) if request.param == "rooms" else None


@contextlib.contextmanager
def counted():
    """Count how many calls were made as known calls."""
    calls = {"forward": 0, "backward": 0}
    with pytest.MonkeyPatch.context() as patch:
        way = Known._way

        def count(self, index, tensors):
            found = way(self, index, tensors)
            calls[("forward", "backward")[index]] += found is not None
            return found

        patch.setattr(Known, "_way", count)
        yield calls


def judge(rooms, problem, world_size, kernel="cpu_flash", kind=None) -> None:
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, kernel)
    floors, few = rounding(problem, tensors)
    balancer = balancers(problem.length, world_size, problem.batch)[kind] if kind else None

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (world_size,))
        with cp_dispatch.enabled(schedule="one_call", layout=balancer):
            whole = [DTensor.from_local(
                torch.empty(1, problem.heads, problem.length // world_size, problem.dim),
                mesh, [Shard(2)], run_check=False,
            )] * 3  # fmt: skip
            plan = cp_dispatch.explain(*whole, is_causal=problem.causal)
            assert plan.schedule == "one_call", plan
        # The first call goes through DTensor's dispatch, the second is learned from, and the rest
        # are known.
        for _ in range(4):
            if balancer is not None:
                got = run_permuted(problem, balancer, mesh, schedule="one_call")
            else:
                with cp_dispatch.enabled(schedule="one_call"):
                    got = run_sharded(problem, tensors, mesh)
            check(got, want, alone, floors=floors, few=few)

    with only(kernel), counted() as calls:
        run_threads(world_size, rank_body)
    if rooms is not None:
        assert rooms.used == {"prefixes", "gradients"}
        rooms.assert_all_was_read()
    # A backward is known one call later. The math kernel's outputs are in a wider dtype, unless
    # everything is.
    repeated = rooms is not None and (kernel == "cpu_flash" or problem.dtype is torch.float64)
    assert calls == {"forward": 2 * world_size * repeated, "backward": world_size * repeated}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", [None, "head-tail"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
def test_right(rooms, heads, causal, kind, kernel, world_size):
    heads, key_heads = heads
    length = 24 * world_size
    problem = Problem(
        batch=2, heads=heads, key_heads=key_heads, length=length, dim=16, causal=causal
    )
    judge(rooms, problem, world_size, kernel, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_dtypes(rooms, kernel, dtype):
    problem = Problem(batch=1, heads=4, key_heads=2, length=256, dim=16, causal=True, dtype=dtype)
    judge(rooms, problem, 4, kernel, "head-tail")


@pytest.mark.parametrize("causal", [True, False])
def test_no_batch_row(rooms, monkeypatch, causal):
    """CUDA's kernels refuse a batch of size 0, which a rank of another mesh dim may have."""
    problem = Problem(batch=0, heads=4, key_heads=2, length=64, dim=16, causal=causal)

    def refuse(*args, **kwargs):
        raise AssertionError("batch size must be positive")

    for name in ("forward", "backward"):
        monkeypatch.setattr(CpuFlash, name, refuse)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (4,))
        with cp_dispatch.enabled(schedule="one_call"):
            for needs in ((True, True, True), (True, False, False), (False, False, False)):
                got = run_sharded(problem, problem.tensors(), mesh, needs=needs)
                for x, like in zip(got, problem.tensors()[:1] + problem.tensors()[:3], strict=True):
                    assert x is None or x.shape == like.shape

    with only("cpu_flash"):
        run_threads(4, rank_body)


def test_where_sequences_start():
    """Of flash's packed sequences. A graph that is recorded counts them itself."""
    prefixes = ((3, 5), (2, 16), (4, 7))
    for batch in (1, 3):
        *starts, rows, keys = flash._lengths(batch, prefixes, torch.device("cpu"))
        assert (rows, keys) == (4, 16)
        for index, found in enumerate(starts):
            lengths = [x[index] for x in prefixes] * batch
            assert found.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            assert found.dtype is torch.int32 and found.is_contiguous()
            counted = flash._counted(batch, tuple(x[index] for x in prefixes), found.device)
            assert counted.equal(found) and counted.dtype is torch.int32


def test_documents_in_one_row(rooms):
    """Pieces of documents are two runs as well, but of different lengths."""
    problem = Problem(batch=1, heads=2, length=96, dim=16, causal=False)
    judge(rooms, problem, 4, "cpu_flash", "documents")


def plan(world_size=4, length=64, causal=True, layout=None, batch=1, **given):
    mesh = init_device_mesh("cpu", (world_size,))
    whole = [
        DTensor.from_local(torch.empty(batch, 2, length // world_size, 16), mesh, [Shard(2)],
                           run_check=False)
        for _ in range(3)
    ]  # fmt: skip
    with cp_dispatch.enabled(schedule="one_call", layout=layout):
        return cp_dispatch.explain(*whole, is_causal=causal, **given)


def refused(words: str, kernel: str = "cpu_flash", **how) -> None:
    def rank_body(rank):
        found = plan(**how)
        assert found.schedule in ("ring", "mirrored_ring") and words in str(found), found

    with only(kernel):
        run_threads(4, rank_body)


def test_what_cannot_be_one_call_is_a_ring(monkeypatch):
    mask = torch.ones(1, 1, 1, 64, dtype=torch.bool)
    refused("a mask or dropout", attn_mask=mask, causal=False)
    refused("a mask or dropout", "math", dropout_p=0.5)
    refused("has its own layout", length=96, batch=2, layout=balancers(96, 4, 2)[
        "documents of each row"
    ])  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(prefix_plan, "MOST_RUNS", 1)
        refused("2 runs of consecutive positions", layout=HeadTail(64, 4))
    monkeypatch.setattr(CpuFlash, "takes_prefixes", False)
    refused("bottom right")


@pytest.mark.parametrize("kind", [None, "head-tail"])
@pytest.mark.parametrize("causal", [True, False])
def test_one_gather_and_one_message_of_gradients(monkeypatch, kind, causal):
    """As explain() reports: a shard of keys from every rank, and to each owner the gradients of its
    keys in the prefixes."""
    layout = HeadTail(64, 4) if kind else None
    problem = Problem(batch=2, heads=4, key_heads=2, length=64, dim=16, causal=causal)
    with only("cpu_flash"):
        records = traffic(Recorder(monkeypatch), problem, 4, schedule="one_call", layout=layout)
    shard = shard_bytes(problem, 16)
    for rank, (forward, backward, found) in enumerate(records):
        assert found.schedule == "one_call"
        assert forward.gathered == backward.gathered == [shard]
        assert forward.sent == [] and len(forward.collectives) == 1
        assert len(backward.collectives) == 2 and backward.collectives[1] == "AllToAllBase"
        told = [[transfer.bytes for transfer in part] for part in found.transfers(rank)]
        assert told == [[shard], [shard, *backward.sent]]
        # Shards of gradients for others. In natural order these are for the ranks before. In
        # head-tail order the hi prefix has all lo pieces and the hi pieces of the ranks after, and
        # the lo prefix has the lo pieces of the ranks before. The last rank's pieces are one run,
        # with one prefix.
        sent = rank if causal and kind is None else 3
        if causal and kind is not None and rank == 3:
            sent = 1.5
        assert backward.sent == [sent * shard]


def test_prefixes_of_head_tail():
    geometry = laid_out(64, 64, (4,), True, HeadTail(64, 4))
    assert [prefixes_of(geometry, rank) for rank in (0, 3)] == [
        ((8, 8), (8, 64)), ((16, 40),),  # the last rank's pieces are one run
    ]  # fmt: skip
    # All ranks compute the same number of pairs: 2 W - 1 pieces of 8 x 8, and the causal part of
    # two more.
    assert len({pairs_of(geometry, rank) for rank in range(4)}) == 1
    assert sum(pairs_of(geometry, rank) for rank in range(4)) == 64 * 65 // 2
    # Rank 0 sees its own lo piece twice, and all other pieces once.
    assert [len(prefix_parcels(geometry, 0, owner)) for owner in range(4)] == [3, 2, 2, 1]


def test_auto_takes_it_where_shards_are_short(monkeypatch):
    """By the cost model of GPUs; never on CPU."""

    def found(length, layout, key_heads=8):
        seen = cp_dispatch.Plan(
            "cp_dispatch", backend="flash", schedule="ring", layout=layout, is_causal=True,
            mesh_dims=(0,), ring_shape=(4,), query_length=length, key_length=length,
            shards=((1, 32, length // 4, 128), *[(1, key_heads, length // 4, 128)] * 2),
            dtype=torch.bfloat16,
        )  # fmt: skip
        return settle(seen, "auto", "cuda").schedule

    assert found(128, None) == found(128, HeadTail(128, 4)) == "one_call"
    assert found(8192, None) == found(4096, HeadTail(4096, 4)) == "one_call"
    assert found(32768, None) == "mirrored_gather"
    assert found(32768, HeadTail(32768, 4)) == "gather"


def test_a_mask_is_never_dropped():
    """Not even by the op itself, whose arguments no plan has checked."""
    query = torch.randn(1, 2, 8, 16)
    mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    with pytest.raises(cp_dispatch.ContextParallelError, match="one_call"):
        torch.ops.cp_dispatch.ring_math_attention(
            query, query, query, mask, None, 0.0, [0, 0, 2], False, None, 8, 8, "one_call", [], "",
            "", "",
        )  # fmt: skip


def test_masks_take_another_way(rooms):
    problem = Problem(batch=2, heads=2, length=64, dim=16, mask=Mask("b11k"))
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "math")
    floors, few = rounding(problem, tensors)

    def rank_body(rank):
        with cp_dispatch.enabled(schedule="one_call"):
            got = run_sharded(problem, tensors, init_device_mesh("cpu", (4,)))
        check(got, want, alone, floors=floors, few=few)

    with only("math"):
        run_threads(4, rank_body)
