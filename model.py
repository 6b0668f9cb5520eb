"""A causal language model in one file: the Llama shape and the GPT-2 shape by config, a KV cache, and Hugging Face folders.

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
from safetensors import SafetensorError, safe_open
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
    rope_theta: float = 10000.0  # 0 means learned positions, as in GPT-2
    activation: str = "silu"   # "silu" or "gelu" (the tanh approximation)
    gated: bool = True         # MLP: act(gate(x)) * up(x) instead of act(up(x))
    qkv_bias: bool = False
    proj_bias: bool = False    # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False      # RMSNorm over each query and key head, before the rotation
    tied: bool = True          # the LM head is the embedding table


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
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no such limit
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
    """Where the T new tokens of one forward pass stand in the cache, and what each of them sees; shared by all layers.

    With `ancestors` (int64 [B, T]) the tokens are tree nodes at rows lengths..lengths+T. Without, they continue their
    sequence at rows `positions` and see everything up to themselves; `end`, one past the last of these, need not be read
    back from a GPU by who knows it.
    """

    def __init__(self, cache, positions, ancestors=None, end=None):
        B, T = positions.shape
        self.lengths, self.ancestors = cache.lengths, ancestors
        self.batch = torch.arange(B, device=positions.device)[:, None]
        self.mask = None
        if ancestors is None:
            end = int(positions.max()) + 1 if end is None else end
            self.rows = positions
            self.mask = torch.arange(end, device=positions.device) <= positions[:, :, None]  # (B, T, end)
        else:
            self.rows = self.lengths[:, None].long() + torch.arange(T, device=positions.device)
            if not runs_triton(ancestors):  # the reference wants the mask; the kernel reads the bits itself
                self.mask = tree_mask(self.lengths, ancestors, int(self.lengths.max()) + T)

    def attend(self, q, k, v, kv):
        """Writes k, v [B, T, Hkv, D] into kv [2, B, Hkv, S, D] and returns the attention of q [B, T, Hq, D]."""
        kv[0].transpose(1, 2)[self.batch, self.rows] = k
        kv[1].transpose(1, 2)[self.batch, self.rows] = v
        if self.ancestors is not None:
            return tree_attention(q, kv[0], kv[1], self.lengths, self.ancestors, mask=self.mask)
        end = self.mask.shape[-1]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), kv[0, :, :, :end], kv[1, :, :, :end],
                                           attn_mask=self.mask[:, None], enable_gqa=q.shape[2] != k.shape[2])
        return y.transpose(1, 2)  # (B, T, Hq, D)


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


def rope_table(positions, frequencies, dtype):
    """cos and signed sin, each [B, T, 1, D], for `rotate` (RoPE, arXiv 2104.09864, halves layout)."""
    angles = positions[:, :, None, None].float() * frequencies  # (B, T, 1, D/2)
    cos, sin = angles.cos(), angles.sin()
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

    def forward(self, x, table, span=None, kv=None):
        B, T, C = x.shape
        Hq, Hkv, D = self.config.n_head, self.config.n_kv_head, self.config.head_size
        qk, v = self.qkv(x).view(B, T, Hq + 2 * Hkv, D).split((Hq + Hkv, Hkv), dim=2)
        if self.config.qk_norm:
            qk = torch.cat((self.q_norm(qk[:, :, :Hq]), self.k_norm(qk[:, :, Hq:])), dim=2)
        if table is not None:
            qk = rotate(qk, table)
        q, k = qk.split((Hq, Hkv), dim=2)  # (B, T, Hq, D), (B, T, Hkv, D)
        if span is not None:
            y = span.attend(q, k, v, kv)
        else:
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                               is_causal=True, enable_gqa=Hq != Hkv).transpose(1, 2)
        return self.proj(y.reshape(B, T, Hq * D))


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

    def forward(self, x, table, span=None, kv=None):
        x = x + self.attn(self.attn_norm(x), table, span, kv)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer. The hidden state it hands out is the last block's output, before the final norm."""

    def __init__(self, config):
        super().__init__()
        c, self.config = config, config
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.embed_positions = None if c.rope_theta else nn.Embedding(c.block_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = Norm(c.norm, c.n_embd, c.norm_eps)
        self.head = LMHead(c.n_embd, c.vocab_size, bias=False)
        self.tie_and_rope()

    def tie_and_rope(self):
        """What is derived rather than stored: the tied head and the rotation frequencies."""
        c = self.config
        if c.tied:
            self.head.weight = self.embed.weight
        if c.rope_theta:
            exponents = torch.arange(0, c.head_size, 2, dtype=torch.float32, device=self.embed.weight.device) / c.head_size
            self.register_buffer("frequencies", c.rope_theta ** -exponents, persistent=False)

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
        return rope_table(positions, self.frequencies, self.dtype) if self.config.rope_theta else None

    def forward(self, tokens, positions=None, cache=None, ancestors=None, end=None):
        """tokens [B, T] int64 -> the last block's output [B, T, C].

        Without a cache: a plain causal pass (training). With one, K and V of the tokens are written to it, `lengths`
        stays as it is, and the tokens continue their sequence at `positions` [B, T]; with `ancestors` (int64 [B, T])
        they are the nodes of a tree, see `Span`, also for `end`.
        """
        B, T = tokens.shape
        if positions is None:
            positions = torch.arange(T, device=tokens.device).expand(B, T)
        x = self.embed(tokens)  # (B, T, C)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        table = self.rope(positions)
        span = None if cache is None else Span(cache, positions, ancestors, end)
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
    # Hugging Face folders

    @classmethod
    def from_pretrained(cls, path, dtype=None, device=None):
        """Reads a checkpoint folder: config.json and model.safetensors, or shards named by model.safetensors.index.json.

        dtype: torch dtype, default float32 on a CPU and bfloat16 on CUDA. Raises InputError for whatever is amiss.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        config = read_config(path)
        with torch.device("meta"):
            model = cls(config)
        state = merge_weights(read_weights(path), config, path)
        for name, p in model.named_parameters():
            if name not in state:
                raise InputError(f"{path}: the checkpoint lacks what {name} is made of; it does not fit its config.json")
            if state[name].shape != p.shape:
                raise InputError(f"{path}: {name} should have shape {tuple(p.shape)} by config.json, "
                                 f"the checkpoint has {tuple(state[name].shape)}")
        if config.tied:
            state["head.weight"] = state["embed.weight"]
        model.identity = identity(state)  # of the values in the file, before the cast
        model.load_state_dict({name: value.to(device=device, dtype=dtype) for name, value in state.items()}, assign=True)
        model.requires_grad_(False)
        model.tie_and_rope()
        return model.eval()

    def save_pretrained(self, path, dtype=None):
        """Writes config.json and model.safetensors (tensors in `dtype`, default the model's) for transformers to read.
        Raises InputError for a config that the family's format cannot express."""
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


def identity(state):
    """16 hex digits over the names, shapes and a sample of the values of {name: tensor}. Values are rounded to bfloat16
    first, so that a float32 model and its bfloat16 checkpoint are the same model."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        sample = value.detach().flatten()[::max(1, value.numel() // 64)].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name}{tuple(value.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def atomic_write(path, write):
    """Calls write(temporary name) and renames the result to `path`, so that a reader sees the old file or the new one."""
    tmp = f"{path}.tmp{os.getpid()}"
    try:
        write(tmp)
        os.chmod(tmp, 0o644)  # safetensors writes files that only their owner may read
        os.replace(tmp, path)
    finally:
        Path(tmp).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Families: what a folder's config.json and tensor names mean. A further family is a further entry.

LLAMA_NAMES = {  # ours -> the checkpoint's; several parts are stacked, in order, into one of ours
    "embed.{}": ("model.embed_tokens.{}",),
    "norm.{}": ("model.norm.{}",),
    "head.{}": ("lm_head.{}",),
    "blocks.N.attn_norm.{}": ("model.layers.N.input_layernorm.{}",),
    "blocks.N.attn.qkv.{}": tuple(f"model.layers.N.self_attn.{x}_proj.{{}}" for x in "qkv"),
    "blocks.N.attn.q_norm.{}": ("model.layers.N.self_attn.q_norm.{}",),
    "blocks.N.attn.k_norm.{}": ("model.layers.N.self_attn.k_norm.{}",),
    "blocks.N.attn.proj.{}": ("model.layers.N.self_attn.o_proj.{}",),
    "blocks.N.mlp_norm.{}": ("model.layers.N.post_attention_layernorm.{}",),
    "blocks.N.mlp.up.{}": ("model.layers.N.mlp.gate_proj.{}", "model.layers.N.mlp.up_proj.{}"),
    "blocks.N.mlp.down.{}": ("model.layers.N.mlp.down_proj.{}",),
}

FAMILIES = {  # model_type -> (architecture, names, flags as read from config.json)
    "llama": ("LlamaForCausalLM", LLAMA_NAMES,
              lambda raw: dict(qkv_bias=raw.get("attention_bias", False), proj_bias=raw.get("attention_bias", False),
                               mlp_bias=raw.get("mlp_bias", False))),
    "qwen2": ("Qwen2ForCausalLM", LLAMA_NAMES, lambda raw: dict(qkv_bias=True)),
    "qwen3": ("Qwen3ForCausalLM", LLAMA_NAMES,
              lambda raw: dict(qk_norm=True, qkv_bias=raw.get("attention_bias", False),
                               proj_bias=raw.get("attention_bias", False))),
}


def read_json(path):
    """The object in a json file; InputError when it is missing or broken."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a Hugging Face checkpoint folder with it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: cannot be read as json ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a json object, found a {type(value).__name__}")
    return value


def rope_settings(raw, path):
    """theta from `rope_parameters` (transformers 5) or `rope_theta`; scaled kinds are refused."""
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default":
        raise InputError(f"{path}: rope type {kind!r} is not supported; supported: 'default'")
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if not 0 < theta < math.inf:
        raise InputError(f"{path}: rope_theta must be above 0, found {theta}")
    return theta


def read_config(path):
    """config.json of a checkpoint folder -> GPTConfig."""
    if not Path(path).is_dir():
        raise InputError(f"{path}: no such folder; expected a Hugging Face checkpoint folder")
    path = Path(path) / "config.json"
    return parse_config(read_json(path), path)


def parse_config(raw, path):
    """The dict of a config.json -> GPTConfig; InputError for what is not supported, missing or of the wrong type."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise InputError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; supported: 'silu'")
    if raw.get("quantization_config"):
        raise InputError(f"{path}: quantised checkpoints are not supported; use the float16 or bfloat16 one")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise InputError(f"{path}: sliding-window attention is not supported; use a model without it")
    try:
        heads, C = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        config = GPTConfig(
            family=family, vocab_size=int(raw["vocab_size"]), block_size=int(raw["max_position_embeddings"]),
            n_layer=int(raw["num_hidden_layers"]), n_head=heads, n_kv_head=int(raw.get("num_key_value_heads") or heads),
            head_size=int(raw.get("head_dim") or C // heads), n_embd=C, n_inner=int(raw["intermediate_size"]),
            norm_eps=float(raw["rms_norm_eps"]), rope_theta=rope_settings(raw, path),
            tied=bool(raw.get("tie_word_embeddings", False)), **FAMILIES[family][2](raw))
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{path}: the key {error} is missing") from None
    except (AttributeError, OverflowError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{path}: a value has the wrong type ({error})") from None
    if min(config.vocab_size, config.block_size, config.n_layer, C, config.n_inner, config.n_kv_head) < 1:
        raise InputError(f"{path}: every size must be at least 1")
    if heads % config.n_kv_head or config.head_size % 2 or not 16 <= config.head_size <= 256:
        raise InputError(f"{path}: num_attention_heads must be a multiple of num_key_value_heads and head_dim even, from 16 "
                         f"to 256; found {heads}, {config.n_kv_head}, {config.head_size}")
    return config


def hf_config(config, dtype):
    """GPTConfig -> the dict of config.json, rope settings in both spellings."""
    c = config
    raw = dict(
        architectures=[FAMILIES[c.family][0]], model_type=c.family, vocab_size=c.vocab_size, hidden_size=c.n_embd,
        max_position_embeddings=c.block_size, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        num_key_value_heads=c.n_kv_head, head_dim=c.head_size, intermediate_size=c.n_inner, hidden_act=c.activation,
        rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, tie_word_embeddings=c.tied, attention_bias=c.proj_bias,
        rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta), torch_dtype=str(dtype).removeprefix("torch."))
    return raw | (dict(mlp_bias=c.mlp_bias) if c.family == "llama" else {})


def read_weights(path):
    """All tensors of a folder's safetensors file or shards, as {name: tensor}."""
    path = Path(path)
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if single.is_file() or not index.is_file():
        files = ["model.safetensors"]
    else:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{index}: expected a weight_map of tensor names to file names")
        files = sorted(set(weight_map.values()))
    weights = {}
    for name in files:
        try:
            with safe_open(path / name, framework="pt") as shard:
                weights.update((key, shard.get_tensor(key)) for key in shard.keys())
        except FileNotFoundError:
            raise InputError(f"{path / name}: no such file; expected the checkpoint's weights there") from None
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path / name}: truncated or not a safetensors file ({error}); fetch it again") from None
    return weights


def checkpoint_names(name, config):
    """Our parameter name -> the tensor names in the checkpoint that are stacked into it."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    number = parts[1] if parts[0] == "blocks" else ""
    if number:
        parts[1] = "N"
    pattern = ".".join(parts) + ".{}"
    return [part.format(kind).replace(".N.", f".{number}.") for part in FAMILIES[config.family][1][pattern]]


def merge_weights(weights, config, path):
    """Checkpoint tensors -> our parameters. A tensor that no parameter uses is an error, rotary tables excepted."""
    with torch.device("meta"):
        names = list(GPT(config).state_dict())
    state, used = {}, set()
    for name in names:
        parts = checkpoint_names(name, config)
        if all(part in weights for part in parts):
            state[name] = torch.cat([weights[part] for part in parts]) if len(parts) > 1 else weights[parts[0]]
            used.update(parts)
    left = [name for name in weights if name not in used and not name.endswith("rotary_emb.inv_freq")]
    if left:
        raise InputError(f"{path}: the checkpoint has tensors that its config.json gives no place to: {', '.join(left[:3])}")
    return state


def split_weight(name, value, config):
    """The inverse of merge_weights for one parameter: {checkpoint name: tensor}."""
    names, c = checkpoint_names(name, config), config
    if len(names) == 3:
        sizes = [c.n_head * c.head_size, c.n_kv_head * c.head_size, c.n_kv_head * c.head_size]
    else:
        sizes = [value.shape[0] // len(names)] * len(names)
    return {part: tensor.contiguous() for part, tensor in zip(names, value.split(sizes))}
