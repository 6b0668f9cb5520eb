"""What a CPU runs in place of the naive references: masks made once a step, attention with exact sums in bfloat16, and
logits scored again where their rounding could decide."""

import math

import pytest
import torch

from backends.cpu import TreeMask, cached_attention, rescored_argmax, tree_mask
from kernels import gumbel, gumbel_argmax, tree_attention_reference
from test_kernels import as_int64, random_forest, visible_rows


def test_tree_mask_follows_the_bits():
    """Bug: the sign bit lost by a shift, or bits of nodes beyond T counted."""
    masks = [[1, 3, 2**64 - 1], [0, 1 << 63, 5]]
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    mask = tree_mask(lengths, as_int64(masks).to(), 8).visible
    for b, length in enumerate((0, 4)):
        for i in range(3):
            assert mask[b, i].nonzero().flatten().tolist() == visible_rows(length, masks[b][i], 3)
    deep = tree_mask(torch.zeros(1, dtype=torch.int32), as_int64([[0] * 63 + [1 << 63]]), 64).visible
    assert deep.nonzero().tolist() == [[0, 63, 63]]


def test_tree_mask_holds_the_alibi_bias():
    """Bug: distances by rows, an unscaled or a missing head, or no bias where every node sees every row."""
    lengths, slopes = torch.tensor([2], dtype=torch.int32), torch.tensor([0.5, 0.25])
    tree = torch.tensor([[1, 3, 5, 11, 0]])  # the root, two children, a child of the first, unused
    no = -math.inf
    far = torch.tensor([[-2, -1, 0, no, no, no, no], [-3, -2, -1, 0, no, no, no], [-3, -2, -1, no, 0, no, no],
                        [-4, -3, -2, -1, no, 0, no], [-1, 0, no, no, no, no, no]])
    bias = tree_mask(lengths, tree, 7, slopes).bias
    assert bias.dtype == torch.float32 and torch.equal(bias, torch.stack([far / 2, far / 4])[None])
    visible, unseen, bias = tree_mask(lengths, tree[:, :1], 3, slopes)
    assert visible.all() and unseen is None
    assert torch.equal(bias[0, 1], torch.tensor([[-0.5, -0.25, 0.0]]))


WRONG = {"half-slopes": (dict(slopes=torch.zeros(4).half()), "slopes"),
         "slopes-elsewhere": (dict(slopes=torch.zeros(4, device="meta")), "slopes"),
         "max-len-too-small": (dict(max_len=9), "lengths")}


@pytest.mark.parametrize("changed, named", WRONG.values(), ids=WRONG.keys())
def test_tree_mask_names_wrong_input(changed, named):
    """Bug: a mask cut short, or slopes that do not fit, quietly give an answer."""
    arguments = dict(lengths=torch.tensor([0, 7]).int(), ancestors=torch.zeros(2, 3).long(), max_len=10)
    with pytest.raises(ValueError, match=rf"expected .*\b{named}\b.*, got "):
        tree_mask(**arguments | changed)


def tree_inputs(T, Hq, Hkv, dtype):
    """q, caches, lengths and ancestors of two sequences; every node sees itself."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype)
               for shape in ((2, T, Hq, 16), *[(2, Hkv, 40, 16)] * 2))
    masks = [random_forest(T, (), generator) for _ in range(2)]
    return q, k, v, torch.tensor([3, 40 - T], dtype=torch.int32), as_int64(masks)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("T, Hq, Hkv", [(1, 2, 2), (5, 6, 2), (33, 3, 1)])
@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "alibi"])
def test_cached_attention_with_a_tree_mask_is_tree_attention(T, Hq, Hkv, dtype, atol, biased):
    """Bug: a node sees another's branch, a head takes another's keys or slope, or a bias in the wrong dtype."""
    q, k, v, lengths, ancestors = tree_inputs(T, Hq, Hkv, dtype)
    slopes = 2.0 ** -torch.arange(1.0, Hq + 1) if biased else None
    mask = tree_mask(lengths, ancestors, 40, slopes)
    assert isinstance(mask, TreeMask)
    got = cached_attention(q, k, v, mask.bias)
    want = tree_attention_reference(q, k, v, lengths, ancestors, None, slopes)
    assert got.dtype == dtype and torch.allclose(got.float(), want.float(), atol=atol)


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_in_bfloat16_does_not_depend_on_the_cache_row(groups):
    """Bug: sums in float32, whose rounding shows where in the cache a token's ancestors are. A flipped bit is enough to
    change a text."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 1, 2 * groups, 64, generator=generator).bfloat16()
    k, v = (torch.randn(1, 2, 300, 64, generator=generator).bfloat16() for _ in range(2))
    want = cached_attention(q, k, v)
    for _ in range(5):
        order = torch.randperm(300, generator=generator)
        assert torch.equal(cached_attention(q, k[:, :, order], v[:, :, order]), want)
        assert torch.equal(cached_attention(q, k[:, :, order].double(), v[:, :, order].double()), want)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rescored_argmax_undoes_the_rounding_of_the_logits(temperature):
    """Bug: the best token of the rounded logits taken, a candidate missed, noise left out, another row's token, also
    beside rows that are no numbers; ties in rows of zeros not given to the lowest id."""
    M, V, C = 600, 500, 64
    hidden, weight = torch.randn(M, C).bfloat16(), torch.randn(V, C).bfloat16()
    weight[100:400] = weight[:100].repeat(3, 1)  # many logits differ by less than their rounding, or not at all
    weight[100:300, 5:8] *= 1.03
    hidden[7] = 0
    exact = hidden.double() @ weight.double().T
    rounded = exact.float().bfloat16().float()
    sequence, position = torch.arange(M) % 3, torch.arange(M)
    want = exact.argmax(1)
    if temperature:
        want = (exact / temperature + gumbel(9, sequence, position, torch.arange(V))).argmax(1)
    assert (gumbel_argmax(rounded, temperature, 9, sequence, position) != want).any() or temperature
    got = rescored_argmax(rounded, hidden, weight, temperature, 9, sequence, position)
    assert torch.equal(got, want)
    broken = rounded.clone()
    broken[3], broken[4, 6] = math.nan, math.inf
    mended = rescored_argmax(broken, hidden, weight, temperature, 9, sequence, position)
    others = (torch.arange(M) != 3) & (torch.arange(M) != 4)
    assert torch.equal(mended[others], want[others]) and mended[3] < V and mended[4] == 6
    alone = [rescored_argmax(rounded[i:i + 1], hidden[i:i + 1], weight, temperature, 9, sequence[i:i + 1],
                                     position[i:i + 1]) for i in range(30)]
    assert torch.equal(torch.cat(alone), got[:30])
