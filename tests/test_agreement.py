"""The debug mode: what must be the same on every rank, as far as one process can test it."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dispatch import ContextParallelError, agreement, enabled
from cp_dispatch.agreement import (
    _device_kind,
    _signature,
    check_agreement,
    debug_is_on,
    local_shape_fits,
)
from cp_dispatch.call import Call
from cp_dispatch.costs import digest_of
from cp_dispatch.options import Options
from tests.ranks import SEQUENCE, fake_ranks, one_rank, outline

AUTO = Options()


@pytest.fixture
def mesh():
    with fake_ranks(4) as mesh:
        yield mesh


@pytest.mark.parametrize(
    "value, on",
    [(None, False), ("", False), ("0", False), ("Off", False), ("1", True), ("yes", True)],
)
def test_the_switch(monkeypatch, value, on):
    if value is None:
        monkeypatch.delenv("CP_DISPATCH_DEBUG", raising=False)
    else:
        monkeypatch.setenv("CP_DISPATCH_DEBUG", value)
    assert debug_is_on() is on


def test_a_trace_has_nothing_to_exchange(monkeypatch):
    monkeypatch.setenv("CP_DISPATCH_DEBUG", "1")
    answers = []

    def look(x):
        answers.append(debug_is_on())
        return x + 1

    look(torch.ones(2))
    make_fx(look)(torch.ones(2))
    assert answers == [True, False]


def tensors(mesh, length=64, placements=SEQUENCE, dtype=torch.float32, requires_grad=False):
    return [outline(mesh, (2, 4, length, 16), placements, dtype, requires_grad) for _ in range(3)]


def test_one_call_has_one_signature(mesh):
    first, second = (_signature(AUTO, Call(*tensors(mesh))) for _ in range(2))
    assert first == second
    for part in ("(2, 4, 64, 16)", "float32", "S(2)", "cp=4", "schedule='auto'", "layout=None"):
        assert part in first


def test_every_rank_has_the_same_signature():
    """It must contain nothing that is specific to a rank. Shards of uneven length differ, and that
    is fine."""
    texts = set()
    for rank in range(4):
        with fake_ranks(4, rank=rank) as mesh:
            shard = list(torch.zeros(2, 4, 10, 16).chunk(4, 2)[rank : rank + 1])[0]
            call = [
                DTensor.from_local(
                    shard, mesh, SEQUENCE, run_check=False,
                    shape=torch.Size((2, 4, 10, 16)), stride=(640, 160, 16, 1),
                )
                for _ in range(3)
            ]  # fmt: skip
            texts.add(_signature(AUTO, Call(*call)))
    assert len(texts) == 1 and "imply: True" in texts.pop()


def variations(mesh):
    """Calls of which no two may have the same signature."""
    base = tensors(mesh)
    yield "base", Call(*base)
    yield "length", Call(*tensors(mesh, length=65))
    yield "dtype", Call(*tensors(mesh, dtype=torch.bfloat16))
    yield "placement", Call(*tensors(mesh, placements=(Replicate(),)))
    yield "key placement", Call(base[0], *tensors(mesh, placements=(Replicate(),))[1:])
    yield "gradients", Call(*tensors(mesh, requires_grad=True))
    yield "one gradient", Call(*tensors(mesh, requires_grad=True)[:1], *base[1:])
    yield "causal", Call(*base, is_causal=True)
    yield "dropout", Call(*base, dropout_p=0.1)
    yield "scale", Call(*base, scale=0.1)
    yield "gqa", Call(*base, enable_gqa=True)
    yield "plain mask", Call(*base, attn_mask=torch.ones(64, 64))
    yield "bool mask", Call(*base, attn_mask=torch.ones(64, 64, dtype=torch.bool))
    yield "padding mask", Call(*base, attn_mask=torch.ones(2, 1, 1, 64))
    yield "bias with gradient", Call(*base, attn_mask=torch.ones(64, 64, requires_grad=True))
    for placement in (Replicate(), Shard(0)):
        yield f"mask {placement}", Call(*base, attn_mask=outline(mesh, (64, 64), (placement,)))


def test_whatever_must_agree_is_in_the_signature(mesh):
    texts = {name: _signature(AUTO, call) for name, call in variations(mesh)}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        texts["seed"] = _signature(AUTO, Call(*tensors(mesh), dropout_p=0.1))
        # If nothing is drawn, the seed does not matter.
        assert _signature(AUTO, Call(*tensors(mesh))) == texts["base"]
    texts["schedule"] = _signature(Options("ring"), Call(*tensors(mesh)))
    with torch.no_grad():
        texts["grad mode"] = _signature(AUTO, Call(*tensors(mesh)))
    with sdpa_kernel(SDPBackend.MATH):
        texts["switches"] = _signature(AUTO, Call(*tensors(mesh)))
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        texts["priority"] = _signature(AUTO, Call(*tensors(mesh)))
    torch.use_deterministic_algorithms(True)
    try:
        texts["deterministic"] = _signature(AUTO, Call(*tensors(mesh)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(texts) > 20 and len(set(texts.values())) == len(texts)


def test_constants_of_another_measurement_differ(monkeypatch):
    call = SimpleNamespace(query=SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    measured = _device_kind(call)
    monkeypatch.setattr(agreement, "digest_of", lambda kind: None)
    assert {"NVIDIA H200" in x for x in (measured, _device_kind(call))} == {True}
    assert measured != _device_kind(call)
    kinds = "nvidia-h200", "nvidia-h100-80gb-hbm3", "a kind that nobody measured"
    h200, sibling, none = map(digest_of, kinds)
    assert h200 and h200 == sibling and none is None


def test_two_meshes_of_one_size_differ():
    texts = set()
    for names, shape in ((("cp", "tp"), (2, 2)), (("cp", "tp"), (4, 1)), (("a", "b"), (2, 2))):
        with fake_ranks(*shape, names=names) as mesh:
            texts.add(_signature(AUTO, Call(*tensors(mesh, placements=(Shard(2), Shard(1))))))
    assert len(texts) == 3


def local(mesh, shape, placements, global_shape):
    stride = torch.empty(global_shape, device="meta").stride()
    return DTensor.from_local(
        torch.zeros(shape), mesh, placements, run_check=False,
        shape=torch.Size(global_shape), stride=stride,
    )  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 6, 9, 10, 250])
def test_local_shapes_are_those_of_torch_chunk(length):
    chunks = [len(x) for x in torch.arange(length).chunk(4)] if length else []
    for rank, own in enumerate(chunks + [0] * (4 - len(chunks))):
        with fake_ranks(4, rank=rank) as mesh:
            for size in (own - 1, own, own + 1):
                if size >= 0:
                    tensor = local(mesh, (2, size, 3), (Shard(1),), (2, length, 3))
                    assert local_shape_fits(tensor) is (size == own)


@pytest.mark.parametrize(
    "placements, shape, fits",
    [
        ((Shard(0), Shard(2)), (1, 4, 5, 16), True),
        ((Shard(0), Shard(2)), (2, 4, 5, 16), False),
        ((Shard(2), Shard(2)), (2, 4, 3, 16), True),
        ((Shard(2), Shard(2)), (2, 4, 2, 16), False),
        ((Shard(2), Replicate()), (2, 4, 5, 16), True),
        ((Partial(), Replicate()), (2, 4, 10, 16), True),
        ((Partial(), Replicate()), (2, 4, 5, 16), False),
        ((Shard(3), Shard(1)), (2, 2, 10, 8), True),
    ],
)
def test_local_shapes_on_two_mesh_dims(placements, shape, fits):
    with fake_ranks(2, 2, names=("a", "b")) as mesh:
        assert local_shape_fits(local(mesh, shape, placements, (2, 4, 10, 16))) is fits


def test_a_shard_of_the_wrong_shape_shows_in_the_signature(mesh):
    query, key, value = tensors(mesh)
    assert "imply: False" in _signature(AUTO, Call(query, key, value))  # outlines hold one element


def test_one_rank_agrees_with_itself(monkeypatch):
    with one_rank() as mesh:
        call = [DTensor.from_local(torch.randn(1, 2, 8, 4), mesh, SEQUENCE) for _ in range(3)]
        assert check_agreement(AUTO, Call(*call)) is None
        monkeypatch.setenv("CP_DISPATCH_DEBUG", "1")
        asked = []
        monkeypatch.setattr(
            "cp_dispatch.dispatch.check_agreement", lambda *args: asked.append(args)
        )
        with enabled():
            F.scaled_dot_product_attention(*call, is_causal=True)
            monkeypatch.setenv("CP_DISPATCH_DEBUG", "0")
            F.scaled_dot_product_attention(*call)
        ((options, seen),) = asked
        assert options == AUTO and seen.is_causal


def test_the_exchange_is_small(monkeypatch):
    """32 bytes from each rank, and one number, for each mesh dim."""
    sizes = []
    gather, reduce = agreement.dist.all_gather, agreement.dist.all_reduce
    monkeypatch.setattr(
        agreement.dist, "all_gather",
        lambda out, x, **kw: (sizes.append(x.numel() * x.element_size()), gather(out, x, **kw)),
    )  # fmt: skip
    monkeypatch.setattr(
        agreement.dist, "all_reduce",
        lambda x, *a, **kw: (sizes.append(x.numel() * x.element_size()), reduce(x, *a, **kw)),
    )  # fmt: skip
    with one_rank() as mesh:
        call = [DTensor.from_local(torch.randn(1, 2, 8, 4), mesh, SEQUENCE) for _ in range(3)]
        check_agreement(AUTO, Call(*call))
    assert sizes == [32, 4]


def test_shards_that_are_wrong_everywhere_are_refused_too():
    with one_rank() as mesh, pytest.raises(ContextParallelError) as raised:
        check_agreement(AUTO, Call(*tensors(mesh)))
    message = str(raised.value)
    for part in ("CP_DISPATCH_DEBUG=1", "rank 0", "imply: False", "nothing was computed"):
        assert part in message
