"""CUDA inference with `linear.linear_rows`: a block's products with the operations around them
inside, and quantised weights. `apply` replaces the blocks of a model or of draft heads, once; `put`
replaces a layer by a quantised one."""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from backends import sampling, tree
from backends.linear import Quantized, dequantize, linear_rows
from backends.quantized import select_rows, stack
from backends.slots import SomeSlots
from generate import FILTERED, GREEDY, NOISE, set_number
from kernels import HAS_TRITON, INTERPRETED, float_logits, runs_triton
from model import Attention, Block, Blocks, InputError, LMHead, NoNorm, TreeMask

# The most that linear_rows runs; beyond, cuBLAS is faster (bench/results/gpu-h100-linear.jsonl)
MAX_ROWS = 16            # of a product with float weights
MAX_NUMBERS = 2**22      # of such a weight; SmolLM2-135M's have up to 1.8 million
MAX_QUANTIZED_ROWS = 64  # of one with quantised weights: more should pay for dequantising a layer


def apply(module):
    """Replaces the blocks of a `GPT` or of `CloverHeads`, in place, by blocks that decode with
    `linear_rows`. They have the same layers, and call them for everything else."""
    for name, blocks in list(module.named_modules()):
        if type(blocks) is Blocks:
            module.set_submodule(name, FusedBlocks(blocks))


def is_usable(device):
    """Whether Triton's kernels run on this device."""
    return HAS_TRITON and device.type == "cuda" or INTERPRETED.value


# --------------------------------------------------------------------------------------------------
# Blocks

class FusedBlocks(Blocks):
    prepare = staticmethod(apply)

    def __init__(self, blocks):
        super().__init__(FusedBlock(block) if can_fuse(block) else block for block in blocks)
        self.is_packed = any(isinstance(layer, QuantizedLinear) for layer in self.modules())


class FusedBlock(Block):
    """A block with the layers of another. Where `max_rows` allows it, a tree takes six or seven
    launches."""

    def __init__(self, block):
        nn.Module.__init__(self)
        for name, layer in block.named_children():
            setattr(self, name, layer)

    def forward(self, hidden, residual, rope, mask, cache=None):
        attn, mlp = self.attn, self.mlp
        few = hidden[..., 0].numel() <= min(map(max_rows, (attn.qkv, attn.proj, mlp.up, mlp.down)))
        if residual is not None or not isinstance(mask, TreeMask) or not few:
            return super().forward(hidden, residual, rope, mask, cache)
        qkv = product(attn.qkv, hidden, self.attn_norm)
        hidden = product(attn.proj, attn.attend(qkv, rope, mask, cache), residual=hidden)
        inner = product(mlp.up, hidden, self.mlp_norm, activation=mlp.config.activation)
        return product(mlp.down, inner, residual=hidden), None


def product(layer, x, norm=None, **others):
    """`linear_rows` of a layer. norm: the `Norm` before it."""
    if norm is not None:
        others |= dict(norm=norm.weight, eps=norm.eps)
    return linear_rows(x, layer.weight, layer.bias, **others)


def can_fuse(block):
    """Whether `FusedBlock` can run a block: RMSNorms before its parts and none after them, a gated
    MLP, all layers in this process. In float16 the product before the norm may overflow."""
    attn, mlp = block.attn, block.mlp
    norms = block.attn_norm, block.mlp_norm
    no_norms = block.attn_post_norm, block.mlp_post_norm
    return (isinstance(attn, Attention)
            and all(type(layer) in (nn.Linear, QuantizedLinear)
                    for layer in (attn.qkv, attn.proj, mlp.up, mlp.down))
            and not any(isinstance(norm, NoNorm) or norm.bias is not None for norm in norms)
            and all(isinstance(norm, NoNorm) for norm in no_norms)
            and mlp.config.gated and block.attn_norm.weight.dtype != torch.float16)


def max_rows(layer):
    """The most rows for which `linear_rows` runs a layer."""
    if isinstance(layer, QuantizedLinear):
        return MAX_QUANTIZED_ROWS
    return MAX_ROWS if layer.weight.numel() <= MAX_NUMBERS else 0


# --------------------------------------------------------------------------------------------------
# Layers with quantised weights

class QuantizedLinear(nn.Module):
    """nn.Linear with a `Quantized` weight. It only decodes."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = sum(x.nbytes for x in weight if x is not None)

    def refuse(self, *_, **__):
        raise InputError("this layer is quantised: it cannot be trained, moved, copied or saved; "
                         "load the model with packed=False")

    _apply = _save_to_state_dict = __reduce_ex__ = refuse

    def forward(self, x):
        if x[..., 0].numel() <= MAX_QUANTIZED_ROWS:
            return linear_rows(x, self.weight, self.bias)
        return F.linear(x, dequantize(self.weight, x.dtype), self.bias)


class QuantizedHead(QuantizedLinear):
    """`model.LMHead` with a quantised weight, which the LM head's kernels read as it is."""
    topk = LMHead.topk
    sample = LMHead.sample
    sample_filtered = staticmethod(LMHead.sample_filtered)

    def __init__(self, weight, dtype):
        super().__init__(weight)
        self.dtype = dtype

    def logits(self, hidden):
        if runs_triton(hidden):
            return linear_rows(hidden, self.weight, dtype=torch.float32)
        return float_logits(hidden, self.weight)

    def select(self, tokens):
        return QuantizedHead(select_rows(self.weight, tokens.long()), self.dtype)

    def embedding(self, tokens):
        return dequantize(self.weight, self.dtype, tokens)


class QuantizedEmbedding(nn.Module):
    """nn.Embedding that reads the rows of a `Quantized` weight, such as the LM head's."""

    def __init__(self, weight, dtype):
        super().__init__()
        self.weight = weight
        self.dtype = dtype

    def forward(self, tokens):
        return dequantize(self.weight, self.dtype, tokens)


def put(model, name, parts):
    """Replaces the layer `name` by one with a quantised weight. parts: the `Quantized` weights that
    it stacks, on the CPU."""
    weight = Quantized(*(None if x is None else x.to(model.device) for x in stack(parts)))
    layer = model.get_submodule(name)
    is_head = isinstance(layer, LMHead) or name == "embed" and model.config.tied
    new = QuantizedHead(weight, model.dtype) if is_head else QuantizedLinear(weight)
    if name == "embed":
        model.embed = QuantizedEmbedding(weight, model.dtype)
        if is_head:
            model.head = new
    else:
        new.bias = layer.bias
        model.set_submodule(name, new)


# --------------------------------------------------------------------------------------------------
# The decoder

class GraphDecoder(SomeSlots):
    """Decodes with Triton kernels that build and accept trees, so that every step can be captured.
    Prompts are read by the same steps, beside sequences that generate: a prompt is a draft that
    cannot be wrong. A slot with unread prompt tokens gets the chain of its next T known tokens."""
    tree_sizes = 2, 4, 8, 16, 32, 64
    read_sizes = 4, 16, 64
    captured_modes = GREEDY, NOISE, FILTERED
    extend_candidates = staticmethod(tree.extend_candidates)
    ngram_lookup = staticmethod(tree.ngram_lookup)
    advance = staticmethod(tree.advance)
    to_host = staticmethod(tree.to_host)

    def __init__(self, model, **options):
        super().__init__(model, **options)
        slots = self.slots
        integers = partial(torch.zeros, device=self.device)
        self.ends = integers(self.batch_size, dtype=torch.int32)  # index of a prompt's last token
        self.prompts = slots.history, slots.cache.lengths, self.ends
        self.no_chain = integers(self.batch_size, 1, dtype=torch.int64)

    def path_limit(self, tree_size):
        return tree_size  # the chain of a prompt's tokens fills the tree

    def build_tree(self, batch, candidates, chain, tree_size):
        if candidates is None and chain is None:  # a tree needs candidates of some kind
            chain = self.no_chain[:len(batch.root)]
        built = tree.build_tree(batch.root, candidates, chain, self.policy.chances,
                                batch.sampling["temperature"], tree_size)
        tree.prompt_chain(*self.prompts, built, chain, batch.slots)
        return built

    def sample(self, plan, draft, normed, masks=None):
        if plan.mode != FILTERED:
            return super().sample(plan, draft, normed, masks)
        batch = draft.batch
        tokens = sampling.filtered_sample(
            self.head.logits(normed.flatten(0, 1)), **batch.sampling, sequence=batch.sequence,
            position=(draft.positions + 1).flatten(), masks=masks)
        return tokens.view_as(draft.positions)

    def accept(self, plan, draft, target):
        return tree.accept_path(draft.tree, target, self.slots.active, plan.tree_size,
                                draft.batch.sampling["temperature"], self.policy.counts,
                                draft.chain, draft.batch.slots, self.prompts)

    # On the host

    def begin(self, slot, sequence, start):
        super().begin(slot, sequence, start)
        self.set_end(slot, len(sequence.prompt) - 1)

    def release(self, slot, rows=0):
        super().release(slot, rows)
        self.set_end(slot, 0)

    @torch.inference_mode()
    def set_end(self, slot, end):
        set_number(self.ends, slot, end)
