"""What the kernels need, without a GPU.

Triton launches are recorded instead of run. In a step on the meta device they are counted together with the torch
operations that are not views: a lower bound, as an operation may take several. Launches are compiled for their
registers, spills and shared memory: `pytest` one of every kernel, `pytest -m static` every shape class.
"""

import contextlib
import inspect
import os
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from backends import gpu, linear, sampling, tree
from backends.linear import Quantized
from bench import size_config
from clover import SOURCES, Candidates, CloverHeads, Tree
from engine.policy import Policy
from generate import Accepted, Plan
from model import GPT, InputError
from recurrent import delta
from tools.flags import DEMO

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
MODULES = kernels, delta, linear, sampling, tree  # that have kernels
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}


def module_of(name):
    """The module that has a function or kernel."""
    return next(module for module in MODULES if hasattr(module, name))


def h200(multiprocessors=132):
    """The properties of a GPU that kernels.py reads."""
    return SimpleNamespace(multi_processor_count=multiprocessors, shared_memory_per_multiprocessor=233472)


@contextlib.contextmanager
def recorded(multiprocessors=132):
    """Records launches instead of running them: yields a list of (kernel name, grid, args, named)."""
    if not kernels.HAS_TRITON:
        raise InputError("this needs triton, which is not installed; pip install triton")
    from triton.runtime.jit import JITFunction
    launches = []

    def run(kernel, *args, grid, warmup, **named):
        launches.append((kernel.__name__, grid, args, named))

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(JITFunction, "run", run))
        patches.enter_context(patch.object(kernels, "_gpu", lambda _: h200(multiprocessors)))
        for module in (*MODULES, gpu):
            patches.enter_context(patch.object(module, "runs_triton", lambda *_: True))
        yield launches


class Launches(TorchDispatchMode):
    """Counts torch operations by name while it is active."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        with self:
            result = operation.decompose(*args, **kwargs or {})  # into operations that have kernels
        if result is not NotImplemented:
            return result
        name = operation.overloadpacket.__name__
        if not operation.is_view and name not in FREE:
            self.counts[name] += 1
        return operation(*args, **kwargs or {})


@torch.inference_mode()
def step_launches(model, heads=None, lookup=False, tree_size=1, kind=gpu.GraphDecoder, policy=Policy, **options):
    """Counts the launches of a Decoder's step by operation. The modules must be on the meta device."""
    policy = policy(model, heads, lookup, tree_size)
    with recorded() as launches:
        decoder = kind(model, policy=policy, graph=False, **options)
        step = partial(decoder.step, Plan(1, *policy.select(1), decoder.sampling.mode))
        step()  # also does what only the first step does
        launches.clear()
        with Launches() as operations:
            step()
    return operations.counts + Counter(name.strip("_").removesuffix("_kernel") for name, *_ in launches)


def demo(apply=gpu.apply):
    """demo/ and its heads on the meta device, in bfloat16, the default on CUDA."""
    model = GPT.from_pretrained(DEMO, BF16, "cpu", packed=False)
    heads = CloverHeads.from_pretrained(DEMO / "clover", model)
    for module in (model, heads):
        apply(module.to("meta"))
    model.tables = model.tables[0].to("meta"), None, None
    return model, heads


def sized(name):
    """A model of `bench.MODEL_SIZES` on the meta device, in bfloat16."""
    config = size_config(name)
    with torch.device("meta"):
        model = GPT(config).to(BF16).requires_grad_(False)
        model.tables = torch.empty(config.block_size, 2, config.head_size, dtype=BF16), None, None
    gpu.apply(model)
    return model


# Sizes and dtype of each tensor. "real" is the dtype of the call, "?" marks optional tensors.
HEAD = dict(hidden="M C real", weight="V C real")
PLACE = dict(sequence="M int64", position="M int64")
MASKS = dict(masks="M words int32 ?")
SLOTS = dict(slots="B int64 ?")
TENSORS = dict(
    tree_attention=dict(q="B T Hq D real", k_cache="N Hkv S D real", v_cache="N Hkv S D real", lengths="N int32",
                        ancestors="B T int64", slopes="Hq float32 ?", **SLOTS),
    linear_rows=dict(x="M C real", weight="2N C real", bias="2N real ?", norm="C real ?", residual="M N real ?"),
    dequantize=dict(weight="N C real", rows="M int64 ?"),
    project_topk=HEAD | dict(vocab_ids="V int32 ?"), project_sample=HEAD | PLACE | MASKS,
    commit_path=dict(kv="L 2 N Hkv S D real", lengths="N int32", path="B P int64", count="B int32", **SLOTS),
    add_norm=dict(x="3 C real", delta="3 C real ?", weight="C real ?", bias="C real ?"),
    rope_cache=dict(qkv="B T H D real", rope="B T 2 D real ?", kv="2 N Hkv S D real", lengths="N int32",
                    q_weight="D real ?", k_weight="D real ?", **SLOTS),
    glu=dict(x="3 C real"), cosine_mix=dict(z="3 C real", q="3 C real", kv="3 2C real"),
    extend_candidates=dict(logprobs="B w W float32", tokens="B w W int64"),
    ngram_lookup=dict(history="N S int32", lengths="N int32", **SLOTS),
    build_tree=dict(root="B int64", temperature="B float32", chain="B 1+m int64 ?", chances="modes SOURCES float32"),
    accept_path=dict(target="B T int64", active="N int32", temperature="B float32",
                     counts="modes SOURCES modes float64", chain="B 1+m int64 ?", **SLOTS),
    prompt_chain=dict(history="N S int32", lengths="N int32", ends="N int32", chain="B 1+m int64 ?", **SLOTS),
    advance=dict(lengths="N int32", root="N int64", history="N S int32 ?", states="B P C real ?",
                 state="N C real ?", **SLOTS),
    filtered_sample=dict(logits="M V float32") | PLACE | MASKS,
    tree_conv=dict(x="B T C real", history="N n-1 C real", weight="C n real", inputs="R nodes C real",
                   ancestors="B T int64", **SLOTS),
    tree_delta=dict(qkv="B T C real", a="B T H real", b="B T H real", A="H float32", dt_bias="H float32",
                    state="N H Dk Dv float32", keys="R nodes Hk Dk real", u="R nodes H Dv float32",
                    G="R nodes H float32", ancestors="B T int64", **SLOTS),
    commit_delta=dict(state="L N H Dk Dv float32", history="L N n-1 C real", inputs="L R nodes C real",
                      keys="L R nodes Hk Dk real", u="L R nodes H Dv float32", G="L R nodes H float32",
                      path="B P int64", count="B int64", **SLOTS))
DIMENSIONS = dict(B=2, L=2, M=3, T=3, H=12, Hq=8, Hkv=2, Hk=4, Dk=128, Dv=128, S=4096, C=4096, V=32000, n=32000, k=8,
                  n_head=8, temperature=0.8, seed=0, top_k=0, top_p=0.9, min_p=0.0, m=15, modes=2, SOURCES=SOURCES)


def quantized_weight(N, K, kind, group, minimums=None, device="meta"):
    """A `Quantized` weight of zeros [N, K]. kind, minimums: dtypes; uint8: 4 bits."""
    zeros = lambda dtype, *shape: torch.zeros(*shape, dtype=getattr(torch, dtype), device=device)
    return Quantized(zeros(kind, N, K // 2 if kind == "uint8" else K), zeros("float16", K // group, N),
                     zeros(minimums, K // group, N) if minimums else None)


def arguments(name, dtype=BF16, present="", aligned=True, device="meta", quantized=None, **given):
    """Arguments for a function that has kernels. given: sizes and others. present: optional tensors. aligned: to 16
    bytes. quantized: as in `quantized_weight`."""
    function = getattr(module_of(name), name)
    scope = DIMENSIONS | given
    scope["2N"] = scope.get("N", 0) * (2 if scope.get("activation") else 1)
    scope |= {"2C": 2 * scope["C"], "n-1": scope["n"] - 1, "1+m": 1 + scope["m"], "words": -(-scope["V"] // 32)}
    if name == "tree_delta":
        scope["C"] = 2 * scope["Hk"] * scope["Dk"] + scope["H"] * scope["Dv"]
    scope = dict(N=scope["B"], R=scope["B"], nodes=scope["T"]) | scope
    made = {key: scope[key] for key in inspect.signature(function).parameters.keys() & scope}
    for argument, spec in TENSORS[name].items():
        *sizes, kind = spec.removesuffix(" ?").split()
        shape = [int(size) if size.isdigit() else scope[size] for size in sizes]
        x = torch.zeros(shape, dtype=dtype if kind == "real" else getattr(torch, kind), device=device)
        if argument in ("k_cache", "v_cache", "weight") and not aligned:
            x = x.new_empty(*shape[:-2], shape[-1], shape[-2] + 1).mT[..., :-1, :]
        made[argument] = None if spec.endswith("?") and argument not in present.split() else x
    if quantized:
        made["weight"] = quantized_weight(*made["weight"].shape, *quantized, device=device)
    if name == "dequantize":
        made["dtype"] = dtype
    if "noise" in present.split():
        made["noise"] = [torch.zeros(scope["M"], dtype=dtype, device=device) for dtype in (FP32, *[torch.int64] * 3)]
    int64, int32 = (partial(torch.zeros, dtype=kind, device=device) for kind in (torch.int64, torch.int32))
    B = scope["B"]
    if name in ("prompt_chain", "accept_path"):
        columns = [int64(B, scope["T"]) for _ in range(5)]
        made["tree"] = Tree(*columns, torch.zeros(B, scope["T"], device=device))
    if name == "advance":
        made["accepted"] = Accepted(*(int64(B, scope["P"]) for _ in range(3)), int64(B))
    if "prompts" in present.split():
        made["prompts"] = int32(scope["N"], scope["S"]), int32(scope["N"]), int32(scope["N"])
    if name in ("extend_candidates", "build_tree") and "candidates" not in given:
        made["candidates"] = Candidates(*(x.zero_() for x in Candidates.empty(int64(B), scope["K"], scope["n"])))
    return made


def launches_of(name, dtype=BF16, present="", aligned=True, multiprocessors=132, **given):
    """The launches of a function that has kernels, with `arguments` on the meta device."""
    made = arguments(name, dtype, present, aligned, **given)
    with recorded(multiprocessors) as launches:
        getattr(module_of(name), name)(**made)
    return launches


HEAD_SIZES = [16, 32, 64, 256, 128]  # others use the tile of the next power of two, with masks
ROWS = [8, 32, 64, 128, 512]
QUANTIZED = [("int8", 4096), ("float8_e4m3fn", 128), ("int8", 16), ("int8", 32, "float16"), ("uint8", 128, "uint8"),
             ("uint8", 32, "float16")]
GATE = dict(  # every shape class that kernels.py chooses; lists are alternatives; float16 compiles like bfloat16
    tree_attention=[
        dict(T=[2, 8, 32, 16], D=HEAD_SIZES, present=["slopes", ""]),  # tiles of 16 to 128 query rows
        dict(T=[2, 8, 16, 32], D=HEAD_SIZES, present="slopes", window=1024),
        dict(T=[2, 16], D=[80, 192], window=[0, 1024]),
        dict(T=5, D=HEAD_SIZES, present="slopes", window=1024, dtype=[BF16, FP32], aligned=[True, False]),
        dict(T=5, D=128, dtype=[BF16, FP32], aligned=[True, False]),
        dict(T=2, D=[16, 128, 256], S=[400, 65536], present=["", "slots"]),  # few splits to combine, and many
        dict(T=[2, 16], D=128, S=64, window=[0, 40])],  # one split
    linear_rows=[
        dict(M=[1, 17, 256], N=14336, activation="silu", present="norm", quantized=[None, *QUANTIZED]),
        dict(M=[1, 64], N=[576, 128256], present="residual", quantized=[None, *QUANTIZED[3:]]),
        dict(M=64, N=6144, present="norm", quantized=QUANTIZED[3:]),
        dict(M=[1, 64], N=4096, C=[576, 111], activation="gelu", present="bias norm", dtype=[FP16, FP32])],
    dequantize=[dict(N=4096, quantized=QUANTIZED, present="rows")],
    project_sample=[
        dict(M=ROWS, dtype=[BF16, FP32]), dict(M=ROWS, aligned=False), dict(M=ROWS, V=8192),
        dict(M=[8, 512], temperature=0.0), dict(M=ROWS[:-1], quantized=QUANTIZED[::5]),
        dict(M=ROWS, present="masks"), dict(M=8, temperature=0.0, present="masks"),
        dict(M=[8, 512], dtype=FP32, present="masks"), dict(M=[32, 64], quantized=QUANTIZED[-1:], present="masks")],
    project_topk=[
        dict(M=ROWS, k=[4, 8, 32], V=[8192, 32000]), dict(M=8, k=1, present="vocab_ids"),
        dict(M=8, C=4112), dict(M=ROWS, k=8, V=8192, present="vocab_ids noise"),  # masked channels; sampled drafts
        dict(M=ROWS, k=[4, 8, 32], V=[8192, 32000], present="noise"),
        dict(M=ROWS[:-1], k=8, quantized=QUANTIZED[2::3], present=["", "noise"]),
        dict(M=ROWS, k=32, dtype=FP32), dict(M=ROWS, k=32, aligned=False),
        dict(M=8, k=[1, 32], V=128256, multiprocessors=[1, 4, 16, 256])],  # how many lists to merge
    commit_path=[dict(P=64, D=256, present=["", "slots"], dtype=[BF16, FP32])],
    add_norm=[dict(C=[16, 1000, 16384], present=["", "delta weight bias"], dtype=[BF16, FP32])],
    rope_cache=[dict(D=21, present="q_weight k_weight", dtype=[BF16, FP32]),
                dict(D=[16, 256], present=["rope", "rope q_weight k_weight", "rope slots"])],
    tree_conv=[dict(n=4, present=["", "slots"], dtype=[FP32, BF16])],
    tree_delta=[  # tiles of 16 to 128 columns
        dict(T=[1, 9, 32, 64, 16], dtype=[FP32, BF16]), dict(T=[1, 16, 64], Dk=[16, 80, 256], dtype=[BF16, FP32]),
        dict(T=[16, 64], Dv=[16, 80, 256], present="slots")],
    commit_delta=[dict(n=4, P=16, present=["", "slots"], dtype=[FP32, BF16]),
                  dict(n=4, P=16, Dk=[16, 80, 256], Dv=[16, 80, 256])],
    glu=[dict(C=2 * 11008, activation=["silu", "gelu"])],
    cosine_mix=[dict(C=16384, n_head=1)],
    extend_candidates=[dict(w=32, W=32, n=63, K=32, depth=31)], ngram_lookup=[dict(n=[1, 63], present=["", "slots"])],
    build_tree=[dict(K=[1, 2, 4, 8, 16, 32], n=63, tree_size=64, present="chain"),
                dict(candidates=None, m=63, tree_size=64, present="chain")],
    prompt_chain=[dict(T=[2, 64], present=["", "chain", "chain slots"])],
    accept_path=[dict(T=[2, 64], max_path=5, present=["", "chain", "prompts", "chain prompts", "chain prompts slots"])],
    advance=[dict(P=[1, 64], present=["", "history", "history states state", "history states state slots"])],
    filtered_sample=[  # tiles of 64 groups x 8 to 16 x 256
        dict(V=[100, 8000, 50257, 128256, 262144]), dict(V=[100, 50257, 262144], present="masks")])


def last(*lists):
    """The last choices."""
    return [[x[-1] for x in lists]]


def covering(*lists):
    """Few combinations in which each choice occurs."""
    return [[x[i % len(x)] for x in lists] for i in range(max(map(len, lists)))] + last(*lists)


def all_launches(combine=product):
    """The signatures of the launches in `GATE`. combine: lists of choices -> combinations. `last`: only those of each
    operation's first entry; `covering`: every third one of its other entries."""
    launches = []
    for name, group in GATE.items():
        for choices in group[:1] if combine is last else group:
            lists = [x if isinstance(x, list) else [x] for x in choices.values()]
            found = combine(*lists)
            if combine is covering and choices is not group[0]:
                found = found[::3] + last(*lists)
            for values in found:
                launches += launches_of(name, **dict(zip(choices, values)))
    return list(dict.fromkeys(signature(name, args, named) for name, _, args, named in launches))


def signature(name, args, named):
    """The key by which Triton compiles a launch: types, constants, which arguments are multiples of 16."""
    from triton._C.libtriton import native_specialize_impl
    from triton._utils import find_paths_if, get_iterable_path
    from triton.backends.compiler import BaseBackend
    parameters = getattr(module_of(name), name).params
    values = [*args, *(named[parameter.name] for parameter in parameters[len(args):])]
    found = [("constexpr", None) if parameter.is_constexpr else native_specialize_impl(
        BaseBackend, value, False, not parameter.do_not_specialize, True)
        for parameter, value in zip(parameters, values)]
    kinds = tuple(kind for kind, _ in found)
    keys = ["" if kind == "constexpr" else key for kind, key in found]
    constants = ((path, get_iterable_path(values, path))
                 for path in find_paths_if(kinds, lambda _, kind: kind == "constexpr"))
    constants = tuple((path, getattr(value, "__name__", value)) for path, value in constants)  # of a function
    multiples = tuple(find_paths_if(keys, lambda _, key: key == "D"))
    options = ((key, named[key]) for key in ("maxnreg", "num_stages", "num_warps") if named.get(key))
    return name, kinds, constants, multiples, tuple(options)


def compiled(target, launch):
    """Compiles a signature without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    name, kinds, constants, multiples, options = launch
    backend, arch = target.split(":")
    kernel = getattr(module_of(name), name)
    constants = {path: getattr(module_of(value), value) if isinstance(value, str) else value
                 for path, value in constants}
    source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds)), constants,
                       {path: [["tt.divisibility", 16]] for path in multiples})
    return triton.compile(source, target=GPUTarget(backend, int(arch), 32), options=dict(options))


def usage(target, launch):
    """What a signature compiles to: dict of registers per thread, spilled bytes (all stack), shared bytes."""
    import triton
    kernel = compiled(target, launch)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return dict(registers=found["REG"], spilled=found["STACK"] + found["LOCAL"], shared=kernel.metadata.shared)


def compile_all(target, launches):
    """The `usage` of every signature, in order; one process per core."""
    with ProcessPoolExecutor(min(os.cpu_count(), 16), mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(usage, target), launches)
