"""Draft heads in other projects' formats, made by these tests."""

from functools import cache, partial
from itertools import cycle, product
from tempfile import TemporaryDirectory

import pytest
import torch

from backends import cpu
from conftest import ToyGrammar, needs_compiler, random_prompts, toy_model
from drafters.eagle3 import Eagle3Heads
from drafters.published import Eagle3Config
from engine.batching import Engine
from engine.policy import Policy
from generate import Fixed, Sampling, prepare
from hf import checkpoint
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
    heads = Eagle3Heads(config, model)
    generator = torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        p.data.normal_(0, 0.3, generator=generator).add_(p.dim() == 1)
    if vocabulary:
        heads.vocabulary.copy_(torch.randperm(97, generator=generator)[:vocabulary])
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
KINDS = {"eagle3": random_eagle3, "eagle3 of 33 tokens": partial(random_eagle3, vocabulary=33, norm_output=True)}
BASES = "packed", "packed bfloat16", "int4", "torch"
# every combination in turn with some of the others
DECODED = [*zip(product((1, 8), (5, 17, None), MODES), cycle(product(KINDS, BASES)))]


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
    """Weights of heads that have learnt how the toy model continues the prompts, so that guesses are accepted."""
    model = base("torch")
    heads = KINDS[kind](model).requires_grad_(True)
    texts = [torch.tensor([prompt + text]) for prompt, text in zip(PROMPTS, plainly("torch", "greedy"))]
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
    assert tree_size is None or output.steps < (0.75 if mode == "greedy" and kind == "eagle3" else 1) * output.emitted


def test_heads_read_the_same_in_any_slot():
    """Bug: rows of a cancelled sequence, of drafts, or of a prefix's other successor, which only cost acceptance."""
    model = base("torch")
    heads = random_eagle3(model)
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
