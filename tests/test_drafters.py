"""Draft heads in other projects' formats, made by these tests."""

import json
from functools import cache, partial
from itertools import cycle, product
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import save_file

from backends import cpu
from conftest import ToyGrammar, needs_compiler, random_prompts, refusal, toy_model
from drafters.block import BlockHeads
from drafters.eagle3 import Eagle3Heads
from drafters.published import BlockConfig, Eagle3Config
from engine.batching import Engine
from engine.policy import Policy
from generate import Fixed, Sampling, prepare
from hf import checkpoint
from hf.heads import load_heads
from hf.published import read_config
from kernels import gumbel
from model import GPTConfig, add


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


def random_eagle3(model, n_draft=5, vocabulary=0, seed=0, layers=(), weights=None, **switches):
    """EAGLE-3 heads with random weights for a toy model, of other sizes than its layers."""
    sizes = dict(n_layer=1, n_head=6, n_kv_head=3, n_inner=80, rope_theta=500.0, norm_eps=1e-3)
    sizes |= dict(vocab_size=97, n_embd=64, head_size=16, block_size=model.config.block_size)
    own = GPTConfig(**sizes | dict(layers))
    config = Eagle3Config(own, n_draft, (1, 2, 0), vocabulary, own_head=True, **switches)
    return with_weights(Eagle3Heads(config, model), weights, seed)


def random_blocks(model, n_draft=5, vocabulary=0, weights=None, **switches):
    """Likewise DFlash's, JetSpec's or DSpark's, with two layers."""
    sizes = dict(n_layer=2, n_head=6, n_kv_head=3, n_inner=80, rope_theta=500.0, norm_eps=1e-3, qk_norm="head")
    own = GPTConfig(**sizes, vocab_size=97, n_embd=64, head_size=16, block_size=model.config.block_size)
    config = BlockConfig(own, n_draft, (1, 2, 0), vocabulary, own_head=True, mask_token=96, **switches)
    return with_weights(BlockHeads(config, model), weights)


def with_weights(heads, weights=None, seed=0):
    """Heads with these or random weights, ready to draft."""
    generator = torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        p.data.normal_(0, 0.3, generator=generator).add_(p.dim() == 1)
    if heads.vocabulary is not None:
        heads.vocabulary.copy_(torch.randperm(97, generator=generator)[:len(heads.vocabulary)])
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
    heads = random_eagle3(model, **switches)
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
    candidates = heads.draft(states[slots], root, 64, beams, cache=cache.select(slots))
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

N = 16  # new tokens
PROMPTS = random_prompts([7, 1, 30, 2, 40, 12, 3, 18])
MODES = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.9, seed=3), "schema": Sampling(0.8, seed=5)}
EAGLES = {"eagle3": random_eagle3, "eagle3 of 33 tokens": partial(random_eagle3, vocabulary=33, norm_output=True)}
BLOCKS = {"dspark": partial(random_blocks, markov_rank=97, first=0), "dflash": random_blocks,
          "jetspec": partial(random_blocks, causal=True, vocabulary=33)}
KINDS = EAGLES | BLOCKS
BASES = "packed", "packed bfloat16", "int4", "torch"
# every combination in turn with some of the others
DECODED = [case for kinds in (EAGLES, BLOCKS)
           for case in zip(product((1, 8), (5, 17, None), MODES), cycle(product(kinds, BASES)))]


@cache
def base(name):
    """A toy model for decoding."""
    model = toy_model(n_layer=3)
    if name == "int4":
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return checkpoint.load(folder, device="cpu", quantize="int4")
    if name != "torch":
        model = model.to(torch.bfloat16 if "bfloat16" in name else torch.float32)
        cpu.apply(model)
    return model


@cache
def plainly(name, mode):
    """The tokens of each prompt, decoded by its own engine."""
    texts = []
    for index, prompt in enumerate(PROMPTS):
        engine = prepare(base(name), [prompt], N, tree_size=1, **vars(MODES[mode]))
        sequence = engine.add(prompt, N, index=index, grammar=ToyGrammar() if mode == "schema" else None)
        while engine.busy:
            engine.step()
        texts.append(sequence.tokens)
    return texts


@cache
def taught(kind):
    """Weights of heads that have learnt how the toy model continues the prompts, so that guesses are accepted: EAGLE-3
    by training, DSpark by its bias, which counts pairs of tokens."""
    model = base("torch")
    heads = KINDS[kind](model)
    texts = [torch.tensor([prompt + text]) for prompt, text in zip(PROMPTS, plainly("torch", "greedy"))]
    if kind == "dspark":
        counts = torch.zeros(97, 97)
        for text in texts:
            counts[text[0, 1:], text[0, :-1]] += 10.0
        return heads.state_dict() | {"markov_w1.weight": torch.eye(97), "markov_w2.weight": counts}
    if kind in BLOCKS:
        return None
    heads.requires_grad_(True)
    hidden = torch.cat([model(text, layers=heads.hidden_layers)[:, :-2] for text in texts], dim=1)
    after, later = (torch.cat([text[:, i:len(text[0]) - 2 + i] for text in texts], dim=1) for i in (1, 2))
    rows = torch.full((97,), -100)
    rows[slice(None) if heads.vocabulary is None else heads.vocabulary.long()] = torch.arange(heads.head.out_features)
    optimizer = torch.optim.Adam(heads.parameters(), 3e-3)
    for _ in range(40):
        logits = heads.head(heads.norm(heads.augment(hidden, after)))
        torch.nn.functional.cross_entropy(logits[0], rows[later[0]]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach() for name, x in heads.state_dict().items()}


@pytest.mark.parametrize("options, rest", DECODED, ids=str)
def test_output_is_that_of_plain_decoding(options, rest):
    """Bug: a wrong guess accepted, a committed row that a draft overwrote, a batch that shifts heads' rows."""
    (batch_size, tree_size, mode), (kind, name) = options, rest
    if name != "torch" and cpu.library() is None:
        pytest.skip("is only exact with a C compiler, such as gcc")
    model = base(name)
    heads = KINDS[kind](model, weights=taught(kind))
    grammars = [ToyGrammar() if mode == "schema" else None] * len(PROMPTS)
    policy = Policy(model, heads, mode == "sampled", tree_size, schema=mode == "schema")
    engine = Engine(model, policy=policy, batch_size=batch_size, capacity=60 + N)
    output = engine.generate(PROMPTS, N, sampling=[MODES[mode]] * len(PROMPTS), grammars=grammars)
    assert output.tokens == plainly(name, mode)
    is_taught = mode == "greedy" and kind in ("eagle3", "dspark")
    assert tree_size is None or output.steps < (0.75 if is_taught else 1) * output.emitted


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_heads_read_the_same_in_any_slot(kind):
    """Bug: rows of a cancelled sequence, of drafts, or of a prefix's other successor, which only cost acceptance."""
    model = base("torch")
    heads = KINDS[kind](model)
    new = lambda n: Engine(model, policy=Fixed(model, heads, True, 9), batch_size=n, capacity=200)
    used, (first, second, third) = new(2), random_prompts([40, 9, 25])
    cancelled = [used.add(prompt, 50) for prompt in (first, second)]
    for _ in range(6):
        used.step()
    for sequence in cancelled:
        used.cancel(sequence)
    for prompt in (first + cancelled[0].tokens[:5] + third, first[:30] + third, third):
        fresh = new(1)
        sequences = [fresh.add(prompt, 60), used.add(prompt, 60), used.add(second, 60)]
        for _ in range(8):
            fresh.step()
            used.step()
        alone, beside = (engine.decoder.slots for engine in (fresh, used))
        slot = sequences[1].slot
        assert sequences[0].tokens[:9] == sequences[1].tokens[:9] != []
        rows = alone.cache.lengths[0]
        assert rows == beside.cache.lengths[slot]
        a, b = (kv[:, :, i, :, :rows] for kv, i in ((alone.heads_cache.kv, 0), (beside.heads_cache.kv, slot)))
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(alone.state[0], beside.state[slot], atol=1e-3, rtol=1e-3)
        used.cancel(sequences[1])
        used.cancel(sequences[2])


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_the_samplers(kind):
    """Bug: the noise of another position, sequence or token, which only costs acceptance."""
    heads = KINDS[kind](base("torch"))
    root, lengths = torch.tensor([5, 8, 1]), torch.tensor([3, 0, 20], dtype=torch.int32)
    cache = heads.new_cache(3, 100)
    cache.lengths.copy_(lengths)
    key = torch.tensor([7, 7, 9]), torch.tensor([0, 4, 1])
    sampling = torch.full((3,), 1e6), *key, lengths  # so hot that only the noise counts
    candidates = heads.draft(torch.ones(3, 64), root, 20, 1, sampling, cache=cache)
    ids = torch.arange(97) if heads.vocabulary is None else heads.vocabulary
    for depth in range(5):
        noise = gumbel(*key, lengths + depth + 1, ids)
        assert torch.equal(candidates.tokens[:, depth, 0], ids[noise.argmax(-1)].long())


# ---------------------------------------------------------------------------------------------------------------------
# Loading

def stored(heads):
    """{name in a checkpoint: weight} of EAGLE-3 heads that are not packed."""
    c = heads.config.layers
    weights = dict(heads.state_dict())
    q, k, v = weights.pop("blocks.0.attn.qkv.weight").split([n * c.head_size for n in (c.n_head, *[c.n_kv_head] * 2)])
    gate, up = weights.pop("blocks.0.mlp.up.weight").chunk(2)
    names = {"q_proj": q, "k_proj": k, "v_proj": v}
    tensors = {f"layers.0.self_attn.{name}.weight": x for name, x in names.items()}
    tensors |= {"layers.0.mlp.gate_proj.weight": gate, "layers.0.mlp.up_proj.weight": up}
    renamed = {"attn_norm": "input_layernorm", "attn.proj": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
               "mlp.down": "mlp.down_proj", "hidden_norm": "hidden_norm"}
    for ours, theirs in renamed.items():
        tensors[f"layers.0.{theirs}.weight"] = weights.pop(f"blocks.0.{ours}.weight")
    ids = weights.pop("vocabulary", None)
    if ids is not None:
        tensors |= dict(d2t=ids.long() - torch.arange(len(ids)), t2d=torch.zeros(97, dtype=torch.bool))
    renamed = {"head.weight": "lm_head.weight", "embed.weight": "embed_tokens.weight"}
    return tensors | {renamed.get(name, name): x for name, x in weights.items()}


def layers_json(config, **changes):
    """config.json of layers with these sizes."""
    c = config
    return dict(model_type="llama", vocab_size=97, hidden_size=64, num_hidden_layers=c.n_layer,
                intermediate_size=c.n_inner, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
                head_dim=c.head_size, hidden_act="silu", rms_norm_eps=c.norm_eps, max_position_embeddings=99,
                rope_theta=c.rope_theta) | changes


def speculators(layers, kind="eagle3", **changes):
    methods = [dict(proposal_type="greedy", speculative_tokens=5)]
    return dict(speculators_model_type=kind, transformer_layer_config=layers, architectures=["Other"],
                eagle_aux_hidden_state_layer_ids=[1, 2, 0], speculators_config=dict(proposal_methods=methods)) | changes


def specforge(layers, **changes):
    return layers | dict(architectures=["LlamaForCausalLMEagle3"], eagle_config=dict(
        eagle_aux_hidden_state_layer_ids=[0, 1, -1], use_aux_hidden_state=True)) | changes


def write(path, config, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, path / "model.safetensors")
    return path


FORMATS = {
    "speculators": lambda own, tensors: (
        speculators(layers_json(own, rope_theta=None, rope_parameters=dict(rope_theta=500.0, rope_type="default")),
                    draft_vocab_size=33, fc_norm=True, norm_output=True, norm_before_residual=True),
        tensors | {"verifier_norm.weight": torch.ones(64), "embed_tokens.weight": base("torch").embed.weight}),
    "SpecForge": lambda own, tensors: (
        specforge(layers_json(own), draft_vocab_size=33),
        {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}),
    "full vocabulary": lambda own, tensors: (
        speculators(layers_json(own), norm_before_fc=True), tensors | {"lm_head.weight": base("torch").head.weight})}


@pytest.mark.parametrize("name", FORMATS)
def test_eagle3_is_read_from_each_format(name, tmp_path):
    """Bug: queries for keys, another option, RoPE or epsilon than the heads', token ids that are offsets, embeddings
    that are the model's and take their memory again."""
    model = base("torch")
    switches = {"speculators": dict(vocabulary=33, fc_norm=True, norm_output=True, norm_before_residual=True),
                "SpecForge": dict(vocabulary=33, n_draft=7), "full vocabulary": dict(norm_before_fc=True)}[name]
    heads = random_eagle3(model, **switches)
    if name == "full vocabulary":
        heads.head = None
    folder = write(tmp_path, *FORMATS[name](heads.config.layers, stored(heads)))
    same = load_heads(str(folder), model)
    assert same.hash and same.n_draft == heads.n_draft and (same.embed, same.head is None) == (None, heads.head is None)
    tokens = torch.tensor(random_prompts([20]))
    hidden = model(tokens, layers=heads.hidden_layers)[:, :-1]
    drafts = []
    for each in (heads, same):
        cache = each.new_cache(1, 90)
        state = each.augment(hidden, tokens[:, 1:], cache=cache)[:, -1]
        cache.lengths += 19
        drafts.append(each.draft(state, tokens[:, -1], 20, 3, cache=cache))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    torch.testing.assert_close(drafts[0].joint, drafts[1].joint)


READ = [  # config.json, of a model with 36 layers -> how many blocks run before each state
    (dict(speculators_model_type="eagle3", eagle_aux_hidden_state_layer_ids=[3, 0, 36]), (3, 0, 36)),
    (dict(speculators_model_type="eagle3"), (2, 18, 33)),
    (dict(architectures=["LlamaForCausalLMEagle3"], eagle_config=dict(eagle_aux_hidden_state_layer_ids=[3, 0, 35])),
     (4, 1, 36)),
    (dict(architectures=["LlamaForCausalLMEagle3"]), (2, 18, 33)),
    (dict(speculators_model_type="dflash", aux_hidden_state_layer_ids=[0, 9]), (0, 9)),
    (dict(speculators_model_type="dspark", aux_hidden_state_layer_ids=[0, 9]), (0, 9)),
    (dict(architectures=["DFlashDraftModel"], dflash_config=dict(mask_token_id=5, target_layer_ids=[1, 9, 35])),
     (2, 10, 36)),
    (dict(architectures=["DFlashDraftModel"], num_hidden_layers=5), (2, 10, 18, 26, 34)),
    (dict(architectures=["DFlashDraftModel"], num_hidden_layers=2), (2, 34)),
    (dict(architectures=["DFlashDraftModel"], num_hidden_layers=1), (19,)),
    (dict(architectures=["Qwen3DSparkModel"], target_layer_ids=[1, 34]), (2, 35))]


def config_of(changes):
    """`read_config` of a format, for the toy's sizes and 36 layers."""
    own = GPTConfig(vocab_size=97, n_embd=64, n_layer=1, head_size=16)
    raw = layers_json(own) | dict(block_size=8, mask_token_id=96)
    if "speculators_model_type" in changes:
        raw |= dict(transformer_layer_config=layers_json(own, **changes.get("layers", {})))
    return read_config(raw | changes, GPTConfig(vocab_size=97, n_embd=64, n_layer=36))


@pytest.mark.parametrize("changes, want", READ, ids=str)
def test_the_layers_that_each_format_names(changes, want):
    """Bug: layers wrong by one, which costs acceptance and nothing else would show."""
    assert config_of(changes).hidden_layers == want


@pytest.mark.parametrize("changes, want", [
    (READ[4][0], dict(n_draft=7, first=1, causal=False, markov_rank=0, mask_token=96)),
    (READ[4][0] | dict(sample_from_anchor=True), dict(n_draft=8, first=0)),
    (READ[5][0] | dict(markov_rank=4, markov_head_type="gated"), dict(n_draft=8, markov_rank=4, markov_gated=True)),
    (READ[6][0], dict(n_draft=7, first=1, mask_token=5)),
    (READ[6][0] | dict(dflash_config=dict(block_size=4, mask_token_id=3, causal_head=True)),
     dict(n_draft=3, first=1, causal=True, mask_token=3)),
    (READ[10][0] | dict(markov_rank=2, markov_head_type="vanilla"), dict(n_draft=8, first=0, markov_rank=2)),
    (READ[0][0] | dict(speculators_config=dict(proposal_methods=[dict(speculative_tokens=3)])), dict(n_draft=3)),
    (READ[2][0] | dict(norm_before_residual=True), dict(n_draft=7, norm_before_residual=True))], ids=str)
def test_options_of_each_format(changes, want):
    """Bug: a draft of a token more or less, predictions read a row too early, another head's option."""
    config = config_of(changes)
    assert {name: getattr(config, name) for name in want} == want


@pytest.mark.parametrize("changes, says", [
    (dict(speculators_model_type="mtp"), "'mtp' is not supported; supported: eagle3"),
    (dict(architectures=["LlamaForCausalLM"]), "'LlamaForCausalLM' is not supported"),
    (READ[2][0] | dict(vocab_size=98), "belong to a model of vocab_size 98, not 97"),
    (READ[2][0] | dict(hidden_size=128), "belong to a model of n_embd 128, not 64"),
    (READ[2][0] | dict(num_hidden_layers=2), "only EAGLE-3 with one layer"),
    (READ[2][0] | dict(norm_output=True), "norm_output: only supported in the format of speculators"),
    (dict(speculators_model_type="eagle3", eagle_aux_hidden_state_layer_ids=[37]), "from 0 to 36, not 37"),
    (dict(speculators_model_type="dflash", layers=dict(layer_types=["sliding_attention"])), "sliding windows"),
    (READ[5][0] | dict(markov_rank=4, markov_head_type="rnn"), "markov_head_type 'rnn' is not supported"),
    (READ[4][0] | dict(mask_token_id=97), "mask_token_id must be a whole number from 0 to 96, not 97"),
    (READ[4][0] | dict(block_size=1), "draft tokens must be a whole number from 1"),
    (READ[2][0] | dict(model_type="gpt2"), "model_type 'gpt2' is not supported")], ids=str)
def test_heads_that_do_not_fit_are_refused(changes, says):
    refusal(lambda: config_of(changes), says)


def test_broken_files_are_refused(tmp_path):
    """Bug: a traceback, or heads with random weights."""
    model = base("torch")
    heads = random_eagle3(model, vocabulary=33)

    def refused(change, *says, config=()):
        tensors = stored(heads)
        change(tensors)
        raw = speculators(layers_json(heads.config.layers), draft_vocab_size=33) | dict(config)
        refusal(lambda: load_heads(write(tmp_path, raw, tensors), model), str(tmp_path), *says)
    refused(lambda x: x.pop("fc.weight"), "the weights lack fc.weight")
    refused(lambda x: x.update(extra=torch.ones(2)), "no extra")
    refused(lambda x: x.update({"norm.weight": torch.ones(63)}), "norm.weight", "(64,)", "(63,)")
    refused(lambda x: x.pop("d2t"), "expected the 33 tokens of a draft vocabulary", "got 0 in d2t")
    refused(lambda x: None, "a value is missing or has the wrong type", config=dict(speculators_config=[1]))
    refused(lambda x: x["d2t"].fill_(90), "d2t has token ids outside 0..96, or one twice")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refusal(lambda: load_heads(tmp_path, model), "only read from safetensors")
