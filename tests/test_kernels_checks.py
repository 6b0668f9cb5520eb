"""What the functions of kernels.py refuse, and which of two functions runs. All thirteen operations."""

import inspect
import math
import threading

import pytest
import torch

import kernels
from test_kernels import INTERPRETED, plain


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def longs(*shape):
    return torch.zeros(*shape, dtype=torch.int64)


def half(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


def meta(*shape):
    return torch.zeros(*shape, device="meta")


zeros = torch.zeros
CACHE = zeros(2, 2, 10, 16)
LENGTHS = torch.tensor([0, 7]).int()
NODES = longs(2, 3)
NAMES = ("tokens", "parents", "depths", "ancestors")
LISTS = kernels.Candidates(zeros(2, 3, 5), longs(2, 3, 5), longs(2, 3, 5))
ARGUMENTS = {  # function: what it takes
    "tree_attention": dict(q=zeros(2, 3, 4, 16), k_cache=CACHE, v_cache=CACHE, lengths=LENGTHS, ancestors=NODES),
    "project_topk": dict(hidden=zeros(2, 8), weight=zeros(9, 8), k=2),
    "project_sample": dict(hidden=zeros(2, 8), weight=zeros(9, 8), temperature=1.0, seed=0, sequence=longs(2),
                           position=longs(2)),
    "commit_path": dict(kv=zeros(1, 2, 2, 1, 10, 16), lengths=LENGTHS, path=torch.tensor([[0, 1, 2], [0, 2, 9]]),
                        count=torch.tensor([3, 1])),
    "linear_quantized": dict(x=zeros(2, 200), packed=ints(9, 32), scales=zeros(1, 9), zeros=None, kind="int4"),
    "sum_parts": dict(parts=zeros(2, 6)),
    "add_norm": dict(x=zeros(2, 8), delta=zeros(2, 8), weight=zeros(8)),
    "rope_cache": dict(qkv=torch.ones(2, 3, 4, 16), rope=zeros(2, 3, 2, 16), kv=zeros(2, 2, 1, 10, 16),
                       lengths=LENGTHS),
    "glu": dict(x=zeros(2, 8)),
    "cosine_mix": dict(z=zeros(2, 8), q=zeros(2, 8), kv=zeros(2, 16), n_head=2),
    "select_candidates": dict(logprobs=zeros(2, 2, 2), tokens=longs(2, 2, 2), candidates=LISTS, depth=1),
    "best_tree": dict(root=longs(2), candidates=LISTS, tree_size=6),
    "ngram_lookup": dict(history=ints(2, 8), lengths=ints(2), n=3),
    "merge_chain": dict(zip((*NAMES, "chain"), (NODES, NODES, NODES, NODES + 1, longs(2, 4)))),
    "accept_path": dict.fromkeys((*NAMES, "target"), NODES) | dict(active=ints(2), max_path=3),
    "filtered_sample": dict(logits=zeros(2, 8), temperature=1.0, top_k=0, top_p=0.5, min_p=0.0, seed=0,
                            sequence=longs(2), position=longs(2)),
}
REFUSED = {  # function: {what is wrong: (changed arguments, what the message has to name)}
    "tree_attention": {
        "q-of-3-dimensions": (dict(q=zeros(2, 3, 16)), "q"),
        "q-empty": (dict(q=zeros(2, 0, 4, 16)), "q .*not empty"),
        "q-float64": (dict(q=zeros(2, 3, 4, 16).double()), "q"),
        "65-nodes": (dict(q=zeros(2, 65, 4, 16)), "1 <= T <= 64"),
        "head-size-8": (dict(q=zeros(2, 3, 4, 8)), "16 <= D <= 256"),
        "head-size-257": (dict(q=zeros(2, 3, 4, 257)), "16 <= D <= 256"),
        "heads-do-not-divide": (dict(q=zeros(2, 3, 3, 16)), "Hq % Hkv == 0"),
        "cache-of-3-dimensions": (dict(k_cache=zeros(2, 10, 16)), "k_cache"),
        "cache-of-another-batch": (dict(v_cache=zeros(3, 2, 10, 16)), r"v_cache \[B = 2"),
        "cache-of-another-head-size": (dict(v_cache=zeros(2, 2, 10, 32)), "v_cache"),
        "caches-shorter-than-the-tree": (dict(k_cache=zeros(2, 2, 2, 16), v_cache=zeros(2, 2, 2, 16)), "3 <= S"),
        "caches-differ": (dict(v_cache=zeros(2, 2, 11, 16)), "v_cache"),
        "half-cache": (dict(v_cache=half(2, 2, 10, 16)), "v_cache .*float32 or float64"),
        "int64-lengths": (dict(lengths=longs(2)), "lengths"),
        "lengths-of-one": (dict(lengths=ints(1)), "lengths"),
        "lengths-beyond-the-cache": (dict(lengths=torch.tensor([0, 8]).int()), "0 <= lengths <= 7"),
        "negative-lengths": (dict(lengths=torch.tensor([-1, 0]).int()), "0 <= lengths <= 7"),
        "int32-ancestors": (dict(ancestors=ints(2, 3)), "ancestors"),
        "cache-elsewhere": (dict(k_cache=meta(2, 2, 10, 16)), "k_cache .* on cpu"),
        "lengths-elsewhere": (dict(lengths=meta(2).int()), "lengths"),
        "ancestors-elsewhere": (dict(ancestors=meta(2, 3).long()), "ancestors"),
        "too-few-slopes": (dict(slopes=zeros(2)), "slopes"),
        "slopes-of-two-dimensions": (dict(slopes=zeros(4, 1)), "slopes"),
        "half-slopes": (dict(slopes=half(4)), "slopes"),
        "slopes-elsewhere": (dict(slopes=meta(4)), "slopes"),
        "no-cache": (dict(v_cache=None), "v_cache"),
    },
    "project_topk": {
        "hidden-of-3-dimensions": (dict(hidden=zeros(1, 2, 8)), "hidden"),
        "no-hidden": (dict(hidden=zeros(0, 8)), "hidden"),
        "integer-hidden": (dict(hidden=longs(2, 8), k=1), "hidden"),
        "channels-differ": (dict(weight=zeros(9, 7)), "weight"),
        "half-weight": (dict(weight=half(9, 8)), "weight"),
        "weight-elsewhere": (dict(weight=meta(9, 8)), "weight"),
        "k-zero": (dict(k=0), "1 <= k <= 9"),
        "k-above-V": (dict(k=10), "1 <= k <= 9"),
        "k-above-32": (dict(weight=zeros(50, 8), k=33), "1 <= k <= 32"),
        "k-above-vocab-ids": (dict(k=3, vocab_ids=torch.tensor([0, 5]).int()), "1 <= k <= 2"),
        "half-a-token": (dict(k=1.5), "1 <= k <= 9"),
        "int64-vocab-ids": (dict(k=1, vocab_ids=longs(2)), "vocab_ids"),
        "no-vocab-ids": (dict(k=1, vocab_ids=ints(0)), "vocab_ids"),
        "int8-without-scales": (dict(weight=zeros(9, 8).to(torch.int8)), "scales is None"),
        "scales-of-floats": (dict(scales=zeros(9)), "scales is None"),
        "vocab-ids-beyond-the-weight": (dict(k=1, vocab_ids=torch.tensor([0, 9]).int()), "0 <= vocab_ids <= 8"),
    },
    "project_sample": {
        "vocab-ids-elsewhere": (dict(vocab_ids=meta(3).int()), "vocab_ids"),
        "negative-temperature": (dict(temperature=-0.1), "temperature"),
        "temperature-nan": (dict(temperature=math.nan), "temperature"),
        "temperature-inf": (dict(temperature=math.inf), "temperature"),
        "seed-of-65-bits": (dict(seed=2**64), "seed"),
        "positions-missing": (dict(position=longs(1)), "position"),
        "float-sequence": (dict(sequence=zeros(2)), "sequence"),
        "sequence-elsewhere": (dict(sequence=meta(2).int()), "sequence"),
    },
    "commit_path": {
        "cache-of-5-dimensions": (dict(kv=zeros(2, 2, 1, 10, 16)), "kv"),
        "keys-without-values": (dict(kv=zeros(1, 1, 2, 1, 10, 16)), "kv"),
        "integer-cache": (dict(kv=ints(1, 2, 2, 1, 10, 16)), "kv"),
        "int64-lengths": (dict(lengths=longs(2)), "lengths"),
        "path-of-one-dimension": (dict(path=longs(2)), "path"),
        "path-of-65": (dict(path=longs(2, 65)), "1 <= P <= 64"),
        "float-count": (dict(count=zeros(2)), "count"),
        "count-elsewhere": (dict(count=meta(2).int()), "count"),
    },
    "linear_quantized": {
        "129-rows": (dict(x=zeros(129, 200)), "1 <= M <= 128"),
        "too-few-words": (dict(packed=ints(9, 16)), "words =="),
        "words-of-8-bits": (dict(kind="int8"), "words =="),
        "int2": (dict(kind="int2"), "kind in"),
        "groups-of-100": (dict(scales=zeros(2, 9)), r"C // G in \(32, 64, 128\)"),
        "groups-that-do-not-divide": (dict(scales=zeros(3, 9)), "C % G == 0"),
        "scales-the-other-way": (dict(scales=zeros(9, 1)), "scales"),
        "float-zeros": (dict(zeros=zeros(1, 9)), "zeros"),
        "half-bias": (dict(bias=half(9)), "bias"),
        "packed-elsewhere": (dict(packed=meta(9, 32).int()), "packed .* on cpu"),
    },
    "sum_parts": {
        "one-part": (dict(parts=zeros(6)), "parts"),
        "long-bias": (dict(bias=zeros(4)), "n % C == 0"),
        "bias-elsewhere": (dict(bias=meta(3)), "bias"),
    },
    "add_norm": {
        "x-empty": (dict(x=zeros(0, 8)), "x .*not empty"),
        "x-too-wide": (dict(x=zeros(1, 16385), delta=None, weight=None), "1 <= C <= 16384"),
        "delta-of-another-shape": (dict(delta=zeros(1, 8)), "delta"),
        "delta-of-more-dimensions": (dict(delta=zeros(2, 2, 8)), "delta"),
        "delta-elsewhere": (dict(delta=meta(2, 8)), "delta"),
        "half-delta": (dict(delta=half(2, 8)), "delta"),
        "half-weight": (dict(weight=half(8)), "weight"),
        "float64-weight": (dict(weight=zeros(8).double()), "weight"),
        "long-bias": (dict(bias=zeros(9)), "bias"),
    },
    "glu": {
        "x-integer": (dict(x=longs(2, 8)), "x"),
        "odd-width": (dict(x=zeros(2, 7)), "C % 2 == 0"),
        "relu": (dict(activation="relu"), "activation in .*silu"),
    },
    "cosine_mix": {
        "q-elsewhere": (dict(q=meta(2, 8)), "q"),
        "kv-too-narrow": (dict(kv=zeros(2, 8)), "kv"),
        "heads-do-not-divide": (dict(n_head=3), "C % n_head"),
        "no-heads": (dict(n_head=0), "n_head"),
        "head-too-wide": (dict(z=zeros(2, 16386), q=zeros(2, 16386), kv=zeros(2, 2 * 16386), n_head=1), "16384"),
    },
    "rope_cache": {
        "cache-of-4-dimensions": (dict(kv=zeros(2, 1, 9, 16)), "kv"),
        "qkv-without-queries": (dict(qkv=zeros(2, 3, 2, 16)), "H > 2"),
        "qkv-of-another-batch": (dict(qkv=zeros(1, 3, 4, 16)), "kv"),
        "half-qkv": (dict(qkv=half(2, 3, 4, 16)), "kv .*float16 or float64"),
        "float-lengths": (dict(lengths=zeros(2)), "lengths"),
        "lengths-of-two-dimensions": (dict(lengths=longs(2, 1)), "lengths"),
        "past-the-cache": (dict(lengths=torch.tensor([0, 8])), "0 <= lengths <= 7"),
        "angles-of-half-a-head": (dict(rope=zeros(2, 3, 2, 8)), "rope"),
        "half-angles": (dict(rope=half(2, 3, 2, 16)), "rope"),
        "no-sines": (dict(rope=zeros(2, 3, 1, 16)), "rope"),
        "odd-head-to-rotate": (dict(qkv=zeros(2, 3, 4, 15), rope=zeros(2, 3, 2, 15), kv=zeros(2, 2, 1, 10, 15)),
                               "D % 2"),
        "one-norm": (dict(q_weight=zeros(16)), "k_weight is None"),
        "wide-norm": (dict(q_weight=zeros(17), k_weight=zeros(16)), "q_weight"),
    },
    "select_candidates": {
        "double-logprobs": (dict(logprobs=zeros(2, 2, 2).double()), "logprobs"),
        "logprobs-of-three-beams": (dict(logprobs=zeros(2, 3, 2), tokens=longs(2, 3, 2)), "w == W"),
        "two-beams-at-the-root": (dict(depth=0), "depth > 0"),
        "tokens-of-another-shape": (dict(tokens=longs(2, 2, 3)), "tokens"),
        "more-proposals-than-fit": (dict(logprobs=zeros(2, 6, 6), tokens=longs(2, 6, 6)), "1 <= W <= 5"),
        "depth-3-of-3": (dict(depth=3), "0 <= depth <= 2"),
    },
    "best_tree": {
        "int32-tokens": (dict(candidates=LISTS._replace(tokens=ints(2, 3, 5))), r"candidates\[1\]"),
        "strided-joint": (dict(candidates=LISTS._replace(joint=zeros(3, 2, 5).transpose(0, 1))), "contiguous cand"),
        "2048-proposals": (dict(candidates=kernels.Candidates(*(x.new_zeros(2, 32, 64) for x in LISTS))), "2048"),
        "one-list": (dict(candidates=LISTS.joint), "candidates of 3 tensors"),
        "root-of-two-dimensions": (dict(root=longs(2, 1)), "root"),
        "a-tree-of-1": (dict(tree_size=1), "2 <= tree_size <= 64"),
        "a-tree-of-65": (dict(tree_size=65), "2 <= tree_size <= 64"),
    },
    "ngram_lookup": {
        "int64-history": (dict(history=longs(2, 8)), "history"),
        "history-of-one-dimension": (dict(history=ints(8)), "history"),
        "no-sequences": (dict(history=ints(0, 8), lengths=ints(0)), "history"),
        "no-room-for-a-token": (dict(history=ints(2, 0)), "history"),
        "2^28-tokens": (dict(history=ints(2, 1).expand(2, 2**28)), "history|S"),
        "strided-history": (dict(history=ints(2, 16)[:, ::2]), "contiguous history"),
        "one-length-of-two": (dict(lengths=ints(1)), "lengths"),
        "int64-lengths": (dict(lengths=longs(2)), "lengths"),
        "lengths-elsewhere": (dict(lengths=meta(2).int()), "lengths"),
        "a-chain-of-0": (dict(n=0), "1 <= n <= 63"),
        "a-chain-of-64": (dict(n=64), "1 <= n <= 63"),
        "half-a-token": (dict(n=1.5), "1 <= n <= 63"),
    },
    "merge_chain": {
        "int32-tokens": (dict(tokens=ints(2, 3)), "tokens"),
        "tokens-of-one-dimension": (dict(tokens=longs(3)), "tokens"),
        "no-root": (dict(tokens=longs(2, 0)), "tokens"),
        "65-nodes": (dict.fromkeys(NAMES, longs(2, 61)), "T [+] n <= 64"),
        "parents-missing": (dict(parents=longs(2, 2)), "parents"),
        "float-depths": (dict(depths=zeros(2, 3)), "depths"),
        "ancestors-of-one-sequence": (dict(ancestors=longs(1, 3)), "ancestors"),
        "chain-of-one-dimension": (dict(chain=longs(4)), "chain"),
        "empty-chain": (dict(chain=longs(2, 0)), "chain"),
        "chain-of-three-sequences": (dict(chain=longs(3, 4)), "chain"),
        "int32-chain": (dict(chain=ints(2, 4)), "chain"),
        "chain-elsewhere": (dict(chain=meta(2, 4).long()), "chain"),
    },
    "accept_path": {
        "65-nodes": (dict.fromkeys((*NAMES, "target"), longs(2, 65)), "1 <= T <= 64"),
        "targets-missing": (dict(target=longs(2, 2)), "target"),
        "int64-active": (dict(active=longs(2)), "active"),
        "a-path-of-0": (dict(max_path=0), "1 <= max_path <= 64"),
        "a-path-of-65": (dict(max_path=65), "1 <= max_path <= 64"),
    },
    "filtered_sample": {
        "half-logits": (dict(logits=half(2, 8)), "logits"),
        "logits-of-one-dimension": (dict(logits=zeros(8)), "logits"),
        "none-of-the-mass": (dict(top_p=0.0), "top_p"),
        "more-than-the-mass": (dict(top_p=1.1), "top_p"),
        "greedy": (dict(temperature=0.0), "temperature"),
        "three-positions": (dict(position=longs(3)), "position"),
    },
}


@plain
@pytest.mark.parametrize("name, changed, named", [
    pytest.param(name, *case, id=f"{name}-{what}") for name, cases in REFUSED.items() for what, case in cases.items()])
def test_wrong_input_is_named_in_one_line(name, changed, named):
    """Bug: wrong input crashes deep inside, reads other memory, or quietly gives an answer."""
    for function in (getattr(kernels, name), getattr(kernels, f"{name}_reference")):
        with pytest.raises(ValueError, match=rf"^expected .*(\b|(?=\W)){named}.*, got ") as error:
            function(**ARGUMENTS[name] | changed)
        assert "\n" not in str(error.value) and len(str(error.value)) < 300


@plain
@pytest.mark.parametrize("path", [[[0, 1, 2], [0, 3, 9]], [[0, 2, 1], [0, 1, 2]]], ids=["beyond-the-cache", "falling"])
def test_the_reference_refuses_wrong_paths(path):
    """Bug: an index from the wrong end, or a row that was overwritten before it was read."""
    changed = dict(path=torch.tensor(path), count=torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="expected rising node ids .*, got "):
        kernels.commit_path(**ARGUMENTS["commit_path"] | changed)


@plain
@pytest.mark.parametrize("name, changed", [
    ("tree_attention", dict(k_cache=CACHE.double(), v_cache=CACHE.double())), ("tree_attention", dict(scale=0.5)),
    ("project_sample", dict(sequence=ints(2))), ("commit_path", dict(kv=zeros(1, 2, 2, 1, 10, 16).double())),
    ("add_norm", dict(x=half(2, 8), delta=None)), ("add_norm", dict(weight=None)),
    ("rope_cache", dict(kv=zeros(2, 2, 1, 10, 16).double())), ("rope_cache", dict(rope=None)),
    ("rope_cache", dict(lengths=longs(2), q_weight=zeros(16), k_weight=zeros(16))),
    ("select_candidates", dict(logprobs=zeros(2, 1, 2), tokens=longs(2, 1, 2))), ("glu", dict(x=zeros(2, 8).double())),
    ("filtered_sample", dict(logits=zeros(2, 8).double()))])
def test_what_is_taken_beside_the_usual(name, changed):
    """Bug: a check stricter than the function: caches of float64, weights of float32, what may be None, lists."""
    getattr(kernels, name)(**ARGUMENTS[name] | changed)


@plain
def test_checks_are_skipped_only_where_asked():
    """Bug: checks that stay off after the block, an error in it, a call that raised, or another thread's block."""
    odd = zeros(3, 5)
    for enabled, error in ((True, RuntimeError), (False, ValueError)):  # torch's own, ours
        with pytest.raises(error), kernels.unchecked(enabled):
            kernels.glu(odd)
        with pytest.raises(ValueError, match="C % 2"):
            kernels.glu(odd)
    with kernels.unchecked(), kernels.unchecked(False), pytest.raises(RuntimeError):
        kernels.glu(odd)
    entered, left = threading.Event(), threading.Event()

    def other():
        with kernels.unchecked():
            entered.set()
            left.wait()
    thread = threading.Thread(target=other)
    with kernels.unchecked():
        thread.start()
        entered.wait()
    with pytest.raises(ValueError, match="C % 2"):  # while another thread skips its own
        kernels.glu(odd)
    left.set()
    thread.join()


# ---------------------------------------------------------------------------------------------------------------------
# which function runs, also under the interpreter


@pytest.mark.parametrize("name, wanted", [
    ("tree_attention", "q"), ("rope_cache", "qkv"), ("rope_cache", "kv"), ("add_norm", "delta"), ("cosine_mix", "kv"),
    ("glu", "x")])
def test_a_gradient_takes_the_reference(name, wanted, monkeypatch):
    """Bug: a kernel runs where any of the tensors wants a gradient, which is then lost."""
    ran, arguments = [], ARGUMENTS[name]
    monkeypatch.setattr(kernels, f"{name}_reference", lambda *args: ran.append(args))
    getattr(kernels, name)(**arguments | {wanted: arguments[wanted].clone().requires_grad_()})
    assert len(ran) == 1


@pytest.mark.parametrize("name", ARGUMENTS)
def test_dispatch(name, monkeypatch):
    """Bug: a CPU runs the kernels, or the interpreter tests would test the reference."""
    ran = []
    monkeypatch.setattr(kernels, f"{name}_reference", lambda *args: ran.append(args))
    getattr(kernels, name)(**ARGUMENTS[name])
    assert len(ran) == (0 if INTERPRETED else 1)


@plain
@pytest.mark.parametrize("name", [name for name in vars(kernels) if name.endswith("_reference")])
def test_a_function_and_its_reference_have_one_signature(name):
    """Bug: a call that works on one device only, or a function that no test here knows."""
    function = getattr(kernels, name.removesuffix("_reference"))
    assert inspect.signature(function) == inspect.signature(getattr(kernels, name))
    assert function.__name__ in ARGUMENTS and REFUSED[function.__name__]
