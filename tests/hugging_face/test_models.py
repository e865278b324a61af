"""An unmodified Hugging Face Llama on sequence-sharded inputs: logits and every gradient.

Both runs start from one seed in float32 and are compared with the same model in float64. The error
of a gradient may be 1.3 times that of one process.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_module

import cp_dispatch
from tests.distributed.reference import FACTOR
from tests.distributed.sharded import distribute
from tests.distributed.spawn import TORCH_2_13, Env, run_cases

pytest.importorskip("transformers")

BATCH, LENGTH, VOCABULARY = 2 if TORCH_2_13 else 1, 256, 97  # the most that torch 2.11 supports


def model(seed: int = 0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions


def step(llama, tokens, labels, positions) -> dict[str, torch.Tensor]:
    """Logits, loss and the gradient of every parameter. A rank's loss is over its own rows."""
    logits = llama(input_ids=tokens, position_ids=positions).logits
    if isinstance(logits, DTensor):
        assert logits.placements == (Shard(1),), "the sequence stays sharded to the end"
        # Labels were cut like the tokens: each rank computes the loss of its own rows, without a
        # sum over ranks.
        own = F.cross_entropy(
            logits.to_local().flatten(0, 1), labels.to_local().flatten(), reduction="sum"
        )
        loss = own / (BATCH * LENGTH)
    else:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    results = {"logits": logits.detach()}
    results |= {name: parameter.grad for name, parameter in llama.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in results.items()}


def same_as_one_process(env: Env) -> None:
    llama, inputs = model(), batch()
    want = step(copy.deepcopy(llama).double(), *inputs)
    single = step(copy.deepcopy(llama), *inputs)
    mesh = env.mesh()
    sharded = distribute_module(copy.deepcopy(llama), mesh)
    with cp_dispatch.enabled():
        got = step(sharded, *(distribute(x, mesh, [Shard(1)]) for x in inputs))
    assert got.keys() == want.keys() and len(got) == 1 + len(list(llama.parameters()))
    wrong = {}
    for name, true in want.items():
        mine, theirs, rounding = (
            (x.double() - true).norm().item() for x in (got[name], single[name], true.float())
        )
        line = f"{mine / true.norm():.2e} ({mine / theirs:.2f}x) {name}"
        print(line)
        if not mine <= FACTOR * max(theirs, rounding):
            wrong[name] = line
    assert not wrong, wrong


CASES = {"same as one process": same_as_one_process}


def test_llama_is_the_same_as_on_one_process():
    outcomes = run_cases(__name__, list(CASES), 2, "gloo", case_timeout=120)
    assert set(outcomes.values()) == {""}, "\n".join(outcomes.values())
