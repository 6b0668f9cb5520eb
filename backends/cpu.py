"""A model on a CPU: the kernels of cpu.c, compiled once by the system's `cc` and called by ctypes.

`apply(model, heads)` turns layers into their packed subclasses, in place. Parameters keep their
names; a layer whose weight has changed, or that needs a gradient, computes as before. Without a
compiler a model computes by torch's operations."""

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

import model as models
from kernels import filled, filter_logits, runs_triton
from model import GPT, LMHead, atomic_write, warn

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
    is_cpu = model.device.type == "cpu" and not runs_triton(model.norm.weight)
    if not is_cpu or library() is None:
        replace_classes(layers, {packed: layer for layer, packed in PACKED.items()})
        return nullcontext
    unpacked = (layer.weight for layer in layers
                if isinstance(layer, nn.Linear) and getattr(layer, "made", None) is None)
    if 2 * sum(weight.nbytes for weight in unpacked) > model.free_memory():
        warn("the memory has no room for packed copies of the weights, so decoding is slower; take "
             "a smaller model")
        return nullcontext
    replace_classes(layers, PACKED)
    for layer in reversed(layers):  # blocks after their layers
        if isinstance(layer, Packed):
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
    return current(model.head) is not None and current(model.blocks) is not None


def current(layer):
    """What `Packed` keeps of a layer's weights as they are; None where there is nothing."""
    return layer.current() if hasattr(layer, "current") else None


# --------------------------------------------------------------------------------------------------
# The library

def struct(name, *fields):
    """A struct of cpu.c. fields: (type, names)"""
    pairs = [(field, kind) for kind, names in fields for field in names.split()]
    return type(name, (ctypes.Structure,), dict(_fields_=pairs))


Linear = struct("Linear", (c_int32, "kind n k group half"),
                (c_void_p, "values scales minimums bias"))
Norm = struct("Norm", (c_void_p, "weight bias"), (c_float, "eps"))
Block = struct("Block", (Norm, "attn_norm attn_post_norm mlp_norm mlp_post_norm q_norm k_norm"),
               (Linear, "qkv proj up down"),
               (c_int32, "n_embd n_head n_kv_head head_size n_inner"),
               (c_int32, "norms_all gated gelu window rope"), (c_float, "scale"))
Pass = struct("Pass", (c_int32, "B T threads bfloat16"),
              (c_void_p, "lengths ancestors rope window_rope slopes kv"),
              (c_int64, "layer_stride value_stride batch_stride head_stride"))
FUNCTIONS = {
    "product": (POINTER(Linear), c_void_p, c_int, c_void_p, c_int),
    "unpack_rows": (POINTER(Linear), c_void_p, c_int, c_void_p),
    "attention": (POINTER(Block), POINTER(Pass), c_void_p, c_void_p),
    "run_blocks": (POINTER(Block), c_int, POINTER(Norm), POINTER(Pass), c_void_p, c_void_p),
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
    chosen = None, None  # what `rows` was asked for last, and gave

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

    def unpack(self, index):
        """The rows int64 [n] of quantised weights -> float32 [n, k]."""
        out = torch.empty(len(index), self.linear.k, device="cpu")  # whatever the default is
        library().unpack_rows(self.linear, index.data_ptr(), len(index), out.data_ptr())
        return out

    def rows(self, index):
        """The `PackedWeight` of the rows int [n], made once; without a bias, as an LM head has."""
        if self.chosen[0] is not index:
            block, lane = index // LANES, index % LANES
            inner = self.values.shape[-1], 1, 1
            tensors = [x if x is None else blocks(x[block, :, lane].flatten(1), 1, n)
                       for x, n in zip((self.values, self.scales, self.minimums), inner)]
            shape = len(index), self.linear.k
            self.chosen = index, PackedWeight(self.linear.kind, shape, *tensors)
        return self.chosen[1]


def pack_floats(weight, bias=None):
    """A weight [n, k] of one of KINDS -> `PackedWeight`."""
    values = blocks(weight, 4, 4 // weight.itemsize)
    return PackedWeight(KINDS[weight.dtype], weight.shape, values, bias=bias)


def pack_quantized(q, is_int4, scales, minimums=None, bias=None):
    """q uint8 [n, k], the bytes of int8 or values of 0 to 15, scales and minimums [G, n] ->
    `PackedWeight`."""
    values = blocks(q, GROUP, 8) if is_int4 else blocks(q ^ 128, GROUP, 4)
    if is_int4:
        values = values[..., :4] | values[..., 4:] << 4
    floats = [x if x is None else blocks(x.T, 1) for x in (scales, minimums)]
    return PackedWeight(INT4 if is_int4 else INT8, q.shape, values, *floats, bias)


def snapshot(module):
    """What shows later whether a tensor of a module has been changed or replaced, or is trained."""
    return [(tensors, name, x, x._version) for part in module.modules()
            for tensors in (part._parameters, part._buffers)
            for name, x in tensors.items() if x is not None]


class Packed(nn.Module):
    """Keeps what `make` gives for a module's weights, while these stay as they are."""
    made = None  # (`snapshot`, what was made)

    def repack(self):
        """Makes it anew where there is none of the weights as they are."""
        if self.current() is None:
            made = self.make()
            self.made = None if made is None else (snapshot(self), made)

    def current(self):
        seen, made = self.made or ((), None)
        same = all(tensors[name] is x and x._version == version and not x.requires_grad
                   for tensors, name, x, version in seen)
        return made if same else None

    def __getstate__(self):  # deepcopy and pickle leave it out
        return self.__dict__ | dict(made=None)

    def _apply(self, fn, *args, **kwargs):
        self.made = None  # the weights go to another device or dtype
        return super()._apply(fn, *args, **kwargs)


class PackedLinear(Packed, nn.Linear):
    """nn.Linear that, in inference, multiplies by a packed copy of its weight."""

    def make(self):
        """The packed copy of a frozen weight in a dtype that is packed; else None."""
        w = self.weight
        frozen = w.is_cpu and not w.requires_grad and not w.is_inference()
        return pack_floats(w, self.bias) if frozen and w.dtype in KINDS else None

    def forward(self, x):
        packed = self.current() if torch.is_inference_mode_enabled() else None
        return super().forward(x) if packed is None else packed.multiply(x).to(x.dtype)


class KernelHead:
    """The methods of `model.LMHead`, by products of what `current` gives."""

    def topk(self, hidden, k, vocab_ids=None):
        packed = self.current()
        if packed is None:
            return super().topk(hidden, k, vocab_ids)
        if vocab_ids is None:
            return topk_logprobs(packed.multiply(hidden), k)
        logprobs, columns = topk_logprobs(packed.rows(vocab_ids).multiply(hidden), k)
        return logprobs, vocab_ids[columns].long()

    def logits(self, hidden):
        packed = self.current()
        return super().logits(hidden) if packed is None else packed.multiply(hidden)

    def sample(self, hidden, temperature, seed, sequence, position, first_token=0):
        packed = self.current()
        if packed is None:
            return super().sample(hidden, temperature, seed, sequence, position, first_token)
        return argmax(packed.multiply(hidden), temperature, seed, sequence, position, first_token)

    def filtered_sample(self, logits, *, temperature, top_k, top_p, min_p, **noise):
        """As `kernels.filtered_sample`, with the noise of `sample`, bit for bit."""
        logits = filter_logits(logits, top_k, top_p, min_p, temperature)
        return argmax(logits, 1.0 * (temperature > 0), **noise)


class PackedLMHead(KernelHead, PackedLinear, LMHead):
    pass


def argmax(logits, temperature, seed, sequence, position, first_token=0):
    """As `kernels.gumbel_argmax`, of float32 logits."""
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

class PackedBlocks(Packed, nn.ModuleList):
    """The blocks of a model or of heads, as cpu.c runs them."""

    def make(self):
        """(Block[n] of cpu.c, the tensors that it points to); None where layers are not packed, or
        heads larger than cpu.c's."""
        if len(self) == 0 or not isinstance(self[0], models.Block):
            return None
        config = self[0].attn.config
        if config.head_size > MAX_HEAD:
            return None
        array = (Block * len(self))()
        kept = []
        for block, struct in zip(self, array):
            for path, layer in block.named_modules():
                name = path.rpartition(".")[2]
                if isinstance(layer, models.Norm):
                    setattr(struct, name, norm_struct(layer, kept))
                elif name in ("qkv", "proj", "up", "down"):
                    packed = current(layer)
                    if packed is None:
                        return None
                    setattr(struct, name, packed.linear)
                    kept.append(packed)
            for name in ("n_embd", "n_head", "n_kv_head", "head_size", "n_inner", "gated"):
                setattr(struct, name, getattr(config, name))
            struct.norms_all = config.qk_norm == "all"
            struct.gelu = config.activation == "gelu"
            struct.window = block.attn.window
            has_rope = block.attn.rotates and config.positions == "rope"
            struct.rope = block.attn.has_own_rope if has_rope else -1
            struct.scale = config.attn_scale or config.head_size ** -0.5
        return array, kept


def norm_struct(norm, kept):
    """A `Norm`; what it points to is added to `kept`."""
    tensors = [x if x is None else x.float() for x in (norm.weight, norm.bias)]
    kept += tensors
    return Norm(*map(pointer, tensors), norm.eps)


class CPUModel(GPT):
    """A `GPT` whose blocks run in one call of cpu.c: over a cache, in inference, with packed
    weights. All else is as it was."""

    def run_blocks(self, blocks, hidden, positions, cache=None, ancestors=None, *rest, **named):
        stream = self.run_packed(blocks, hidden, positions, cache, ancestors)
        if stream is None:
            return super().run_blocks(blocks, hidden, positions, cache, ancestors, *rest, **named)
        return stream[0].to(hidden.dtype), None

    def norm_and_hidden(self, tokens, positions, cache, ancestors):
        """As `GPT.norm_and_hidden`; the norm is in float32."""
        hidden = self.embeddings(tokens, positions)
        stream = self.run_packed(self.blocks, hidden, positions, cache, ancestors)
        if stream is None:
            return super().norm_and_hidden(tokens, positions, cache, ancestors)
        return stream[1], stream[0].to(hidden.dtype)

    def run_packed(self, blocks, hidden, positions, cache, ancestors):
        """-> (residual stream, its norm), float32 [B, T, C]; None where cpu.c cannot run it."""
        usable = cache is not None and cache.kv.dtype in KINDS and torch.is_inference_mode_enabled()
        packed = current(blocks) if usable else None
        if packed is None:
            return None
        B, T, C = hidden.shape
        kv = cache.kv
        lengths = positions[:, 0].int()
        if ancestors is not None:
            lengths, ancestors = cache.lengths, ancestors.contiguous()
        end = int(lengths.max()) + T
        if end > kv.shape[4]:
            raise ValueError(f"expected a cache for {end} rows; got {tuple(kv.shape)}")
        tables = [x if x is None else x[positions].float()
                  for x in (self.rotations, self.window_rotations)]
        a_pass = Pass(B, T, threads(), kv.dtype == torch.bfloat16,
                      *map(pointer, (lengths, ancestors, *tables, self.slopes, kv)),
                      *kv.stride()[:4])
        x = hidden.to(torch.float32, copy=True).contiguous()
        normed = torch.empty_like(x)
        kept = []
        library().run_blocks(packed[0], len(blocks), norm_struct(self.norm, kept), a_pass,
                             x.data_ptr(), normed.data_ptr())
        return x, normed


PACKED = {nn.Linear: PackedLinear, LMHead: PackedLMHead, nn.ModuleList: PackedBlocks, GPT: CPUModel}
