"""A causal language model in one file: the Llama shape and the GPT-2 shape by config, and a KV cache.

    python model.py FOLDER        what a Hugging Face checkpoint folder holds

Letters: B sequences, T tokens or tree nodes, C hidden size, V vocabulary, L layers, S cache rows, D head size,
Hq query heads, Hkv key/value heads.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

from kernels import float_logits, gumbel_argmax, project_sample, project_topk, runs_triton, topk_logits, tree_attention, tree_mask

PACKS = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # what torch.compile uses


class InputError(ValueError):
    """Bad input that the user can mend. The message is one line: what was expected, what came, what to do."""


@dataclass
class GPTConfig:
    family: str = "llama"      # a key of FAMILIES: how a checkpoint folder spells names and flags
    vocab_size: int = 4096     # V
    block_size: int = 1024     # longest sequence, in tokens
    n_layer: int = 12          # L
    n_head: int = 4            # Hq
    n_kv_head: int = 2         # Hkv
    head_size: int = 64        # D
    n_embd: int = 256          # C
    n_inner: int = 640         # width of the MLP
    norm: str = "rms"          # "rms" or "layer"
    norm_eps: float = 1e-5
    positions: str = "rope"    # "rope", "learned" as in GPT-2, or "alibi"
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # {"rope_type": "linear", "yarn", "llama3" or "longrope", and its numbers}
    activation: str = "silu"   # "silu" or "gelu" (the tanh approximation)
    gated: bool = True         # MLP: act(gate(x)) * up(x) instead of act(up(x))
    qkv_bias: bool = False
    proj_bias: bool = False    # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False      # RMSNorm over each query and key head, before the rotation
    tied: bool = True          # the LM head is the embedding table
    unit_head: bool = False    # the LM head's rows are brought to length 1 when they are read, as Baichuan 2 does


def atomic_write(path, write):
    """Calls write(temporary name) and renames the result to `path`, so that a reader sees the old file or the new one."""
    tmp = f"{path}.tmp{os.getpid()}"
    try:
        write(tmp)
        os.chmod(tmp, 0o644)  # safetensors writes files that only their owner may read
        os.replace(tmp, path)
    finally:
        Path(tmp).unlink(missing_ok=True)


def read_json(path):
    """The object in a json file; InputError when it is missing or broken."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a Hugging Face checkpoint folder with it") from None
    except (OSError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: cannot be read as json ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a json object, found a {type(value).__name__}")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Identity

def sample_places(shape, start=0, size=None):
    """(rows, columns) of the elements of a parameter that its identity looks at: one in every numel // 64 of them all, as far as
    they are in `size` rows from `start`, counted from there."""
    size, width, numel = shape[0] if size is None else size, math.prod(shape[1:]), math.prod(shape)
    stride = max(1, numel // 64)
    flat = torch.arange(-(-start * width // stride) * stride, (start + size) * width, stride) - start * width
    return (flat // width, flat % width) if len(shape) > 1 else (torch.zeros_like(flat), flat)


def digest(samples):
    """16 hex digits over {name: (shape, sampled values)}. Values are rounded to bfloat16 first, so that a float32 model and its
    bfloat16 checkpoint are the same model."""
    sha = hashlib.sha256()
    for name, (shape, values) in sorted(samples.items()):
        sha.update(f"{name}{tuple(shape)}".encode() + values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return sha.hexdigest()[:16]


def identity(state):
    """`digest` of the tensors of a model, {name: tensor}."""
    return digest({name: (value.shape, value.detach().flatten()[::max(1, value.numel() // 64)]) for name, value in state.items()})


def free_memory(device):
    """Bytes that can still be allocated on a device, as far as it tells."""
    device = torch.device(device)
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else math.inf
    try:  # a container may be allowed less
        limit, used, stat = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current", "stat"))
        cache = dict(line.split() for line in stat.splitlines())["inactive_file"]  # of files read: given up when needed
        return min(free, int(limit) - int(used) + int(cache))
    except (KeyError, OSError, ValueError):  # no such limit
        return free


# ---------------------------------------------------------------------------------------------------------------------
# The cache

class KVCache:
    """Keys and values of B sequences. `kv` is one tensor [L, 2, B, Hkv, S, D]; `lengths` int32 [B] counts committed rows."""

    def __init__(self, layers, batch, kv_heads, rows, head_size, dtype=torch.float32, device="cpu"):
        # zeros, not empty: rows never written still pass through masked matrix products, where 0 * nan is nan
        self.kv = torch.zeros(layers, 2, batch, kv_heads, rows, head_size, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    @property
    def rows(self):
        return self.kv.shape[4]

    def slots(self, first, count=1):
        """A cache of `count` sequences that shares the memory of sequences first, first + 1, ..."""
        view = object.__new__(KVCache)
        view.kv, view.lengths = self.kv[:, :, first:first + count], self.lengths[first:first + count]
        return view


class Span:
    """Where the T tokens of one forward pass stand and what each of them sees; shared by all layers.

    Without a cache they are whole sequences, and each sees what is before it, in its own document where `documents` (int64
    [B, T]) numbers several in a row. With one, and `ancestors` (int64 [B, T]), they
    are tree nodes at cache rows lengths..lengths+T. With a cache alone they continue their sequence at rows `positions`
    and see everything up to themselves; `end`, one past the last of these, need not be read back from a GPU by who knows it.
    slopes: float32 [Hq], ALiBi's, or None.
    """

    def __init__(self, positions, cache=None, ancestors=None, end=None, slopes=None, documents=None):
        B, T = positions.shape
        self.cached, self.ancestors, self.slopes, self.mask = cache is not None, ancestors, slopes, None
        if cache is None:
            if slopes is not None:
                self.mask = alibi_mask(torch.arange(T, device=positions.device)[None], T, slopes)
            if documents is not None:
                together = (documents[:, :, None] == documents[:, None, :])[:, None]  # (B, 1, T, T)
                self.mask = together.tril() if slopes is None else self.mask.masked_fill(~together, -math.inf)
            return
        self.lengths = cache.lengths
        self.batch = torch.arange(B, device=positions.device)[:, None]
        if ancestors is None:
            end = int(positions.max()) + 1 if end is None else end
            self.rows = positions
            if slopes is None:
                self.mask = (torch.arange(end, device=positions.device) <= positions[:, :, None])[:, None]  # (B, 1, T, end)
            else:
                self.mask = alibi_mask(positions, end, slopes)
        else:
            self.rows = self.lengths[:, None].long() + torch.arange(T, device=positions.device)
            if not runs_triton(ancestors):  # the reference wants the mask; the kernel reads the bits itself
                self.mask = tree_mask(self.lengths, ancestors, int(self.lengths.max()) + T, slopes)

    def attend(self, q, k, v, kv=None):
        """The attention of q [B, T, Hq, D], k, v [B, T, Hkv, D] in the same shape; with a cache, its layer kv [2, B, Hkv, S, D]
        takes in k and v first."""
        if self.cached:
            kv[0].transpose(1, 2)[self.batch, self.rows] = k
            kv[1].transpose(1, 2)[self.batch, self.rows] = v
            if self.ancestors is not None:
                return tree_attention(q, kv[0], kv[1], self.lengths, self.ancestors, mask=self.mask, slopes=self.slopes)
            end = self.mask.shape[-1]
            keys, values = kv[0, :, :, :end], kv[1, :, :, :end]
        else:
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
        if self.mask is not None and self.mask.dtype not in (torch.bool, q.dtype):
            self.mask = self.mask.to(q.dtype)  # torch wants biases so, rounded in half precision; tree_attention does not
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=self.mask, is_causal=self.mask is None,
                                           enable_gqa=q.shape[2] != k.shape[2])
        return y.transpose(1, 2)  # (B, T, Hq, D)


def document_positions(documents):
    """documents int64 [B, T], which number the documents of a window in a row -> the place of each token in its own, int64
    [B, T]; the first one is taken to begin with the window."""
    B, T = documents.shape
    places = torch.arange(T, device=documents.device).expand(B, T)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return places - (places * begins).cummax(dim=1).values


def alibi_slopes(heads):
    """float32 [heads]: 2^(-8/n), 2^(-16/n), ... for n heads; where n is no power of two, those of the power below it, then
    every other one of the power above (ALiBi, arXiv 2108.12409, and its authors' code)."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)] + [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(slopes)


def alibi_mask(positions, end, slopes):
    """positions [B, T] -> float32 [B, Hq, T, end]: minus slope times distance to the rows before a token, -inf behind it."""
    distance = positions[:, None, :, None] - torch.arange(end, device=positions.device)  # (B, 1, T, end)
    return (-slopes[:, None, None] * distance).masked_fill_(distance < 0, -math.inf)


# ---------------------------------------------------------------------------------------------------------------------
# The network

class Linear(nn.Linear):
    """nn.Linear which, in inference on a CPU, multiplies by a copy of its weight in oneDNN's own blocked layout: on an AMD
    processor two to three times as quick as from rows, for one token and for many. `pack` makes the copies."""
    copy = None  # (the weight, its version, the packed copy)

    def repack(self):
        """Brings the copy up to date. Only a frozen float32 weight on a CPU has one."""
        w = self.weight
        if not PACKS or w.dtype != torch.float32 or not w.is_cpu or w.requires_grad or w.is_inference():
            self.copy = None
        elif self.copy is None or self.copy[0] is not w or self.copy[1] != w._version:
            self.copy = w, w._version, torch.ops.mkldnn._reorder_linear_weight(w, None)

    def packed(self):
        """The copy, or None where there is none, the weight has changed since, or somebody may want gradients."""
        if self.copy is None or not torch.is_inference_mode_enabled():
            return None
        weight, version, packed = self.copy
        return packed if weight is self.weight and weight._version == version else None

    def __getstate__(self):  # what deepcopy and pickle take along: not the copies, which are oneDNN's own
        return {name: value for name, value in self.__dict__.items() if name not in ("copy", "part")}

    def _apply(self, fn, *args, **kwargs):
        self.copy = None  # the weight goes to another device or dtype
        return super()._apply(fn, *args, **kwargs)

    def forward(self, x):
        packed = self.packed()
        return F.linear(x, self.weight, self.bias) if packed is None else packed_linear(x, packed, self.bias)


def packed_linear(x, packed, bias=None):
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack(module):
    """Lets the frozen `Linear` layers of a module keep packed copies, where memory has room for twice as much as they take."""
    layers = [m for m in module.modules() if isinstance(m, Linear)]
    missing = sum(m.weight.nbytes for m in layers if m.copy is None and m.weight.is_cpu)
    if 2 * missing <= free_memory("cpu"):
        for layer in layers:
            layer.repack()


class LMHead(Linear):
    """The projection onto the vocabulary, with the two things that decoding asks of it."""
    part = None  # (rows, packed copy of the whole, packed copy of these rows)

    def topk(self, hidden, k, rows=None):
        """`kernels.project_topk` by this weight: hidden [M, C], after the final norm -> (logprobs, tokens) [M, k]."""
        packed = self.packed()
        if packed is None:
            return project_topk(hidden, self.weight, k, rows)
        if rows is None:
            return topk_logits(self.logits(hidden), k)
        if self.part is None or self.part[0] is not rows or self.part[1] is not packed:
            self.part = rows, packed, torch.ops.mkldnn._reorder_linear_weight(self.weight[rows], None)
        logprobs, places = topk_logits(packed_linear(hidden, self.part[2]), k)
        return logprobs, rows[places].long()

    def logits(self, hidden):
        """hidden [M, C], after the final norm -> float32 [M, V], not rounded to half precision, which would make ties."""
        packed = self.packed()
        return float_logits(hidden, self.weight) if packed is None else packed_linear(hidden, packed)

    def sample(self, hidden, temperature, seed, sequence, position):
        """`kernels.project_sample` by this weight: hidden [M, C], after the final norm -> tokens [M]."""
        if self.packed() is None:
            return project_sample(hidden, self.weight, temperature, seed, sequence, position)
        return gumbel_argmax(self.logits(hidden), temperature, seed, sequence, position)


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last dimension."""

    def __init__(self, kind, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layer" else None
        self.eps = eps

    def forward(self, x):
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)  # autocast leaves x in bf16
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def rope_frequencies(config):
    """(radians per token of each pair of dimensions [D/2], a factor for cos and sin) by config.rope_theta and rope_scaling:
    RoPE (arXiv 2104.09864); position interpolation (2306.15595), YaRN (2309.00071, section 3), LongRoPE (2402.13753), and
    Llama 3.1's."""
    D, theta, s = config.head_size, config.rope_theta, config.rope_scaling or dict(rope_type="default")
    plain = theta ** -(torch.arange(0, D, 2, dtype=torch.float32) / D)
    if s["rope_type"] == "linear":
        return plain / s["factor"], 1.0
    if s["rope_type"] == "longrope":
        return plain / torch.tensor(s["short_factor"]), s["attention_factor"]
    if s["rope_type"] == "llama3":  # long waves are stretched, short ones are not, and in between it is blended
        turns = s["original_max_position_embeddings"] * plain / (2 * math.pi)  # within the original context
        keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        return plain * torch.lerp(torch.tensor(1 / s["factor"]), torch.tensor(1.0), keep.clamp(0, 1)), 1.0
    if s["rope_type"] == "yarn":  # the same idea, blended over dimensions
        place = lambda turns: D * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = place(s["beta_fast"]), place(s["beta_slow"])
        low, high = (math.floor(low), math.ceil(high)) if s["truncate"] else (low, high)
        low, high = max(low, 0), min(high, D - 1)
        stretch = ((torch.arange(D // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return plain * torch.lerp(torch.tensor(1.0), torch.tensor(1 / s["factor"]), stretch), s["attention_factor"]
    return plain, 1.0


def rope_table(positions, frequencies, scale, dtype):
    """cos and signed sin, each [B, T, 1, D], for `rotate` (RoPE, arXiv 2104.09864, halves layout)."""
    angles = positions[:, :, None, None].float() * frequencies  # (B, T, 1, D/2)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x, table):
    """Rotates each head of x [B, T, H, D] by its position."""
    cos, sin = table
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):

    def __init__(self, config):
        super().__init__()
        c, self.config = config, config
        self.qkv = Linear(c.n_embd, (c.n_head + 2 * c.n_kv_head) * c.head_size, bias=c.qkv_bias)
        self.proj = Linear(c.n_head * c.head_size, c.n_embd, bias=c.proj_bias)
        if c.qk_norm:
            self.q_norm = Norm("rms", c.head_size, c.norm_eps)
            self.k_norm = Norm("rms", c.head_size, c.norm_eps)

    def forward(self, x, table, span, kv=None):
        B, T, C = x.shape
        Hq, Hkv, D = self.config.n_head, self.config.n_kv_head, self.config.head_size
        qk, v = self.qkv(x).view(B, T, Hq + 2 * Hkv, D).split((Hq + Hkv, Hkv), dim=2)
        if self.config.qk_norm:
            qk = torch.cat((self.q_norm(qk[:, :, :Hq]), self.k_norm(qk[:, :, Hq:])), dim=2)
        if table is not None:
            qk = rotate(qk, table)
        q, k = qk.split((Hq, Hkv), dim=2)  # (B, T, Hq, D), (B, T, Hkv, D)
        return self.proj(span.attend(q, k, v, kv).reshape(B, T, Hq * D))


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        c, self.config = config, config
        self.up = Linear(c.n_embd, c.n_inner * (2 if c.gated else 1), bias=c.mlp_bias)  # rows: gate, then up
        self.down = Linear(c.n_inner, c.n_embd, bias=c.mlp_bias)

    def forward(self, x):
        x = self.up(x)
        gate, x = x.chunk(2, dim=-1) if self.config.gated else (x, None)
        gate = F.silu(gate) if self.config.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down(gate if x is None else gate * x)


class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.attn_norm = Norm(config.norm, config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = Norm(config.norm, config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, table, span, kv=None):
        x = x + self.attn(self.attn_norm(x), table, span, kv)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer; `init_weights` or `from_pretrained` gives it weights. The hidden state it hands out is the
    last block's output, before the final norm."""

    def __init__(self, config):
        super().__init__()
        c, self.config = config, config
        # nn.Embedding itself draws random numbers, which on the meta device takes a second of imports
        embedding = lambda rows: nn.Embedding.from_pretrained(torch.zeros(rows, c.n_embd), freeze=False)
        self.embed = embedding(c.vocab_size)
        self.embed_positions = embedding(c.block_size) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = Norm(c.norm, c.n_embd, c.norm_eps)
        self.head = LMHead(c.n_embd, c.vocab_size, bias=False)
        self.tie_and_place()

    def tie_and_place(self):
        """What is derived rather than stored: the tied head, and the tables of positions."""
        c, device = self.config, self.embed.weight.device
        if c.tied:
            self.head.weight = self.embed.weight
        if c.positions == "rope":
            with torch.device("cpu"):
                frequencies, self.rope_scale = rope_frequencies(c)
            self.register_buffer("frequencies", frequencies.to(device), persistent=False)
        self.register_buffer("slopes", alibi_slopes(c.n_head).to(device) if c.positions == "alibi" else None, persistent=False)

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        self.tie_and_place()  # on the new device, and in float32 still
        return self

    @torch.no_grad()
    def init_weights(self, generator=None):
        """GPT-2's start: normal(0, 0.02), the projections back into the residual stream smaller by sqrt(2 L)."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                shrink = math.sqrt(2 * self.config.n_layer) if name.endswith(("proj.weight", "down.weight")) else 1
                p.normal_(0, 0.02 / shrink, generator=generator)
            elif name.endswith("bias"):
                p.zero_()
        return self

    @property
    def device(self):
        return self.embed.weight.device

    @property
    def dtype(self):
        return self.embed.weight.dtype

    def new_cache(self, batch, rows):
        c = self.config
        return KVCache(c.n_layer, batch, c.n_kv_head, rows, c.head_size, self.dtype, self.device)

    def rope(self, positions):
        return rope_table(positions, self.frequencies, self.rope_scale, self.dtype) if self.config.positions == "rope" else None

    def forward(self, tokens, positions=None, cache=None, ancestors=None, end=None, documents=None):
        """tokens [B, T] int64 -> the last block's output [B, T, C].

        Without a cache: a plain causal pass (training), in which the tokens of several `documents` in a row (int64 [B, T],
        their numbers) do not see one another. With one, K and V of the tokens are written to it, `lengths`
        stays as it is, and the tokens continue their sequence at `positions` [B, T]; with `ancestors` (int64 [B, T])
        they are the nodes of a tree, see `Span`, also for `end`.
        """
        B, T = tokens.shape
        if positions is None:
            positions = torch.arange(T, device=tokens.device).expand(B, T) if documents is None else document_positions(documents)
        x = self.embed(tokens)  # (B, T, C)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        table = self.rope(positions)
        span = Span(positions, cache, ancestors, end, self.slopes, documents)
        for layer, block in enumerate(self.blocks):
            x = block(x, table, span, None if cache is None else cache.kv[layer])
        return x

    def lm_head(self, hidden):
        """hidden [..., C] -> logits [..., V]."""
        return self.head(self.norm(hidden))

    @torch.no_grad()
    def prefill(self, tokens, cache, start=0):
        """Appends tokens [1, n] to a one-sequence cache of `start` rows so far -> hidden [1, n, C]. Long texts come in chunks:
        the scores of n tokens take n x (start + n) numbers per head."""
        end = start + tokens.shape[1]
        hidden = self(tokens, torch.arange(start, end, device=tokens.device)[None], cache, end=end)
        cache.lengths.fill_(end)
        return hidden

    # -----------------------------------------------------------------------------------------------------------------
    # Folders

    @classmethod
    def from_pretrained(cls, path, dtype=None, device=None):
        """Reads a checkpoint folder of one of checkpoint.py's FAMILIES: config.json, and model.safetensors or
        pytorch_model.bin, in one file or in shards, straight to the device.

        dtype: torch dtype, default float32 on a CPU and bfloat16 on CUDA. Raises InputError for whatever is amiss.
        """
        from hf.checkpoint import read_config, read_state
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        config = read_config(path)
        with torch.device("meta"):
            model = cls(config)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        needed, free = dtype.itemsize * sum(map(math.prod, shapes.values())), free_memory(device)
        if needed > free:
            raise InputError(f"{path}: its weights take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, but {free / 1e9:.1f} GB "
                             f"are free on {device}; take a smaller model" + (" or --dtype bfloat16" if dtype == torch.float32 else ""))
        state, model.identity = read_state(path, config, shapes, dtype, device)
        if config.tied:
            state["head.weight"] = state["embed.weight"]
        model.load_state_dict(state, assign=True)
        model.requires_grad_(False)
        model.tie_and_place()
        return model.eval()

    def save_pretrained(self, path, dtype=None):
        """Writes config.json and model.safetensors (tensors in `dtype`, default the model's) for transformers to read.
        Raises InputError for a config that the family's format cannot express."""
        from hf.checkpoint import hf_config, parse_config, split_weight
        path, raw = Path(path), hf_config(self.config, dtype or self.dtype)
        if parse_config(raw, path) != self.config:
            raise InputError(f"{path}: the {self.config.family} format has no way to write this config: {self.config}")
        path.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, value in self.state_dict().items():
            if not (name == "head.weight" and self.config.tied):
                tensors.update(split_weight(name, value.detach().to("cpu", dtype or self.dtype), self.config))
        atomic_write(path / "model.safetensors", lambda tmp: save_file(tensors, tmp, metadata={"format": "pt"}))
        text = json.dumps(raw, indent=2) + "\n"
        atomic_write(path / "config.json", lambda tmp: Path(tmp).write_text(text))


if __name__ == "__main__":
    from tools.cli import describe_command
    describe_command()
