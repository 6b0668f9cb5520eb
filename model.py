"""A causal language model in one file: Llama, GPT-2 and ALiBi shapes by config, and a KV cache.

    python model.py FOLDER        says what a Hugging Face checkpoint folder holds

It is one process and plain layers, which backends/ replaces from outside.

Letters: B sequences, T tokens or tree nodes, C hidden size, V vocabulary, L layers, S cache
capacity in tokens, D head size, Hq query heads, Hkv key/value heads."""

import sys

if __name__ == "__main__":  # before torch is loaded, so that a typo in a flag is told at once
    from tools.cli import describe
    sys.exit(describe())

import contextlib
import json
import math
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels
from kernels import add_norm, glu, rope_cache, rotate, tree_attention

MAX_TREE = 64  # T: the ancestors of a node are the bits of an int64
ACTIVATIONS = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}
# not cuDNN's: it rebuilds its plan for every length, and its gradient with a mask may be NaN
CUDA_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class InputError(ValueError):
    """Bad input that the user can fix. Its line: what was expected, what came, what to do."""


@dataclass
class GPTConfig:
    family: str = "llama"      # a key of hf.families.FAMILIES: how folders spell names
    vocab_size: int = 4096     # V
    block_size: int = 1024     # longest sequence, in tokens
    n_layer: int = 12          # L
    n_head: int = 4            # Hq
    n_kv_head: int = 2         # Hkv
    head_size: int = 0         # D; 0: n_embd / n_head
    n_embd: int = 256          # C
    n_inner: int = 0           # width of the MLP; 0: 2.5 n_embd
    norm: str = "rms"          # "rms" or "layer"
    norm_eps: float = 1e-5
    positions: str = "rope"    # "rope", "learned" as in GPT-2, or "alibi"
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # rope_type "linear", "yarn", "llama3" or "longrope", numbers
    activation: str = "silu"   # "silu" or "gelu" (the tanh approximation)
    gated: bool = True         # MLP: act(gate(x)) * up(x) instead of act(up(x))
    qkv_bias: bool = False
    proj_bias: bool = False    # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: str | None = None # RMSNorm of each query and key "head", or of "all", then rotation
    norm_at: str = "before"    # attention and MLP: "before", "after" as in OLMo 2, "both": Gemma 3
    windows: tuple = ()        # by layer: how many tokens it sees, its own too; 0: all. (): all do
    window_theta: float | None = None  # of layers with a window, unscaled; None: as the others
    unrotated: tuple = ()      # the layers without a rotation, by number: every fourth of SmolLM3
    rotary_size: int | None = None     # dimensions of a head that are rotated, None: D
    embed_scale: float = 1.0   # of the embeddings: Gemma 3
    attn_scale: float | None = None    # of the scores, None: D ** -0.5
    tied: bool = True          # the LM head is the embedding table
    unit_head: bool = False    # the LM head's rows are scaled to length 1 when read: Baichuan 2

    def __post_init__(self):
        self.head_size = self.head_size or self.n_embd // self.n_head
        self.n_inner = self.n_inner or 5 * self.n_embd // 2


# --------------------------------------------------------------------------------------------------
# Cache and attention

@dataclass(eq=False)
class KVCache:
    """Keys and values of B sequences."""
    kv: torch.Tensor       # [L, 2, B, Hkv, S, D]
    lengths: torch.Tensor  # int32 [B]: the committed rows

    def slots(self, first, count=1):
        """A cache of `count` sequences that shares the memory of sequences first, first + 1, ..."""
        rows = slice(first, first + count)
        return KVCache(self.kv[:, :, rows], self.lengths[rows])


@dataclass(eq=False)
class AttentionContext:
    """What the layers of a forward pass share: where its T tokens are, and what each of them sees.
    `GPT.attention_context` makes it."""
    rows: torch.Tensor | None = None       # int [B, T]: where the tokens are among keys and values
    end: int | None = None                 # the rows of keys and values that count
    start: int = 0                         # no token is in a row before it
    lengths: torch.Tensor | None = None    # int [B]: the rows before the tokens'; None: no cache
    ancestors: torch.Tensor | None = None  # int64 [B, T] of tree nodes, at rows lengths.. on
    documents: torch.Tensor | None = None  # int64 [B, T]: tokens see those of their own alone
    rope: tuple = (None, None)             # [B, T, 2, D] of `rope_table`; of layers with a window
    slopes: torch.Tensor | None = None     # float32 [Hq], of ALiBi
    masks: dict = field(default_factory=dict)  # {window: what `make_mask` gives for it}

    def visible_rows(self, window):
        """A slice of the rows that tokens see in a layer with this window, 0: all."""
        return slice(max(self.start + 1 - window, 0) if window else 0, self.end)

    def make_mask(self, window, dtype):
        """What the tokens see of the n `visible_rows`, as torch's attention takes it: bool
        [B, 1, T, n], or with slopes what is added to the scores, of a dtype [B, Hq, T, n]."""
        rows = self.visible_rows(window)
        rows = torch.arange(rows.start, rows.stop, device=self.rows.device)
        distance = self.rows[:, None, :, None] - rows  # (B, 1, T, n)
        visible = distance >= 0
        if window:
            visible = visible & (distance < window)
        if self.documents is not None:
            visible = visible & (self.documents[:, :, None] == self.documents[:, None])[:, None]
        if self.slopes is None:
            return visible
        slopes = self.slopes.to(torch.promote_types(dtype, torch.float32))
        bias = -slopes[:, None, None] * distance  # (B, Hq, T, n)
        return bias.masked_fill(~visible, -math.inf).to(dtype)

    def attend(self, q, k, v, window=0, scale=None):
        """q, and k and v [B, Hkv, S, D] of a layer's cache or of the tokens alone -> [B, T, Hq, D],
        the shape of q. window, scale: as in `kernels.tree_attention`."""
        if self.ancestors is not None:
            return tree_attention(q, k, v, self.lengths, self.ancestors, scale, self.slopes, window)
        rows = self.visible_rows(window)
        k, v = k[:, :, rows], v[:, :, rows]
        G = q.shape[2] // k.shape[1]
        # each token sees all rows up to its own, and the tokens are in the last rows
        causal = (self.slopes is None and self.documents is None and not 0 < window < self.end
                  and self.end - self.start == q.shape[1])
        if q.is_cuda and G > 1 and (q.dtype == torch.float32 or not causal):
            # flash attention alone takes grouped heads, and it takes neither float32 nor a mask
            k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
        mask = None
        if not causal:
            if window not in self.masks:  # once for all layers with this window
                self.masks[window] = self.make_mask(window, q.dtype)
            mask = self.masks[window]
        elif q.shape[1] < self.end:
            from torch.nn.attention import bias  # takes a second to import
            mask = bias.causal_lower_right(q.shape[1], self.end)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
            enable_gqa=q.shape[2] != k.shape[1])
        return y.transpose(1, 2)  # (B, T, Hq, D)


def token_positions(tokens, documents=None):
    """Positions int64 [B, T] of tokens [B, T, ...], from 0. documents int64 [B, T]: which document
    each token belongs to; positions start anew where it changes."""
    B, T = tokens.shape[:2]
    index = torch.arange(T, device=tokens.device).expand(B, T)
    if documents is None:
        return index
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return index - (index * begins).cummax(dim=1).values


def alibi_slopes(n_head):
    """float32 [n_head]: 2^(-8/n), 2^(-16/n), ... for n heads; where n is not a power of two, those
    of the power below it, then every other one of the power above (ALiBi, arXiv 2108.12409)."""
    n = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(n_head - n)]
    return torch.tensor(slopes)


# --------------------------------------------------------------------------------------------------
# Layers

class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last dimension."""

    def __init__(self, kind, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layer" else None
        self.eps = eps

    def forward(self, x):
        return self.add_and_norm(x, None)[0]

    def add_and_norm(self, hidden, residual):
        """(the norm of hidden + residual, that sum), each [..., C]; residual None: hidden alone."""
        if residual is None:
            return add_norm(hidden, None, self.weight, self.bias, self.eps)
        delta = hidden.to(residual.dtype)  # autocast changes it
        return add_norm(residual, delta, self.weight, self.bias, self.eps)


class NoNorm(nn.Identity):
    """Stands where a model has no norm."""

    def add_and_norm(self, hidden, residual):
        total = hidden if residual is None else residual + hidden.to(residual.dtype)
        return total, total


def rope_frequencies(config):
    """(radians per token for each pair of rotated dimensions, a factor for cos and sin): RoPE
    (arXiv 2104.09864), scaled by position interpolation (2306.15595), YaRN (2309.00071), LongRoPE
    (2402.13753), or as in Llama 3.1."""
    D = config.rotary_size or config.head_size
    scaling = config.rope_scaling or dict(rope_type="default")
    plain = config.rope_theta ** -(torch.arange(0, D, 2, dtype=torch.float32) / D)
    match scaling["rope_type"]:
        case "linear":
            return plain / scaling["factor"], 1.0
        case "longrope":
            return plain / torch.tensor(scaling["short_factor"]), scaling["attention_factor"]
        case "llama3":  # stretches long waves, keeps short ones, and blends the two in between
            turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            keep = ((turns - low) / (high - low)).clamp(0, 1)
            stretch = torch.tensor(1 / scaling["factor"])
            return plain * torch.lerp(stretch, torch.tensor(1.0), keep), 1.0
        case "yarn":  # likewise, but blended over dimensions (arXiv 2309.00071, section 3)
            context = scaling["original_max_position_embeddings"]
            wave = lambda turns: context / (turns * 2 * math.pi)
            dim = lambda turns: D * math.log(wave(turns)) / (2 * math.log(config.rope_theta))
            low, high = dim(scaling["beta_fast"]), dim(scaling["beta_slow"])
            if scaling["truncate"]:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, D - 1)
            blend = ((torch.arange(D // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
            stretch = torch.lerp(torch.tensor(1.0), torch.tensor(1 / scaling["factor"]), blend)
            return plain * stretch, scaling["attention_factor"]
    return plain, 1.0


def rope_table(config, dtype, device):
    """cos and signed sin of each position, [positions, 2, D], for `kernels.rotate` (halves layout).
    Trees may reach past the context's end. Dimensions that are not rotated end each half."""
    frequencies, scale = rope_frequencies(config)
    positions = torch.arange(config.block_size + MAX_TREE, device=device)
    angles = positions[:, None] * frequencies.to(device)  # (positions, rotary_size/2)
    cos, sin = (x.mul_(scale).to(dtype) for x in (angles.cos(), angles.sin()))
    if config.rotary_size:
        rest = (config.head_size - config.rotary_size) // 2
        cos = F.pad(cos, (0, rest), value=1.0)
        sin = F.pad(sin, (0, rest))
    return torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)


class Attention(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.window = c.windows[layer] if c.windows else 0
        self.rotates = layer % c.n_layer not in c.unrotated
        self.has_own_rope = self.window > 0 and c.window_theta is not None
        self.qkv = nn.Linear(c.n_embd, (c.n_head + 2 * c.n_kv_head) * c.head_size, bias=c.qkv_bias)
        self.proj = nn.Linear(c.n_head * c.head_size, c.n_embd, bias=c.proj_bias)
        if c.qk_norm:
            n_query, n_key = (c.n_head, c.n_kv_head) if c.qk_norm == "all" else (1, 1)
            self.q_norm = Norm("rms", n_query * c.head_size, c.norm_eps)
            self.k_norm = Norm("rms", n_key * c.head_size, c.norm_eps)

    def forward(self, x, context, kv=None):
        """x [B, T, C] -> [B, T, C]. kv [2, B, Hkv, S, D]: the layer's cache, to write to."""
        return self.proj(self.core(self.qkv(x), context, kv))

    def core(self, qkv, context, kv=None):
        """All between the two products: qkv [B, T, (Hq + 2 Hkv) D] -> [B, T, Hq D]."""
        c = self.config
        B, T, _ = qkv.shape
        rope = context.rope[self.has_own_rope] if self.rotates else None
        if c.qk_norm == "all":
            q, k, v = qkv.split([n * c.head_size for n in (c.n_head, c.n_kv_head, c.n_kv_head)], -1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        qkv = qkv.view(B, T, c.n_head + 2 * c.n_kv_head, c.head_size)
        if kv is None:  # as `rope_cache`, but with a gradient
            q, k, v = qkv.split((c.n_head, c.n_kv_head, c.n_kv_head), dim=2)
            if c.qk_norm == "head":
                q, k = self.q_norm(q), self.k_norm(k)
            if rope is not None:
                q, k = rotate(q, rope), rotate(k, rope)
            k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, Hkv, T, D)
        else:
            norms = ()
            if c.qk_norm == "head":
                norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            q = rope_cache(qkv, rope, kv, context.lengths, *norms)
            k, v = kv
        return context.attend(q, k, v, self.window, c.attn_scale).reshape(B, T, -1)


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        n_up = 2 * c.n_inner if c.gated else c.n_inner  # rows: gate, then up
        self.up = nn.Linear(c.n_embd, n_up, bias=c.mlp_bias)
        self.down = nn.Linear(c.n_inner, c.n_embd, bias=c.mlp_bias)

    def forward(self, x):
        x = self.up(x)
        activation = self.config.activation
        x = glu(x, activation) if self.config.gated else ACTIVATIONS[activation](x)
        return self.down(x)


class Block(nn.Module):
    """Layer number `layer` of a model, by default the last."""

    def __init__(self, c, layer=-1):
        super().__init__()
        size = c.n_embd
        norm = lambda at: Norm(c.norm, size, c.norm_eps) if c.norm_at in (at, "both") else NoNorm()
        self.attn_norm = norm("before")
        self.attn = Attention(c, layer)
        self.attn_post_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = MLP(c)
        self.mlp_post_norm = norm("after")

    def forward(self, hidden, residual, context, kv=None):
        """(hidden, residual) -> (hidden, residual), each [B, T, C]: the residual stream is their
        sum, or hidden alone where residual is None. The next norm adds the two."""
        hidden, residual = self.attn_norm.add_and_norm(hidden, residual)
        hidden = self.attn_post_norm(self.attn(hidden, context, kv))
        hidden, residual = self.mlp_norm.add_and_norm(hidden, residual)
        return self.mlp_post_norm(self.mlp(hidden)), residual


class LMHead(nn.Linear):
    """The projection onto the vocabulary. Its methods take hidden states [M, C] after the final
    norm."""

    def topk(self, hidden, k, vocab_ids=None):
        """As `kernels.project_topk` -> logprobs float32, tokens int64 [M, k]."""
        return kernels.project_topk(hidden, self.weight, k, vocab_ids)

    def sample(self, hidden, temperature, seed, sequence, position, first_token=0):
        """As `kernels.project_sample` -> tokens int64 [M]."""
        return kernels.project_sample(hidden, self.weight, temperature, seed, sequence, position,
                                      first_token)

    def logits(self, hidden):
        """float32 [M, V]: half precision would make ties."""
        return kernels.float_logits(hidden, self.weight)

    def embedding(self, tokens):
        """The rows of token ids [...] -> [..., C]."""
        return F.embedding(tokens, self.weight)


# --------------------------------------------------------------------------------------------------
# The model

class GPT(nn.Module):
    """A decoder-only transformer with random weights; `from_pretrained` reads a checkpoint's. hash:
    16 hex digits of the checkpoint folder it came from, else None."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.hash = None
        self.query_heads = slice(None)        # those that the blocks hold of the model's
        # nn.Embedding(...) draws random numbers: on the meta device that takes a second of imports
        embedding = lambda n: nn.Embedding.from_pretrained(torch.zeros(n, c.n_embd), freeze=False)
        self.embed = embedding(c.vocab_size)
        self.embed_positions = embedding(c.block_size) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.norm = Norm(c.norm, c.n_embd, c.norm_eps)
        self.head = LMHead(c.n_embd, c.vocab_size, bias=False)
        self.tie_and_place()
        if not self.norm.weight.is_meta:  # else its weights are read from a folder
            self.init_weights()

    def tie_and_place(self):
        """Sets what is derived, not stored: the tied head, tables of positions, a scale."""
        c = self.config
        if c.tied:
            self.head.weight = self.embed.weight
        if self.norm.weight.is_meta:
            return  # there the tables would take half a second of imports, for nothing
        table = lambda config: rope_table(config, self.dtype, self.device)
        own = replace(c, rope_theta=c.window_theta, rope_scaling=None)  # of layers with a window
        slopes = alibi_slopes(c.n_head).to(self.device)
        scale = torch.tensor(c.embed_scale, dtype=self.dtype, device=self.device)
        buffer = partial(self.register_buffer, persistent=False)
        buffer("rotations", table(c) if c.positions == "rope" else None)
        buffer("window_rotations", table(own) if c.window_theta else None)
        buffer("slopes", slopes if c.positions == "alibi" else None)
        buffer("embed_scale", scale if c.embed_scale != 1 else None)

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        self.tie_and_place()  # the tables are made in float32
        return self

    @torch.no_grad()
    def init_weights(self, generator=None):
        """GPT-2's start: normal(0, 0.02), projections into the stream smaller by sqrt(2 L)."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                shrink = math.sqrt(2 * self.config.n_layer)
                into_stream = name.endswith(("proj.weight", "down.weight"))
                p.normal_(0, 0.02 / shrink if into_stream else 0.02, generator=generator)
            elif name.endswith("bias"):
                p.zero_()
        return self

    @property
    def device(self):
        return self.norm.weight.device

    @property
    def dtype(self):
        return self.norm.weight.dtype

    def weight_bytes(self):
        """Bytes of the weights, those included that a layer counts by itself."""
        tensors = *self.parameters(), *self.buffers()
        return sum(x.nbytes for x in tensors) + sum(getattr(x, "nbytes", 0) for x in self.modules())

    def free_memory(self):
        return free_memory(self.device)

    def new_cache(self, batch, capacity, blocks=None):
        """A `KVCache` for blocks, default the model's; InputError where memory has no room."""
        blocks = self.blocks if blocks is None else blocks
        config = blocks[0].attn.config if len(blocks) else self.config
        shape = len(blocks), 2, batch, config.n_kv_head, capacity, config.head_size
        check_memory(f"a cache of {batch} sequences of {capacity} tokens takes",
                     math.prod(shape) * self.dtype.itemsize, self.free_memory(), self.device,
                     "take a smaller batch size or fewer new tokens")
        # zeros: rows never written still pass through masked products, where 0 * nan is nan
        return KVCache(torch.zeros(shape, dtype=self.dtype, device=self.device),
                       torch.zeros(batch, dtype=torch.int32, device=self.device))

    def attention_context(self, positions, cache, ancestors, end, documents, query_heads):
        """The `AttentionContext` of a pass without a cache, of tokens that continue a sequence at
        consecutive cache rows, or, with ancestors, of tree nodes."""
        rope = [x if x is None else x[positions] for x in (self.rotations, self.window_rotations)]
        slopes = None if self.slopes is None else self.slopes[query_heads]
        make = partial(AttentionContext, rope=rope, slopes=slopes)
        B, T = positions.shape
        if cache is None:
            rows = torch.arange(T, device=positions.device)[None]
            return make(rows, T, documents=documents)
        if ancestors is not None:
            return make(lengths=cache.lengths, ancestors=ancestors)
        end = int(positions.max()) + 1 if end is None else end
        start = end - T if B == 1 else 0  # of more than one, a GPU would have to be waited for
        return make(positions, end, start, positions[:, 0])

    def run_blocks(self, blocks, hidden, positions, cache=None, ancestors=None, end=None,
                   documents=None, query_heads=slice(None)):
        """hidden [B, T, C] through blocks, the model's or others -> (hidden, residual) as `Block`
        gives them. query_heads: those that the blocks hold; the rest as in `forward`."""
        context = self.attention_context(positions, cache, ancestors, end, documents, query_heads)
        residual = None
        with sdpa_kernel(CUDA_ATTENTION) if hidden.is_cuda else contextlib.nullcontext():
            for layer, block in enumerate(blocks):
                kv = None if cache is None else cache.kv[layer]
                hidden, residual = block(hidden, residual, context, kv)
        return hidden, residual

    def forward(self, tokens, positions=None, cache=None, ancestors=None, end=None, documents=None):
        """tokens int64 [B, T] -> hidden [B, T, C], the last block's output, before the final norm.

        Without a cache this is a plain causal pass, as in training, in which documents (int64
        [B, T], numbered) do not see one another. With one, keys and values go there, and its
        `lengths` stay. ancestors: of tree nodes. end: one past the last of the positions."""
        if positions is None:
            positions = token_positions(tokens, documents)
        hidden, residual = self.run_blocks(self.blocks, self.embeddings(tokens, positions),
                                           positions, cache, ancestors, end, documents,
                                           self.query_heads)
        return hidden if residual is None else residual + hidden.to(residual.dtype)

    def norm_and_hidden(self, tokens, positions, cache, ancestors):
        """As `forward` -> (its final norm, hidden), each [B, T, C], in one operation less."""
        hidden = self.embeddings(tokens, positions)
        return self.norm.add_and_norm(*self.run_blocks(
            self.blocks, hidden, positions, cache, ancestors, query_heads=self.query_heads))

    def embeddings(self, tokens, positions):
        """What the first block reads of tokens [B, T] -> [B, T, C]."""
        hidden = self.embed(tokens)
        if self.embed_scale is not None:
            hidden = hidden * self.embed_scale
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions)
        return hidden

    def lm_head(self, hidden):
        """hidden [..., C] -> logits [..., V]."""
        return self.head(self.norm(hidden))

    @torch.no_grad()
    def prefill(self, tokens, cache, start=0):
        """Appends tokens [B, T] to a cache whose sequences have `start` rows -> hidden [B, T, C].
        Long prompts come in chunks: scores take T x (start + T) numbers per head."""
        end = start + tokens.shape[1]
        hidden = self(tokens, start + token_positions(tokens), cache, end=end)
        cache.lengths.fill_(end)
        return hidden

    @classmethod
    def from_pretrained(cls, path, dtype=None, device=None):
        """Reads a Hugging Face checkpoint folder; see `hf.checkpoint.load`."""
        with needs_folders():
            from hf.checkpoint import load
        return load(path, dtype, device)

    def save_pretrained(self, path, dtype=None):
        """Writes such a folder, for transformers to read; see `hf.checkpoint.save`."""
        with needs_folders():
            from hf.checkpoint import save
        save(self, path, dtype)


# --------------------------------------------------------------------------------------------------
# Files, folders, memory

@contextlib.contextmanager
def needs_folders(otherwise=""):
    """Around imports from folders: names a missing one. otherwise: what else the user can do."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).split(".")[0]
        if name not in ("backends", "hf", "tools"):
            raise
        raise InputError(f"this needs the folder {name}/, which is not beside model.py: copy it "
                         f"here too{otherwise}") from None


@lru_cache
def warn(line):
    """Prints a line on standard error, once."""
    print(line, file=sys.stderr)


def atomic_write(path, write):
    """Calls write(temporary name) and renames that: a reader sees the old file or the new one."""
    tmp = f"{path}.tmp{os.getpid()}"
    try:
        write(tmp)
        os.chmod(tmp, 0o644)  # safetensors writes files that only their owner may read
        os.replace(tmp, path)
    finally:
        Path(tmp).unlink(missing_ok=True)


def read_json(path):
    """The object in a json file. Raises InputError when it is missing or broken."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a checkpoint folder with it") from None
    except (OSError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as json ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a json object, found a {type(value).__name__}")
    return value


def pick_device(name=None):
    """A torch.device that exists here, or InputError. Default: CUDA where there is a GPU."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # not on "meta", which computes nothing
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {name!r} is not available here ({reason}); try --device "
                         "cpu") from None
    return device


def check(name, value, low, high, whole=False, above=False):
    """Raises InputError unless value is a number from low to high; above low, with `above`."""
    kind = int if whole else (int, float)
    valid = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
    if not valid or (above and value == low):
        numbers = "a whole number" if whole else "a number"
        bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise InputError(f"{name} must be {numbers} {bounds}, not {value!r}")


def human(number, unit=""):
    """A number as people write it: 9.3 M, 7.2 B; with the unit "B", bytes: 18.6 MB, 1.5 GB."""
    prefixes = ["", "k", "M", "G" if unit else "B", "T"]
    while number >= 999.5 and len(prefixes) > 1:
        number /= 1000
        del prefixes[0]
    digits = f"{number:.{int(number < 99.95)}f}".removesuffix(".0")
    return f"{digits} {prefixes[0]}{unit}".strip()


def check_memory(what, size, free, device, advice):
    """Raises InputError where more bytes are needed than are free. what: "the weights take"."""
    if size > free:
        raise InputError(f"{what} {human(size, 'B')}, but {human(free, 'B')} are free on {device}; "
                         f"{advice}")


def free_memory(device):
    """Bytes that can still be allocated on a device, as far as it tells."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # but not of what a live CUDA graph reserves
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):  # not Linux
        return math.inf
