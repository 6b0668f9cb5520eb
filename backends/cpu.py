"""A model on a CPU: the kernels of cpu.c, compiled once by the system's `cc` and called by ctypes.

`apply(model, heads)` turns layers into their packed subclasses, in place. Parameters keep their
names; a layer whose weight has changed, or that needs a gradient, computes as before. Without a
compiler a model computes by torch's operations, in float32 with oneDNN's products."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, nullcontext, suppress
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import filled, filter_logits, gumbel_argmax, runs_triton
from model import GPT, LMHead, NoNorm, atomic_write, warn

LANES = 16      # outputs of a packed weight that stand side by side
GROUP = 32      # inputs that are rounded together: a packed weight has a multiple of them
MAX_HEAD = 256  # the largest head size
FLOAT32, BFLOAT16, INT8, INT4 = range(4)  # kinds of a packed weight
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
THREADS = []    # how many cpu.c uses, inside of `kernel_threads`
SOURCE = Path(__file__).with_name("cpu.c")


def apply(model, heads=None):
    """Lets a `GPT` and `CloverHeads` on it decode fast on a CPU -> a context to decode in. Call it
    again after weights have changed, or the model has left the CPU: its layers then become what
    they were."""
    layers = [*model.modules(), *(heads.modules() if heads is not None else ())]
    if model.device.type != "cpu" or runs_triton(model.norm.weight):
        replace_classes(layers, {packed: layer for layer, packed in PACKED.items()})
        return nullcontext
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    unpacked = (layer.weight for layer in linears if getattr(layer, "copy", None) is None)
    if 2 * sum(weight.nbytes for weight in unpacked) > model.free_memory():
        warn("the memory has no room for packed copies of the weights, so decoding is slower; take "
             "a smaller model")
        return nullcontext
    replace_classes(layers, PACKED)
    model.programs = ()
    for layer in linears:
        if isinstance(layer, PackedLinear):  # a fork may have a subclass of its own
            layer.repack()
    return kernel_threads if is_exact(model) else nullcontext


@contextmanager
def kernel_threads():
    """Leaves torch one thread, and its others to cpu.c: torch's would spin beside them for a
    millisecond after each operation, and a step has none that is worth a second thread."""
    THREADS.append(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(THREADS.pop())


def threads():
    return THREADS[-1] if THREADS else torch.get_num_threads()


def replace_classes(layers, classes):
    for layer in layers:
        layer.__class__ = classes.get(type(layer), type(layer))


def default_dtype(device, stored):
    """bfloat16 on a GPU, and of a checkpoint in it on a CPU with compiled kernels; else float32"""
    fast = device.type == "cuda" or stored == torch.bfloat16 and library() is not None
    return torch.bfloat16 if fast else torch.float32


def trim_memory():
    """Gives the system back what glibc keeps of freed memory: reading weights frees much."""
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def is_exact(model):
    """Whether two ways to decode give the same bits."""
    return (isinstance(model, CPUModel) and packed_weight(model.head) is not None
            and model.program(model.blocks) is not None)


def packed_weight(layer):
    """The `PackedWeight` that a layer multiplies by, None where there is none."""
    return layer.current() if hasattr(layer, "current") else None


# --------------------------------------------------------------------------------------------------
# The library

def fields(kind, *names):
    return [(name, kind) for name in names]


class Linear(ctypes.Structure):  # this and those below as in cpu.c
    _fields_ = [*fields(c_int32, "kind", "n", "k", "group", "half"),
                *fields(c_void_p, "values", "scales", "minimums", "bias")]


class Norm(ctypes.Structure):
    _fields_ = [*fields(c_void_p, "weight", "bias"), ("eps", c_float)]


class Block(ctypes.Structure):
    _fields_ = [*fields(Norm, "attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "q_norm",
                        "k_norm"),
                *fields(Linear, "qkv", "proj", "up", "down"),
                *fields(c_int32, "n_embd", "n_head", "n_kv_head", "head_size", "n_inner",
                        "norms_all", "gated", "gelu", "window", "rope"),
                ("scale", c_float)]


class Pass(ctypes.Structure):
    _fields_ = [*fields(c_int32, "B", "T", "threads"),
                *fields(c_void_p, "lengths", "ancestors", "rope", "window_rope", "slopes")]


class Cache(ctypes.Structure):
    _fields_ = [("data", c_void_p),
                *fields(c_int64, "layer_stride", "value_stride", "batch_stride", "head_stride"),
                ("bfloat16", c_int32)]


FUNCTIONS = {
    "product": (POINTER(Linear), c_void_p, c_int, c_void_p, c_int),
    "attention": (POINTER(Block), POINTER(Pass), POINTER(Cache), c_void_p, c_void_p),
    "run_blocks": (POINTER(Block), c_int, POINTER(Norm), POINTER(Pass), POINTER(Cache), c_void_p,
                   c_void_p),
    "argmax": (c_void_p, *[c_int] * 4, *[c_void_p] * 5, c_int)}


@lru_cache
def library():
    """cpu.c, compiled for this CPU; None, said in one line, where that fails."""
    compiler = os.environ.get("CC", "cc")
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [*shlex.split(compiler), "-O3", native, "-std=gnu11", "-shared", "-fPIC", "-pthread",
               "-fno-math-errno", "-fno-trapping-math", *shlex.split(os.environ.get("CFLAGS", ""))]
    try:
        found = load_or_build(command)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        reason = next((line for line in output.splitlines() if "error" in line.lower()), output)
        warn(f"the CPU's kernels are not used, which are several times as fast: {compiler} cannot "
             f"compile them ({' '.join(reason.split())[:200]}); install a C compiler, such as gcc, "
             "or name one in CC")
        return None
    for name, types in FUNCTIONS.items():
        getattr(found, name).argtypes = types
        getattr(found, name).restype = None
    return found


def load_or_build(command):
    """The library that a command makes of cpu.c, from the user's cache folder."""
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    macros = run([*command, "-dM", "-E", "-x", "c", os.devnull]).stdout  # of compiler and CPU
    key = hashlib.sha256(repr((SOURCE.read_bytes(), command, macros)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clover"
    file = folder / f"cpu-{key}.so"
    with suppress(OSError):  # not there, or broken
        return ctypes.CDLL(str(file))
    with tempfile.TemporaryDirectory() as temporary:
        built = f"{temporary}/{file.name}"
        run([*command, str(SOURCE), "-o", built, "-lm"])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(file, lambda tmp: shutil.copyfile(built, tmp))
        except OSError as error:
            warn(f"the CPU's kernels are compiled anew in each run, which takes seconds: {error}")
        return ctypes.CDLL(built)


# --------------------------------------------------------------------------------------------------
# Products

def blocks(x, multiple, inner=1):
    """x [n, k] -> [n / LANES, k / inner, LANES, inner], zeros where n and k are padded to multiples
    of LANES and `multiple`: how cpu.c reads weights."""
    x = F.pad(x, (0, -x.shape[1] % multiple, 0, -len(x) % LANES))
    return x.view(len(x) // LANES, LANES, -1, inner).transpose(1, 2).contiguous()


def pointer(x):
    return None if x is None else x.data_ptr()


class PackedWeight:
    """A weight [n, k] and its bias [n], in memory as cpu.c multiplies them."""

    def __init__(self, kind, shape, values, scales=None, minimums=None, bias=None):
        self.values, self.scales, self.minimums = values, scales, minimums
        self.bias = None if bias is None else bias.float()
        group = 0 if scales is None else -(-shape[1] // GROUP) * GROUP // scales.shape[1]
        half = scales is not None and scales.dtype == torch.float16
        self.linear = Linear(kind, *shape, group, half,
                             *map(pointer, (values, scales, minimums, self.bias)))

    def multiply(self, x):
        """x [..., k] -> float32 [..., n]"""
        x = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self.linear.n)
        library().product(self.linear, x.data_ptr(), x.numel() // self.linear.k, out.data_ptr(),
                          threads())
        return out


class OneDNNWeight:
    """The same where there is no cpu.c, in float32: twice as fast as from rows."""
    linear = None

    def __init__(self, weight, bias=None):
        self.values = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias

    def multiply(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.values, self.bias, "none", [], "")


def pack_floats(weight, bias=None):
    """A weight [n, k] -> `PackedWeight` or `OneDNNWeight`, None for a dtype that has none."""
    if library() is not None and weight.dtype in KINDS:
        values = blocks(weight, 4, 4 // weight.itemsize)
        return PackedWeight(KINDS[weight.dtype], weight.shape, values, bias=bias)
    if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return OneDNNWeight(weight, bias)
    return None


def pack_quantized(q, is_int4, scales, minimums=None, bias=None):
    """q uint8 [n, k], the bytes of int8 or values of 0 to 15, scales and minimums [G, n] ->
    `PackedWeight`."""
    values = blocks(q, GROUP, 8) if is_int4 else blocks(q ^ 128, GROUP, 4)
    if is_int4:
        values = values[..., :4] | values[..., 4:] << 4
    floats = [x if x is None else blocks(x.T, 1) for x in (scales, minimums)]
    return PackedWeight(INT4 if is_int4 else INT8, q.shape, values, *floats, bias)


def snapshot(module):
    """What shows later whether a tensor of a module has been changed or replaced."""
    return [(tensors, name, x, x._version) for part in module.modules()
            for tensors in (part._parameters, part._buffers)
            for name, x in tensors.items() if x is not None]


def is_current(snapshot):
    return all(tensors[name] is x and x._version == version
               for tensors, name, x, version in snapshot)


class PackedLinear(nn.Linear):
    """nn.Linear that, in inference, multiplies by a packed copy of its weight."""
    copy = None  # (`snapshot`, `PackedWeight`)

    def repack(self):
        """Brings the copy up to date: of a frozen weight, in a dtype that is packed."""
        w = self.weight
        if not w.is_cpu or w.requires_grad or w.is_inference():
            self.copy = None
        elif self.current() is None:
            self.copy = snapshot(self), pack_floats(w, self.bias)

    def current(self):
        """The `PackedWeight`; None where there is none of the weight and the bias as they are."""
        return self.copy[1] if self.copy and is_current(self.copy[0]) else None

    def forward(self, x):
        packed = self.current() if torch.is_inference_mode_enabled() else None
        return super().forward(x) if packed is None else packed.multiply(x).to(x.dtype)

    def __getstate__(self):  # deepcopy and pickle leave out the copies
        return {name: x for name, x in self.__dict__.items() if name not in ("copy", "vocab")}

    def _apply(self, fn, *args, **kwargs):
        self.copy = None  # the weight goes to another device or dtype
        return super()._apply(fn, *args, **kwargs)


class KernelHead:
    """The methods of `model.LMHead`, by products of what `current` and `packed_rows` give."""
    vocab = None  # (vocab_ids, what was packed of these rows)

    def topk(self, hidden, k, vocab_ids=None):
        packed = self.current()
        if packed is None:
            return super().topk(hidden, k, vocab_ids)
        if vocab_ids is not None:
            packed = self.packed_rows(vocab_ids)
        logprobs, columns = topk_logprobs(packed.multiply(hidden), k)
        return logprobs, columns if vocab_ids is None else vocab_ids[columns].long()

    def logits(self, hidden):
        packed = self.current()
        return super().logits(hidden) if packed is None else packed.multiply(hidden)

    def sample(self, hidden, temperature, seed, sequence, position, first_token=0):
        packed = self.current()
        if packed is None:
            return super().sample(hidden, temperature, seed, sequence, position, first_token)
        return argmax(packed.multiply(hidden), temperature, seed, sequence, position, first_token)

    def filtered_sample(self, logits, temperature, top_k, top_p, min_p, *noise):
        """As `kernels.filtered_sample`, with the noise of `sample`, bit for bit."""
        logits = filter_logits(logits, top_k, top_p, min_p, temperature)
        return argmax(logits, 1.0 * (temperature > 0), *noise)


class PackedLMHead(KernelHead, PackedLinear, LMHead):

    def packed_rows(self, vocab_ids):
        """The `PackedWeight` of these rows, packed once."""
        known, packed, copy = self.vocab or (None, None, None)
        if known is not vocab_ids or copy is not self.copy:
            self.vocab = vocab_ids, pack_floats(self.weight[vocab_ids]), self.copy
        return self.vocab[1]


def argmax(logits, temperature, seed, sequence, position, first_token=0):
    """As `kernels.gumbel_argmax`, of float32 logits."""
    if library() is None:
        return gumbel_argmax(logits, temperature, seed, sequence, position, first_token)
    M, V = logits.shape
    B = len(sequence)
    temperature = filled(temperature, logits, B).float()
    seed = filled(seed, logits, B)
    sequence, position = (x.long().contiguous() for x in (sequence, position))
    out = torch.empty(M, dtype=torch.int64)
    rows = temperature, seed, sequence, position, out
    library().argmax(logits.data_ptr(), M, V, M // B, first_token, *map(pointer, rows), threads())
    return out


def topk_logprobs(logits, k):
    """The k largest of logits [M, V], best first, of equals the first -> (logprobs float32 [M, k],
    columns int64 [M, k])."""
    # topk promises no order among equals; the (k + 1)st shows if an equal of the k-th is left out
    values, columns = logits.topk(min(k + 1, logits.shape[1]))
    if (values[:, 1:] == values[:, :-1]).any():
        columns = logits.sort(dim=-1, descending=True, stable=True).indices
    columns = columns[:, :k]
    logprobs = logits.log_softmax(-1)  # takes a quarter of the time of logsumexp
    return logprobs.gather(1, columns), columns


# --------------------------------------------------------------------------------------------------
# Blocks

class CPUModel(GPT):
    """A `GPT` whose blocks run in one call of cpu.c: over a cache, in inference, with packed
    weights. All else is as it was."""
    programs = ()  # [(blocks, `snapshot`, Block[n] of cpu.c, the tensors that it points to)]

    def program(self, blocks):
        """Block[n] of blocks; None where cpu.c cannot run them as they are."""
        for known, snapshot, array, _ in self.programs:
            if known is blocks and is_current(snapshot):
                return array
        program = make_program(blocks)
        if program is None:
            return None
        self.programs = [program, *(old for old in self.programs if old[0] is not blocks)]
        return program[2]

    def run_blocks(self, blocks, hidden, positions, cache=None, ancestors=None, end=None,
                   documents=None, query_heads=slice(None)):
        stream = self.run_program(blocks, hidden, positions, cache, ancestors, NoNorm())
        if stream is None:
            return super().run_blocks(blocks, hidden, positions, cache, ancestors, end, documents,
                                      query_heads)
        return stream[0].to(hidden.dtype), None

    def norm_and_hidden(self, tokens, positions, cache, ancestors):
        """As `GPT.norm_and_hidden`; the norm is in float32."""
        hidden = self.embeddings(tokens, positions)
        stream = self.run_program(self.blocks, hidden, positions, cache, ancestors, self.norm)
        if stream is None:
            return super().norm_and_hidden(tokens, positions, cache, ancestors)
        return stream[1], stream[0].to(hidden.dtype)

    def run_program(self, blocks, hidden, positions, cache, ancestors, norm):
        """-> (residual stream, its norm), float32 [B, T, C]; None where cpu.c cannot run it."""
        usable = (cache is not None and cache.kv.dtype in KINDS and len(blocks) > 0
                  and torch.is_inference_mode_enabled())
        array = self.program(blocks) if usable else None
        if array is None:
            return None
        B, T, C = hidden.shape
        kv = cache.kv
        if ancestors is not None:
            lengths, ancestors = cache.lengths, ancestors.contiguous()
        else:
            lengths = positions[:, 0].int()
        if int(lengths.max()) + T > kv.shape[4] or kv.stride()[4:] != (kv.shape[5], 1):
            raise ValueError(f"expected a cache for {int(lengths.max()) + T} rows, each in one "
                             f"piece; got {tuple(kv.shape)}, strides {kv.stride()}")
        tables = [x if x is None else x[positions].float()
                  for x in (self.rotations, self.window_rotations)]
        x = hidden.to(torch.float32, copy=True).contiguous()
        normed = torch.empty_like(x)
        kept = []
        library().run_blocks(
            array, len(blocks), norm_struct(norm, kept),
            Pass(B, T, threads(), lengths.data_ptr(), pointer(ancestors),
                 *map(pointer, tables), pointer(self.slopes)),
            Cache(kv.data_ptr(), *kv.stride()[:4], kv.dtype == torch.bfloat16),
            x.data_ptr(), normed.data_ptr())
        return x, normed

    def __getstate__(self):
        return {name: x for name, x in self.__dict__.items() if name != "programs"}

    def _apply(self, fn, *args, **kwargs):
        self.programs = ()
        return super()._apply(fn, *args, **kwargs)


def make_program(blocks):
    """An entry of `programs`; None where layers are not packed, or heads larger than cpu.c's."""
    config = blocks[0].attn.config
    if config.head_size > MAX_HEAD:
        return None
    array = (Block * len(blocks))()
    kept = []
    for block, struct in zip(blocks, array):
        attn, mlp = block.attn, block.mlp
        for name, layer in dict(qkv=attn.qkv, proj=attn.proj, up=mlp.up, down=mlp.down).items():
            packed = packed_weight(layer)
            if packed is None or packed.linear is None:
                return None
            setattr(struct, name, packed.linear)
            kept.append(packed)
        for name in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
            setattr(struct, name, norm_struct(getattr(block, name), kept))
        if config.qk_norm:
            struct.q_norm = norm_struct(attn.q_norm, kept)
            struct.k_norm = norm_struct(attn.k_norm, kept)
        struct.norms_all = config.qk_norm == "all"
        struct.gated, struct.gelu = config.gated, config.activation == "gelu"
        for name in ("n_embd", "n_head", "n_kv_head", "head_size", "n_inner"):
            setattr(struct, name, getattr(config, name))
        struct.window = attn.window
        has_rope = attn.rotates and config.positions == "rope"
        struct.rope = attn.has_own_rope if has_rope else -1
        struct.scale = config.attn_scale or config.head_size ** -0.5
    return blocks, snapshot(blocks), array, kept


def norm_struct(norm, kept):
    """A `Norm`; what it points to is added to `kept`."""
    if isinstance(norm, NoNorm):
        return Norm()
    tensors = [x if x is None else x.float() for x in (norm.weight, norm.bias)]
    kept += tensors
    return Norm(*map(pointer, tensors), norm.eps)


PACKED = {nn.Linear: PackedLinear, LMHead: PackedLMHead, GPT: CPUModel}
