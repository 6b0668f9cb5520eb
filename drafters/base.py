"""What published draft heads share: they read states of several of the model's layers, their own
layers have their own sizes, norms and RoPE, and they may have their own embeddings and LM head."""

from dataclasses import dataclass

import torch
import torch.nn as nn

from clover import MAX_BEAMS
from engine.times import linear_weights
from model import FIRST_POSITIONS, MAX_TREE, GPTConfig, LMHead, Norm, rope_table


@dataclass
class PublishedConfig:
    layers: GPTConfig         # of the heads' own layers; block_size is the model's
    n_draft: int              # K
    hidden_layers: tuple      # states that they read, as `layers` of `GPT.forward`; (): the last
    vocabulary: int = 0       # draft vocabulary size; 0: all tokens
    own_embed: bool = False   # whether they have embeddings of their own
    own_head: bool = False    # whether they have an LM head of their own


@dataclass
class Eagle3Config(PublishedConfig):
    norm_before_residual: bool = False  # the residual is the normalised state
    norm_before_fc: bool = False        # a norm over the states side by side
    fc_norm: bool = False               # a norm of each state
    norm_output: bool = False           # the next row reads the normalised output


@dataclass
class BlockConfig(PublishedConfig):
    mask_token: int = 0       # id of MASK
    first: int = 1            # the row of the first prediction: 0 the newest token's, 1 MASK's
    causal: bool = False      # rows of the block see only earlier rows of it
    markov_rank: int = 0      # DSpark: logits += w2 w1[previous token], of this rank; 0: none
    markov_gated: bool = False


class PublishedHeads(nn.Module):
    """The base class. A subclass has `blocks`, which use the heads' cache, `draft_rows`, and
    `augment` and `draft` of `CloverHeads`. Its weights are loaded or set before `place`."""

    def __init__(self, config, model):
        super().__init__()
        object.__setattr__(self, "model", model)  # nn.Module's would register it as a submodule
        self.config = config
        self.info = {}
        self.hash = None  # as of `CloverHeads`
        self.n_draft = config.n_draft
        self.hidden_layers = config.hidden_layers
        C = config.layers.n_embd
        self.n_rows = config.vocabulary or config.layers.vocab_size  # of the LM head
        self.max_beams = min(MAX_BEAMS, self.n_rows)
        n_states = len(config.hidden_layers)
        self.fc = nn.Linear(n_states * C, C, bias=False) if n_states else None
        self.norm = Norm("rms", C, config.layers.norm_eps)
        self.embed = nn.Embedding(config.layers.vocab_size, C) if config.own_embed else None
        self.head = LMHead(C, self.n_rows, bias=False) if config.own_head else None
        ids = torch.arange(self.n_rows, dtype=torch.int32) if config.vocabulary else None
        self.register_buffer("vocabulary", ids)  # tokens of the LM head's rows; None: all

    def place(self):
        """Moves the weights to the model's device and dtype, applies its backend, and returns the
        heads, ready to draft."""
        base = self.model
        self.to(device=base.device, dtype=base.dtype).requires_grad_(False).eval()
        self.register_buffer("rotations", None, persistent=False)
        self.outgrown = []  # shorter tables, which captured steps may still read
        self.reserve(FIRST_POSITIONS)
        base.blocks.prepare(self)
        return self

    @property
    def tables(self):
        return self.rotations, None, None  # as `GPT.tables`

    @property
    def lm_head(self):
        return self.model.head if self.head is None else self.head

    @property
    def cost(self):
        weights = self.n_rows * self.config.layers.n_embd + linear_weights(self.blocks)
        return weights, len(self.blocks)

    def states(self, hidden):
        """The model's states as its authors compute them: see `GPTConfig.stream_scale`."""
        scale = self.model.config.stream_scale
        return hidden if scale == 1 else hidden * scale

    def embedding(self, tokens):
        """tokens [...] -> [..., C]"""
        return (self.model.embed if self.embed is None else self.embed)(tokens)

    def topk(self, normed, k, sampling, depth):
        """`LMHead.topk` of the final norm's output [B, w, C], for tokens depth + 1 places after the
        roots. depth: of all, or a tensor [w]. sampling: as in `CloverHeads.draft`."""
        noise = None
        if sampling:
            positions = sampling[3][:, None] + depth + 1
            noise = *sampling[:3], positions.expand(-1, normed.shape[1]).flatten()
        return self.lm_head.topk(normed.flatten(0, 1), k, self.vocabulary, noise)

    def reserve(self, positions):
        """As `GPT.reserve`."""
        rows = 0 if self.rotations is None else len(self.rotations)
        full = self.config.layers.block_size + MAX_TREE
        if rows < min(positions, full):
            self.outgrown.append(self.rotations)
            self.rotations = rope_table(self.config.layers, min(max(positions, 2 * rows), full),
                                        self.model.dtype, self.model.device)

    def new_cache(self, batch, capacity, device=None):
        if device is None:
            self.reserve(capacity)
        return self.model.new_cache(batch, capacity, self.blocks, device)
