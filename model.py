"""A causal language model in one file: Llama, GPT-2 and ALiBi variants by config, with a KV cache.
Plain PyTorch layers in one process, which backends/ replaces from outside.

Letters: B sequences, T tokens or tree nodes, C hidden size, V vocabulary, L layers, S cache
capacity in tokens, D head size, Hq query heads, Hkv key/value heads."""

import contextlib
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels
from kernels import add_norm, glu, rope_cache, rotate, tree_attention

MAX_TREE = 64  # largest T: a node's ancestors are the bits of an int64
FIRST_POSITIONS = 4096  # of position tables, until `GPT.reserve` extends them
ACTIVATIONS = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}
# without cuDNN, which rebuilds its plan for every length and may give NaN gradients with a mask
CUDA_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class InputError(ValueError):
    """Bad input that the user can fix. One line: what was expected, what we got, what to do."""


def check(name, value, low, high, whole=False):
    """Raises InputError unless value is a number from low to high."""
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    kind = "whole number" if whole else "number"
    expect(is_number and low <= value <= high,
           f"{name} must be a {kind} from {low} to {high}, not {value!r}")


def expect(valid, message):
    """Raises InputError(message) unless valid."""
    if not valid:
        raise InputError(message)


def replace_file(path, write):
    """Calls write(temporary path), then renames the file: readers see the old or the new one."""
    tmp = Path(f"{path}.tmp{os.getpid()}")
    try:
        write(tmp)
        tmp.chmod(0o644)  # safetensors makes files that only their owner can read
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)


@dataclass
class GPTConfig:
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
    rope_frequencies: tuple | None = None  # radians per token of each pair; None: by rope_theta
    rope_factor: float = 1.0   # multiplies cos and sin
    activation: str = "silu"   # "silu" or "gelu" (the tanh approximation)
    gated: bool = True         # MLP: act(gate(x)) * up(x) instead of act(up(x))
    qkv_bias: bool = False
    proj_bias: bool = False    # bias of the attention's output projection
    mlp_bias: bool = False
    attn_gate: bool = False    # attention's output times the sigmoid of a gate (Qwen 3.5)
    qk_norm: str | None = None # RMSNorm of queries and keys before RoPE, per "head" or over "all"
    norm_at: str = "before"    # attention and MLP: "before", "after" (OLMo 2) or "both" (Gemma 3)
    mixers: tuple = ()         # what makes each layer's mixer, see `Block`; None: `Attention`
    windows: tuple = ()        # tokens that each layer attends to, 0: all; (): all in all layers
    window_theta: float | None = None  # rope_theta of windowed layers, unscaled; None: as others
    unrotated: tuple = ()      # indices of layers without RoPE, e.g. every fourth (SmolLM3)
    rotary_size: int | None = None     # rotated dimensions of a head; None: D
    embed_scale: float = 1.0   # multiplies the embeddings (Gemma 3)
    stream_scale: float = 1.0  # the authors' states are ours times this (Granite)
    attn_scale: float | None = None    # multiplies attention scores; None: D ** -0.5
    tied: bool = True          # the LM head is the embedding table
    unit_head: bool = False    # LM head rows are normalised when loaded (Baichuan 2)

    def __post_init__(self):
        self.head_size = self.head_size or self.n_embd // self.n_head
        self.n_inner = self.n_inner or 5 * self.n_embd // 2


# --------------------------------------------------------------------------------------------------
# Cache and attention

@dataclass(eq=False)
class KVCache:
    """Keys and values of sequences, one per slot, and the states of recurrent layers."""
    kv: torch.Tensor       # [L, 2, slots, Hkv, S, D], of the layers with `Attention`
    lengths: torch.Tensor  # int32 [slots]: committed rows
    slots: torch.Tensor | None = None  # int64 [B]: the sequences of a batch; None: all
    states: tuple | None = None  # of the other layers, see `Block`

    def one(self, slot):
        """A view of one sequence."""
        states = self.states and self.states.one(slot)
        return KVCache(self.kv[:, :, slot:slot + 1], self.lengths[slot:slot + 1], None, states)

    def layers(self, blocks):
        """The cache of each block, without the first dimension."""
        kv = iter(self.kv)
        states = iter(self.states.layers() if self.states else ())
        return [replace(self, kv=next(kv), states=None) if isinstance(block.attn, Attention)
                else replace(self, kv=None, states=next(states)) for block in blocks]


class TreeMask(NamedTuple):
    """The attention mask of tree nodes, as in `kernels.tree_attention`."""
    ancestors: torch.Tensor      # int64 [B, T]
    slopes: torch.Tensor | None  # float32 [Hq], for ALiBi


def causal_mask(hidden, start=0, window=0, documents=None, slopes=None):
    """The causal mask of T tokens, hidden [B, T, C], at rows start, start + 1, ... of their
    sequences: bool [B or 1, 1, T, n], True where a token attends; with ALiBi slopes [Hq] instead
    the bias of the scores, [B or 1, Hq, T, n]. n: how many of the last rows windows reach. None if
    plain causal attention will do. window: 0 for none. documents: as in `token_positions`."""
    T = hidden.shape[1]
    end = start + T
    window = window or end
    if slopes is None and documents is None and window >= end and (hidden.is_cuda or not start):
        return None
    rows = torch.arange(max(start + 1 - window, 0), end, device=hidden.device)
    distance = rows[None, None, -T:, None] - rows  # (1, 1, T, n)
    visible = (distance >= 0) & (distance < window)
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None])
    if slopes is None:
        return visible
    slopes = slopes.to(torch.promote_types(hidden.dtype, torch.float32))
    bias = -slopes[:, None, None] * distance  # (1, Hq, T, n)
    return bias.masked_fill(~visible, -math.inf)


def causal_attention(q, k, v, mask=None, scale=None):
    """Causal attention: q [B, T, Hq, D] of the last T tokens, k and v [B, Hkv, S, D] of all tokens
    -> [B, T, Hq, D]. mask: from `causal_mask`. scale: default D ** -0.5."""
    G = q.shape[2] // k.shape[1]
    dtype = q.dtype
    if mask is not None:
        k, v = (x[:, :, -mask.shape[-1]:] for x in (k, v))  # earlier rows are outside all windows
    if mask is not None and mask.is_floating_point():  # a bias, which half precision would round
        q, k, v = (x.to(mask.dtype) for x in (q, k, v))
    if q.is_cuda and G > 1 and (q.dtype == torch.float32 or mask is not None):
        # only flash attention takes grouped heads, and it takes neither float32 nor a mask
        k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
    if mask is None and q.shape[1] < k.shape[2]:
        from torch.nn.attention import bias  # takes seconds; flash attention accepts no tensor
        mask = bias.causal_lower_right(q.shape[1], k.shape[2])
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=q.shape[2] != k.shape[1])
    return y.transpose(1, 2).to(dtype)  # (B, T, Hq, D)


def token_positions(tokens, start=0, documents=None):
    """Positions int64 [B, T] of tokens [B, T, ...]: start, start + 1, ... documents: the document
    id of each token, int64 [B, T]; positions restart at 0 where it changes."""
    B, T = tokens.shape[:2]
    index = torch.arange(start, start + T, device=tokens.device).expand(B, T)
    if documents is None:
        return index
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return index - (index * begins).cummax(dim=1).values


def alibi_slopes(n_head):
    """ALiBi slopes (arXiv 2108.12409), float32 [n_head]: 2^(-8/n), 2^(-16/n), ... for n heads. If
    n is no power of two: those of the power below, then every other one of the power above."""
    n = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return torch.tensor(slopes + [2 ** (-4 * (2 * i + 1) / n) for i in range(n_head - n)])


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
        """(norm(hidden + residual), hidden + residual), each [..., C]. residual: None for 0."""
        if residual is None:
            return add_norm(hidden, None, self.weight, self.bias, self.eps)
        delta = hidden.to(residual.dtype)  # they differ under autocast
        return add_norm(residual, delta, self.weight, self.bias, self.eps)


class NoNorm(nn.Identity):
    """Takes the place of a norm that the model does not have."""

    def add_and_norm(self, hidden, residual):
        total = add(hidden, residual)
        return total, total


def add(hidden, residual):
    """The residual stream, whose two terms a `Block` returns. residual: None for 0."""
    return hidden if residual is None else residual + hidden.to(residual.dtype)


def rope_frequencies(theta, size):
    """Of RoPE (arXiv 2104.09864): radians per token of each pair of dimensions, [size / 2]."""
    return theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)


def rope_table(config, rows, dtype, device):
    """cos and signed sin of positions 0 to rows - 1, [rows, 2, D], for `kernels.rotate`. Unrotated
    dimensions are at the end of each half."""
    frequencies = rope_frequencies(config.rope_theta, config.rotary_size or config.head_size)
    if config.rope_frequencies is not None:
        frequencies = torch.tensor(config.rope_frequencies)
    angles = torch.arange(rows, device=device)[:, None] * frequencies.to(device)  # (rows, pairs)
    cos, sin = (x.mul_(config.rope_factor).to(dtype) for x in (angles.cos(), angles.sin()))
    rest = config.head_size // 2 - len(frequencies)  # pairs of dimensions that are not rotated
    cos = F.pad(cos, (0, rest), value=1.0)
    sin = F.pad(sin, (0, rest))
    return torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)


class Attention(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.query_heads = slice(None)  # its share of the model's query heads
        self.window = c.windows[layer] if c.windows else 0
        rope = "window" if self.window and c.window_theta is not None else "global"
        self.rope = None if layer in c.unrotated else rope
        n_gates = c.n_head if c.attn_gate else 0  # they come first
        n_heads = n_gates + c.n_head + 2 * c.n_kv_head
        self.qkv = nn.Linear(c.n_embd, n_heads * c.head_size, bias=c.qkv_bias)
        self.proj = nn.Linear(c.n_head * c.head_size, c.n_embd, bias=c.proj_bias)
        if c.qk_norm:
            n_query, n_key = (c.n_head, c.n_kv_head) if c.qk_norm == "all" else (1, 1)
            self.q_norm = Norm("rms", n_query * c.head_size, c.norm_eps)
            self.k_norm = Norm("rms", n_key * c.head_size, c.norm_eps)

    def forward(self, x, rope, mask, cache=None):
        """x [B, T, C] -> [B, T, C]. The rest as in `attend`."""
        return self.proj(self.attend(self.qkv(x), rope, mask, cache))

    def attend(self, qkv, rope, mask, cache=None):
        """Queries, keys and values [B, T, (Hq + 2 Hkv) D], after gates if there are any, -> [B, T,
        Hq D]. rope: as in `kernels.rotate`, or None. mask: a `TreeMask`, or from `causal_mask`.
        cache: this layer's, kv [2, B, Hkv, S, D]; keys and values are written to rows lengths,
        lengths + 1, ..."""
        if self.config.attn_gate:
            gate, qkv = qkv.tensor_split((self.proj.in_features,), dim=-1)
        q, k, v = self.split(qkv, rope, cache)
        scale = self.config.attn_scale
        if isinstance(mask, TreeMask):
            y = tree_attention(q, k, v, cache.lengths, mask.ancestors, scale, mask.slopes,
                               self.window, cache.slots)
        else:
            y = causal_attention(q, k, v, mask, scale)
        y = y.flatten(2)  # (B, T, Hq D)
        return y * gate.sigmoid() if self.config.attn_gate else y

    def split(self, qkv, rope, cache):
        """Queries [B, T, Hq, D] of the tokens; keys and values [B, Hkv, S, D] of the whole cache,
        with the tokens' written to it, or without a cache those of the tokens (S = T)."""
        c = self.config
        n_heads = c.n_head, c.n_kv_head, c.n_kv_head
        if c.qk_norm == "all":
            q, k, v = qkv.split([n * c.head_size for n in n_heads], dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        qkv = qkv.view(*qkv.shape[:2], sum(n_heads), c.head_size)  # (B, T, Hq + 2 Hkv, D)
        if cache is not None:
            norms = ()
            if c.qk_norm == "head":
                norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            q = rope_cache(qkv, rope, cache.kv, cache.lengths, *norms, slots=cache.slots)
            return q, *cache.kv
        q, k, v = qkv.split(n_heads, dim=2)  # from here on a differentiable `rope_cache`
        if c.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (rotate(x, rope) for x in (q, k))
        return q, k.transpose(1, 2), v.transpose(1, 2)


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        n_up = 2 * c.n_inner if c.gated else c.n_inner  # gate, then up
        self.up = nn.Linear(c.n_embd, n_up, bias=c.mlp_bias)
        self.down = nn.Linear(c.n_inner, c.n_embd, bias=c.mlp_bias)

    def forward(self, x):
        x = self.up(x)
        activation = self.config.activation
        return self.down(glu(x, activation) if self.config.gated else ACTIVATIONS[activation](x))


class Block(nn.Module):
    """Transformer block number `layer` of a model. In place of `Attention` it may have another
    mixer, which keeps a state of the text: with `forward`, `config`, window = None, rope = None and
    new_states, see recurrent/layers.py. Its mask is a `TreeMask`, or `documents`."""

    def __init__(self, c, layer):
        super().__init__()
        mixer = c.mixers[layer] if c.mixers else None
        size = c.n_embd
        norm = lambda at: Norm(c.norm, size, c.norm_eps) if c.norm_at in (at, "both") else NoNorm()
        self.attn_norm = norm("before")
        self.attn = (mixer or Attention)(c, layer)
        self.attn_post_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = MLP(c)
        self.mlp_post_norm = norm("after")

    def forward(self, hidden, residual, rope, mask, cache=None):
        """(hidden, residual) -> (hidden, residual), each [B, T, C]. Where residual is None, hidden
        is the residual stream, otherwise what is still to be added to it: the next norm does."""
        hidden, residual = self.attn_norm.add_and_norm(hidden, residual)
        hidden = self.attn_post_norm(self.attn(hidden, rope, mask, cache))
        hidden, residual = self.mlp_norm.add_and_norm(hidden, residual)
        return self.mlp_post_norm(self.mlp(hidden)), residual


class LMHead(nn.Linear):
    """The output projection. Hidden states are after the final norm, [M, C] unless noted."""
    sample_filtered = staticmethod(kernels.sample_filtered)  # of `logits`

    def select(self, tokens):
        """An LM head with only these tokens' rows, copied. tokens: int32 [n]."""
        head = LMHead(self.in_features, len(tokens), bias=False, device="meta")
        head.weight = nn.Parameter(self.weight[tokens.long()], requires_grad=False)
        return head

    def topk(self, hidden, k, vocab_ids=None, noise=None):
        """`kernels.project_topk` -> logprobs float32, tokens int64 [M, k]."""
        return kernels.project_topk(hidden, self.weight, k, vocab_ids, noise)

    def sample(self, hidden, temperature, seed, sequence, position, masks=None):
        """The next token after each of the tokens at position [B, T], from their hidden [B, T, C]
        -> int64 [B, T]. The rest as in `kernels.project_sample`."""
        if isinstance(temperature, torch.Tensor) or temperature:  # greedy needs no position
            position = position + 1
        return kernels.project_sample(hidden.flatten(0, 1), self.weight, temperature, seed,
                                      sequence, position.view(-1), masks).view_as(position)

    def logits(self, hidden):
        """float32 [M, V]: rounding to half precision would cause ties."""
        return kernels.float_logits(hidden, self.weight)

    def embedding(self, tokens=None):
        """Token ids [...] -> their rows of the weight [..., C]; without, the whole weight."""
        return self.weight if tokens is None else F.embedding(tokens, self.weight)


class Blocks(nn.ModuleList):
    """The blocks of a model or of draft heads. A backend may replace this with its own class."""
    is_packed = False  # True: inference only; weights cannot be read, changed or trained
    decoding_context = contextlib.nullcontext  # entered around steps and prefill

    def forward(self, hidden, tables, positions, cache=None, ancestors=None, start=0,
                documents=None, layers=()):
        """hidden [B, T, C] -> (hidden, residual), as in `Block`, and the states of `layers`, None
        without. tables: `GPT.tables`. The rest as in `GPT.forward`."""
        *rotations, slopes = tables
        ropes = {kind: table if table is None else table[positions]
                 for kind, table in zip(("global", "window"), rotations)}
        if slopes is not None:
            slopes = slopes[self[0].attn.query_heads]
        windows = {block.attn.window for block in self}
        if ancestors is not None:
            masks = dict.fromkeys(windows, TreeMask(ancestors, slopes))
        else:
            masks = {window: causal_mask(hidden, start, window, documents, slopes)
                     for window in windows - {None}}
            masks[None] = documents  # of recurrent layers
            if cache is not None:  # only the rows up to the last token, which follow `start` rows
                lengths = cache.lengths.new_full(hidden.shape[:1], start)
                cache = replace(cache, kv=cache.kv[..., :start + hidden.shape[1], :],
                                lengths=lengths)
                if cache.states and start == 0:
                    cache.states.clear()
        residual = None
        states = {0: hidden}  # by the number of blocks before
        with sdpa_kernel(CUDA_ATTENTION) if hidden.is_cuda else contextlib.nullcontext():
            caches = cache.layers(self) if cache else [None] * len(self)
            for layer, (block, own_cache) in enumerate(zip(self, caches)):
                attn = block.attn
                hidden, residual = block(hidden, residual, ropes.get(attn.rope),
                                         masks[attn.window], own_cache)
                if layer + 1 in layers:
                    states[layer + 1] = add(hidden, residual)
        states = torch.cat([states[n] for n in layers], dim=-1) if layers else None
        return hidden, residual, states

    @property
    def last_attention(self):
        """The number of the last block with `Attention`."""
        return max(layer for layer, block in enumerate(self) if isinstance(block.attn, Attention))

    def last_state(self):
        """The state dict of that block, in floats."""
        return self[self.last_attention].state_dict()

    def prepare(self, module):
        """Applies the backend of these blocks to another module, such as draft heads."""


# --------------------------------------------------------------------------------------------------
# The model

class GPT(nn.Module):
    """A decoder-only transformer with random weights; `from_pretrained` loads a checkpoint."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.hash = None     # 16 hex digits of the checkpoint's files
        self.decoder = None  # a backend's `generate.Decoder`
        # nn.Embedding(...) draws random numbers, which on the meta device costs a second of imports
        embedding = lambda n: nn.Embedding.from_pretrained(torch.zeros(n, c.n_embd), freeze=False)
        self.embed = embedding(c.vocab_size)
        self.embed_positions = embedding(c.block_size) if c.positions == "learned" else None
        self.blocks = Blocks(Block(c, layer) for layer in range(c.n_layer))
        self.norm = Norm(c.norm, c.n_embd, c.norm_eps)
        self.head = LMHead(c.n_embd, c.vocab_size, bias=False)
        self.n_positions = min(c.block_size, FIRST_POSITIONS) + MAX_TREE  # rows of `tables`
        self.tables = ()    # without weights
        self.outgrown = []  # tables that captured steps may still read
        self.tie_and_place()
        if not self.norm.weight.is_meta:  # else a checkpoint's weights come later
            self.init_weights()

    def tie_and_place(self):
        """Ties the head and makes what no checkpoint stores: the embedding scale and `tables`."""
        c = self.config
        if c.tied:
            self.head.weight = self.embed.weight
        if self.norm.weight.is_meta:
            return  # the tables would cost half a second of imports, for nothing
        self.embed_scale = torch.tensor(c.embed_scale, dtype=self.dtype)  # rounded
        self.tables = self.position_tables()

    def position_tables(self):
        """RoPE, RoPE of windowed layers, ALiBi slopes; each a tensor or None."""
        c = self.config
        table = lambda config: rope_table(config, self.n_positions, self.dtype, self.device)
        windowed = replace(c, rope_theta=c.window_theta, rope_frequencies=None, rope_factor=1.0)
        return (table(c) if c.positions == "rope" else None,
                table(windowed) if c.window_theta else None,
                alibi_slopes(c.n_head).to(self.device) if c.positions == "alibi" else None)

    def _apply(self, fn, *args, **kwargs):
        self.check_plain("moved or cast")
        super()._apply(fn, *args, **kwargs)
        self.tie_and_place()  # computes the tables again in float32, instead of casting them
        return self

    def reserve(self, positions):
        """Makes `tables` of at least this many positions."""
        if positions > self.n_positions:
            self.outgrown.append(self.tables)
            self.n_positions = max(positions, 2 * self.n_positions)
            with torch.inference_mode(False):  # they may be used in training, too
                self.tables = self.position_tables()

    @torch.no_grad()
    def init_weights(self, generator=None):
        """GPT-2's initialisation: normal(0, 0.02), residual projections divided by sqrt(2 L)."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                is_residual = name.endswith(("proj.weight", "down.weight"))
                n_terms = 2 * self.config.n_layer if is_residual else 1
                p.normal_(0, 0.02 / math.sqrt(n_terms), generator=generator)
            elif name.endswith("bias"):
                p.zero_()
        return self

    def check_plain(self, use):
        """Raises InputError if the layers are packed for decoding. use: such as "saved"."""
        expect(not self.blocks.is_packed, f"this model is packed for decoding, so it cannot be "
               f"{use}; load it with packed=False")

    @property
    def device(self):
        return self.norm.weight.device

    @property
    def dtype(self):
        return self.norm.weight.dtype

    def new_cache(self, batch, capacity, blocks=None, device=None, nodes=0):
        """An empty `KVCache` for blocks, default the model's. device: default the model's; "meta"
        gives the sizes of a cache without allocating it. nodes: of the largest tree."""
        blocks = self.blocks if blocks is None else blocks
        config = blocks[0].attn.config if len(blocks) else self.config
        others = [block.attn for block in blocks if not isinstance(block.attn, Attention)]
        shape = (len(blocks) - len(others), 2, batch, config.n_kv_head, capacity, config.head_size)
        # not torch.empty: torch's masked products read unwritten rows too, and 0 * NaN is NaN
        zeros = partial(torch.zeros, device=device or self.device)
        states = others[0].new_states(zeros, len(others), batch, nodes) if others else None
        return KVCache(zeros(shape, dtype=self.dtype), zeros(batch, dtype=torch.int32), None,
                       states)

    def forward(self, tokens, positions=None, cache=None, ancestors=None, start=0, documents=None,
                layers=()):
        """tokens int64 [B, T] -> hidden [B, T, C], the last block's output, before the final norm.
        layers: instead the states after this many blocks each, 0 to L, side by side [B, T, n C].
        Without a cache: a causal pass over whole sequences; tokens attend only within their
        document (ids, int64 [B, T]). With one: keys and values are written to it, but its `lengths`
        do not change; the tokens follow `start` rows of each sequence, or are tree nodes after
        `lengths` rows (positions, ancestors: int64 [B, T])."""
        if positions is None:
            self.reserve(start + tokens.shape[1])
            positions = token_positions(tokens, start, documents)
        hidden = self.embeddings(tokens, positions)
        hidden, residual, states = self.blocks(hidden, self.tables, positions, cache, ancestors,
                                               start, documents, layers)
        return states if layers else add(hidden, residual)

    def embeddings(self, tokens, positions):
        """tokens [B, T] -> the first block's input [B, T, C]. A tree may exceed the context."""
        hidden = self.embed(tokens)
        if self.config.embed_scale != 1:
            hidden = hidden * self.embed_scale
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions.clamp(max=self.config.block_size - 1))
        return hidden

    def lm_head(self, hidden):
        """hidden [..., C] -> logits [..., V]."""
        return self.head(self.norm(hidden))

    @torch.no_grad()
    def prefill(self, tokens, cache, start=0, layers=()):
        """Appends tokens [B, T] to a cache whose sequences have `start` rows -> as `forward`."""
        hidden = self(tokens, cache=cache, start=start, layers=layers)
        cache.lengths.fill_(start + tokens.shape[1])
        return hidden

    @classmethod
    def from_pretrained(cls, path, dtype=None, device=None, packed=None):
        """`hf.checkpoint.load`. packed=False: plain layers, to train, read or change; slower."""
        with needs_folders():
            from hf.checkpoint import load
        return load(path, dtype, device, packed=packed)

    def save_pretrained(self, path, dtype=None):
        """`hf.checkpoint.save`: writes a Llama folder, which transformers can load, too."""
        with needs_folders():
            from hf.checkpoint import save
        save(self, path, dtype)


@contextlib.contextmanager
def needs_folders():
    """Wraps imports from folders. Raises InputError naming a folder that was not copied."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).split(".")[0]
        if name not in ("backends", "common", "drafters", "engine", "hf", "recurrent", "tools",
                        "training"):
            raise
        raise InputError(f"this needs the folder {name}/, which is not beside model.py: copy it "
                         "here too") from None
