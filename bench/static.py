"""Ahead-of-time compilation, without a GPU: registers, spills and shared memory of every launch kernels.py can choose.

The launches of the host functions are recorded instead of run. Each is reduced to the signature that Triton compiles it
by, and each signature is compiled for every target. `pytest -m static` checks the figures; `python -m bench kernels
--static` prints them. Both run with triton 3.6 and 3.7, of which each has its own registers.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch

import kernels
from bench import Table
from model import InputError

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# Shared memory per program, bytes. For NVIDIA the limit of the RTX 30, 40 and 50, which is smaller than that of the
# target itself: those GPUs get binaries of their own, not compiled here, with the same tiles.
TARGETS = {"cuda:80": 99 * 1024, "cuda:90": 99 * 1024, "cuda:100": 99 * 1024, "hip:gfx942": 64 * 1024}


# ---------------------------------------------------------------------------------------------------------------------
# The launches

def record(function, *args, multiprocessors=132, **named):
    """The launches [(kernel name, grid, args, named)] of one of the kernels' functions; no kernel runs."""
    from triton.runtime.jit import JITFunction
    launches = []

    def run(kernel, *args, grid, warmup, **named):
        launches.append((kernel.__name__, grid, args, named))

    with (patch.object(JITFunction, "run", run), patch.object(kernels, "runs_triton", lambda *_: True),
          patch.object(kernels, "_multiprocessors", lambda _: multiprocessors)):
        function(*args, **named)
    return launches


def signature(name, args, named):
    """What Triton compiles a launch by: types, constants, and which arguments are multiples of 16. Hashable."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend
    kinds, constants, multiples = [], [], []
    for i, parameter in enumerate(getattr(kernels, name).params):
        value, key = args[i] if i < len(args) else named[parameter.name], None
        kind = "constexpr"
        if not parameter.is_constexpr:
            kind, key = native_specialize_impl(BaseBackend, value, False, not parameter.do_not_specialize, True)
        kinds.append(kind)
        constants += [(i, value)] if kind == "constexpr" else []
        multiples += [i] if key == "D" else []
    options = tuple(sorted((key, named[key]) for key in ("num_warps", "num_stages", "maxnreg") if key in named))
    return name, tuple(kinds), tuple(constants), tuple(multiples), options


def signatures(launches):
    """The signatures of recorded launches, each once."""
    return list(dict.fromkeys(signature(name, args, named) for name, _, args, named in launches))


def attention_launches(T, G, D, dtype, aligned=True, S=4096, alibi=False):
    q = torch.empty(2, T, 2 * G, D, dtype=dtype)
    cache = torch.empty(2, 2, S, D, dtype=dtype) if aligned else torch.empty(2, 2, D, S + 1, dtype=dtype).mT
    slopes = torch.zeros(2 * G) if alibi else None
    lengths, ancestors = torch.zeros(2).int(), torch.zeros(2, T).long()
    return record(kernels.tree_attention, q, cache, cache, lengths, ancestors, slopes=slopes)


def project_launches(M, k, dtype, temperature=None, gathered=False, aligned=True, C=4096, V=32000, multiprocessors=132):
    weight = torch.empty(V, C, dtype=dtype) if aligned else torch.empty(C, V + 1, dtype=dtype).T
    vocab_ids = torch.zeros(V, dtype=torch.int32) if gathered else None
    hidden, zeros = torch.empty(M, C, dtype=dtype), torch.zeros(M, dtype=torch.int64)
    noise = None if temperature is None else (temperature, 2**40, zeros, zeros, 0)
    return record(kernels._project_triton, hidden, weight, vocab_ids, k, noise, multiprocessors=multiprocessors)


def commit_launches(P, D, dtype):
    kv = torch.empty(2, 2, 2, 2, 64, D, dtype=dtype)
    return record(kernels.commit_path, kv, torch.zeros(2).int(), torch.zeros(2, P).long(), torch.zeros(2).int())


def norm_launches(C, dtype, kind):
    """kind: "rms", "layer", or "scale": alone, without a weight."""
    x, weight = torch.empty(3, C, dtype=dtype), torch.empty(C, dtype=dtype)
    arguments = dict(rms=(x, weight), layer=(x, weight, weight), scale=(None, None))
    return record(kernels.add_norm, x, *arguments[kind])


def rope_launches(D, dtype, normed):
    qkv, kv = torch.empty(2, 3, 12, D, dtype=dtype), torch.empty(2, 2, 2, 64, D, dtype=dtype)
    angles, weight = torch.empty(2, 3, 1, D, dtype=dtype), torch.empty(D, dtype=dtype) if normed else None
    rope = None if D % 2 else (angles, angles)
    return record(kernels.rope_cache, qkv, rope, kv, torch.arange(3).expand(2, 3), weight, weight)


def mix_launches(C, n_head, dtype):
    z, kv = torch.empty(3, C, dtype=dtype), torch.empty(3, 2 * C, dtype=dtype)
    return record(kernels.cosine_mix, z, z, kv, n_head)


def draft_launches(K, W, T):
    """Of best_guesses at the last depth, and of best_tree."""
    W = min(W, T - 1)
    n = min(W * W, T - 1)
    joint, lists = torch.empty(2, K, n), torch.empty(2, K, n, dtype=torch.int64)
    logprobs = torch.empty(2, W if K > 1 else 1, W)
    launches = record(kernels.best_guesses, logprobs, logprobs.long(), joint, lists, lists, K - 1)
    return launches + record(kernels.best_tree, torch.zeros(2).long(), joint, lists, lists, T)


def lookup_launches(n):
    return record(kernels.lookup, torch.empty(2, 8192, dtype=torch.int32), torch.empty(2, dtype=torch.int32), n)


def merge_launches(T, n):
    nodes = torch.empty(2, T, dtype=torch.int64)
    return record(kernels.merge_chain, *[nodes] * 4, torch.empty(2, n, dtype=torch.int64))


def accept_launches(T):
    nodes = torch.empty(2, T, dtype=torch.int64)
    return record(kernels.accept_path, *[nodes] * 5, torch.empty(2, dtype=torch.int32), min(T, 5))


def glu_launches(activation, dtype):
    return record(kernels.glu, torch.empty(3, 2 * 11008, dtype=dtype), activation)


def nucleus_launches(V):
    return record(kernels.nucleus, torch.empty(3, V), 0.9)


def cases(launches, **choices):
    """The launches of every combination of arguments."""
    return sum((launches(**dict(zip(choices, case))) for case in product(*choices.values())), [])


def all_launches():
    """The signatures of every shape class of every host function, each once. Launches that differ from others in ways
    that never showed in the registers are left out: see the comments."""
    D = (16, 32, 64, 128, 256)  # others have the tile of the next power of two, and masks
    T = (2, 8, 16, 32)  # with 4 query heads a group: tiles of up to 128 query rows
    M = (8, 32, 64)
    attention, project = partial(cases, attention_launches, G=[4]), partial(cases, project_launches)
    launches = attention(T=T, D=(*D, 80, 192), dtype=[BF16]) + attention(T=T, D=D, dtype=[FP16])
    # loads of single elements take fewer registers with a mask than without, float32 as many
    launches += attention(T=[5], D=D, dtype=[FP32, BF16, FP16], aligned=[True, False])
    launches += attention(T=[2, 16], D=[128], dtype=[BF16], S=[64], alibi=[False, True])  # a single split
    launches += attention(T=T, D=D, dtype=[BF16], alibi=[True])  # float16 takes the same registers
    launches += attention(T=[5], D=D, dtype=[FP32, BF16], aligned=[True, False], alibi=[True])
    # a greedy sample is a sample without its noise, so one of the two is gathered; masked channels cost two registers
    launches += project(M=M, k=[1], dtype=[BF16], temperature=[0.0, 0.8])
    launches += project(M=M, k=[1], dtype=[BF16], temperature=[0.8], gathered=[True])
    launches += project(M=M, k=[1, 8, 32], dtype=[BF16], gathered=[False, True])
    launches += project(M=M, k=[8], dtype=[BF16], C=[4112])
    launches += project(M=M, k=[8], dtype=[FP32], aligned=[False])
    for k, temperature in ((1, 0.8), (8, None), (32, None)):
        launches += project(M=M, k=[k], dtype=[FP32, FP16], temperature=[temperature])
        launches += project(M=M, k=[k], dtype=[BF16, FP16], temperature=[temperature], aligned=[False])
    for k, temperature in ((1, 0.8), (1, None), (32, None)):  # multiprocessors: how many lists there are to merge
        launches += project(M=[8], k=[k], dtype=[BF16], temperature=[temperature], V=[128256],
                            multiprocessors=[2**i for i in range(9)])
    launches += project(M=[8], k=[1], dtype=[BF16], V=[100])
    launches += cases(commit_launches, P=[1, 5, 17, 64], D=[16, 80, 256], dtype=[BF16, FP32])
    return signatures(launches + small_launches())


def small_launches():
    """Those of the operations between the products. float16 takes what bfloat16 does."""
    both = dict(dtype=[BF16, FP32])
    launches = cases(norm_launches, C=[16, 1000, 4096, 16384], kind=["rms", "layer", "scale"], **both)
    launches += cases(rope_launches, D=[16, 21, 64, 80, 128, 256], normed=[False, True], **both)
    launches += cases(glu_launches, activation=["silu", "gelu"], **both)
    launches += cases(mix_launches, C=[1024, 16384], n_head=[1, 8], **both)
    launches += cases(draft_launches, K=[4], W=[4, 8, 32], T=[16, 64]) + draft_launches(8, 8, 64)
    launches += draft_launches(32, 8, 64) + draft_launches(16, 8, 64)
    launches += cases(lookup_launches, n=[1, 4, 10, 31, 63]) + cases(merge_launches, T=[1, 8, 16, 33], n=[1, 4, 10, 31])
    launches += merge_launches(1, 63) + merge_launches(63, 1) + merge_launches(54, 10)
    return launches + cases(accept_launches, T=[1, 16, 64]) + nucleus_launches(32000)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling them

def compile_launch(target, launch):
    """Compiles one signature for a target -> Triton's compiled kernel. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    name, kinds, constants, multiples, options = launch
    backend, arch = target.split(":")
    kernel = getattr(kernels, name)
    source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds)), {(i,): value for i, value in constants},
                       {(i,): [["tt.divisibility", 16]] for i in multiples})
    gpu = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    return triton.compile(source, target=gpu, options=dict(options))


def usage(target, launch):
    """Compiles one signature -> dict(registers per thread, spilled and shared in bytes). Spilled is NVIDIA's stack, as
    the kernels have no arrays, and AMD's scratch memory per lane."""
    compiled = compile_launch(target, launch)
    if target.startswith("cuda"):
        text, pattern = cuobjdump(compiled.asm["cubin"], "--dump-resource-usage"), r"\b(REG|STACK|LOCAL):(\d+)"
    else:
        text, pattern = compiled.asm["amdgcn"], r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)"
    found = {name: int(value) for name, value in re.findall(pattern, text)}
    registers = found.pop("REG" if target.startswith("cuda") else "vgpr_count")
    return dict(registers=registers, spilled=sum(found.values()), shared=compiled.metadata.shared)


def cuobjdump(cubin, what):
    """The output of Triton's own cuobjdump on a binary."""
    import triton
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def compile_all(pairs):
    """The `usage` of every (target, signature) in `pairs`, in order; one process per core, at most 16."""
    with ProcessPoolExecutor(min(os.cpu_count(), 16), mp_context=get_context("spawn")) as pool:
        yield from pool.map(usage, *zip(*pairs), chunksize=8)


def shape_class(launch):
    """(kernel, dtype, tile, warps, stages): launches with equal ones share a row of the static table."""
    name, kinds, constants, multiples, options = launch
    parameters, options = getattr(kernels, name).arg_names, dict(options)
    constants = {parameters[i]: value for i, value in constants}
    tile = " x ".join(str(value) for key, value in constants.items() if key.startswith("BLOCK_"))
    alibi = "slopes_ptr" in parameters and "slopes_ptr" not in constants
    kernel = name.strip("_").removesuffix("_kernel") + " alibi" * alibi
    return kernel, kinds[0][1:], tile, options["num_warps"], options.get("num_stages", "-")


def bench(args):
    """`python -m bench kernels --static`: prints one row per shape class, the worst of its launches for each target;
    returns the rows."""
    if not kernels.HAS_TRITON:
        raise InputError("--static needs triton, which is not installed; pip install triton")
    launches, classes = all_launches(), defaultdict(lambda: defaultdict(Counter))
    pairs = [(target, launch) for launch, target in product(launches, TARGETS)]
    for (target, launch), used in zip(pairs, compile_all(pairs)):
        worst = classes[shape_class(launch)][target]
        worst["launches"] += 1
        for figure, value in used.items():
            worst[figure] = max(worst[figure], value)
    print(f"{len(launches)} launches: registers per thread / spilled bytes / bytes of shared memory, the worst per row")
    names = ("kernel", "dtype", "tile", "warps", "stages")
    table = Table({name: f"{name} {{}}" for name in (*names, "launches", *TARGETS)})
    for key, targets in sorted(classes.items(), key=str):
        cells = {target: "{registers} / {spilled} / {shared}".format_map(used) for target, used in targets.items()}
        table.add(dict(zip(names, key)) | targets, launches=targets["cuda:80"]["launches"], **cells)
    return dict(bench="kernels-static", table=table)
