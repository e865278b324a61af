"""``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` on sharded inputs in eval mode, where
torch calls one fused op that includes attention. ``modules.py`` trains them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module
from torch.utils._python_dispatch import TorchDispatchMode

import cp_dispatch
from tests.distributed.sharded import distribute
from tests.distributed.spawn import TORCH_2_13
from tests.distributed.threads import run_threads

LENGTH, RANKS = 24, 2
# DTensor of torch 2.11 does not support a linear layer on a batch of several sharded sequences.
BATCH = 2 if TORCH_2_13 else 1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, mask=None, src_key_padding_mask=None, is_causal=False):
        return self.attention(
            x, x, x, need_weights=False, attn_mask=mask, is_causal=is_causal,
            key_padding_mask=src_key_padding_mask,
        )[0]  # fmt: skip


def encoder(**options):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "attention": Attention,
    "encoder": encoder,
    "encoder, norm first, gelu": lambda: encoder(norm_first=True, activation="gelu"),
}
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def inputs(causal: bool, padded: bool):
    x = torch.randn(BATCH, LENGTH, 16, generator=torch.Generator().manual_seed(0))
    masks = {}
    if causal:
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        masks |= {"mask": ~seen, "is_causal": True}
    if padded:
        masks["src_key_padding_mask"] = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        masks["src_key_padding_mask"][0, 15:] = True
    return x, masks


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_eval(name, mode, causal, padded):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    x, masks = inputs(causal, padded)
    with MODES[mode](), Ops() as alone:
        want = model(x, **masks)
    fused = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd"}
    assert fused & alone.names or (name, causal) == ("attention", True), alone.names

    def body(rank: int):
        mesh = init_device_mesh("cpu", (RANKS,))
        sharded = distribute_module(copy.deepcopy(model), mesh)
        with MODES[mode]():
            for placed in (False, True):  # a plain padding mask, and a sharded one
                given = dict(masks)
                if padded and placed and not causal:
                    key = "src_key_padding_mask"
                    given[key] = distribute(masks[key], mesh, [Shard(1)])
                got = sharded(distribute(x, mesh, [Shard(1)]), **given)
                assert got.placements == (Shard(1),)
                torch.testing.assert_close(got.full_tensor(), want)

    with warnings.catch_warnings(), cp_dispatch.enabled():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        run_threads(RANKS, body)


@pytest.mark.parametrize("average", [False, True])
def test_weights_are_given_to_who_needs_them(average):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x, masks = inputs(True, False)
    options = {"average_attn_weights": average, "attn_mask": masks["mask"]}
    with torch.no_grad():
        want = model(x, x, x, **options)

    def body(rank: int):
        mesh = init_device_mesh("cpu", (RANKS,))
        sharded = distribute_module(copy.deepcopy(model), mesh)
        with torch.no_grad():
            whole = distribute(x, mesh, [Shard(1)])
            for got, true in zip(sharded(whole, whole, whole, **options), want, strict=True):
                torch.testing.assert_close(got.full_tensor(), true)

    with cp_dispatch.enabled():
        run_threads(RANKS, body)


def test_off_again_it_is_torchs():
    model = Attention().eval()
    x, _ = inputs(False, False)

    def body(rank: int):
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_module(copy.deepcopy(model), mesh)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="_native_multi_head"):
            sharded(distribute(x, mesh, [Shard(1)]))

    with cp_dispatch.enabled():
        pass
    run_threads(1, body)
