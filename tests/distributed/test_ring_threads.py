"""The ring on 2, 3, 4 and 8 ranks in threads: output and gradients against float64."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import cp_dispatch
from cp_dispatch import options
from cp_dispatch.schedules import CHOICES, SCHEDULES, one_call, ring
from tests.distributed.calls import only
from tests.distributed.reference import Problem, check, exact, one_device, rounding
from tests.distributed.sharded import SEQUENCE, distribute, run_sharded
from tests.distributed.threads import run_threads

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def enabled():
    with cp_dispatch.enabled():
        yield


@functools.cache
def judged(problem: Problem, *kernels: str):
    """The tensors, the exact answers, and one device's answers with each kernel."""
    tensors = problem.tensors()
    singles = [one_device(problem, tensors, kernel) for kernel in kernels]
    return tensors, exact(problem, tensors), *singles


def ring_matches(problem: Problem, kernel: str, world_size: int, **how) -> None:
    """The ring with this kernel is as exact as the kernel on one device.

    The ring's math kernel keeps the output and its logsumexp for the backward, as flash kernels do.
    Torch's keeps all probabilities. The difference shows in float64, and if rows see only a few
    keys or heads have only a few dims. In those cases one device's flash kernel is a measure too.
    """
    few = min(problem.length, problem.key_length or problem.length, problem.dim) <= 3
    kernels = [kernel, "cpu_flash"] if few or problem.dtype is FP64 else [kernel]
    tensors, want, *singles = judged(problem, *kernels)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
        check(run_sharded(problem, tensors, mesh, **how), want, *singles)

    with only(kernel):
        run_threads(world_size, rank_body)


PROBLEMS: dict[str, tuple[Problem, str]] = {}


def problem(name: str, *kernels: str, **fields) -> None:
    for kernel in kernels or ("cpu_flash", "math"):
        PROBLEMS[f"{kernel} {name}"] = Problem(**fields), kernel


for _causal in (False, True):
    _mask = "causal" if _causal else "full"
    problem(f"{_mask} mha", causal=_causal)
    problem(f"{_mask} gqa", causal=_causal, key_heads=2)
    problem(f"{_mask} mqa", causal=_causal, key_heads=1)
    problem(f"{_mask} 3 heads", causal=_causal, heads=3, batch=3)
    problem(f"{_mask} gqa 9/3", causal=_causal, heads=9, key_heads=3, batch=1)
    for _dtype in (BF16, FP16):
        problem(f"{_mask} {_dtype}", causal=_causal, dtype=_dtype)
        problem(f"{_mask} {_dtype} gqa", causal=_causal, dtype=_dtype, key_heads=2)
    problem(f"{_mask} float64", "math", causal=_causal, dtype=FP64, length=96)
    problem(f"{_mask} float64 gqa 97", "math", causal=_causal, dtype=FP64,
            length=97, key_heads=2)  # fmt: skip
    problem(f"{_mask} scale 0.3", causal=_causal, scale=0.3)
    problem(f"{_mask} length 250", causal=_causal, length=250)
    problem(f"{_mask} length 257", causal=_causal, length=257)
    for _kernel, _dtype in (("cpu_flash", FP32), ("math", BF16)):
        problem(f"{_mask} 3 rows", _kernel, dtype=_dtype, causal=_causal, heads=64, length=3,
                key_length=64)  # fmt: skip
        problem(f"{_mask} 3 keys", _kernel, dtype=_dtype, causal=_causal, heads=16, length=64,
                key_length=3)  # fmt: skip
    problem(f"{_mask} 128 x 384", causal=_causal, length=128, key_length=384)
    problem(f"{_mask} 384 x 128", causal=_causal, length=384, key_length=128)
    problem(
        f"{_mask} 100 x 37 gqa", causal=_causal, length=100, key_length=37, key_heads=2, batch=4
    )
    problem(f"{_mask} value dim 48", "math", causal=_causal, value_dim=48)
    problem(f"{_mask} value dim 5", "math", causal=_causal, value_dim=5)
    problem(f"{_mask} batch 1", causal=_causal, batch=1, heads=8)


# The others run only on 3 and 4 ranks.
ON_2_AND_8 = ("mha", "gqa", "mqa", "length 250", "3 rows", "3 keys", "128 x 384", "float64")


@pytest.mark.parametrize(
    "world_size, name",
    [
        (world_size, name)
        for world_size in (2, 3, 4, 8)
        for name in PROBLEMS
        if world_size in (3, 4) or name.endswith(ON_2_AND_8)
    ],
)
def test_problem(name, world_size):
    ring_matches(*PROBLEMS[name], world_size)


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 17, 36, 40, 64, 80, 96, 129, 192, 255, 256])
def test_head_dim(dim, kernel):
    problem = Problem(batch=2, heads=8, length=96, dim=dim, causal=True, dtype=BF16)
    ring_matches(problem, kernel, 3)


@pytest.mark.parametrize(
    "needs",
    [(True, False, False), (False, True, False), (False, False, True), (False, True, True),
     (True, False, True), (False, False, False)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_some_inputs_need_gradients(needs, kernel):
    ring_matches(Problem(causal=True, key_heads=2), kernel, 3, needs=needs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kernel", [None, "cpu_flash", "math"])
def test_without_gradients(mode, kernel):
    problem = Problem(causal=True, key_heads=2, length=250)
    tensors, want, single = judged(problem, kernel or "cpu_flash")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        got = run_sharded(problem, tensors, mesh, needs=(False,) * 3)
        assert not got[0].requires_grad
        check(got, want, single)

    with mode(), only(kernel):
        run_threads(4, rank_body)


@pytest.mark.parametrize("schedule", ["natural_ring", "mirrored_ring", "gather", "ulysses"])
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_causal_with_a_scale_that_is_not_positive(scale, schedule):
    """One device's flash kernel returns NaN, because it masks first and scales afterwards."""
    problem = Problem(causal=True, scale=scale, key_heads=2)
    tensors, want, single = judged(problem, "math")
    floors, _ = rounding(problem, tensors)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        for _ in range(2):  # the second call is a known call
            check(run_sharded(problem, tensors, mesh), want, single, floors=floors, few=True)

    with cp_dispatch.enabled(schedule=schedule), only("cpu_flash"):
        run_threads(4, rank_body)


def test_several_batch_dims_stay_sharded_in_inference_mode():
    """DTensor's rules of flatten and unflatten, which are used in this mode, gathered short
    dims."""
    problem = Problem(lead=(2, 2, 4), length=3)
    tensors = problem.tensors()
    want, single = exact(problem, tensors), one_device(problem, tensors, "math")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        check(run_sharded(problem, tensors, mesh, needs=(False,) * 3), want, single, few=True)

    with torch.inference_mode():
        run_threads(4, rank_body)


@pytest.mark.parametrize("length, key_length", [(256, 256), (250, 131)])
@pytest.mark.parametrize("causal", [False, True])
def test_replicated_keys_beside_sharded_query(causal, length, key_length):
    problem = Problem(causal=causal, key_heads=2, length=length, key_length=key_length)
    ring_matches(problem, "cpu_flash", 4, key_placements=(Replicate(),))


def test_partial_key():
    """A key that is still a sum over ranks is summed and then cut."""
    problem, world_size = Problem(causal=True), 4
    tensors, want, single = judged(problem, "cpu_flash")
    query, key, value, grad = tensors

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        share = DTensor.from_local(key / world_size, mesh, [Partial()], run_check=False)
        inputs = [distribute(query, mesh, SEQUENCE), share, distribute(value, mesh, SEQUENCE)]
        for x in inputs:
            x.requires_grad_()
        output = problem.attend(*inputs)
        assert output.placements == SEQUENCE
        grads = torch.autograd.grad(output, inputs, distribute(grad, mesh, SEQUENCE))
        check([x.full_tensor().detach() for x in (output, *grads)], want, single)

    run_threads(world_size, rank_body)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_transposed_views_of_a_model(batch, kernel):
    """``(B, S, H D)`` leaves, split into heads and joined again as attention modules do.

    With a batch of 1, a wrong stride anywhere makes a reshape fail.
    """
    problem = Problem(causal=True, batch=batch, length=250)
    tensors, want, single = judged(problem, kernel)

    def joined(x):
        return x.transpose(1, 2).reshape(x.size(0), x.size(2), -1)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        leaves = [distribute(joined(x), mesh, [Shard(1)]).requires_grad_() for x in tensors[:3]]
        grad = distribute(joined(tensors[3]), mesh, [Shard(1)])

        def attend(*leaves):
            heads = (x.view(*x.shape[:2], problem.heads, -1).transpose(1, 2) for x in leaves)
            return joined(problem.attend(*heads))

        output = attend(*leaves)
        grads = torch.autograd.grad(output, leaves, grad)
        assert output.placements == (Shard(1),)
        got = [
            x.full_tensor().detach().unflatten(2, (problem.heads, -1)).transpose(1, 2)
            for x in (output, *grads)
        ]
        check(got, want, single)

    with only(kernel):
        run_threads(4, rank_body)


@pytest.mark.parametrize("batch", [1, 2])
def test_strides_of_every_shard_agree_with_the_dtensor(batch):
    problem = Problem(batch=batch, causal=True, length=250, key_heads=2)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        tensors = [distribute(x, mesh, SEQUENCE) for x in problem.tensors()]
        inputs = [x.requires_grad_() for x in tensors[:3]]
        output = problem.attend(*inputs)
        for x in (output, *torch.autograd.grad(output, inputs, tensors[3])):
            # Token-major in memory, both in the metadata and in the actual strides.
            for view in (x, x._local_tensor):  # to_local() is a view, with strides of its own
                _, heads, length, dim = view.shape
                expected = (length * heads * dim, dim, heads * dim, 1)
                assert view.stride() == expected, (view.shape, view.stride())

    run_threads(4, rank_body)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoint(reentrant):
    problem = Problem(causal=True, key_heads=2)

    def attend(*inputs):
        return checkpoint(problem.attend, *inputs, use_reentrant=reentrant)

    if not reentrant:
        ring_matches(problem, "cpu_flash", 3, attend=attend)
        return
    # Reentrant checkpoints need backward(), not grad().
    tensors, want, single = judged(problem, "cpu_flash")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        query, key, value, grad = (distribute(x, mesh, SEQUENCE) for x in tensors)
        inputs = [x.requires_grad_() for x in (query, key, value)]
        output = attend(*inputs)
        output.backward(grad)
        got = [output, *(x.grad for x in inputs)]
        check([x.full_tensor().detach() for x in got], want, single)

    run_threads(3, rank_body)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_error_does_not_grow_with_ranks(causal, dtype):
    """At W = 8 no result is worse than 1.3 times its error at W = 2."""
    problem = Problem(causal=causal, dtype=dtype)
    tensors, want, _ = judged(problem, "cpu_flash")

    def results(world_size: int):
        def rank_body(rank: int):
            mesh = init_device_mesh("cpu", (world_size,))
            return run_sharded(problem, tensors, mesh)

        with only("cpu_flash"):
            return run_threads(world_size, rank_body)[0]

    two = results(2)
    for world_size in (4, 8):
        check(results(world_size), want, two)


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_short_shards_of_a_long_sequence(world_size, key_heads):
    """A kernel may accumulate in 16 bits over smaller blocks if it gets fewer rows. A shard must
    not be less exact for being shorter than the whole sequence on one device."""
    problem = Problem(
        batch=1, heads=8, key_heads=key_heads, length=1024, dim=64, causal=True, dtype=BF16
    )
    tensors, want, single = judged(problem, "cpu_flash")
    floors, few = rounding(problem, tensors)

    def rank_body(rank: int):
        return run_sharded(problem, tensors, init_device_mesh("cpu", (world_size,)))

    with only("cpu_flash"):
        for got in run_threads(world_size, rank_body):
            check(got, want, single, floors=floors, few=few)


def test_second_derivative_is_refused():
    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        inputs = [distribute(x, mesh, SEQUENCE).requires_grad_() for x in Problem().tensors()[:3]]
        loss = Problem().attend(*inputs).sum()
        (grad,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
        with pytest.raises(cp_dispatch.ContextParallelError, match="no second derivative"):
            grad.sum().backward()

    run_threads(2, rank_body)


def test_calls_after_calls_reuse_nothing_stale():
    """Shapes that differ from call to call on one mesh, with the gradients computed at the end."""
    problems = [Problem(length=n, causal=c, seed=n) for n in (64, 250, 33) for c in (True, False)]

    # Before the threads start, because one device's kernel is selected by switches of the whole
    # process.
    truth = {problem: judged(problem, "cpu_flash") for problem in problems}

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        pending = []
        for problem in problems:
            tensors = [distribute(x, mesh, SEQUENCE) for x in truth[problem][0]]
            inputs = [x.requires_grad_() for x in tensors[:3]]
            pending.append((problem, inputs, problem.attend(*inputs), tensors[3]))
        for problem, inputs, output, grad in reversed(pending):
            got = [output, *torch.autograd.grad(output, inputs, grad)]
            _, want, single = truth[problem]
            check([x.full_tensor().detach() for x in got], want, single)

    run_threads(3, rank_body)


@pytest.mark.parametrize("schedule", CHOICES)
def test_no_rows_at_all(schedule):
    """As on one device: an empty result, and empty gradients."""

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2,))
        leaves = [
            distribute(torch.zeros(2, 4, 0, 16), mesh, [Shard(2)]).requires_grad_()
            for _ in range(3)
        ]
        output = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        grads = torch.autograd.grad(output, leaves, output)
        assert [x.shape for x in (output, *grads)] == [(2, 4, 0, 16)] * 4

    with cp_dispatch.enabled(schedule=schedule):
        run_threads(2, rank_body)


def test_one_more_schedule_is_one_to_choose(monkeypatch):
    """As soon as it is named in ``SCHEDULES`` and ``CHOICES``."""
    calls = []

    class Another:
        geometry = staticmethod(ring.geometry)
        backward = staticmethod(ring.backward)
        transfers, extra_bytes, blocks = map(
            staticmethod, (one_call.transfers, one_call.extra_bytes, one_call.blocks)
        )

        @staticmethod
        def forward(job, *tensors):
            calls.append(job.rank)
            return ring.forward(job, *tensors)

    monkeypatch.setitem(SCHEDULES, "another", Another)
    monkeypatch.setattr(options, "CHOICES", (*CHOICES, "another"))
    problem = Problem(length=8, dtype=FP32, causal=True)
    tensors, want, single = judged(problem, "cpu_flash")

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2,))
        check(run_sharded(problem, tensors, mesh), want, single)
        plan = cp_dispatch.explain(*(distribute(x, mesh, SEQUENCE) for x in tensors[:3]))
        assert "another over 2 ranks" in str(plan)

    with cp_dispatch.enabled(schedule="another"):
        run_threads(2, rank_body)
    assert sorted(calls) == [0, 1]
