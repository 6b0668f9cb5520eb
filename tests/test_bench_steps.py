"""bench/steps.py, `bench exact`: the three ways compute the same, and the times are theirs."""

import pytest
import torch
import torch.nn.functional as F

from backends import cpu
from backends.cpu import NATIVE_BFLOAT16
from bench import __main__ as bench
from bench import steps
from model import InputError
from test_bench import TOY


@pytest.mark.skipif(not NATIVE_BFLOAT16, reason="this CPU has no instructions for bfloat16")
def test_three_ways_are_timed_in_turns_and_agree(monkeypatch, capsys):
    """Bug: a way timed under another's name, a cache of the wrong dtype, a chain that does not see its prefix, and
    attention left replaced."""
    monkeypatch.setitem(steps.SIZES, "7b", TOY)
    original, seen = cpu.cached_attention, []

    def clock(verify, device, group):
        dtypes = []
        spy = lambda q, k, *a, **options: dtypes.append((k.dtype, k.shape[2])) or sdpa(q, k, *a, **options)
        with monkeypatch.context() as patched:
            patched.setattr(F, "scaled_dot_product_attention", spy)
            verify()
        seen.append(dtypes)
        return [0.003, 0.006, 0.002][len(seen) % 3 - 1]
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(steps, "seconds", clock)
    bench.main("exact --random-weights 7b --prefixes 20 --tree-sizes 3 --runs 2".split())
    assert "| 20 | 3 | 3.0 | 6.0 | 2.0 | 1.50x | 3.00x |" in capsys.readouterr().out
    double, half = (torch.float64, 23), (torch.bfloat16, 23)
    assert seen == 2 * [[double] * 2, [double] * 4, [half] * 2]  # cast: once for each key/value head of each layer
    assert cpu.cached_attention is original
    model = steps.random_model("7b", torch.device("cpu"), torch.bfloat16)
    cpu.apply(model)
    with torch.inference_mode():
        wide, narrow = (steps.chain(model, dtype, 5, 4)() for dtype in (torch.float64, torch.bfloat16))
        rounded = steps.chain(model, torch.bfloat16, 5, 4, steps.rounded_attention)()
    assert torch.equal(wide, narrow)
    torch.testing.assert_close(rounded, wide, atol=0.01, rtol=0.05)


def test_a_cpu_without_bfloat16_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "packs", lambda dtype: False)
    with pytest.raises(InputError, match="no instructions for bfloat16"):
        bench.main(["exact"])
