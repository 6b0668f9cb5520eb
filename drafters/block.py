"""Block heads: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147) and JetSpec. A few layers draft
all tokens in one pass over a block of rows, the newest token and then MASK in each:

    keys, values of committed rows: of hidden_norm(fc(states of the model side by side))
    a row of the block sees the committed rows and the whole block; in JetSpec no later rows
    logits of row k = lm_head(norm(h_k)) + w2 w1[the token before]; the bias only in DSpark

Row 0, the newest token's, predicts the next token in DSpark; elsewhere row 1 does."""

import math

import torch
import torch.nn as nn

from clover import Candidates, extend_candidates, is_allowed
from drafters.base import PublishedHeads
from engine.times import linear_weights
from kernels import gumbel, per_row
from model import MAX_TREE, Block, Blocks, KVCache, Norm, add, token_positions


class BlockHeads(PublishedHeads):
    """config: `BlockConfig`."""

    def __init__(self, config, model):
        super().__init__(config, model)
        c = config.layers
        rank = config.markov_rank
        self.draft_rows = config.first + config.n_draft  # the whole block
        self.hidden_norm = Norm("rms", c.n_embd, c.norm_eps)
        self.blocks = Blocks(Block(c, layer) for layer in range(c.n_layer))
        self.markov_w1 = nn.Embedding(c.vocab_size, rank) if rank else None
        self.markov_w2 = nn.Linear(rank, self.n_rows, bias=False) if rank else None
        self.gate = nn.Linear(c.n_embd + rank, rank) if config.markov_gated else None

    @property
    def cost(self):
        once, _ = super().cost  # one pass drafts K tokens
        bias = self.config.markov_rank * self.n_rows
        keys = sum(linear_weights(x) for x in (self.fc, *(block.attn.qkv for block in self.blocks)))
        return once // self.n_draft + bias, keys / linear_weights(self.blocks[0])

    def augment(self, hidden, tokens, positions=None, cache=None, ancestors=None, start=0):
        """Writes the keys and values of committed rows: the model's states [B, T, n C]. Returns
        None: `draft` reads only the cache. tokens: unused. The rest as in `GPT.forward`."""
        lengths = cache.lengths
        if positions is None:  # a prompt's
            positions = token_positions(hidden, start)
            lengths = torch.full_like(lengths, start)
        x = self.hidden_norm(self.fc(self.states(hidden)))
        rope = self.rotations[positions]
        for block, kv in zip(self.blocks, cache.kv):
            block.attn.split(block.attn.qkv(x), rope, KVCache(kv, lengths, cache.slots))

    def block_rows(self, root, cache):
        """The final norm's output [B, K, C] of the rows that predict. root: [B]. Writes the block's
        keys and values to the cache beyond its lengths."""
        n, first = self.draft_rows, self.config.first
        rows = torch.arange(n, device=root.device)
        tokens = root[:, None].expand(-1, n).masked_fill(rows > 0, self.config.mask_token)
        lengths = cache.lengths if cache.slots is None else cache.lengths[cache.slots]
        positions = lengths[:, None] + rows
        ancestors = (2 << rows) - 1 if self.config.causal else torch.full_like(rows, (1 << n) - 1)
        hidden, residual, _ = self.blocks(self.embedding(tokens), self.tables, positions, cache,
                                          ancestors.repeat(len(root), 1))
        return self.norm(add(hidden, residual))[:, first:]

    def bias(self, tokens, normed):
        """DSpark's bias, float32 [B, w, rows of the LM head]. tokens [B, w]: before those that a
        row predicts; normed [B, C]: of the row."""
        e = self.markov_w1(tokens)
        if self.gate is not None:
            states = normed[:, None].expand(-1, tokens.shape[1], -1)
            e = self.gate(torch.cat((states, e), dim=-1)).sigmoid() * e
        return self.markov_w2(e).float()

    @torch.no_grad()
    def draft(self, state, root, K, W, sampling=None, masks=None,
              extend=extend_candidates, cache=None):
        """`CloverHeads.draft`; state is not read. Without a bias all beams propose the same."""
        B = len(root)
        candidates = Candidates.empty(root, K, min(W * W, MAX_TREE - 1))
        normed = self.block_rows(root, cache)[:, :K]
        if self.markov_w1 is None:
            depths = torch.arange(K, device=root.device)
            rows = [x.view(B, K, 1, W) for x in self.topk(normed, W, sampling, depths)]
        else:
            logits = self.lm_head.logits(normed.flatten(0, 1)).view(B, K, 1, -1)
            ids = self.vocabulary
            if ids is None:
                ids = torch.arange(self.n_rows, dtype=torch.int32, device=root.device)
        tokens = root[:, None]
        for depth in range(K):  # depth 0: the root's children
            if self.markov_w1 is None:
                logprobs, proposed = (x[:, depth] for x in rows)
            else:
                biased = logits[:, depth] + self.bias(tokens, normed[:, depth])
                logprobs, proposed = best_tokens(biased, W, ids, sampling, depth)
            if masks is not None and depth == 0:
                is_next = is_allowed(masks, proposed[:, 0])[:, None]
                logprobs = logprobs.masked_fill(~is_next, -math.inf)
            extend(logprobs, proposed, candidates, depth)
            tokens = candidates.tokens[:, depth, :W]
        return candidates


def best_tokens(logits, k, ids, sampling, depth):
    """`PublishedHeads.topk` from logits [B, w, n] of tokens ids [n] -> logprobs, tokens [B, w, k].
    The sort of `kernels.best_tokens`, which settles ties, would take longer than the layers."""
    if sampling:
        temperature, seed, sequence, positions = sampling
        noise = gumbel(seed, sequence, positions + depth + 1, ids)
        logits = logits + (per_row(temperature, noise) * noise)[:, None]
    values, columns = logits.topk(k)
    return values - logits.logsumexp(-1, keepdim=True), ids[columns].long()
