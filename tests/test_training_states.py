"""training/states.py, and training on a packed model."""

import numpy as np
import pytest
import torch

from clover import CloverHeads, preset
from conftest import random_prompts, refusal, toy_model
from model import GPT
from train_heads import Trainer
from training import data, states

LENGTHS = 40, 1, 300, 17  # the context is 256
BIASED = dict(seed=3, qkv_bias=True, proj_bias=True)


def tokens_of(lengths, seed=0):
    ids = [np.array(ids) for ids in random_prompts(lengths, seed=seed)]
    return data.pack([(x, np.ones(len(x), bool)) for x in ids])


def stored(folder, model, tokens, **options):
    logged = []
    states.store_states(folder, model, tokens, logged.append, **options)
    rows = torch.from_numpy(states.open_states(folder, model, len(tokens.ids)).copy())
    return rows.view(torch.bfloat16), logged


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def model(request, tmp_path):
    """A model of float32 with biases, packed or not."""
    path = tmp_path / "model"
    toy_model(**BIASED).save_pretrained(path)
    return GPT.from_pretrained(path, device="cpu", packed=None if request.param else False)


def test_states_are_the_models_and_grow_with_the_text(model, tmp_path, monkeypatch):
    """Catches states of the document before, of a cut context, of another text, states computed twice, a full disk."""
    tokens = tokens_of(LENGTHS)
    got, logged = stored(tmp_path, model, tokens)
    for first, n in zip(tokens.starts, LENGTHS):
        for start in range(first, first + n, 256):
            piece = tokens.ids[start:min(start + 256, first + n)]
            want = model(torch.from_numpy(piece.astype(np.int64))[None])[0]
            torch.testing.assert_close(got[start:start + len(piece)].float(), want, atol=0.05, rtol=0.02)
    assert "358 tokens" in logged[0]
    (tmp_path / f"states-{model.hash}.bin").open("ab").write(b"half a row")  # a killed run
    again, logged = stored(tmp_path, model, tokens_of((*LENGTHS, 9)))
    assert "9 tokens" in logged[0] and torch.equal(again[:358], got)
    other = tokens_of(LENGTHS)
    other.ids[60] += 1  # in the third document
    changed, logged = stored(tmp_path, model, other)
    assert "317 tokens" in logged[0] and torch.equal(changed[:60], got[:60]) and not torch.equal(changed, got)
    assert torch.equal(stored(tmp_path, model, other)[0], changed) and stored(tmp_path, model, other)[1] == []
    monkeypatch.setattr(states.shutil, "disk_usage", lambda folder: type("Usage", (), dict(free=1000)))
    (tmp_path / "new").mkdir()
    refusal(lambda: stored(tmp_path / "new", model, tokens_of((90,))), "11.5 kB", "1 kB", "--store-states")


def test_training_on_stored_states_and_a_packed_model_is_training_as_before(model, tmp_path):
    """Catches heads that start from other weights, such as swapped parts of a stack; other states, lost gradients."""
    tokens = tokens_of((250, 250))
    reference = toy_model(**BIASED)
    losses = []
    for base, keep in ((reference, False), (model, False), (model, True)):
        torch.manual_seed(0)
        heads = CloverHeads(preset("clover"), base)
        heads.set_vocabulary(range(5, 90))
        rows = None
        if keep:
            states.store_states(tmp_path, base, tokens, lambda line: None)
            rows = states.open_states(tmp_path, base, 500)
        batches = tokens._replace(states=rows)
        trainer = Trainer(heads, steps=4, lr=0.01)
        losses.append([loss.item() for loss, _ in trainer.train(
            lambda step: data.window_batch(batches, 2, 60, 5, 0, 0))])
    torch.testing.assert_close(losses[1], losses[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(losses[2][0], losses[0][0], atol=0, rtol=0.06)  # longer contexts, rounded states
    assert losses[0][-1] < losses[0][0] and losses[2][-1] < losses[2][0]
