"""MTP heads (multi-token prediction, arXiv 2412.19437, section 2.2), which Qwen 3.5 and later have
in their own files: a layer like those of the model drafts token by token. It reads the model's
output g, and in drafted rows its own for the row before:

    g = the model's final norm in committed rows, then norm(h) of the parent
    h = Block(fc([embed_norm(E[next token]), state_norm(g)]))
    logits = lm_head(norm(h))

So they are EAGLE-3's beam search with another layer, and the LM head is the model's."""

import torch
import torch.nn as nn

from drafters.eagle3 import DraftAttention, Eagle3Heads
from model import Block, Norm

DEPTH = 3            # K
VOCABULARY = 32_768  # tokens that are drafted, where the model has more than twice as many


class Layer(Block):
    """The layer, called with hidden [B, T, 2 C] as `eagle3.Layer`."""

    def __init__(self, config):
        c = config.layers
        super().__init__(c, 0)
        self.attn = DraftAttention(c, 0)
        self.embed_norm = Norm("rms", c.n_embd, c.norm_eps)
        self.state_norm = Norm("rms", c.n_embd, c.norm_eps)
        self.fc = nn.Linear(2 * c.n_embd, c.n_embd, bias=False)

    def forward(self, hidden, residual, rope, mask, cache=None, first=0):
        e, g = hidden.chunk(2, dim=-1)
        hidden = self.fc(torch.cat((self.embed_norm(e), self.state_norm(g)), dim=-1))
        qkv = self.attn.qkv(self.attn_norm(hidden))
        y = self.attn.proj(self.attn.attend(qkv, rope, mask, cache, first))
        hidden, residual = self.mlp_norm.add_and_norm(y, hidden)
        return self.mlp(hidden), residual


class MTPHeads(Eagle3Heads):
    """config: an `Eagle3Config` without hidden_layers and with norm_output."""
    layer = Layer

    def place(self):
        """As `PublishedHeads.place`. Of a large vocabulary, only the lowest ids are drafted: BPE
        numbers tokens as it merges them, the most frequent ones first."""
        super().place()
        if self.n_rows > 2 * VOCABULARY:
            self.n_rows = VOCABULARY
            self.head = self.lm_head.select(torch.arange(VOCABULARY, device=self.model.device))
        return self

    def g(self, hidden):
        return self.model.norm(hidden)
