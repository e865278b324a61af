"""Unmodified Hugging Face models, trained for 20 steps: the losses are those of one process.

Through DTensors and through ``context_parallel``. Windows are longer than a shard of four ranks and
shorter than one of two, so a mask that is made from a shard's length would be omitted or cut.
"""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module

import cp_dispatch
from tests.distributed.sharded import distribute
from tests.distributed.spawn import Env, run_asked

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

STEPS, LENGTH, VOCABULARY, WINDOW = 20, 64, 31, 24
HEAD_TAIL = "head-tail"


def build(kind: str, device="cpu", **options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH, "attn_implementation": "sdpa", "use_cache": False,
        "initializer_range": 0.15,
    }  # fmt: skip
    if kind == "Llama":
        config = transformers.LlamaConfig(**sizes, **options)
        return transformers.LlamaForCausalLM(config).to(device)
    if kind == "Mistral":
        config = transformers.MistralConfig(**sizes | {"sliding_window": WINDOW} | options)
        return transformers.MistralForCausalLM(config).to(device)
    # Biases in the projections. The first layer sees everything, the second a window.
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    config = transformers.Qwen2Config(**sizes | window | options)
    assert config.layer_types == ["full_attention", "sliding_attention"] or options
    return transformers.Qwen2ForCausalLM(config).to(device)


@functools.cache
def batches(count: int, rows: int = 1):
    """Two batches in turn, so that the model can learn something."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2, rows, LENGTH + 1), generator=generator)
    pairs = [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in tokens]
    return [pairs[i % 2] for i in range(count)]


def padding(rows: int) -> torch.Tensor:
    """The first row begins with padding and the last one ends with it, so ranks hold different
    parts."""
    seen = torch.ones(rows, LENGTH, dtype=torch.int64)
    seen[0, :10] = 0
    seen[-1, -5:] = 0
    return seen


def train(model, forward, summed=lambda x: x, rows=1, steps=STEPS) -> list[float]:
    """Losses of some steps; ``forward`` returns a rank's part of the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for batch in batches(steps, rows):
        loss = forward(model, *(x.to(model.device, copy=True) for x in batch))
        loss.backward()
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):
                parameter.grad = summed(parameter.grad)
        losses.append(summed(loss.detach().clone()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def loss_of(logits, labels, seen=None, total=None):
    """This rank's part of the mean over the ``total`` tokens that are not padding."""
    labels = labels if seen is None else labels.masked_fill(seen == 0, -100)
    total = LENGTH * labels.size(0) if total is None else total
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total


def one_process(model, padded=False, rows=1, **options) -> list[float]:
    def forward(model, tokens, labels):
        seen = padding(rows).to(tokens.device) if padded else None
        total = None if seen is None else int(seen.sum())
        return loss_of(model(tokens, attention_mask=seen).logits, labels, seen, total)

    return train(model, forward, rows=rows, **options)


def all_summed(env: Env):
    def summed(x):
        dist.all_reduce(x, group=env.mesh().get_group())
        return x

    return summed


def same(got, want) -> None:
    assert len(got) == len(want) and want[-1] < want[0] - 0.1, want
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def window_bites(kind: str, want: list[float], steps: int) -> None:
    """Check that a model that lost its window would have different losses."""
    without = one_process(build(kind, sliding_window=10 * LENGTH), steps=steps)  # on CPU
    assert abs(without[steps - 1] - want[steps - 1]) > 1e-3, (without, want)


def by_dtensors(env: Env, kind: str, balancer=None) -> None:
    mesh = env.mesh()
    want = one_process(build(kind, env.device))
    if kind != "Llama":
        window_bites(kind, want, 5)
    layout = cp_dispatch.HeadTail(LENGTH, env.world_size) if balancer else None
    order = torch.arange(LENGTH) if layout is None else layout.indices[0]
    order = order.to(env.device)
    # In a layout positions jump. These models take that for packed documents unless they get a
    # padding mask. A plain one is in true positions.
    seen = None if layout is None else torch.ones(1, LENGTH, device=env.device)

    def forward(model, *data):
        positions = torch.arange(LENGTH, device=env.device)[None]
        tokens, labels, positions = (
            distribute(x[:, order], mesh, [Shard(1)]) for x in (*data, positions)
        )
        logits = model(tokens, position_ids=positions, attention_mask=seen).logits
        assert logits.placements == (Shard(1),)
        return loss_of(logits.to_local(), labels.to_local())

    model = distribute_module(build(kind, env.device), mesh)
    with cp_dispatch.enabled(layout=layout):
        got = train(model, forward, all_summed(env))
    same(got, want)


def in_block(env: Env, balancer, seen=None, positions=None):
    """A forward whose inputs are the buffers of a block."""

    def forward(model, tokens, labels):
        where = torch.arange(LENGTH).repeat(tokens.size(0), 1) if positions is None else positions
        named = {"position_ids": where.to(env.device, copy=True)}
        if seen is not None:
            named["attention_mask"] = seen.to(env.device, copy=True)
        total = None if seen is None else int(seen.sum())
        buffers = [tokens, labels, *named.values()]
        with cp_dispatch.context_parallel(
            env.mesh(), buffers=buffers, buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers=set(buffers), balancer=balancer,
        ):  # fmt: skip
            logits = model(tokens, **named).logits
            return loss_of(logits, labels, named.get("attention_mask"), total)

    return forward


def by_context(env: Env, kind: str, balancer, seen=None) -> None:
    """``seen`` is the padding mask. In head-tail order it must be given, even if it contains only
    ones."""
    rows = 1 if seen is None else seen.size(0)
    padded = seen is not None and not bool(seen.all())
    want = one_process(build(kind, env.device), padded, rows)
    if kind != "Llama" and not padded:
        window_bites(kind, want, 5)
    model = build(kind, env.device)
    got = train(model, in_block(env, balancer, seen), all_summed(env), rows=rows)
    same(got, want)


def ready_masks(env: Env, kind: str) -> None:
    """Masks made by the caller, one for each kind of layer, are in true positions in any order."""
    want = one_process(build(kind, env.device), steps=5)
    keys = torch.arange(LENGTH, device=env.device)
    rows = keys[:, None]
    full = (keys <= rows)[None, None]
    masks = {"full_attention": full, "sliding_attention": full & (keys > rows - WINDOW)}
    mask = masks if kind == "Qwen2" else masks["sliding_attention"]
    inside = in_block(env, "auto")

    def forward(model, *data):
        return inside(functools.partial(model, attention_mask=mask), *data)

    same(train(build(kind, env.device), forward, all_summed(env), steps=5), want)


def compiled(env: Env) -> None:
    """In graphs the caller makes the masks, both in a block and as plain tensors next to DTensors.
    Otherwise the model raises."""
    model, mesh = build("Qwen2", env.device), env.mesh()
    tokens, labels = (x.to(env.device) for x in batches(1)[0])
    want = loss_of(model(tokens).logits, labels).item()
    keys = torch.arange(LENGTH, device=env.device)
    rows = keys[:, None]
    full = (keys <= rows)[None, None]
    masks = {"full_attention": full, "sliding_attention": full & (keys > rows - WINDOW)}
    torch._dynamo.reset()
    in_graph = torch.compile(model, backend="aot_eager")
    inside = in_block(env, "auto")
    got = inside(functools.partial(in_graph, attention_mask=masks), tokens.clone(), labels.clone())
    assert abs(all_summed(env)(got.detach()).item() - want) <= 1e-4 * want
    with pytest.raises(Exception, match="rows and this rank's keys"):
        inside(in_graph, tokens.clone(), labels.clone())
    torch._dynamo.reset()  # otherwise the length is dynamic, unlike plain masks next to DTensors
    sharded = torch.compile(distribute_module(model, mesh), backend="aot_eager")
    data = [distribute(x, mesh, [Shard(1)]) for x in (tokens, labels, keys[None])]
    with cp_dispatch.enabled():
        ones = torch.ones(1, LENGTH, device=env.device)
        logits = sharded(data[0], position_ids=data[2], attention_mask=ones).logits
    got = loss_of(logits.to_local(), data[1].to_local()).detach()
    assert abs(all_summed(env)(got).item() - want) <= 1e-4 * want


def refused_on_every_rank(env: Env) -> None:
    """What one rank cannot know about another is refused by all, with what to do."""
    model = build("Qwen2", env.device)
    tokens, labels = (x.to(env.device) for x in batches(1)[0])
    packed = torch.cat([torch.arange(LENGTH - 7), torch.arange(7)])[None]
    ones = torch.ones(1, LENGTH, dtype=torch.int64)
    for words, balancer, positions in (
        # The last rank's own positions have no jump. Alone it would continue, and wait.
        ("attention_mask of ones", HEAD_TAIL, None),
        ("attention_mask of ones", None, packed),
    ):
        with pytest.raises(cp_dispatch.ContextParallelError, match=words):
            in_block(env, balancer, positions=positions)(model, tokens.clone(), labels.clone())
    inside = in_block(env, HEAD_TAIL, ones)
    # The names that transformers uses since some version after 5.17, and those before.
    names = set(inspect.signature(model.forward).parameters) & {"cache", "past_key_values"}
    cache = {name: transformers.DynamicCache(config=model.config) for name in names}
    assert len(cache) == 1
    with pytest.raises(cp_dispatch.ContextParallelError, match="use_cache=False"):
        for _ in range(2):
            inside(functools.partial(model, **cache), tokens.clone(), labels.clone())
    whole = [x.chunk(env.world_size, 1)[env.rank] for x in (tokens, labels)]
    with pytest.raises(cp_dispatch.ContextParallelError, match="order of the shards is"):
        with cp_dispatch.context_parallel(env.mesh()):
            model(whole[0])
    # In natural order, with positions and without a cache, each rank went on with its own shard.
    places = torch.arange(LENGTH, device=env.device)[None]
    buffers = [tokens.clone(), places]
    with pytest.raises(cp_dispatch.ContextParallelError, match=r"generate\(\) is refused"):
        with cp_dispatch.context_parallel(
            env.mesh(), buffers=buffers, buffer_seq_dims=[1, 1], balancer=None
        ):
            model.generate(buffers[0], position_ids=places, use_cache=False, max_new_tokens=2)
    plain = model(tokens).logits  # outside a block nothing is left over
    assert torch.equal(plain, build("Qwen2", env.device)(tokens).logits)


def padding_of_a_whole_shard(env: Env) -> None:
    """If padding fills a rank's shard, positions that start after it count from 0 on a later rank,
    and are right."""
    model = build("Llama", env.device)
    tokens = batches(1)[0][0].to(env.device)
    seen = torch.ones(1, LENGTH, dtype=torch.int64, device=env.device)
    seen[:, : LENGTH // env.world_size] = 0
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    want = model(tokens, attention_mask=seen, position_ids=positions).logits
    named = {"attention_mask": seen.clone(), "position_ids": positions.clone()}
    buffers = [tokens.clone(), *named.values()]
    with cp_dispatch.context_parallel(
        env.mesh(), buffers=buffers, buffer_seq_dims=[1] * 3, balancer=None
    ):
        got = model(buffers[0], **named).logits
    (got,) = cp_dispatch.unshard(env.mesh(), [got], [1])
    rows = seen[0].bool()
    torch.testing.assert_close(got[:, rows], want[:, rows], rtol=1e-4, atol=1e-4)


def positions_not_given(env: Env) -> None:
    """A model counts the positions of each shard from 0. That is refused on every rank, also on
    those whose positions these are."""
    model = build("Qwen2", env.device)
    tokens = batches(1)[0][0].to(env.device)
    ones = torch.ones(1, LENGTH, dtype=torch.int64, device=env.device)
    documents = torch.arange(LENGTH, device=env.device)[None] % (LENGTH // env.world_size)
    every = list(range(env.world_size))
    padded = ones.clone()
    padded[:, -5:] = 0
    for balancer, seen, positions, wrong in (
        (None, padded, None, every[1:]),
        ("auto", ones, None, every),  # in head-tail order even the first shard jumps
        (None, ones, None, every[1:]),
        (None, None, None, every[1:]),
        (None, None, documents, every[1:]),
    ):
        named = {"attention_mask": seen, "position_ids": positions}
        named = {name: x.clone() for name, x in named.items() if x is not None}
        buffers = [tokens.clone(), *named.values()]
        with cp_dispatch.context_parallel(
            env.mesh(), buffers=buffers, buffer_seq_dims=[1] * len(buffers), balancer=balancer
        ):
            with pytest.raises(cp_dispatch.ContextParallelError) as raised:
                model(buffers[0], **named)
        text = str(raised.value)
        assert f"count from 0 on ranks {wrong}, which hold other positions" in text, text
        assert "pass position_ids of the whole sequence, also as one of the buffers" in text


def frequencies_by_length(env: Env) -> None:
    """A rank would use the frequencies of its own longest position. That is refused, and right if
    all agree."""
    tokens = batches(1)[0][0]
    for limit in LENGTH // 4, LENGTH:
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        options = {"max_position_embeddings": limit, "rope_parameters": rope}
        model = build("Qwen2", env.device, sliding_window=WINDOW, **options)
        if limit == LENGTH:
            same_logits(env, model, HEAD_TAIL)
            continue
        for balancer in None, HEAD_TAIL:
            inside = in_block(env, balancer, torch.ones_like(tokens))
            with pytest.raises(
                cp_dispatch.ContextParallelError, match="different frequencies beyond"
            ):
                inside(model, *(tokens.to(env.device, copy=True) for _ in range(2)))


@torch.no_grad()
def whole_mask_beside_a_cache(env: Env) -> None:
    """The model takes the length from a new cache's keys, which are a shard's, and not from the
    mask. Other lengths raise."""
    model = build("Llama", env.device)
    tokens = batches(1, 2)[0][0].to(env.device)
    seen = padding(2).to(env.device)
    positions = torch.arange(LENGTH, device=env.device).repeat(2, 1)
    want = model(tokens, attention_mask=seen).logits
    with cp_dispatch.context_parallel(
        env.mesh(), buffers=[tokens, positions], buffer_seq_dims=[1, 1], balancer=HEAD_TAIL
    ):
        got = model(tokens, position_ids=positions, attention_mask=seen, use_cache=True).logits
        with pytest.raises(cp_dispatch.ContextParallelError, match="the whole mask on every rank"):
            model(tokens, position_ids=positions, attention_mask=seen[:, 1:], use_cache=True)
    layout = cp_dispatch.HeadTail(LENGTH, env.world_size)
    (got,) = cp_dispatch.unshard(env.mesh(), [got], [1], layout)
    torch.testing.assert_close(got[seen.bool()], want[seen.bool()], rtol=1e-4, atol=1e-4)


def shards_of_a_row(env: Env) -> None:
    """Transformers takes one row for decoding, which is not causal. That is wrong if all ranks have
    one row, and a mismatch if only one rank does. Without rows its layers raise, and the other
    ranks would wait."""
    model = build("Qwen2", env.device)
    for length in (env.world_size, 2 * env.world_size - 1, 1):
        buffers = [batches(1)[0][0][:, :length].to(env.device, copy=True)]
        buffers += [torch.arange(length, device=env.device)[None], torch.ones_like(buffers[0])]
        with cp_dispatch.context_parallel(
            env.mesh(), buffers=buffers, buffer_seq_dims=[1, 1, 1], balancer=None
        ):
            with pytest.raises(cp_dispatch.ContextParallelError, match="one row as decoding"):
                model(buffers[0], position_ids=buffers[1], attention_mask=buffers[2])


def small(kind: str):
    """Models that make their masks in different ways, in eval mode."""
    torch.manual_seed(0)
    wide = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4}
    wide |= {"num_hidden_layers": 2, "attn_implementation": "sdpa", "use_cache": False}
    if kind == "BERT":
        config = transformers.BertConfig(**wide, intermediate_size=64)
        return transformers.BertForMaskedLM(config).eval()
    if kind == "Falcon":
        return transformers.FalconForCausalLM(transformers.FalconConfig(**wide, alibi=False)).eval()
    if kind == "Llama 4":
        config = transformers.Llama4TextConfig(
            **wide | {"num_hidden_layers": 4}, num_key_value_heads=2, head_dim=8, pad_token_id=0,
            intermediate_size=64, intermediate_size_mlp=64, attention_chunk_size=WINDOW,
            num_local_experts=2,
        )  # fmt: skip
        return transformers.Llama4ForCausalLM(config).eval()
    sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder")
             for name in ("layers", "attention_heads")}  # fmt: skip
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, **sides,
        attn_implementation="sdpa", use_cache=False, init_std=0.15, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def layers_that_are_no_attention(env: Env) -> None:
    """The states of these layers stay within a shard, so they are refused on every rank."""
    config = transformers.MiniMaxConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    assert set(config.layer_types) == {"full_attention", "linear_attention"}
    model = transformers.MiniMaxForCausalLM(config).to(env.device).eval()
    tokens = batches(1)[0][0]
    words = r"\['linear_attention'\] in its config"
    for balancer in None, HEAD_TAIL:
        with pytest.raises(cp_dispatch.ContextParallelError, match=words):
            inside = in_block(env, balancer, torch.ones_like(tokens))
            inside(model, *(tokens.to(env.device, copy=True) for _ in range(2)))


def positions_of_its_own(env: Env) -> None:
    """Models that make masks without positions would count them from 0. They are refused on every
    rank alike, and right if positions are given."""
    tokens = batches(1)[0][0]
    every = list(range(env.world_size))
    for kind, words in (
        ("BERT", f"count from 0 on ranks {every[1:]}, which hold other positions"),
        ("BART", "this model takes no position_ids"),
    ):
        model = small(kind).to(env.device)
        own = tokens.to(env.device, copy=True)
        with cp_dispatch.context_parallel(
            env.mesh(), buffers=[own], buffer_seq_dims=[1], balancer=None
        ):
            with pytest.raises(cp_dispatch.ContextParallelError, match=words.replace("[", r"\[")):
                model(own)
        with torch.no_grad():
            if kind == "BERT":
                same_logits(env, model, None)
            else:
                same_by_dtensors(env, model)


def same_logits(env: Env, model, balancer) -> None:
    """Compare the logits from buffers of a block. In head-tail order an attention_mask of ones is
    passed."""
    tokens = batches(1)[0][0].to(env.device)
    want = model(tokens).logits
    named = {"position_ids": torch.arange(LENGTH, device=env.device)[None]}
    if balancer is not None:
        named["attention_mask"] = torch.ones_like(tokens)
    own = tokens.clone()
    buffers = [own, *named.values()]
    with cp_dispatch.context_parallel(
        env.mesh(), buffers=buffers, buffer_seq_dims=[1] * len(buffers), balancer=balancer
    ):
        got = model(own, **named).logits
    got = cp_dispatch.context_parallel_unshard(env.mesh(), [got], [1], balancer=balancer)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def same_by_dtensors(env: Env, model) -> None:
    """Whole positions that a model makes itself are plain tensors, which torch replicates."""
    tokens = batches(1)[0][0].to(env.device)
    want = model(tokens, decoder_input_ids=tokens).logits
    distribute_module(model, env.mesh())
    tokens = distribute(tokens, env.mesh(), [Shard(1)])
    with cp_dispatch.enabled(), implicit_replication():
        got = model(tokens, decoder_input_ids=tokens).logits
    assert got.placements == (Shard(1),)
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-4)


def masks_of_other_models(env: Env) -> None:
    """A mask that a model wants although none is needed; and chunks, in a layout, with a mask of
    ones."""
    with torch.no_grad():
        for balancer in None, HEAD_TAIL:
            for kind in "Falcon", "Llama 4":
                same_logits(env, small(kind).to(env.device), balancer)


def attention_that_is_not_seen(env: Env) -> None:
    """It would stay within a shard, and does so again outside the block."""
    model = build("Llama", env.device)
    tokens = batches(1)[0][0].to(env.device)
    for kind, instead in (
        ("eager", "use attn_implementation='sdpa'"),
        ("flex_attention", "make the BlockMask of the whole sequence"),
    ):
        model.set_attn_implementation(kind)
        words = f"attn_implementation='{kind}' is refused .*{instead}"
        with pytest.raises(cp_dispatch.ContextParallelError, match=words):
            in_block(env, None)(model, tokens.clone(), tokens.clone())
    model.set_attn_implementation("eager")
    style = cp_dispatch.ContextParallel(seq_dim=1)
    with pytest.raises(cp_dispatch.ContextParallelError, match="refused in ContextParallel"):
        parallelize_module(model, env.mesh(), {"model.layers.*.self_attn": style})
    want = build("Llama", env.device)(tokens).logits
    torch.testing.assert_close(model(tokens).logits, want, rtol=1e-4, atol=1e-4)


def _attach_context_parallel_hooks(model):
    """Like Accelerate's function of this name."""

    def hook(module, args, kwargs):
        return args, kwargs | {"attention_mask": None, "is_causal": True}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def masks_that_accelerate_drops(env: Env) -> None:
    """They are refused where a mask matters, and nowhere else."""
    tokens, labels = (x.to(env.device) for x in batches(1, 2)[0])
    at_the_end = torch.ones_like(tokens)
    at_the_end[0, -7:] = 0
    model = build("Llama", env.device)
    _attach_context_parallel_hooks(model)
    with torch.no_grad():
        in_block(env, HEAD_TAIL, at_the_end)(model, tokens.clone(), labels.clone())
    windowed = build("Mistral", env.device)
    _attach_context_parallel_hooks(windowed)
    for refused, seen in (model, padding(2)), (windowed, torch.ones_like(tokens)):
        with pytest.raises(cp_dispatch.ContextParallelError, match="Accelerate's hooks"):
            in_block(env, HEAD_TAIL, seen.to(env.device))(refused, tokens.clone(), labels.clone())


def registered_attention(env: Env) -> None:
    """Its masks come from transformers' function for "sdpa", so they are made like those. A window
    longer than the shard was silently omitted."""
    window = LENGTH // env.world_size + 8
    sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionInterface.register("ours", sdpa)
    transformers.AttentionMaskInterface.register("ours", masking_utils.sdpa_mask)
    model = build("Mistral", env.device, sliding_window=window, attn_implementation="ours")
    with torch.no_grad():
        same_logits(env, model, HEAD_TAIL)


def window_of_a_style(env: Env) -> None:
    """A module in a style gets the mask that was made outside it. That mask is None if a shard is
    no longer than the window, although the sequence is. This is refused; without a window it is
    right."""
    mesh = env.mesh()
    tokens = batches(1)[0][0].to(env.device)
    own = tokens.chunk(env.world_size, 1)[env.rank]
    positions = torch.arange(LENGTH, device=env.device).chunk(env.world_size)[env.rank][None]
    style = cp_dispatch.ContextParallel(seq_dim=1)
    for window in (LENGTH // env.world_size + 1, LENGTH):
        model = build("Mistral", env.device, sliding_window=window)
        want = model(tokens).logits.chunk(env.world_size, 1)[env.rank]
        parallelize_module(model, mesh, {"model.layers.*.self_attn": style})
        if window < LENGTH:
            with pytest.raises(cp_dispatch.ContextParallelError, match="sliding_window"):
                model(own, position_ids=positions)
        else:
            torch.testing.assert_close(model(own, position_ids=positions).logits, want)


CASES = {
    "window of a parallel style": window_of_a_style,
    "Llama, DTensors": functools.partial(by_dtensors, kind="Llama"),
    "Qwen2, DTensors": functools.partial(by_dtensors, kind="Qwen2"),
    "Qwen2, DTensors, head-tail": functools.partial(by_dtensors, kind="Qwen2", balancer=HEAD_TAIL),
    "Mistral, DTensors": functools.partial(by_dtensors, kind="Mistral"),
    "Llama, context": functools.partial(
        by_context, kind="Llama", balancer="auto", seen=torch.ones(1, LENGTH, dtype=torch.int64)
    ),
    "Qwen2, context": functools.partial(
        by_context, kind="Qwen2", balancer="auto", seen=torch.ones(1, LENGTH, dtype=torch.int64)
    ),
    "Qwen2, context, natural order": functools.partial(by_context, kind="Qwen2", balancer=None),
    "Qwen2, context, padded": functools.partial(
        by_context, kind="Qwen2", balancer="auto", seen=padding(2)
    ),
    "Mistral, context, padded, natural order": functools.partial(
        by_context, kind="Mistral", balancer=None, seen=padding(2)
    ),
    "Qwen2, ready masks": functools.partial(ready_masks, kind="Qwen2"),
    "Mistral, ready mask": functools.partial(ready_masks, kind="Mistral"),
    "compiled": compiled,
    "refused on every rank": refused_on_every_rank,
    "positions that are not given": positions_not_given,
    "frequencies by length": frequencies_by_length,
    "layers that are no attention": layers_that_are_no_attention,
    "positions of its own": positions_of_its_own,
    "whole mask beside a cache": whole_mask_beside_a_cache,
    "shards of a row": shards_of_a_row,
    "masks of other models": masks_of_other_models,
    "attention that is not seen": attention_that_is_not_seen,
    "padding of a whole shard": padding_of_a_whole_shard,
    "registered attention": registered_attention,
    "masks that accelerate drops": masks_that_accelerate_drops,
}


# Llama's attention is that of the first layer of Qwen2.
ON_4 = {
    "Qwen2, DTensors, head-tail", "Qwen2, context", "Mistral, context, padded, natural order",
    "window of a parallel style", "refused on every rank", "positions that are not given",
}  # fmt: skip


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size} ranks")
def outcomes(request) -> dict[str, str]:
    size = request.param
    return run_asked(request, size, "gloo", 90, lambda name: size == 2 or name in ON_4)


@pytest.mark.parametrize("case", CASES)
def test_hf(outcomes, case):
    if case not in outcomes:
        pytest.skip("on 2 ranks only")
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
