"""Eager calls on plain shards without the dispatch of our ops: the same bits as the op, and only
where nobody has to see it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cp_dispatch
from cp_dispatch import dispatch
from cp_dispatch.backends.cpu_flash import CpuFlash
from cp_dispatch.plain_tensors import plain_path
from tests.distributed.calls import only
from tests.distributed.rooms import Rooms
from tests.distributed.test_one_call_threads import counted, prefix_backward, prefix_forward
from tests.distributed.threads import run_threads
from tests.ranks import one_rank


class Watch(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def ops(monkeypatch) -> list:
    """Names of the ops that calls went to."""
    seen = []
    for module, name in ((dispatch, "forward_op"), (plain_path, "backward_op")):
        real = getattr(module, name)

        def noted(backend, real=real, name=name):
            seen.append(name)
            return real(backend)

        monkeypatch.setattr(module, name, noted)
    return seen


def on_ranks(body, ranks: int = 2, **options):
    def on_rank(rank: int):
        mesh = init_device_mesh("cpu", (ranks,))
        with cp_dispatch.context_parallel(mesh, **{"balancer": None} | options):
            return body(rank)

    return run_threads(ranks, on_rank)


def inputs(rank: int = 0, dim: int = 8, dtype=torch.float32, needs=(True,) * 3):
    """query, key, value and the gradient of the output, of a rank."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(1, 4, 16, dim, generator=generator, dtype=dtype) for _ in range(4)]
    return [x.requires_grad_(need) for x, need in zip(tensors, (*needs, False), strict=True)]


def attend(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def results(query, key, value, grad, attend=attend) -> list:
    output = attend(query, key, value)
    wanted = [x for x in (query, key, value) if x.requires_grad]
    return [output.detach(), *(torch.autograd.grad(output, wanted, grad) if wanted else ())]


@pytest.mark.parametrize("needs", [
    (True,) * 3, (True, False, False), (False, True, False), (False, False, True), (False,) * 3,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("options", [
    {}, {"schedule": "ring"}, {"schedule": "gather"}, {"schedule": "ulysses"},
    {"schedule": "gather", "balancer": "head-tail"},
], ids=str)  # fmt: skip
def test_the_same_bits_as_the_op(ops, options, needs):
    def body(rank):
        tensors = inputs(rank, needs=needs)
        direct = [results(*tensors) for _ in range(3)]
        gone = ops.copy()
        dist.barrier()
        with Watch():
            want = results(*tensors)
        for got in direct:
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()
        return gone

    with only("cpu_flash"):
        assert on_ranks(body, **options) == [[], []]
    assert ops.count("forward_op") == 2


def test_calls_of_other_head_dims_and_dtypes_are_of_another_kind(ops):
    """The scale that is not given depends on the head dim."""

    def body(rank):
        for dim, dtype in ((8, torch.float32), (16, torch.float32), (8, torch.bfloat16)):
            tensors = inputs(rank, dim, dtype)
            got = results(*tensors)
            with Watch():
                want = results(*tensors)
            assert all(map(torch.equal, got, want))

    on_ranks(body)


def test_calls_of_other_kernels_are_of_another_kind(ops):
    def body(rank):
        tensors, found = inputs(rank, dtype=torch.bfloat16), []
        for is_on in (True, False):
            torch.backends.cuda.enable_flash_sdp(is_on)  # of the process, so on all ranks
            dist.barrier()
            found.append(results(*tensors))
            with Watch():
                want = results(*tensors)
            assert all(map(torch.equal, found[-1], want))
            dist.barrier()
        return torch.equal(found[0][0], found[1][0])

    assert on_ranks(body) == [False, False]


def test_the_output_has_the_dtype_of_the_query(ops):
    """Also if the op's own output has another one."""

    def body(rank):
        tensors = inputs(rank, dtype=torch.bfloat16)
        got = results(*tensors)
        with Watch():
            want = results(*tensors)
        assert {x.dtype for x in got} == {torch.bfloat16} and all(map(torch.equal, got, want))

    with sdpa_kernel(SDPBackend.MATH):
        on_ranks(body)


@pytest.mark.parametrize("schedule", ["one_call", "ulysses"])
def test_known_calls(monkeypatch, ops, schedule):
    monkeypatch.setattr(CpuFlash, "takes_prefixes", True)
    monkeypatch.setattr(CpuFlash, "prefix_forward", prefix_forward)
    monkeypatch.setattr(CpuFlash, "prefix_backward", prefix_backward)
    rooms = Rooms(monkeypatch)
    rooms.most_views = 64  # a known call counts as one

    def body(rank):
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(rank)]
        tensors = [x.detach().requires_grad_(i < 3) for i, x in enumerate(tensors)]
        first, *rest = [results(*tensors) for _ in range(5)]
        for got in rest:
            assert all(map(torch.equal, got, first))

    with only("cpu_flash"), counted() as calls:
        on_ranks(body, schedule=schedule)
    assert calls["forward"] >= 2 * 3 and calls["backward"] >= 2 * 2 and not ops, calls
    rooms.assert_all_was_read()


def test_watchers_and_other_tensors_see_the_op(ops):
    class Other(torch.Tensor):
        pass

    def body(rank):
        *tensors, grad = inputs(rank)
        output = attend(*tensors)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(output, tensors, grad)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(attend(*tensors), tensors, grad)
        attend(*[x.detach().as_subclass(Other) for x in tensors])
        return counter.get_total_flops(), backward.get_total_flops()

    one = 2 * 4 * 16 * 32 * 8  # of a rank's rows
    assert on_ranks(body) == [(7 * one, 5 * one)] * 2
    assert ops.count("forward_op") == 4 and ops.count("backward_op") == 2


def test_a_checkpoint_records_one_way_and_recomputes_the_other(ops):
    def body(rank):
        *tensors, grad = inputs(rank)
        want = results(*tensors, grad)[1:]
        for recorded, recomputed in ((Watch, contextlib.nullcontext),
                                     (contextlib.nullcontext, Watch)):  # fmt: skip
            with recorded():
                output = checkpoint(attend, *tensors, use_reentrant=False)
            with recomputed():
                got = torch.autograd.grad(output, tensors, grad)
            assert all(map(torch.equal, got, want))

    on_ranks(body)


def test_writing_into_what_was_saved_is_noticed(ops):
    def body(rank):
        query, key, value, grad = inputs(rank)
        for touch in (lambda out: out.mul_(2), lambda out: key.mul_(2)):
            output = attend(query, key, value)
            later = output * 1.0
            with torch.no_grad():
                touch(output)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(later, (query, key, value), grad)

    on_ranks(body)


def test_a_second_derivative_is_refused(ops):
    def body(rank):
        *tensors, grad = inputs(rank)
        output = attend(*tensors)
        (dq,) = torch.autograd.grad(output, tensors[:1], grad, create_graph=True)
        with pytest.raises(cp_dispatch.ContextParallelError, match="no second derivative"):
            dq.sum().backward()

    on_ranks(body)


def test_a_backward_under_autocast_keeps_its_dtypes(ops):
    def body(rank):
        tensors = inputs(rank)
        want = results(*tensors)
        output = attend(*tensors[:3])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = torch.autograd.grad(output, tensors[:3], tensors[3])
        assert all(map(torch.equal, got, want[1:]))

    with only("math"):
        on_ranks(body)


def test_calls_of_destroyed_groups_are_forgotten(ops):
    for _ in range(3):
        with one_rank() as mesh:
            plain_path.attend("math", _arguments(mesh), *inputs()[:3])
    assert len(plain_path._known) == 1 and not ops


def _arguments(mesh) -> tuple:
    group = mesh.get_group().group_name
    return (
        None, None, 0.0, [0, 0, 4], True, None, 16, 16, "ring", [1], group, "", "rows",
    )  # fmt: skip
