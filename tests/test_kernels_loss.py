"""The kernels of training/loss.py, as in test_kernels.py, against formulas in float64."""

import pytest
import torch

from test_kernels import BF16, FP32, device
from training.loss import cross_entropy, teacher_targets

__all__ = ["device"]  # the fixture


def logits_with_a_tie(R, n, dtype):
    logits = (4 * torch.randn(R, n)).to(dtype)
    logits[:, 5] = logits[:, n - 1] = logits.amax(dim=1)
    return logits


@pytest.mark.parametrize("V, n, dtype", [(97, None, FP32), (97, 40, BF16), (5000, 4100, BF16), (5000, 4100, FP32)])
def test_loss_and_gradient_of_rows_are_the_formula(V, n, dtype, device):
    """Catches rows of several blocks, ties, tokens outside the draft vocabulary, a gradient of another dtype."""
    R = 3
    logits, drafts = logits_with_a_tie(R, V, dtype), logits_with_a_tie(R, n or V, dtype)
    drafted = torch.randperm(V).int()[:n] if n else None
    probabilities = logits.double().softmax(1)
    probabilities = probabilities[:, drafted] if n else probabilities
    doubles = drafts.double().requires_grad_()
    losses = -(probabilities * doubles.log_softmax(1)).sum(1)
    losses.sum().backward()

    target, mass, greedy = teacher_targets(logits.to(device), drafted if drafted is None else drafted.to(device))
    entropy, guess, gradient = cross_entropy(drafts.to(device), target, mass)
    close = lambda got, want: torch.testing.assert_close(got.double().cpu(), want, atol=1e-5, rtol=1e-5)
    close(target, probabilities)
    close(mass, probabilities.sum(1))
    close(entropy, losses.detach())
    assert greedy.tolist() == guess.tolist() == [5] * R and gradient.dtype == dtype
    error = 1e-5 if dtype == FP32 else 8e-3  # the interpreter truncates
    torch.testing.assert_close(gradient.double().cpu(), doubles.grad, atol=1e-5, rtol=error)
