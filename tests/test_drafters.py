"""Draft heads in other projects' formats, made by these tests."""

import pytest
import torch

from backends import cpu
from conftest import needs_compiler, random_prompts, toy_model


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
