"""backends/sampling.py, as in test_kernels.py, against its reference."""

import math

import pytest
import torch

import kernels
from backends.sampling import filtered_sample
from test_kernels import INTERPRETED, every_second, slow_to_interpret
from test_kernels_fused import normal

FILTERS = [(0, 1e-6, 0), (0, 0.9, 0), (0, 0.9999, 0), (5, 1, 0), (50, 0.9, 0.01), (1, 1, 0), (999, 0.5, 0), (0, 1, 0.3)]
FLAT = [(6000, 0.1, 0, 0.9, 0), (6000, 0.1, 0, 0.3, 0), (6000, 0.1, 700, 0.9, 0)]  # more groups than a tile has


@pytest.mark.parametrize("V, scale, top_k, top_p, min_p", [
    FLAT[0], *(pytest.param(*case, marks=slow_to_interpret) for case in FLAT[1:]),
    *((*sizes, *filters) for sizes in [(5, 1.0), (300, 0.01)] for filters in FILTERS),
    *(pytest.param(1500, 5.0, *filters, marks=slow_to_interpret) for filters in FILTERS)])
def test_filtered_sample_draws_what_the_reference_draws(V, scale, top_k, top_p, min_p, device):
    """Bug: a cut one token too high or low, ties split (0.0 and -0.0 are equal), a floor that is too high."""
    logits = normal(4, V) * scale
    logits[1] = logits[1].round()  # many ties
    logits[2, ::2] = -math.inf
    args = dict(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=7, sequence=torch.arange(4),
                position=torch.arange(4) * 3)
    on_device = {name: x.to(device) if torch.is_tensor(x) else x for name, x in args.items()}
    got = filtered_sample(every_second(logits.to(device)), **on_device)
    assert torch.equal(got.cpu(), kernels.sample_filtered(logits, **args))


MIXED = dict(temperature=[0.0, 0.7, 1.0, 1.3, 0.0, 2.0], top_k=[0, 0, 3, 400, 2, 0],
             top_p=[1.0, 1.0, 1.0, 0.6, 0.5, 0.9], min_p=[0.0, 0.0, 0.0, 0.0, 0.3, 0.05], seed=[1, 2, -3, 2**62, 5, 2])


@pytest.mark.parametrize("V", [60, pytest.param(1500, marks=slow_to_interpret)])
def test_rows_have_their_own_parameters_and_masks(V, device):
    """Bug: another row's parameter, seed or mask, a bit beyond V, a mask after the filters, noise in a greedy row, a
    token that differs from `project_sample`'s where nothing is filtered."""
    logits, index = normal(12, V) * 3, torch.arange(6)
    logits[8, [3, 7]] = 50.0  # a tie of a greedy row, which top_k=2 keeps
    masks = torch.randint(-2**31, 2**31, (12, -(-V // 32))).int()
    masks[0], masks[1] = -1, 0
    masks[1, 1] = 1 << 17  # one token
    allowed = (masks[:, torch.arange(V) // 32] >> torch.arange(V) % 32) & 1 == 1
    assert torch.equal(kernels.mask_logits(logits, masks), logits.masked_fill(~allowed, -math.inf))
    tensors = {name: torch.tensor(values) for name, values in MIXED.items()}
    places = dict(sequence=index * 5, position=torch.arange(12) * 7)
    want = kernels.sample_filtered(logits.masked_fill(~allowed, -math.inf), **tensors, **places)
    assert want[1] == 49 and allowed[torch.arange(12), want].all()
    eye, weight = torch.eye(12, 16), torch.nn.functional.pad(logits, (0, 0, 0, 4)).T.contiguous()
    eye, weight, logits, masks = (x.to(device) for x in (eye, weight, logits, masks))
    places, tensors = ({k: x.to(device) for k, x in y.items()} for y in (places, tensors))
    noise = {name: tensors[name] for name in ("temperature", "seed")}
    free = kernels.sample_filtered(logits, **tensors, **places).cpu()
    assert free[8] == 3 and torch.equal(free[[0, 1, 9]], logits.cpu()[[0, 1, 9]].argmax(-1))
    for some, want in ((None, free), (every_second(masks), want)):
        assert torch.equal(filtered_sample(logits, **tensors, **places, masks=some).cpu(), want)
        got = kernels.project_sample(eye, weight, **noise, **places, masks=some).cpu()  # the product is exact
        assert torch.equal(got[[0, 1, 2, 3, 8, 9]], want[[0, 1, 2, 3, 8, 9]])  # the unfiltered rows
    got = kernels.project_sample(eye, weight, 0.0, 0, places["sequence"], places["position"], masks).cpu()
    assert torch.equal(got, logits.cpu().masked_fill(~allowed, -math.inf).argmax(-1))


def test_filtered_sample_survives_nan(device):
    """Bug: a token outside the vocabulary, or an endless loop."""
    logits = torch.tensor([[math.nan] * 3, [-math.inf] * 3, [math.nan, 3.0, -math.inf]]).to(device)
    index = torch.arange(3, device=device)
    for top_k, top_p in ((0, 0.5), (2, 1.0), (2, 0.5)):
        tokens = filtered_sample(
            logits, temperature=1.0, top_k=top_k, top_p=top_p, min_p=0.0, seed=1, sequence=index, position=index)
        assert tokens[:2].amin() >= 0 and tokens[:2].amax() < 3
        assert tokens[2] == 1 or not INTERPRETED  # torch ranks NaN as the largest
