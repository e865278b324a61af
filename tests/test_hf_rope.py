"""When ranks would choose other frequencies of rotary embeddings than one another."""

from types import SimpleNamespace as Some

import pytest

from cp_dispatch.hf_rope import by_length, chosen_apart

LONG = {
    "rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0],
    "original_max_position_embeddings": 30,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize("rope, longest, apart", [
    (LONG, [24, 48], ("longrope", 30)),
    (LONG, [48, 36], None),
    (LONG, [30, 20], None),
    (LONG | {"long_factor": [1.0]}, [24, 48], None),
    (DYNAMIC, [48, 36], ("dynamic", 16)),  # of each length its own
    (DYNAMIC, [16, 8], None),
    (DYNAMIC, [48, 48], None),
    ({"full_attention": {"rope_type": "default"}, "sliding_attention": LONG}, [24, 48],
     ("longrope", 30)),
])  # fmt: skip
def test_ranks_that_choose_apart(rope, longest, apart):
    config = Some(rope_parameters=rope, max_position_embeddings=16)
    assert by_length(config)
    assert chosen_apart(config, longest) == apart


@pytest.mark.parametrize("config", [
    None, Some(), Some(rope_parameters=None), Some(rope_parameters={"rope_type": "yarn"}),
])  # fmt: skip
def test_frequencies_of_no_length(config):
    assert not by_length(config)
    assert chosen_apart(config, [24, 48]) is None
