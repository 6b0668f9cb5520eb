"""Grammars in a step: which tokens each sequence may go on with, and the text that it must.

A grammar (`hf.grammar.Grammar`) starts a matcher per sequence. Before a step the guide finds out
which tokens may follow the roots and which text is forced; after drafting it reads the trees, and
computes the masks of their nodes on the host while a GPU verifies them."""

from numbers import Integral

import torch

from clover import SCHEMA
from engine.acceptance import GUIDED
from engine.clock import seconds_between, timestamp
from generate import MAX_CHAIN, Sequence, as_list
from model import expect


class GuidedSequence(Sequence):
    """A `Sequence` that may also end at a text, for which it needs an encoding, and whose output
    matches a grammar, or any if that is None. It ends with "stop" where the grammar does, and with
    "error" if that got too complex, see `error`. unread: prompt tokens that the steps launched so
    far leave unread. cached: those that a slot's cache held. top_logprobs: how many of the
    likeliest tokens `logprobs` reports beside each token; None: it stays empty."""

    def __init__(self, config, prompt, max_new_tokens, sampling, stop=(), index=0, encoding=None,
                 grammar=None, top_logprobs=None):
        tokens, texts = split_stop(stop)
        super().__init__(config, prompt, max_new_tokens, sampling, tokens, index)
        expect(not texts or hasattr(encoding, "stream"), f"stop texts, {texts}, need a tokenizer; "
               "give encoding=, from hf.tokenizer.load_encoding")
        self.stream = None
        if texts:
            tools = grammar and grammar.tools
            shown = tools.tokens.values() if tools else ()
            begin = grammar and grammar.begin
            self.stream = encoding.stream([*tokens, *texts], shown, begin)
        self.pieces = []  # with stop texts, of each token: see `TextStream.piece`
        self.unread = 0
        self.cached = 0
        self.top_logprobs = top_logprobs
        self.logprobs = []  # of `tokens`: see `LogProbs.of`
        self.grammar = grammar
        self.matcher = None
        if grammar:
            self.activity = GUIDED
            self.matcher = grammar.start()
            self.stop_tokens |= set(grammar.stop)

    def take(self, tokens):
        if not self.matcher and not self.stream:
            return super().take(tokens)
        tokens = tokens[:self.limit - len(self.tokens)]
        if self.matcher:
            tokens = tokens[:self.matcher.take(tokens)]
        if self.stream:
            tokens = self.until_text(tokens)
        new = super().take(tokens)
        if self.stream and self.stream.stopped:
            self.ended = "stop"
        if self.matcher and self.matcher.ended and self.ended != "stop":
            self.ended = self.matcher.ended
            self.error = self.matcher.error
        return new

    def until_text(self, tokens):
        """The tokens up to the one that ends the output, or completes a stop text."""
        for number, token in enumerate(tokens, start=1):
            self.pieces.append(self.stream.piece(token))
            if self.stream.stopped or token in self.stop_tokens:
                return tokens[:number]
        return tokens


def split_stop(stop):
    """Token ids and strings, or a single one -> (the ids, the strings that are not empty)."""
    stop = as_list(stop)
    stop = stop if isinstance(stop, (list, tuple, set, dict)) else [stop]
    for value in stop:
        expect(isinstance(value, (Integral, str)) and not isinstance(value, bool),
               f"stop must be token ids and strings, not {value!r}")
    tokens = [int(value) for value in stop if isinstance(value, Integral)]
    return tokens, [value for value in stop if isinstance(value, str) and value]


class Guide:
    """What steps read of grammars: tensors on the host, where they are written, and on the device.
    They are allocated once, as captured graphs hold their addresses.

    forced       int64 [B, 1 + MAX_CHAIN]: as from `ngram_lookup`, with a match of SCHEMA
    first_masks  int32 [B, ceil(V / 32)]: a bit for each token that may follow a root
    masks        int32 [nodes, ceil(V / 32)]: the same for all nodes of the trees"""

    def __init__(self, decoder):
        self.device = decoder.device
        B = decoder.batch_size
        words = -(-decoder.model.config.vocab_size // 32)
        self.on_host = dict(
            forced=torch.zeros(B, 1 + MAX_CHAIN, dtype=torch.int64),
            first_masks=torch.zeros(B, words, dtype=torch.int32),
            masks=torch.zeros(B * decoder.max_tree, words, dtype=torch.int32))
        if self.device.type == "cuda":
            self.on_host = {name: x.pin_memory() for name, x in self.on_host.items()}
        self.tensors = {name: x.to(self.device) for name, x in self.on_host.items()}
        self.rows = []     # (matcher, unread prompt tokens) of each row of the step
        self.chains = []   # of each row with a matcher, the number of forced tokens
        self.pause = None  # timestamps around the wait for the last step's masks

    def begin(self, sequences, drafts):
        """Announces the sequences of the next step's rows, None for a row that only fills the
        batch. drafts: whether forced text is drafted."""
        self.rows = [(s.matcher, s.unread) if s else (None, 0) for s in sequences]
        self.chains = []
        forced, masks = (self.on_host[name].numpy() for name in ("forced", "first_masks"))
        for b, (matcher, unread) in enumerate(self.rows):
            is_ready = matcher and not unread
            chain = matcher.forced()[:MAX_CHAIN] if is_ready and drafts else ()
            forced[b, 0] = SCHEMA if chain else 0
            forced[b, 1:] = -1
            forced[b, 1:1 + len(chain)] = chain
            masks[b] = matcher.mask if is_ready else -1
            if matcher:
                self.chains.append(len(chain))
        self.to_device("forced", len(self.rows))
        self.to_device("first_masks", len(self.rows))

    def to_device(self, name, rows):
        if self.device.type == "cuda":  # else the tensors are the same
            self.tensors[name][:rows].copy_(self.on_host[name][:rows], non_blocking=True)

    def step(self, decoder, plan):
        """`Decoder.step` in three parts: the host computes the masks while a GPU verifies."""
        first_masks, forced = (self.tensors[name][:plan.B] for name in ("first_masks", "forced"))
        draft = decoder.run(decoder.draft, plan, first_masks, forced)
        self.read(draft.tree)
        normed, hidden = decoder.run(decoder.verify, plan, draft)
        self.fill_masks()
        masks = self.tensors["masks"][:draft.tree.tokens.numel()]
        accepted = decoder.run(decoder.finish, plan, draft, normed, hidden, masks)
        return accepted, draft.tree, normed

    def read(self, tree):
        """Enqueues a copy of the trees to the host."""
        self.tree = tree
        columns = tree.tokens, tree.parents, tree.ancestors
        self.columns = [x.to("cpu", non_blocking=True) for x in columns]
        self.copied = timestamp(self.device)

    def fill_masks(self):
        """Waits for the trees and computes the masks of their nodes."""
        start = timestamp(self.device)
        seconds_between(self.copied, self.copied)  # waits
        tokens, parents, ancestors = (x.tolist() for x in self.columns)
        T = len(tokens[0])
        for b, (matcher, unread) in enumerate(self.rows):
            masks = self.on_host["masks"].numpy()[b * T:(b + 1) * T]
            if unread or not matcher:
                masks[:] = -1
                if matcher and unread < T:  # that node is the prompt's last token
                    masks[unread] = matcher.mask
                continue
            n = T - ancestors[b].count(0)
            if not matcher.masks(tokens[b][:n], parents[b][:n], masks):
                self.tree.ancestors[b, 1:].zero_()  # makes the other nodes padding
        self.to_device("masks", len(tokens) * T)
        self.pause = start, timestamp(self.device)
