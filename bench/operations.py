"""The kernels held against their limits, for bench.py: on a GPU the time of each against the memory's bandwidth and
against what else a user would run; without one, what the compilers make of every launch that kernels.py can choose.
"""

import math
import os
import re
import statistics
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F

import kernels
from tools.tune import copy_bandwidth

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def print_head(*names):
    print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of time: what the compilers make of every launch

# Shared memory per program, bytes. For NVIDIA what RTX 30, 40 and 50 have, not the larger limit of the target itself:
# those GPUs compile their own code, which is not seen here, from the same tiles.
TARGETS = {"cuda:80": 99 * 1024, "cuda:90": 99 * 1024, "cuda:100": 99 * 1024, "hip:gfx942": 64 * 1024}


class Recorder:
    """Stands in for a kernel and keeps what the host function would launch."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **named: self.launches.append((self.name, grid, args, named))


def record(function, *args, multiprocessors=132, **named):
    """The launches [(kernel name, grid, args, named)] of a host function; nothing runs."""
    launches = []
    stand_ins = {name: Recorder(name, launches) for name in vars(kernels) if name.endswith("_kernel")}
    stand_ins["_multiprocessors"] = lambda device: multiprocessors
    found = {name: getattr(kernels, name) for name in stand_ins}
    try:
        vars(kernels).update(stand_ins)
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


def attention_launches(T, G, D, dtype, wide=True, S=4096, alibi=False):
    q = torch.empty(2, T, 2 * G, D, dtype=dtype)
    cache = torch.empty(2, 2, S, D, dtype=dtype) if wide else torch.empty(2, 2, D, S + 1, dtype=dtype).transpose(2, 3)
    slopes = torch.zeros(2 * G) if alibi else None
    lengths, ancestors = torch.zeros(2).int(), torch.zeros(2, T).long()
    return record(kernels.tree_attention_triton, q, cache, cache, lengths, ancestors, slopes=slopes)


def project_launches(M, k, dtype, temperature=None, gathered=False, wide=True, C=4096, V=32000, multiprocessors=132):
    weight = torch.empty(V, C, dtype=dtype) if wide else torch.empty(C, V + 1, dtype=dtype).T
    rows = torch.zeros(V, dtype=torch.int32) if gathered else None
    hidden, place = torch.empty(M, C, dtype=dtype), torch.zeros(M, dtype=torch.int64)
    noise = None if temperature is None else (temperature, 2**40, place, place)
    return record(kernels._project_triton, hidden, weight, rows, k, noise, multiprocessors=multiprocessors)


def commit_launches(P, D, dtype):
    kv = torch.empty(2, 2, 2, 2, 64, D, dtype=dtype)
    return record(kernels.commit_path_triton, kv, torch.zeros(2).int(), torch.zeros(2, P).long(), torch.zeros(2).int())


def all_launches():
    """The signatures of every shape class of every host function, each once."""
    launches = []
    for D in (16, 32, 48, 64, 80, 128, 192, 256):
        for dtype, rows in product((BF16, FP16), (8, 32, 64, 128)):
            launches += attention_launches(rows // 4, 4, D, dtype)
        for dtype in (FP32, BF16, FP16):
            launches += attention_launches(5, 4, D, dtype, wide=False)
        launches += attention_launches(5, 4, D, FP32)
    for rows in (8, 32, 64, 128):
        launches += attention_launches(rows // 4, 4, 128, BF16, S=64)  # a single split
    for D in (16, 32, 64, 128, 256):  # ALiBi: every tile, in bfloat16; float16 takes the same registers
        for rows in (8, 32, 64, 128):
            launches += attention_launches(rows // 4, 4, D, BF16, alibi=True)
        launches += attention_launches(5, 4, D, BF16, wide=False, alibi=True) + attention_launches(5, 4, D, FP32, alibi=True)
    for T in (1, 32, 64):  # Baichuan-13B: one query head a group
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
                launches += project_launches(M, k, dtype, temperature, wide=False)
    for multiprocessors in (1, 2, 4, 8, 16, 32, 64, 128, 256):  # these decide how many lists there are to merge
        for k, temperature in ((1, 0.8), (1, None), (32, None)):
            launches += project_launches(8, k, BF16, temperature, V=128256, multiprocessors=multiprocessors)
    launches += project_launches(8, 1, BF16, V=100)
    for P in (1, 5, 17, 64):
        for D in (16, 80, 256):
            launches += commit_launches(P, D, BF16) + commit_launches(P, D, FP32)
    return list(dict.fromkeys(signature(name, args, named) for name, _, args, named in launches))


def compile_launch(target, launch):
    """What triton.compile gives for one signature; needs no GPU."""
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
    """Compiles one signature: dict(registers per thread, spilled and shared in bytes)."""
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
    """Read from the binary. The kernels have no arrays, so their stack is what ptxas spilled."""
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", cuobjdump(cubin, "--dump-resource-usage")))
    return dict(registers=int(found["REG"]), spilled=int(found["STACK"]) + int(found["LOCAL"]))


def amd_usage(assembly):
    """Read from the metadata at the end of the assembly. Spilled bytes: its scratch memory per lane."""
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly))
    return dict(registers=int(found["vgpr_count"]), spilled=int(found["private_segment_fixed_size"]))


def compile_all(pairs):
    """usage of every (target, signature) in `pairs`, in order; one process per core, up to 16 of them."""
    with ProcessPoolExecutor(min(os.cpu_count(), 16), mp_context=get_context("spawn")) as pool:
        yield from pool.map(usage, *zip(*pairs), chunksize=8)


def shape_class(launch):
    """(kernel, dtype, tile, warps, stages): the launches that share a row of the static table."""
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
    print(f"{len(launches)} launches: registers per thread / spilled bytes / bytes of shared memory, the worst of each row")
    print_head("kernel", "dtype", "tile", "warps", "stages", "launches", *TARGETS)
    rows = []
    for key, targets in sorted(classes.items(), key=str):
        cells = [f"{used['registers']} / {used['spilled']} / {used['shared']}" for used in targets.values()]
        count = next(iter(targets.values()))["launches"]
        print(f"| {' | '.join(map(str, key))} | {count} | {' | '.join(cells)} |")
        rows.append(dict(zip(("kernel", "dtype", "tile", "warps", "stages"), key), **targets))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU: time against the bandwidth and against what else there is

HEADS = {"7b": (32, 32, 128), "8b": (32, 8, 128), "70b": (64, 8, 128)}  # query heads, key/value heads, head size
PROJECTIONS = {"7b": (4096, 32000), "8b": (4096, 128256), "qwen-7b": (3584, 151936), "70b": (8192, 128256)}  # C, V
LAYERS = {"7b": 32, "8b": 32, "70b": 80}


def random_trees(B, T, generator):
    """Ancestor bitmasks int64 [B, T] of trees in which every node's parent is any earlier node."""
    parents = [[int(torch.randint(0, node, (), generator=generator)) for node in range(1, T)] for _ in range(B)]
    masks = [[1] for _ in range(B)]
    for row, parent in zip(masks, parents):
        for node in range(1, T):
            row.append(row[parent[node - 1]] | 1 << node)
    return torch.tensor([[mask - (mask >> 63 << 64) for mask in row] for row in masks])


def attention_inputs(heads, B, prefix, T, device, dtype=BF16, count=1, capacity=0):
    """`count` times (q, k_cache, v_cache, lengths, ancestors) of one verify step, all with the same lengths and trees.
    The caches have `capacity` rows, or where that is too few, room for little more than the tree."""
    Hq, Hkv, D = heads
    S = max(capacity, math.ceil((prefix + T) / 64) * 64)
    lengths = torch.full((B,), prefix, device=device, dtype=torch.int32)
    ancestors = random_trees(B, T, torch.Generator().manual_seed(0)).to(device)
    inputs = []
    for _ in range(count):
        k, v = torch.randn(2, B, Hkv, S, D, device=device, dtype=dtype)
        inputs.append((torch.randn(B, T, Hq, D, device=device, dtype=dtype), k, v, lengths, ancestors))
    return inputs


def attention_rivals(inputs, flex):
    """{name: [call for each input]} of the same attention by other means; out [B, T, Hq, D].

    sdpa: the dense mask and enable_gqa. sdpa packed: a group's query heads as rows, so that no kernel has to know of
    groups. flex: FlexAttention (the function, compiled or not). Masks are made beforehand, in the form that needs no
    conversion in the call: added to the scores, rows of a multiple of 16 bytes, a block mask for FlexAttention.
    """
    from torch.nn.attention.flex_attention import create_block_mask
    q, k, v, lengths, ancestors = inputs[0]
    B, T, Hq, D = q.shape
    Hkv = k.shape[1]
    N = int(lengths.max()) + T
    mask = torch.full((B, 1, T, math.ceil(N / 8) * 8), -math.inf, device=q.device, dtype=q.dtype)[..., :N]
    mask.masked_fill_(kernels.tree_mask(lengths, ancestors, N).visible[:, None], 0)
    rows = torch.arange(T, device=q.device).repeat_interleave(Hq // Hkv)
    packed_mask = torch.empty(B, 1, len(rows), mask.stride(2), device=q.device, dtype=q.dtype)[..., :N]
    packed_mask.copy_(mask[:, :, rows])

    def visible(b, head, node, row):
        below = (row - lengths[b]).clamp(0, 63)
        return (row < lengths[b]) | ((ancestors[b, node] >> below) & 1 == 1)

    block_mask = create_block_mask(visible, B, None, T, N, device=q.device)

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True).transpose(1, 2)

    def packed(q, k, v):
        rows = q.view(B, T, Hkv, -1, D).permute(0, 2, 1, 3, 4).reshape(B, Hkv, -1, D)
        out = F.scaled_dot_product_attention(rows, k, v, packed_mask).view(B, Hkv, T, -1, D)
        return out.permute(0, 2, 1, 3, 4).reshape(B, T, Hq, D)

    def flexible(q, k, v):
        return flex(q.transpose(1, 2), k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2)

    return {name: [lambda x=x, call=call: call(x[0], x[1][:, :, :N], x[2][:, :, :N]) for x in inputs]
            for name, call in {"sdpa": sdpa, "sdpa packed": packed, "flex": flexible}.items()}


def project_rivals(inputs, k, temperature):
    """{name: [call for each (hidden, weight)]}: what project_topk replaces, in two forms, and what project_sample does,
    with torch's own noise and without."""
    def log_softmax(hidden, weight):
        return torch.log_softmax((hidden @ weight.T).float(), -1).topk(k)

    def logsumexp(hidden, weight):  # fewer passes over the logits
        logits = hidden @ weight.T
        values, tokens = logits.topk(k)
        return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens

    def gumbel(hidden, weight):
        logits = (hidden @ weight.T).float() / temperature
        return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)  # -log of an exponential is Gumbel

    def argmax(hidden, weight):
        return (hidden @ weight.T).argmax(-1)

    return {name: [lambda x=x, call=call: call(*x) for x in inputs] for name, call in
            dict(log_softmax=log_softmax, logsumexp=logsumexp, gumbel=gumbel, argmax=argmax).items()}


def median_us(calls):
    """Median microseconds of one call, all of them replayed in one CUDA graph: no launch gaps, and where together they
    move more than the L2 holds, no answers from it."""
    from triton.testing import do_bench
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return do_bench(graph.replay, warmup=20, rep=100, return_mode="median") * 1000 / len(calls)


def copies(size):
    """How many inputs of `size` bytes outdo the L2 twice over."""
    return min(max(2, math.ceil(2 * torch.cuda.get_device_properties().L2_cache_size / size)), 64)


def timed_row(label, size, bandwidth, ours, rivals, differs):
    """One row of the table, printed: our time, its share of the bandwidth, the rivals' times, and how much faster than
    the best of them. A rival that cannot run, or whose result differs, gives the reason instead of a time."""
    row = label | dict(us=median_us(ours), bytes=size)
    row["share_of_copy"] = size / bandwidth * 1e6 / row["us"]
    want = ours[0]()
    for name, calls in rivals.items():
        try:
            difference = differs(calls[0](), want)
            close = difference < 0.1  # bfloat16, and torch rounds even the logits
            row[name] = median_us(calls) if close else f"the result differs by {difference}"
        except Exception as error:  # out of memory, or whatever a compiler raises: the other times still count
            row[name] = f"{type(error).__name__}: {error}"[:300]
    times = [row[name] for name in rivals if not isinstance(row[name], str)]
    row["speed_up"] = min(times) / row["us"] if times else None
    cells = [*label.values(), f"{row['us']:.1f}", f"{row['share_of_copy']:.0%}"]
    cells += [row[name].split(":")[0] if isinstance(row[name], str) else f"{row[name]:.1f}" for name in rivals]
    cells += [f"{row['speed_up']:.2f}x"] if times else ["-"] if rivals else []
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return row


def bench_attention(args, bandwidth, device):
    from torch.nn.attention.flex_attention import flex_attention
    print_head("heads", "batch", "prefix", "T", "us", "of copy", "sdpa", "sdpa packed", "flex", "against the best")
    rows = []
    for name, B, prefix, T in product(args.heads, args.batch_sizes, args.prefixes, args.tree_sizes):
        torch._dynamo.reset()  # else flex falls back to its slow form after a few shapes
        Hq, Hkv, D = HEADS[name]
        size = 2 * (2 * B * Hkv * (prefix + T) * D + 2 * B * T * Hq * D)
        inputs = rivals = None  # the last row's, before this row's are made
        inputs = attention_inputs(HEADS[name], B, prefix, T, device, count=copies(size), capacity=args.capacity)
        rivals = attention_rivals(inputs, torch.compile(flex_attention, dynamic=False))
        label = dict(heads=name, batch=B, prefix=prefix, T=T)
        rows.append(timed_row(label, size, bandwidth, [lambda x=x: kernels.tree_attention(*x) for x in inputs], rivals,
                              lambda out, want: (out - want).abs().max().item()))
    return rows


def bench_projections(args, bandwidth, device):
    rows = []
    for table, rivals in (("top", ("log_softmax", "logsumexp")), ("argmax", ("argmax",)), ("sample", ("gumbel",))):
        print_head("model", "C", "V", "M", "operation", "us", "of copy", *rivals, "against the best")
        for name, (C, V) in PROJECTIONS.items():
            weights = [torch.randn(V, C, device=device, dtype=BF16) / C ** 0.5 for _ in range(copies(2 * V * C))]
            for M, k in product(args.rows, (8, 32) if table == "top" else (1,)):
                inputs = [(torch.randn(M, C, device=device, dtype=BF16), weight) for weight in weights]
                place, temperature = torch.arange(M, device=device), 0.8 if table == "sample" else 0.0
                found = project_rivals(inputs, k, temperature or 1.0)
                if table == "top":
                    calls = [lambda x=x: kernels.project_topk(*x, k) for x in inputs]
                else:
                    calls = [lambda x=x: kernels.project_sample(*x, temperature, 0, place, place) for x in inputs]
                label = dict(model=name, C=C, V=V, M=M, operation=f"{table} {k}")
                # samples are not compared: other noise, and other ties where torch rounds the logits
                rows.append(timed_row(label, 2 * C * (V + M), bandwidth, calls, {rival: found[rival] for rival in rivals},
                                      lambda out, want: (out[0] - want[0]).abs().max().item() if table == "top" else 0.0))
    return rows


def bench_commit(args, bandwidth, device):
    print_head("heads", "batch", "moved rows", "us", "of copy")
    rows = []
    for name, B in product(args.heads, args.batch_sizes):
        Hq, Hkv, D = HEADS[name]
        caches = [torch.randn(LAYERS[name], 2, B, Hkv, 128, D, device=device, dtype=BF16) for _ in range(8)]
        lengths = torch.full((B,), 100, device=device, dtype=torch.int32)
        path = torch.tensor([[0, 2, 5, 9, 14]], device=device).repeat(B, 1)
        count = torch.full((B,), 5, device=device)
        size = 2 * LAYERS[name] * 2 * B * Hkv * 4 * D * 2  # four rows read and written, in keys and values
        calls = [lambda kv=kv: kernels.commit_path(kv, lengths, path, count) for kv in caches]
        rows.append(timed_row(dict(heads=name, batch=B, moved=4 * B), size, bandwidth, calls, {}, None))
    return rows


def bench(args):
    """Prints the tables; returns what goes into the JSON line. Needs CUDA."""
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(torch.device("cuda"))
    print(f"copy bandwidth: {bandwidth / 1e9:.0f} GB/s (bytes read and written)")
    result = dict(copy_gb_per_s=bandwidth / 1e9)
    for name, run in dict(attention=bench_attention, projections=bench_projections, commit=bench_commit).items():
        if name in args.operations:
            result[name] = rows = run(args, bandwidth, "cuda")
            gains = [row["speed_up"] for row in rows if row["speed_up"] is not None]
            if gains:
                print(f"{name}: {min(gains):.2f}x at least, {statistics.median(gains):.2f}x in the median")
    return result
