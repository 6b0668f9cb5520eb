"""A model on a CPU: products from packed weights at the memory's speed, and exact bfloat16.

`apply(model, heads)` turns layers into their packed subclasses, in place. Parameters keep their
names; a layer whose weight has changed, or that needs a gradient, computes as before.

oneDNN multiplies a weight in its own blocked layout two to three times as fast as from rows, and
adds a residual or an activation for nothing. In bfloat16 a text must not depend on what is decoded
beside it: products have MIN_ROWS rows or more, below which oneDNN adds in another order; attention
adds in float64, whose rounding hides the order; near ties are scored again in float64."""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from clover import ResBlock
from kernels import float_logits, glu, gumbel, gumbel_argmax, runs_triton
from model import ACTIVATIONS, AttentionContext, Block, LMHead, NoNorm, warn

# oneDNN's product from packed weights, as torch.compile uses it; None where torch has none
HAS_ONEDNN = torch.backends.mkldnn.is_available()
ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise if HAS_ONEDNN else None
ONEDNN_NAMES = {None: ("none", [], ""), "silu": ("swish", [], ""), "gelu": ("gelu", [], "tanh")}
# whether the CPU has instructions that multiply bfloat16; those with AMX have these too
NATIVE_BFLOAT16 = HAS_ONEDNN and torch.cpu._is_avx512_bf16_supported()
MIN_ROWS = 4  # of a product; fewer give other bits, and on AMD's processors take more time


def apply(model, heads=None, exact=True):
    """Lets a `GPT` and `CloverHeads` on it decode fast on a CPU. Call it again after weights have
    changed, or the model has left the CPU: its layers then become what they were. exact: see
    `cached_attention`."""
    if model.device.type != "cpu" or runs_triton(model.embed.weight):
        plain = {packed: layer for layer, packed in PACKED.items()}
        for module in filter(None, (model, heads)):
            replace_classes(module, plain)
        model.context_type = AttentionContext
        vars(model).pop("cache_dtype", None)
        return
    warn_of_emulation(model.dtype)
    pack(model, model)
    same_bits(model, ())
    if heads is not None:
        pack(heads, model, min_rows=1)  # guesses may depend on what is decoded beside them
    if model.blocks and isinstance(model.blocks[-1], PackedBlock):
        model.blocks[-1].is_last = True
    model.context_type = partial(CPUContext, exact=exact)
    model.cache_dtype = partial(cache_dtype, model, exact=exact)


def replace_classes(module, classes):
    for layer in module.modules():
        layer.__class__ = classes.get(type(layer), type(layer))


def default_dtype(device, stored):
    """bfloat16 on a GPU, and for a checkpoint in it on a CPU that multiplies it; else float32."""
    native = device.type == "cuda" or NATIVE_BFLOAT16 and stored == torch.bfloat16
    return torch.bfloat16 if native else torch.float32


def warn_of_emulation(dtype):
    """A line on standard error for a dtype that this CPU has no instructions for."""
    if dtype.itemsize == 2 and not packs(dtype):
        name = str(dtype).removeprefix("torch.")
        faster = "bfloat16" if NATIVE_BFLOAT16 else "float32"
        warn(f"{name} is slow on this CPU, which has no instructions for it; "
             f"--dtype {faster} is faster")


# --------------------------------------------------------------------------------------------------
# Products

def packs(dtype):
    """Whether products of a dtype are taken from packed weights on this CPU."""
    return NATIVE_BFLOAT16 if dtype == torch.bfloat16 else HAS_ONEDNN and dtype == torch.float32


def pack(module, model, min_rows=MIN_ROWS):
    """Makes a module's layers packed ones, if memory has room for twice what their copies take."""
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    missing = [layer.weight for layer in linears if getattr(layer, "packed_weight", None) is None]
    if 2 * sum(w.nbytes for w in missing) > model.free_memory():
        if any(packs(w.dtype) and not w.requires_grad for w in missing):
            warn("the memory has no room for packed copies of the weights, so decoding is slower, "
                 "and in bfloat16 texts may differ where the model's best two tokens nearly tie; "
                 "take a smaller model")
        return
    replace_classes(module, PACKED)
    for layer in linears:
        if isinstance(layer, PackedLinear):  # a fork may have a subclass of its own
            layer.min_rows = min_rows
            layer.repack()


class PackedLinear(nn.Linear):
    """nn.Linear that, in inference, multiplies by a copy of its weight in oneDNN's layout."""
    packed_weight = None  # (the weight, its version, the packed copy)
    packed_vocab = None   # of an LM head: (vocab_ids, the packed copy, a packed copy of these rows)
    min_rows = MIN_ROWS

    def repack(self):
        """Brings the copy up to date: of a frozen weight, in a dtype that this CPU multiplies."""
        w = self.weight
        if not w.is_cpu or not packs(w.dtype) or w.requires_grad or w.is_inference():
            self.packed_weight = None
        elif not self.is_current():
            self.packed_weight = w, w._version, torch.ops.mkldnn._reorder_linear_weight(w, None)

    def is_current(self):
        """Whether there is a copy, of the weight as it is now."""
        weight, version, _ = self.packed_weight or (None, None, None)
        return weight is self.weight and weight._version == version

    def packed(self):
        """The copy; None where there is none that is current, or a gradient may be wanted."""
        usable = torch.is_inference_mode_enabled() and self.is_current()
        return self.packed_weight[2] if usable else None

    def __getstate__(self):  # deepcopy and pickle leave out the packed copies, which are oneDNN's
        own = "packed_weight", "packed_vocab"
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def _apply(self, fn, *args, **kwargs):
        self.packed_weight = None  # the weight goes to another device or dtype
        return super()._apply(fn, *args, **kwargs)

    def product(self, x, activation=None, residual=None):
        """x [..., in] -> [..., out], rounded after an activation or a residual [..., out]."""
        packed = self.packed()
        if packed is None:
            out = F.linear(x, self.weight, self.bias)
            out = out if activation is None else ACTIVATIONS[activation](out)
            return out if residual is None else residual + out
        rows = x.numel() // x.shape[-1]
        if rows >= self.min_rows:
            return packed_linear(x, packed, self.bias, activation, residual)
        padded = pad_rows(x.reshape(rows, -1), self.min_rows)
        if residual is not None:
            residual = pad_rows(residual.reshape(rows, -1), self.min_rows)
        out = packed_linear(padded, packed, self.bias, activation, residual)
        return out[:rows].view(*x.shape[:-1], -1)

    forward = product


def packed_linear(x, packed, bias=None, activation=None, residual=None):
    """x [..., in] times a packed weight -> [..., out]."""
    if residual is not None:
        return ONEDNN_LINEAR.binary(x, residual, packed, bias, "add")
    return ONEDNN_LINEAR.default(x, packed, bias, *ONEDNN_NAMES[activation])


class PackedResBlock(ResBlock):
    def forward(self, z, e):
        return z + self.linear.product(z, "silu")


class PackedBlock(Block):
    """A block whose products add to a stream that is padded to MIN_ROWS rows -> (stream, None)."""
    is_last = False

    def forward(self, hidden, residual, context, kv=None):
        attn, mlp = self.attn, self.mlp
        of_group = not isinstance(attn.proj, PackedLinear)
        if kv is None or of_group or attn.proj.packed() is None:
            return super().forward(hidden, residual, context, kv)
        stream = hidden if residual is None else residual + hidden
        B, T = context.shape
        rows = max(stream.shape[1], -(-attn.proj.min_rows // B))  # of each sequence
        stream = pad_rows(stream, rows)
        qkv = attn.qkv.product(self.attn_norm(stream))
        attended = attn.core(qkv if rows == T else qkv[:, :T], context, kv)
        stream = add_product(stream, attn.proj, pad_rows(attended, rows), self.attn_post_norm)
        normed = self.mlp_norm(stream)
        activation = mlp.config.activation
        x = mlp.up.product(normed, None if mlp.config.gated else activation)
        x = glu(x, activation) if mlp.config.gated else x
        stream = add_product(stream, mlp.down, x, self.mlp_post_norm)
        return stream[:, :T] if self.is_last else stream, None


def add_product(stream, linear, x, norm):
    """stream + norm(linear(x)), in one operation where there is no norm."""
    if isinstance(norm, NoNorm):
        return linear.product(x, residual=stream)
    return stream + norm(linear.product(x))


def pad_rows(x, n):
    """x [..., M, C] with rows of zeros after it, where it has fewer than n: [..., max(M, n), C]."""
    return F.pad(x, (0, 0, 0, n - x.shape[-2])) if x.shape[-2] < n else x


# --------------------------------------------------------------------------------------------------
# Exact bfloat16

def is_exact(model):
    """Whether two ways to decode give the same bits: bfloat16 from packed weights."""
    packed = isinstance(model.head, PackedLMHead) and model.head.is_current()
    return packed and model.dtype == torch.bfloat16


def same_bits(model, counts):
    """Those of the numbers of threads that give bfloat16 products the bits of torch's own number;
    all, for other dtypes. Warns where bits depend on the number of rows."""
    if model.dtype != torch.bfloat16 or not packs(model.dtype):
        return counts
    usual = torch.get_num_threads()
    shapes = sorted({(min(layer.weight.shape[0], 4096), layer.weight.shape[1])  # as good as more
                     for layer in model.modules() if isinstance(layer, nn.Linear)})
    bits = {n: [product_bits(*shape, n) for shape in shapes] for n in (usual, *counts)}
    if None in bits[usual]:
        warn("this CPU's bfloat16 products depend on the number of rows; texts may differ where "
             "the model's best two tokens nearly tie")
    return [n for n in counts if n == usual or bits[n] == bits[usual] and None not in bits[n]]


@lru_cache
def product_bits(N, C, threads):
    """A hash of the bits of products with packed bfloat16 weights [N, C], by this number of
    threads; None if a row's bits depend on the number of rows."""
    random = lambda seed: torch.randn(256, C // 2, generator=torch.Generator().manual_seed(seed))
    x, w = random(0).bfloat16(), random(1).bfloat16()
    # [x, x] times [w, -w] is 0: what comes out is how the sum was rounded, and shows its order
    x = F.pad(torch.cat((x, x), dim=1), (0, C % 2))
    w = F.pad(torch.cat((w, -w), dim=1), (0, C % 2))
    packed = torch.ops.mkldnn._reorder_linear_weight(w.repeat(-(-N // 256), 1)[:N], None)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    with torch.inference_mode():
        together, *parts = [packed_linear(x[:M], packed) for M in (256, MIN_ROWS, 5, 16, 64)]
    torch.set_num_threads(usual)
    same = all(torch.equal(part, together[:len(part)]) for part in parts)
    return hash(together.view(torch.int16).numpy().tobytes()) if same else None


# --------------------------------------------------------------------------------------------------
# The LM head

class PackedLMHead(PackedLinear, LMHead):

    def topk(self, hidden, k, vocab_ids=None):
        """For drafting: in half precision the logits are rounded."""
        packed = self.packed()
        if packed is None:
            logits = float_logits(hidden, self.weight, vocab_ids)
        elif vocab_ids is None:
            logits = self(hidden)
        else:
            logits = packed_linear(hidden, self.packed_rows(vocab_ids, packed))
        logprobs, columns = topk_logprobs(logits, k)
        return logprobs, columns if vocab_ids is None else vocab_ids[columns].long()

    def packed_rows(self, vocab_ids, packed):
        """A packed copy of these rows, made once."""
        known = self.packed_vocab
        if known is None or known[0] is not vocab_ids or known[1] is not packed:
            rows = torch.ops.mkldnn._reorder_linear_weight(self.weight[vocab_ids], None)
            self.packed_vocab = vocab_ids, packed, rows
        return self.packed_vocab[2]

    def logits(self, hidden):
        if self.packed() is None:
            return super().logits(hidden)
        logits = self(hidden)
        if logits.dtype != torch.float32:  # rounding error = product - rounded logits
            logits = logits.float() + self.product(hidden, residual=-logits).float()
        return logits

    def sample(self, hidden, temperature, seed, sequence, position, first_token=0):
        if self.packed() is None:
            return super().sample(hidden, temperature, seed, sequence, position, first_token)
        logits = self(hidden)
        noise = temperature, seed, sequence, position
        if logits.dtype == torch.float32:
            return gumbel_argmax(logits, *noise, first_token=first_token)
        return rescored_argmax(logits.float(), hidden, self.weight, *noise, first_token)


def topk_logprobs(logits, k):
    """The k largest of logits [M, V], best first, of equals the first -> (logprobs float32 [M, k],
    columns int64 [M, k]). In half precision, where equals are many, they come in any order."""
    # topk promises no order among equals; the (k + 1)st shows if an equal of the k-th is left out
    values, columns = logits.topk(min(k + 1, logits.shape[1]))
    if logits.dtype == torch.float32 and (values[:, 1:] == values[:, :-1]).any():
        columns = logits.sort(dim=-1, descending=True, stable=True).indices
    columns = columns[:, :k]
    logprobs = logits.float().log_softmax(-1)  # takes a quarter of the time of logsumexp
    return logprobs.gather(1, columns), columns


def rescored_argmax(logits, hidden, weight, temperature, seed, sequence, position, first_token=0):
    """`kernels.gumbel_argmax` of logits float32 [M, V], the product of hidden [M, C] and weight
    [V, C] rounded to bfloat16. Each token that may be the best but for the rounding is scored
    again, in float64, so that a row's result neither ties nor depends on the other rows."""
    M, V = logits.shape
    scores, scale = logits, temperature or 1.0
    if temperature:
        ids = torch.arange(first_token, first_token + V, device=logits.device)
        noise = gumbel(seed, sequence, position, ids)
        scores = logits / temperature + noise
    largest = torch.maximum(logits.amax(1), -logits.amin(1))
    # rounding moves a logit by 2^-8 of itself at most, a float32 sum by far less
    error = 1.1 / 2**8 * largest / scale
    near = scores >= (scores.amax(1) - 2 * error)[:, None]  # (M, V)
    plain = (largest == 0) | ~largest.isfinite()  # rows with nothing to score again, or no way to
    if plain.any():
        near[plain] = F.one_hot(scores[plain].argmax(1), V).bool()
    rows, tokens = near.nonzero().unbind(1)
    if len(rows) == M:
        return tokens
    exact = torch.cat([(hidden[r].double() * weight[t].double()).sum(1)  # a few: all may be near
                       for r, t in zip(rows.split(4096), tokens.split(4096))])
    exact = exact / scale + noise[rows, tokens] if temperature else exact
    best = exact.new_full((M,), -math.inf).scatter_reduce_(0, rows, exact, "amax")
    won = ~(exact < best[rows])  # also NaN; the lowest of equals wins
    return tokens.new_full((M,), V).scatter_reduce_(0, rows[won], tokens[won], "amin")


# --------------------------------------------------------------------------------------------------
# Attention

def cache_dtype(model, n, exact=True):
    """float64 where attention adds in it, to save casts, if n such numbers take no more than a
    quarter of the free memory."""
    exact = exact and model.dtype.itemsize == 2 and 8 * n <= model.free_memory() / 4
    return torch.float64 if exact else model.dtype


@dataclass(eq=False)
class CPUContext(AttentionContext):
    """In half precision attention over a cache adds in float64, see `cached_attention`."""
    exact: bool = True

    def __post_init__(self):
        self.shape = (self.rows if self.ancestors is None else self.ancestors).shape  # (B, T)
        if self.ancestors is not None:
            self.start = int(self.lengths.min())
            self.end = int(self.lengths.max()) + self.shape[1]

    def make_mask(self, window, dtype):
        if self.ancestors is None:
            return super().make_mask(window, dtype)
        first = self.visible_rows(window).start
        return tree_mask(self.lengths, self.ancestors, self.end, self.slopes, dtype, window, first)

    def attend(self, q, k, v, window=0, scale=None):
        if self.lengths is None:
            return super().attend(q, k, v, window, scale)
        rows = self.visible_rows(window)
        k, v = k[:, :, rows], v[:, :, rows]
        dtype = torch.float64 if self.exact and q.dtype.itemsize == 2 else k.dtype
        if self.ancestors is None:
            causal = self.is_causal(window) and q.shape[1] == self.end
            mask = None if causal else self.mask(window, dtype)
            return cached_attention(q, k, v, mask, causal, scale, self.exact)
        mask, unseen = self.mask(window, dtype)
        # 0 * NaN is NaN. Only rows after the shortest sequence can hold it; a sum tests them fast.
        new = slice(self.start - rows.start, None)
        if unseen is not None and not math.isfinite(k[:, :, new].sum() + v[:, :, new].sum()):
            k, v = (x.masked_fill(unseen[:, None, :, None], 0) for x in (k, v))
        return cached_attention(q, k, v, mask, False, scale, self.exact)


def tree_mask(lengths, ancestors, end, slopes=None, dtype=torch.float32, window=0, first=0):
    """What each node sees of the n cache rows from `first` to `end`, by `kernels.tree_attention`'s
    arguments -> (bias, unseen). bias, of a dtype, is added to the scores: [B, 1, T, n] of 0 and
    -inf, None if every node sees every row; with slopes [B, Hq, T, n] of the ALiBi bias and -inf.
    unseen: bool [B, n], the rows that no node sees, None if there are none."""
    B, T = ancestors.shape
    device = lengths.device
    node = torch.arange(first, end, device=device) - lengths[:, None]  # (B, n), negative: committed
    ancestor = (ancestors[:, :, None] >> node.clamp(0, 63)[:, None]) & 1  # (B, T, n)
    visible = (ancestor.bool() & (node < T)[:, None]) | (node < 0)[:, None]
    if slopes is not None or window:
        depth = (ancestors[:, :, None] >> torch.arange(64, device=device) & 1).sum(-1) - 1  # (B, T)
        positions = torch.where(node < 0, node, depth.gather(1, node.clamp(0, T - 1)))  # (B, n)
        distance = positions[:, None] - depth[:, :, None]  # (B, T, n)
    if window:
        visible &= distance > -window
    if slopes is None and visible.all():
        return None, None
    unseen = ~visible.any(1)
    if slopes is None:
        bias = torch.zeros_like(visible, dtype=dtype)[:, None]
    else:
        bias = slopes.to(dtype)[:, None, None] * distance[:, None]  # (B, Hq, T, n)
    bias.masked_fill_(~visible[:, None], -math.inf)
    return bias, unseen if unseen.any() else None


def cached_attention(q, k, v, bias=None, is_causal=False, scale=None, exact=True):
    """torch's own attention of q [B, T, Hq, D] over k and v [B, Hkv, S, D] -> [B, T, Hq, D] in q's
    dtype. scale: of the scores, default D ** -0.5. exact: with q in half precision the sums are in
    float64, so that rounding hides their order: the same tokens are elsewhere in the cache of
    another tree. Caches in half precision are then cast a head at a time."""
    B, T, Hq, D = q.shape
    Hkv = k.shape[1]
    G = Hq // Hkv
    dtype = torch.float64 if exact and q.dtype.itemsize == 2 else k.dtype
    bias = bias if bias is None or bias.dtype == torch.bool else bias.to(dtype)
    all_heads = bias is None or bias.shape[1] == 1
    if k.dtype != dtype:
        biases = [bias] * Hkv if all_heads else bias.split(G, dim=1)
        heads = zip(q.split(G, dim=2), k.split(1, dim=1), v.split(1, dim=1), biases)
        return torch.cat([cached_attention(q, k.to(dtype), v.to(dtype), bias, is_causal, scale)
                          for q, k, v, bias in heads], dim=2)
    few = T <= 64 if dtype.itemsize == 2 else dtype == torch.float64 and 1 < T <= 64
    if few and all_heads and G > 1 and not is_causal:
        # query heads that share keys become rows of one product, which is quicker than one each
        q64 = q.view(B, T, Hkv, G, D).transpose(1, 2).to(dtype).reshape(B, Hkv, T * G, D)
        bias = bias if bias is None else bias.repeat_interleave(G, dim=2)
        out = F.scaled_dot_product_attention(q64, k, v, bias, scale=scale).view(B, Hkv, T, G, D)
        return out.transpose(1, 2).to(q.dtype).reshape(B, T, Hq, D)
    out = F.scaled_dot_product_attention(q.to(dtype).transpose(1, 2), k, v, bias,
                                         is_causal=is_causal, scale=scale, enable_gqa=G > 1)
    return out.transpose(1, 2).to(q.dtype)  # (B, T, Hq, D)


PACKED = {nn.Linear: PackedLinear, LMHead: PackedLMHead, ResBlock: PackedResBlock,
          Block: PackedBlock}
