"""What is sent, when, and how much: exact counts and bytes for every rank and hop."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import cp_dispatch
from cp_dispatch import HeadTail
from cp_dispatch.backends.cpu_flash import CpuFlash
from cp_dispatch.planning import decide
from tests.distributed.calls import in_stages, only
from tests.distributed.recorder import Record, Recorder
from tests.distributed.reference import Mask, Problem
from tests.distributed.sharded import SEQUENCE, distribute, distributed_inputs
from tests.distributed.threads import run_threads

# Names of all_gather_into_tensor in torch's threaded process group.
GATHERS = {"AllGatherBase", "AllGather", "AllGatherSingle"}


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def traffic(
    recorder: Recorder, problem: Problem, world_size: int, needs=(True,) * 3, **options
) -> list[tuple[Record, Record, cp_dispatch.Plan]]:
    """Records of forward and backward, and the plan, for every rank."""

    def rank_body(rank: int):
        mesh = init_device_mesh("cpu", (world_size,))
        query, key, value, grad = (distribute(x, mesh, SEQUENCE) for x in problem.tensors())
        inputs = [x.requires_grad_(n) for x, n in zip((query, key, value), needs, strict=True)]
        plan = cp_dispatch.explain(*inputs, is_causal=problem.causal, enable_gqa=problem.grouped)
        with recorder.record() as forward:
            output = problem.attend(*inputs)
        with recorder.record() as backward:
            torch.autograd.grad(output, [x for x in inputs if x.requires_grad], grad)
        return forward, backward, plan

    with cp_dispatch.enabled(**options):
        return run_threads(world_size, rank_body)


def shard_bytes(problem: Problem, rows: int, itemsize: int | None = None) -> int:
    """Key and value rows of one owner."""
    key_heads = problem.key_heads or problem.heads
    size = itemsize or problem.dtype.itemsize
    return problem.batch * key_heads * rows * 2 * problem.dim * size


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_full_attention_sends_every_shard_around(recorder, world_size, key_heads):
    """W - 1 moves of one shard each; only key/value heads count."""
    problem = Problem(heads=4, key_heads=key_heads, length=48)
    one = shard_bytes(problem, 48 // world_size)
    for forward, backward, _ in traffic(recorder, problem, world_size):
        assert forward.sent == forward.received == [one] * (world_size - 1)
        # The keys again, and dK/dV with them. The last move returns dK/dV to their owner.
        assert sorted(backward.sent) == [one] * (2 * world_size - 1)
        assert backward.received == backward.sent


# Rows are hops, columns are ranks: whether a rank sends. Keys move on only to ranks that see them.
CAUSAL = {
    2: ["1."],
    3: ["11.", ".1."],
    4: ["111.", ".11.", "..1."],
    5: ["1111.", ".111.", "..11.", "...1."],
}


@pytest.mark.parametrize("world_size", CAUSAL)
def test_causal_attention_sends_keys_only_to_ranks_that_see_them(recorder, world_size):
    problem = Problem(length=60, causal=True)
    one = shard_bytes(problem, 60 // world_size)
    records = [forward for forward, _, _ in traffic(recorder, problem, world_size)]
    hops = zip(*(record.sent for record in records), strict=True)
    expected = [tuple(one * (c == "1") for c in row) for row in CAUSAL[world_size]]
    assert list(hops) == expected
    assert sum(records[-1].sent) == 0, "nobody comes after the last rank"
    for rank, record in enumerate(records):
        assert record.received == records[rank - 1].sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_travel_in_float32_and_come_home_in_their_own_dtype(recorder, dtype):
    problem, world_size = Problem(length=32, dtype=dtype), 4
    one = shard_bytes(problem, 8)
    wide = max(one, shard_bytes(problem, 8, itemsize=4))
    for _, backward, _ in traffic(recorder, problem, world_size):
        keys, gradients = [one] * (world_size - 1), [wide] * (world_size - 1) + [one]
        assert sorted(backward.sent) == sorted(keys + gradients)
        assert backward.sent[-1] == one


@pytest.mark.parametrize("causal", [False, True])
def test_without_key_gradients_none_travel(recorder, causal):
    problem = Problem(length=48, causal=causal)
    for forward, backward, _ in traffic(recorder, problem, 4, needs=(True, False, False)):
        assert backward.sent == forward.sent
    for needs in ((False, True, False), (False, False, True)):
        for forward, backward, _ in traffic(recorder, problem, 4, needs=needs):
            assert sum(backward.sent) > sum(forward.sent)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal": True},
        {"causal": True, "key_heads": 1},
        {"length": 250, "causal": True},
        {"length": 250, "key_length": 3},
        {"length": 3, "key_length": 50, "causal": True},
        {"length": 30, "key_length": 100, "causal": True},
        {"length": 100, "key_length": 30, "causal": True, "dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_plan_knows_what_each_rank_sends(recorder, fields, world_size):
    records = traffic(recorder, Problem(**fields), world_size)
    for rank, (forward, _, plan) in enumerate(records):
        assert plan.bytes_sent(rank) == sum(forward.sent)
    # Every rank's plan is the same, and all bytes arrive.
    assert len({str(plan) for _, _, plan in records}) == 1
    for which in (0, 1):
        sent, received = (
            [getattr(record[which], name) for record in records] for name in ("sent", "received")
        )
        assert received == sent[-1:] + sent[:-1]


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_but_shifts_of_the_ring(recorder, causal):
    """One collective for each shift, the same number on every rank, and no others."""
    records = traffic(recorder, Problem(causal=causal, key_heads=2, length=50), 4)
    for forward, backward, _ in records:
        for record in (forward, backward):
            assert record.collectives == ["AllToAllBase"] * len(record.sent)
    for which in (0, 1):
        assert len({len(record[which].sent) for record in records}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_mirrored_ring_exchanges_halves_before_and_after(recorder, world_size, dtype):
    """One message each way with the mirror rank, and none for the rank in the middle."""
    problem = Problem(heads=4, key_heads=2, length=12 * world_size, causal=True, dtype=dtype)
    records = traffic(recorder, problem, world_size, schedule="mirrored_ring")
    for rank, (forward, backward, plan) in enumerate(records):
        assert plan.schedule == "mirrored_ring"
        planned = [[transfer.bytes for transfer in part] for part in plan.transfers(rank)]
        assert forward.sent == planned[0] == forward.received[:1] + planned[0][1:]
        assert sorted(backward.sent) == sorted(planned[1])
        rows = problem.batch * 6 * problem.dim * dtype.itemsize  # of one head's half shard
        middle = 2 * rank == world_size - 1
        assert forward.sent[0] == (0 if middle else rows * (4 + 2 + 2))
        assert backward.sent[-1] == forward.sent[0]
        assert len(forward.sent) == world_size + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("order", ["full", "head-tail", "natural"])
def test_gather_gathers_once_and_sends_shares_once(recorder, order, world_size, dtype):
    """Keys go out once in each direction, in the pieces that the order needs."""
    length = 8 * world_size
    problem = Problem(heads=4, key_heads=2, length=length, causal=order != "full", dtype=dtype)
    layout = HeadTail(length, world_size) if order == "head-tail" else None
    records = traffic(recorder, problem, world_size, schedule="gather", layout=layout)
    pieces = 2 if order == "head-tail" else 1
    own = shard_bytes(problem, 8)
    for rank, (forward, backward, plan) in enumerate(records):
        there, back = plan.transfers(rank)
        assert plan.schedule == ("mirrored_gather" if order == "natural" else "gather")
        assert forward.gathered == backward.gathered == [own // pieces] * pieces
        # About a reduce-scatter in the kernels' dtype; less if tiles cover few keys. In natural
        # order the rank's own half sees the r shards before the rank's, and the mirror rank's half
        # sees the rest of the W - 1. Each has shares of all the shards that it sees. The rank's own
        # keys, if it sees them, need no transfer.
        shares = backward.sent[2 if order == "natural" else 0]
        most = sum(forward.gathered) * (world_size - 1)
        if order == "natural":
            assert shares == (world_size - 1 - (2 * rank < world_size - 1)) * own
        else:
            assert shares == most if order == "full" else 0 < shares <= most
        exchanged = [t.bytes for t in there if t.collective == "all_to_all"]
        assert forward.sent == exchanged and len(exchanged) == (2 if order == "natural" else 0)
        assert backward.sent == [t.bytes for t in back if t.collective == "all_to_all"]
        assert [t.bytes for t in there if t.collective == "all_gather"] == forward.gathered


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_gather_of_values_of_another_dim_whose_gradients_are_wide(recorder, world_size):
    """What a rank sends for the rows that it did not compute is as large as what it receives. All
    parts start at multiples of 16 bytes."""
    problem = Problem(
        batch=1, heads=1, length=2 * world_size, dim=5, value_dim=9, causal=True,
        dtype=torch.bfloat16,
    )  # fmt: skip
    with only("math"):
        records = traffic(recorder, problem, world_size, schedule="gather")
    for rank, (*both, plan) in enumerate(records):
        assert plan.schedule == "mirrored_gather" and plan.gradient_itemsize == 4
        for record, moves in zip(both, plan.transfers(rank), strict=True):
            assert record.sent == [x.bytes for x in moves if x.collective == "all_to_all"]
            assert record.gathered == [x.bytes for x in moves if x.collective == "all_gather"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, key_heads", [(8, 4), (4, 1)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ulysses_moves_heads_there_and_back(recorder, world_size, heads, key_heads, dtype):
    """Everything but a rank's own share moves, in one message each way. Key heads go to each rank
    that needs them. If several ranks have a share of a head's gradient, it goes in float32, in a
    separate message."""
    problem = Problem(
        heads=heads, key_heads=key_heads, length=8 * world_size, dim=16, causal=True, dtype=dtype
    )
    records = traffic(recorder, problem, world_size, schedule="ulysses")
    others = world_size - 1
    head = problem.batch * 8 * 16 * dtype.itemsize  # of one head of a shard
    queries = heads // world_size * others * head
    keys = 2 * max(1, key_heads // world_size) * others * head
    # Four bytes for each row and head; those of a row start at a multiple of 16.
    own = heads // world_size
    sums = problem.batch * 8 * others * -(-own * 4 // 16) * 16
    for rank, (forward, backward, plan) in enumerate(records):
        assert plan.schedule == "ulysses"
        assert forward.sent == forward.received[:1] + forward.sent[1:]
        assert forward.sent == [queries + keys, queries + sums]
        home = [queries + keys]
        if key_heads < world_size:
            home = [queries, 4 // dtype.itemsize * keys]
        assert backward.sent == [3 * queries + keys + sums, *home]
        assert forward.collectives == ["AllToAllBase"] * 2
        assert backward.collectives == ["AllToAllBase"] * len(backward.sent)
        planned = [[transfer.bytes for transfer in part] for part in plan.transfers(rank)]
        assert planned == [forward.sent, backward.sent]


@pytest.mark.parametrize("fields", [
    {"causal": True}, {"length": 61, "causal": True}, {"length": 5},
    {"length": 7, "key_length": 48},
    {"heads": 12, "key_heads": 3, "length": 61}, {"heads": 5, "dim": 7}, {"key_heads": 1},
    {"heads": 8, "key_heads": 8, "causal": True, "dtype": torch.bfloat16},
    {"key_heads": 1, "causal": True, "dtype": torch.bfloat16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("schedule, kernel", [
    ("ulysses", "cpu_flash"), ("hybrid:2", "cpu_flash"), ("ulysses", "math"), ("hybrid:2", "math"),
])  # fmt: skip
def test_plans_know_what_heads_cost(monkeypatch, recorder, fields, stages, schedule, kernel):
    if stages > 1:
        in_stages(monkeypatch, stages)
    problem = Problem(**{"heads": 8, "key_heads": fields.get("heads", 4), "length": 64} | fields)
    with only(kernel):
        records = traffic(recorder, problem, 4, schedule=schedule)
    for rank, (forward, backward, plan) in enumerate(records):
        assert plan.schedule == schedule.split(":")[0], plan
        planned = [[transfer.bytes for transfer in part] for part in plan.transfers(rank)]
        assert planned[0] == forward.sent
        # A ring across groups sends dK and dV before the keys of the next hop.
        assert sorted(planned[1]) == sorted(backward.sent)
        for record in (forward, backward):
            assert record.collectives == ["AllToAllBase"] * len(record.sent)
    assert len({len(record.sent) for record, _, _ in records}) == 1
    for which in (0, 1):
        sums = [
            sum(sum(getattr(record[which], name)) for record in records)
            for name in ("sent", "received")
        ]
        assert sums[0] == sums[1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "schedule", ["natural_ring", "mirrored_ring", "gather", "one_call", "ulysses", "hybrid:2"]
)
def test_plans_know_that_padded_heads_travel(monkeypatch, recorder, schedule, causal):
    monkeypatch.setattr(CpuFlash, "head_dim_multiple", 8)
    monkeypatch.setattr(decide, "_plans", {})
    problem = Problem(heads=4, length=32, dim=12, causal=causal)
    with only("cpu_flash"):
        records = traffic(recorder, problem, 4, schedule=schedule)
    for rank, (*both, plan) in enumerate(records):
        for record, moves in zip(both, plan.transfers(rank), strict=True):
            sent = sum(record.sent) + sum(record.gathered)
            assert sent == sum(move.bytes for move in moves) and record.collectives


@pytest.mark.parametrize("world_size", [2, 4])
def test_head_tail_sends_every_shard_around(recorder, world_size):
    """At every hop some rank needs every key, and nothing else is sent."""
    length = 8 * world_size
    problem = Problem(length=length, causal=True)
    layout = HeadTail(length, world_size)
    one = shard_bytes(problem, 8)
    for rank, (forward, _, plan) in enumerate(
        traffic(recorder, problem, world_size, layout=layout)
    ):
        assert forward.sent == [one] * (world_size - 1)
        assert plan.bytes_sent(rank) == sum(forward.sent)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_buffers_are_bounded(recorder, world_size, dtype, causal):
    """Forward: two key/value shards. Backward: two of those, and two float32 dK/dV shards."""
    problem = Problem(length=60, dtype=dtype, causal=causal, key_heads=2)
    largest = -(-60 // world_size)
    one, wide = shard_bytes(problem, largest), shard_bytes(problem, largest, itemsize=4)
    for forward, backward, _ in traffic(recorder, problem, world_size):
        assert (forward.peak, forward.peak_bytes) == (2, 2 * one)
        assert (backward.peak, backward.peak_bytes) == (4, 2 * one + 2 * wide)
        assert forward.live == backward.live == 0, "freed at the end"
    for _, backward, _ in traffic(recorder, problem, world_size, needs=(True, False, False)):
        assert (backward.peak, backward.peak_bytes) == (2, 2 * one)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_calls_without_a_sharded_sequence_send_nothing(recorder, placement):
    def rank_body(rank: int) -> Record:
        mesh = init_device_mesh("cpu", (2,))
        tensors = [distribute(x, mesh, [placement]) for x in Problem().tensors()]
        inputs = [x.requires_grad_() for x in tensors[:3]]
        with recorder.record() as record:
            output = Problem().attend(*inputs)
            torch.autograd.grad(output, inputs, tensors[3])
        return record

    with cp_dispatch.enabled():
        for record in run_threads(2, rank_body):
            assert record.sent == [] and record.collectives == []


def one_sided(recorder, problem: Problem, places, world_size: int, needs=(True,) * 3):
    """Records of forward and backward on every rank, and the backward's placements."""

    def rank_body(rank: int):
        mesh = init_device_mesh("cpu", (world_size,))
        tensors = problem.tensors()
        inputs = [
            distribute(x, mesh, [place]).requires_grad_(need)
            for x, place, need in zip(tensors, places, needs, strict=False)
        ]
        grad = distribute(tensors[3], mesh, [places[0]])
        with recorder.record() as forward:
            output = problem.attend(*inputs)
        with recorder.record() as backward:
            torch.autograd.grad(output, [x for x in inputs if x.requires_grad], grad)
        return forward, backward

    with cp_dispatch.enabled():
        return run_threads(world_size, rank_body)


WHOLE, ROWS = Replicate(), Shard(2)


@pytest.mark.parametrize("world_size", [2, 4, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replicated_keys_send_nothing_forward(recorder, dtype, causal, world_size):
    """In the backward, one sum each of dK and dV, in float32."""
    problem = Problem(length=48, key_length=51, causal=causal, key_heads=2, dtype=dtype)
    wide = shard_bytes(problem, 51, itemsize=4) // 2
    places = (ROWS, WHOLE, WHOLE)
    for forward, backward in one_sided(recorder, problem, places, world_size):
        assert forward.collectives == [] and forward.peak == 0
        assert backward.collectives == ["AllReduce"] * 2
        assert backward.bytes == [wide] * 2
    needs = (True, False, False)
    for forward, backward in one_sided(recorder, problem, places, world_size, needs):
        assert forward.collectives == backward.collectives == []


@pytest.mark.parametrize("world_size", [2, 4, 5])
@pytest.mark.parametrize("rows, causal", [(1, False), (7, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_moves_no_key(recorder, dtype, rows, causal, world_size):
    """Forward: one gather of outputs, in float32, and one of logsumexp. Backward: one sum of dQ."""
    problem = Problem(length=rows, key_length=50, causal=causal, key_heads=2, dtype=dtype)
    query = problem.batch * problem.heads * rows * 4  # of each of these, 4 bytes per number
    for forward, backward in one_sided(recorder, problem, (WHOLE, ROWS, ROWS), world_size):
        assert len(forward.collectives) == 2 and set(forward.collectives) <= GATHERS
        assert forward.bytes == [query * problem.dim, query]
        assert backward.collectives == ["AllReduce"]
        assert backward.bytes == [query * problem.dim]
        assert forward.sent == backward.sent == [], "no shift"


@pytest.mark.parametrize("places", [(ROWS, WHOLE, ROWS), (ROWS, ROWS, WHOLE)], ids=str)
def test_a_whole_key_beside_a_sharded_value_is_cut_locally(recorder, places):
    """It costs only the ring's own moves."""
    problem = Problem(length=48)
    for forward, _ in one_sided(recorder, problem, places, 4):
        assert forward.sent == [shard_bytes(problem, 12)] * 3
        assert forward.collectives == ["AllToAllBase"] * 3


@pytest.mark.parametrize("placed", [None, WHOLE, Shard(0), Shard(1)], ids=str)
def test_a_mask_costs_nothing_unless_its_columns_are_sharded(recorder, placed):
    """A mask is cut where it is. One that is sharded over columns goes around the ring once."""
    mask = Mask("qk")
    problem = Problem(length=48, mask=mask)

    def rank_body(rank: int) -> Record:
        mesh = init_device_mesh("cpu", (4,))
        where = None if placed is None else [placed]
        inputs, masks, _ = distributed_inputs(
            problem, problem.tensors(), mesh, SEQUENCE, mask_placements=where
        )
        with recorder.record() as record:
            problem.attend(*inputs, *masks)
        return record

    with cp_dispatch.enabled():
        for record in run_threads(4, rank_body):
            assert record.sent == [shard_bytes(problem, 12)] * 3
            others = [name for name in record.collectives if name != "AllToAllBase"]
            assert len(others) <= (placed == Shard(1)), record.collectives


def test_explain_says_what_dtensor_moves_first(recorder):
    """A sum of keys and the columns of a mask: one collective each, forward and backward."""
    problem = Problem(length=16, mask=Mask("qk"))

    def body(rank: int):
        mesh = init_device_mesh("cpu", (2,))
        inputs, (mask,), _ = distributed_inputs(
            problem, problem.tensors(), mesh, value_placements=(Partial(),),
            mask_placements=(Shard(1),),
        )  # fmt: skip
        plan = cp_dispatch.explain(*inputs, mask)
        with recorder.record() as forward:
            output = problem.attend(*inputs, mask)
        with recorder.record() as backward:
            output.backward(distribute(problem.tensors()[3], mesh, SEQUENCE))
        for record, transfers in zip((forward, backward), plan.transfers(rank), strict=True):
            assert len(record.collectives) == len(transfers) + 2, record.collectives
        return [x for x in plan.reasons if "DTensor redistributes" in x]

    with cp_dispatch.enabled():
        for value, mask in run_threads(2, body):
            assert "value from (Partial(sum),) to (Shard(dim=2),)" in value
            assert "attn_mask from (Shard(dim=3),) to (Shard(dim=2),)" in mask
