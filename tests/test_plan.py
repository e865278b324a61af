"""explain(): who handles which call, bytes, and that it neither computes nor sends anything."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dispatch import ContextParallelError, HeadTail, enabled, explain
from cp_dispatch._compat import dtensor_spec
from cp_dispatch.planning import decide
from tests.ranks import SEQUENCE, fake_ranks, outline


@pytest.fixture
def mesh():
    with fake_ranks(4) as mesh:
        yield mesh


def gqa(mesh, placements=SEQUENCE, length=64, key_length=None):
    """Query, key and value with 8 and 2 heads."""
    return [
        outline(mesh, (2, heads, rows, 16), placements)
        for heads, rows in ((8, length), (2, key_length or length), (2, key_length or length))
    ]


def test_calls_without_a_sharded_sequence_stay_on_their_rank():
    with fake_ranks(2, 2, names=("dp", "tp")) as mesh, enabled():
        plan = explain(*gqa(mesh, (Shard(0), Shard(1))), is_causal=True, enable_gqa=True)
        replicated = explain(*gqa(mesh, (Replicate(), Replicate())), enable_gqa=True)
        partial = explain(*gqa(mesh, (Replicate(), Partial())), enable_gqa=True)
    for each in (plan, replicated, partial):
        assert each.handler == "cp_dispatch" and each.schedule == "local"
        assert each.world_size == 1 and each.bytes_sent(0) == 0


def test_stock_torch_handles_what_is_not_ours(mesh):
    off = explain(*gqa(mesh), enable_gqa=True)
    with enabled():
        plain = explain(*(torch.ones(1, 2, 3, 4),) * 3)
        found = []
        for device, placed in (("cuda", Shard(0)), ("xpu", Shard(2))):
            # A mesh of GPUs need not have any; only its name is used.
            spec = dtensor_spec(outline(mesh, (2, 8, 64, 16), (placed,)))
            gpus = DeviceMesh(device, torch.arange(4), _init_backend=False)
            spec = type(spec)(gpus, spec.placements, tensor_meta=spec.tensor_meta)
            found.append(explain(*(DTensor(torch.zeros(1), spec, requires_grad=False),) * 3))
        cuda, xpu = found
    assert [x.handler for x in (off, plain, cuda, xpu)] == ["stock"] * 4
    assert "cp_dispatch handles CPU and CUDA, not {'xpu'}" in xpu.reasons[0]
    assert off.reasons == ("cp_dispatch is not enabled",)
    assert "no argument is a DTensor, and no block of context_parallel" in plain.reasons[0]
    assert cuda.reasons == ("the sequence is not sharded (it is dim -2 of query, key and value)",)
    for plan in (off, cuda):
        assert (plan.bytes_sent(0), plan.transfers(0)) == (0, ([], []))
        assert plan.extra_bytes() == (0, 0)


# One position of key and value on a rank: 2 batches, 2 heads, 16 + 16 numbers of 4 bytes.
ROW = 2 * 2 * 32 * 4


@pytest.mark.parametrize(
    "length, key_length, causal, rows",
    [
        (64, 64, False, [48, 48, 48, 48]),
        # kv3 never moves, and nothing goes from the last rank to the first.
        (64, 64, True, [16, 32, 48, 0]),
        # Chunks of 3, 3, 3 and 1 keys. Each rank passes on all chunks except the next rank's.
        (64, 10, False, [7, 7, 9, 7]),
        # Chunks of 2, 2 and 1 positions: rank 3 owns nothing.
        (5, 5, True, [2, 4, 0, 0]),
        # Keys past the last query are not sent.
        (4, 8, True, [2, 4, 4, 0]),
    ],
)
def test_bytes_sent(mesh, length, key_length, causal, rows):
    with enabled():
        plan = explain(
            *gqa(mesh, length=length, key_length=key_length), is_causal=causal, enable_gqa=True
        )
    assert plan.schedule == "ring"
    assert [plan.bytes_sent(rank) for rank in range(4)] == [ROW * x for x in rows]


def test_bytes_are_those_of_a_rank_on_a_2d_mesh():
    """Batch and heads are sharded too. Only their shards are sent, in half the bytes."""
    with fake_ranks(2, 4, names=("dp", "cp")) as mesh, enabled():
        q, k, v = (
            outline(mesh, (2, heads, 64, 16), (Shard(0), Shard(2)), torch.bfloat16)
            for heads in (8, 2, 2)
        )
        plan = explain(q, k, v, enable_gqa=True)
    assert plan.world_size == 4 and plan.bytes_sent(0) == 48 * ROW // 4


@pytest.mark.parametrize("causal", [False, True])
def test_every_rank_comes_to_the_same_plan(causal):
    plans = []
    for rank in range(4):
        with fake_ranks(4, rank=rank) as mesh, enabled():
            plan = explain(*gqa(mesh, length=9), is_causal=causal, enable_gqa=True)
            plans.append((plan, str(plan)))
    assert plans == plans[:1] * 4


def test_a_rank_outside_the_mesh_gets_the_plan_too():
    plans = []
    for rank in (0, 3):
        with fake_ranks(4, rank=rank), enabled():
            plans.append(explain(*gqa(DeviceMesh("cpu", [0, 2])), enable_gqa=True))
    assert plans[0] == plans[1] and plans[0].world_size == 2


def test_a_plan_is_never_older_than_the_flags_and_arguments(mesh):
    """Plans are cached, so everything that they depend on must be in the cache's key."""
    arguments = {"is_causal": True, "enable_gqa": True}
    q, k, v = gqa(mesh)
    trained = q.detach().requires_grad_()
    with enabled():
        first = explain(q, k, v, **arguments)
        with sdpa_kernel(SDPBackend.MATH):
            assert explain(q, k, v, **arguments).backend == "math"
        assert explain(q, k, v, enable_gqa=True).is_causal is False
        assert explain(q, k, v, is_causal=True).handler == "refused"
        assert explain(q, k, v, dropout_p=0.5, **arguments).backend == "math"
        assert explain(q, k, v, dropout_p=1.5, **arguments).handler == "refused"
        assert explain(q, k, v, attn_mask=q, **arguments).handler == "refused"
        for dtype, requires_grad, backend in (
            (torch.bool, False, "cpu_flash"), (torch.float32, True, "math"),
            (torch.float32, False, "cpu_flash"),
        ):  # fmt: skip
            mask = outline(mesh, (1, 1, 64, 64), (Replicate(),), dtype, requires_grad)
            assert explain(q, k, v, mask, enable_gqa=True).backend == backend
            assert explain(trained, k, v, mask, enable_gqa=True).backend == backend
            plain = torch.ones(64, 64, dtype=dtype, requires_grad=requires_grad)
            handler = "refused" if requires_grad else "cp_dispatch"
            assert explain(q, k, v, plain, enable_gqa=True).handler == handler
        longer = gqa(mesh, length=128)
        assert explain(*longer, **arguments).query_length == 128
        assert explain(q, k, v, **arguments) == first
    assert explain(q, k, v, **arguments).handler == "stock"


def test_a_plan_is_made_once(mesh, monkeypatch):
    made, decide_ = [], decide._decide
    monkeypatch.setattr(decide, "_decide", lambda *args: made.append(args) or decide_(*args))
    monkeypatch.setattr(decide, "_plans", {})
    mask = outline(mesh, (1, 1, 64, 64), (Replicate(),), torch.bool)
    with enabled():
        for given in ({}, {"attn_mask": mask}):
            made.clear()
            assert len({explain(*gqa(mesh), enable_gqa=True, **given) for _ in range(3)}) == 1
            assert len(made) == 1


@pytest.mark.parametrize("layout", [None, HeadTail(64, 4)], ids=["natural", "head-tail"])
def test_the_choice_of_a_schedule_is_told_of_masks(mesh, monkeypatch, layout):
    """It is told whether there is a mask or dropout, and whether ranks have different rows of the
    mask."""
    told = []
    monkeypatch.setattr(decide, "_plans", {})
    monkeypatch.setattr(decide, "choose", lambda plan, *args: told.append(args[2:4]) or plan)

    def mask(rows, *placements):
        return {"attn_mask": outline(mesh, (1, 1, rows, 64), placements, torch.bool)}

    masks = mask(1, Replicate()), mask(64, Replicate()), mask(64, Shard(2))
    with enabled(layout=layout):
        for given in ({}, {"dropout_p": 0.5}, *masks):
            explain(*gqa(mesh), enable_gqa=True, **given)
    own = layout is None  # a whole mask is cut in natural order
    assert told == [(False, False), (True, False), (True, False), (True, own), (True, True)]


def test_a_refused_call_raises_what_explain_says(mesh):
    q, k, v = gqa(mesh)
    with enabled():
        plan = explain(q, k, v, dropout_p=1.5, is_causal=True)
        with pytest.raises(ContextParallelError) as raised:
            F.scaled_dot_product_attention(q, k, v, dropout_p=1.5, is_causal=True)
    assert str(raised.value) == str(plan) == str(plan.error())


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_explain_neither_computes_nor_communicates(mesh):
    calls = {
        "ring": (gqa(mesh), {"enable_gqa": True, "is_causal": True}),
        "local": (gqa(mesh, (Shard(0),)), {"enable_gqa": True}),
        "refused": (gqa(mesh), {"dropout_p": 0.3}),
        "dropout": (gqa(mesh), {"dropout_p": 0.3, "enable_gqa": True}),
        "mask": (gqa(mesh), {"attn_mask": torch.ones(64, 64), "enable_gqa": True}),
        "replicated keys": (
            [gqa(mesh)[0], *gqa(mesh, (Replicate(),))[1:]],
            {"enable_gqa": True},
        ),
    }

    def profiled(function) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        return {event.name for event in profile.events()}

    # The profiler does see collectives and kernels, of DTensors and others.
    assert any("c10d" in name for name in profiled(lambda: dist.all_reduce(torch.ones(1))))
    with enabled(), mock.patch.object(dist, "new_group", side_effect=AssertionError("new group")):
        for name, (tensors, options) in calls.items():
            seen = profiled(lambda t=tensors, o=options: str(explain(*t, **o)))
            assert not [x for x in seen if "c10d" in x or "attention" in x], name
            assert explain(*tensors, **options).handler != "stock"
