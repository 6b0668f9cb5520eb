"""train_heads.py's objective: loss and gradient equal the plain computation's; memory is bounded."""

import copy
from types import SimpleNamespace
from weakref import WeakValueDictionary

import pytest
import torch

import train_heads
from clover import CloverHeads, preset
from conftest import SHAPES, Operations, random_prompts, toy_model
from model import LMHead
from test_clover import random_heads
from train_heads import Trainer, guess_masks, head_losses, run_heads, run_model, window_losses

K, B, T = 3, 3, 11


def inputs(model):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor(random_prompts([T + K + 1] * B))
    outputs = [torch.randn(B, T, 64, generator=generator, requires_grad=True) for _ in range(K)]
    guess_mask = torch.rand(K, B, T, generator=generator) < 0.7
    return outputs, run_model(model, tokens), guess_mask


def plain(model, outputs, hidden, ids):
    """In float64, all logits at once: losses, hits [K, B, T]. Logits outside the draft vocabulary are -inf."""
    model = copy.deepcopy(model).double()
    teacher = model.lm_head(hidden.double())
    drafted = torch.isin(torch.arange(97), torch.tensor(ids))
    results = []
    for i, out in enumerate(outputs):
        logs = model.lm_head(out.double()).masked_fill(~drafted, -torch.inf).log_softmax(-1)
        ahead = teacher[:, i + 1:i + 1 + out.shape[1]].masked_fill(~drafted, -torch.inf)
        losses = -(ahead.softmax(-1) * logs)[..., drafted].sum(-1)
        results.append((losses, logs.argmax(-1) == ahead.argmax(-1)))
    return map(torch.stack, zip(*results))


@pytest.mark.parametrize("ids", [range(97), [40, 3, 96, *range(50, 80)]], ids=["all", "some"])
@pytest.mark.parametrize("chunk", [1, 97 * 4, 97 * 7, 10**9])
def test_losses_gradients_and_hits_equal_the_plain_computation(chunk, ids, monkeypatch):
    """Catches errors at chunk borders, masked guesses in the loss, a wrong gradient scale."""
    monkeypatch.setattr(train_heads, "CHUNK_LOGITS", chunk)
    model = toy_model()
    heads = CloverHeads(preset("clover"), model)
    heads.set_vocabulary([] if len(ids) == 97 else ids)
    outputs, hidden, guess_mask = inputs(model)
    weights = torch.rand(K)
    want, hits = ((x * guess_mask).sum(dim=(1, 2)) for x in plain(model, outputs, hidden, list(ids)))
    (weights * want).sum().backward()
    wanted = [out.grad.clone() for out in outputs]
    for out in outputs:
        out.grad = None
    got = head_losses(heads, hidden, outputs, guess_mask)
    (weights * got[0]).sum().backward()
    with torch.no_grad():  # as when heads are measured
        torch.testing.assert_close(head_losses(heads, hidden, outputs, guess_mask), got)
    torch.testing.assert_close(got[0].double(), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(got[1], hits.float())
    for out, grad in zip(outputs, wanted):
        torch.testing.assert_close(out.grad, grad, atol=1e-6, rtol=1e-4)


def test_a_step_weights_the_losses_of_heads_that_read_the_tokens_before():
    """Catches heads that read tokens one position off, loss weights that rise, training that changes the model."""
    model = toy_model().requires_grad_()
    heads, ids = random_heads(model), torch.tensor(random_prompts([25, 25]))
    hidden = model(ids)
    outputs = heads(hidden[:, :25 - 4 - 1], ids[:, 1:])  # the model predicts token t + 2 + i at t + 1 + i
    losses, hits = plain(model, outputs, hidden, list(range(97)))
    loss, accuracies = Trainer(heads, steps=1, lr=0.01).train_step(ids, torch.ones(2, 25, dtype=torch.bool))
    want = losses.detach().mean(dim=(1, 2)) @ torch.tensor([1, 0.7, 0.49, 0.343]).double()
    torch.testing.assert_close(loss.double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(accuracies, hits.float().mean(dim=(1, 2)))
    assert torch.equal(model(ids), hidden)


def test_tokens_outside_the_draft_vocabulary_are_guesses_without_loss_or_hit():
    """Catches heads that learn a teacher which holds another token likely, and an accuracy without its misses."""
    model = toy_model()
    heads, ids = random_heads(model), torch.tensor(random_prompts([25, 25]))
    heads.set_vocabulary(range(0, 97, 2))
    drafted = ids % 2 == 0
    losses, hits, guesses = window_losses(heads, ids, torch.ones_like(drafted))
    got = window_losses(heads, ids, drafted)
    assert torch.equal(losses, got[0]) and torch.equal(hits, got[1])
    assert guesses.tolist() == [2 * 20] * 4 and got[2].max() < 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_autocast_is_on_for_a_float32_model_and_off_for_a_half_one(shape, dtype):
    """Catches slow half-precision models: CUDA's autocast computes norms in float32, with a cast at each of them."""
    model, seen = toy_model(**SHAPES[shape]).to(dtype), []
    heads, ids = CloverHeads(preset("clover"), model), torch.tensor(random_prompts([T + 4 + 1] * B))
    note = lambda name: lambda *_: seen.append((name, torch.is_autocast_enabled("cpu")))
    model.blocks[0].register_forward_pre_hook(note("model"))
    heads.augment_blocks[0].register_forward_pre_hook(note("heads"))
    outputs = run_heads(heads, run_model(model, ids, dtype=torch.bfloat16), ids, dtype=torch.bfloat16)
    assert seen == [("model", dtype == torch.float32), ("heads", dtype == torch.float32)]
    assert {out.dtype for out in outputs} == {dtype} and not torch.is_autocast_enabled("cpu")
    assert {out.dtype for out in run_heads(heads, run_model(model, ids), ids)} == {torch.float32}
    sum(out.float().sum() for out in outputs).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in heads.parameters())


def test_guesses_across_a_border_and_of_tokens_that_do_not_count_are_left_out():
    """Catches a head that is trained on another document's first tokens, or on masked ones."""
    tokens = torch.arange(2 * 9).view(2, 9)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 2], [0] * 9])
    loss_mask = torch.tensor([[True] * 9, [False] * 5 + [True] * 4])
    guess_mask = guess_masks(tokens, 3, loss_mask, documents)
    for i in range(3):
        for b in range(2):
            want = [bool(documents[b, t] == documents[b, t + 2 + i] and loss_mask[b, t + 2 + i]) for t in range(5)]
            assert guess_mask[i, b].tolist() == want


def test_memory_does_not_grow_with_heads_tokens_and_vocabulary(monkeypatch):
    """Real sizes on the meta device: 5 heads, 1024 tokens, V = 152,000, C = 4096."""
    V, C, N, heads, chunk = 152_000, 4096, 1024, 5, 2**23
    monkeypatch.setattr(train_heads, "CHUNK_LOGITS", chunk)
    with torch.device("meta"):
        hidden = torch.empty(1, N + heads, C)
        outputs = [torch.empty(1, N, C, requires_grad=True) for _ in range(heads)]
        guess_mask = torch.empty(heads, 1, N, dtype=torch.bool)

    live, peaks = WeakValueDictionary(), []

    def note(name, args, result):
        """Tracks the bytes of live results; views and in-place results take none."""
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                live[x.untyped_storage()._cdata] = x.untyped_storage()
        peaks.append(sum(storage.nbytes() for storage in live.values()))

    class Model:
        norm = staticmethod(lambda x: x * 1.0)
        head = LMHead(C, V, bias=False, device="meta", dtype=torch.float32).requires_grad_(False)
    with Operations(note):
        losses, _ = head_losses(SimpleNamespace(model=Model, vocabulary=None), hidden, outputs, guess_mask)
        losses.sum().backward()
    kept = 4 * C * (3 * heads + 1) * (N + heads)  # per head: the norm's output, its gradient, and the outputs' gradient
    assert max(peaks) < kept + 6 * 4 * chunk < 4 * V * N
    assert all(out.grad.shape == out.shape for out in outputs)
