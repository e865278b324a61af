"""Which configs of transformers show that a model depends on the positions that its shard holds."""

from types import SimpleNamespace as Some

import pytest

from cp_dispatch.hugging_face.configs import by_longest, wrong_in_a_layout, wrong_in_a_shard

LONG = {
    "rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0],
    "original_max_position_embeddings": 30,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize("rope, longest, beyond", [
    (LONG, [24, 48], 30),
    (LONG, [48, 36], None),
    (LONG, [30, 20], None),
    (LONG | {"long_factor": [1.0]}, [24, 48], None),
    (LONG | {"long_factor": [1.0], "short_mscale": 1.0, "long_mscale": 1.2}, [24, 48], 30),
    (DYNAMIC, [48, 36], 16),  # different frequencies for each length
    (DYNAMIC, [16, 8], None),
    (DYNAMIC, [48, 48], None),
    ({"full_attention": {"rope_type": "default"}, "sliding_attention": LONG}, [24, 48], 30),
])  # fmt: skip
def test_rotary_frequencies(rope, longest, beyond):
    config = Some(rope_parameters=rope, max_position_embeddings=16)
    assert by_longest(config)
    wrong = wrong_in_a_shard(config, 48, longest)
    if beyond is None:
        assert wrong is None
    else:
        assert f"beyond {beyond} positions" in wrong and str(longest) in wrong


@pytest.mark.parametrize("config", [
    None, Some(), Some(rope_parameters=None), Some(rope_parameters={"rope_type": "yarn"}),
    Some(rope_parameters={"full_attention": {"rope_theta": 1e4}}), Some(layer_types=[0, None]),
])  # fmt: skip
def test_others(config):
    assert not by_longest(config)
    assert wrong_in_a_shard(config, 48, [24, 48]) is None


@pytest.mark.parametrize("total, options, wrong", [
    (8, {}, True),
    (7, {}, False),
    (8, {"no_rope_layers": [1, 1]}, False),
    (8, {"attn_temperature_tuning": False}, False),
])  # fmt: skip
def test_temperatures_of_llama_4(total, options, wrong):
    said = {"attn_temperature_tuning": True, "floor_scale": 8, "no_rope_layers": [1, 0]} | options
    reason = wrong_in_a_shard(Some(**said), total, [0, 0])
    assert ("attn_temperature_tuning" in (reason or "")) is wrong
    reason = wrong_in_a_layout(Some(**said), total)
    assert ("from position 8 on" in (reason or "")) is wrong


@pytest.mark.parametrize("name, kinds, found", [
    ("layer_types", ["linear_attention", "full_attention"], ["linear_attention"]),
    ("layer_types", ["hybrid_sliding", "hybrid", "hybrid"], ["hybrid", "hybrid_sliding"]),
    ("layer_types", ["conv", "sliding_attention"], ["conv"]),
    ("layers_block_type", ["attention", "mamba"], ["mamba"]),
    ("layer_types", ["full_attention", "chunked_attention", "sliding_attention"], None),
    ("layer_types", ["moe", "full_attention", "mlp", "sparse", "dense"], None),
    ("layers_block_type", None, None),
])  # fmt: skip
def test_layers_that_are_no_attention(name, kinds, found):
    reason = wrong_in_a_shard(Some(**{name: kinds}), 48, [24, 48])
    assert reason is None if found is None else f"{found} in its config" in reason


def test_keys_of_an_indexer():
    for name in "index_topk", "indexer_budget":
        assert f"({name})" in wrong_in_a_shard(Some(**{name: 4}), 48, [0, 0])
    for kind, wrong in ("minimax_m3_sparse", True), ("full_attention", False):
        config = Some(index_topk_blocks=4, layer_types=["full_attention", kind])
        reason = wrong_in_a_shard(config, 48, [0, 0])
        assert ("(index_topk_blocks)" in (reason or "")) is wrong
