"""The kernels held against their limits: `python bench.py kernels`, and without a GPU `python bench.py kernels --static`.

The static table comes from compiling every launch that kernels.py can choose, for GPUs that need not be there, and
reading registers, spilled bytes and shared memory from the binaries.
"""

import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import kernels

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# ---------------------------------------------------------------------------------------------------------------------
# Ahead of time: what the compilers make of every launch

# Shared memory per program, bytes. For NVIDIA that of the small GPUs of a generation (RTX 30, 40 and 50), so that every
# GPU from compute capability 8.0 on runs every launch.
TARGETS = {"cuda:80": 99 * 1024, "cuda:90": 99 * 1024, "cuda:100": 99 * 1024, "hip:gfx942": 64 * 1024}
MULTIPROCESSORS = (4, 24, 132, 304)


class Recorder:
    """Stands in for a kernel and keeps what the host function would launch."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **named: self.launches.append((self.name, grid, args, named))


def record(function, *args, multiprocessors=132, **named):
    """The launches [(kernel name, grid, args, named)] of a host function; nothing runs."""
    launches = []
    found = {name: value for name, value in vars(kernels).items() if name.endswith("_kernel") or name == "_multiprocessors"}
    try:
        kernels._multiprocessors = lambda device: multiprocessors
        for name in found.keys() - {"_multiprocessors"}:
            setattr(kernels, name, Recorder(name, launches))
        function(*args, **named)
    finally:
        vars(kernels).update(found)
    return launches


def signature(name, args, named):
    """What Triton compiles a launch by: types, constants, and which arguments are multiples of 16. Hashable."""
    types = {FP32: "*fp32", FP16: "*fp16", BF16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
    parameters = getattr(kernels, name).params
    options = tuple(sorted((key, value) for key, value in named.items() if key in ("num_warps", "num_stages", "maxnreg")))
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


def attention_launches(T, G, D, dtype, wide=True, S=4096):
    q = torch.empty(2, T, 2 * G, D, dtype=dtype)
    cache = torch.empty(2, 2, S, D, dtype=dtype) if wide else torch.empty(2, 2, D, S + 1, dtype=dtype).transpose(2, 3)
    return record(kernels.tree_attention_triton, q, cache, cache, torch.zeros(2).int(), torch.zeros(2, T).long())


def project_launches(M, k, dtype, temperature=0.0, gathered=False, wide=True, C=4096, V=32000, multiprocessors=132):
    weight = torch.empty(V, C, dtype=dtype) if wide else torch.empty(C, V + 1, dtype=dtype).T
    rows = torch.zeros(V, dtype=torch.int32) if gathered else None
    place = torch.zeros(M, dtype=torch.int64)
    return record(kernels._project_triton, torch.empty(M, C, dtype=dtype), weight, rows, k, temperature, 2**40, place, place,
                  multiprocessors=multiprocessors)


def commit_launches(P, D, dtype):
    kv = torch.empty(2, 2, 2, 2, 64, D, dtype=dtype)
    return record(kernels.commit_path_triton, kv, torch.zeros(2).int(), torch.zeros(2, P).long(), torch.zeros(2).int())


def all_launches():
    """Every shape class of every host function, as signatures without repetition: {signature: None}."""
    head_sizes = (16, 32, 48, 64, 80, 96, 128, 192, 256)
    launches = []
    for D in head_sizes:
        for T, G in ((1, 1), (1, 8), (8, 4), (16, 4), (16, 8)):
            launches += attention_launches(T, G, D, BF16)
        launches += attention_launches(5, 4, D, FP32)
        launches += attention_launches(5, 4, D, FP32, wide=False) + attention_launches(5, 4, D, BF16, wide=False)
    for T, G in ((1, 8), (8, 4), (16, 4), (16, 8)):
        launches += attention_launches(T, G, 128, FP16) + attention_launches(T, G, 128, BF16, S=256)  # a single split
    for M in (1, 32, 64):
        for gathered in (False, True):
            launches += project_launches(M, 1, BF16, 0.8, gathered)
            for k in (1, 2, 4, 8, 16, 32):
                launches += project_launches(M, k, BF16, gathered=gathered)
        for k, temperature in ((1, 0.8), (4, 0.0), (32, 0.0)):
            launches += project_launches(M, k, FP16, temperature) + project_launches(M, k, BF16, temperature, C=4112)
            for wide in (True, False):
                launches += project_launches(M, k, FP32, temperature, wide=wide)
            launches += project_launches(M, k, BF16, temperature, wide=False)
    for multiprocessors in MULTIPROCESSORS:
        for k in (1, 2, 4, 8, 16, 32):
            launches += project_launches(8, k, BF16, V=128256, multiprocessors=multiprocessors)
        launches += project_launches(8, 1, BF16, 0.8, V=128256, multiprocessors=multiprocessors)
    for P in (1, 5, 17, 64):
        for D in (16, 80, 128, 256):
            launches += commit_launches(P, D, BF16) + commit_launches(P, D, FP32)
    return list(dict.fromkeys(signature(name, args, named) for name, _, args, named in launches))


def compile_for(target, launch):
    """Compiles one signature: dict(registers, spilled, shared), spilled and shared in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    name, kinds, constants, multiples, options = launch
    backend, arch = target.split(":")
    kernel = getattr(kernels, name)
    source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds)), {(i,): value for i, value in constants},
                       {(i,): [["tt.divisibility", 16]] for i in multiples})
    gpu = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    compiled = triton.compile(source, target=gpu, options=dict(options))
    used = cuda_usage(compiled.asm["cubin"]) if backend == "cuda" else amd_usage(compiled.asm["amdgcn"])
    return used | dict(shared=compiled.metadata.shared)


def cuda_usage(cubin):
    """Read from the binary. The kernels have no arrays, so their stack is what ptxas spilled."""
    import triton
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [tool, "--dump-resource-usage", path]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", output))
    return dict(registers=int(found["REG"]), spilled=int(found["STACK"]) + int(found["LOCAL"]))


def amd_usage(assembly):
    """Read from the metadata at the end of the assembly. Spilled bytes: its scratch memory per lane."""
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly))
    return dict(registers=int(found["vgpr_count"]), spilled=int(found["private_segment_fixed_size"]))


def compile_all(pairs):
    """compile_for over [(target, signature)], one process per core, in order."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_for, *zip(*pairs), chunksize=8)


def shape_class(launch):
    """(kernel, dtype, tile, warps, stages): the launches that share a row of the static table."""
    name, kinds, constants, multiples, options = launch
    parameters = getattr(kernels, name).arg_names
    named = {parameters[i]: value for i, value in constants}
    tile = " x ".join(str(named[key]) for key in parameters if key.startswith("BLOCK_") and key in named)
    options = dict(options)
    return name.strip("_").removesuffix("_kernel"), kinds[0][1:], tile, options["num_warps"], options.get("num_stages", "-")


def static_table():
    """Prints one row per shape class, the worst of its launches for each target; returns the rows as dicts."""
    launches = all_launches()
    pairs = [(target, launch) for launch in launches for target in TARGETS]
    classes = {}
    for (target, launch), used in zip(pairs, compile_all(pairs)):
        worst = classes.setdefault(shape_class(launch), {}).setdefault(target, dict(launches=0, **dict.fromkeys(used, 0)))
        worst.update(launches=worst["launches"] + 1, **{key: max(worst[key], used[key]) for key in used})
    print(f"{len(launches)} launches; registers per thread / spilled bytes / shared memory in bytes, the worst of each row\n")
    print("| kernel | dtype | tile | warps | stages | launches | " + " | ".join(TARGETS) + " |\n|---|---|---|" + "--:|" * 7)
    rows = []
    for key, targets in sorted(classes.items(), key=str):
        cells = [f"{used['registers']} / {used['spilled']} / {used['shared']}" for used in targets.values()]
        count = next(iter(targets.values()))["launches"]
        print(f"| {' | '.join(map(str, key))} | {count} | {' | '.join(cells)} |")
        rows.append(dict(zip(("kernel", "dtype", "tile", "warps", "stages"), key), **targets))
    return rows
