"""What is refused of transformers, and the windows that its modules report."""

import sys
from types import SimpleNamespace as Some

import pytest
import torch

from cp_dispatch import ContextParallelError
from cp_dispatch.hugging_face.modules import (
    check_implementation,
    drops_masks,
    sliding_window,
    why_refused,
)

KINDS = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8}


@pytest.mark.parametrize("module, window", [
    (Some(config=Some(sliding_window=8)), 8),  # Mixtral
    (Some(config=Some(sliding_window=8, **KINDS), sliding_window=None), None),
    (Some(sliding_window=8), 8),
    # Llama 4: the chunk was silently omitted if shards were shorter.
    (Some(config=Some(**KINDS), layer_idx=0), 8),
    (Some(config=Some(**KINDS), layer_idx=1), None),
    (Some(config=Some(**KINDS)), None),
    (Some(), None),
])  # fmt: skip
def test_windows_of_modules(module, window):
    attention = torch.nn.Linear(1, 1)
    vars(attention).update(vars(module))
    assert sliding_window(attention) == window
    layer = torch.nn.Sequential(torch.nn.Linear(1, 1), attention)
    assert sliding_window(layer) == window


@pytest.mark.parametrize("kind", ["eager", "flash_attention_3", "kernels-community/some"])
def test_a_layer_with_attention_that_stays_local(kind):
    """The attention inside it is refused, although the layer itself does not report it."""
    layer = torch.nn.Sequential(torch.nn.Linear(1, 1))
    ranks = Some(size=lambda: 2)
    check_implementation(layer, ranks)
    layer[0].config = Some(_attn_implementation=kind)
    with pytest.raises(ContextParallelError, match=f"'{kind}' of Linear is refused"):
        check_implementation(layer, ranks)


def test_the_smallest_window_of_a_layer():
    layer = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
    layer[0].sliding_window, layer[1].sliding_window = 8, 4
    assert sliding_window(layer) == 4


def test_a_whole_model_has_no_window(monkeypatch):
    class Model(torch.nn.Sequential):
        pass

    there = Some(PreTrainedModel=Model)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", there)
    attention = torch.nn.Linear(1, 1)
    attention.sliding_window = 8
    assert sliding_window(torch.nn.Sequential(attention)) == 8
    assert sliding_window(Model(attention)) is None
    assert sliding_window(torch.nn.Sequential(Model(attention))) is None


@pytest.mark.parametrize("kind, maker, why", [
    ("sdpa", "another", None),
    ("registered", "sdpa_mask", None),  # its window, padding and positions used to be the shard's
    ("registered", "another", "does not know"),
    ("flash_attention_3", "flash_attention_mask", "only F.scaled_dot_product_attention"),
    ("kernels-community/some", "sdpa_mask", "only F.scaled_dot_product_attention"),
])  # fmt: skip
def test_whose_masks_are_made(kind, maker, why):
    names = "sdpa_mask", "eager_mask", "flash_attention_mask", "flex_attention_mask", "another"
    module = Some(**{name: object() for name in names})
    refused = why_refused(kind, getattr(module, maker), module)
    assert (refused is None) if why is None else why in refused


def _attach_context_parallel_hooks(model):
    def _self_attn_pre_forward_hook(module, args, kwargs):
        return args, kwargs | {"attention_mask": None, "is_causal": True}

    model[0].register_forward_pre_hook(_self_attn_pre_forward_hook, with_kwargs=True)


def test_accelerates_hooks_are_found():
    """They dropped sliding windows."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].register_forward_pre_hook(lambda module, args: None)
    assert not drops_masks(model) and not drops_masks(None)
    _attach_context_parallel_hooks(model)
    assert drops_masks(model)
