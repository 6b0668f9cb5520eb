"""What the functions of kernels.py refuse, and which of two functions runs. All fifteen operations."""

import inspect
import math
from collections import Counter

import pytest
import torch

import kernels
from static import FP32, TENSORS, arguments
from test_kernels import INTERPRETED, plain

GIVEN = dict(  # arguments of each function, with every tensor that it may have
    tree_attention=dict(B=2, T=3, Hq=4, Hkv=2, D=16, S=10, present="slopes"),
    project_topk=dict(M=2, C=8, V=9, n=5, k=2, present="vocab_ids"), project_sample=dict(M=2, C=8, V=9),
    commit_path=dict(L=1, B=2, Hkv=1, S=10, D=16, P=3), glu=dict(C=8), cosine_mix=dict(C=8, n_head=2),
    sum_parts=dict(N=2, n=6, C=3, present="bias"), add_norm=dict(C=8, present="delta weight bias"),
    rope_cache=dict(B=2, T=3, H=4, Hkv=1, D=16, S=10, present="rope q_weight k_weight"),
    select_candidates=dict(w=2, W=2, K=3, n=5, depth=1), best_tree=dict(K=3, n=5, tree_size=6),
    ngram_lookup=dict(S=8, n=3), merge_chain=dict(T=3, n=4), accept_path=dict(T=3, max_path=3),
    filtered_sample=dict(M=2, V=8))


def valid(name, **given):
    """Arguments that a function accepts, on the CPU."""
    made = arguments(name, FP32, device="cpu", **GIVEN[name] | given)
    if name == "rope_cache":
        made["rope"] = made["rope"] + 0.5
    return made


def faults(name):
    """{what is wrong: function that gives changed arguments}: each tensor with another rank, size, dtype or device."""
    made, found = valid(name), {}
    tensors = {argument: spec.split() for argument, spec in TENSORS[name].items() if made[argument] is not None}
    sizes = {argument: [word for word in words if not word.startswith(("real", "int", "float", "?"))]
             for argument, words in tensors.items()}
    count = Counter(size for words in sizes.values() for size in words)
    for argument, words in sizes.items():
        x = made[argument]
        first = argument == next(iter(sizes))
        wrong = dict(int16=x.to(torch.int16))
        if first:
            wrong["empty"] = x[:0]
        if not first or words[0] != "3":  # the first tensor has any number of leading dimensions
            wrong["rank"] = x[None]
        for dim, size in enumerate(words):
            if count[size] > 1 and (size != "3" or not first):
                wrong[size] = torch.cat((x, x.narrow(dim, 0, 1)), dim)
        if len(tensors) > 1:
            wrong["elsewhere"] = x.to("meta")
        if "real" in tensors[argument] and not first and name != "sum_parts":
            wrong["half"] = x.half()
        found |= {f"{argument}-{what}": lambda made, change={argument: y}: change for what, y in wrong.items()}
    return found


def lists(**changed):
    made = kernels.Candidates.empty(torch.zeros(2).long(), 3, 5)
    return dict(candidates=made._replace(**{key: change(getattr(made, key)) for key, change in changed.items()}))


FURTHER = dict(  # what else is wrong: sizes and arguments, or a function as above
    tree_attention=dict(
        nodes_65=dict(T=65, S=99), head_8=dict(D=8), head_257=dict(D=257), heads_do_not_divide=dict(Hq=3),
        short_cache=dict(S=2), window=dict(window=-1), float64=lambda made: dict(q=made["q"].double())),
    project_topk=dict(k_0=dict(k=0), k_above_V=dict(k=6), k_above_32=dict(V=50, n=50, k=33), no_ids=dict(n=0)),
    project_sample=dict(temperature=dict(temperature=-0.1), nan=dict(temperature=math.nan),
                        inf=dict(temperature=math.inf), big_seed=dict(seed=2**64),
                        three=lambda _: dict(temperature=torch.ones(3)),
                        seed=lambda _: dict(seed=torch.ones(2).int())),
    commit_path=dict(path_65=dict(P=65), keys_alone=lambda made: dict(kv=made["kv"][:, :1])),
    sum_parts=dict(bias=dict(C=4)), add_norm=dict(wide=dict(C=16385)),
    glu=dict(odd=dict(C=7), relu=dict(activation="relu")),
    cosine_mix=dict(heads_do_not_divide=dict(n_head=3), no_heads=dict(n_head=0), wide=dict(C=16386, n_head=1)),
    rope_cache=dict(no_queries=dict(Hkv=2), short_cache=dict(S=2), odd_head=dict(D=15),
                    one_norm=dict(present="rope q_weight")),
    select_candidates=dict(
        three_beams=dict(w=3), two_at_the_root=dict(depth=0), depth_3_of_3=dict(depth=3), many=dict(w=6, W=6),
        joint=lambda _: lists(joint=torch.Tensor.long), batch=lambda _: lists(tokens=lambda x: x[:1])),
    best_tree=dict(
        proposals_2048=dict(K=32, n=64), tree_of_1=dict(tree_size=1), tree_of_65=dict(tree_size=65),
        tokens=lambda _: lists(tokens=torch.Tensor.int), elsewhere=lambda _: lists(parents=lambda x: x.to("meta")),
        strided=lambda _: lists(joint=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))),
    ngram_lookup=dict(none=dict(n=0), too_many=dict(n=64),
                      text=lambda made: dict(history=made["history"][:, :1].expand(2, 2**28))),
    merge_chain=dict(nodes_65=dict(T=61), no_chain=dict(n=0)),
    accept_path=dict(nodes_65=dict(T=65), path_of_0=dict(max_path=0), path_of_65=dict(max_path=65)),
    filtered_sample=dict(no_mass=dict(top_p=0.0), mass=dict(top_p=1.1), min_p=dict(min_p=-0.1), few=dict(top_k=-1),
                         top_k=lambda _: dict(top_k=torch.ones(2)), top_p=lambda _: dict(top_p=torch.ones(2).double()),
                         half=lambda made: dict(logits=made["logits"].half())))


@plain
@pytest.mark.parametrize("name, changed", [
    pytest.param(name, changed, id=f"{name}-{what}") for name in GIVEN
    for what, changed in (faults(name) | FURTHER[name]).items()])
def test_wrong_input_is_named_in_one_line(name, changed):
    """Bug: wrong input crashes deep inside, reads other memory, or quietly gives an answer."""
    made = valid(name) | changed(valid(name)) if callable(changed) else valid(name, **changed)
    with pytest.raises(ValueError, match=r"^expected .*, got ") as error:
        getattr(kernels, name)(**made)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


DOUBLE = torch.Tensor.double


@plain
@pytest.mark.parametrize("name, changed", [
    ("tree_attention", dict(k_cache=DOUBLE, v_cache=DOUBLE)), ("tree_attention", dict(slopes=None)),
    ("project_sample", dict(sequence=torch.Tensor.int)), ("project_topk", dict(vocab_ids=None)),
    ("commit_path", dict(kv=DOUBLE, path=torch.Tensor.int)), ("add_norm", dict(x=torch.Tensor.half, delta=None)),
    ("add_norm", dict(weight=None, bias=None)), ("rope_cache", dict(kv=DOUBLE, lengths=torch.Tensor.long)),
    ("rope_cache", dict(rope=None, q_weight=None, k_weight=None)), ("sum_parts", dict(bias=torch.Tensor.half)),
    ("select_candidates", dict(logprobs=lambda x: x[:, :1], tokens=lambda x: x[:, :1])), ("glu", dict(x=DOUBLE)),
    ("ngram_lookup", dict(history=lambda x: x.repeat(1, 2)[:, ::2])), ("filtered_sample", dict(logits=DOUBLE))])
def test_what_is_accepted_beside_the_usual(name, changed):
    """Bug: a check stricter than the function: caches of float64, weights of float32, what may be None, strides."""
    made = valid(name)
    getattr(kernels, name)(**made | {key: change and change(made[key]) for key, change in changed.items()})


# ---------------------------------------------------------------------------------------------------------------------
# which function runs, also under the interpreter


@pytest.mark.parametrize("name, wanted", [
    ("tree_attention", "q"), ("rope_cache", "qkv"), ("rope_cache", "kv"), ("add_norm", "delta"), ("cosine_mix", "kv"),
    ("glu", "x")])
def test_a_gradient_selects_the_reference(name, wanted, monkeypatch):
    """Bug: a kernel runs where any of the tensors wants a gradient, which is then lost."""
    ran, made = [], valid(name)
    monkeypatch.setattr(kernels, f"{name}_reference", lambda *args: ran.append(args))
    getattr(kernels, name)(**made | {wanted: made[wanted].clone().requires_grad_()})
    assert len(ran) == 1


@pytest.mark.parametrize("name", GIVEN)
def test_dispatch(name, monkeypatch):
    """Bug: a CPU runs the kernels, or the interpreter tests would test the reference; two signatures."""
    function, reference = getattr(kernels, name), getattr(kernels, f"{name}_reference")
    assert inspect.signature(function) == inspect.signature(reference)
    ran = []
    monkeypatch.setattr(kernels, f"{name}_reference", lambda *args, **named: ran.append(args))
    function(**valid(name))
    assert len(ran) == (0 if INTERPRETED else 1)


@plain
def test_every_operation_is_tested_here():
    """Bug: a function that no test here knows."""
    assert {f"{name}_reference" for name in GIVEN} == {name for name in vars(kernels) if name.endswith("_reference")}
