"""Cases of ``test_ring_cuda.py`` that are more than one call with numbers to compare."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import sdpa_kernel

import cp_dispatch
from tests.distributed.reference import KERNELS, Problem, check, exact, one_device
from tests.distributed.sharded import SEQUENCE, distribute, run_sharded
from tests.distributed.spawn import Env

PROBLEM = Problem(
    batch=2, heads=8, key_heads=2, length=1024, dim=64, causal=True, dtype=torch.bfloat16
)
MIB = 2**20


def default_backend(env: Env) -> None:
    """Without ``sdpa_kernel`` the ring uses the kernel that torch would choose."""
    tensors = PROBLEM.tensors(env.device)
    with cp_dispatch.enabled():
        locals_ = [distribute(x, env.mesh(), SEQUENCE) for x in tensors[:3]]
        plan = cp_dispatch.explain(*locals_, is_causal=True, enable_gqa=True)
        got = run_sharded(PROBLEM, tensors, env.mesh())
    assert plan.handler == "cp_dispatch" and plan.backend in KERNELS, plan
    check(got, exact(PROBLEM, tensors), one_device(PROBLEM, tensors, plan.backend))


def inference_mode(env: Env, kernel: str, schedule: str = "ring") -> None:
    tensors = PROBLEM.tensors(env.device)
    with cp_dispatch.enabled(schedule=schedule), torch.inference_mode():
        got = run_sharded(PROBLEM, tensors, env.mesh(), kernel=kernel, needs=(False,) * 3)
    # A copy, so that it can be compared outside inference mode.
    got[0] = got[0].clone()
    check(got, exact(PROBLEM, tensors), one_device(PROBLEM, tensors, kernel))


def transposed_views(env: Env, kernel: str, schedule: str = "ring") -> None:
    """``(B, S, H, D)`` in memory, as a model's projections return it."""
    query, key, value, grad = PROBLEM.tensors(env.device)
    leaves = [
        distribute(x.transpose(1, 2).contiguous(), env.mesh(), [Shard(1)]).requires_grad_()
        for x in (query, key, value)
    ]
    with cp_dispatch.enabled(schedule=schedule), sdpa_kernel(KERNELS[kernel]):
        output = PROBLEM.attend(*(x.transpose(1, 2) for x in leaves))
        grads = torch.autograd.grad(output, leaves, distribute(grad, env.mesh(), SEQUENCE))
    got = [output.full_tensor().detach(), *(x.full_tensor().transpose(1, 2) for x in grads)]
    tensors = (query, key, value, grad)
    check(got, exact(PROBLEM, tensors), one_device(PROBLEM, tensors, kernel))


def compiled(env: Env, kernel: str, schedule: str = "ring") -> None:
    tensors = PROBLEM.tensors(env.device)
    torch._dynamo.reset()
    attend = torch.compile(PROBLEM.attend, fullgraph=True)
    with cp_dispatch.enabled(schedule=schedule):
        for _ in range(2):
            got = run_sharded(PROBLEM, tensors, env.mesh(), kernel=kernel, attend=attend)
    check(got, exact(PROBLEM, tensors), one_device(PROBLEM, tensors, kernel))


def batch_sharded_is_stock(env: Env) -> None:
    problem = Problem(**{**vars(PROBLEM), "batch": 4})
    tensors = problem.tensors(env.device)
    with cp_dispatch.enabled():
        inputs = [distribute(x, env.mesh(), [Shard(0)]) for x in tensors[:3]]
        plan = cp_dispatch.explain(*inputs, is_causal=True, enable_gqa=True)
        assert plan.handler == "stock", plan
        got = run_sharded(problem, tensors, env.mesh(), [Shard(0)], kernel="flash")
    check(got, exact(problem, tensors), one_device(problem, tensors, "flash"))


def other_collectives_in_flight(env: Env, kernel: str, schedule: str = "ring") -> None:
    """All-reduces on the mesh's own group, started around the ring and not waited for in
    between."""
    tensors = PROBLEM.tensors(env.device)
    mesh = env.mesh()
    group = mesh.get_group()
    works = []

    def start(count: int) -> None:
        for _ in range(count):
            buffer = torch.full((4 * MIB,), float(env.rank + 1), device=env.device)
            works.append((dist.all_reduce(buffer, group=group, async_op=True), buffer))

    inputs = [distribute(x, mesh, SEQUENCE).requires_grad_() for x in tensors[:3]]
    grad = distribute(tensors[3], mesh, SEQUENCE)
    with cp_dispatch.enabled(schedule=schedule), sdpa_kernel(KERNELS[kernel]):
        for _ in range(5):
            start(3)
            output = PROBLEM.attend(*inputs)
            start(3)
            grads = torch.autograd.grad(output, inputs, grad)
            start(1)
    total = env.world_size * (env.world_size + 1) / 2
    for work, buffer in works:
        work.wait()
        assert bool((buffer == total).all())
    got = [x.full_tensor().detach() for x in (output, *grads)]
    check(got, exact(PROBLEM, tensors), one_device(PROBLEM, tensors, kernel))


def no_host_synchronization(env: Env, kernel: str, schedule: str = "ring") -> None:
    """Nothing in a call makes the host wait for the GPU."""
    tensors = PROBLEM.tensors(env.device)
    with cp_dispatch.enabled(schedule=schedule):
        run_sharded(PROBLEM, tensors, env.mesh(), kernel=kernel)  # communicators and caches
        inputs = [distribute(x, env.mesh(), SEQUENCE).requires_grad_() for x in tensors[:3]]
        grad = distribute(tensors[3], env.mesh(), SEQUENCE)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with sdpa_kernel(KERNELS[kernel]):
                torch.autograd.grad(PROBLEM.attend(*inputs), inputs, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def memory_is_bounded(env: Env, kernel: str, causal: bool) -> None:
    """Peak memory in addition to the rank's own shards, for any number of ranks.

    In units of q, one bf16 query shard (2 bytes per element), with as many key/value heads as
    query heads:

    forward   4 q   the two key/value shards that are sent: 2 x (key + value)
            + 4 q   partial outputs, most at the first merge into float32 and at the last one:
                    bf16 + bf16 + float32, or float32 + bf16 + the final bf16
    backward  4 q   the two key/value shards that are sent
            + 8 q   two float32 dK/dV shards
            + 3 q   dQ sum in float32 and its final bf16 (or the first share it starts from)
            + 6 q   dQ, dK, dV of this tile and of the one before, which Python still holds
            + 3 q   the kernel's own: flash has a float32 dQ, 2 q; padding to 128 rows and
                    32 columns takes less than another q at these sizes
    plus at most four float32 logsumexp-like vectors of one value per row and head, and 2 MiB for
    the allocator's rounding. A causal call has two tiles, so a few of them, for no hop.
    """
    _bounded(env, kernel, causal, 8, 24, schedule="natural_ring")


def memory_of_head_tail_is_bounded(env: Env, kernel: str) -> None:
    """The limit is that of a ring in natural order: its halves are no larger than whole blocks."""
    layout = cp_dispatch.HeadTail(4096 * env.world_size, env.world_size)
    _bounded(env, kernel, True, 8, 24, schedule="ring", layout=layout)


def memory_of_gather_is_bounded(env: Env, kernel: str, causal: bool) -> None:
    """A gather holds, in units of q and for W ranks,

    forward   2 q + 2 W q    the message and all keys and values
            + 4 q            partial outputs, also in bf16, and the final one
    backward  2 q + 2 W q    the keys again
            + 4 W q + 4 q    float32 dK/dV of all keys, and their sum for the rank's own
            + 2 W q          dK/dV of the largest span, as the kernel returns them
            + 3 q + 6 q + 3 q   dQ, tiles and the kernel's own, as in a ring
    """
    world_size = env.world_size
    layout = cp_dispatch.HeadTail(4096 * world_size, world_size) if causal else None
    bounds = 2 * world_size + 6, 8 * world_size + 18
    _bounded(env, kernel, causal, *bounds, schedule="gather", layout=layout)


def _bounded(env: Env, kernel: str, causal: bool, most_forward, most_backward, **options) -> None:
    heads, dim, length = 8, 128, 4096 * env.world_size
    mesh = env.mesh()
    shape = (1, heads, length // env.world_size, dim)

    def shard():
        local = torch.randn(shape, device=env.device, dtype=torch.bfloat16)
        return DTensor.from_local(local, mesh, [Shard(2)], run_check=False).requires_grad_()

    inputs, grad = [shard() for _ in range(3)], shard().detach()
    unit = inputs[0].to_local().nbytes
    rows = 4 * heads * shape[2] * 4 + 2 * MIB

    def extra(function):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, result

    def attend():
        return F.scaled_dot_product_attention(*inputs, is_causal=causal)

    with cp_dispatch.enabled(**options), sdpa_kernel(KERNELS[kernel]):
        for _ in range(2):  # the first run may allocate workspaces that stay allocated
            forward, output = extra(attend)
            backward, grads = extra(functools.partial(torch.autograd.grad, output, inputs, grad))
            del output, grads
    used = f"forward {(forward - rows) / unit:.2f} q, backward {(backward - rows) / unit:.2f} q"
    print(used)
    assert forward <= most_forward * unit + rows, used
    assert backward <= most_backward * unit + rows, used


FEATURES = {
    "default backend": default_backend,
    "batch-sharded is stock": batch_sharded_is_stock,
}
for _kernel in ("flash", "efficient", "cudnn", "math"):
    for _function in (
        inference_mode,
        transposed_views,
        compiled,
        other_collectives_in_flight,
        no_host_synchronization,
    ):
        FEATURES[f"{_kernel} {_function.__name__}"] = functools.partial(_function, kernel=_kernel)
        FEATURES[f"{_kernel} gather {_function.__name__}"] = functools.partial(
            _function, kernel=_kernel, schedule="gather"
        )
for _kernel in ("flash", "cudnn"):
    for _causal in (False, True):
        _word = "causal" if _causal else "full"
        FEATURES[f"{_kernel} memory {_word}"] = functools.partial(
            memory_is_bounded, kernel=_kernel, causal=_causal
        )
        FEATURES[f"{_kernel} memory of gather {_word}"] = functools.partial(
            memory_of_gather_is_bounded, kernel=_kernel, causal=_causal
        )
    FEATURES[f"{_kernel} memory of head-tail"] = functools.partial(
        memory_of_head_tail_is_bounded, kernel=_kernel
    )
