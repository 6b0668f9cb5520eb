"""loss.py: the plain computation's loss and gradient, in chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import random_prompts, toy_model
from loss import head_losses, top_accuracies

K, B, T = 3, 3, 11


def inputs(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(random_prompts([T + K + 1] * B, seed=seed))
    outputs = [torch.randn(B, T, 64, generator=generator, requires_grad=True) for _ in range(K)]
    return outputs, model(tokens[:, :-1]), tokens


def plain(model, outputs, hidden, tokens, objective):
    """Written out: all logits at once."""
    teacher, losses, accuracies = model.lm_head(hidden), [], []
    for i, out in enumerate(outputs):
        logits, ahead = model.lm_head(out), teacher[:, i + 1:i + 1 + T]
        target = ahead.softmax(-1).flatten(0, 1) if objective == "distill" else tokens[:, i + 2:i + 2 + T].flatten()
        losses.append(F.cross_entropy(logits.flatten(0, 1), target))
        accuracies.append((logits.argmax(-1) == ahead.argmax(-1)).float().mean())
    return torch.stack(losses), torch.stack(accuracies)


@pytest.mark.parametrize("objective", ["distill", "data"])
@pytest.mark.parametrize("chunk", [1, 97, 97 * 4, 97 * 7, 97 * B * 5, 10**9])
def test_loss_gradient_and_accuracy_equal_the_plain_computation(chunk, objective):
    """Catches a border between chunks that is off by one, and a gradient of the wrong scale."""
    model = toy_model()
    outputs, hidden, tokens = inputs(model)
    weights = torch.tensor([1.0, 0.7, 0.49])
    want, share = plain(model, outputs, hidden, tokens, objective)
    (weights * want).sum().backward()
    wanted = [out.grad.clone() for out in outputs]
    for out in outputs:
        out.grad = None
    got, shared = head_losses(model, outputs, hidden, tokens, objective, chunk)
    (weights * got).sum().backward()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared, share)
    for out, grad in zip(outputs, wanted):
        torch.testing.assert_close(out.grad, grad, atol=1e-5, rtol=1e-5)


def test_gradient_by_finite_differences():
    model = toy_model().double()
    outputs, hidden, tokens = inputs(model)
    outputs = [out.detach().double().requires_grad_() for out in outputs]
    for objective in ("distill", "data"):
        loss = lambda *outs: head_losses(model, outs, hidden, tokens, objective, 97 * 5)[0]
        assert torch.autograd.gradcheck(loss, outputs, eps=1e-5, atol=1e-4, fast_mode=True)


def test_autocast_products_are_bfloat16():
    """Catches a loss that leaves the fast path, or sums in half precision."""
    model = toy_model()
    outputs, hidden, tokens = inputs(model)
    want, _ = plain(model, outputs, hidden, tokens, "distill")
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = head_losses(model, outputs, hidden, tokens)
    got.sum().backward()
    assert got.dtype == torch.float32 and outputs[0].grad.dtype == torch.float32 and not torch.equal(got, want)
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("chunk", [1, 97 * 4, 10**9])
def test_top_accuracies_count_ranks(chunk):
    """Catches a rank that is off by one, and ties that count for more than one token."""
    model = toy_model()
    outputs, hidden, _ = inputs(model)
    with torch.no_grad():
        model.head.weight[50:60] = model.head.weight[50]
    teacher = model.lm_head(hidden).argmax(-1)
    got = top_accuracies(model, outputs, hidden, (1, 2, 40, 97), chunk)
    for i, out in enumerate(outputs):
        order = model.lm_head(out).sort(dim=-1, descending=True, stable=True).indices
        for n, share in zip((1, 2, 40, 97), got[:, i].tolist()):
            want = (order[..., :n] == teacher[:, i + 1:i + 1 + T, None]).any(-1).float().mean().item()
            assert share == pytest.approx(want)
    assert got[0].max() < got[2].min() < got[3].min() == 1


class Peak(TorchDispatchMode):
    """The most bytes that operations' results took at one time; views and results written in place take none."""

    def __init__(self):
        super().__init__()
        self.live, self.held, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    self.held += storage.nbytes()
                    self.peak = max(self.peak, self.held)
                    weakref.finalize(storage, self.free, storage._cdata)
        return out

    def free(self, key):
        self.held -= self.live.pop(key, 0)


def test_memory_does_not_grow_with_heads_tokens_and_vocabulary():
    """Real sizes, on the meta device, where nothing is computed: 5 heads, 4096 tokens, V = 152,000, C = 4096."""
    sizes = dict(V=152_000, C=4096, N=4096, K=5)
    V, C, N, heads = sizes.values()
    with torch.device("meta"):
        weight, hidden = torch.empty(V, C), torch.empty(1, N + heads, C)
        outputs = [torch.empty(1, N, C, requires_grad=True) for _ in range(heads)]
        tokens = torch.empty(1, N + heads + 1, dtype=torch.int64)

    class Model:
        norm = staticmethod(lambda x: x * 1.0)
        head = type("Head", (), dict(weight=weight))
    chunk = 2**24
    with Peak() as peak:
        losses, _ = head_losses(Model, outputs, hidden, tokens, "distill", chunk)
        losses.sum().backward()
    kept = 4 * C * (3 * heads + 1) * (N + heads)  # what the norm gives, its gradient, and that of the outputs, per head
    assert peak.peak < kept + 6 * 4 * chunk < 4 * V * N
    assert all(out.grad.shape == out.shape for out in outputs)
