"""CPU inference with the kernels in cpu.c, which the system's `cc` compiles once; called by ctypes.

`apply(model, heads)` replaces linear layers, LM head, embedding and blocks by packed ones. These
hold each weight once, in cpu.c's layout, and only decode: they cannot be trained, moved or saved.
Without a C compiler the model runs on torch's operations."""

import ctypes
import hashlib
import itertools
import math
import mmap
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache, partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import model as models
from clover import (
    BINS,
    MAX_DRAFT,
    SCHEMA,
    SOURCES,
    AttentionDecoder,
    CloverHeads,
    Concat,
    DraftHeads,
    Projector,
    ResBlock,
    Tree,
)
from common.files import atomic_write
from common.memory import find
from common.values import one_line, warn
from engine.policy import LARGEST
from generate import FILTERED, MAX_CHAIN, Accepted, Decoder, Draft
from kernels import (
    best_tokens,
    filled,
    filter_logits,
    mask_logits,
    runs_triton,
)
from model import MAX_TREE, Blocks, InputError, KVCache, LMHead, expect

GROUP = 32      # inputs that share an activation scale; quantized weights are padded to a multiple
MAX_HEAD = 256  # largest head size
MIXERS = type(None), AttentionDecoder, Concat  # in the order of cpu.h's constants
PROJECTORS = ResBlock, Projector
RESERVED = 2**26  # bytes requested from the system at once
FREE = [torch.empty(0, dtype=torch.uint8)]  # the unused part of the last request
FREE_LOCK = threading.Lock()
THREADS = []    # number of threads for cpu.c, inside `kernel_threads`
FEWER = 1.15    # more threads must be this much faster than fewer to be used
BUDGET = 0.25   # seconds to measure that
SLOW_BFLOAT16 = ("torch multiplies bfloat16 slowly on this CPU, so the default dtype is float32 "
                 "(--dtype bfloat16 takes less memory)")
FOLDER = Path(__file__).parent  # of cpu.c and cpu.h
MACROS = dict(GROUP=GROUP, MAX_HEAD=MAX_HEAD, MAX_TREE=MAX_TREE, MAX_DEPTH=MAX_DRAFT,
              MAX_CHAIN=MAX_CHAIN, LARGEST=LARGEST, BINS=BINS, SCHEMA=SCHEMA,
              SOURCES=SOURCES)  # defined in cpu.c


def apply(model, heads=None):
    """Packs a `GPT` and its `CloverHeads` for decoding, in place. Does nothing unless `is_usable`.
    Raises InputError for a dtype that cpu.c does not support."""
    if not is_usable(model.device):
        return
    pack(model)
    if heads:
        pack(heads)
    if model.config.tied and isinstance(model.head, PackedLMHead):
        model.embed = PackedEmbedding(model.head, model.dtype)


def is_usable(device):
    """Whether cpu.c runs on this device."""
    return device.type == "cpu" and not runs_triton(torch.empty(0)) and library() is not None


def pack(module):
    """Replaces a module's layers and blocks by packed ones, in their own dtype; `CloverHeads`' in 4
    bits, which cannot change the output."""
    is_heads = isinstance(module, CloverHeads)
    pack_weight = pack_rounded if is_heads else pack_floats
    for dtype in {layer.weight.dtype for layer in module.modules() if type(layer) in LAYERS}:
        expect(dtype in KINDS, f"weights are packed in float32 or bfloat16, not in {dtype}; cast "
               "the model first")
    for name, layer in list(module.named_modules()):
        if type(layer) in LAYERS:
            packed = pack_weight(layer.weight.detach(), layer.bias)
            module.set_submodule(name, LAYERS[type(layer)](packed))
    for name, blocks in list(module.named_modules()):
        if type(blocks) is Blocks and all(map(can_run_block, blocks)):
            module.set_submodule(name, PackedBlocks(blocks))
    if is_heads and can_run_heads(module):
        module.heads = PackedHeads(module)
    if isinstance(module, models.GPT) and isinstance(module.blocks, PackedBlocks):
        module.decoder = CompiledDecoder


def can_run_block(block):
    """Whether cpu.c can run a block: all its layers are packed, unlike a tensor-parallel part's."""
    attn, mlp = block.attn, block.mlp
    return attn.config.head_size <= MAX_HEAD and all(
        isinstance(layer, PackedLinear) for layer in (attn.qkv, attn.proj, mlp.up, mlp.down))


def can_run_heads(clover):
    """Whether cpu.c can run these draft heads: they contain no custom layers."""
    heads, blocks = clover.heads, clover.augment_blocks
    known = all(type(head.mix) in MIXERS and type(head.project) in PROJECTORS for head in heads)
    is_packed = isinstance(blocks, PackedBlocks) or len(blocks) == 0
    return known and is_packed and isinstance(clover.model.head, PackedLMHead) and not any(
        isinstance(layer, nn.Linear) for layer in clover.modules())


class kernel_threads:
    """Leaves torch one thread and cpu.c the number that torch had. Torch's threads would spin for a
    millisecond after each operation, and no torch operation of a step is worth a second one."""

    def __enter__(self):
        THREADS.append(torch.get_num_threads())
        torch.set_num_threads(1)

    def __exit__(self, *_):
        torch.set_num_threads(THREADS.pop())


def threads():
    return THREADS[-1] if THREADS else torch.get_num_threads()


def choose_threads(seconds):
    """Sets torch's number of threads to one, unless 2, 4 or its present number are faster.
    seconds() runs a step and returns its duration. Compares means rather than minima: beside other
    work on the machine, threads wait for one another."""
    most = torch.get_num_threads()
    if most == 1:
        return
    torch.set_num_threads(1)
    seconds()  # warm-up
    total = dict.fromkeys(sorted({1, min(2, most), min(4, most), most}), 0.0)
    while sum(total.values()) < BUDGET:
        for n in total:
            torch.set_num_threads(n)
            total[n] += seconds()
    torch.set_num_threads(reduce(lambda a, b: b if FEWER * total[b] < total[a] else a, total))


def default_dtype(device, stored, packed, rank=0):
    """bfloat16 on a GPU, and on a CPU with C kernels for weights stored in bfloat16; otherwise
    float32. Also float32 on a CPU where torch multiplies bfloat16 slowly, unless layers will be
    `packed`; rank 0 prints that."""
    if device.type == "cuda":
        return torch.bfloat16
    if stored != torch.bfloat16 or library() is None:
        return torch.float32
    if packed or torch_multiplies_bfloat16():
        return torch.bfloat16
    if rank == 0:
        warn(SLOW_BFLOAT16)
    return torch.float32


def torch_multiplies_bfloat16():
    """Whether torch multiplies bfloat16 by instructions made for it. Without them its products take
    2 to 10 times as long as in float32. oneDNN alone also accepts AVX-512 without BF16."""
    features = getattr(torch.cpu, "get_capabilities", dict)()
    onednn = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # not on macOS
    has_products = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return has_products and onednn is not None and onednn()


def trim_memory():
    """Returns freed memory to the system, which glibc would keep; reading weights frees a lot."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def is_exact(model):
    """Whether hidden states have the same bits for any tree and batch size."""
    return isinstance(model.blocks, PackedBlocks) and isinstance(model.head, PackedLMHead)


# --------------------------------------------------------------------------------------------------
# The library

def read_header(text):
    """The enum constants and structs (as ctypes.Structure) that cpu.h declares, by name, and
    `functions`: {name: types of its arguments}. Pointers to numbers become c_void_p."""
    text = re.sub("//.*", "", text)
    types = dict(int=c_int, int32_t=c_int32, int64_t=c_int64, float=c_float)
    structs = {}

    def declared(fields):  # (name, type) pairs of `type name, *name;`
        for kind, names in re.findall(r"(?:const |struct )*(\w+) ([^;]+);", fields):
            for star, name in re.findall(r"(\*?)(\w+)", names):
                target = POINTER(structs[kind]) if kind in structs else c_void_p
                yield name, target if star else structs.get(kind) or types[kind]
    constants = {}
    for body in re.findall(r"^enum {(.*?)}", text, re.S | re.M):
        value = -1
        for name, number in re.findall(r"(\w+)(?: = (-?\d+))?", body):
            value = constants[name] = int(number or value + 1)
    for name, body in re.findall(r"^typedef struct (\w+) {(.*?)^}", text, re.S | re.M):
        structs[name] = type(name, (ctypes.Structure,), dict(_fields_=[*declared(body)]))
    functions = {name: [kind for _, kind in declared(arguments.replace(",", ";") + ";")]
                 for name, arguments in re.findall(r"^\w+ (\w+)\((.*?)\);", text, re.S | re.M)}
    return SimpleNamespace(**constants, **structs, functions=functions)


header = read_header((FOLDER / "cpu.h").read_text())
KINDS = {torch.float32: header.FLOAT32, torch.bfloat16: header.BFLOAT16}
BITS = {header.FLOAT32: 32, header.BFLOAT16: 16, header.INT8: 8, header.INT6: 6, header.INT5: 5,
        header.INT4: 4}


@lru_cache
def library():
    """cpu.c, compiled for this CPU. If that fails, prints one line and returns one that was cached
    for this CPU before, or None."""
    try:
        loaded = load_or_build(compiler_command())
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        command = error.cmd[0] if isinstance(error, subprocess.CalledProcessError) else ""
        output = getattr(error, "stderr", None) or (command and f"{command} fails") or str(error)
        reason = next((line for line in output.splitlines() if "error" in line.lower()), output)
        loaded = load_cached(f"cpu-{source_key()}-*.so")
        effect = (f"with the C kernels of {loaded._name}" if loaded else
                  "without the C kernels, which is several times slower")
        warn(f"decoding runs {effect}: they cannot be compiled and loaded ({one_line(reason)}); "
             "install a C compiler, such as gcc, or set CC to one, and XDG_CACHE_HOME to a folder "
             "that is not mounted noexec")
    if loaded:
        for name, types in header.functions.items():
            getattr(loaded, name).argtypes = types
    return loaded


def compiler_command():
    """$CC or cc with its flags, $CLOVER_CFLAGS last. Package managers set CFLAGS for the oldest CPU
    that they support: of these, flags for instructions, optimisation and code do not count."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = [flag for flag in shlex.split(os.environ.get("CFLAGS", ""))
             if not flag.startswith(("-m", "-O", "-f"))]
    own = shlex.split(os.environ.get("CLOVER_CFLAGS", ""))
    return [*compiler, *flags, "-O3", native, "-std=gnu11", "-shared", "-fPIC", "-pthread",
            "-fno-math-errno", "-fno-trapping-math", *own]


def load_or_build(command):
    """The library that a compiler command builds from cpu.c, from the cache if it is there."""
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    command = [*command, *(f"-D{name}={value}" for name, value in MACROS.items())]
    macros = run([*command, "-dM", "-E", "-x", "c", os.devnull]).stdout  # compiler, CPU features
    name = f"cpu-{source_key()}-{digest(command, macros)}.so"
    if loaded := load_cached(name):
        return loaded
    with tempfile.TemporaryDirectory() as temporary:
        built = Path(temporary, name)
        run([*command, str(FOLDER / "cpu.c"), "-o", str(built), "-lm"])
        if loaded := load_cached(name, built):
            return loaded
        loaded = ctypes.CDLL(str(built))
    warn("the C kernels are compiled anew in each run, which takes seconds; set XDG_CACHE_HOME to "
         "a folder that can be written")
    return loaded


def load_cached(pattern, built=None):
    """The newest library that matches a pattern, from the first of `cache_folders` that has one and
    from which it loads; None without. built: a file to put there first."""
    for folder in cache_folders():
        with suppress(OSError):  # none, broken, or the folder is read-only, full or mounted noexec
            if built:
                atomic_write(folder / built.name, partial(shutil.copyfile, built))
            file = max(folder.glob(pattern), key=os.path.getmtime, default=folder)
            loaded = ctypes.CDLL(str(file))
            if folder.name != "clover" and "*" not in pattern:  # else `library` prints the file
                warn(f"the C kernels are cached in {folder}; set XDG_CACHE_HOME to a folder of "
                     "your own that is not mounted noexec")
            return loaded
    return None


def source_key():
    """A hash of what kernels depend on besides the compiler: the sources, CLOVER_CFLAGS and, unless
    they name one, the CPU."""
    flags = os.environ.get("CLOVER_CFLAGS", "")
    cpu = find(Path("/proc/cpuinfo"), r"(?:flags|Features)\s*:(.*)", platform.processor(), str)
    sources = [(FOLDER / name).read_bytes() for name in ("cpu.c", "cpu.h")]
    return digest(sources, MACROS, flags, None if re.search("-m(arch|cpu)=", flags) else cpu)


def digest(*values):
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def cache_folders():
    """The user's cache folder, and a temporary one in which nobody else can plant a library."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clover"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    with suppress(OSError):
        folder = Path(tempfile.gettempdir(), f"clover-{os.getuid()}")
        folder.mkdir(0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid == os.getuid() and status.st_mode == stat.S_IFDIR | 0o700:
            yield folder


def lanes():
    """Outputs that a packed weight interleaves: the numbers in a vector of this CPU."""
    return c_int32.in_dll(library(), "lanes").value


def instructions(device):
    """What cpu.c was compiled for; "none" if it does not run on this device."""
    name = c_char_p.in_dll(library(), "instructions").value if is_usable(device) else b"none"
    return name.decode()


# --------------------------------------------------------------------------------------------------
# Packed weights

def pointer(x):
    return None if x is None else x.data_ptr()


def allocate(nbytes):
    """At least nbytes of memory as uint8, in 2 MB pages where Linux has them: reading weights from
    4 kB pages takes 1.15 times as long."""
    size = -(-nbytes // 64) * 64  # cpu.c reads 64 bytes at a time
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    with FREE_LOCK:  # two threads may load models
        if size > len(FREE[0]):
            memory = mmap.mmap(-1, max(size, RESERVED), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # no huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            FREE[0] = torch.frombuffer(memory, dtype=torch.uint8)
        memory, FREE[0] = FREE[0].split((size, len(FREE[0]) - size))
    return memory


class Format(NamedTuple):
    """How a weight's numbers are packed: (q - zero) * scale + minimum."""
    kind: int
    zero: int = 0
    has_minimums: bool = False
    group: int = GROUP      # inputs that share a scale
    scale_bytes: int = 2    # 4: float32, 2: float16, 1: int8 times a float16 per 256 inputs


FORMATS = {  # GGUF types that are multiplied without conversion
    "Q4_0": Format(header.INT4, 8), "Q4_1": Format(header.INT4, 0, True),
    "Q5_0": Format(header.INT5, 16), "Q5_1": Format(header.INT5, 0, True),
    "Q8_0": Format(header.INT8, 128), "IQ4_NL": Format(header.INT8, 128),
    "Q4_K": Format(header.INT4, 0, True, scale_bytes=1),
    "Q5_K": Format(header.INT5, 0, True, scale_bytes=1),
    "Q6_K": Format(header.INT6, 32, group=16, scale_bytes=1),
    "IQ4_XS": Format(header.INT8, 128, scale_bytes=1)}


class PackedWeight:
    """A weight [n, k] and bias [n] in cpu.c's layout. `below`: the weight that `stack` linked."""

    def __init__(self, layout, n, k, bias=None):
        kind, zero, has_minimums, group, scale_bytes = layout
        is_quantized = kind >= header.INT8
        multiple = GROUP if is_quantized else 4
        numbers = -(-n // lanes()) * lanes() * -(-k // multiple) * multiple
        scales = is_quantized * numbers // group * scale_bytes
        sizes = dict(values=numbers * BITS[kind] // 8, scales=scales,
                     minimums=scales if has_minimums else 0,
                     tops=4 * numbers // 256 if is_quantized and scale_bytes == 1 else 0)
        self.memory = {name: allocate(size) for name, size in sizes.items() if size}
        self.below = None
        self.linear = header.Linear(kind, n, k, group, scale_bytes == 2, zero,
                             **{name: pointer(x) for name, x in self.memory.items()})
        self.set_bias(bias)

    def set_bias(self, bias):
        self.bias = None if bias is None else bias.float()
        self.linear.bias = pointer(self.bias)

    @property
    def n(self):
        return self.linear.n + (self.below.n if self.below else 0)

    @property
    def nbytes(self):
        own = sum(x.nbytes for x in self.memory.values())
        return own + (self.below.nbytes if self.below else 0)

    def pack_rows(self, source, address, stride, order=None):
        """Packs rows of `stride` bytes and returns self. source: RAW_FLOATS, RAW_BYTES or the
        number of a GGUF type. order: int64 [n], which row comes where."""
        library().pack_rows(self.linear, source, address, stride, pointer(order), threads())
        return self

    def multiply(self, x):
        """x [..., k] -> float32 [..., n]"""
        x = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self.n)
        library().product(self.linear, x.data_ptr(), x.numel() // self.linear.k, out.data_ptr(),
                          threads())
        return out

    def unpack(self, index):
        """Rows of the weight: int64 [n] -> float32 [n, k]. Raises IndexError."""
        out = torch.empty(len(index), self.linear.k, device="cpu")  # not torch's default device
        if library().unpack_rows(self.linear, index.data_ptr(), len(index), out.data_ptr()):
            raise IndexError(f"expected rows 0 to {self.n - 1}")
        return out


def stack(parts, bias=None):
    """Links `PackedWeight`s [n, k] into one weight, outputs in this order, and returns the first.
    Either all are quantized or all have one float type. bias: [sum of n]"""
    assert len({min(part.linear.kind, header.INT8) for part in parts}) == 1
    for upper, lower in itertools.pairwise(parts):
        upper.below = lower
        upper.linear.next = ctypes.addressof(lower.linear)
    if bias is not None:
        for part, values in zip(parts, bias.split([part.linear.n for part in parts])):
            part.set_bias(values)
    return parts[0]


def pack_floats(weight, bias=None):
    """Packs a float32 or bfloat16 weight [n, k] as it is."""
    rows = weight.contiguous()
    packed = PackedWeight(Format(KINDS[weight.dtype]), *weight.shape, bias)
    return packed.pack_rows(header.RAW_FLOATS, rows.data_ptr(), rows[0].nbytes)


def pack_rounded(weight, bias=None):
    """Rounds a float weight [n, k] to 4 bits, from the minimum to the maximum of each GROUP."""
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    minimums = groups.amin(-1).half()  # (n, G)
    scales = ((groups.amax(-1) - minimums.float()) / 15).half()
    q = (groups - minimums.float()[..., None]) / scales.float().clamp(min=1e-30)[..., None]
    q = q.round().clamp(0, 15).flatten(1)[:, :weight.shape[1]].to(torch.uint8)
    return pack_quantized(q, scales.T, minimums.T, bias)


def pack_quantized(q, scales, minimums=None, bias=None):
    """Packs q [n, k], int8 or uint8 in 0..15, scales and minimums [G, n], float16 or float32."""
    q = q.contiguous()
    n, k = q.shape
    kind, zero = (header.INT4, 0) if q.dtype == torch.uint8 else (header.INT8, 128)
    group = -(-k // GROUP) * GROUP // len(scales)
    layout = Format(kind, zero, minimums is not None, group, scales.itemsize)
    packed = PackedWeight(layout, n, k, bias).pack_rows(header.RAW_BYTES, q.data_ptr(), k)
    for name, x in dict(scales=scales, minimums=minimums).items():
        if x is not None:
            x = F.pad(x, (0, -n % lanes())).unflatten(1, (-1, lanes())).transpose(0, 1).flatten()
            packed.memory[name][:x.nbytes].copy_(x.view(torch.uint8))
    return packed


def pack_blocks(name, number, rows, k, order=None):
    """Packs rows of a GGUF file, numpy uint8 [n, bytes] of k numbers each. name, number: of their
    GGUF type, one of FORMATS. order: int64 [n], which row comes where."""
    packed = PackedWeight(FORMATS[name], len(rows), k)
    return packed.pack_rows(number, rows.ctypes.data, rows.strides[0], order)


# --------------------------------------------------------------------------------------------------
# Layers

class Packed(nn.Module):
    """A layer whose weights are in cpu.c's layout: it only decodes."""

    def refuse(self, *_, **__):
        raise InputError("this layer is packed for decoding: it cannot be read, trained, moved, "
                         "copied or saved; load the model with packed=False")

    weight = property(refuse)
    _apply = _save_to_state_dict = __reduce_ex__ = refuse


class PackedLinear(Packed):
    """nn.Linear with a `PackedWeight`."""

    def __init__(self, packed):
        super().__init__()
        self.packed = packed
        self.out_features = packed.n
        self.in_features = packed.linear.k
        self.nbytes = packed.nbytes

    def forward(self, x):
        if x.requires_grad and torch.is_grad_enabled():
            self.refuse()
        return self.packed.multiply(x).to(x.dtype)

    def embedding(self, tokens):
        """Rows of the weight: token ids [...] -> float32 [..., C]."""
        return self.packed.unpack(tokens.flatten().long()).view(*tokens.shape, -1)


class PackedLMHead(PackedLinear):
    """`model.LMHead` with a `PackedWeight`."""

    def select(self, tokens):
        return PackedLMHead(pack_floats(self.packed.unpack(tokens.long())))

    def topk(self, hidden, k, vocab_ids=None, noise=None):
        return best_tokens(self.packed.multiply(hidden), k, vocab_ids, noise)

    def logits(self, hidden):
        return self.packed.multiply(hidden)

    def sample(self, hidden, temperature, seed, sequence, position, masks=None):
        B, T = position.shape
        rows = [None] * 4  # greedy: no noise
        if isinstance(temperature, torch.Tensor) or temperature:
            rows = [filled(temperature, hidden, B).float(), filled(seed, hidden, B),
                    sequence.contiguous(), position.contiguous()]
        hidden = hidden.float().contiguous()
        out = torch.empty(B, T, dtype=torch.int64)
        library().sample(self.packed.linear, hidden.data_ptr(), B * T, T, None,
                         *map(pointer, rows), pointer(masks), out.data_ptr(), threads())
        return out

    def filtered_sample(self, logits, *, temperature, top_k, top_p, min_p, masks=None, **noise):
        """As `LMHead.filtered_sample`; the noise is the same bits as in `sample`."""
        logits = filter_logits(mask_logits(logits, masks), top_k, top_p, min_p, temperature)
        return argmax(logits, 1.0 * (temperature > 0), **noise)


class PackedEmbedding(Packed):
    """nn.Embedding that reads the rows of a `PackedLinear`, such as the LM head's."""

    def __init__(self, table, dtype):
        super().__init__()
        self.table = table
        self.dtype = dtype

    def forward(self, tokens):
        return self.table.embedding(tokens).to(self.dtype)


LAYERS = {nn.Linear: PackedLinear, LMHead: PackedLMHead}


def put(model, name, parts):
    """Replaces the layer `name` by a packed layer made of `PackedWeight`s."""
    layer = model.get_submodule(name)
    weight = stack(parts, getattr(layer, "bias", None))
    if name != "embed":
        model.set_submodule(name, LAYERS[type(layer)](weight))
    elif model.config.tied:
        model.head = PackedLMHead(weight)  # also serves as the embeddings
    else:
        model.embed = PackedEmbedding(PackedLinear(weight), model.dtype)


def argmax(logits, temperature, seed, sequence, position):
    """`kernels.gumbel_argmax` for float32 logits [M, V]."""
    M, V = logits.shape
    B = len(sequence)
    sequence, before = (x.long().contiguous() for x in (sequence, position - 1))
    rows = filled(temperature, logits, B).float(), filled(seed, logits, B), sequence, before
    out = torch.empty(M, dtype=torch.int64)
    library().sample(header.Linear(n=V), logits.data_ptr(), M, M // B, None, *map(pointer, rows),
                     None, out.data_ptr(), threads())
    return out


# --------------------------------------------------------------------------------------------------
# Blocks

class PackedBlocks(Packed, Blocks):
    """The blocks of a model or of heads. With a cache one call of cpu.c runs them all; without a
    cache torch does."""
    is_packed = True
    decoding_context = staticmethod(kernel_threads)

    def __init__(self, blocks):
        super().__init__(blocks)
        self.tensors = []  # keeps alive what the structs point to
        self.structs = (header.BlockWeights * len(blocks))(*(block_struct(block, self.tensors)
                                               for block in blocks))

    def forward(self, hidden, tables, positions, cache=None, ancestors=None, start=0,
                documents=None, layers=()):
        if cache is None:
            return super().forward(hidden, tables, positions, None, None, start, documents, layers)
        hidden, _, states = self.run(hidden, tables, positions, cache, ancestors, start, layers)
        return hidden, None, states

    def run(self, hidden, tables, positions, cache, ancestors=None, start=0, layers=(), norm=None):
        """`forward` with a cache -> (hidden, its norm in float32, the states of `layers`). norm: a
        `NormWeights`; None: without weights."""
        x = hidden.to(torch.float32, copy=True).contiguous()
        lengths = cache.lengths
        if ancestors is None:  # a prompt's tokens, which follow `start` rows
            lengths = torch.full(hidden.shape[:1], start, dtype=torch.int32)
        positions = positions.contiguous()
        ancestors = None if ancestors is None else ancestors.contiguous()
        slots = None if cache.slots is None else cache.slots.int()
        normed = torch.empty_like(x)
        states = {0: hidden}
        stops = sorted({0, *layers, len(self)})  # cpu.c stops after each layer that is read
        for first, last in itertools.pairwise(stops):
            a_pass = pass_struct(hidden.shape, tables, cache.kv[first:], lengths, ancestors,
                                 positions)
            a_pass.slots = pointer(slots)
            failed = library().run_blocks(self.structs[first], last - first,
                                          norm or header.NormWeights(), a_pass, x.data_ptr(),
                                          normed.data_ptr())
            check_room(failed, a_pass)
            states[last] = x.to(hidden.dtype, copy=last < len(self))
        joined = torch.cat([states[n] for n in layers], -1) if layers else None
        return states[last], normed, joined

    def prepare(self, module):
        pack(module)


def pass_struct(shape, tables, kv, lengths, ancestors=None, positions=None):
    """A `Pass` over a cache. shape: [B, T, ...] of the tokens; tables: `GPT.tables`."""
    assert kv.dtype in KINDS, kv.dtype
    B, T = shape[:2]
    *ropes, slopes = tables
    rope_rows = max((len(x) for x in ropes if x is not None), default=0)
    assert all(x is None or x.dtype == kv.dtype and x.is_contiguous() for x in ropes)
    return header.Pass(B, T, threads(), kv.dtype == torch.bfloat16, kv.shape[4], rope_rows, None,
                *map(pointer, (lengths, ancestors, positions, *ropes, slopes, kv)),
                *kv.stride()[:4])


def check_room(failed, a_pass):
    if failed:
        raise ValueError(f"expected token ids of the vocabulary, and a cache of {a_pass.rows} rows "
                         f"with room for {a_pass.T} more; got an unknown id or a full cache")


def block_struct(block, tensors):
    """The `Block` of a packed block. Appends the tensors that it points to."""
    config = block.attn.config
    struct = header.BlockWeights(**{name: getattr(config, name) for name in (
        "n_embd", "n_head", "n_kv_head", "head_size", "n_inner", "gated")})
    for path, layer in block.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(layer, models.Norm):
            setattr(struct, name, norm_struct(layer, tensors))
        elif isinstance(layer, PackedLinear):
            setattr(struct, name, layer.packed.linear)
    struct.norms_all = config.qk_norm == "all"
    struct.gelu = config.activation == "gelu"
    struct.window = block.attn.window
    rope = block.attn.rope if config.positions == "rope" else None
    struct.rope = {None: -1, "global": 0, "window": 1}[rope]
    struct.scale = config.attn_scale or config.head_size ** -0.5
    return struct


class PackedHeads(Packed, DraftHeads):
    """The draft heads of a `CloverHeads` with packed layers, run by cpu.c."""

    def __init__(self, clover):
        super().__init__(clover.heads)
        base = clover.model
        self.tensors = []  # keeps alive what the structs point to
        heads = (mix_struct(head.mix, self.tensors) for head in self)
        self.structs = (header.HeadWeights * len(self))(*heads)
        for struct, head in zip(self.structs, self):
            struct.project = head.project.linear.packed.linear
        self.struct = header.Heads(
            n_embd=base.config.n_embd, n_head=getattr(self[0].mix, "n_head", 1),
            n_weights=len(self), mix=MIXERS.index(type(self[0].mix)),
            linear=type(self[0].project) is Projector, scale=clover.embedding_scale,
            heads=self.structs, norm=norm_struct(base.norm, self.tensors),
            table=base.head.packed.linear)
        if clover.mix_in is not None:
            self.mix_in = mix_struct(clover.mix_in, self.tensors)
            self.struct.mix_in = ctypes.pointer(self.mix_in)
        self.table = base.head.packed
        self.set_vocabulary(clover.vocabulary)

    def set_vocabulary(self, tokens):
        self.vocabulary = tokens
        self.rows = self.table
        if tokens is not None:
            self.rows = pack_rounded(self.table.unpack(tokens.long()))
        self.struct.rows = self.rows.linear
        self.struct.ids = pointer(tokens)


def mix_struct(mix, tensors):
    """A `Head` with only the token mixer `mix`, or None."""
    struct = header.HeadWeights()
    if mix is not None:
        struct.norm = norm_struct(mix.norm, tensors)
    if isinstance(mix, AttentionDecoder):
        struct.mix = mix.query.packed.linear
        struct.key_value = mix.key_value.packed.linear
    elif mix is not None:
        struct.mix = mix.linear.packed.linear
    return struct


def norm_struct(norm, tensors):
    """The `Norm` of a norm. Appends the tensors that it points to."""
    weights = [x if x is None else x.detach().float() for x in (norm.weight, norm.bias)]
    tensors += weights
    return header.NormWeights(*map(pointer, weights), norm.eps)


# --------------------------------------------------------------------------------------------------
# Decoding

class PackedDecoder(Decoder):
    """A `generate.Decoder` for heads that cpu.c does not run. It keeps float32 up to the LM head
    like `CompiledDecoder`, so that both compute the same bits."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.tensors = []  # keeps alive what the struct points to
        self.norm = norm_struct(model.norm, self.tensors)

    def verify(self, plan, draft):
        model = self.model
        hidden, normed, states = model.blocks.run(
            model.embeddings(draft.tree.tokens, draft.positions), model.tables, draft.positions,
            self.slots.cache.select(draft.batch.slots), draft.tree.ancestors,
            layers=self.hidden_layers, norm=self.norm)
        return normed, states if self.hidden_layers else hidden


class CompiledDecoder(Decoder):
    """A `generate.Decoder` with one call of cpu.c per stage. A step runs only the slots that hold
    sequences. The augmenting blocks read accepted tokens only when the heads draft again, so the
    heads' cache may be shorter than the model's. Each step overwrites the results of the one
    before."""
    chooses_size = True

    @classmethod
    def for_heads(cls, heads):
        """This class, if heads are None or `CloverHeads` that are packed too."""
        runs = heads is None or isinstance(getattr(heads, "heads", None), PackedHeads)
        return cls if runs else PackedDecoder

    @torch.inference_mode()
    def __init__(self, model, **options):
        super().__init__(model, **options)
        B = self.batch_size
        rows = B * self.max_tree
        P = self.path_limit(self.max_tree)
        cache = self.slots.heads_cache
        self.slots.heads_cache = KVCache(cache.kv, torch.zeros_like(cache.lengths))
        self.slot_array = (c_int32 * B)(*range(B))
        self.running = list(range(B))
        integers = partial(torch.zeros, dtype=torch.int64)
        self.results = dict(
            tree=integers(5 * rows), probabilities=torch.zeros(rows),
            chain=integers(B * (1 + MAX_CHAIN)), positions=integers(rows), target=integers(rows),
            accepted=integers(B * (3 * P + 2)), x=torch.zeros(rows * model.config.n_embd),
            normed=torch.zeros(rows * model.config.n_embd))
        if model.dtype == torch.bfloat16:
            self.results["hidden"] = torch.zeros_like(self.results["x"], dtype=model.dtype)
        self.views = {}    # (B, T) -> views of the results
        self.tensors = []  # keeps alive what the struct points to
        self.embeds = isinstance(model.embed, PackedEmbedding) and model.embed_positions is None
        self.struct = self.step_struct()
        self.last_guide = None  # to whose tensors the struct points

    def step_struct(self):
        """The `Step` that points to this decoder's tensors."""
        model = self.model
        slots = self.slots
        policy = self.policy
        tensors = self.results | dict(
            chances=policy.chances, seconds=policy.step_seconds, counts=policy.counts,
            lengths=slots.cache.lengths, heads_lengths=slots.heads_cache.lengths,
            history=slots.history, active=slots.active, root=slots.all.root,
            sequence=slots.all.sequence, seed=slots.all.sampling["seed"],
            temperature=slots.all.sampling["temperature"], state=slots.state)
        struct = header.Step(blocks=model.blocks.structs, n_blocks=len(model.blocks), embed_scale=1,
                      norm=norm_struct(model.norm, self.tensors), K=policy.depth, W=self.beams,
                      with_lookup=policy.lookup, words=-(-model.config.vocab_size // 32),
                      history_stride=slots.history.stride(0),
                      trees=self.slot_pass(slots.cache),
                      **{name: pointer(x) for name, x in tensors.items()})
        if self.embeds:
            struct.embed = model.embed.table.packed.linear
            if model.embed_scale is not None:
                struct.embed_scale = model.embed_scale.item()
        if isinstance(self.head, PackedLMHead):
            struct.head = self.head.packed.linear
        if self.heads:
            self.add_heads(struct)
        return struct

    def add_heads(self, struct):
        heads = self.heads
        if heads.heads.vocabulary is not heads.vocabulary:
            heads.heads.set_vocabulary(heads.vocabulary)
        cache = self.slots.cache.kv
        C = self.model.config.n_embd
        ones = torch.ones(C)
        self.hidden_rows = cache.new_zeros(self.batch_size, cache.shape[4], C)
        self.tensors.append(ones)
        struct.heads = ctypes.pointer(heads.heads.struct)
        eps = torch.finfo(torch.float32).eps
        struct.state_norm = header.NormWeights(ones.data_ptr(), None, eps)
        struct.paths = self.slot_pass(self.slots.heads_cache)
        struct.augment = getattr(heads.augment_blocks, "structs", None)
        struct.n_augment = len(heads.augment_blocks)
        struct.hidden_rows = self.hidden_rows.data_ptr()
        struct.hidden_stride = self.hidden_rows.stride(0)

    def slot_pass(self, cache):
        a_pass = pass_struct((self.batch_size, 1), self.model.tables, cache.kv, cache.lengths)
        a_pass.slots = ctypes.addressof(self.slot_array)
        return a_pass

    def place(self, running):
        self.running = list(running)
        self.struct.trees.B = len(self.running)
        self.slot_array[:len(self.running)] = self.running
        return self.running

    def behind(self):
        slots = self.slots
        return int((slots.cache.lengths - slots.heads_cache.lengths)[self.running].sum())

    def samples_in_torch(self, plan):
        return plan.mode == FILTERED or not self.struct.head.k

    def read_guide(self):
        """Points the struct to the guide's tensors."""
        tensors = self.guide.tensors if self.guide else {}
        for name in ("forced", "first_masks", "masks"):
            setattr(self.struct, name, pointer(tensors.get(name)))
        self.last_guide = self.guide

    def draft(self, plan):
        if self.guide is not self.last_guide:
            self.read_guide()
        struct = self.struct
        struct.tree_size = plan.tree_size or 0
        struct.depths = plan.depths
        struct.trees.threads = threads()
        check_room(library().step_draft(struct), struct.trees)
        key = struct.trees.B, struct.T
        if key not in self.views:
            self.views[key] = self.step_views(*key)
        self.view = self.views[key]
        batch = None  # cpu.c reads the slots itself
        if self.samples_in_torch(plan):
            batch = self.slots.batch(torch.tensor(self.running))
        return Draft(batch, self.view.tree, self.view.positions, None)

    def step_views(self, B, T):
        P = self.struct.P
        view = lambda name, *shape: self.results[name][:math.prod(shape)].view(shape)
        C = self.model.config.n_embd
        packed = view("accepted", B, 3 * P + 2)
        return SimpleNamespace(
            tree=Tree(*view("tree", 5, B, T), view("probabilities", B, T)),
            positions=view("positions", B, T), x=view("x", B, T, C), normed=view("normed", B, T, C),
            hidden=view("hidden" if "hidden" in self.results else "x", B, T, C),
            target=view("target", B, T), packed=packed, accepted=unpacked(packed))

    def verify(self, plan, draft):
        positions = draft.positions
        if not self.embeds:
            if self.model.embed_positions is not None:
                positions = positions.clamp(max=self.model.config.block_size - 1)
            self.view.x.copy_(self.model.embeddings(draft.tree.tokens, positions))
        check_room(library().step_verify(self.struct), self.struct.trees)
        return self.view.normed, self.view.hidden

    def sample(self, plan, draft, normed):
        if self.samples_in_torch(plan):
            return self.view.target.copy_(super().sample(plan, draft, normed))
        self.struct.noise = plan.mode
        library().step_sample(self.struct)
        return self.view.target

    def accept(self, plan, draft, target):
        library().step_accept(self.struct)
        return self.view.accepted

    def commit(self, plan, draft, hidden, accepted):
        library().step_commit(self.struct)

    def to_host(self, accepted):
        return unpacked(self.view.packed.clone())

    def launch(self, plan, with_trees=False):
        step = super().launch(plan, with_trees)
        if plan.tree_size is None:
            step.expected = self.struct.expected
        # a prompt, or what the heads skipped
        step.catches_up = self.struct.behind > 1 + MAX_CHAIN
        return step

    def prefill(self, slot, prompt, start, end):
        self.forget(slot, start)
        super().prefill(slot, prompt, start, end)

    def read_prompt(self, slot, hidden, tokens, start):
        """Stores the hidden states. The heads read them when they first draft."""
        self.hidden_rows[slot, start:start + hidden.shape[1]] = hidden[0]
        self.slots.state[slot] = 0

    def begin(self, slot, sequence, start):
        self.forget(slot, start)
        super().begin(slot, sequence, start)

    @torch.inference_mode()
    def forget(self, slot, start):
        """Lets the heads read a slot's rows from `start` on again, which get other tokens."""
        self.slots.heads_cache.lengths[slot].clamp_(max=start)


def unpacked(packed):
    """The `Accepted` in what cpu.c's step_accept writes, int64 [B, 3 P + 2]."""
    P = packed.shape[1] // 3
    *columns, counts = packed.tensor_split((P, 2 * P, 3 * P), dim=1)  # faster than slices
    return Accepted(*columns, counts[:, 0])
