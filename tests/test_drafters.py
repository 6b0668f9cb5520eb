"""Draft heads in other projects' formats, made by these tests."""

import json
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from safetensors.torch import save_file

from backends import cpu
from backends.tensor_parallel import Group, VocabParallelHead
from common.values import warn
from conftest import MODELS, needs_compiler, random_prompts, refusal, toy_model
from drafters.base import BlockConfig, Eagle3Config
from drafters.block import BlockHeads
from drafters.eagle3 import Eagle3Heads
from drafters.mtp import MTPHeads
from engine.batching import Engine
from generate import Fixed, decoder_class, generate
from hf.heads import load_heads
from hf.published_heads import read_config
from model import GPTConfig, add
from record_published import layers_of, weights_of
from test_published import base_of, speculators


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_read_between_packed_blocks(dtype):
    """Bug: a piece of the blocks that reads another layer's cache or starts from a rounded stream, or a state of the
    layer beside the one that was asked for."""
    tokens = torch.tensor(random_prompts([40]))
    model = toy_model(n_layer=5).to(dtype)
    layers = 3, 0, 5, 1
    want = [*model(tokens, layers=layers).chunk(4, dim=-1)]
    torch.testing.assert_close(want[1], model.embeddings(tokens, None), rtol=0, atol=0)
    torch.testing.assert_close(want[2], model(tokens), rtol=0, atol=0)
    cpu.apply(model)
    whole, pieces = (model.new_cache(1, 80) for _ in range(2))
    last = model.prefill(tokens, whole)
    states = model.prefill(tokens, pieces, layers=layers)
    assert torch.equal(whole.kv, pieces.kv) and torch.equal(states.chunk(4, dim=-1)[2], last)
    torch.testing.assert_close(states, torch.cat(want, -1), rtol=0.05, atol=0.05 if dtype != torch.float32 else 1e-3)


def toy_of(kind):
    """A toy model for heads of this kind."""
    return toy_model(**MODELS["hybrid"] if kind == "mtp" else dict(n_layer=3))


def random_mtp(model, seed=0, weights=None):
    """MTP heads with random weights for the toy hybrid."""
    layers = replace(model.config, n_layer=1, mixers=(), n_inner=80)
    heads = MTPHeads(Eagle3Config(layers, 3, (), norm_output=True), model)
    return filled(heads, seed, weights)


def random_published(model, kind="eagle3", n_draft=5, vocabulary=0, seed=0, layers=(), weights=None, **switches):
    """Heads with random weights for a toy model, of other sizes than its layers. kind: eagle3 or block."""
    sizes = dict(n_head=6, n_kv_head=3, n_inner=80, rope_theta=500.0, norm_eps=1e-3, block_size=model.config.block_size)
    sizes |= dict(vocab_size=97, n_embd=64, head_size=16, n_layer=1)
    if kind == "block":
        sizes |= dict(n_layer=2, qk_norm="head")
    make, make_config = (BlockHeads, BlockConfig) if kind == "block" else (Eagle3Heads, Eagle3Config)
    own_head = vocabulary > 0 or kind == "eagle3"
    own = GPTConfig(**sizes | dict(layers))
    heads = make(make_config(own, n_draft, (1, 2, 0), vocabulary, own_head=own_head, **switches), model)
    if vocabulary:
        heads.vocabulary.copy_(torch.randperm(97, generator=torch.Generator().manual_seed(seed))[:vocabulary])
    return filled(heads, seed, weights)


def filled(heads, seed, weights):
    """Heads with these weights, None: random ones, ready to draft."""
    generator = torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        p.data.normal_(0, 0.3, generator=generator).add_(p.dim() == 1)
    if weights:
        heads.load_state_dict(weights)
    return heads.place()


def chain_logprobs(heads, hidden, tokens, path):
    """Log-probabilities of the tokens of a path, one after another, by whole causal passes without a cache. hidden
    [T, n C] of the committed rows, tokens [T] that follow them."""
    inputs = heads.g(hidden[None])
    logprobs = []
    for n in range(len(path)):
        e = heads.embedding(torch.tensor([[*tokens, *path[:n]]]))
        h = add(*heads.blocks(torch.cat((e, inputs), -1), heads.tables, torch.arange(e.shape[1])[None])[:2])
        normed = heads.norm(h[:, -1:])
        row = heads.lm_head(normed[0, 0]).log_softmax(-1)
        ids = list(range(97)) if heads.vocabulary is None else heads.vocabulary.tolist()
        logprobs.append(row[ids.index(path[n])].item())
        inputs = torch.cat((inputs, normed if heads.config.norm_output else h[:, -1:]), 1)
    return logprobs


@pytest.mark.parametrize("beams, switches", [
    (1, dict(norm_before_residual=True)), (4, dict(fc_norm=True, vocabulary=33)),
    (3, dict(norm_before_fc=True, norm_output=True)), (8, dict(layers=dict(qk_norm="head", qkv_bias=True)))], ids=str)
def test_eagle3_drafts_a_beam_search(beams, switches):
    """Bug: a beam that reads the state, the keys or the token of another one, a row at a wrong position, keys that
    overwrite a committed row or another sequence's. Sequences of unequal lengths, in other slots than their rows."""
    model = toy_model(n_layer=3)
    heads = random_published(model, **switches)
    prompts = random_prompts([9, 30, 2])
    slots = torch.tensor([2, 0, 3])
    cache = heads.new_cache(4, 100)
    cache.kv.normal_()  # rows that nothing wrote
    states = torch.zeros(4, 64)
    for slot, prompt in zip(slots, prompts):
        tokens = torch.tensor([prompt])
        hidden = model(tokens, layers=heads.hidden_layers)
        states[slot] = heads.augment(hidden[:, :-1], tokens[:, 1:], cache=cache.one(slot))[0, -1]
        cache.lengths[slot] = len(prompt) - 1
    root = torch.tensor([prompt[-1] for prompt in prompts])
    candidates = heads.draft(states[slots], root, heads.n_draft, beams, cache=replace(cache, slots=slots))
    for b, prompt in enumerate(prompts):
        hidden = model(torch.tensor([prompt]), layers=heads.hidden_layers)[0, :-1]
        paths = [((), 0.0)]
        for depth in range(heads.n_draft):
            rows = zip(*(column[b, depth].tolist() for column in candidates))
            paths = [((*paths[parent][0], token), joint) for joint, token, parent in rows if parent >= 0]
            for path, joint in (paths[0], paths[-1], paths[len(paths) // 2]):
                want = sum(chain_logprobs(heads, hidden, prompt[1:], path))
                assert joint == pytest.approx(want, abs=2e-3), (b, path)


# ---------------------------------------------------------------------------------------------------------------------
# Decoding

PROMPTS = random_prompts([7, 1, 30, 40, 12])
KINDS = {
    "eagle3": random_published, "eagle3 of 33 tokens": partial(random_published, vocabulary=33, norm_output=True),
    "dflash": partial(random_published, kind="block", mask_token=96),
    "jetspec": partial(random_published, kind="block", causal=True, vocabulary=33),
    "dspark": partial(random_published, kind="block", first=0, markov_rank=8, markov_gated=True)}


MAKERS = KINDS | {"mtp": random_mtp}


@cache
def taught(kind):
    """Weights of heads that have learnt how the toy model continues the prompts, so that guesses are accepted."""
    model = toy_of(kind)
    heads = MAKERS[kind](model).requires_grad_(True)
    texts = [torch.tensor([prompt + text]) for prompt, text in zip(PROMPTS, generate(model, PROMPTS, 16).tokens)]
    hidden = torch.cat([model(text, layers=heads.hidden_layers)[:, :-2] for text in texts], dim=1)
    after, later = (torch.cat([text[:, i:len(text[0]) - 2 + i] for text in texts], dim=1) for i in (1, 2))
    rows = torch.full((97,), -100)
    rows[slice(None) if heads.vocabulary is None else heads.vocabulary.long()] = torch.arange(heads.n_rows)
    optimizer = torch.optim.Adam(heads.parameters(), 3e-3)
    for _ in range(40):
        logits = heads.lm_head(heads.norm(heads.augment(hidden, after)))
        torch.nn.functional.cross_entropy(logits[0], rows[later[0]]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach() for name, x in heads.state_dict().items()}


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("kind", ["eagle3", "dspark", "mtp"])
def test_heads_read_the_committed_rows_in_any_slot(kind, packed, exact):
    """Bug: keys of a rejected node, of a draft's MASK, of a cancelled sequence or of a prefix's other successor, left
    in a committed row, which only cost acceptance."""
    model = toy_of(kind)
    if packed:
        cpu.apply(model)
    heads = MAKERS[kind](model)
    engine = Engine(model, policy=Fixed(model, heads, True, 9), batch_size=2, capacity=200)
    first, second, third = random_prompts([40, 9, 25])
    longer = first + generate(model, [first], 5).tokens[0] + third
    for prompt in (first, longer, first[:30] + third, third):
        sequences = [engine.add(prompt, 60), engine.add(second, 60)]
        for _ in range(8):
            engine.step()
        slots = engine.decoder.slots
        for sequence in sequences:
            text, n = sequence.prompt + sequence.tokens, slots.heads_cache.lengths[sequence.slot]
            assert len(sequence.tokens) > (9 if kind == "mtp" else 16)  # many guesses are accepted
            cache = heads.new_cache(1, 200)
            states = model(torch.tensor([text[:n]]), layers=heads.hidden_layers)
            h = heads.augment(states, torch.tensor([text[1:n + 1]]), cache=cache)
            rows = slots.heads_cache.kv[:, :, sequence.slot, :, :n]
            torch.testing.assert_close(rows, cache.kv[:, :, 0, :, :n], atol=1e-4, rtol=1e-4)
            if kind != "dspark":
                torch.testing.assert_close(slots.state[sequence.slot], h[0, -1], atol=1e-3, rtol=1e-3)
            engine.cancel(sequence)


@needs_compiler
@pytest.mark.parametrize("kind", MAKERS)
def test_a_line_says_which_heads_run_in_torch(kind, capsys):
    """Bug: heads that take ten times a plain step without a word, or that C could run."""
    warn.cache_clear()
    model = toy_of(kind)
    cpu.apply(model)
    in_c = decoder_class(model, MAKERS[kind](model)) is cpu.CompiledDecoder
    assert in_c == (kind == "mtp" or "eagle3" in kind) and capsys.readouterr().err.count("\n") == (not in_c)


# ---------------------------------------------------------------------------------------------------------------------
# Loading

EAGLE3, SPECFORGE = dict(speculators_model_type="eagle3"), dict(architectures=["LlamaForCausalLMEagle3"])
DFLASH = dict(speculators_model_type="dflash", aux_hidden_state_layer_ids=[0, 9])
DSPARK = DFLASH | dict(speculators_model_type="dspark")
IDS = "eagle_aux_hidden_state_layer_ids"
OTHER = dict(architectures=["LlamaForCausalLM"])  # EAGLE-3 told by its tensors
ZLAB = dict(architectures=["DFlashDraftModel"], target_layer_ids=[1, 34])
DEEPSPEC = dict(architectures=["Qwen3DSparkModel"], target_layer_ids=[1, 34])


def config_of(changes):
    """`read_config` of a format, for heads of a model with 36 layers."""
    raw = layers_of("eagle3") | dict(block_size=8, mask_token_id=96)
    if "speculators_model_type" in changes:
        raw |= dict(transformer_layer_config=layers_of("eagle3") | changes.get("layers", {}))
    is_eagle3 = changes.get("architectures", [""])[0].startswith(("Llama", "Eagle3"))
    return read_config(raw | changes, GPTConfig(vocab_size=128, n_embd=64, n_layer=36), is_eagle3)


@pytest.mark.parametrize("changes, layers, want", [  # layers: how many blocks run before each state
    (EAGLE3 | {IDS: [3, 0, 36]}, (3, 0, 36), dict(n_draft=7)),
    (EAGLE3 | dict(speculators_config=dict(proposal_methods=[dict(speculative_tokens=3)])), (2, 18, 33),
     dict(n_draft=3)),
    (SPECFORGE | dict(eagle_config={IDS: [3, 0, 35]}), (4, 1, 36), dict(n_draft=7)),
    (SPECFORGE | dict(norm_before_residual=True), (2, 18, 33), dict(norm_before_residual=True)),
    (SPECFORGE | {IDS: [3, 0, 36]}, (3, 0, 36), dict(n_draft=7)),
    (OTHER | dict(eagle_config={IDS: [1, 5]}), (2, 6), dict(n_draft=7)),
    (dict(architectures=["Eagle3LlamaForCausalLM"]), (2, 18, 33), dict(n_draft=7)),
    (DFLASH, (0, 9), dict(n_draft=7, first=1, causal=False, markov_rank=0, mask_token=96)),
    (DFLASH | dict(sample_from_anchor=True), (0, 9), dict(n_draft=8, first=0)),
    (DSPARK | dict(markov_rank=4, markov_head_type="gated"), (0, 9), dict(n_draft=8, markov_rank=4, markov_gated=True)),
    (ZLAB | dict(dflash_config=dict(mask_token_id=5, target_layer_ids=[1, 9, 35])), (2, 10, 36),
     dict(n_draft=7, first=1, mask_token=5)),
    (ZLAB | {IDS: [4, 9]}, (4, 9), dict(mask_token=96)),
    (ZLAB | dict(dflash_config=dict(block_size=4, causal_head=True)), (2, 35), dict(n_draft=3, causal=True)),
    (DEEPSPEC | dict(target_layer_ids=None, dspark_target_layer_ids=[7]), (8,), dict(first=0)),
    (DEEPSPEC | dict(markov_rank=2, markov_head_type="vanilla"), (2, 35), dict(n_draft=8, first=0, markov_rank=2)),
], ids=str)
def test_layers_and_options_of_each_format(changes, layers, want):
    """Bug: layers wrong by one, which costs acceptance and nothing else would show; a draft of a token more or less,
    predictions read a row too early, another head's option."""
    config = config_of(changes)
    assert config.hidden_layers == layers and {name: getattr(config, name) for name in want} == want


@pytest.mark.parametrize("changes, says", [
    (dict(speculators_model_type="mtp"), "'mtp' is not supported; supported: eagle3"),
    (dict(architectures=["Qwen3ForCausalLM"]), "'Qwen3ForCausalLM' is not supported"),
    (ZLAB | dict(target_layer_ids=None), "which layers the heads read"),
    (SPECFORGE | dict(vocab_size=98), "belong to a model of vocab_size 98, not 128"),
    (SPECFORGE | dict(num_hidden_layers=2), "only EAGLE-3 with one layer"),
    (SPECFORGE | dict(norm_output=True), "norm_output: only supported in the format of speculators"),
    (EAGLE3 | {IDS: [37]}, "from 0 to 36, not 37"),
    (dict(speculators_model_type="dflash", layers=dict(layer_types=["sliding_attention"])), "sliding windows"),
    (DSPARK | dict(markov_rank=4, markov_head_type="rnn"), "markov_head_type 'rnn' is not supported"),
    (DFLASH | dict(mask_token_id=128), "mask_token_id must be a whole number from 0 to 127, not 128"),
    (DFLASH | dict(block_size=1), "draft tokens must be a whole number from 1"),
    (SPECFORGE | dict(model_type="gpt2"), "model_type 'gpt2' is not supported")], ids=str)
def test_heads_that_do_not_fit_are_refused(changes, says):
    refusal(lambda: config_of(changes), says)


def test_broken_files_are_refused(tmp_path):
    """Bug: a traceback, or heads with random weights; the model's own embeddings take their memory again."""
    weights = weights_of("eagle3")
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    model = base_of(weights, ids)

    def changed(change, **config):
        raw, tensors = speculators("eagle3", dict(weights), ids)
        change(tensors)
        (tmp_path / "config.json").write_text(json.dumps(raw | config))
        save_file(tensors, tmp_path / "model.safetensors")
        return load_heads(tmp_path, model)
    refused = lambda change, *says, **config: refusal(lambda: changed(change, **config), tmp_path, *says)
    assert changed(lambda x: x).embed is None
    assert changed(lambda x: x.update({"embed_tokens.weight": -x["embed_tokens.weight"]})).embed is not None
    layers = speculators("eagle3", dict(weights), ids)[0]["transformer_layer_config"]
    assert changed(lambda x: x, **layers, architectures=None, speculators_model_type=None).hidden_layers == (0, 1, 2)
    other = layers | dict(architectures=["LlamaForCausalLM"], speculators_model_type=None)
    assert changed(lambda x: x, **other).hidden_layers == (0, 1, 2)
    refused(lambda x: x.pop("layers.0.hidden_norm.weight"), "'LlamaForCausalLM' is not supported", **other)
    refused(lambda x: x.pop("fc.weight"), "the weights lack fc.weight")
    refused(lambda x: x.update(extra=torch.ones(2)), "no 'extra'")
    refused(lambda x: x.update({"norm.weight": torch.ones(63)}), "norm.weight", "(64,)", "(63,)")
    refused(lambda x: x.pop("d2t"), "expected the 96 tokens of a draft vocabulary", "got 0 in d2t")
    refused(lambda x: x, "a value is missing or has the wrong type", speculators_config=[1])
    refused(lambda x: x.update(d2t=x["d2t"] + 90), "d2t has token ids outside 0..127, or one twice")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refusal(lambda: load_heads(tmp_path, model), "only read from safetensors")
    model.head = VocabParallelHead(model.head, Group(), 128)
    refusal(lambda: load_heads(tmp_path, model), "only run in one process")
