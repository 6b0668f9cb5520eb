"""Prefix reuse for models with recurrent layers. A state cannot be cut back to a shorter prefix,
and a step in flight may have changed the last one, so two earlier ones are kept per slot."""

import torch

PROMPT = 0  # where the forward passes over the last prompt ended
SHARED = 1  # the prefix that the last prompt shared with what the slot held before


class KeptStates:
    """Two earlier states of each slot. states: the tensors of the `KVCache`'s that hold the present
    ones, each [L, slots, ...]."""

    def __init__(self, states):
        self.states = states
        self.copies = [[torch.zeros_like(x) for x in states] for _ in (PROMPT, SHARED)]
        self.lengths = [[0, 0] for _ in range(states[0].shape[1])]  # tokens of each state's prefix

    def longest(self, slot, most):
        """The length of the longest prefix with a state, of at most `most` tokens."""
        return max((n for n in self.lengths[slot] if n <= most), default=0)

    @torch.inference_mode()
    def restore(self, slot, length, shared):
        """Restores the state of a prefix; 0: none. shared: of the states of longer ones, which are
        forgotten since the next prompt has other tokens."""
        lengths = self.lengths[slot]
        if length:
            for x, kept in zip(self.states, self.copies[lengths.index(length)]):
                x[:, slot].copy_(kept[:, slot])
        self.lengths[slot] = [n if n <= shared else 0 for n in lengths]

    @torch.inference_mode()
    def keep(self, slot, kind, length):
        """Keeps the slot's present state, of this many tokens. kind: PROMPT or SHARED."""
        for x, kept in zip(self.states, self.copies[kind]):
            kept[:, slot].copy_(x[:, slot])
        self.lengths[slot][kind] = length
