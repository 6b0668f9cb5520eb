"""EAGLE-3 (arXiv 2503.01840): one decoder layer drafts token by token. It reads states g of the
model's, and in drafted rows its own output for the row before:

    g = fc(three states side by side) in committed rows, then h of the parent
    a = g + Attn([embed_norm(E[next token]), state_norm(g)]);  h = a + MLP(mlp_norm(a))
    logits = lm_head(norm(h))

The W rows of depth d are at rows lengths + (d - 1) W of the heads' own cache, where they see the
committed rows and their ancestors."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from clover import Candidates, extend_candidates, is_allowed
from drafters.base import PublishedHeads
from kernels import tree_attention
from model import MAX_TREE, MLP, Attention, Blocks, KVCache, Norm, TreeMask, add, token_positions


class DraftAttention(Attention):
    """The attention of rows that may be drafted."""

    def attend(self, qkv, rope, mask, cache=None, first=0):
        """As `Attention.attend`. first: drafted rows before these, which the cache has beyond its
        lengths and a `TreeMask` counts."""
        if first == 0:
            return super().attend(qkv, rope, mask, cache)
        if self.config.attn_gate:
            gate, qkv = qkv.tensor_split((self.proj.in_features,), dim=-1)
        q, k, v = self.split(qkv, rope, KVCache(cache.kv, cache.lengths + first, cache.slots))
        # tree_attention takes row i to be at lengths + i: those before get zeros for queries
        q = F.pad(q, (0, 0, 0, 0, first, 0))
        y = tree_attention(q, k, v, cache.lengths, F.pad(mask.ancestors, (first, 0)),
                           slots=cache.slots)[:, first:].flatten(2)
        return y * gate.sigmoid() if self.config.attn_gate else y


class Layer(nn.Module):
    """The decoder layer, called as a `model.Block` with hidden [B, T, 2 C]: the embedding of the
    next token and g. first: as in `DraftAttention`."""

    def __init__(self, config):
        super().__init__()
        c = config.layers
        self.norm_before_residual = config.norm_before_residual
        self.embed_norm = Norm("rms", c.n_embd, c.norm_eps)
        self.state_norm = Norm("rms", c.n_embd, c.norm_eps)
        self.attn = DraftAttention(c, 0)
        self.attn.qkv = nn.Linear(2 * c.n_embd, self.attn.qkv.out_features, bias=c.qkv_bias)
        self.mlp_norm = Norm("rms", c.n_embd, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, hidden, residual, rope, mask, cache=None, first=0):
        attn = self.attn
        e, g = hidden.chunk(2, dim=-1)
        normed = self.state_norm(g)
        qkv = attn.qkv(torch.cat((self.embed_norm(e), normed), dim=-1))
        y = attn.attend(qkv, rope, mask, cache, first)
        hidden, residual = self.mlp_norm.add_and_norm(
            attn.proj(y), normed if self.norm_before_residual else g)
        return self.mlp(hidden), residual


class Layers(Blocks):
    """A type of its own, since backends replace `Blocks` by ones that run a `model.Block`."""


class Eagle3Heads(PublishedHeads):
    """config: `Eagle3Config`."""
    draft_rows = MAX_TREE
    layer = Layer

    def __init__(self, config, model):
        super().__init__(config, model)
        C = config.layers.n_embd
        n_states = len(config.hidden_layers)
        norm = lambda size: Norm("rms", size, config.layers.norm_eps)
        self.blocks = Layers([self.layer(config)])
        self.input_norm = norm(n_states * C) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(norm(C) for _ in range(n_states * config.fc_norm))
        # the drafted rows' bits have to fit a mask
        self.max_beams = min(self.max_beams, MAX_TREE // max(self.n_draft - 1, 1))

    def g(self, hidden):
        """The model's states [B, T, n C] -> g [B, T, C] of committed rows."""
        hidden = self.states(hidden)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm:
            states = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(x) for norm, x in zip(self.fc_norm, states)], dim=-1)
        return self.fc(hidden)

    def augment(self, hidden, tokens, positions=None, cache=None, ancestors=None, start=0):
        """Reads committed rows: the model's states [B, T, n C] and the next tokens [B, T] -> h
        [B, T, C]. The rest as in `GPT.forward`."""
        if positions is None:
            positions = token_positions(hidden, start)
        pairs = torch.cat((self.embedding(tokens), self.g(hidden)), dim=-1)
        hidden, residual, _ = self.blocks(pairs, self.tables, positions, cache, ancestors, start)
        return add(hidden, residual)

    @torch.no_grad()
    def draft(self, state, root, K, W, sampling=None, masks=None,
              extend=extend_candidates, cache=None):
        """`CloverHeads.draft`. Writes the drafted rows to the cache beyond its lengths."""
        B, C = state.shape
        own = KVCache(cache.kv[0], cache.lengths, cache.slots)
        lengths = cache.lengths if cache.slots is None else cache.lengths[cache.slots]
        candidates = Candidates.empty(root, K, min(W * W, MAX_TREE - 1))
        bits = 1 << torch.arange((K - 1) * W, device=root.device).view(K - 1, W)  # of drafted rows
        ancestors = torch.zeros_like(root)[:, None].expand(B, W)
        h = state[:, None]  # (B, w, C): w is 1 at first, then W
        for depth in range(K):  # depth 0: the root's children
            normed = self.norm(h)
            logprobs, tokens = self.topk(normed, W, sampling, depth)
            if masks is not None and depth == 0:
                logprobs = logprobs.masked_fill(~is_allowed(masks, tokens), -math.inf)
            extend(logprobs.view(B, -1, W), tokens.view(B, -1, W), candidates, depth)
            if depth == K - 1:
                return candidates
            parents = candidates.parents[:, depth, :W]
            ancestors = ancestors.gather(1, parents) | bits[depth]
            g = normed if self.config.norm_output else h
            g = g.gather(1, parents[:, :, None].expand(B, W, C))
            e = self.embedding(candidates.tokens[:, depth, :W])
            rope = self.rotations[(lengths + depth)[:, None].expand(B, W)]
            h = add(*self.blocks[0](torch.cat((e, g), dim=-1), None, rope,
                                    TreeMask(ancestors, None), own, depth * W))
