"""Draft heads and token trees. Four presets of one class: medusa (arXiv 2401.10774), hydra (arXiv
2402.05109), clover (arXiv 2405.00263) and clover2 (arXiv 2408.00264).

Letters: B sequences, T tree nodes (root included) or tokens, K draft heads, W beams, n candidates
per depth, C hidden size, V vocabulary."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save

from kernels import add_norm, cosine_mix
from model import MAX_TREE, Block, Blocks, Norm, check, expect, replace_file, token_positions

DEFAULT_BEAMS = 4  # W
MAX_BEAMS = 32    # the largest k of project_topk
MAX_DRAFT = 32    # draft heads, or augmenting layers: more than are useful, few enough to build
MATCHED_FIELDS = "vocab_size", "n_embd", "n_layer", "n_head", "n_kv_head", "head_size", "n_inner"


@dataclass
class CloverConfig:
    preset: str = "clover"
    n_draft: int = 4            # K, draft heads
    augment_layers: int = 1     # transformer blocks between the model's hidden state and the heads
    mix: str = "attention"      # how heads read the previous token: "attention", "concat", "none"
    mix_before: bool = False    # also mix in the next token before the augmenting block
    projector: str = "res"      # "res": z + SiLU(W z + b); "linear": W [z, e] + b
    shared: bool = False        # the first head has its own weights, the others share one set
    vocabulary: int = 0         # draft vocabulary size (FR-Spec, arXiv 2502.14856); 0: all tokens

    def check(self):
        """Returns self. Raises InputError for a size out of range or an unknown name."""
        check("draft heads", self.n_draft, 1, MAX_DRAFT, whole=True)
        check("augment layers", self.augment_layers, 0, MAX_DRAFT, whole=True)
        known = dict(preset=PRESETS, mix=(*MIXERS, "none"), projector=PROJECTORS)
        for field, names in known.items():
            expect(getattr(self, field) in [*names], f"{field} {getattr(self, field)!r} is not "
                   f"supported; supported: {', '.join(names)}")
        return self


PRESETS = {
    "medusa": CloverConfig("medusa", augment_layers=0, mix="none"),
    "hydra": CloverConfig("hydra", augment_layers=0, mix="concat"),
    "clover": CloverConfig("clover"),
    "clover2": CloverConfig("clover2", augment_layers=2, mix_before=True, projector="linear",
                            shared=True),
}


def preset(name, **switches):
    """The CloverConfig of a preset. switches: fields to replace, for ablations; None: keep."""
    switches = {key: value for key, value in switches.items() if value is not None}
    return replace(PRESETS.get(name, CloverConfig(name)), **switches).check()


# --------------------------------------------------------------------------------------------------
# Modules. z: a state [..., C]. e: the embedding [..., C] of a token, which is its LM head row.

def zero_linear(n_in, n_out):
    linear = nn.Linear(n_in, n_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class AttentionDecoder(nn.Module):
    """Regressive Connection by attention (arXiv 2405.00263): z + cos(Wq norm(z), Wk e) * (Wv e),
    per attention head. With a single key a softmax would always be 1, hence the cosine. As in the
    paper, Wv starts near 0, Wq and Wk near the identity, so z hardly changes at first."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = math.gcd(config.n_head, C)  # as in the model, if that divides C
        self.norm = Norm(config.norm, C, config.norm_eps)
        self.query = nn.Linear(C, C)
        self.key_value = nn.Linear(C, 2 * C)
        with torch.no_grad():
            self.query.weight.uniform_(0, 0.01).diagonal().add_(1)
            self.key_value.weight.uniform_(0, 0.01)[:C].diagonal().add_(1)
            self.query.bias.zero_()
            self.key_value.bias.zero_()

    def forward(self, z, e):  # each [..., C] -> [..., C]
        q = self.query(self.norm(z))  # (..., C)
        kv = self.key_value(e)        # (..., 2 C): keys, then values
        return cosine_mix(z, q.to(z.dtype), kv.to(z.dtype), self.n_head)  # cast: for autocast


class Concat(nn.Module):
    """Regressive Connection by concatenation (Hydra, arXiv 2402.05109): z + W [norm(z), e] + b.
    Initialised to return z."""

    def __init__(self, config):
        super().__init__()
        self.norm = Norm(config.norm, config.n_embd, config.norm_eps)
        self.linear = zero_linear(2 * config.n_embd, config.n_embd)

    def forward(self, z, e):
        return z + self.linear(torch.cat((self.norm(z), e), dim=-1))


class ResBlock(nn.Module):
    """z + SiLU(W z + b) (Medusa, arXiv 2401.10774, section 2.1.1), as two terms. Initially z."""

    def __init__(self, config):
        super().__init__()
        self.linear = zero_linear(config.n_embd, config.n_embd)

    def forward(self, z, e):
        return F.silu(self.linear(z)), z


class Projector(nn.Module):
    """W [z, e] + b (Clover-2, arXiv 2408.00264). Initialised to return z."""

    def __init__(self, config):
        super().__init__()
        self.linear = zero_linear(2 * config.n_embd, config.n_embd)
        with torch.no_grad():
            self.linear.weight.diagonal().fill_(1)

    def forward(self, z, e):
        return self.linear(torch.cat((z, e), dim=-1)), None


MIXERS = {"attention": AttentionDecoder, "concat": Concat}
PROJECTORS = {"res": ResBlock, "linear": Projector}


class Head(nn.Module):
    """One draft head: state and the previous token's embedding e -> (next state, output, residual
    or None). The final norm reads output + residual."""

    def __init__(self, config, base):
        super().__init__()
        self.mix = MIXERS[config.mix](base) if config.mix != "none" else None
        self.project = PROJECTORS[config.projector](base)

    def forward(self, state, e):
        if self.mix is not None:
            state = self.mix(state, e)
        return state, *self.project(state, e)


# --------------------------------------------------------------------------------------------------
# The tree
#
# Every drafter proposes nodes with an acceptance probability p. The tree is the T - 1 likeliest:
#
#   heads      p = a + (b - a) * (x - i), x = -4 * joint log-probability of the path, i = floor(x),
#              a = chances[s, i], b = chances[s, i + 1]; s is 1 if temperature > 0, else 0
#   a chain    p of the j-th token = chances[s, BINS + match] ** j
#
# Ties go to the shallower node, then to the lower token, then to the earlier candidate. Parents
# come first, since p falls along a path: a joint log-probability is at most its parent's, and a
# running minimum makes the chances fall along the bins.

BINS = 41  # of joint log-probability, a quarter nat each; the last one holds all from -10 down
SCHEMA = 5  # in the place of a match length: the chain is text that a guide forces
SOURCES = BINS + SCHEMA + 1  # bins, the match lengths 0 to 4, and SCHEMA


class Tree(NamedTuple):
    """Draft trees of B sequences: node 0 is the root, parents come before children, children of one
    parent have different tokens. All [B, T], int64 or as noted; padding is 0 in all but sources."""
    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor      # bitmasks; 0 for padding, where a tree has fewer than T nodes
    sources: torch.Tensor        # a bin, BINS + match of a chain; -1 for the root and padding
    probabilities: torch.Tensor  # float32: acceptance probabilities


class Candidates(NamedTuple):
    """The n best proposals of the heads at each depth, [B, K, n]; unused ones are -inf, 0, -1. n
    does not depend on the tree's size, so a smaller tree is the front of a larger one."""
    joint: torch.Tensor    # float32: log-probability of the path from the root
    tokens: torch.Tensor   # int64
    parents: torch.Tensor  # int64: the beam that proposed it, an index into the previous depth

    @classmethod
    def empty(cls, root, K, n):
        """Uninitialised memory for `extend_candidates`. root: [B]."""
        dtypes = torch.float32, torch.int64, torch.int64
        return cls(*(root.new_empty(len(root), K, n, dtype=dtype) for dtype in dtypes))


def extend_candidates(logprobs, tokens, candidates, depth):
    """Fills [:, depth] of `Candidates` with the best proposals (after EAGLE-2, arXiv 2406.16858).
    logprobs, tokens [B, w, W]: the W best next tokens of w beams; a logprob above 0 counts as 0,
    NaN as -inf. Beams: the first W candidates of the previous depth; w = 1 for the root, and where
    heads read no tokens. Ties go to the lower token, then to the child of the better beam."""
    W = logprobs.shape[2]
    joint = logprobs.clamp(max=0).nan_to_num_(nan=-math.inf, neginf=-math.inf)
    if depth:
        joint = candidates.joint[:, depth - 1, :W, None] + joint  # (B, W, W)
    tokens = tokens.expand_as(joint).flatten(1)
    joint = joint.flatten(1)
    order = tokens.argsort(dim=1, stable=True)
    order = sort_stably(order, joint, descending=True)[:, :candidates.joint.shape[2]]
    selected = joint.gather(1, order), tokens.gather(1, order), order // W
    for out, values, none in zip(candidates, selected, (-math.inf, 0, -1)):
        out[:, depth, :order.shape[1]] = values
        out[:, depth, order.shape[1]:].fill_(none)


def sort_stably(order, key, descending=False):
    """Columns [B, n] sorted by their key [B, N]; those of equal keys stay in order."""
    return order.gather(1, key.gather(1, order).argsort(dim=1, descending=descending, stable=True))


def root_tree(root):
    """The trees of plain decoding: only the roots [B]."""
    tokens = root[:, None]
    zeros = torch.zeros_like(tokens)
    return Tree(tokens, zeros, zeros, zeros + 1, zeros - 1, torch.ones_like(tokens).float())


def build_tree(root, candidates, chain, chances, temperature, tree_size):
    """The `Tree` of the tree_size - 1 likeliest candidates. root: [B]. candidates: `Candidates`,
    chain: int64 [B, 1 + n], from `generate.ngram_lookup`, or a match of SCHEMA and tokens up to the
    first -1; one may be None. chances: [2, SOURCES]. temperature: [B]."""
    chances = chances.nan_to_num(0.0).clamp(0, 1)[(temperature > 0).long()]  # (B, SOURCES)
    # a pool [B, N] is a `Tree` in any order, with depths in place of ancestors; p = -1: no node
    pool = root_tree(root)
    K = 0
    if candidates is not None:
        pool = join(pool, head_nodes(candidates, chances))
        K = candidates.tokens.shape[1]
    if chain is not None:
        pool = add_chain(pool, chain, chances, K)
    return likeliest(pool, tree_size)


def join(pool, other):
    return Tree(*(torch.cat(columns, dim=1) for columns in zip(pool, other)))


def head_nodes(candidates, chances):
    """The nodes that the heads propose, a pool [B, K n]. chances: [B, SOURCES]."""
    joint, tokens, beams = (x.flatten(1) for x in candidates)  # (B, K n)
    K, n = candidates.joint.shape[1:]
    x = (-4 * joint).clamp(0, BINS - 1)
    low = x.long().clamp(max=BINS - 2)
    falling = chances[:, :BINS].cummin(1).values
    a, b = (falling.gather(1, low + i) for i in (0, 1))
    p = torch.maximum(a + (b - a) * (x - low), b)
    depths = (torch.arange(n, n + K * n, device=x.device) // n).expand_as(beams)
    parents = (1 + (depths - 2) * n + beams).clamp(min=0)  # depth d begins at column 1 + (d - 1) n
    p = p.where(joint > -math.inf, -1)  # others are unused, or forbidden by a mask
    return Tree(tokens, parents, depths, depths, x.long(), p)


# How a chain joins the heads' nodes, here of two heads with n = 2 and the chain b, d, e:
#
#   root ─┬─ a                column         0     1   2   3   4   5   6   7
#         └─ b ─┬─ c          token          root  a   b   c   d   b   d   e
#               └─ d ── e     parent         0     0   0   2   2   -   -   4
#                             probability    1    .3  .5  .2  .4  -1  -1  .3
#
# Columns 5 to 7 are the chain's: b and d are already columns 2 and 4, only e is new.

def add_chain(pool, chain, chances, K):
    """Adds a chain's n nodes to a pool [B, N] of nodes that are at most K deep. Where the heads
    proposed the same token under the same parent, it is one node, with the larger probability.
    chances: [B, SOURCES]."""
    match, guesses = chain.split((1, chain.shape[1] - 1), dim=1)
    n, N = guesses.shape[1], pool.tokens.shape[1]
    source = BINS + match
    powers = [chances.gather(1, source)]
    for _ in range(n - 1):
        powers.append(powers[-1] * powers[0])
    is_node = ((guesses >= 0) & (match > 0)).cumprod(1) > 0
    guesses, p = (x.where(is_node, -1) for x in (guesses, torch.cat(powers, dim=1)))  # (B, n)
    last = column = torch.zeros_like(match)  # depth and column of the deepest shared node, (B, 1)
    is_candidate = (pool.depths > 0) & (pool.probabilities >= 0)
    for depth in range(1, min(K, n) + 1):
        token, power = (x[:, depth - 1:depth] for x in (guesses, p))
        same = (pool.parents == column) & (pool.tokens == token) & is_candidate  # (B, N)
        same = same & (last == depth - 1)
        better = same & (power > pool.probabilities)
        pool = pool._replace(sources=source.where(better, pool.sources),
                             probabilities=power.where(better, pool.probabilities))
        is_shared = same.any(dim=1, keepdim=True)
        last = last + is_shared
        column = same.long().argmax(dim=1, keepdim=True).where(is_shared, column)
    step = torch.arange(1, n + 1, device=p.device).expand_as(guesses)
    parents = torch.where(step == last + 1, column, N + step - 2)
    return join(pool, Tree(guesses, parents, step, step, source.expand_as(guesses),
                           p.where(step > last, -1)))


def ancestors_of(parents):
    """The bitmasks of a `Tree` from its parents, int64 [B, T]; the root's is the root."""
    T = parents.shape[1]
    masks = (1 << torch.arange(T, device=parents.device)).expand_as(parents)  # of the nodes alone
    for _ in range((T - 1).bit_length()):  # each round doubles the number of ancestors
        masks = masks | masks.gather(1, parents)
        parents = parents.gather(1, parents)
    return masks


def likeliest(pool, tree_size):
    """The `Tree` of the tree_size nodes of a pool [B, N] with the largest probabilities."""
    missing = tree_size - pool.tokens.shape[1]
    if missing > 0:
        pool = Tree(*(F.pad(x, (0, missing), value=-1) for x in pool))
    order = sort_stably(pool.tokens.argsort(dim=1, stable=True), pool.depths)
    order = sort_stably(order, pool.probabilities, descending=True)  # (B, N): columns, best first
    tokens, parents, depths = (x.gather(1, order[:, :tree_size]) for x in pool[:3])  # (B, T)
    sources, p = (x.gather(1, order[:, :tree_size]) for x in pool[4:])
    used = p >= 0
    parents = order.argsort(1).gather(1, parents.clamp(min=0)) * used  # columns -> nodes
    return Tree(tokens * used, parents, depths * used, ancestors_of(parents) * used,
                sources.where(used, -1), p.clamp(min=0))


# --------------------------------------------------------------------------------------------------
# The heads
#
# `Decoder` runs any that have info, hash, new_cache, augment and draft of `CloverHeads`, and
#   n_draft, max_beams   the largest K and W
#   hidden_layers        which states they read, as `layers` of `GPT.forward`; (): the last
#   draft_rows           how many rows of their cache `draft` may write after the committed ones

def is_allowed(masks, tokens):
    """Whether masks, int32 [B, ceil(V / 32)] with a bit for each token, allow tokens [B, n]."""
    return masks.gather(1, tokens.clamp(min=0) // 32) >> (tokens % 32).int() & 1 != 0


class DraftHeads(nn.ModuleList):
    """The draft heads of a `CloverHeads`: one per depth, or with shared weights the first and one
    for all other depths. A backend may replace this with its own class."""


class CloverHeads(nn.Module):
    """K draft heads on a frozen `GPT`, whose weights are not part of this module.

    States and embeddings are scaled to a root mean square of 1 before the heads read them, since
    large hidden states would swamp the embeddings. The final norm, before the LM head, does not
    depend on that scale."""
    hidden_layers = ()
    draft_rows = 0

    def __init__(self, config, model):
        super().__init__()
        object.__setattr__(self, "model", model)  # nn.Module's would register it as a submodule
        self.config = config
        self.n_draft = config.n_draft
        self.info = {}    # heads.json
        self.hash = None  # 16 hex digits of the file of weights, if `hf.heads` has loaded them
        base = model.config
        n_weights = min(config.n_draft, 2) if config.shared else config.n_draft
        self.heads = DraftHeads(Head(config, base) for _ in range(n_weights))
        mixes_before = config.mix_before and config.mix != "none"
        self.mix_in = MIXERS[config.mix](base) if mixes_before else None
        self.augment_blocks = Blocks(Block(base, model.blocks.last_attention)
                                     for _ in range(config.augment_layers))
        if not next(self.parameters()).is_meta:  # on meta: weights and scale come from a folder
            self.embedding_scale = unit_scale(model)
            if self.augment_blocks:
                state = model.blocks.last_state()
                for block in self.augment_blocks:
                    block.load_state_dict(state)
        # draft vocabulary: int32 token ids, most frequent first; None: all tokens
        ids = torch.arange(config.vocabulary, dtype=torch.int32) if config.vocabulary else None
        self.register_buffer("vocabulary", ids)
        self.selected = []  # (vocabulary, its LM head); captured steps may read the earlier ones

    def set_vocabulary(self, tokens):
        """Sets the draft vocabulary: token ids [n], most frequent first; an empty list for all
        tokens. Raises InputError for an id that is out of range or repeated."""
        V = self.model.config.vocab_size
        tokens = torch.as_tensor(tokens, dtype=torch.int64, device=self.model.device)
        is_valid = (tokens >= 0) & (tokens < V)
        expect(is_valid.all() and len(tokens.unique()) == len(tokens),
               f"a draft vocabulary has token ids outside 0..{V - 1}, or one twice; list each once")
        self.config = replace(self.config, vocabulary=len(tokens))
        self.vocabulary = tokens.int() if len(tokens) else None

    @property
    def lm_head(self):
        """The model's LM head, or a copy of the draft vocabulary's rows, which is faster."""
        if self.vocabulary is None:
            return self.model.head
        if not self.selected or self.selected[-1][0] is not self.vocabulary:
            self.selected.append((self.vocabulary, self.model.head.select(self.vocabulary)))
        return self.selected[-1][1]

    @property
    def reads_tokens(self):
        """Whether heads read the previous token. If not (Medusa), all beams share one pass."""
        return self.config.mix != "none" or self.config.projector == "linear"

    @property
    def max_beams(self):
        """The largest W, at most the draft vocabulary's size."""
        return min(MAX_BEAMS, self.config.vocabulary or self.model.config.vocab_size)

    def draft_head(self, i):
        """Head i, counted from 0. With shared weights, all but the first are one module."""
        return self.heads[min(i, len(self.heads) - 1)]

    def embedding(self, tokens):
        """tokens [...] -> their LM head rows [..., C], scaled to a root mean square of 1."""
        base = self.model
        rows = base.embed if base.config.tied else base.head.embedding
        return rows(tokens).to(base.dtype) * self.embedding_scale

    def new_cache(self, batch, capacity, device=None):
        """A `KVCache` for the augmenting block. device: as in `GPT.new_cache`."""
        return self.model.new_cache(batch, capacity, self.augment_blocks, device)

    def augment(self, hidden, tokens, positions=None, cache=None, ancestors=None, start=0,
                documents=None):
        """The Augmenting Block (arXiv 2405.00263): the model's hidden [B, T, C] and the next tokens
        [B, T] -> the states [B, T, C] that the first head reads, with a root mean square of 1. The
        rest as in `GPT.forward`. Other heads may return None: then `draft` gets no new state."""
        if positions is None:
            positions = token_positions(hidden, start, documents)
        if self.mix_in is not None:
            hidden = self.mix_in(hidden, self.embedding(tokens).to(hidden.dtype))
        residual = None
        if self.augment_blocks:
            hidden, residual, _ = self.augment_blocks(hidden, self.model.tables, positions, cache,
                                                      ancestors, start, documents)
        eps = torch.finfo(torch.float32).eps  # F.rms_norm's default
        if residual is None:
            return add_norm(hidden, None, None, eps=eps)[0]
        return add_norm(residual, hidden.to(residual.dtype), None, eps=eps)[0]

    def forward(self, hidden, tokens, documents=None):
        """Teacher forcing. hidden [B, T, C] at positions 0..T-1, tokens [B, T + K] at positions
        1..T+K, documents [B, T] as in `GPT.forward` -> K outputs [B, T, C]: at position t, head i
        (from 0) predicts the token at t + 2 + i."""
        T = hidden.shape[1]
        state = self.augment(hidden, tokens[:, :T], documents=documents)
        outputs = []
        for i in range(self.config.n_draft):
            e = self.embedding(tokens[:, i:i + T]).to(state.dtype)
            state, out, residual = self.draft_head(i)(state, e)
            outputs.append(out if residual is None else residual + out)
        return outputs

    @torch.no_grad()
    def draft(self, state, root, K, W, sampling=None, masks=None,
              extend=extend_candidates, cache=None):
        """Beam search (arXiv 2406.16858, section 4): at each depth, the W candidates of highest
        joint log-probability propose their W best tokens. A child's joint probability never exceeds
        its parent's, so the best candidates are a tree.

        state [B, C] at the last committed position, root [B] -> `Candidates` by the first K heads.
        sampling: (temperature, seed, sequence, position) of the roots, each [B]. Where the
        temperature is above 0, the sampler's noise is added to the logits. masks: of the tokens
        that may follow the roots, as in `is_allowed`; others are no nodes. extend: a backend's
        `extend_candidates`. cache: the heads' own, which these do not read."""
        B, C = state.shape
        candidates = Candidates.empty(root, K, min(W * W, MAX_TREE - 1))
        noise = None
        if sampling:
            steps = torch.arange(1, K + 1, device=root.device).view(K, 1, 1)
            positions = sampling[3][:, None] + steps.expand(K, 1, W)  # (K, B, W), of the guesses
        states = state[:, None]  # (B, w, C): w is 1 at first, then W if heads read tokens
        guessed = root[:, None]  # (B, w)
        for depth in range(K):  # of the nodes' parents
            embedding = self.embedding(guessed) if self.reads_tokens else None
            states, *out = self.draft_head(depth)(states, embedding)
            out, _ = self.model.norm.add_and_norm(*out)  # (B, w, C)
            if sampling:
                noise = *sampling[:3], positions[depth, :, :out.shape[1]].reshape(-1)
            logprobs, tokens = self.lm_head.topk(out.flatten(0, 1), W, self.vocabulary, noise)
            if masks is not None and depth == 0:
                logprobs = logprobs.masked_fill(~is_allowed(masks, tokens), -math.inf)
            extend(logprobs.view(B, -1, W), tokens.view(B, -1, W), candidates, depth)
            guessed = candidates.tokens[:, depth, :W]  # the beams
            if self.reads_tokens and depth < K - 1:
                beam = candidates.parents[:, depth, :W, None].expand(B, W, C)
                states = states.gather(1, beam)
        return candidates

    # ----------------------------------------------------------------------------------------------
    # Files

    def save_pretrained(self, path, tokenizer="", dtype=None, **info):
        """Writes heads.safetensors, its matrices in dtype if given, such as float8_e4m3fn, and
        heads.json: config, the model's sizes, `norm_hash` and tokenizer's hash, and info (training,
        accuracy)."""
        Path(path).mkdir(parents=True, exist_ok=True)
        cast = lambda x: x.to(dtype) if dtype and x.dim() > 1 else x
        tensors = {name: cast(x).cpu().contiguous() for name, x in self.state_dict().items()}
        replace_file(Path(path, "heads.safetensors"), lambda tmp: tmp.write_bytes(save(tensors)))
        self.save_record(path, tokenizer, **info)

    def save_record(self, path, tokenizer="", **info):
        """Writes heads.json only."""
        base = dict(sizes=sizes_of(self.model), tokenizer=tokenizer, norm=norm_hash(self.model),
                    embedding_scale=self.embedding_scale)
        record = json.dumps(dict(config=asdict(self.config), base=base, **info), indent=2) + "\n"
        replace_file(Path(path, "heads.json"), lambda tmp: tmp.write_text(record))

    @classmethod
    def from_pretrained(cls, path, model, tokenizer="", packed=True):
        """Loads heads in the model's dtype, on its device; packed, if the model is, unless they are
        to be trained. Raises InputError for heads of other sizes or another tokenizer;
        `hf.heads.load_heads` also for a folder that is missing or broken."""
        record = json.loads(Path(path, "heads.json").read_bytes())
        theirs = record["base"]
        sizes = sizes_of(model)
        expect(theirs["sizes"] == sizes, f"{path}: these heads belong to another model (of "
               f"{theirs['sizes']}, not {sizes}); train heads for this one with train_heads.py")
        expect(not tokenizer or theirs["tokenizer"] in ("", tokenizer), f"{path}: these heads were "
               "trained with another tokenizer; use the one from their model's folder")
        config = CloverConfig(**record["config"]).check()
        with torch.device("meta"):  # without memory and random numbers: weights follow
            heads = cls(config, model)
        heads.load_state_dict(load_file(Path(path, "heads.safetensors")), assign=True)
        heads.info = record
        heads.embedding_scale = theirs["embedding_scale"]
        heads.set_vocabulary(heads.vocabulary if config.vocabulary else [])
        heads.to(device=model.device, dtype=model.dtype).requires_grad_(False).eval()
        if packed:
            model.blocks.prepare(heads)
        return heads


def unit_scale(model):
    """1 / root mean square of the LM head's weights."""
    V, C = model.config.vocab_size, model.config.n_embd
    squares = 0
    for tokens in torch.arange(V, device=model.device).split(4096):  # bounds the memory
        squares += model.head.embedding(tokens).float().pow(2).sum(dtype=torch.float64)
    return (V * C / squares.item()) ** 0.5


def norm_hash(model):
    """16 hex digits that tell a model from others of its sizes, in all its formats: a hash of the
    final norm's weight, which is not quantised, in bfloat16."""
    weight = model.norm.weight.detach().to("cpu", torch.bfloat16)
    return hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def sizes_of(model):
    """The sizes of a model that heads must match. All its quantisations have the same."""
    return {name: getattr(model.config, name) for name in MATCHED_FIELDS}
