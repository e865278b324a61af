"""Known calls of ``one_call`` and of heads: together with ranks that go through DTensor's dispatch,
after errors, and in new rooms."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from cp_dispatch import HeadTail, PerDocumentHeadTail
from cp_dispatch.backends.cpu_flash import CpuFlash
from cp_dispatch.schedules import known_call, known_heads, mailbox, pushed_heads
from cp_dispatch.schedules.known_call import KnownCalls
from tests.distributed.calls import in_stages, only
from tests.distributed.permuted import run_permuted
from tests.distributed.reference import Problem, check, exact, one_device
from tests.distributed.rooms import Rooms
from tests.distributed.test_one_call_threads import counted, prefix_backward, prefix_forward
from tests.distributed.threads import run_threads


@pytest.fixture(autouse=True)
def rooms(monkeypatch):
    monkeypatch.setattr(CpuFlash, "takes_prefixes", True)
    monkeypatch.setattr(CpuFlash, "prefix_forward", prefix_forward)
    monkeypatch.setattr(CpuFlash, "prefix_backward", prefix_backward)
    rooms = Rooms(monkeypatch)
    rooms.most_views = 64  # a known call counts as one
    return rooms


class Case:
    """A problem and its results. They are made before ranks run, because switches of kernels belong
    to the process."""

    def __init__(self, length: int, batch: int = 1, schedule: str = "one_call", **how):
        fields = {"heads": 4, "key_heads": 2, "dim": 16, "causal": True} | how
        self.problem, self.schedule = Problem(batch=batch, length=length, **fields), schedule
        self.tensors = self.problem.tensors()
        self.want = exact(self.problem, self.tensors)
        self.alone = one_device(self.problem, self.tensors, "cpu_flash")


class Calls:
    """Repeated calls of the same problem on a rank."""

    def __init__(self, case: Case, rank: int, world_size: int, layout=None):
        self.problem, self.tensors, self.want = case.problem, case.tensors, case.want
        self.alone, self.schedule = case.alone, case.schedule
        self.rank, self.mesh = rank, init_device_mesh("cpu", (world_size,))
        self.layout = layout

    def shard(self, tensor: torch.Tensor, token_major: bool) -> DTensor:
        if self.layout is not None:
            tensor = tensor.index_select(2, self.layout.indices[0])
        own = tensor.chunk(self.mesh.size(), 2)[self.rank].clone()
        if token_major:
            own = own.transpose(1, 2).contiguous().transpose(1, 2)
        # One spec for every memory layout of the shard, so that nothing else distinguishes the
        # calls.
        return DTensor.from_local(
            own, self.mesh, [Shard(2)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def run(self, token_major: bool = True) -> list[torch.Tensor]:
        """Output and gradients of the whole sequence."""
        *inputs, grad = (self.shard(x, token_major) for x in self.tensors)
        inputs = [x.requires_grad_() for x in inputs]
        with cp_dispatch.enabled(schedule=self.schedule, layout=self.layout):
            output = self.problem.attend(*inputs)
            grads = torch.autograd.grad(output, inputs, grad)
        return [x.full_tensor().detach() for x in (output, *grads)]

    def in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            return tensor
        return tensor.index_select(2, self.layout.inverse[0])

    def check(self, **how) -> None:
        check(self.run(**how), self.want, self.alone)


def run(world_size: int, body) -> dict[str, int]:
    with only("cpu_flash"), counted() as calls:
        run_threads(world_size, body)
    return calls


def assert_nothing_is_known(rooms: Rooms, case: Case, world_size: int) -> None:
    """Right at every call, always through DTensor's dispatch."""

    def body(rank):
        calls = Calls(case, rank, world_size)
        for _ in range(4):
            calls.check()

    assert not any(run(world_size, body).values())
    rooms.assert_all_was_read()


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_goes_the_whole_way_beside_ranks_that_know(rooms, world_size, schedule):
    how = {"heads": 2 * world_size, "key_heads": world_size} if schedule == "ulysses" else {}
    case = Case(24 * world_size, schedule=schedule, **how)

    def body(rank):
        calls = Calls(case, rank, world_size)
        for i in range(6):
            # On one rank, strides of another kind at each call.
            calls.check(token_major=rank > 0 or i % 2 == 0)

    calls = run(world_size, body)
    rooms.assert_all_was_read()
    others = world_size - 1
    assert 4 * others <= calls["forward"] < 4 * world_size, calls
    assert 3 * others <= calls["backward"] < 3 * world_size, calls


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
def test_rooms_that_others_take_the_place_of(rooms, schedule):
    """A longer call replaces the rooms. What was known is learned again, in the new rooms."""

    cases = Case(32, schedule=schedule), Case(96, batch=2, schedule=schedule)

    def body(rank):
        short, long = (Calls(case, rank, 2) for case in cases)
        for _ in range(2):
            for _ in range(5):
                short.check()
            long.check()

    calls = run(2, body)
    rooms.assert_all_was_read()
    assert calls["forward"] >= 2 * 6 and calls["backward"] >= 2 * 4, calls


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
def test_plain_calls_of_two_dtypes_are_of_two_kinds(rooms, schedule):
    """They share an op's arguments."""
    cases = [
        Case(32, schedule=schedule, key_heads=4, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        with cp_dispatch.context_parallel(mesh, balancer=None, schedule=schedule):
            for case in cases * 4:
                *inputs, grad = (
                    x.chunk(2, 2)[rank].transpose(1, 2).contiguous().transpose(1, 2)
                    for x in case.tensors
                )
                inputs = [x.requires_grad_() for x in inputs]
                output = case.problem.attend(*inputs)
                own = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
                whole = cp_dispatch.unshard(mesh, own, 2)
                check(whole, case.want, case.alone)

    run(2, body)
    rooms.assert_all_was_read()


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
@pytest.mark.parametrize("failing", [(1,), (0, 1, 2)], ids=str)
def test_after_an_error_in_a_known_backward_no_rank_waits(rooms, monkeypatch, failing, schedule):
    name = "prefix_backward" if schedule == "one_call" else "backward"
    compute, fail = getattr(CpuFlash, name), threading.local()

    def backward(self, *args, **kwargs):
        if getattr(fail, "now", False):
            raise RuntimeError("out of memory")
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(CpuFlash, name, backward)

    case = Case(48, schedule=schedule, heads=6, key_heads=3)

    def body(rank):
        calls = Calls(case, rank, 3)
        for _ in range(4):
            calls.check()
        with torch.autograd.set_multithreading_enabled(False):
            fail.now = rank in failing
            inputs = [calls.shard(x, True).requires_grad_() for x in calls.tensors[:3]]
            with cp_dispatch.enabled(schedule=schedule):
                output = calls.problem.attend(*inputs)
            grad = calls.shard(calls.tensors[3], True)
            if fail.now:
                with pytest.raises(RuntimeError, match="out of memory"):
                    torch.autograd.grad(output, inputs, grad)
            else:
                torch.autograd.grad(output, inputs, grad)
            fail.now = False
        calls.check()

    calls = run(3, body)
    rooms.assert_all_is_quiet()
    assert calls["backward"] == 3 * 3, calls


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
def test_without_gradients_of_keys(rooms, schedule):
    """A backward of the query alone was not learned."""

    case = Case(32, schedule=schedule)

    def body(rank):
        calls = Calls(case, rank, 2)
        for _ in range(4):
            calls.check()
        *inputs, grad = (calls.shard(x, True) for x in calls.tensors)
        inputs[0].requires_grad_()
        with cp_dispatch.enabled(schedule=schedule):
            for _ in range(3):
                (found,) = torch.autograd.grad(calls.problem.attend(*inputs), inputs[:1], grad)
        check([found.full_tensor()], calls.want[1:2], calls.alone[1:2])

    calls = run(2, body)
    rooms.assert_all_was_read()
    assert calls["forward"] >= 2 * 4 and calls["backward"] <= 2 * 2, calls


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
def test_a_checkpoint_that_recomputes_a_known_call_in_another_order_raises(rooms, schedule):
    case, layout = Case(32, schedule=schedule), HeadTail(32, 2)

    def body(rank):
        first, second = Calls(case, rank, 2), Calls(case, rank, 2, layout)
        for calls in (first, second):
            for _ in range(4):
                calls.run()
        *inputs, grad = (first.shard(x, True) for x in case.tensors)
        inputs = [x.requires_grad_() for x in inputs]
        with cp_dispatch.enabled(schedule=schedule):
            output = checkpoint(case.problem.attend, *inputs, use_reentrant=False)
        with cp_dispatch.enabled(schedule=schedule, layout=layout):
            with pytest.raises(cp_dispatch.ContextParallelError, match="in a different order"):
                torch.autograd.grad(output, inputs, grad)
        first.check()

    assert all(run(2, body).values())
    rooms.assert_all_was_read()


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
def test_nothing_is_known_of_a_negative_scale(rooms, schedule):
    """Kernels get its absolute value, and the queries get its sign."""
    assert_nothing_is_known(rooms, Case(32, schedule=schedule, scale=-0.3, causal=False), 2)


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
def test_nothing_is_known_of_heads_that_kernels_want_padded(rooms, monkeypatch, schedule):
    monkeypatch.setattr(CpuFlash, "head_dim_multiple", 32)
    assert_nothing_is_known(rooms, Case(32, schedule=schedule), 2)


HEADS = {
    "head-tail": {"layout": HeadTail(64, 4)},
    "not causal": {"causal": False},
    "batch": {"batch": 3},
    "thin rows packed, others not": {"dim": 128, "heads": 32, "key_heads": 4, "batch": 2},
    "wide rows": {"dim": 128, "heads": 16, "key_heads": 16, "layout": HeadTail(64, 4)},
    "bfloat16": {"dtype": torch.bfloat16, "key_heads": 4},
    "a head dim of 1": {"dim": 1, "batch": 2},  # sent in the same way as the logsumexp
}


@pytest.mark.parametrize("case", HEADS)
def test_known_calls_of_heads(rooms, case):
    """They give what the calls through DTensor's dispatch give. The first backward makes the room
    larger than its forward did, so one more call is learned again."""
    how = {"heads": 8, "key_heads": 8, "layout": None} | HEADS[case]
    layout = how.pop("layout")
    case = Case(64, schedule="ulysses", **how)

    def body(rank):
        calls = Calls(case, rank, 4, layout)
        first = calls.run()
        check([calls.in_order(x) for x in first], case.want, case.alone)
        for _ in range(4):
            for x, y in zip(calls.run(), first, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0)

    calls = run(4, body)
    rooms.assert_all_was_read()
    assert calls == {"forward": 3 * 4, "backward": 2 * 4}


UNKNOWN = {
    "shared key heads": {"heads": 8, "key_heads": 2},
    "uneven heads": {"heads": 6, "key_heads": 6},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_nothing_is_known_of_heads_dealt_unevenly(rooms, case):
    assert_nothing_is_known(rooms, Case(64, schedule="ulysses", **UNKNOWN[case]), 4)


def test_nothing_is_known_of_heads_in_stages(rooms, monkeypatch):
    in_stages(monkeypatch, 2)  # each with some of the heads of every rank
    assert_nothing_is_known(rooms, Case(64, schedule="ulysses", heads=8, key_heads=8), 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_rows_with_layouts_of_their_own(rooms, groups):
    """Each row is a kernel call of its own. A call is known if the rank holds one row, even if
    other ranks hold different rows."""
    layout = PerDocumentHeadTail([[24], [20, 4]], 2)
    problem = Problem(batch=2, heads=4, length=24, dim=8, causal=True)
    tensors = problem.tensors()
    want, alone = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")

    def body(rank):
        mesh = init_device_mesh("cpu", (groups, 2))
        for _ in range(4):
            got = run_permuted(
                problem, layout, mesh, placements=[Shard(0), Shard(2)], schedule="ulysses"
            )
            check(got, want, alone)

    calls = run(2 * groups, body)
    assert all(calls.values()) if groups == 2 else not any(calls.values())
    rooms.assert_all_was_read()


def test_nothing_is_known_of_no_batch_row(rooms):
    """There is nothing to send, and nothing that kernels accept."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        nothing = [torch.zeros(0, 2, 16, 8).requires_grad_() for _ in range(3)]
        tensors = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in nothing]
        with cp_dispatch.enabled(schedule="one_call"):
            for _ in range(3):
                output = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
                output.to_local().sum().backward()

    assert not any(run(2, body).values()) and not rooms.sent


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
def test_known_calls_on_another_stream(rooms, monkeypatch, schedule):
    """Copies run on the side stream. They are waited for, and it is signalled once what arrived has
    been read."""
    for module in (known_call, known_heads, mailbox, pushed_heads):
        monkeypatch.setattr(module, "on_default_stream", lambda device: False)
    case = Case(32, schedule=schedule)

    def body(rank):
        calls = Calls(case, rank, 2)
        for i in range(10):
            calls.check(token_major=i < 5)  # otherwise they are packed first
        # After a backward of one_call, the push of the shares has waited until the keys were read.
        inputs = [calls.shard(x, True).requires_grad_() for x in calls.tensors[:3]]
        with cp_dispatch.enabled(schedule=schedule):
            calls.problem.attend(*inputs)

    assert all(run(2, body).values())
    rooms.assert_all_was_read()


def test_calls_by_heads_on_one_stream_and_another(rooms, monkeypatch):
    """On one stream heads are packed, and the numbers that are learned differ."""
    stream = threading.local()
    for module in (known_call, known_heads, mailbox, pushed_heads):
        monkeypatch.setattr(module, "on_default_stream", lambda device: stream.number == 0)
    monkeypatch.setattr(known_call, "current_raw_stream", lambda device: stream.number)
    monkeypatch.setattr(known_call, "is_capturing", lambda: False)
    case = Case(32, schedule="ulysses")

    def body(rank):
        calls = Calls(case, rank, 2)
        for number in (0, 7, 7, 7, 0, 0, 0, 7):
            stream.number = number
            calls.check()

    assert all(run(2, body).values())
    rooms.assert_all_was_read()


def test_calls_on_another_stream_are_of_another_kind(monkeypatch):
    """Such calls wait for other streams."""
    stream, tensors = 0, (torch.ones(1),)
    monkeypatch.setattr(known_call, "current_raw_stream", lambda device: stream)
    here = known_call._kind(tensors)
    assert here == known_call._kind(tensors)
    stream = 7
    assert here != known_call._kind(tensors)


def test_a_way_is_of_its_own_kind_while_another_thread_learns():
    """Kind and way are looked up together. What is learned meanwhile is for the next call."""
    calls, box = KnownCalls(None), mock.Mock(views={})
    ways = [mock.MagicMock() for _ in range(2)]
    kinds = [(torch.ones(1, 1, length, 1),) for length in (4, 8)]

    def learn(index: int) -> bool:
        calls._keep(0, kinds[index], ways[index], box)
        return True

    learn(0)
    assert calls._way(0, kinds[0]) is ways[0] and calls._way(0, kinds[1]) is None
    type(ways[0]).is_current = mock.PropertyMock(side_effect=lambda: learn(1))
    assert calls._way(0, kinds[1]) is None
    assert calls._way(0, kinds[1]) is ways[1]
    assert box.forget_many.call_count == 2, "rooms do not fill with what was known"


#: The most functions of Python and C that the package calls in a known forward and its backward.
#: Each takes the host time, which is most of what such a call takes. A few more than it makes.
MOST_CALLS = {"one_call": (116, 144), "ulysses": (125, 98)}


@pytest.mark.parametrize("schedule", MOST_CALLS)
def test_a_known_call_makes_few_calls(rooms, schedule):
    case = Case(32, schedule=schedule)

    def body(rank):
        calls = Calls(case, rank, 2)
        for _ in range(4):
            calls.run()
        *inputs, grad = (calls.shard(x, True) for x in case.tensors)
        inputs = [x.requires_grad_() for x in inputs]
        with our_calls() as forward:
            output = case.problem.attend(*inputs)
        with our_calls() as backward:
            torch.autograd.grad(output, inputs, grad)
        return len(forward), len(backward)

    # Not on for each rank: a thread finds options faster if it was the last to enter a block.
    with only("cpu_flash"), cp_dispatch.enabled(schedule=schedule):
        found = run_threads(2, body)
    most = tuple(map(max, *found))
    assert most[0] <= MOST_CALLS[schedule][0] and most[1] <= MOST_CALLS[schedule][1], most


@contextlib.contextmanager
def our_calls():
    """The names of the functions that the package calls in this thread, and of its own that torch
    calls."""
    found: list[str] = []
    start = os.path.dirname(cp_dispatch.__file__)

    def is_ours(frame) -> bool:
        return frame is not None and frame.f_code.co_filename.startswith(start)

    def note(frame, event, argument):
        if event == "call" and (is_ours(frame) or is_ours(frame.f_back)):
            found.append(frame.f_code.co_name)
        elif event == "c_call" and is_ours(frame):
            found.append(argument.__name__)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
