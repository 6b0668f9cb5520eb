"""Log-probabilities: transformers' at each accepted token, whatever drafts, samples, restricts or shares a step."""

import pytest
import torch

from backends import cpu
from conftest import ToyGrammar, needs_compiler, random_prompts
from engine import batching
from engine.guide import GuidedSequence
from generate import Sampling
from hf.tokenizer import load_encoding
from model import GPT
from test_clover import random_heads
from test_generate import new_engine
from test_hf_checkpoint import theirs_of
from test_hf_tokenizer import BYTES_IN_ORDER, EOT, save, tiny_spec
from tools.logprobs import completion_logprobs

ASKED = None, 0, 1, 3, 20, 100  # 100: of 97 tokens
SAMPLING = Sampling(), Sampling(0.9, seed=3), Sampling(0.7, top_k=20, top_p=0.8, seed=2**40)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(transformers' model, a function that loads it with heads)."""
    model, path = theirs_of("llama-tied"), tmp_path_factory.mktemp("theirs")
    model.save_pretrained(path)

    def load(packed):
        ours = GPT.from_pretrained(path, torch.float32, "cpu", packed=False)
        heads = random_heads(ours)
        if packed:
            cpu.apply(ours, heads)
        return ours, heads
    return model, load


def decode(engine, prompts, asked, grammars):
    sequences = [GuidedSequence(engine.decoder.model.config, prompt, 12, SAMPLING[i % 3], index=i, grammar=grammar,
                                top_logprobs=top)
                 for i, (prompt, top, grammar) in enumerate(zip(prompts, asked, grammars))]
    rode, guessed = {sequence: [] for sequence in sequences}, 0
    for sequence in sequences:
        engine.queue(sequence)
    while engine.busy:
        for step in engine.step():
            assert (step.logprobs is None) == (step.sequence.top_logprobs is None)
            rode[step.sequence] += step.logprobs or []
            guessed += len(step.tokens) - 1
    assert all(rode[sequence] == sequence.logprobs for sequence in sequences)
    return sequences, guessed


@pytest.mark.parametrize("packed, options", [
    (False, dict(tree_size=1)), (False, dict(tree_size=33, reads_prompts=True, ahead=1)),
    pytest.param(True, dict(tree_size=1), marks=needs_compiler),
    pytest.param(True, dict(tree_size=None), marks=needs_compiler),
    pytest.param(True, dict(tree_size=64), marks=needs_compiler)],
    ids=["plain", "as on a GPU", "C", "C chooses", "C, drafted"])
def test_log_probabilities_equal_transformers(packed, options, theirs, monkeypatch):
    """Bug: a row of another node or sequence, hidden states that the next step has overwritten, a temperature, filter
    or mask in the distribution, the first token's missing, tokens that change because they are asked about."""
    monkeypatch.setattr(batching, "PREFILL_CHUNK", 16)
    want, load = theirs
    prompts = random_prompts([1, 50, 7, 40, 12, 3, 25, 2, 33, 5]) * 2  # the later ones reuse prefixes
    asked = [ASKED[i * 5 % 6] for i in range(20)]
    grammars = [ToyGrammar() if i > 9 and i % 3 else None for i in range(20)]
    engine = new_engine(*load(packed), lookup=True, batch_size=3, **options)
    sequences, guessed = decode(engine, prompts, asked, grammars)
    silent, _ = decode(engine, prompts, [None] * 20, grammars)
    assert guessed > 50 or options["tree_size"] in (1, None)
    assert [sequence.tokens for sequence in sequences] == [sequence.tokens for sequence in silent]
    for sequence in sequences:
        n, ids = len(sequence.prompt), torch.tensor([sequence.prompt + sequence.tokens])
        top = sequence.top_logprobs
        if top is None:
            assert sequence.logprobs == []
            continue
        with torch.no_grad():
            theirs_at = want(ids).logits.float().log_softmax(-1)[0, n - 1:-1]
        near = lambda ours, x: torch.testing.assert_close(torch.tensor(ours), x, atol=2e-3, rtol=0)
        near([logprob for logprob, _ in sequence.logprobs], theirs_at.gather(1, ids[0, n:, None])[:, 0])
        best = theirs_at.sort(descending=True).values[:, :top]
        assert len(sequence.logprobs) == len(sequence.tokens) and sequence.ended in ("length", "stop")
        for (_, likeliest), values, at in zip(sequence.logprobs, best, theirs_at):
            if top:
                near([*likeliest.values()], values)
                near([*likeliest.values()], at[[*likeliest]])
            assert len(likeliest) == min(top, 97)


def test_the_bytes_of_tokens(tmp_path):
    """Bug: characters of the byte-level alphabet in place of bytes, a sentencepiece space or byte token as text, a
    token of no vocabulary that fails."""
    byte_level = load_encoding(save(tmp_path, tiny_spec()))
    for text in ("hell w  é👩\x00", EOT):
        ids = byte_level.encode(text, allowed_special="all")
        assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    assert byte_level.token_bytes(262) is None
    euro = [BYTES_IN_ORDER.index(byte) for byte in "€".encode()]
    said = completion_logprobs(byte_level, euro, [(-1.0, {0: -0.5}), (-2.0, {}), (-3.0, {euro[2]: -3.0})], [0, 0, 0])
    assert said["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert said["top_logprobs"] == [{"!": -0.5, "bytes:\\xe2": -1.0}, {"bytes:\\x82": -2.0}, {"bytes:\\xac": -3.0}]
    spec = tiny_spec() | dict(added_tokens=[], pre_tokenizer=None)
    spec["model"] = dict(type="BPE", vocab={"▁": 0, "é": 1, "▁é": 2, "<0x0A>": 3}, merges=["▁ é"], byte_fallback=True)
    spaces = dict(type="Replace", pattern=dict(String="▁"), content=" ")
    for decoders, want in (([spaces, dict(type="ByteFallback"), dict(type="Fuse")], [b" ", "é".encode(), " é".encode(),
                                                                                    b"\n", None]),
                           ([dict(type="Fuse")], [None] * 5)):
        encoding = load_encoding(save(tmp_path, spec | dict(decoder=dict(type="Sequence", decoders=decoders))))
        assert [encoding.token_bytes(i) for i in range(5)] == want
