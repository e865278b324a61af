"""Which windows attention modules of transformers say they have."""

from types import SimpleNamespace as Some

import pytest

from cp_dispatch.hf_masks import sliding_window

KINDS = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8}


@pytest.mark.parametrize("module, window", [
    (Some(config=Some(sliding_window=8)), 8),  # Mixtral
    (Some(config=Some(sliding_window=8, **KINDS), sliding_window=None), None),
    (Some(sliding_window=8), 8),
    # Llama 4: the chunk was left out, in silence, where shards are shorter.
    (Some(config=Some(**KINDS), layer_idx=0), 8),
    (Some(config=Some(**KINDS), layer_idx=1), None),
    (Some(config=Some(**KINDS)), None),
    (Some(), None),
])  # fmt: skip
def test_windows_of_modules(module, window):
    assert sliding_window(module) == window
