"""Packed weights, layers, blocks and draft heads. These hold each weight once, in cpu.c's layout,
and only decode: they cannot be trained, moved or saved."""

import copy
import ctypes
import itertools
import mmap
import threading
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import model as models
from backends.cpu_library import GROUP, MAX_HEAD, header, kernel_threads, lanes, library, threads
from clover import AttentionDecoder, CloverHeads, Concat, DraftHeads, Projector, ResBlock
from common.values import warn
from kernels import best_tokens, filled, filter_logits, mask_logits
from model import Blocks, InputError, LMHead, add, expect
from recurrent.layers import DeltaStates, GatedDelta

MIXERS = type(None), AttentionDecoder, Concat  # in the order of cpu.h's constants
PROJECTORS = ResBlock, Projector
RESERVED = 2**26  # bytes requested from the system at once
FREE = [torch.empty(0, dtype=torch.uint8)]  # the unused part of the last request
FREE_LOCK = threading.Lock()
KINDS = {torch.float32: header.FLOAT32, torch.bfloat16: header.BFLOAT16}
BITS = {header.FLOAT32: 32, header.BFLOAT16: 16, header.INT8: 8, header.INT6: 6, header.INT5: 5,
        header.INT4: 4}


def pack(module):
    """Replaces a model's layers and blocks by packed ones, in their own dtype; those of draft heads
    in 4 bits, which cannot change the output."""
    is_heads = not isinstance(module, models.GPT)
    is_clover = isinstance(module, CloverHeads)
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
            packed = PackedBlocks(blocks)
            if not (is_clover and blocks) or keeps(packed.is_as_written(module.model)):
                module.set_submodule(name, packed)
    if is_clover:
        if can_run_heads(module) and keeps((packed := PackedHeads(module)).is_as_written(module)):
            module.heads = packed
    elif is_heads and can_run_layer(module):
        module.heads = PackedLayer(module)
    elif is_heads:
        warn("draft heads of this kind run in torch, where a step that they draft takes several "
             "times as long; EAGLE-3, MTP and Clover heads run in the C kernels")


def keeps(is_as_written):
    """Returns the truth value, and prints a line if it is false."""
    if not is_as_written:
        warn("the draft heads run in torch, several times slower: their classes, in clover.py and "
             "model.py, do not compute what cpu.c does")
    return is_as_written


def are_close(got, want, size):
    """Whether C and torch computed the same, up to rounding in the dtype of `want`, of numbers of
    this size, and to 8 bits in products."""
    slack = 2 * torch.finfo(want.dtype).eps * size.float().nan_to_num(0, 0, 0).norm()
    got, want = (x.float().nan_to_num(0, 0, 0) for x in (got, want))
    return bool((got - want).norm() <= 0.05 * want.norm() + slack)


def can_run_block(block):
    """Whether cpu.c can run a block: all its layers are packed, unlike a tensor-parallel part's."""
    attn, mlp = block.attn, block.mlp
    if isinstance(attn, GatedDelta):
        layers = attn.qkvz, attn.ab, attn.out_proj
    elif isinstance(attn, models.Attention) and attn.config.head_size <= MAX_HEAD:
        layers = attn.qkv, attn.proj
    else:
        return False
    return all(isinstance(layer, PackedLinear) for layer in (*layers, mlp.up, mlp.down))


def can_run_layer(heads):
    """Whether cpu.c can run these draft heads: EAGLE-3's or MTP's, on its LM head."""
    layer = heads.blocks[0]
    is_packed = can_run_block(layer) and isinstance(heads.lm_head, PackedLMHead)
    return is_packed and hasattr(layer, "embed_norm")


def can_run_heads(clover):
    """Whether cpu.c can run these draft heads: they contain no custom layers."""
    heads, blocks = clover.heads, clover.augment_blocks
    known = all(type(head.mix) in MIXERS and type(head.project) in PROJECTORS for head in heads)
    is_packed = isinstance(blocks, PackedBlocks) or len(blocks) == 0
    return known and is_packed and isinstance(clover.model.head, PackedLMHead) and not any(
        isinstance(layer, nn.Linear) for layer in clover.modules())


# --------------------------------------------------------------------------------------------------
# Weights

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
            with torch.inference_mode(False):  # what is left may be packed outside of it
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

    def whole_bias(self):
        """The bias of all outputs, float32 [n]; or None."""
        if self.bias is None or self.below is None:
            return self.bias
        return torch.cat((self.bias, self.below.whole_bias()))

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
        index = index.contiguous()
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

    def embedding(self, tokens=None):
        """Rows of the weight: token ids [...], by default all -> float32 [..., C]."""
        tokens = torch.arange(self.out_features) if tokens is None else tokens
        return self.packed.unpack(tokens.flatten().long()).view(*tokens.shape, -1)


class PackedLMHead(PackedLinear):
    """`model.LMHead` with a `PackedWeight`."""

    def select(self, tokens):
        """As `LMHead.select`: the lowest ids without a copy, others in 4 bits, since they draft."""
        tokens = tokens.long()
        if not torch.equal(tokens, torch.arange(len(tokens))) or self.packed.below:
            return PackedLMHead(pack_rounded(self.packed.unpack(tokens)))
        front = copy.copy(self.packed)
        front.linear = header.Linear.from_buffer_copy(front.linear)
        front.linear.n = len(tokens)
        return PackedLMHead(front)

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

    def sample_filtered(self, logits, *, temperature, top_k, top_p, min_p, masks=None, **noise):
        """As `LMHead.sample_filtered`; the noise is the same bits as in `sample`."""
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

class PackedDelta(GatedDelta):
    """A `GatedDelta` with packed layers, whose states cpu.c writes."""

    def __init__(self, delta):
        nn.Module.__init__(self)
        vars(self).update(vars(delta))  # its layers and parameters

    def new_states(self, *sizes):
        return PackedStates(*(x.float() for x in super().new_states(*sizes)))


class PackedStates(DeltaStates):
    """`DeltaStates` of cpu.c, in float32: keys have length 1, and G is each node's own decay."""

    def commit(self, path, count, slots=None):
        rows = torch.cat((path, count[:, None]), dim=1)  # (B, P + 1)
        slots = None if slots is None else slots.int()
        a_pass = header.Pass(B=len(rows), threads=threads(), slots=pointer(slots),
                             states=states_struct(self))
        library().commit_delta(a_pass, len(self.state), rows.data_ptr(),
                               rows[:, -1:].data_ptr(), rows.shape[1])


def states_struct(states):
    """The `DeltaStates` of cpu.h."""
    if states is None:
        return header.DeltaStates()
    H, Dk, Dv = states.state.shape[2:]
    slots = states.state.stride(0) // states.state.stride(1)  # this may be a view of one
    return header.DeltaStates(H, states.keys.shape[3], Dk, Dv, states.history.shape[2] + 1, slots,
                              states.u.shape[2], 0, *map(pointer, states))


class PackedBlocks(Packed, Blocks):
    """The blocks of a model or of heads. With a cache one call of cpu.c runs them all; without a
    cache torch does."""
    is_packed = True
    decoding_context = staticmethod(kernel_threads)
    prepare = staticmethod(pack)

    def __init__(self, blocks):
        super().__init__(blocks)
        self.tensors = []  # keeps alive what the structs point to
        for block in blocks:
            if isinstance(block.attn, GatedDelta):
                block.attn = PackedDelta(block.attn)
        structs = (block_struct(block, self.tensors) for block in blocks)
        self.structs = (header.BlockWeights * len(blocks))(*structs)

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
            if cache.states and start == 0:
                cache.states.clear()
        positions = positions.contiguous()
        ancestors = None if ancestors is None else ancestors.contiguous()
        slots = None if cache.slots is None else cache.slots.int()
        normed = torch.empty_like(x)
        states = {0: hidden}
        a_pass = pass_struct(hidden.shape, tables, cache.kv, lengths, ancestors, positions)
        a_pass.slots = pointer(slots)
        a_pass.states = states_struct(cache.states)
        stops = sorted({0, *layers, len(self)})  # cpu.c stops after each layer that is read
        for first, last in itertools.pairwise(stops):
            failed = library().run_blocks(self.structs[first], last - first,
                                          norm or header.NormWeights(), a_pass, x.data_ptr(),
                                          normed.data_ptr())
            check_room(failed, a_pass)
            states[last] = x.to(hidden.dtype, copy=last < len(self))
        joined = torch.cat([states[n] for n in layers], -1) if layers else None
        return states[last], normed, joined

    def last_state(self):
        state = {}
        for name, layer in self[self.last_attention].named_modules():
            if isinstance(layer, PackedLinear):
                state[f"{name}.weight"] = layer.embedding()
                if (bias := layer.packed.whole_bias()) is not None:
                    state[f"{name}.bias"] = bias
            else:
                state |= {f"{name}.{key}": x for key, x in layer.named_parameters(recurse=False)}
        return state

    @torch.inference_mode()
    def is_as_written(self, model):
        """Whether cpu.c computes what torch does, which runs the blocks' classes as they are."""
        x = torch.randn(1, 3, model.config.n_embd, generator=torch.Generator().manual_seed(0))
        x = x.to(model.dtype)
        cache = model.new_cache(1, 4, self)
        positions = torch.arange(3)[None]
        want, got = (add(*self(x, model.tables, positions, rows)[:2]) for rows in (None, cache))
        return are_close(got - x, want - x, x)


def pass_struct(shape, tables, kv, lengths, ancestors=None, positions=None):
    """A `Pass` over a cache. shape: [B, T, ...] of the tokens; tables: `GPT.tables`."""
    assert kv.dtype in KINDS, kv.dtype
    B, T = shape[:2]
    *ropes, slopes = tables
    rope_rows = max((len(x) for x in ropes if x is not None), default=0)
    assert all(x is None or x.dtype == kv.dtype and x.is_contiguous() for x in ropes)
    tensors = lengths, ancestors, positions, *ropes, slopes, kv
    return header.Pass(B, T, threads(), kv.dtype == torch.bfloat16, kv.shape[4], rope_rows, None,
                       *map(pointer, tensors), *kv.stride()[:4])


def check_room(failed, a_pass):
    if failed:
        raise ValueError(f"expected token ids of the vocabulary, and a cache of {a_pass.rows} rows "
                         f"with room for {a_pass.T} more; got an unknown id or a full cache")


def block_struct(block, tensors):
    """The `BlockWeights` of a packed block. Appends the tensors that it points to."""
    config = block.attn.config
    struct = header.BlockWeights(**{name: getattr(config, name) for name in (
        "n_embd", "n_head", "n_kv_head", "head_size", "n_inner", "gated", "attn_gate")})
    for path, layer in block.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(layer, models.Norm):
            setattr(struct, name, norm_struct(layer, tensors))
        elif isinstance(layer, PackedLinear):
            setattr(struct, name, layer.packed.linear)
    if isinstance(block.attn, GatedDelta):
        conv = block.attn.conv1d.weight[:, 0].flip(1).T  # (n, C)
        floats = [x.detach().float().contiguous() for x in (conv, block.attn.A, block.attn.dt_bias)]
        tensors += floats
        struct.conv, struct.A, struct.dt_bias = map(pointer, floats)
    struct.norms_all = config.qk_norm == "all"
    struct.gelu = config.activation == "gelu"
    struct.window = block.attn.window or 0
    rope = block.attn.rope if config.positions == "rope" else None
    struct.rope = {None: -1, "global": 0, "window": 1}[rope]
    struct.scale = config.attn_scale or config.head_size ** -0.5
    return struct


# --------------------------------------------------------------------------------------------------
# Heads

class PackedLayer:
    """EAGLE-3 or MTP heads with packed layers, run by cpu.c: `augment` is their layer."""

    def __init__(self, heads):
        self.tensors = []  # keeps alive what the structs point to
        layer = heads.blocks[0]
        self.augment = ctypes.pointer(block_struct(layer, self.tensors))
        self.mix_in = header.HeadWeights(norm_struct(layer.state_norm, self.tensors),
                                         norm_struct(layer.embed_norm, self.tensors))
        if hasattr(layer, "fc"):
            self.mix_in.mix = layer.fc.packed.linear
        owner = heads.model if heads.embed is None else heads
        if type(owner.embed) is nn.Embedding:
            table = PackedLinear(pack_floats(owner.embed.weight.detach()))
            owner.embed = PackedEmbedding(table, heads.model.dtype)
        self.struct = header.Heads(
            n_embd=heads.config.layers.n_embd, n_head=1, n_weights=1, mix=header.LAYER, scale=1,
            norm_before_residual=heads.config.norm_before_residual,
            norm_output=heads.config.norm_output, mix_in=ctypes.pointer(self.mix_in),
            norm=norm_struct(heads.norm, self.tensors), table=owner.embed.table.packed.linear)


class PackedHeads(Packed, DraftHeads):
    """The draft heads of a `CloverHeads` with packed layers, run by cpu.c."""

    def __init__(self, clover):
        super().__init__(clover.heads)
        base = clover.model
        self.augment = getattr(clover.augment_blocks, "structs", None)
        ones = torch.ones(base.config.n_embd)
        self.tensors = [ones]  # keeps alive what the structs point to
        heads = (mix_struct(head.mix, self.tensors) for head in self)
        self.structs = (header.HeadWeights * len(self))(*heads)
        for struct, head in zip(self.structs, self):
            struct.project = head.project.linear.packed.linear
        self.struct = header.Heads(
            n_embd=base.config.n_embd, n_head=getattr(self[0].mix, "n_head", 1),
            n_weights=len(self), mix=MIXERS.index(type(self[0].mix)),
            linear=type(self[0].project) is Projector, scale=clover.embedding_scale,
            heads=self.structs, norm=norm_struct(base.norm, self.tensors),
            table=base.head.packed.linear,
            state_norm=header.NormWeights(ones.data_ptr(), None, torch.finfo(torch.float32).eps))
        if clover.mix_in is not None:
            self.mix_in = mix_struct(clover.mix_in, self.tensors)
            self.struct.mix_in = ctypes.pointer(self.mix_in)

    @torch.inference_mode()
    def is_as_written(self, clover):
        """Whether cpu.c computes what torch does, which runs the heads' classes as they are."""
        model = clover.model
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, model.config.n_embd, generator=generator).to(model.dtype)
        tokens = torch.randint(model.config.vocab_size, (8,), generator=generator)
        for number in {0, len(self) - 1}:
            state, *out = self[number](x, clover.embedding(tokens))
            want, _ = model.norm.add_and_norm(*out)
            own = x.to(torch.float32, copy=True)
            got = torch.empty_like(own)
            library().run_draft_head(self.struct, number, own.data_ptr(), tokens.data_ptr(), 8,
                                     got.data_ptr(), threads())
            if not (are_close(own - x, state - x, x) and are_close(got, want, want)):
                return False
        return True


def mix_struct(mix, tensors):
    """`HeadWeights` with only the token mixer `mix`, or None."""
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
    """The `NormWeights` of a norm. Appends the tensors that it points to."""
    weights = [x if x is None else x.detach().float() for x in (norm.weight, norm.bias)]
    tensors += weights
    return header.NormWeights(*map(pointer, weights), norm.eps)
