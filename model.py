"""A causal language model in one file: the Llama and GPT-2 shapes by config, ALiBi too, and a KV cache.

    python model.py FOLDER        says what a Hugging Face checkpoint folder holds

Letters: B sequences, T tokens or tree nodes, C hidden size, V vocabulary, L layers, S cache capacity in tokens,
D head size, Hq query heads, Hkv key/value heads.
"""

import contextlib
import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kernels import (
    add_norm,
    cached_attention,
    float_logits,
    glu,
    gumbel,
    gumbel_argmax,
    project_sample,
    project_topk,
    rescored_argmax,
    rope_cache,
    rotate,
    runs_triton,
    topk_logits,
    tree_attention,
    tree_mask,
)

# oneDNN's product from packed weights, as torch.compile uses it; None where torch has none
ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
ONEDNN_NAMES = {"none": ("none", [], ""), "silu": ("swish", [], ""), "gelu": ("gelu", [], "tanh")}
ACTIVATIONS = {"none": lambda x: x, "silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}
# whether the CPU has instructions that multiply bfloat16; those with AMX have these too
NATIVE_BFLOAT16 = ONEDNN_LINEAR is not None and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
FEWEST_ROWS = 4  # of one product; fewer take oneDNN another path: other bits, and on AMD's processors more time

# not cuDNN's attention, which makes a plan for each new length of a prompt
PREFILL_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class InputError(ValueError):
    """Bad input that the user can mend. The message is one line: what was expected, what came, what to do."""


@dataclass
class GPTConfig:
    family: str = "llama"      # a key of hf.checkpoint.FAMILIES: how a checkpoint folder spells names and flags
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
    unit_head: bool = False    # the LM head's rows are scaled to length 1 when they are read, as Baichuan 2 does


class Group:
    """The N processes, or ranks, that decode one model together (tensor parallelism, arXiv 1909.08053, section 3); this
    one is `rank`. A rank holds whole attention heads with their cache, a part of the MLP and a part of the vocabulary.
    Group() is one process alone. The others need torch.distributed to be initialised."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    def part(self, n):
        """This rank's slice of n rows."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def gather(self, x):
        """[N, *x.shape], the same on all ranks."""
        if self.size == 1:
            return x[None]
        parts = x.new_empty(self.size * x.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name
        gather(parts, x.reshape(-1))
        return parts.view(self.size, *x.shape)

    def first(self, value):
        """Rank 0's value, which pickle can write, on all ranks."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def least(self, number):
        """The least of the ranks' numbers, as a float."""
        return number if self.size == 1 else self.gather(torch.tensor([number], dtype=torch.float64)).min().item()

    def sum(self, x, bias=None):
        """The sum over the ranks, and a bias, in float32 or more and in the order of their numbers: so it has the same
        bits on all, and a row's do not depend on what stands beside it, as those of an all-reduce may."""
        parts = self.gather(x) if self.size > 1 else x[None]
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
        for part in (*parts[1:], *(() if bias is None else (bias,))):
            total = total + part
        return total.to(x.dtype)

    def share(self, config):
        """The GPTConfig of a rank's part of a block. Of fewer key/value heads than ranks, several ranks hold each.
        Raises InputError where the ranks do not divide what they share."""
        N, c = self.size, config
        if c.n_head % N or c.n_inner % N or c.n_kv_head % N and N % c.n_kv_head or c.vocab_size < N:
            raise InputError(f"{N} processes do not divide {c.n_head} heads, {c.n_kv_head} key/value heads, an MLP of "
                             f"{c.n_inner} and {c.vocab_size} tokens; take another --nproc-per-node")
        return replace(c, n_head=c.n_head // N, n_kv_head=max(c.n_kv_head // N, 1), n_inner=c.n_inner // N)

    def held(self, name, config):
        """What this rank holds of a parameter: (the dimension that is cut, slices of it), or None for all of it."""
        c, own, D, n = config, self.share(config), config.head_size, self.rank
        if self.size == 1:
            return None
        if ".attn.qkv." in name:
            kv = n * c.n_kv_head // self.size  # the first of its key/value heads
            starts = n * own.n_head, c.n_head + kv, c.n_head + c.n_kv_head + kv
            sizes = own.n_head, own.n_kv_head, own.n_kv_head
            return 0, [slice(start * D, (start + size) * D) for start, size in zip(starts, sizes)]
        if ".mlp.up." in name:
            size, kinds = own.n_inner, range(1 + c.gated)
            return 0, [slice(i * c.n_inner + n * size, i * c.n_inner + (n + 1) * size) for i in kinds]
        if name.endswith("attn.proj.weight"):
            return 1, [slice(n * own.n_head * D, (n + 1) * own.n_head * D)]
        if name.endswith("mlp.down.weight"):
            return 1, [slice(n * own.n_inner, (n + 1) * own.n_inner)]
        return (0, [self.part(c.vocab_size)]) if name == "head.weight" else None


# ---------------------------------------------------------------------------------------------------------------------
# Cache and attention

class KVCache:
    """Keys and values of B sequences. `kv` is one tensor [L, 2, B, Hkv, S, D]; `lengths` int32 [B]: committed rows.
    group: the ranks that each make one."""

    def __init__(self, n_layer, batch, n_kv_head, capacity, head_size, dtype=torch.float32, device="cpu", group=None):
        shape = n_layer, 2, batch, n_kv_head, capacity, head_size
        size = math.prod(shape) * dtype.itemsize
        check_memory(f"a cache of {batch} sequences of {capacity} tokens takes", size, device,
                     "take a smaller batch size or fewer new tokens", group)
        # zeros, not empty: rows never written still pass through masked matrix products, where 0 * nan is nan
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    @property
    def capacity(self):
        return self.kv.shape[4]

    def slots(self, first, count=1):
        """A cache of `count` sequences that shares the memory of sequences first, first + 1, ..."""
        view = object.__new__(KVCache)
        view.kv, view.lengths = self.kv[:, :, first:first + count], self.lengths[first:first + count]
        return view


class AttentionContext:
    """Where the T tokens of one forward pass stand, and what each of them sees. All layers share one.

    Without a cache: whole sequences, causal. `documents` (int64 [B, T]) numbers several documents in a row, which do
    not see one another.

    With a cache: the tokens continue their sequence at consecutive cache rows `positions` (int64 [B, T]). `end` is one
    past the last of them; a caller that gives it saves reading it back from a GPU.

    With a cache and `ancestors` (int64 [B, T]): the tokens are tree nodes at cache rows lengths..lengths+T, see
    `kernels.tree_attention`.

    slopes: ALiBi's, float32 [Hq], or None.
    """

    def __init__(self, positions, cache=None, ancestors=None, end=None, slopes=None, documents=None):
        B, T = positions.shape
        device = positions.device
        self.cached, self.ancestors, self.slopes, self.mask, self.end = cache is not None, ancestors, slopes, None, T
        self.n_tokens = T
        if cache is None:
            if slopes is not None:
                self.mask = alibi_mask(torch.arange(T, device=device)[None], T, slopes)
            if documents is not None:
                same = (documents[:, :, None] == documents[:, None, :])[:, None]  # (B, 1, T, T)
                self.mask = same.tril() if slopes is None else self.mask.masked_fill(~same, -math.inf)
            return
        # the dtype in which attention adds up, see kernels.cached_attention
        dtype = torch.float32 if cache.kv.dtype == torch.float32 or device.type != "cpu" else torch.float64
        if ancestors is None:
            self.cache_rows = positions
            self.end = end = int(positions.max()) + 1 if end is None else end
            if slopes is not None:
                self.mask = alibi_mask(positions, end, slopes.to(dtype))
            elif B > 1 or end > T and device.type == "cpu":
                self.mask = (torch.arange(end, device=device) <= positions[:, :, None])[:, None]  # (B, 1, T, end)
            elif end > T:
                self.mask = causal_lower_right(T, end)  # the one mask that flash attention takes
        else:
            self.lengths = cache.lengths
            self.cache_rows = self.lengths[:, None] + torch.arange(T, device=device)  # (B, T)
            if not runs_triton(ancestors):  # the reference wants a mask; the kernel reads the bits itself
                self.mask = tree_mask(self.lengths, ancestors, int(self.lengths.max()) + T, slopes, dtype)

    def attend(self, q, k, v):
        """q [B, T, Hq, D], k and v [B, Hkv, S, D]: a layer's cache, or else the tokens' own -> [B, T, Hq, D]."""
        if self.ancestors is not None:
            return tree_attention(q, k, v, self.lengths, self.ancestors, mask=self.mask, slopes=self.slopes)
        k, v = k[:, :, :self.end], v[:, :, :self.end]
        if self.cached and q.device.type == "cpu":
            return cached_attention(q, k, v, self.mask, is_causal=self.mask is None)
        if self.slopes is not None and self.mask.dtype != q.dtype:
            self.mask = self.mask.to(q.dtype)  # torch wants biases in q's dtype
        with sdpa_kernel(PREFILL_ATTENTION) if q.is_cuda and self.cached else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=self.mask,
                                               is_causal=self.mask is None, enable_gqa=q.shape[2] != k.shape[1])
        return y.transpose(1, 2)  # (B, T, Hq, D)


def document_positions(documents):
    """documents int64 [B, T], which number the documents of a window in a row -> each token's position in its own
    document, int64 [B, T]. The first document is taken to begin with the window."""
    B, T = documents.shape
    index = torch.arange(T, device=documents.device).expand(B, T)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return index - (index * begins).cummax(dim=1).values


def alibi_slopes(n_head):
    """float32 [n_head]: 2^(-8/n), 2^(-16/n), ... for n heads. Where n is no power of two: those of the power below it,
    then every other one of the power above (ALiBi, arXiv 2108.12409, and its authors' code)."""
    n = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)] + [2 ** (-4 * (2 * i + 1) / n) for i in range(n_head - n)]
    return torch.tensor(slopes)


def alibi_mask(positions, end, slopes):
    """positions [B, T] -> float32 [B, Hq, T, end]: minus slope times distance to a token before, -inf for one after."""
    distance = positions[:, None, :, None] - torch.arange(end, device=positions.device)  # (B, 1, T, end)
    return (-slopes[:, None, None] * distance).masked_fill_(distance < 0, -math.inf)


# ---------------------------------------------------------------------------------------------------------------------
# Layers

class Linear(nn.Linear):
    """nn.Linear that, in inference on a CPU, multiplies by a copy of its weight in oneDNN's own blocked layout. That is
    two to three times as fast as from rows, for one token and for many, and a residual or an activation costs nothing
    behind it. `pack` makes the copies."""
    copy = None  # (the weight, its version, the packed copy)
    group = None  # the ranks that each hold a part; where that is of the inputs, `add_to` sums over them

    def repack(self):
        """Brings the copy up to date. Only a frozen weight has one, on a CPU, in a dtype that it multiplies."""
        w = self.weight
        if not w.is_cpu or not packs(w.dtype) or w.requires_grad or w.is_inference():
            self.copy = None
        elif self.copy is None or self.copy[0] is not w or self.copy[1] != w._version:
            if w.dtype == torch.bfloat16:
                check_rows(min(w.shape[0], 4096), w.shape[1])
            self.copy = w, w._version, torch.ops.mkldnn._reorder_linear_weight(w, None)

    def packed(self):
        """The copy; None where there is none, the weight has changed since, or gradients may be wanted."""
        if self.copy is None or not torch.is_inference_mode_enabled():
            return None
        weight, version, packed = self.copy
        return packed if weight is self.weight and weight._version == version else None

    def __getstate__(self):  # deepcopy and pickle leave the packed copies out: they are oneDNN's own
        return {name: value for name, value in self.__dict__.items() if name not in ("copy", "vocab_copy")}

    def _apply(self, fn, *args, **kwargs):
        self.copy = None  # the weight goes to another device or dtype
        return super()._apply(fn, *args, **kwargs)

    def forward(self, x, activation="none"):
        """x [..., in] -> [..., out]. activation: a key of ACTIVATIONS, applied to the output."""
        packed = self.packed()
        if packed is None:
            return ACTIVATIONS[activation](F.linear(x, self.weight, self.bias))
        return packed_linear(x, packed, self.bias, activation)

    def add_to(self, stream, x):
        """A residual connection: (stream + this layer's output for x, None) where one operation gives the sum, else
        (stream, the output)."""
        packed = self.packed()
        if self.group and self.group.size > 1:
            own = F.linear(x, self.weight) if packed is None else packed_linear(x, packed)
            return stream, self.group.sum(own, self.bias)
        if packed is None:
            return stream, self(x).to(stream.dtype)  # autocast changes it
        return packed_linear(x, packed, self.bias, plus=stream), None


def packed_linear(x, packed, bias=None, activation="none", plus=None):
    """x [..., C] times a packed weight, plus bias -> [..., N]. Before the result is rounded, it goes through a key of
    ACTIVATIONS, or another tensor [..., N] is added."""
    if plus is not None:
        return ONEDNN_LINEAR.binary(x, plus, packed, bias, "add")
    return ONEDNN_LINEAR.default(x, packed, bias, *ONEDNN_NAMES[activation])


def packs(dtype):
    """Whether products of a dtype are taken from packed weights on this CPU."""
    return ONEDNN_LINEAR is not None and (dtype == torch.float32 or dtype == torch.bfloat16 and NATIVE_BFLOAT16)


@lru_cache
def check_rows(n, size):
    """Warns where a packed product [m, size] x [size, n] in bfloat16 gives a row other bits for another m, with as many
    threads as there are now. A text could then depend on what is decoded beside it."""
    x, w = (torch.randn(256, size // 2, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    # [x, x] times [w, -w] is 0: what comes out is how the sum was rounded, and shows its order
    x, w = F.pad(torch.cat((x, x), dim=1), (0, size % 2)), F.pad(torch.cat((w, -w), dim=1), (0, size % 2))
    packed = torch.ops.mkldnn._reorder_linear_weight(w.repeat(-(-n // 256), 1)[:n], None)
    with torch.inference_mode():
        together = packed_linear(x, packed)
        if not all(torch.equal(packed_linear(x[:m], packed), together[:m]) for m in (FEWEST_ROWS, 5, 16, 64)):
            warn(f"this CPU's bfloat16 products of {size} by {n} depend on the number of rows; texts may differ where "
                 "the model's best two tokens nearly tie")


def pack(module, group=None):
    """Gives the frozen `Linear` layers of a module packed copies, where memory has room for twice what they take; with
    a group, on all ranks or none, since with them activations have other shapes."""
    layers = [m for m in module.modules() if isinstance(m, Linear)]
    missing = [m.weight for m in layers if m.copy is None and m.weight.is_cpu]
    if 2 * sum(w.nbytes for w in missing) <= (group or Group()).least(free_memory("cpu")):
        for layer in layers:
            layer.repack()
    elif any(packs(w.dtype) and not w.requires_grad for w in missing):
        warn("the memory has no room for packed copies of the weights, so decoding is slower, and in bfloat16 texts "
             "may differ where the model's best two tokens nearly tie; take a smaller model")


def pad_tokens(x, n):
    """x [B, T, C] with zeros behind it up to n tokens: [B, max(T, n), C]."""
    return F.pad(x, (0, 0, 0, n - x.shape[1])) if x.shape[1] < n else x


class LMHead(Linear):
    """The projection onto the vocabulary. Its methods take hidden states [M, C] after the final norm. With a group a
    rank holds rows first, first + 1, ... of the weight, and its methods' results are those of the whole."""
    vocab_copy = None  # (vocab_ids, packed copy of the whole weight, packed copy of these rows)

    def __init__(self, config, group):
        rows = group.part(config.vocab_size)
        super().__init__(config.n_embd, rows.stop - rows.start, bias=False)
        self.group, self.first, self.vocab_size = group, rows.start, config.vocab_size
        self.held_ids = {}  # {vocab_ids: those among this rank's rows, counted from `first`}

    def topk(self, hidden, k, vocab_ids=None):
        """`kernels.project_topk` with this weight -> (logprobs float32 [M, k], tokens int64 [M, k]). For drafting: from
        packed weights in half precision, the logits are rounded; and of equal ones on two ranks, either may come
        first."""
        if self.group.size == 1:
            return self.own_topk(hidden, k, vocab_ids)
        if vocab_ids is not None and vocab_ids not in self.held_ids:
            own = vocab_ids - self.first
            self.held_ids[vocab_ids] = own[(own >= 0) & (own < len(self.weight))]
        own_ids = None if vocab_ids is None else self.held_ids[vocab_ids]
        M, n = len(hidden), min(k, len(self.weight if own_ids is None else own_ids))
        lists = hidden.new_full((M, 2 * k + 1), -math.inf, dtype=torch.float64)  # logits, token ids, log-sum-exp
        if n:
            logprobs, tokens = self.own_topk(hidden, n, own_ids)
            lse = self.scores(hidden, tokens[:, 0]) - logprobs[:, 0]
            lists[:, :n], lists[:, k:k + n] = logprobs + lse[:, None], tokens + self.first
            lists[:, -1] = lse
        logits, tokens, lse = self.group.gather(lists).split((k, k, 1), dim=2)  # (N, M, ...)
        logits, columns = logits.transpose(0, 1).reshape(M, -1).sort(dim=-1, descending=True, stable=True)
        tokens = tokens.transpose(0, 1).reshape(M, -1).gather(1, columns[:, :k]).long()
        return (logits[:, :k] - lse.logsumexp(dim=0)).float(), tokens

    def scores(self, hidden, tokens):
        """The logits of one of this rank's rows for each hidden state, float64 [M]."""
        return (hidden.double() * self.weight[tokens].double()).sum(dim=-1)

    def embedding(self, tokens):
        """The rows of token ids [...], [..., C]."""
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        own = tokens - self.first
        held = (own >= 0) & (own < len(self.weight))
        return self.group.sum(F.embedding(own.where(held, 0), self.weight) * held[..., None])  # of which one is not 0

    def forward(self, x):
        """x [..., C] -> logits [..., V]."""
        logits = super().forward(x)
        return logits if self.group.size == 1 else self.gathered(logits)

    def gathered(self, logits):
        """All ranks' logits [..., V] from each one's own; parts may differ by one row."""
        N, V = self.group.size, self.vocab_size
        parts = self.group.gather(F.pad(logits, (0, -(-V // N) - logits.shape[-1])))
        return torch.cat([part[..., :V * (i + 1) // N - V * i // N] for i, part in enumerate(parts)], dim=-1)

    def own_topk(self, hidden, k, vocab_ids):
        """Among this rank's rows; token ids are counted from `first`."""
        packed = self.packed()
        if packed is None:
            return project_topk(hidden, self.weight, k, vocab_ids)
        if vocab_ids is None:
            return topk_logits(packed_linear(hidden, packed), k)
        if self.vocab_copy is None or self.vocab_copy[0] is not vocab_ids or self.vocab_copy[1] is not packed:
            part = torch.ops.mkldnn._reorder_linear_weight(self.weight[vocab_ids], None)
            self.vocab_copy = vocab_ids, packed, part
        logprobs, columns = topk_logits(packed_linear(hidden, self.vocab_copy[2]), k)
        return logprobs, vocab_ids[columns].long()

    def logits(self, hidden):
        """float32 [M, V]: rounded to half precision, logits would tie."""
        logits = self.own_logits(hidden)
        return logits if self.group.size == 1 else self.gathered(logits)

    def own_logits(self, hidden):
        packed = self.packed()
        if packed is None:
            return float_logits(hidden, self.weight)
        padded = pad_tokens(hidden[None], FEWEST_ROWS)[0]
        logits = packed_linear(padded, packed)
        if logits.dtype != torch.float32:  # what rounding took away is the product again, less what it left
            logits = logits.float() + packed_linear(padded, packed, plus=-logits).float()
        return logits[:len(hidden)]

    def sample(self, hidden, temperature, seed, sequence, position):
        """`kernels.project_sample` with this weight -> tokens int64 [M]."""
        own = self.own_sample(hidden, temperature, seed, sequence, position)
        if self.group.size == 1:
            return own
        score, tokens = self.scores(hidden, own) / (temperature or 1.0), own + self.first
        if temperature:
            score += gumbel(seed, sequence, position, tokens[:, None])[:, 0]
        score, tokens = self.group.gather(torch.stack((score, tokens.double()))).unbind(1)  # (N, M) each
        return tokens.gather(0, score.argmax(dim=0, keepdim=True))[0].long()  # the first rank's, of equals

    def own_sample(self, hidden, *noise):
        """Among this rank's rows, counted from `first`."""
        packed = self.packed()
        if packed is None:
            return project_sample(hidden, self.weight, *noise, first=self.first)
        logits = packed_linear(pad_tokens(hidden[None], FEWEST_ROWS)[0], packed)[:len(hidden)]
        if logits.dtype == torch.float32:
            return gumbel_argmax(logits, *noise, first=self.first)
        return rescored_argmax(logits.float(), hidden, self.weight, *noise, first=self.first)


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last dimension."""

    def __init__(self, kind, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layer" else None
        self.eps = eps

    def forward(self, x):
        return self.add(x, None)[1]

    def add(self, x, delta):
        """(x + delta, its norm); delta: None for x alone."""
        return add_norm(x, delta, self.weight, self.bias, self.eps)


def rope_frequencies(config):
    """(radians per token for each pair of dimensions [D/2], a factor for cos and sin): RoPE (arXiv 2104.09864), scaled
    by position interpolation (2306.15595), YaRN (2309.00071, section 3), LongRoPE (2402.13753), or as in Llama 3.1."""
    D, theta, s = config.head_size, config.rope_theta, config.rope_scaling or dict(rope_type="default")
    plain = theta ** -(torch.arange(0, D, 2, dtype=torch.float32) / D)
    if s["rope_type"] == "linear":
        return plain / s["factor"], 1.0
    if s["rope_type"] == "longrope":
        return plain / torch.tensor(s["short_factor"]), s["attention_factor"]
    if s["rope_type"] == "llama3":  # long waves are stretched, short ones are not, and in between the two are blended
        turns = s["original_max_position_embeddings"] * plain / (2 * math.pi)  # within the original context
        keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        return plain * torch.lerp(torch.tensor(1 / s["factor"]), torch.tensor(1.0), keep.clamp(0, 1)), 1.0
    if s["rope_type"] == "yarn":  # the same idea, blended over dimensions
        context = s["original_max_position_embeddings"]
        dim = lambda turns: D * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = dim(s["beta_fast"]), dim(s["beta_slow"])
        low, high = (math.floor(low), math.ceil(high)) if s["truncate"] else (low, high)
        low, high = max(low, 0), min(high, D - 1)
        stretch = ((torch.arange(D // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return plain * torch.lerp(torch.tensor(1.0), torch.tensor(1 / s["factor"]), stretch), s["attention_factor"]
    return plain, 1.0


def rope_table(positions, frequencies, scale, dtype):
    """cos and signed sin, each [B, T, 1, D], for `kernels.rotate` (RoPE, arXiv 2104.09864, halves layout). frequencies
    [D]: those of the pairs twice, with a minus the first time, whose sines are those of the first half."""
    angles = positions[:, :, None, None] * frequencies  # (B, T, 1, D)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


class Attention(nn.Module):

    def __init__(self, config, group=None):
        super().__init__()
        c, self.config = config, config
        self.qkv = Linear(c.n_embd, (c.n_head + 2 * c.n_kv_head) * c.head_size, bias=c.qkv_bias)
        self.proj = Linear(c.n_head * c.head_size, c.n_embd, bias=c.proj_bias)
        self.proj.group = group
        if c.qk_norm:
            self.q_norm = Norm("rms", c.head_size, c.norm_eps)
            self.k_norm = Norm("rms", c.head_size, c.norm_eps)

    def forward(self, stream, x, rope, context, kv=None):
        """stream, x [B, >= T, C] -> the stream with the output for x, as in `Linear.add_to`. kv [2, B, Hkv, S, D]: the
        layer's cache, to which keys and values are written."""
        B, T, rows = len(x), context.n_tokens, x.shape[1]
        Hq, Hkv, D = self.config.n_head, self.config.n_kv_head, self.config.head_size
        qkv = self.qkv(x)[:, :T].view(B, T, Hq + 2 * Hkv, D)
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.config.qk_norm else ()
        if kv is None:
            q, k, v = self.rotated(qkv, rope)
        else:
            q, (k, v) = rope_cache(qkv, rope, kv, context.cache_rows, *norms), kv
        return self.proj.add_to(stream, pad_tokens(context.attend(q, k, v).reshape(B, T, Hq * D), rows))

    def rotated(self, qkv, rope):
        """As `kernels.rope_cache`, but with a gradient and without a cache: q [B, T, Hq, D], k and v [B, Hkv, T, D]."""
        Hq, Hkv = self.config.n_head, self.config.n_kv_head
        qk, v = qkv.split((Hq + Hkv, Hkv), dim=2)
        if self.config.qk_norm:
            qk = torch.cat((self.q_norm(qk[:, :, :Hq]), self.k_norm(qk[:, :, Hq:])), dim=2)
        q, k = (qk if rope is None else rotate(qk, rope)).split((Hq, Hkv), dim=2)
        return q, k.transpose(1, 2), v.transpose(1, 2)


class MLP(nn.Module):

    def __init__(self, config, group=None):
        super().__init__()
        c, self.config = config, config
        self.up = Linear(c.n_embd, c.n_inner * (2 if c.gated else 1), bias=c.mlp_bias)  # rows: gate, then up
        self.down = Linear(c.n_inner, c.n_embd, bias=c.mlp_bias)
        self.down.group = group

    def forward(self, stream, x):
        """stream, x [B, T, C] -> the stream with the output for x, as in `Linear.add_to`."""
        activation = self.config.activation
        x = glu(self.up(x), activation) if self.config.gated else self.up(x, activation)
        return self.down.add_to(stream, x)


class Block(nn.Module):
    """group: the ranks that share it, of which each holds what the config says; None: one process."""

    def __init__(self, config, group=None):
        super().__init__()
        self.attn_norm = Norm(config.norm, config.n_embd, config.norm_eps)
        self.attn = Attention(config, group)
        self.mlp_norm = Norm(config.norm, config.n_embd, config.norm_eps)
        self.mlp = MLP(config, group)

    def forward(self, x, delta, rope, context, kv=None):
        """The residual stream is x + delta (None: x alone) before the block, and the sum of the two results behind it:
        a sum is one operation with the norm that follows it. All are [B, T, C]."""
        x, normed = self.attn_norm.add(x, delta)
        x, normed = self.mlp_norm.add(*self.attn(x, normed, rope, context, kv))
        return self.mlp(x, normed)


# ---------------------------------------------------------------------------------------------------------------------
# The model

class GPT(nn.Module):
    """A decoder-only transformer. `init_weights` or `from_pretrained` gives it weights. What it calls the hidden state
    is the last block's output, before the final norm. group: the ranks that hold it together; `share` is the config of
    this one's part."""

    def __init__(self, config, group=None):
        super().__init__()
        c, self.config, self.group = config, config, group or Group()
        self.share = self.group.share(c)
        # not nn.Embedding(...), which draws random numbers: on the meta device that takes a second of imports
        embedding = lambda n: nn.Embedding.from_pretrained(torch.zeros(n, c.n_embd), freeze=False)
        self.embed = embedding(c.vocab_size)
        self.embed_positions = embedding(c.block_size) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(self.share, self.group) for _ in range(c.n_layer))
        self.norm = Norm(c.norm, c.n_embd, c.norm_eps)
        self.head = LMHead(c, self.group)
        self.tie_and_place()

    def tie_and_place(self):
        """Sets what is derived rather than stored, on the weights' device: the tied head, the tables of positions."""
        c, device = self.config, self.embed.weight.device
        if c.tied:
            rows = self.embed.weight[self.group.part(c.vocab_size)]
            self.head.weight = self.embed.weight if self.group.size == 1 else nn.Parameter(rows, requires_grad=False)
        if c.positions == "rope":
            with torch.device("cpu"):
                frequencies, self.rope_scale = rope_frequencies(c)
                frequencies = torch.cat((-frequencies, frequencies))  # (D,), see rope_table
            self.register_buffer("frequencies", frequencies.to(device), persistent=False)
        slopes = alibi_slopes(c.n_head).to(device) if c.positions == "alibi" else None
        self.register_buffer("slopes", slopes, persistent=False)

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        self.tie_and_place()  # the tables stay in float32
        return self

    @torch.no_grad()
    def init_weights(self, generator=None):
        """GPT-2's start: normal(0, 0.02), with the projections back into the residual stream smaller by sqrt(2 L)."""
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

    def new_cache(self, batch, capacity, n_layer=None):
        """A `KVCache` for n_layer layers, default the model's. On a CPU, where attention in half precision adds up in
        float64, it is float64 if that takes no more than a quarter of the free memory: cast in each step, it would be
        slower."""
        c, dtype = self.share if n_layer is None else self.config, self.dtype  # the heads' blocks are not divided
        shape = c.n_layer if n_layer is None else n_layer, batch, c.n_kv_head, capacity, c.head_size
        if dtype.itemsize == 2 and self.device.type == "cpu" and not runs_triton(self.embed.weight):
            dtype = torch.float64 if 16 * math.prod(shape) <= self.group.least(free_memory("cpu")) / 4 else dtype
        return KVCache(*shape, dtype, self.device, self.group)

    def rope(self, positions):
        if self.config.positions == "rope":
            return rope_table(positions, self.frequencies, self.rope_scale, self.dtype)

    def forward(self, tokens, positions=None, cache=None, ancestors=None, end=None, documents=None):
        """tokens int64 [B, T] -> hidden [B, T, C], the last block's output.

        Without a cache: a plain causal pass, as in training. With one, the keys and values of the tokens are written to
        it and `lengths` stays as it is. positions int64 [B, T]; the rest as in `AttentionContext`.
        """
        B, T = tokens.shape
        if positions is None:
            index = torch.arange(T, device=tokens.device).expand(B, T)
            positions = index if documents is None else document_positions(documents)
        x = self.embed(tokens)  # (B, T, C)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if self.head.packed() is not None:
            x = pad_tokens(x, -(-FEWEST_ROWS // B))
        rope = self.rope(positions)
        slopes = None if self.slopes is None else self.slopes[self.group.part(self.config.n_head)]
        context = AttentionContext(positions, cache, ancestors, end, slopes, documents)
        delta = None
        for layer, block in enumerate(self.blocks):
            x, delta = block(x, delta, rope, context, None if cache is None else cache.kv[layer])
        return (x if delta is None else x + delta)[:, :T]

    def lm_head(self, hidden):
        """hidden [..., C] -> logits [..., V]."""
        return self.head(self.norm(hidden))

    @torch.no_grad()
    def prefill(self, tokens, cache, start=0):
        """Appends tokens [1, T] to a one-sequence cache that holds `start` rows -> hidden [1, T, C]. Long prompts come
        in chunks: the scores take T x (start + T) numbers per head."""
        end = start + tokens.shape[1]
        hidden = self(tokens, torch.arange(start, end, device=tokens.device)[None], cache, end=end)
        cache.lengths.fill_(end)
        return hidden

    @classmethod
    def from_pretrained(cls, path, dtype=None, device=None, group=None):
        """Reads a Hugging Face checkpoint folder of one of hf.checkpoint.FAMILIES, straight to the device.

        dtype: torch dtype, default `default_dtype`. group: the ranks that hold it together. Raises InputError for
        whatever is amiss.
        """
        with needs_folder("hf"):
            from hf.checkpoint import check_headers, held_shape, read_config, read_state, stored_dtype
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        config = read_config(path)
        shapes = check_headers(path, config)  # {parameter name: shape}; nothing is built before the files agree
        dtype = dtype or default_dtype(device, stored_dtype(path))
        group = group or Group()
        group.share(config)  # raises where the ranks do not divide it
        size = dtype.itemsize * sum(math.prod(held_shape(shape, group.held(name, config)))
                                    for name, shape in shapes.items())
        advice = "take a smaller model" + (" or --dtype bfloat16" if dtype == torch.float32 else "")
        check_memory(f"{path}: its weights take", size, device, advice)
        with torch.device("meta"):
            model = cls(config, group)
        state, model.identity = read_state(path, config, shapes, dtype, device, group)
        if config.tied:
            state["head.weight"] = state["embed.weight"][group.part(config.vocab_size)]
        model.load_state_dict(state, assign=True)
        model.requires_grad_(False)
        model.tie_and_place()
        return model.eval()

    def save_pretrained(self, path, dtype=None):
        """Writes config.json and model.safetensors (tensors in `dtype`, default the model's) for transformers to read.
        Raises InputError for a config that the family's format cannot express, and on a rank, which holds a part."""
        with needs_folder("hf"):
            from hf.checkpoint import hf_config, parse_config, split_weight
        if self.group.size > 1:
            raise InputError(f"{path}: one of {self.group.size} ranks holds a part of the model; save it from one "
                             "process")
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


def default_dtype(device, stored):
    """bfloat16 on a GPU, and on a CPU that has instructions for it where a checkpoint is stored so; else float32."""
    native = device.type == "cuda" or NATIVE_BFLOAT16 and stored == torch.bfloat16
    return torch.bfloat16 if native else torch.float32


def warn_of_emulation(dtype, device):
    """A line on standard error for a dtype that a CPU has no instructions for."""
    if device.type == "cpu" and dtype.itemsize == 2 and not packs(dtype):
        faster = "bfloat16" if NATIVE_BFLOAT16 else "float32"
        warn(f"{str(dtype).removeprefix('torch.')} is slow on this CPU, which has no instructions for it; --dtype "
             f"{faster} is faster")


# ---------------------------------------------------------------------------------------------------------------------
# Identity: heads know the model they were trained on

def identity(state):
    """16 hex digits for the tensors of a model, {name: tensor}."""
    return fingerprint({name: (value.shape, value.detach().flatten()[::max(1, value.numel() // 64)])
                        for name, value in state.items()})


def fingerprint_indices(shape, start=0, size=None):
    """(rows, columns) of the elements of a parameter that `identity` looks at: one in every numel // 64 of them. With
    start and size: those within `size` rows from `start`, counted from there."""
    size, width, numel = shape[0] if size is None else size, math.prod(shape[1:]), math.prod(shape)
    stride = max(1, numel // 64)
    flat = torch.arange(-(-start * width // stride) * stride, (start + size) * width, stride) - start * width
    return (flat // width, flat % width) if len(shape) > 1 else (torch.zeros_like(flat), flat)


def fingerprint(samples):
    """16 hex digits over {name: (shape, sampled values)}. Values are rounded to bfloat16 first, so that a float32 model
    and its bfloat16 checkpoint are the same model."""
    sha = hashlib.sha256()
    for name, (shape, values) in sorted(samples.items()):
        bits = values.to("cpu", torch.bfloat16).view(torch.int16)
        sha.update(f"{name}{tuple(shape)}".encode() + bits.numpy().tobytes())
    return sha.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Files, folders, memory

@contextlib.contextmanager
def needs_folder(name, otherwise=""):
    """Around an import from a folder beside this file. Where that is missing, says so; otherwise: what else can be
    done."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] != name:
            raise
        raise InputError(f"this needs the folder {name}/, which is not beside model.py: copy it here too"
                         f"{otherwise}") from None


@lru_cache
def warn(line):
    """Prints a line on standard error, once."""
    print(line, file=sys.stderr)


def atomic_write(path, write):
    """Calls write(temporary name) and renames the result to `path`, so that a reader sees the old file or the new
    one."""
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
        raise InputError(f"{path}: no such file; expected a Hugging Face checkpoint folder with it") from None
    except (OSError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as json ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a json object, found a {type(value).__name__}")
    return value


def check_memory(what, size, device, advice, group=None):
    """Raises InputError where `size` bytes are more than the device has free; with a group, on all ranks where one's
    has not. what: such as "the weights take"."""
    free = (group or Group()).least(free_memory(device))
    if size > free:
        raise InputError(f"{what} {size / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free on {device}; {advice}")


def free_memory(device):
    """Bytes that can still be allocated on a device, as far as it tells. On CUDA, torch's cache is emptied first."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # but not of what a live CUDA graph reserves, which nothing else can use
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else math.inf
    try:  # a container may be allowed less
        limit, used, stat = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current", "stat"))
        file_cache = dict(line.split() for line in stat.splitlines())["inactive_file"]  # given up when memory is needed
        return min(free, int(limit) - int(used) + int(file_cache))
    except (KeyError, OSError, ValueError):  # no such limit
        return free


if __name__ == "__main__":
    try:
        from tools.cli import command, describe
    except ModuleNotFoundError as error:
        sys.exit(f"model.py: this needs {error.name}, which is not here; copy the folders tools/ and hf/ here too")
    command(describe)
