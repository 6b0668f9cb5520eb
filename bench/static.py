"""Ahead-of-time compilation, without a GPU: registers, spills and shared memory of every launch kernels.py can choose.

A host function runs with stand-ins for its kernels, which record the launches. Each launch is reduced to the signature
that Triton compiles it by, and each signature is compiled for every target. `pytest -m static` checks the figures;
`python -m bench kernels --static` prints them.
"""

import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

import kernels
from bench import print_head, print_row

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# Shared memory per program, bytes. For NVIDIA the limit of the RTX 30, 40 and 50, which is smaller than that of the
# target itself: those GPUs get binaries of their own, not compiled here, with the same tiles.
TARGETS = {"cuda:80": 99 * 1024, "cuda:90": 99 * 1024, "cuda:100": 99 * 1024, "hip:gfx942": 64 * 1024}


# ---------------------------------------------------------------------------------------------------------------------
# The launches

class Recorder:
    """Stands in for a kernel and records what the host function would launch."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **named: self.launches.append((self.name, grid, args, named))


def record(function, *args, multiprocessors=132, **named):
    """The launches [(kernel name, grid, args, named)] of a host function; no kernel runs."""
    launches = []
    stand_ins = {name: Recorder(name, launches) for name in vars(kernels) if name.endswith("_kernel")}
    stand_ins["_multiprocessors"] = lambda device: multiprocessors
    originals = {name: getattr(kernels, name) for name in stand_ins}
    try:
        vars(kernels).update(stand_ins)
        function(*args, **named)
    finally:
        vars(kernels).update(originals)
    return launches


def signature(name, args, named):
    """What Triton compiles a launch by: types, constants, and which arguments are multiples of 16. Hashable."""
    types = {FP32: "*fp32", FP16: "*fp16", BF16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
    parameters = getattr(kernels, name).params
    options = tuple(sorted((key, named[key]) for key in ("num_warps", "num_stages", "maxnreg") if key in named))
    kinds, constants, multiples = [], [], []
    for i, parameter in enumerate(parameters):
        value = args[i] if i < len(args) else named[parameter.name]
        special = type(value) is int and not parameter.do_not_specialize
        constant = parameter.is_constexpr or value is None or special and value == 1
        if constant:
            constants.append((i, value))
        elif isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0 or special and value % 16 == 0:
            multiples.append(i)
        kind = types[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if type(value) is float else None
        kinds.append("constexpr" if constant else kind or ("i32" if abs(value) < 2**31 else "i64"))
    return name, tuple(kinds), tuple(constants), tuple(multiples), options


def attention_launches(T, G, D, dtype, aligned=True, S=4096, alibi=False):
    q = torch.empty(2, T, 2 * G, D, dtype=dtype)
    cache = torch.empty(2, 2, S, D, dtype=dtype) if aligned else torch.empty(2, 2, D, S + 1, dtype=dtype).mT
    slopes = torch.zeros(2 * G) if alibi else None
    lengths, ancestors = torch.zeros(2).int(), torch.zeros(2, T).long()
    return record(kernels.tree_attention_triton, q, cache, cache, lengths, ancestors, slopes=slopes)


def project_launches(M, k, dtype, temperature=None, gathered=False, aligned=True, C=4096, V=32000, multiprocessors=132):
    weight = torch.empty(V, C, dtype=dtype) if aligned else torch.empty(C, V + 1, dtype=dtype).T
    vocab_ids = torch.zeros(V, dtype=torch.int32) if gathered else None
    hidden, zeros = torch.empty(M, C, dtype=dtype), torch.zeros(M, dtype=torch.int64)
    noise = None if temperature is None else (temperature, 2**40, zeros, zeros)
    return record(kernels._project_triton, hidden, weight, vocab_ids, k, noise, multiprocessors=multiprocessors)


def commit_launches(P, D, dtype):
    kv = torch.empty(2, 2, 2, 2, 64, D, dtype=dtype)
    return record(kernels.commit_path_triton, kv, torch.zeros(2).int(), torch.zeros(2, P).long(), torch.zeros(2).int())


def signatures(launches):
    """The signatures of recorded launches, each once."""
    return list(dict.fromkeys(signature(name, args, named) for name, _, args, named in launches))


def all_launches():
    """The signatures of every shape class of every host function, each once."""
    launches = []
    for D in (16, 32, 48, 64, 80, 128, 192, 256):
        for dtype, rows in product((BF16, FP16), (8, 32, 64, 128)):
            launches += attention_launches(rows // 4, 4, D, dtype)
        for dtype in (FP32, BF16, FP16):
            launches += attention_launches(5, 4, D, dtype, aligned=False)
        launches += attention_launches(5, 4, D, FP32)
    for rows in (8, 32, 64, 128):
        launches += attention_launches(rows // 4, 4, 128, BF16, S=64)  # a single split
    for D in (16, 32, 64, 128, 256):  # ALiBi: every tile, in bfloat16; float16 takes the same registers
        for rows in (8, 32, 64, 128):
            launches += attention_launches(rows // 4, 4, D, BF16, alibi=True)
        launches += attention_launches(5, 4, D, BF16, aligned=False, alibi=True)
        launches += attention_launches(5, 4, D, FP32, alibi=True)
    for T in (1, 32, 64):  # Baichuan-13B: one query head per kv head
        launches += attention_launches(T, 1, 128, BF16, alibi=True) + attention_launches(T, 1, 128, FP16, alibi=True)
        launches += attention_launches(T, 1, 128, BF16, S=64, alibi=True)
    for M in (8, 32, 64):
        for gathered in (False, True):
            for temperature in (0.0, 0.8):
                launches += project_launches(M, 1, BF16, temperature, gathered)
            for k in (1, 8, 32):
                launches += project_launches(M, k, BF16, None, gathered)
        for k, temperature in ((1, 0.8), (8, None), (32, None)):
            launches += project_launches(M, k, FP16, temperature) + project_launches(M, k, BF16, temperature, C=4112)
            launches += project_launches(M, k, FP32, temperature)
            for dtype in (FP32, BF16, FP16):
                launches += project_launches(M, k, dtype, temperature, aligned=False)
    for multiprocessors in (1, 2, 4, 8, 16, 32, 64, 128, 256):  # they decide how many lists there are to merge
        for k, temperature in ((1, 0.8), (1, None), (32, None)):
            launches += project_launches(8, k, BF16, temperature, V=128256, multiprocessors=multiprocessors)
    launches += project_launches(8, 1, BF16, V=100)
    for P, D in product((1, 5, 17, 64), (16, 80, 256)):
        launches += commit_launches(P, D, BF16) + commit_launches(P, D, FP32)
    return signatures(launches)


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
    """Compiles one signature -> dict(registers per thread, spilled and shared in bytes)."""
    compiled = compile_launch(target, launch)
    used = cuda_usage(compiled.asm["cubin"]) if target.startswith("cuda") else amd_usage(compiled.asm["amdgcn"])
    return used | dict(shared=compiled.metadata.shared)


def cuobjdump(cubin, what):
    """The output of Triton's own cuobjdump on a binary."""
    import triton
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, what, path], capture_output=True, text=True, check=True).stdout


def cuda_usage(cubin):
    """The figures of a binary. The kernels have no arrays, so their stack is what ptxas spilled."""
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", cuobjdump(cubin, "--dump-resource-usage")))
    return dict(registers=int(found["REG"]), spilled=int(found["STACK"]) + int(found["LOCAL"]))


def amd_usage(assembly):
    """The figures in the metadata at the end of the assembly. Spilled bytes are its scratch memory per lane."""
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly))
    return dict(registers=int(found["vgpr_count"]), spilled=int(found["private_segment_fixed_size"]))


def compile_all(pairs):
    """The `usage` of every (target, signature) in `pairs`, in order; one process per core, at most 16."""
    with ProcessPoolExecutor(min(os.cpu_count(), 16), mp_context=get_context("spawn")) as pool:
        yield from pool.map(usage, *zip(*pairs), chunksize=8)


def shape_class(launch):
    """(kernel, dtype, tile, warps, stages): launches with equal ones share a row of the static table."""
    name, kinds, constants, multiples, options = launch
    parameters = getattr(kernels, name).arg_names
    named = {parameters[i]: value for i, value in constants}
    tile = " x ".join(str(named[key]) for key in parameters if key.startswith("BLOCK_") and key in named)
    options = dict(options)
    kernel = name.strip("_").removesuffix("_kernel") + " alibi" * ("slopes_ptr" in set(parameters) - set(named))
    return kernel, kinds[0][1:], tile, options["num_warps"], options.get("num_stages", "-")


def static_table():
    """Prints one row per shape class, the worst of its launches for each target; returns the rows as dicts."""
    launches = all_launches()
    pairs = [(target, launch) for launch in launches for target in TARGETS]
    classes = {}
    for (target, launch), used in zip(pairs, compile_all(pairs)):
        nothing = dict(launches=0, **dict.fromkeys(used, 0))
        worst = classes.setdefault(shape_class(launch), {}).setdefault(target, nothing)
        worst.update(launches=worst["launches"] + 1, **{key: max(worst[key], used[key]) for key in used})
    print(f"{len(launches)} launches: registers per thread / spilled bytes / bytes of shared memory, the worst per row")
    print_head("kernel", "dtype", "tile", "warps", "stages", "launches", *TARGETS)
    rows = []
    for key, targets in sorted(classes.items(), key=str):
        cells = [f"{used['registers']} / {used['spilled']} / {used['shared']}" for used in targets.values()]
        print_row(*key, next(iter(targets.values()))["launches"], *cells)
        rows.append(dict(zip(("kernel", "dtype", "tile", "warps", "stages"), key), **targets))
    return rows
