"""Every backend that runs on CPU: one block, and blocks that add up to the whole."""

import functools
import threading
from unittest import mock

import pytest
import torch

from cp_dispatch import ContextParallelError
from cp_dispatch.backends import BACKENDS, Backend, cudnn, efficient, no_coins, packed_heads
from cp_dispatch.backends.base import aligned, repeat_heads, sum_heads
from cp_dispatch.backends.efficient import _heads_side_by_side
from cp_dispatch.backends.parts import few_heads
from cp_dispatch.layouts import natural
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules.accumulate import OutputAccumulator
from tests.distributed.reference import Problem, check, exact, one_device

CPU = [name for name, backend in BACKENDS.items() if "cpu" in backend.devices]
PROBLEMS = {
    "plain": Problem(length=64),
    "causal": Problem(length=64, causal=True),
    "causal uneven": Problem(length=67, causal=True, dim=24),
    "uneven": Problem(batch=4, heads=3, length=37, key_length=101, dim=20),
    "gqa": Problem(heads=6, key_heads=2, length=50),
    "gqa causal": Problem(heads=6, key_heads=2, length=50, causal=True),
    "mqa": Problem(heads=4, key_heads=1, length=33, key_length=48),
    "scale": Problem(length=40, scale=0.7, causal=True),
    # Not float32 for the single row. There, dV is not a sum whose rounding hides that of a float32
    # logsumexp, which torch's math kernel does not use.
    "one row": Problem(batch=8, heads=8, length=1, key_length=65, dtype=torch.bfloat16),
    "odd dim": Problem(length=31, dim=7, causal=True),
    "bfloat16": Problem(length=64, causal=True, dtype=torch.bfloat16),
    "float16": Problem(length=64, dtype=torch.float16),
    "float64": Problem(length=48, causal=True, dtype=torch.float64),
}
MATH_ONLY = {
    "value dim": Problem(length=45, dim=16, value_dim=40, causal=True),
    "value dim, gqa": Problem(heads=4, key_heads=2, length=45, dim=24, value_dim=8),
}
CASES = [
    *((name, p) for name in CPU for p in PROBLEMS),
    *(("math", p) for p in MATH_ONLY),
]


def problem_of(name: str) -> Problem:
    return {**PROBLEMS, **MATH_ONLY}[name]


def scale_of(problem: Problem) -> float:
    return problem.dim**-0.5 if problem.scale is None else problem.scale


def as_given(problem: Problem, results):
    """Results in the inputs' dtype, as a schedule returns them for one block."""
    return [x.to(problem.dtype) for x in results]


@pytest.mark.parametrize("backend, name", CASES)
def test_one_block_is_as_exact_as_torch_on_one_device(backend, name):
    problem, kernel = problem_of(name), BACKENDS[backend]
    tensors = query, key, value, grad_output = problem.tensors()
    options = None, problem.causal, scale_of(problem)
    out, lse = kernel.forward(query, key, value, *options)
    out = out.to(kernel.output_dtype(query.dtype))
    *grads, no_bias = kernel.backward(grad_output, query, key, value, out, lse, *options)
    assert no_bias is None
    got = as_given(problem, (out, *grads))
    check(got, exact(problem, tensors), one_device(problem, tensors, backend))


@pytest.mark.parametrize("backend, name", CASES)
def test_logsumexp_has_the_shape_dtype_and_values_that_backends_promise(backend, name):
    problem, kernel = problem_of(name), BACKENDS[backend]
    query, key, value, _ = problem.tensors()
    _, lse = kernel.forward(query, key, value, None, problem.causal, scale_of(problem))
    assert lse.shape == query.shape[:3] and lse.dtype is kernel.logsumexp_dtype(problem.dtype)
    assert kernel.logsumexp_dtype(torch.float64) is torch.float64

    scores = query.double() @ repeat_heads(key, query.size(1) // key.size(1)).double().mT
    if problem.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    exact_lse = (scale_of(problem) * scores).logsumexp(-1)
    # Torch's default tolerance for the inputs' dtype, in which kernels multiply.
    torch.testing.assert_close(lse.to(problem.dtype), exact_lse.to(problem.dtype))


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("backend, name", CASES)
def test_blocks_add_up_to_the_whole(backend, name, world_size):
    """The steps of a schedule, without communication: tiles, merges, and sums of shares."""
    problem, kernel = problem_of(name), BACKENDS[backend]
    tensors = query, key, value, grad_output = problem.tensors()
    scale = scale_of(problem)
    geometry = natural(query.size(2), key.size(2), (world_size,), problem.causal)
    ranks = range(world_size)
    rows, columns = (
        [slice(own[0].position, sum(own[0])) if own else slice(0, 0) for own in spans]
        for spans in (geometry.query_spans, geometry.key_spans)
    )
    wide = torch.float64 if problem.dtype is torch.float64 else torch.float32
    outputs, sums = [], [torch.zeros_like(x, dtype=wide) for x in (query, key, value)]
    for rank in ranks:
        tiles = [(owner, tile) for owner in ranks for tile in geometry.tiles(rank, owner)]
        result = OutputAccumulator(
            query[:, :, rows[rank]],
            value.size(-1),
            [tile for _, tile in tiles],
            kernel.output_dtype(query.dtype),
            kernel.logsumexp_dtype(query.dtype),
        )
        blocks = []
        for owner, tile in tiles:
            at_query, at_key = (
                slice(shard.start + start, shard.start + start + length)
                for shard, start, length in (
                    (rows[rank], tile.query_start, tile.query_length),
                    (columns[owner], tile.key_start, tile.key_length),
                )
            )
            block = query[:, :, at_query], key[:, :, at_key], value[:, :, at_key]
            result.add(*kernel.forward(*block, None, tile.causal, scale), tile)
            blocks.append((tile, block, at_query, at_key))
        out, lse = result.finish()
        outputs.append(out)
        for tile, block, at_query, at_key in blocks:
            own = slice(tile.query_start, tile.query_start + tile.query_length)
            shares = kernel.backward(
                grad_output[:, :, at_query], *block, out[:, :, own], lse[:, :, own],
                None, tile.causal, scale,
            )  # fmt: skip
            for total, share, at in zip(sums, shares[:3], (at_query, at_key, at_key), strict=True):
                total[:, :, at] += share
    got = as_given(problem, (torch.cat(outputs, 2), *sums))
    check(got, exact(problem, tensors), one_device(problem, tensors, backend))


def test_heads_are_repeated_as_torch_repeats_them_and_summed_back():
    tensor = torch.arange(12.0).view(1, 2, 3, 2)
    wide = repeat_heads(tensor, 3)
    assert torch.equal(wide, tensor.repeat_interleave(3, dim=1))
    assert torch.equal(sum_heads(wide, 3), 3 * tensor)
    assert repeat_heads(tensor, 1) is tensor and sum_heads(tensor, 1) is tensor


class Multiple(Backend):
    """A kernel that supports only head dims that are multiples of 8, and checks its inputs."""

    name, head_dim_multiple = "multiple", 8


@pytest.mark.parametrize("dim, padded", [(1, 8), (7, 8), (8, 8), (9, 16), (64, 64)])
def test_pad_adds_zeros_after_the_head_dim_up_to_the_multiple(dim, padded):
    tensor = torch.randn(2, 3, 4, dim)
    wide = Multiple().pad(tensor)
    assert wide.shape == (2, 3, 4, padded)
    assert torch.equal(wide[..., :dim], tensor) and (wide[..., dim:] == 0).all()
    if dim == padded:
        assert wide is tensor


def test_pad_gives_kernels_a_head_dim_of_stride_1():
    strided = torch.randn(2, 3, 8, 4).mT
    for backend in (Multiple(), *BACKENDS.values()):
        got = backend.pad(strided)
        assert got.stride(-1) == 1 and torch.equal(got[..., : strided.size(-1)], strided)


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_describe_themselves(name):
    backend = BACKENDS[name]
    assert backend.name == name and backend.devices and backend.sdp_backend is not None
    assert set(backend.devices) <= {"cpu", "cuda"}


def test_aligned_copies_only_what_starts_off_16_bytes():
    row = torch.arange(33, dtype=torch.bfloat16).view(1, 1, 1, 33)
    odd = row[..., 17:].contiguous()
    assert odd.data_ptr() % 16, "a contiguous view that needs no copy to be contiguous"
    assert aligned(odd).data_ptr() % 16 == 0
    assert torch.equal(aligned(odd), odd)
    assert aligned(row) is row


@pytest.mark.parametrize(
    "mask_shape", [None, (1, 1, 6, 9), (5, 1, 1, 9), (1, 8, 1, 9), (5, 8, 6, 9)]
)
@pytest.mark.parametrize("limit", [3, 4, 7])
def test_calls_larger_than_a_grid_go_in_parts(monkeypatch, limit, mask_shape):
    """Along the batch, the heads or both. Grouped heads stay with their key head."""
    kernel = BACKENDS["cpu_flash"]
    query, grad = torch.randn(5, 8, 6, 16), torch.randn(5, 8, 6, 16)
    key, value = torch.randn(5, 4, 9, 16), torch.randn(5, 4, 9, 16)
    mask = None if mask_shape is None else torch.rand(mask_shape) > 0.3
    whole = kernel.forward(query, key, value, mask, False, 0.3)
    wanted = kernel.backward(grad, query, key, value, *whole, mask, False, 0.3)
    calls = []
    inner = type(kernel)._forward

    def counted(self, query, *rest):
        calls.append(query.shape[:2])
        return inner(self, query, *rest)

    monkeypatch.setattr(type(kernel), "largest_grid", limit)
    monkeypatch.setattr(type(kernel), "_forward", counted)
    parts = kernel.forward(query, key, value, mask, False, 0.3)
    assert len(calls) > 1 and all(max(shape) <= limit for shape in calls)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
    got = kernel.backward(grad, query, key, value, *whole, mask, False, 0.3)
    for mine, true in zip(got[:3], wanted[:3], strict=True):
        torch.testing.assert_close(mine, true)


def test_more_query_heads_per_key_head_than_a_grid_takes_are_refused(monkeypatch):
    kernel = BACKENDS["math"]
    monkeypatch.setattr(type(kernel), "largest_grid", 3)
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 1, 2, 8)
    with pytest.raises(ContextParallelError, match="at most 3 query heads per key head, got 4"):
        kernel.forward(query, key, key, None, False, 0.3)


def test_efficient_attention_gets_the_heads_of_a_row_side_by_side():
    """The kernel takes heads times head dim as the stride of a row, whatever the tensor's stride
    is."""
    output = torch.randn(2, 6, 8, 4).transpose(1, 2)  # (B, H, S, D), token-major
    assert _heads_side_by_side(output) is output
    rows = output[:, :, 2:5]
    assert _heads_side_by_side(rows) is rows
    for odd in (output[:, :3], output.contiguous()):
        got = _heads_side_by_side(odd)
        assert torch.equal(got, odd) and got.stride(2) == odd.size(1) * odd.size(3)


@pytest.mark.parametrize("layout", ["token-major", "head-major"])
@pytest.mark.parametrize("heads, key_heads", [(6, 2), (4, 1), (4, 4)])
def test_packed_heads_are_rows_of_their_key_head(layout, heads, key_heads):
    """The rows of every key head see the same keys, whichever query head they belong to."""
    problem = Problem(batch=2, heads=heads, key_heads=key_heads, length=18, key_length=31, dim=12)
    tensors = query, key, value, grad_output = problem.tensors()
    if layout == "token-major":
        tensors = query, key, value, grad_output = [
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors
        ]
    kernel, options = BACKENDS["math"], (None, False, scale_of(problem))
    out, lse = kernel.forward(query, key, value, *options)
    want = kernel.backward(grad_output, query, key, value, out, lse, *options)
    go, q, o, sums = packed_heads.packed((grad_output, query, out, lse), key_heads)
    assert q.shape == (2, key_heads, 18 * heads // key_heads, 12) and sums.shape == q.shape[:3]
    assert all(x.is_contiguous() for x in (go, q, o, sums))
    dq, dk, dv, _ = kernel.backward(go, q, key, value, o, sums, *options)
    dq = packed_heads.unpacked(dq, heads)
    assert dq.stride() == token_major(*dq.shape, like=dq).stride()
    for got, expected in zip((dq, dk, dv), want[:3], strict=True):
        torch.testing.assert_close(got, expected)


def test_packing_saves_gradients_of_query_heads():
    """In MiB: twice (dK and dV) 32 query heads of 128 in 16 bits over 28,672 keys, less four copies
    of 4,096 rows."""
    query, key = (torch.empty(1, h, s, 128, dtype=torch.bfloat16, device="meta")
                  for h, s in ((32, 4096), (8, 28672)))  # fmt: skip
    assert packed_heads.saved_bytes(query, key, key) == (2 * 224 - 4 * 32) * 2**20
    assert packed_heads.saved_bytes(query[:, :8], key, key) == 0
    assert packed_heads.saved_bytes(query, key[:, :, :4096], key[:, :, :4096]) < 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("most, calls", [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_a_backward_of_grouped_heads_is_cut_where_it_takes_too_much_room(
    monkeypatch, causal, most, calls
):
    problem = Problem(batch=2, heads=8, key_heads=4, length=24, causal=causal)
    tensors = query, key, value, grad_output = problem.tensors()
    kernel, options = BACKENDS["cpu_flash"], (None, causal, scale_of(problem))
    out, lse = kernel.forward(query, key, value, *options)
    seen, plain = [], type(kernel)._backward
    monkeypatch.setattr(type(kernel), "largest_workspace", most * 3 * key.nbytes // 2)
    monkeypatch.setattr(
        type(kernel), "_backward", lambda self, go, q, k, *x: (seen.append(k.size(1)),
                                                            plain(self, go, q, k, *x))[1],
    )  # fmt: skip
    *grads, _ = kernel.backward(grad_output, query, key, value, out, lse, *options)
    assert seen == [4 // calls] * calls
    got = as_given(problem, (out.to(problem.dtype), *grads))
    check(got, exact(problem, tensors), one_device(problem, tensors, "cpu_flash"))


@pytest.mark.parametrize(
    "rows, keys, calls",
    [(4096, 4096, None), (4096, 28672, None), (16384, 16384, 2), (16384, 114688, 8)],
)
def test_long_backwards_are_cut_further(rows, keys, calls):
    """Tiles of 8,192 and 32,768 tokens on each of 4 ranks, with 32 and 8 heads of 128, in 16
    bits."""
    query, key = (torch.empty(1, h, s, 128, dtype=torch.bfloat16, device="meta")
                  for h, s in ((32, rows), (8, keys)))  # fmt: skip
    parts = few_heads(BACKENDS["flash"], query, key, key)
    assert (None if parts is None else len(parts)) == calls


def test_what_is_kept_for_all_calls_is_no_call_s_own(monkeypatch):
    """It belongs neither to an inference mode nor to a CUDA graph, which owns what its thread
    allocates."""
    capturing, threads = True, []
    monkeypatch.setattr(no_coins, "_coins", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: threads.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    coins = functools.partial(no_coins.no_coins, torch.device("cpu"))
    with torch.inference_mode():
        assert coins(torch.uint64) is not coins(torch.uint64) and not threads
        capturing = False
        state, offset = coins(torch.uint64)
        capturing = True
        assert coins(torch.uint64)[0] is state and offset.ndim == 0
        assert coins(torch.int64)[0].dtype is torch.int64
    assert not state.is_inference() and threads != [threading.get_ident()]


@pytest.mark.parametrize("module, first", [(cudnn, 6), (efficient, 7)])
def test_a_backward_allocates_no_random_state(monkeypatch, module, first):
    """That took the host as long as a view."""
    given, aten = [], mock.MagicMock()
    monkeypatch.setattr(no_coins, "_coins", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(no_coins, "apart", lambda device, function, *args: function(*args))
    monkeypatch.setattr(module, "aten", aten)
    backend = BACKENDS[module.__name__.rpartition(".")[2]]
    op = getattr(aten, f"_scaled_dot_product_{backend.name}_attention_backward")
    op.default = lambda *args, **_: given.append(args[first : first + 2]) or args[:3]
    tensor, lse = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4)
    for _ in range(2):
        backend.backward(*[tensor] * 5, lse, None, True, 1.0)
    (seed, offset), again = given
    assert seed.dtype is torch.int64 and seed.ndim == 0
    assert all(x is seed for x in (offset, *again))
