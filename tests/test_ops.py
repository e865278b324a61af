"""The custom ops on plain tensors of one rank: schemas, fakes, autograd, FLOPs, padding."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import cp_dispatch.ops as ops
from cp_dispatch import ContextParallelError, HeadTail
from cp_dispatch.backends import BACKENDS
from cp_dispatch.backends.math import Math
from cp_dispatch.kernels import job_of
from cp_dispatch.layouts.geometry import natural
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules import SCHEDULES
from tests.distributed.reference import Problem, check, exact, one_device, with_gradients

CPU = [name for name, backend in BACKENDS.items() if "cpu" in backend.devices]
OPCHECKS = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic",
)  # fmt: skip

# query, key and value as models pass them; "transposed" is (B, S, H, D) memory.
SHAPES = {
    "plain": ((2, 4, 12, 8), (2, 4, 12, 8), (2, 4, 12, 8)),
    "gqa": ((2, 6, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16)),
    "odd head dim": ((2, 4, 12, 7), (2, 4, 12, 7), (2, 4, 12, 7)),
    "batch 1": ((1, 4, 12, 8), (1, 4, 12, 8), (1, 4, 12, 8)),
    "one row": ((1, 3, 1, 8), (1, 3, 6, 8), (1, 3, 6, 8)),
}
VALUE_DIM = ((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 20))


def options(query, key, causal=False, scale=None):
    """The arguments after the tensors: one rank holds the whole sequence."""
    return None, None, 0.0, [], causal, scale, query.size(2), key.size(2), "ring", [], "", "", ""


def test_a_job_is_kept_for_calls_of_its_own_kind():
    """An argument that is missing from a cached job's key would silently be an earlier call's."""
    query = torch.zeros(1, 2, 8, 4)

    def job(backend="math", query=query, **other):
        # In the order of the op's arguments after the tensors.
        given = {
            "attn_mask": None, "seed": None, "dropout": 0.0, "origin": [0, 0, 2], "causal": True,
            "scale": None, "query_length": 8, "key_length": 8, "schedule": "ring",
            "ring_shape": [], "group": "", "layout": "", "order": "",
        } | other  # fmt: skip
        return job_of(BACKENDS[backend], query, *given.values())[0]

    found = job()
    assert job() is found and found.scale == 0.5
    for other, attribute, value in (
        ({"backend": "cpu_flash"}, "backend", BACKENDS["cpu_flash"]),
        ({"query": torch.zeros(1, 2, 8, 16)}, "scale", 0.25),
        ({"scale": -2.0}, "sign", -1.0),
        ({"origin": [3, 0, 2]}, "batch_start", 3),
        ({"causal": False}, "geometry", natural(8, 8, (), False)),
        ({"query_length": 6}, "geometry", natural(6, 8, (), True)),
        ({"key_length": 6}, "geometry", natural(8, 6, (), True)),
        ({"ring_shape": [2]}, "geometry", natural(8, 8, (2,), True)),
        ({"layout": HeadTail(8, 2).text}, "layout", HeadTail(8, 2).text),
        ({"schedule": "replicated_queries", "ring_shape": [2]}, "geometry",
         SCHEDULES["replicated_queries"].geometry(8, 8, (2,), True, None)),
    ):  # fmt: skip
        assert getattr(job(**other), attribute) == value, other
        assert getattr(found, attribute) != value, other


def inputs(shapes, transposed=False, requires_grad=False, dtype=torch.float32, device="cpu"):
    tensors = [
        torch.randn(b, s, h, d, dtype=dtype, device=device).transpose(1, 2)
        if transposed
        else torch.randn(b, h, s, d, dtype=dtype, device=device)
        for b, h, s, d in shapes
    ]
    return [x.requires_grad_(requires_grad) for x in tensors]


def attend(backend: str):
    """The op with torch's signature, ``(query, key, value) -> output``."""

    def call(query, key, value, causal=False):  # and casts, as the caller of an op does
        out, _ = ops.forward_op(backend)(query, key, value, *options(query, key, causal))
        return out.to(query.dtype)

    return call


def backward_args(backend: str, tensors, causal=False, key_grad=True):
    query, key, _ = tensors
    arguments = options(query, key, causal)
    out, lse = ops.forward_op(backend)(*tensors, *arguments)
    return (torch.randn_like(out), *tensors, out, lse, *arguments, key_grad, False)


def test_tangents_are_refused():
    """Compiled graphs call the op with whatever the graph is given."""
    query, key, value = (torch.randn(1, 2, 8, 4) for _ in range(3))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        dual = torch.autograd.forward_ad.make_dual(query, query)
        ops.forward_op("math")(dual, key, value, *options(query, key))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", CPU)
def test_opcheck_forward(backend, shape):
    tensors = inputs(SHAPES[shape], transposed=shape != "plain", requires_grad=True)
    args = (*tensors, *options(*tensors[:2], causal=shape != "gqa"))
    results = torch.library.opcheck(ops.forward_op(backend), args)
    assert results == dict.fromkeys(OPCHECKS, "SUCCESS")


@pytest.mark.parametrize(
    "shape, key_grad", [("gqa", True), ("gqa", False), ("odd head dim", True), ("batch 1", True)]
)
@pytest.mark.parametrize("backend", CPU)
def test_opcheck_backward(backend, shape, key_grad):
    args = backward_args(backend, inputs(SHAPES[shape]), key_grad=key_grad)
    results = torch.library.opcheck(ops.backward_op(backend), args)
    assert results == dict.fromkeys(OPCHECKS, "SUCCESS")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 2, 3, 3), (1, 2, 3, 3), (1, 2, 3, 3)),
        ((1, 4, 2, 2), (1, 2, 4, 2), (1, 2, 4, 3)),
        ((2, 1, 4, 2), (2, 1, 2, 2), (2, 1, 2, 1)),
    ],
    ids=["plain", "gqa, value dim, more keys", "fewer keys"],
)
def test_gradcheck(shapes, causal):
    tensors = inputs(shapes, requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: attend("math")(*x, causal), tensors)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fakes_describe_what_every_backend_returns(backend, shape, transposed):
    """Output and gradients are token-major, and the logsumexp is contiguous and in a wide dtype, in
    any build."""
    device = BACKENDS[backend].devices[0]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with FakeTensorMode():
        tensors = inputs(
            VALUE_DIM if backend == "math" else SHAPES[shape],
            transposed, dtype=dtype, device=device,
        )  # fmt: skip
        query, key, value = tensors
        args = backward_args(backend, tensors)
        out, lse = args[4:6]
        grads = ops.backward_op(backend)(*args)
    wanted = [(*query.shape[:3], value.size(-1)), *(x.shape for x in tensors)]
    *grads, grad_mask = grads
    assert grad_mask.numel() == 0  # there is no mask
    dtypes = BACKENDS[backend].output_dtype(dtype), dtype, dtype, dtype
    for result, shape_, dtype_ in zip((out, *grads), wanted, dtypes, strict=True):
        assert result.shape == shape_ and result.dtype is dtype_ and result.device.type == device
        assert result.stride() == token_major(*shape_, like=torch.empty(0)).stride()
    assert lse.shape == query.shape[:3] and lse.is_contiguous()
    assert lse.dtype is BACKENDS[backend].logsumexp_dtype(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("key_grad", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", CPU)
def test_results_are_laid_out_as_the_fakes_say(backend, shape, transposed, key_grad, dtype):
    def run():
        args = backward_args(backend, inputs(SHAPES[shape], transposed, dtype=dtype), True)
        args = (*args[:-2], key_grad, False)
        return (*args[4:6], *ops.backward_op(backend)(*args))

    with FakeTensorMode():
        fakes = run()
    for index, (real, fake) in enumerate(zip(run(), fakes, strict=True)):
        assert real.shape == fake.shape and real.dtype is fake.dtype
        if index == 1:  # logsumexp; the stride of a dim of size 1 does not matter
            assert real.is_contiguous() and fake.is_contiguous()
        else:
            assert real.stride() == fake.stride()


@pytest.mark.parametrize("backend", CPU)
def test_a_second_derivative_is_refused_with_what_to_do(backend):
    query, key, value = inputs(SHAPES["plain"], requires_grad=True)
    out = attend(backend)(query, key, value)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(ContextParallelError) as raised:
        grad.sum().backward()
    message = str(raised.value)
    for part in (f"ring_{backend}_attention", "second derivative", "Supported", "MATH", "disable"):
        assert part in message


@pytest.mark.parametrize(
    "needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
)
@pytest.mark.parametrize("backend", CPU)
def test_only_what_needs_a_gradient_gets_one(backend, needs):
    problem = Problem(length=24, causal=True)
    tensors = problem.tensors()
    leaves = [x.clone().requires_grad_(bool(n)) for x, n in zip(tensors[:3], needs, strict=True)]
    out = attend(backend)(*leaves, causal=True)
    out.backward(tensors[3])
    got = [out.detach(), *(x.grad for x in leaves)]
    assert [x.grad is not None for x in leaves] == [bool(n) for n in needs]
    check(got, exact(problem, tensors), one_device(problem, tensors, backend))


@pytest.mark.parametrize("backend", CPU)
def test_without_gradients_nothing_is_recorded(backend):
    query, key, value = inputs(SHAPES["plain"])
    out = attend(backend)(query, key, value)
    assert not out.requires_grad
    query.requires_grad_()
    with torch.no_grad():
        assert not attend(backend)(query, key, value).requires_grad
    with torch.inference_mode():
        assert torch.equal(attend(backend)(query, key, value), out)
    assert attend(backend)(query, key, value).requires_grad


@pytest.mark.parametrize("backend", CPU)
def test_logsumexp_is_not_differentiable(backend):
    query, key, value = inputs(SHAPES["plain"], requires_grad=True)
    _, lse = ops.forward_op(backend)(query, key, value, *options(query, key))
    assert not lse.requires_grad


@pytest.mark.parametrize("key_length", [24, 40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_flops_are_those_that_torch_counts(backend, key_length):
    device = BACKENDS[backend].devices[0]

    def flops(call) -> int:
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    with FakeTensorMode():
        query = torch.empty(2, 4, 24, 16, device=device)
        key = torch.empty(2, 4, key_length, 16, device=device)
        args = backward_args(backend, (query, key, key))
        grad_output, *_, out, lse = args[:6]
        unused = torch.empty(2, dtype=torch.uint64, device=device)
        aten = torch.ops.aten
        forward = flops(lambda: aten._scaled_dot_product_flash_attention(query, key, key))
        backward = flops(
            lambda: aten._scaled_dot_product_flash_attention_backward(
                grad_output, query, key, key, out, lse, None, None, 24, key_length,
                0.0, False, unused, unused,
            )
        )  # fmt: skip
        ours = flops(lambda: ops.forward_op(backend)(query, key, key, *options(query, key)))
        ours_backward = flops(lambda: ops.backward_op(backend)(*args))
    assert forward > 0 and backward > 0
    assert (ours, ours_backward) == (forward, backward)


class Padded(Math):
    """A kernel that supports only head dims that are multiples of 8, as flash does."""

    name, head_dim_multiple = "padded_for_test", 8

    def _forward(self, query, key, value, *options):
        self._check(query, key, value)
        return super()._forward(query, key, value, *options)

    def _backward(self, grad_output, query, key, value, output, *options):
        self._check(grad_output, query, key, value, output)
        return super()._backward(grad_output, query, key, value, output, *options)

    @staticmethod
    def _check(*tensors):
        assert all(x.size(-1) % 8 == 0 for x in tensors)


@pytest.fixture(scope="module")
def padded_op():
    """The name of an artificial backend whose ops are defined like those of any other."""
    if not hasattr(torch.ops.cp_dispatch, f"ring_{Padded.name}_attention"):
        ops._define(Padded())
    return Padded.name


@pytest.mark.parametrize(
    "problem",
    [
        Problem(length=20, dim=7, causal=True, dtype=torch.float64),
        Problem(length=20, dim=20, heads=4, key_heads=2, dtype=torch.float64),
        Problem(length=20, dim=9, value_dim=30, dtype=torch.float64),
        Problem(length=20, dim=16, dtype=torch.float64),
        Problem(length=20, dim=7, scale=0.9, dtype=torch.float64),
    ],
)
def test_a_padded_head_dim_changes_neither_results_nor_shapes(padded_op, problem):
    """The scale is that of the original head dim, and padding does not show in any result."""
    tensors = query, key, value, grad_output = problem.tensors()
    arguments = options(query, key, problem.causal, problem.scale)

    def run(backend):
        return with_gradients(lambda *x: ops.forward_op(backend)(*x, *arguments)[0], *tensors)

    for got, unpadded in zip(run(padded_op), run("math"), strict=True):
        assert got.stride() == unpadded.stride()
        torch.testing.assert_close(got, unpadded)  # float64's default tolerance


@pytest.mark.parametrize("backend", CPU)
def test_local_tensor_mode_is_refused(backend):
    local_tensor = pytest.importorskip("torch.distributed._local_tensor")
    query, key, value = inputs(SHAPES["plain"])
    args = backward_args(backend, (query, key, value))
    with local_tensor.LocalTensorMode(2):
        with pytest.raises(ContextParallelError, match="LocalTensorMode.*threaded"):
            attend(backend)(query, key, value)
        with pytest.raises(ContextParallelError, match="LocalTensorMode.*threaded"):
            ops.backward_op(backend)(*args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_schemas_are_those_that_saved_programs_rely_on(backend):
    arguments = (
        "Tensor? attn_mask, Tensor? dropout_seed, float dropout_p, int[] origin, "
        "bool is_causal, float? scale, SymInt query_length, SymInt key_length, str schedule, "
        "int[] ring_shape, str group_name, str layout, str mask_order"
    )
    assert str(ops.forward_op(backend)._schema) == (
        f"cp_dispatch::ring_{backend}_attention(Tensor query, Tensor key, Tensor value, "
        f"{arguments}) -> (Tensor output, Tensor logsumexp)"
    )
    assert str(ops.backward_op(backend)._schema) == (
        f"cp_dispatch::ring_{backend}_attention_backward(Tensor grad_output, Tensor query, "
        f"Tensor key, Tensor value, Tensor output, Tensor logsumexp, {arguments}, bool key_grad, "
        "bool mask_grad) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
        "Tensor grad_mask)"
    )
