"""What the kernels take, without a GPU.

    python -m tests.static launches               # of a step, for trees of several sizes
    python -m tests.static compile [--out FILE]   # registers, spills and shared memory; minutes

Triton launches are recorded instead of run. In a step on the meta device they are counted together
with the torch operations that are not views: a lower bound, as an operation may take several. And
every signature that Triton compiles a launch of kernels.py by is compiled for every target: `pytest
-m static` checks registers, spills and shared memory.
"""

import contextlib
import inspect
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
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from bench import Record, Table
from bench.report import STATIC, TARGETS
from clover import CloverHeads
from generate import Decoder, fixed_plan
from model import GPT, InputError
from tools.cli import command
from tools.flags import DEMO, Parser

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT32 = torch.int32
DTYPES = {name: kinds[-1] for name, kinds in kernels.DTYPES.items()}
SIZES = dict(B=2, L=2, M=3, T=3, H=12, Hq=8, Hkv=2, S=4096, C=4096, V=32000, n=32000)  # by default
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
        "_unsafe_view"}

# Shared memory per program, bytes. For NVIDIA the limit of the RTX 30, 40 and 50, smaller than that
# of the target itself: these GPUs get binaries of their own, not compiled here, of the same tiles.
SHARED = dict(zip(TARGETS, (101376, 101376, 101376, 65536)))
DATA_CENTRES = TARGETS[1:3]  # what only these GPUs launch may take 232448
CLASS = "kernel", "dtype", "tile", "warps", "stages"
STEP = {"tree size": "tree_size {}", "drafted by": "drafted_by {}", "launches": "launches {}",
        "most of them": "most {}"}


@contextlib.contextmanager
def recorded(multiprocessors=132, capability=9):
    """Yields the list of launches (kernel name, grid, args, named), none of which runs."""
    if not kernels.HAS_TRITON:
        raise InputError("this needs triton, which is not installed; pip install triton")
    from triton.runtime.jit import JITFunction
    launches = []

    def run(kernel, *args, grid, warmup, **named):
        launches.append((kernel.__name__, grid, args, named))

    with (patch.object(JITFunction, "run", run),
          patch.object(kernels, "runs_triton", lambda *_: True),
          patch.object(kernels, "_capability", lambda _: capability),
          patch.object(kernels, "sm_count", lambda _: multiprocessors)):
        yield launches


def short_name(kernel):
    return kernel.strip("_").removesuffix("_kernel")


# -------------------------------------------------------------------------------------------------
# The launches of a step

class Launches(TorchDispatchMode):
    """Counts torch's operations by name while it is active."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        with self:
            result = operation.decompose(*args, **kwargs or {})  # into those that have kernels
        if result is not NotImplemented:
            return result
        name = operation.overloadpacket.__name__
        if not operation.is_view and name not in FREE:
            self.counts[name] += 1
        return operation(*args, **kwargs or {})


@torch.inference_mode()
def step_launches(model, heads=None, **options):
    """Counter of the launches of a Decoder's step, by operation; its modules must be on meta."""
    with recorded() as launches:
        step = Decoder(model, heads, graph=False, **options).body()
        step()  # with what only the first one does
        launches.clear()
        with Launches() as operations:
            step()
    return operations.counts + Counter(short_name(name) for name, *_ in launches)


def table_of_launches(tree_sizes=(1, 5, 16, 64)):
    """Prints rows for each tree size of demo/ in bfloat16, the default on CUDA -> the Table."""
    model = GPT.from_pretrained(DEMO, BF16, "cpu")
    heads = CloverHeads.from_pretrained(DEMO / "clover", model).to("meta")
    model.to("meta")
    table = Table(STEP)
    for size in tree_sizes:
        for used, lookup in ((heads, False), (None, True), (heads, True))[:3 if size > 2 else 1]:
            plan = fixed_plan(size, used, lookup)
            used = used if plan.head_nodes else None
            counts = step_launches(model, used, plans=(plan,), capacity=512)
            most = ", ".join(f"{n} {name}" for name, n in counts.most_common(6))
            table.add(dict(tree_size=plan.tree_size, drafted_by=str(plan), operations=counts,
                           launches=counts.total()), most=most)
    return table


# -------------------------------------------------------------------------------------------------
# All launches of the host functions

def record(function, *args, multiprocessors=132, capability=9, **named):
    """The launches of one of the kernels' functions."""
    with recorded(multiprocessors, capability) as launches:
        function(*args, **named)
    return launches


def signature(name, args, named):
    """What Triton compiles a launch by: types, constants, which arguments are multiples of 16."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend
    parameters = getattr(kernels, name).params
    values = [*args, *(named[parameter.name] for parameter in parameters[len(args):])]
    found = [("constexpr", None) if parameter.is_constexpr else native_specialize_impl(
        BaseBackend, value, False, not parameter.do_not_specialize, True)
        for parameter, value in zip(parameters, values)]
    kinds = tuple(kind for kind, _ in found)
    constants = tuple((i, values[i]) for i, kind in enumerate(kinds) if kind == "constexpr")
    multiples = tuple(i for i, (_, key) in enumerate(found) if key == "D")
    options = ((key, named[key]) for key in ("maxnreg", "num_stages", "num_warps") if key in named)
    return name, kinds, constants, multiples, tuple(options)


def signatures(launches):
    """The signatures of recorded launches, each once."""
    return list(dict.fromkeys(signature(name, args, named) for name, _, args, named in launches))


def launches_of(name, dtype=BF16, aligned=True, present="", multiprocessors=132, capability=9,
                **given):
    """The launches of one of the kernels' functions, with tensors as its `takes` declares them.
    given: sizes, dtypes of tensors of ints, and other arguments. aligned: whether the caches' and
    weights' last stride is 1. present: the tensors that are given, of those that may be None."""
    function = getattr(kernels, name)
    scope = SIZES | given
    arguments = {}
    for argument, spec in inspect.getclosurevars(function.takes).nonlocals["specs"].items():
        tensors = []
        for sizes, (kind, *_), _ in kernels._parse(spec):
            shape = [3 if size == "..." else kernels._evaluate(size, scope) for size in sizes]
            kind = scope.get(argument, dtype if kind in ("float", "real") else DTYPES.get(kind))
            x = torch.empty(shape, dtype=kind, device="meta")
            if argument in ("k_cache", "v_cache", "weight") and not aligned:
                x = x.new_empty(*shape[:-2], shape[-1], shape[-2] + 1).mT[..., :-1, :]
            tensors.append(x)
        if spec[-1] == "?" and argument not in present.split():
            arguments[argument] = None
        elif tensors:
            arguments[argument] = tensors[0] if len(tensors) == 1 else tensors
    if "candidates" in arguments:
        arguments["candidates"] = kernels.Candidates(*arguments["candidates"])
    others = {key: given[key] for key in inspect.signature(function).parameters.keys() & given}
    return record(function, multiprocessors=multiprocessors, capability=capability,
                  **others | arguments)


def cases(name, **choices):
    """The launches of a function with every combination of the alternatives, which are lists."""
    lists = [x if isinstance(x, list) else [x] for x in choices.values()]
    return [launch for case in product(*lists)
            for launch in launches_of(name, **dict(zip(choices, case)))]


def all_launches():
    """The signatures of every shape class of every host function, each once. Launches that differ
    from others in ways that never showed in the registers are left out: see the comments."""
    D = [16, 32, 64, 128, 256]  # others have the tile of the next power of two, and masks
    T = [2, 8, 16, 32]  # with 4 query heads a group: tiles of up to 128 query rows
    M = [8, 32, 64, 128]
    mixed = [True, False]
    alibi = dict(present="slopes")
    attention = partial(cases, "tree_attention")
    topk = partial(cases, "project_topk")
    sample = partial(cases, "project_sample", seed=0, temperature=0.8)
    found = attention(T=T, D=[*D, 80, 192]) + attention(T=T, D=D, dtype=FP16)
    # loads of single elements take fewer registers with a mask than without, float32 the same
    found += attention(T=5, D=D, dtype=[FP32, BF16, FP16], aligned=mixed)
    found += attention(T=2, D=[*D, 80, 192], S=[400, 65536])  # few splits to combine, and many
    found += attention(T=[2, 16], D=128, S=64, present=["", "slopes"])  # one split
    found += attention(T=T, D=D, **alibi)  # float16 takes the same registers
    found += attention(T=5, D=D, dtype=[FP32, BF16], aligned=mixed, **alibi)
    window = dict(window=1024)  # another one changes a constant
    found += attention(T=T, D=[*D, 80, 192], **window) + attention(T=T, D=D, **alibi, **window)
    for others in (window, alibi | window):
        found += attention(T=5, D=D, dtype=[FP32, BF16], aligned=mixed, **others)
    found += attention(T=[2, 16], D=128, S=64, window=40)  # one split
    # a greedy sample is one without noise, so one of both is gathered; masked channels: 2 registers
    found += sample(M=M, temperature=[0.0, 0.8]) + sample(M=M, present="vocab_ids")
    found += topk(M=M, k=[1, 8, 32], present=["", "vocab_ids"]) + topk(M=M, k=8, C=4112)
    found += topk(M=M, k=8, dtype=FP32, aligned=False)
    for project in (sample, partial(topk, k=[8, 32])):
        found += project(M=M, dtype=[FP32, FP16]) + project(M=M, dtype=[BF16, FP16], aligned=False)
    for project in (sample, partial(topk, k=[1, 32])):  # multiprocessors: how many lists to merge
        found += project(M=8, V=128256, multiprocessors=[2**i for i in range(9)])
    found += topk(M=8, k=1, V=100)
    found += topk(M=M, k=8, weight=torch.int8, present=["scales", "scales vocab_ids"])
    found += sample(M=8, weight=torch.int8, present="scales")
    both = dict(dtype=[BF16, FP32])  # float16 takes what bfloat16 does
    linear = partial(cases, "linear_quantized", capability=[8, 9, 10], C=4096, N=4096)
    four = partial(linear, kind="int4", words=512, present="zeros")
    eight = partial(linear, words=1024)
    M = [8, 32, 64]  # more rows are more tiles
    found += four(M=M, G=[32, 64, 128]) + four(M=64, G=32, dtype=[FP32, FP16])
    found += four(M=8, G=129, C=4128, words=528) + four(M=8, G=32, N=28672)  # padding; one split
    found += eight(kind=["int8", "e4m3"], M=M, G=1) + eight(kind="int8", M=M, G=[32, 64, 128],
                                                            present="zeros")
    found += eight(kind="e4m3", M=64, G=32, dtype=[BF16, FP32])
    found += cases("commit_path", P=[1, 5, 17, 64], D=[16, 80, 256], count=INT32, **both)
    norms = ["", "delta weight", "delta weight bias"]
    found += cases("add_norm", C=[16, 1000, 4096, 16384], present=norms, **both)
    found += cases("rope_cache", D=21, present=["", "q_weight k_weight"], **both)
    found += cases("rope_cache", D=[16, 64, 80, 128, 256],
                   present=["rope", "rope q_weight k_weight"], **both)
    found += cases("sum_parts", N=[2, 8], C=4096, n=16 * 4096, present=["", "bias"], **both)
    found += cases("glu", C=2 * 11008, activation=["silu", "gelu"], **both)
    found += cases("cosine_mix", C=[1024, 16384], n_head=[1, 8], **both)
    draft = partial(cases, "select_candidates")
    for W, n, K in ((4, 15, 4), (8, 15, 4), (15, 15, 4), (4, 16, 4), (32, 63, 4), (8, 63, 4),
                    (8, 63, 8), (8, 63, 16), (8, 63, 32)):
        found += draft(w=W, W=W, n=n, K=K, depth=K - 1)
        found += cases("best_tree", n=n, K=K, tree_size=16 if n == 15 else 64)
    found += cases("ngram_lookup", n=[1, 4, 10, 31, 63])
    found += cases("merge_chain", T=[1, 8, 16, 33], n=[1, 4, 10, 31])
    for T, n in ((1, 63), (63, 1), (54, 10)):
        found += cases("merge_chain", T=T, n=n)
    found += cases("accept_path", T=1, max_path=1) + cases("accept_path", T=[16, 64], max_path=5)
    # TOP_K, and splits in one block or in 256
    found += cases("filtered_sample", V=[100, 32000, 128256, 151936], top_k=[0, 50], top_p=0.9,
                   min_p=0.0, temperature=0.8, seed=0)
    return signatures(found)


def targets_of(launch):
    """Those of TARGETS for which a signature is launched. Where `_quantized_blocks` joins planes is
    Hopper and the Blackwell of data centres, which has planes of its own."""
    _, _, constants, _, options = launch
    constants = {getattr(kernels, launch[0]).arg_names[i]: value for i, value in constants}
    options = dict(options)
    if "JOINED" not in constants or options["num_warps"] == 8 and constants["BLOCK_N"] == 32:
        return TARGETS
    if constants["JOINED"]:
        return DATA_CENTRES
    return TARGETS[2:3] if options["num_warps"] == 2 else (*TARGETS[:2], TARGETS[3])


def shared_limit(target, launch):
    """Bytes of shared memory that a signature may take on a target."""
    return 232448 if targets_of(launch) == DATA_CENTRES else SHARED[target]


def compile_launch(target, launch):
    """Compiles one signature for a target -> Triton's compiled kernel. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    name, kinds, constants, multiples, options = launch
    backend, arch = target.split(":")
    kernel = getattr(kernels, name)
    source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds)),
                       {(i,): value for i, value in constants},
                       {(i,): [["tt.divisibility", 16]] for i in multiples})
    gpu = GPUTarget(backend, *((int(arch), 32) if backend == "cuda" else (arch, 64)))
    return triton.compile(source, target=gpu, options=dict(options))


def usage(target, launch):
    """Compiles one signature -> dict(registers per thread, spilled and shared in bytes). Spilled is
    NVIDIA's stack, as the kernels have no arrays, and AMD's scratch memory per lane."""
    compiled = compile_launch(target, launch)
    text = compiled.asm.get("amdgcn") or cuobjdump(compiled.asm["cubin"], "--dump-resource-usage")
    names = r"(REG|STACK|LOCAL|vgpr_count|private_segment_fixed_size)"
    found = {name: int(value) for name, value in re.findall(rf"\b{names}:\s*(\d+)", text)}
    registers = found.pop("REG" if "REG" in found else "vgpr_count")
    return dict(registers=registers, spilled=sum(found.values()), shared=compiled.metadata.shared)


def early_reads(sass):
    """The instructions of a kernel for Hopper that name a register of an accumulator whose product
    may still be in flight: between HGMMA and the wait for all of them."""
    busy = set()
    found = []
    for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.M):
        product = re.search(r"HGMMA\.\d+x(\d+)x\d+\.F32\S* R(\d+)", line)
        if product:
            n, first = map(int, product.groups())
            busy |= set(range(first, first + n // 2))  # 64 x n numbers of 128 threads
        elif "DEPBAR.LE gsb0, 0x0" in line:
            busy = set()
        elif busy & set(map(int, re.findall(r"\bR(\d+)", line))):
            found.append(line)
    return found


def cuobjdump(cubin, what):
    """The output of Triton's own cuobjdump on a binary."""
    import triton
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([tool, what, file.name], capture_output=True, text=True,
                              check=True).stdout


def compile_all(pairs):
    """The `usage` of every (target, signature) in `pairs`, in order; one process per core."""
    with ProcessPoolExecutor(min(os.cpu_count(), 16), mp_context=get_context("spawn")) as pool:
        yield from pool.map(usage, *zip(*pairs), chunksize=8)


def shape_class(launch):
    """CLASS of a signature: launches with equal ones share a row of the table."""
    name, kinds, constants, _, options = launch
    parameters = getattr(kernels, name).arg_names
    options = dict(options)
    constants = {parameters[i]: value for i, value in constants}
    tile = " x ".join(str(value) for key, value in constants.items() if key.startswith("BLOCK_"))
    alibi = "slopes_ptr" in parameters and "slopes_ptr" not in constants
    window = constants.get("WINDOW", 0) > 0
    kind = f" {constants['KIND']}" if "KIND" in constants else ""
    kind += " joined" * constants.get("JOINED", False) + " alibi" * alibi + " window" * window
    return (short_name(name) + kind, kinds[0][1:], tile, options["num_warps"],
            options.get("num_stages", "-"))


def table_of_figures(out=None):
    """Prints a row per shape class, its worst for each target -> the Record, kept in a file."""
    launches = all_launches()
    classes = defaultdict(lambda: defaultdict(Counter))
    pairs = [(target, launch) for launch in launches for target in targets_of(launch)]
    for (target, launch), used in zip(pairs, compile_all(pairs)):
        worst = classes[shape_class(launch)][target]
        worst["launches"] += 1
        for figure, value in used.items():
            worst[figure] = max(worst[figure], value)
    print(f"{len(launches)} launches: registers per thread / spilled / shared bytes, the worst")
    result = Record(out, bench="kernels-static")
    table = result["table"] = Table(STATIC)
    for key, targets in sorted(classes.items(), key=str):
        table.add(dict(zip(CLASS, key)) | targets)
    return result.done()


def main():
    parser = Parser("What the kernels take, without a GPU.", prog="python -m tests.static")
    parser.add_argument("table", choices=("launches", "compile"))
    parser.add_argument("--out", metavar="FILE", help="keep the table of compile here")
    args = parser.parse_args()
    if args.table == "launches":
        table_of_launches()
    else:
        table_of_figures(args.out)


if __name__ == "__main__":
    command(main)
