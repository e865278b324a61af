"""Which masks transformers may leave out."""

import pytest
import torch

from cp_dispatch.hugging_face.masks import _sdpa_mask


@pytest.mark.parametrize("window, skips", [(8, False), (None, True)])
def test_a_window_in_a_trace_is_not_left_out(monkeypatch, window, skips):
    """ModernBERT, compiled in a block, with a window longer than a shard."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    ours = _sdpa_mask(lambda **given: given, None)
    given = ours(local_size=window, allow_is_causal_skip=True, allow_is_bidirectional_skip=True)
    assert given["allow_is_causal_skip"] is given["allow_is_bidirectional_skip"] is skips
