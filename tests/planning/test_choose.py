"""The backend is the one that torch would choose for one rank's shards."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dispatch import ContextParallelError, enabled, explain
from cp_dispatch.backends import BACKENDS
from cp_dispatch.planning import choose
from cp_dispatch.planning.choose import LocalCall, Mask, choose_backend
from tests.ranks import fake_ranks, outline


@pytest.fixture
def mesh():
    with fake_ranks(4) as mesh:
        yield mesh


FLAGS = {
    "default": [],
    "math only": [SDPBackend.MATH],
    "flash only": [SDPBackend.FLASH_ATTENTION],
    "flash or math": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's reasons when nothing fits
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dims", [(16, 16), (16, 24), (7, 7)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_backend_is_what_torch_picks_for_the_local_shards(
    mesh, flags, dtype, dims, requires_grad
):
    dim, value_dim = dims
    shapes = [(2, 4, 64, dim), (2, 4, 64, dim), (2, 4, 64, value_dim)]
    names = {SDPBackend.FLASH_ATTENTION: "cpu_flash", SDPBackend.MATH: "math"}
    only = sdpa_kernel(FLAGS[flags]) if FLAGS[flags] else contextlib.nullcontext()
    with only, enabled():
        local = [
            torch.randn(b, h, s // 4, d).to(dtype).requires_grad_(requires_grad)
            for b, h, s, d in shapes
        ]
        try:
            picked = names[SDPBackend(torch._fused_sdp_choice(*local))]
        except RuntimeError:
            picked = None
        plan = explain(
            *(outline(mesh, s, dtype=dtype, requires_grad=requires_grad) for s in shapes)
        )
    assert plan.backend == picked
    assert (plan.handler == "refused") == (picked is None)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_causal_between_different_lengths_takes_kernels_that_torch_refuses_it():
    """The causal tiles are square, so a kernel that supports square causal calls supports these."""
    shapes = (1, 4, 8, 16), (1, 4, 24, 16), (1, 4, 24, 16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        local = LocalCall(shapes, torch.float32, "cpu", is_causal=True)
        assert choose_backend(local) == ("cpu_flash", ())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_where_nothing_fits_every_reason_against_every_backend_is_told():
    with fake_ranks(4) as mesh, enabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        query, value = outline(mesh, (2, 4, 64, 16)), outline(mesh, (2, 4, 64, 24))
        plan = explain(query, query, value)
    assert plan.handler == "refused" and plan.backend is None
    (first,) = plan.reasons
    assert "no enabled backend" in first and "sdpa_kernel" in first
    assert "(2, 4, 16, 16)" in first and "(2, 4, 16, 24)" in first  # local shapes
    assert set(plan.backends_refused) == set(BACKENDS)
    assert all(plan.backends_refused.values())
    assert "value's head dim (24)" in plan.backends_refused["cpu_flash"][0]
    assert "switched off" in plan.backends_refused["math"][0]
    for reasons in plan.backends_refused.values():
        assert all(reason in str(plan.error()) for reason in reasons)


def test_asking_leaves_no_trace():
    """Modes, flags and warnings stay the same, whatever the caller has set."""
    shapes = ((1, 2, 8, 4),) * 3
    before = torch.is_grad_enabled(), torch.get_rng_state()
    with torch.inference_mode():
        local = LocalCall(shapes, torch.float32, "cpu", needs_grad=True)
        assert choose_backend(local)[0] == "cpu_flash"
    assert torch.is_grad_enabled() == before[0] and torch.equal(torch.get_rng_state(), before[1])


SHAPES = ((2, 4, 16, 8),) * 3
MASK_SHAPES = [(2, 4, 16, 16), (1, 1, 16, 16), (2, 1, 1, 16), (1, 1, 1, 1)]


def masked(dtype=torch.float32, kind="bool", shape=(2, 4, 16, 16), needs_grad=False, **others):
    mask = Mask(shape, torch.bool if kind == "bool" else kind, needs_grad)
    return LocalCall(SHAPES, dtype, "cpu", mask=mask, **others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("boolean", [False, True])
def test_with_a_mask_the_backend_is_what_torch_picks_too(shape, dtype, boolean):
    query = torch.randn(SHAPES[0]).to(dtype)
    mask = torch.ones(shape, dtype=torch.bool if boolean else dtype)
    picked = SDPBackend(torch._fused_sdp_choice(query, query, query, mask))
    local = masked(dtype, mask.dtype, shape)
    assert choose_backend(local)[0] == {SDPBackend.FLASH_ATTENTION: "cpu_flash"}.get(picked, "math")


MATH = {
    "a bias that needs a gradient": (
        masked(kind=torch.float32, needs_grad=True),
        ["math: only it computes the gradient of a bias"],
    ),
    "a wide bias": (
        masked(torch.bfloat16, torch.float32),
        ["math: only it supports a torch.float32 bias with torch.bfloat16 inputs"],
    ),
    "dropout": (
        LocalCall(SHAPES, torch.float32, "cpu", dropout_p=0.1), ["math: only it draws dropout"],
    ),
    "all of it": (
        masked(torch.bfloat16, torch.float32, needs_grad=True, dropout_p=1.0),
        ["math: only it draws dropout", "math: only it computes", "math: only it supports"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MATH)
def test_what_only_math_does_goes_to_math_and_says_why(case):
    local, wanted = MATH[case]
    backend, reasons = choose_backend(local)
    assert backend == "math" and len(reasons) == len(wanted)
    assert all(part in reason for part, reason in zip(wanted, reasons, strict=True))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert choose_backend(local) == (None, reasons)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_bias_that_needs_a_gradient_shows_in_explain(mesh, requires_grad):
    query = outline(mesh, (2, 4, 64, 16))
    bias = outline(mesh, (1, 1, 64, 64), (Replicate(),), requires_grad=requires_grad)
    with enabled():
        plan = explain(query, query, query, attn_mask=bias)
        with torch.no_grad():
            without = explain(query, query, query, attn_mask=bias)
    assert without.backend == "cpu_flash" and without.reasons == ()
    assert plan.backend == ("math" if requires_grad else "cpu_flash")
    if requires_grad:
        assert plan.reasons == ("math: only it computes the gradient of a bias",)
        against = plan.backends_refused["cpu_flash"]
        assert against == ("it does not compute the gradient of a bias",)
        assert plan.reasons[0] in str(plan) and against[0] in str(plan)


def test_where_only_math_does_and_it_is_off_the_call_is_refused_with_every_reason(mesh):
    query = outline(mesh, (2, 4, 64, 16), dtype=torch.bfloat16)
    bias = outline(mesh, (1, 1, 64, 64), (Replicate(),), requires_grad=True)
    with enabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        plan = explain(query, query, query, attn_mask=bias, dropout_p=0.5)
        with pytest.raises(ContextParallelError) as raised:
            F.scaled_dot_product_attention(query, query, query, attn_mask=bias, dropout_p=0.5)
    assert plan.handler == "refused" and str(raised.value) == str(plan)
    first, *why_math = plan.reasons
    assert "no enabled backend" in first and len(why_math) == 3
    assert plan.backends_refused["cpu_flash"] == (
        "its dropout cannot be drawn by (query, key) pair, independently of the sharding",
        "it does not compute the gradient of a bias",
        "it does not support a torch.float32 bias with torch.bfloat16 inputs",
    )
    assert "math_sdp_enabled" in plan.backends_refused["math"][0]
    for name in ("flash", "efficient", "cudnn"):
        assert plan.backends_refused[name] == ("it is a kernel for cuda",)


def test_the_chosen_backend_is_not_among_the_refused(mesh):
    query = outline(mesh, (2, 4, 64, 16))
    for only in ([], [SDPBackend.MATH]):
        with enabled(), sdpa_kernel(only) if only else contextlib.nullcontext():
            plan = explain(query, query, query)
        assert set(plan.backends_refused) == set(BACKENDS) - {plan.backend}
        assert all(plan.backends_refused.values())
    assert "it is switched off" in plan.backends_refused["cpu_flash"][0]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_shard_of_one_key_takes_what_torch_keeps_single_keys_from(monkeypatch, rows):
    """Torch keeps single keys from cuDNN. That a shard has one key is no reason to refuse the
    call."""

    def choice(local, *_):
        lengths = [shape[2] for shape in local.shapes]
        assert local.mask.shape[2:] == (lengths[0], lengths[1])
        return choose._NONE_FITS if lengths[1] == 1 else SDPBackend.CUDNN_ATTENTION.value

    monkeypatch.setattr(choose, "_choice", choice)
    shapes = ((2, 4, rows, 16), (2, 4, 1, 16), (2, 4, 1, 16))
    mask = Mask((1, 4, rows, 1), torch.bool, False)
    local = LocalCall(shapes, torch.float16, "cuda", mask=mask)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_backend(local) == ("cudnn", ())


def test_one_more_backend_needs_a_name_and_no_more(monkeypatch, mesh):
    """Torch's switches and checks follow from its ``sdp_backend``."""

    class Another(type(BACKENDS["cpu_flash"])):
        name = "another"

    monkeypatch.setitem(BACKENDS, "another", Another())
    tensors = [outline(mesh, (1, 4, 32, dim)) for dim in (8, 8, 16)]
    with enabled(), sdpa_kernel(SDPBackend.MATH):
        against = explain(*tensors).backends_refused
    assert against["another"] == against["cpu_flash"] and len(against["another"]) == 2
