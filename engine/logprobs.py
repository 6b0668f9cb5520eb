"""Log-probabilities of generated tokens: the model's own distribution, before temperature, filters
and masks, at the nodes that a step accepted. The next step overwrites their hidden states, and on a
GPU starts before the host reads this one, so their logits are computed at the end of the step."""

import torch

from engine.clock import timestamp
from generate import pinned, to_host

NODES = 64  # whose logits are in memory at once, and the most that quantised heads multiply


class LogProbs:
    """The log-probabilities of one step, for the sequences that ask.

    head: the model's. top: {row of the step: how many of the likeliest tokens}."""

    def __init__(self, head, top):
        self.head = head
        self.top = top
        self.span = None  # timestamps around the work that it adds to the step

    def read(self, normed, accepted):
        """Enqueues the log-probabilities. normed: [B, T, C]. accepted: `generate.Accepted`."""
        device = normed.device
        start = timestamp(device)
        rows = pinned([*self.top], device).to(device, non_blocking=True)
        tokens, path = accepted.tokens[rows], accepted.path[rows]  # (n, P)
        if device.type != "cuda":  # the host knows how long the paths are
            longest = int(accepted.count[rows].max())
            tokens, path = tokens[:, :longest], path[:, :longest]
        hidden = normed[rows[:, None], path].flatten(0, 1)  # (n P, C)
        parts = map(self.log_probs, hidden.split(NODES), tokens.flatten().split(NODES))
        self.columns = [to_host(torch.cat(column).unflatten(0, tokens.shape))  # (n, P, 1 or k)
                        for column in zip(*parts)]
        self.span = start, timestamp(device)

    def log_probs(self, hidden, tokens):
        """Of the tokens after these hidden states [M, C]: float32 [M, 1]; of the likeliest tokens:
        float32 and int64 [M, k]."""
        logprobs = self.head.logits(hidden).log_softmax(dim=1)
        k = min(max(self.top.values()), logprobs.shape[1])
        return logprobs.gather(1, tokens[:, None]), *logprobs.topk(k)

    def of(self, row, path):
        """[(log-probability of the token, {token: log-probability} of the likeliest)] of a row's
        accepted nodes, from a slice of its path. The step must have ended."""
        n = self.top[row]
        index = [*self.top].index(row)
        own, best, tokens = (column[index, path].tolist() for column in self.columns)
        return [(logprob, dict(zip(tokens[i][:n], best[i]))) for i, (logprob,) in enumerate(own)]
