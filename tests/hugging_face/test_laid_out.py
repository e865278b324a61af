"""Models on DTensors in a layout, inside ``implicit_replication()``: what they make themselves in
natural order is refused, on every rank."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import implicit_replication

from cp_dispatch import BlockBalanced, ContextParallelError, HeadTail, enabled
from cp_dispatch.hugging_face import laid_out
from tests.distributed.spawn import TORCH_2_13
from tests.ranks import fake_ranks

transformers = pytest.importorskip("transformers")

LENGTH, HEAD_TAIL = 8, HeadTail(8, 2)
NATURAL = BlockBalanced([1, 1], 2, 4)  # which is in natural order


@functools.cache
def built(kind: str):
    """A model of one small layer, and the same without a head."""
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=4, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, use_cache=False, attn_implementation=kind,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def run(mesh, layout, kind="sdpa", headless=False, whole=False, implicit=True, **given):
    """Call a model; ``position_ids`` a list of this rank's, or a whole plain tensor."""
    model = distribute_module(copy.deepcopy(built(kind)), mesh)
    model = model.model if headless else model
    tokens = torch.zeros(1, LENGTH if whole else LENGTH // 2, dtype=torch.int64)
    if not whole:
        tokens = DTensor.from_local(tokens, mesh, [Shard(1)])
    if isinstance(given.get("position_ids"), list):
        own = torch.tensor([given["position_ids"]])
        given["position_ids"] = DTensor.from_local(own, mesh, [Shard(1)])
    replicated = implicit_replication() if implicit else contextlib.nullcontext()
    with torch.no_grad(), enabled(layout=layout), replicated:
        return model(input_ids=tokens, **given)


@pytest.fixture
def mesh():
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests
    with fake_ranks(2) as mesh:
        yield mesh


OWN, ONES, WHOLE = [0, 1, 6, 7], torch.ones(1, LENGTH), torch.arange(LENGTH)[None]


@pytest.mark.parametrize("headless", [False, True])
@pytest.mark.parametrize("given", [{}, {"attention_mask": ONES}, {"position_ids": WHOLE}], ids=str)
def test_positions_that_the_model_counts_are_refused(mesh, given, headless):
    with pytest.raises(ContextParallelError, match="positions count from 0 .* pass position_ids"):
        run(mesh, HEAD_TAIL, headless=headless, **given)


def test_positions_that_a_model_cannot_be_given_are_refused(mesh):
    model = transformers.BartModel(
        transformers.BartConfig(
            vocab_size=11, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8,
            decoder_ffn_dim=8, encoder_attention_heads=1, decoder_attention_heads=1,
            use_cache=False, attn_implementation="sdpa",
        )
    ).eval()  # fmt: skip
    model = distribute_module(model, mesh)
    tokens = torch.zeros(1, LENGTH // 2, dtype=torch.int64)
    tokens = DTensor.from_local(tokens, mesh, [Shard(1)])
    for layout in (None, NATURAL, HEAD_TAIL):
        refused = pytest.raises(ContextParallelError, match="takes no position_ids, and embeds")
        with refused if layout is HEAD_TAIL else contextlib.nullcontext():
            with torch.no_grad(), enabled(layout=layout), implicit_replication():
                model(tokens, decoder_input_ids=tokens)


def test_queries_that_a_model_scales_by_positions_are_refused(mesh):
    config = transformers.Llama4TextConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, intermediate_size_mlp=8,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        no_rope_layers=[0], floor_scale=8, use_cache=False, attn_implementation="sdpa",
        interleave_moe_layer_step=2, pad_token_id=None,
    )  # fmt: skip
    model = distribute_module(transformers.Llama4ForCausalLM(config).eval(), mesh)
    own = (torch.zeros(1, LENGTH // 2, dtype=torch.int64), torch.tensor([OWN]))
    tokens, positions = (DTensor.from_local(x, mesh, [Shard(1)]) for x in own)
    # Without a layout, torch 2.11 has no rule for the model's complex numbers.
    for layout in (None, HEAD_TAIL) if TORCH_2_13 else (HEAD_TAIL,):
        refused = pytest.raises(ContextParallelError, match="attn_temperature_tuning")
        with contextlib.nullcontext() if layout is None else refused:
            with torch.no_grad(), enabled(layout=layout), implicit_replication():
                model(input_ids=tokens, position_ids=positions, attention_mask=ONES)


@pytest.mark.parametrize("kind", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("positions", [OWN, WHOLE[:, [0, 1, 6, 7, 2, 3, 4, 5]]], ids=str)
def test_documents_that_transformers_finds_are_refused(mesh, positions, kind):
    """Whether there are any, or positions only jump because of the layout."""
    with pytest.raises(ContextParallelError, match="find documents.* attention_mask of ones"):
        run(mesh, HEAD_TAIL, kind, position_ids=positions)


def test_a_causal_mask_of_uncompiled_attention_is_refused(mesh):
    with pytest.raises(ContextParallelError, match="use attn_implementation='sdpa'"):
        run(mesh, HEAD_TAIL, "eager", position_ids=OWN, attention_mask=ONES)


@pytest.mark.parametrize("kind", ["sdpa", "flex_attention"])
def test_a_mask_sharded_like_the_tokens_is_refused(mesh, kind):
    own = DTensor.from_local(torch.tensor([[1, 1, 1, 0]]), mesh, [Shard(1)])
    with pytest.raises(ContextParallelError, match="attention_mask is sharded .* pass it whole"):
        run(mesh, HEAD_TAIL, kind, position_ids=OWN, attention_mask=own)


def test_what_is_right_is_not_refused(mesh):
    from transformers import masking_utils

    table = dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.items())
    run(mesh, HEAD_TAIL, position_ids=OWN, attention_mask=ONES)
    permuted = WHOLE[:, [0, 1, 6, 7, 2, 3, 4, 5]]
    run(mesh, HEAD_TAIL, position_ids=permuted, attention_mask=ONES)
    for layout in (None, NATURAL):
        run(mesh, layout)
        run(mesh, layout, attention_mask=ONES)
        run(mesh, layout, "eager")
    run(mesh, HeadTail(64, 2), whole=True)  # another sequence, which is not sharded
    run(mesh, HEAD_TAIL, "eager", whole=True)
    run(mesh, HeadTail(64, 2), "eager")
    with enabled(layout=HEAD_TAIL):
        run(mesh, None)
        with implicit_replication():
            built("sdpa")(input_ids=WHOLE)  # plain tensors alone
    with implicit_replication():
        laid_out.check(None, "sdpa", True, None)  # as in a block alone
    assert dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.items()) == table


def test_a_model_that_embeds_the_positions_it_is_given_is_not_refused(mesh):
    model = transformers.OPTModel(
        transformers.OPTConfig(
            vocab_size=11, hidden_size=8, word_embed_proj_dim=8, num_hidden_layers=1, ffn_dim=8,
            num_attention_heads=1, use_cache=False, attn_implementation="sdpa",
        )
    ).eval()  # fmt: skip
    model = distribute_module(model, mesh)
    own = (torch.zeros(1, LENGTH // 2, dtype=torch.int64), torch.tensor([OWN]))
    tokens, positions = (DTensor.from_local(x, mesh, [Shard(1)]) for x in own)
    with torch.no_grad(), enabled(layout=HEAD_TAIL), implicit_replication():
        model(tokens, position_ids=positions, attention_mask=ONES)


def test_models_are_not_refused_for_what_they_do_not_have(mesh, monkeypatch):
    """A causal mask, or an embedding of positions."""
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, attn_implementation="eager",
    )  # fmt: skip
    model = distribute_module(transformers.BertModel(config).eval(), mesh)
    own = (torch.zeros(1, LENGTH // 2, dtype=torch.int64), torch.tensor([OWN]))
    tokens, positions = (DTensor.from_local(x, mesh, [Shard(1)]) for x in own)
    with torch.no_grad(), enabled(layout=HEAD_TAIL), implicit_replication():
        model(tokens, ONES, tokens, positions)
    monkeypatch.setattr(laid_out, "taken_by_the_model", lambda: False)
    run(mesh, HEAD_TAIL, position_ids=OWN, attention_mask=ONES)


def test_outside_implicit_replication_the_error_is_torchs(mesh):
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor") as raised:
        run(mesh, HEAD_TAIL, implicit=False)
    assert not isinstance(raised.value, ContextParallelError)
