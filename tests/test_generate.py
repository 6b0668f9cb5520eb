"""generate.py: the Decoder's steps, sampling, stops, bad input, CUDA graphs, slots and cached prefixes."""

import inspect
import math
import weakref
from collections import defaultdict
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import generate as module
from backends import cpu
from backends.capture import warm_up
from backends.gpu import GraphDecoder
from bench.timing import stage_times, timing_decoder
from clover import BINS, PRESETS
from common import machine
from conftest import MODELS, SHAPES, needs_compiler, needs_cuda, random_prompts, refusal, slow, toy_model
from engine import batching
from engine.batching import Engine
from engine.policy import Policy
from generate import Output, Plan, Sampling, StepResult, decoder_class, generate
from hf.tokenizer import load_encoding
from kernels import filter_logits, gumbel
from model import GPT
from test_clover import random_heads
from tools.statistics import Statistics


def new_engine(model, heads=None, *, tree_size=1, lookup=False, policy=None, ahead=0, reads_prompts=False, **options):
    """An Engine with trees of this size (None: chosen by the policy) or with this policy. As on a GPU, `ahead` steps
    are in flight while the host reads an older one, and steps read prompts if `reads_prompts`."""
    decoder = model.decoder
    model.decoder = GraphDecoder if reads_prompts else decoder
    try:
        made = Engine(model, policy=policy or Policy(model, heads, lookup, tree_size), **options)
    finally:
        model.decoder = decoder
    made.ahead = max(made.ahead, ahead)
    return made


@cache
def load(name, compiled, device="cpu", **flags):
    """(toy model, heads or None), packed for the C kernels if `compiled`."""
    model = toy_model(**flags).to(device)
    heads = random_heads(model, name).to(device) if name else None
    if compiled:
        cpu.apply(model, heads)
    if device == "cuda":
        model.decoder = GraphDecoder
    return model, heads


either_decoder = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)],
                                         ids=["anywhere", "compiled"])

PROMPTS = random_prompts([7, 1, 30, 2, 90, 12, 3, 18])
SAMPLED = dict(temperature=0.9, seed=3)
FILTERED = dict(temperature=0.7, top_k=20, top_p=0.8, seed=2**40)
WAYS = {"greedy": dict(), "sampled": SAMPLED, "filtered": FILTERED}


def test_statistics_are_those_of_the_emitted_tokens():
    """Bug: guesses after the end of a sequence, a head named after another depth, steps of two sizes mixed up."""
    counted, lookup = Statistics(), BINS + 2
    for tokens, sources, T in (([5, 6, 7], [-1, 3, lookup], 4), ([8], [-1], 1), ([9], [-1, lookup, 3], 4),
                               ([5, 6, 7], [-1, 0, 3], 9)):
        counted.count(StepResult(None, tokens, [*range(len(sources))], sources, T))
    assert counted.accepted == {"head 1": 2, "lookup": 2, "head 2": 1} and counted.steps == 4
    assert counted.step_lengths == {3: 2, 1: 2} and counted.sizes == {4: [2, 4], 1: [1, 1], 9: [1, 3]}
    assert counted.tree_size == 18 / 4


ALL = (9, 4), (None, 4), (1, 0), (64, 4), (7, 0), (10, 4), (2, 1), (21, 0), (None, 1)


class Cycling(Policy):
    """Cycles through those options (T, heads that draft) that the heads and the Decoder support. seconds: T -> the
    seconds of its steps."""

    def __init__(self, model, heads, options=ALL):
        super().__init__(model, heads, True, 64)
        chooses_size = decoder_class(model, heads).chooses_size
        self.options = [(T, depths) for T, depths in options if (heads or not depths) and (T or chooses_size)]
        self.reading_options = self.options
        self.seconds = defaultdict(list)

    def select(self, B, **details):
        super().select(B)
        return self.options[self.steps // 2 % len(self.options)]  # each twice, so that an option may follow itself

    def learn(self, step, results):
        super().learn(step, results)
        self.seconds[step.tree_size].append(step.seconds)


def test_a_steps_seconds_are_its_own(toy, monkeypatch):
    """Bug: a duration that includes prefill or work on the host, or that of the first step of its kind."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[-1])
    for owner, name, seconds in (GPT, "prefill", 100), (module.Sequence, "take", 10), (module.Decoder, "step", 1):
        slower = lambda *args, call=getattr(owner, name), by=seconds: clock.append(clock[-1] + by) or call(*args)
        monkeypatch.setattr(owner, name, slower)
    policy = Cycling(toy, None, [(1, False)])
    new_engine(toy, batch_size=2, capacity=150, policy=policy).generate(PROMPTS, 24)
    seconds, = policy.seconds.values()
    assert seconds == [None] + [1] * (len(seconds) - 1) and len(seconds) > 90


@pytest.mark.parametrize("options", [dict(temperature=1.3), dict(temperature=0.8, top_k=6),
                                     dict(temperature=1.0, top_p=0.7)], ids=["temperature", "top-k", "top-p"])
def test_samples_are_those_of_the_documented_formula(options):
    """Bug: a temperature, filter or argument of the noise that is another; acceptance that favours drafted tokens."""
    model = toy_model(vocab_size=11, scale=2.0)
    texts = generate(model, [[3]] * 60, 4, random_heads(model), tree_size=6, batch_size=20, seed=11, **options).tokens
    for index, n in product(range(60), range(4)):
        logits = model.lm_head(model(torch.tensor([[3, *texts[index][:n]]]))[:, -1]) / options["temperature"]
        noise = gumbel(11, torch.tensor([index]), torch.tensor([1 + n]), torch.arange(11))
        filtered = filter_logits(logits, options.get("top_k", 0), options.get("top_p", 1.0))
        assert texts[index][n] == (filtered + noise).argmax()
    assert len({*map(tuple, texts)}) > 30


def test_filters_equal_a_plain_filter():
    """Bug: a nucleus one token too short or long, an empty row, min-p relative to the sum instead of the maximum."""
    generator = torch.Generator().manual_seed(0)
    for top_k, top_p, min_p in [(0, 0.5, 0), (3, 1.0, 0), (5, 0.6, 0), (1, 1.0, 0), (0, 1e-9, 0), (50, 0.99, 0),
                                (0, 1.0, 0), (0, 1.0, 0.1), (0, 1.0, 0.5), (0, 1.0, 1), (3, 1.0, 0.01), (0, 0.9, 0.1)]:
        logits = torch.randn(6, 20, generator=generator) * 3
        for row, kept in zip(logits, filter_logits(logits, top_k, top_p, min_p)):
            order = sorted(range(20), key=lambda t: -row[t])[:top_k or 20]
            mass, want, total = 0.0, set(), sum(math.exp(row[t]) for t in order)
            for token in order:
                if (mass < top_p or not want) and math.exp(row[token] - row[order[0]]) >= min_p * (1 - 1e-6):
                    want.add(token)
                mass += math.exp(row[token]) / total
            assert {t for t in range(20) if kept[t] > -math.inf} == want
            assert torch.equal(kept[list(want)], row[list(want)])


def test_stops_in_decoding(checkpoint):
    """Bug: a stop that only plain decoding finds, tokens of a path after it, a wrong `ended`, tokens lost."""
    model, encoding = GPT.from_pretrained(checkpoint, device="cpu", packed=False), load_encoding(checkpoint)
    prompts = [encoding.encode(text) for text in ("abc", "x", "import")]
    whole = generate(model, prompts, 40)
    assert whole.ended == ["length"] * 3
    character = next(c for c in encoding.decode(whole.tokens[1])[2:] if c != "\ufffd")
    for heads, tree_size in ((None, 1), (random_heads(model), 9)):
        for stop in (whole.tokens[1][12], character):
            heard = [[], [], []]
            out = generate(model, prompts, 40, heads, tree_size=tree_size, stop=stop, encoding=encoding,
                           on_tokens=lambda i, tokens: heard[i].extend(tokens))
            tokens = out.tokens[1]
            assert heard == out.tokens
            assert out.ended[1] == "stop" and tokens == whole.tokens[1][:len(tokens)] and len(tokens) < 40
            text = encoding.decode if stop == character else list
            assert stop in text(tokens) and stop not in text(tokens[:-1])


@either_decoder
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_decoding_to_the_end_of_the_context(shape, compiled):
    """Bug: a tree that exceeds the cache or the positions at the end; a packed model whose tables cannot grow."""
    (model, heads), prompts = load("clover", compiled, block_size=40, **SHAPES[shape]), random_prompts([39, 30, 5])
    want = generate(model, prompts, 1000)
    got = generate(model, prompts, 1000, heads, lookup=True, tree_size=33)
    assert [len(t) for t in want.tokens] == [1, 10, 35] and got.tokens == want.tokens
    assert got.ended == want.ended == ["context"] * 3


BAD_CALLS = [("prompt", [], "at least one"), ("prompt", [[1], []], "prompt 1 has"), ("prompt", [[97]], "outside 0..96"),
             *((name, value, name.replace("_", " ")) for name, value in dict(
                 max_new_tokens=0, temperature=-1e-40, tree_size=0, beams=0, batch_size=-1).items()),
             ("top_p", 1.1, "top_p"), ("top_k", -2, "top_k"), ("stop", ["end"], "encoding="), ("stop", [1.5], "1.5"),
             ("grammar", [None] * 3, "for each prompt, here 1")]


@pytest.mark.parametrize("name, value, says", BAD_CALLS)
def test_bad_calls_are_refused_in_one_line(toy, name, value, says):
    """Bug: an error deep inside; an argument that is dropped in silence."""
    options = dict(prompts=[[1, 2]], max_new_tokens=5, heads=random_heads(toy))
    refusal(lambda: generate(toy, **options | {name.replace("prompt", "prompts"): value}), says)


def test_tensors_and_arrays_are_token_ids(toy):
    """Bug: a prompt as a tensor or an array that is refused, numpy's integers as stop ids that ask for a folder."""
    ids, stop = torch.tensor([[5, 6, 7], [8, 9, 3]]), generate(toy, [[5, 6, 7]], 20).tokens[0][7]
    want = generate(toy, ids.tolist(), 20, stop=stop).tokens
    for prompts, ends in ((ids, torch.tensor([stop])), ([ids[0].int(), ids[1].numpy()], np.int64(stop)),
                          ([[*x.numpy()] for x in ids], [np.int32(stop)])):
        assert generate(toy, prompts, 20, stop=ends).tokens == want
        assert module.Engine(toy).generate(prompts, 20, ends).tokens == want
    for prompt in (ids, ids[0].float(), ids[0, 0]):
        refusal(lambda: generate(toy, [prompt], 5), "prompt 0 must be a list of token ids")


def test_a_prompt_that_cannot_be_read_costs_no_slot(toy, monkeypatch):
    """Bug: after an error in prefill the next call waits for a slot for ever; a prompt that fails in its first step or,
    without a sampling, is dropped; a cycle of references that keeps the caches until garbage is collected."""
    made = new_engine(toy, random_heads(toy), tree_size=5, capacity=50)
    gone = weakref.ref(made)
    made.generate([[4, 5]], 5)
    del made
    assert gone() is None
    made = module.Engine(toy, capacity=50)
    refusal(lambda: made.add([1], 5, index=2**63), "index must be a whole number from")
    refusal(lambda: made.generate([[1], [2]], 5, sampling=[Sampling()]), "one for each prompt, here 2")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(GPT, "prefill", lambda *_: (_ for _ in ()).throw(MemoryError))
        made.generate([[1, 2, 3]], 5)
    assert made.generate([[1, 2, 3]], 5).tokens == generate(toy, [[1, 2, 3]], 5).tokens


@needs_compiler
def test_more_heads_than_nodes():
    """Bug: an option for more heads than a tree of LARGEST nodes has levels."""
    model = toy_model()
    heads = random_heads(model, n_draft=20)
    cpu.apply(model, heads)
    assert generate(model, PROMPTS[:2], 20, heads).tokens == generate(model, PROMPTS[:2], 20).tokens


def test_caches_that_do_not_fit_are_refused_before_allocation(toy, monkeypatch):
    """Bug: an allocation for which the system kills the process."""
    made, policy = new_engine(toy, capacity=20), Policy(toy)
    for length, new in ((30, 5), (15, 6)):
        refusal(lambda: made.generate(random_prompts([length]), new), f"{length + new} tokens does not fit an engine")
    assert len(made.generate(random_prompts([15]), 5).tokens[0]) == 5
    monkeypatch.setattr(machine, "free_memory", lambda device: 1000)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, dtype: torch.empty(*shape, device="meta", dtype=dtype)
                        if device == "meta" else pytest.fail("memory was taken"))
    refusal(lambda: new_engine(toy, policy=policy, batch_size=4, capacity=100), "4 sequences of 102 tokens",
            "a smaller batch size")


@pytest.mark.parametrize("part", ["masks", "states", "tables", "recurrent"])
def test_memory_beside_the_caches_is_counted(part, monkeypatch):
    """Bug: states that heads have yet to read, masks of grammars, position tables, or the states of recurrent layers,
    those of the last tree and the two that are kept, that are not in the check."""
    sizes = dict(masks=dict(vocab_size=3200), states=dict(n_embd=1024), tables=dict(block_size=2**16),
                 recurrent=MODELS["hybrid"])
    model = toy_model(**sizes[part])
    policy = SimpleNamespace(heads=random_heads(model, "medusa") if part == "states" else None, largest=1)
    capacity = 50_000 if part == "tables" else 100
    cache = model.new_cache(4, capacity + 2, device="meta", nodes=1)
    recurrent = cache.states and sum(x.nbytes for x in (*cache.states, *2 * cache.states.committed))
    others = dict(masks=4 * 2 * 400, states=4 * 102 * 4096, tables=(50_002 - model.n_positions) * 2 * 16 * 4,
                  recurrent=recurrent)[part]
    monkeypatch.setattr(machine, "free_memory", lambda device: cache.kv.nbytes + others - 1)
    refusal(lambda: batching.check_memory(model, policy, 4, capacity), f"4 sequences of {capacity + 2} tokens")
    monkeypatch.setattr(machine, "free_memory", lambda device: cache.kv.nbytes + others + 2000)
    batching.check_memory(model, policy, 4, capacity)


@pytest.fixture
def checked_graphs(monkeypatch):
    """Graphs that raise if memory they read was freed before a replay; torch 2.13 can check that, 2.11 cannot."""
    if "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters:
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, check_input_liveness=True))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("way, cls", [*((way, GraphDecoder) for way in WAYS), ("greedy", None), ("sampled", None)])
@pytest.mark.parametrize("name", [None, *PRESETS])
def test_a_captured_step_gives_the_eager_text_without_synchronising(name, way, cls, checked_graphs, monkeypatch):
    """Bug: a step that cannot be replayed, since a value is baked in, a buffer moved, or memory was freed by `clear`
    and reused; a synchronisation with the device."""
    (model, heads), options = load(name, False, "cuda"), WAYS[way]
    monkeypatch.setattr(model, "decoder", cls)
    stages = stage_times(timing_decoder(model, heads, 9, lookup=True, sampling=Sampling(**options)))
    assert min(stages.values()) > 0  # one graph per stage
    plain = new_engine(model, batch_size=8, capacity=150, sampling=Sampling(**options), graph=False)
    want = plain.generate(PROMPTS, 24).tokens
    for batch, tree_size, lookup in [(1, 1, False), (3, 9, False), (1, 9, True), (8, 64, True), (3, None, True)]:
        policy = Policy(model, heads, lookup, tree_size) if tree_size else Cycling(model, heads)
        made = new_engine(model, batch_size=batch, capacity=150, sampling=Sampling(**options), policy=policy)
        for _ in range(2):
            assert made.generate(PROMPTS, 24).tokens == want
            made.clear()
            junk = [torch.full((n,), 2**62, device="cuda") for n in range(1, 65) for _ in range(20)]
        warm_up(made)
        captured = {plan[1:3] for _, plan in made.decoder.graphs}
        assert captured == {*policy.reading_options} and junk
        torch.cuda.set_sync_debug_mode("error")
        try:
            for option in [*captured] * 3:
                made.decoder.launch(Plan(batch, *option, made.decoder.sampling.mode))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name, drafts", [
    (None, "cycling"), ("medusa", "heads"), ("clover", "cycling"), ("clover2", "heads")])
def test_a_cached_prefix_is_reused_and_the_output_is_the_same(name, drafts, prefilled, monkeypatch):
    """Bug: rows left over from another sequence, from a draft, or from a token with another successor."""
    model, heads = load(name, False)
    new = lambda: new_engine(model, heads, capacity=250, tree_size=9 if name else 1)
    kept = new_engine(model, capacity=250, policy=Cycling(model, heads)) if drafts == "cycling" else new()
    monkeypatch.setattr(batching, "PREFILL_CHUNK", 16)

    def check(prompt, most):
        fresh = new()
        want = fresh.generate([prompt], 12).tokens[0]
        prefilled.clear()
        assert kept.generate([prompt], 12).tokens == [want] and sum(n for _, n in prefilled) <= most
        rows = len(prompt) + len(want) - 2  # the last token has no row; the heads need its successor
        for part in ("cache", "heads_cache") if name else ("cache",):
            a, b = (getattr(engine.decoder.slots, part).kv[..., :rows, :] for engine in (kept, fresh))
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        if kept.policy.lookup:  # the whole sequence
            assert kept.decoder.slots.history[0, :rows + 1].tolist() == (prompt + want)[:rows + 1]
        return prompt + want

    text = check(random_prompts([30])[0], 29)
    for turn in random_prompts([1, 7, 40, 3], seed=3):
        text = check(text + turn, len(turn) + 1)
    # edited, shorter, the whole, another
    for other in (text[:50] + [5, 6, 7], text[:50], text[:1], text, [9] + text[1:60]):
        check(other, len(other))


@either_decoder
@pytest.mark.parametrize("name, ahead", [(None, 0), slow("clover", 0), ("clover", 1)])
def test_shared_prefixes_are_prefilled_once_per_slot(name, ahead, compiled, prefilled):
    """Bug: a prefix that an idle step or another prompt overwrote, a slot with a shorter one, a shared start."""
    model, heads = load(name, compiled)
    made = new_engine(model, heads, batch_size=4, capacity=200, tree_size=9, lookup=True, sampling=Sampling(**SAMPLED),
                      ahead=ahead)
    first, second = random_prompts([40, 50])

    def check(prompts, most):
        want = generate(model, prompts, 20, batch_size=1, **SAMPLED).tokens
        prefilled.clear()
        assert made.generate(prompts, 20).tokens == want and sum(rows * n for rows, n in prefilled) <= most
        return [prompt + tokens for prompt, tokens in zip(prompts, want)]
    a, b = check([first, second], 2 * 50)
    b, a = check([b + [5, 6], a + [7]], 6)  # each in its old slot, in reverse order
    check([a[:9] + [8] * 30, b[:9] + [9] * 70], 2 * (39 + 79))  # too little of a or b: in the slots free the longest
    check([a + [1], b + [2]], 5)
    check([first + [n] for n in range(12)], 60 * 2 + 12)  # the first prompt fills a slot, the others share it


@pytest.mark.parametrize("ahead", [slow(0), 1])
@pytest.mark.parametrize("name, lookup, T", [(None, False, 1), (None, True, None), ("clover", True, 9),
                                             ("clover2", False, 2)])
def test_prompts_read_by_steps_leave_what_prefill_leaves(name, lookup, T, ahead, prefilled):
    """Bug: a prompt's token at a wrong row, heads that miss one, a state of padding, a first token from another row,
    another sequence's chain; a prompt read a token at a time; a reused prefix read from a wrong place."""
    model, heads = load(name, False, block_size=1024)
    prompts = random_prompts([7, 1, 30, 2, 90, 300, 12, 3])
    engines = [new_engine(model, heads, lookup=lookup, tree_size=T, batch_size=3, capacity=400, reads_prompts=reads,
                          ahead=reads * ahead) for reads in (False, True)]
    engines[1].long_prompt = 128
    first, got = (engine.generate(prompts, 12) for engine in engines)
    assert got.tokens == first.tokens and got.steps <= 12 * len(prompts)
    for part in ("cache", "heads_cache") if name else ("cache",):
        kept, read = ({tuple(text): getattr(engine.decoder.slots, part).kv[:, :, slot, :, :len(text) - 2]
                       for slot, text in engine.idle.items()} for engine in engines)
        for text in kept.keys() & read.keys():
            torch.testing.assert_close(read[text], kept[text], atol=1e-4, rtol=1e-4)
        assert len(kept.keys() & read.keys()) > 1
    longer = [prompt + tokens + [5] for prompt, tokens in zip(prompts, got.tokens)]
    first = engines[0].generate(longer, 12).tokens
    prefilled.clear()
    got = engines[1].generate(longer, 12)
    assert got.tokens == first and got.batch_steps < 12 * len(prompts)
    assert sum(n for _, n in prefilled) < 300  # of all prompts only the front of the longest


@pytest.mark.parametrize("T", [1, 5, None])
def test_a_prompt_cancelled_while_it_is_read_leaves_what_was_read(T):
    """Bug: a cached prefix longer than the cache."""
    model, (prompt,) = toy_model(), random_prompts([100])
    engine = new_engine(model, lookup=True, tree_size=T, capacity=200, reads_prompts=True, ahead=1)
    sequence = engine.add(prompt, 9)
    for _ in range(2):
        engine.step()
    assert 0 < sequence.unread < 99
    engine.cancel(sequence)
    got = engine.generate([prompt], 9, sampling=[Sampling(1.0)]).tokens
    assert got == generate(model, [prompt], 9, tree_size=1, temperature=1.0).tokens and len({*got[0]}) > 3


@needs_compiler
def test_augmenting_blocks_catch_up_beside_a_full_cache():
    """Bug: a sequence near the capacity without room for the rows that another one has to catch up."""
    engine = new_engine(*load("clover", True), tree_size=2, batch_size=2, capacity=60)
    for prompt, new, T in ((range(3), 50, 1), (range(55), 5, 2)):
        engine.policy.tree_size = T
        sequence = engine.add(list(prompt), new)
        for _ in range(20 if T == 1 else 60):
            engine.step()
    assert not engine.busy and len(sequence.tokens) == 5


@either_decoder
@pytest.mark.parametrize("name", ["clover", "clover2", *map(slow, ("medusa", "hydra"))])  # these have no such blocks
def test_heads_draft_the_same_after_steps_without_them(name, compiled, monkeypatch):
    """Bug: an augmenting block that skips the rows added by plain steps, or reads them at wrong positions or from
    another slot, before the next draft or in a longer prompt; a changed output."""
    monkeypatch.setattr(batching, "PERIOD", 10**9)  # else learned chances change the trees

    def run(plain_steps):
        engine, trees = new_engine(*load(name, compiled), tree_size=9, batch_size=2, capacity=250), {}

        def note(step):
            engine.policy.tree_size = 9 if engine.policy.steps % 20 >= plain_steps else 1
            trees[step.sequence.index, len(step.sequence.prompt + step.sequence.tokens) - len(step.tokens)] = step.tree
        first = engine.generate(random_prompts([20, 30]), 60, on_step=note, with_trees=True)
        longer = [sequence.prompt + sequence.tokens + [5] * 3 for sequence in first.sequences]
        return longer, engine.generate(longer, 60, on_step=note, with_trees=True).tokens, trees
    *texts, trees = run(0)
    *same_texts, others = run(17)
    drafted = [key for key in trees if key in others and len(others[key].tokens) == 9]
    assert same_texts == texts and 8 < len(drafted) < len(others) / 2
    for key in drafted:
        assert others[key][:5] == trees[key][:5]
        assert others[key].probabilities == pytest.approx(trees[key].probabilities, rel=1e-3)


def test_an_interrupted_sequence_can_continue(monkeypatch):
    """Bug: after Ctrl-C the host counts on cache rows that do not exist."""
    model, prompt = toy_model(), random_prompts([30])[0]
    want = new_engine(model, capacity=200).generate([prompt], 100).tokens[0]
    made, calls = new_engine(model, capacity=200), []

    def interrupt(step):
        calls.append(step.tokens)
        if len(calls) == 20:
            raise KeyboardInterrupt
    output = Output()
    with pytest.raises(KeyboardInterrupt):
        made.generate([prompt], 100, on_step=interrupt, output=output)
    so_far = output.tokens[0]
    assert so_far == want[:20] and not any(made.idle.values()) and output.seconds > 0
    assert made.generate([prompt + so_far], 80).tokens[0] == want[20:]


@either_decoder
@pytest.mark.parametrize("number", range(5))
def test_a_cancelled_sequence_leaves_no_trace(compiled, monkeypatch, number):
    """Bug: a slot lost or used twice, another sequence changed, a prompt's chunk at a wrong place, or all of its chunks
    before the others' next step. Cancels sequences that run, prefill or wait."""
    prompts, (model, heads) = random_prompts([7, 200, 5, 9, 4]), load("clover", compiled)
    want = [generate(model, [prompt], 12).tokens[0] for prompt in prompts]
    monkeypatch.setattr(batching, "PREFILL_CHUNK", 32)  # a long prompt is read between the others' steps
    engine = new_engine(model, heads, tree_size=5, batch_size=2, capacity=250)
    sequences = [engine.add(prompt, 12) for prompt in prompts]
    engine.step()
    assert engine.running and engine.prefilling and engine.waiting
    for _ in range(2):
        engine.cancel(sequences[number])
    while engine.busy:
        engine.step()
    texts = [sequence.tokens if sequence.ended == "length" else sequence.ended for sequence in sequences]
    assert texts == [*want[:number], "cancelled", *want[number + 1:]]
