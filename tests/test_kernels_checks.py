"""Input checks of the functions that others may call, and whether the kernel or the reference runs."""

import ast
import inspect
from collections import Counter

import pytest
import torch

import clover
import generate
import kernels
from static import FP32, MODULES, TENSORS, arguments, module_of, quantized_weight
from test_kernels import INTERPRETED, as_int64, plain

SIZES = dict(B=2, L=1, M=2, N=4, T=3, H=4, Hq=4, Hkv=2, Hk=2, D=16, Dk=16, Dv=16, S=10, C=8, V=9, k=2, P=3, n=4, K=3,
             w=2, W=2, n_head=2, depth=1, tree_size=6, max_path=3)
OWN = dict(linear_rows=dict(N=9), rope_cache=dict(Hkv=1), commit_path=dict(Hkv=1))  # sizes of one function
TORCH = dict(  # what runs without Triton, if it is not called name_reference
    extend_candidates=clover.extend_candidates, build_tree=clover.build_tree, ngram_lookup=generate.ngram_lookup,
    accept_path=generate.accept_path, advance=generate.advance, filtered_sample=kernels.sample_filtered)


def valid(name, **given):
    """Valid arguments of a function, on the CPU, optional tensors included."""
    optional = [argument for argument, spec in TENSORS[name].items() if spec.endswith("?")]
    present = dict(present=" ".join([*optional, *["prompts"] * (name == "accept_path")]))
    made = arguments(name, FP32, device="cpu", **SIZES | OWN.get(name, {}) | present | given)
    if name == "rope_cache":
        made["rope"] = made["rope"] + 0.5
    return made


def faults(name):
    """Invalid replacements of each tensor: another rank, size, dtype or device."""
    made, found = valid(name), []
    tensors = {argument: spec.split() for argument, spec in TENSORS[name].items() if made[argument] is not None}
    sizes = {argument: [word for word in words if not word.startswith(("real", "int", "float", "?"))]
             for argument, words in tensors.items()}
    count = Counter(size for words in sizes.values() for size in words)
    for argument, words in sizes.items():
        x = made[argument]
        first = argument == next(iter(sizes))  # may have any leading dimensions, here a 3
        wrong = [x.to(torch.int16)]
        wrong += [x[:0]] if first else []
        wrong += [x[None]] if not first or words[0] != "3" else []
        wrong += [x.to("meta")] if len(tensors) > 1 else []
        wrong += [x.half()] if "real" in tensors[argument] and not first else []
        wrong += [torch.cat((x, x.narrow(dim, 0, 1)), dim) for dim, size in enumerate(words)
                  if count[size] > 1 and (size != "3" or not first)]
        found += [{argument: y} for y in wrong]
    return found


def quantized(N, C):
    return quantized_weight(N, C, "int8", C, device="cpu")


FURTHER = dict(  # more invalid arguments: changed sizes, or functions of the valid arguments
    tree_attention=[dict(T=65, S=99), dict(D=8), dict(D=257), dict(Hq=3), dict(S=2), dict(window=-1)],
    linear_rows=[dict(activation="relu"), lambda _: dict(activation="silu"), dict(C=96, quantized=("int8", 48)),
                 dict(C=80, quantized=("int8", 32)), lambda _: dict(weight=quantized(7, 8), residual=None),
                 lambda _: dict(weight=quantized(9, 16)),
                 lambda _: dict(weight=quantized(9, 8)._replace(order=torch.ones(7).int()))],
    project_topk=[dict(k=0), dict(k=10), dict(V=50, k=33), dict(V=0),
                  lambda _: dict(weight=quantized(9, 16)), lambda _: dict(weight=quantized(7, 8))],
    project_sample=[lambda _: dict(temperature=torch.ones(3)), lambda _: dict(seed=torch.ones(2).int()),
                    lambda _: dict(masks=torch.ones(2, 2).int())],
    commit_path=[dict(P=65), lambda made: dict(kv=made["kv"][:, :1])],
    add_norm=[dict(C=16385)], glu=[dict(C=7), dict(activation="relu")],
    cosine_mix=[dict(n_head=3), dict(n_head=0), dict(C=16386, n_head=1)],
    rope_cache=[dict(Hkv=2), dict(S=2), dict(D=15), dict(present="rope q_weight")],
    tree_conv=[dict(T=65), dict(n=1), dict(R=1), dict(nodes=2)],
    tree_delta=[dict(T=65), dict(Dk=257), dict(Dv=257), dict(Hk=3), dict(R=1), dict(nodes=2)],
    commit_delta=[dict(P=65), dict(Dk=257), dict(Dv=257), dict(Hk=3), dict(R=1)])


@plain
@pytest.mark.parametrize("name", FURTHER)
def test_wrong_input_is_named_in_one_line(name):
    """Bug: invalid input that crashes deep inside, reads other memory, or silently gives a result."""
    cases = [valid(name) | tensors for tensors in faults(name)]
    cases += [valid(name) | changed(valid(name)) if callable(changed) else valid(name, **changed)
              for changed in FURTHER[name]]
    for made in cases:
        with pytest.raises(ValueError, match="expected") as error:
            getattr(module_of(name), name)(**made)
            print(f"accepted: {made}")
        assert "\n" not in str(error.value) and len(str(error.value)) < 600


def far_apart(x, dim):
    """x with the last quarter of this dimension at least 2^31 elements after the first item."""
    n = x.shape[dim] - 1
    gap = 2**31 // max(n * 3 // 4, 2) + 1  # a stride itself has 32 bits
    memory = torch.empty(n * gap + 2**16, dtype=x.dtype)  # only pages that are used take memory
    return memory.as_strided(x.shape, [gap if i == dim else n for i, n in enumerate(x.stride())]).copy_(x)


@pytest.mark.skipif(not INTERPRETED, reason="torch's own offsets have 64 bits")
@pytest.mark.parametrize("name, changed, given, dims", [
    ("tree_attention", "q", dict(B=3, Hkv=4), 3), ("tree_attention", "q", dict(Hkv=1), 3),
    ("tree_attention", "k_cache v_cache", dict(B=3, Hkv=4, S=70), 3), ("project_topk", "weight", dict(present=""), 1),
    ("linear_rows", "x", dict(M=4), 1), ("linear_rows", "weight", {}, 1),
    ("project_sample", "hidden", dict(M=4), 1), ("commit_path", "kv", dict(L=3, B=3, Hkv=3), 5),
    ("rope_cache", "qkv", dict(B=3), 3), ("rope_cache", "kv", dict(B=3, H=8, Hkv=3), 4),
    ("extend_candidates", "logprobs", dict(B=3, W=3, w=3), 2), ("tree_conv", "x", dict(B=3), 3),
    ("tree_conv", "history", {}, 3), ("tree_delta", "state", {}, 4), ("commit_delta", "state", {}, 5),
    ("commit_delta", "history", {}, 4)], ids=str)
def test_offsets_have_64_bits(name, changed, given, dims):
    """Bug: an offset computed in 32 bits, wrong from 2^31 elements on (8 GB in float32)."""
    made = valid(name, **given)
    for argument, x in made.items():
        if torch.is_tensor(x) and x.is_floating_point():
            x.copy_(torch.randn(x.shape))
    last = dict(lengths=given.get("S", 10) - 3, count=2, path=as_int64([[0, 2, 2]]), ancestors=as_int64([[1, 3, 7]]))
    for argument in made.keys() & last:  # so that the cache's last row is used
        made[argument] += last[argument]
    for dim in range(dims):
        near = {argument: made[argument].clone() for argument in changed.split()}  # some change it in place
        far = {argument: far_apart(x, dim) for argument, x in near.items()}
        want, got = (getattr(module_of(name), name)(**made | some) for some in (near, far))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert all(map(torch.equal, near.values(), far.values()))


@pytest.mark.parametrize("name, wanted", [
    *((name, None) for name in TENSORS if name != "dequantize"), ("tree_attention", "q"), ("rope_cache", "qkv"),
    ("rope_cache", "kv"), ("linear_rows", "bias"), ("add_norm", "delta"), ("cosine_mix", "kv"), ("glu", "x")])
def test_dispatch(name, wanted, monkeypatch):
    """Bug: kernels run on a CPU, or the interpreter tests run the reference; signatures differ; a kernel runs although
    a tensor requires a gradient."""
    module = module_of(name)
    function = getattr(module, name)
    reference = TORCH.get(name) or getattr(module, f"{name}_reference")
    # the kernel also counts, and only a GPU's steps read prompts
    extra = ["temperature", "counts", "chain", "prompts"] if name == "accept_path" else []
    named = [parameter for parameter in inspect.signature(function).parameters if parameter not in extra]
    assert named == [*inspect.signature(reference).parameters]
    made, ran = valid(name), []
    run = lambda *args, **named: ran.append(args) or (reference(*args, **named) if extra else None)
    for place in (module, clover, generate):
        if getattr(place, reference.__name__, None) is reference:
            monkeypatch.setattr(place, reference.__name__, run)
    if wanted:
        made[wanted] = made[wanted].clone().requires_grad_()
    function(**made)
    assert len(ran) == (0 if INTERPRETED and not wanted else 1)


@plain
def test_no_loop_begins_with_two_names_of_one_value():
    """Bug: `b = a` before a loop and `a = b` in it. Triton carries a variable through a loop only if the first pass
    gives it another value, so `a` never changes on a GPU; the interpreter runs it as Python."""
    def copies(node):
        found = [x for x in ast.walk(node) if isinstance(x, ast.Assign)]
        return {x: {x.value.id, x.targets[0].id} for x in found
                if isinstance(x.value, ast.Name) and isinstance(x.targets[0], ast.Name)}
    for function in (x for module in MODULES for x in ast.parse(inspect.getsource(module)).body):
        everywhere = copies(function)
        for loop in ast.walk(function):
            if isinstance(loop, (ast.For, ast.While)):
                inside = copies(loop)
                outside = [pair for copy, pair in everywhere.items() if copy not in inside]
                assert not [pair for pair in inside.values() if pair in outside], function.name
