"""demo/: what is bundled loads everywhere, drafts well, and says what the model says."""

from pathlib import Path

import pytest
import torch

from clover import CloverHeads
from generate import generate
from hf.tokenizer import load_encoding, tokenizer_hash
from model import GPT, NATIVE_BFLOAT16
from tools.cli import DEMO
from training.data import load_tokens, prompts


@pytest.fixture(scope="module", params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(
    not NATIVE_BFLOAT16, reason="this CPU has no instructions for bfloat16"))])
def demo(request):
    model, encoding = GPT.from_pretrained(DEMO, request.param, "cpu"), load_encoding(DEMO)
    read = lambda name: CloverHeads.from_pretrained(DEMO / name, model, tokenizer_hash(encoding))
    heads = {name: read(name) for name in ("clover", "medusa")}
    return model, encoding, heads


def test_demo_is_small(demo):
    assert sum(file.stat().st_size for file in Path(DEMO).rglob("*") if file.is_file()) <= 24e6


def test_transformers_reads_demo(demo):
    transformers = pytest.importorskip("transformers", reason="transformers is optional")
    model, encoding, _ = demo
    if model.dtype != torch.float32:
        pytest.skip("rounded to bfloat16, logits are not comparable")
    text = Path(__file__).read_text() + "\tdéjà vu 😀 <|endoftext|> 12345\r\n"
    ids = transformers.AutoTokenizer.from_pretrained(DEMO)(text).input_ids
    assert ids == encoding.encode(text, allowed_special="all")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokens = torch.tensor([ids[:400]])
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(model(tokens)), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [dict(), dict(temperature=0.8, seed=5), dict(temperature=0.8, top_p=0.9, seed=5)],
                         ids=["greedy", "sampled", "filtered"])
def test_demo_heads_are_lossless_and_guess_well(demo, options):
    """Catches heads of an older model and a loop that is only lossless on toy models."""
    model, encoding, heads = demo
    given = prompts(load_tokens(None, encoding, "heldout"), 4, 48, seed=1)
    plain = generate(model, given, 48, **options)
    clover = generate(model, given, 48, heads["clover"], tree_size=17, **options)
    medusa = generate(model, given, 48, heads["medusa"], tree_size=17, batch_size=3, **options)
    assert clover.tokens == plain.tokens == medusa.tokens
    assert clover.tokens_per_step > 1.7 and clover.tokens_per_step > medusa.tokens_per_step
