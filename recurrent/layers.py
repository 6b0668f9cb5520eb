"""Gated delta layers (arXiv 2412.06464), the mixers of Qwen 3.5's recurrent blocks: `DeltaConfig`
in `GPTConfig.mixers` makes them. A prompt is read in chunks, and its pass changes the state; a
draft tree is verified by `delta.tree_delta`, and `DeltaStates.commit` applies the accepted path.

Letters: as in delta.py; L gated delta layers."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import Norm, TreeMask, token_positions
from recurrent.delta import commit_delta, gates, tree_conv, tree_delta, unit

CHUNK = 64  # tokens of a prompt between two states


@dataclass(frozen=True)
class DeltaConfig:
    """The sizes of gated delta layers. Called by `Block` to make one."""
    n_head: int       # H, value heads
    n_key_head: int   # Hk; value head h reads key head h % Hk
    key_size: int     # Dk
    value_size: int   # Dv
    window: int = 4   # n, inputs that the convolution reads

    def __call__(self, config, layer):
        return GatedDelta(config, self)

    @property
    def parts(self):
        """Channels of queries, keys and values, which the convolution reads."""
        keys = self.n_key_head * self.key_size
        return keys, keys, self.n_head * self.value_size


class DeltaStates(NamedTuple):
    """The states of L layers, one per slot, and what `commit_delta` reads of the last tree in each
    row of a step's batch. Captured steps hold the addresses."""
    state: torch.Tensor    # float32 [L, slots, H, Dk, Dv]
    history: torch.Tensor  # [L, slots, n - 1, C]: the convolution's last inputs
    inputs: torch.Tensor   # [L, R, N, C]
    keys: torch.Tensor     # [L, R, N, Hk, Dk]
    u: torch.Tensor        # float32 [L, R, N, H, Dv]
    G: torch.Tensor        # float32 [L, R, N, H]

    def one(self, slot):
        """A view of one sequence."""
        return DeltaStates(*(x[:, slot:slot + 1] for x in self))

    def layers(self):
        """The states of each layer, without the first dimension."""
        return [DeltaStates(*tensors) for tensors in zip(*self)]

    @property
    def committed(self):
        """The tensors that hold what the layers know of the text."""
        return self.state, self.history

    def clear(self):
        """Makes the states those before the first token."""
        for x in self.committed:
            x.zero_()

    def commit(self, path, count, slots=None):
        """Applies accepted paths to the states of all layers. As in `kernels.commit_path`."""
        commit_delta(*self, path, count, slots)


class Convolution(nn.Module):

    def __init__(self, channels, window):
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels, 1, window), 1 / window))


class GatedDelta(nn.Module):
    """A mixer of `model.Block`."""
    window = None  # its mask is a `TreeMask`, or the documents
    rope = None

    def __init__(self, config, sizes):
        super().__init__()
        self.config = config
        self.sizes = sizes
        H, Dv = sizes.n_head, sizes.value_size
        channels = sum(sizes.parts)
        self.qkvz = nn.Linear(config.n_embd, channels + H * Dv, bias=False)  # z: the output's gate
        self.ab = nn.Linear(config.n_embd, 2 * H, bias=False)
        self.conv1d = Convolution(channels, sizes.window)
        self.A = nn.Parameter(-torch.logspace(-2, 1, H))
        self.dt_bias = nn.Parameter(torch.zeros(H))
        self.norm = Norm("rms", Dv, config.norm_eps)
        self.out_proj = nn.Linear(H * Dv, config.n_embd, bias=False)

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        for parameter in (self.A, self.dt_bias):  # rates, which half precision would round
            parameter.data = parameter.data.to(exact(parameter.dtype))
        return self

    def new_states(self, zeros, n_layer, slots, nodes):
        """`DeltaStates` of n_layer such layers, with room for trees of this many nodes. zeros:
        torch.zeros with a device."""
        c = self.sizes
        dtype = self.norm.weight.dtype
        sequences = n_layer, slots
        rows = n_layer, slots, nodes
        return DeltaStates(
            zeros(*sequences, c.n_head, c.key_size, c.value_size, dtype=exact(dtype)),
            zeros(*sequences, c.window - 1, sum(c.parts), dtype=dtype),
            zeros(*rows, sum(c.parts), dtype=dtype),
            zeros(*rows, c.n_key_head, c.key_size, dtype=dtype),
            zeros(*rows, c.n_head, c.value_size, dtype=exact(dtype)),
            zeros(*rows, c.n_head, dtype=exact(dtype)))

    def forward(self, x, rope, mask, cache=None):
        """x [B, T, C] -> [B, T, C]. mask: a `TreeMask` of nodes, or None or the documents of whole
        sequences, as in `GPT.forward`. cache: this layer's, with `states`: a tree reads them, other
        tokens follow them and change them."""
        qkv, z = self.qkvz(x).tensor_split((sum(self.sizes.parts),), dim=-1)
        a, b = self.ab(x).chunk(2, dim=-1)
        if isinstance(mask, TreeMask):
            y = self.read_tree(qkv, a, b, mask.ancestors, cache)
        else:
            y = self.read_text(qkv, a, b, mask, cache)
        y = self.norm(y.to(x.dtype))  # (B, T, H, Dv)
        y = y * F.silu(z.view_as(y).to(exact(x.dtype)))
        return self.out_proj(y.flatten(2).to(x.dtype))

    def read_tree(self, qkv, a, b, ancestors, cache):
        state, history, inputs, *others = cache.states
        qkv = tree_conv(qkv, history, self.conv1d.weight[:, 0], inputs, ancestors, cache.slots)
        return tree_delta(qkv, a, b, self.A, self.dt_bias, state, *others, ancestors, cache.slots)

    def read_text(self, qkv, a, b, documents, cache):
        c = self.sizes
        new = self.new_states(qkv.new_zeros, 1, len(qkv), 0).layers()[0]
        states = cache.states if cache else new
        positions = None if documents is None else token_positions(qkv, 0, documents)
        with torch.autocast(qkv.device.type, enabled=False):
            qkv, history = causal_conv(qkv, states.history, self.conv1d.weight[:, 0], positions)
            q, k, v = qkv.split(c.parts, dim=-1)
            q, k = (unit(x.unflatten(-1, (c.n_key_head, c.key_size)), c.n_head) for x in (q, k))
            v = v.unflatten(-1, (c.n_head, c.value_size)).to(k.dtype)
            g, beta = gates(a, b, self.A, self.dt_bias)
            y, state = chunked_delta(q * c.key_size ** -0.5, k, v, g, beta, states.state, positions)
        if cache:
            states.history.copy_(history)
            states.state.copy_(state)
        return y


def exact(dtype):
    """float32, or float64 for a model in float64."""
    return torch.promote_types(dtype, torch.float32)


def causal_conv(x, history, weight, positions=None):
    """`delta.tree_conv` of tokens [B, T, C] that follow history [B, n - 1, C] -> its output and the
    next history. positions: of the tokens in their documents, int64 [B, T]; None: one document."""
    n, T = weight.shape[1], x.shape[1]
    rows = torch.cat((history.to(x.dtype), x), dim=1)
    out = 0
    for back in range(n):
        window = rows[:, n - 1 - back:n - 1 - back + T].to(exact(x.dtype)) * weight[:, n - 1 - back]
        if positions is not None:
            window = window.masked_fill((positions < back)[:, :, None], 0)
        out = out + window
    return F.silu(out).to(x.dtype), rows[:, T:]


def chunked_delta(q, k, v, g, beta, state, positions=None):
    """The gated delta rule over tokens that follow a state, a chunk at a time -> out [B, T, H, Dv]
    and the state after them. q, k [B, T, H, Dk] of length 1, q scaled; v [B, T, H, Dv]; g, beta [B,
    T, H]; state [B, H, Dk, Dv]. positions: as in `causal_conv`."""
    B, T, H, Dv = v.shape
    c = min(CHUNK, T)
    n = -(-T // c)

    def chunks(x, last=3):  # (B, T, H, ...) -> (n, B, H, c, ...)
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, n * c - T)).unflatten(1, (n, c))
        return x.movedim((1, last), (0, 2))

    q, k, v, g, beta = map(chunks, (q, k, v, g, beta))
    G = g.cumsum(-1)  # (n, B, H, c)
    seen = torch.ones(c, c, dtype=torch.bool, device=v.device).tril()
    decay = G.exp()
    if positions is not None:  # tokens see neither other documents nor the state of one
        number = (positions == 0).cumsum(1)
        number = F.pad(number[:, None].double(), (0, n * c - T), mode="replicate")[:, 0].long()
        number = number.view(B, n, 1, c).transpose(0, 1)  # (n, B, 1, c)
        before = torch.cat((number[:1, ..., :1], number[:-1, ..., -1:]))
        seen = seen & (number[..., None] == number[..., None, :])
        decay = decay * (number == before)
    ratio = (G[..., None] - G[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    decay, beta = decay[..., None], beta[..., None]
    # u of a chunk is linear in the state before it: from_v - from_state S
    system = beta * ratio * (k @ k.mT)  # solving does not read its diagonal
    right = torch.cat((beta * v, beta * decay * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_v, from_state = solved.split((Dv, k.shape[-1]), dim=-1)
    weights = ratio * (q @ k.mT)
    to_end = k * ratio[..., -1, :, None]
    out = []
    for i in range(n):
        u = from_v[i] - from_state[i] @ state
        out.append(decay[i] * (q[i] @ state) + weights[i] @ u)  # (B, H, c, Dv)
        state = decay[i, :, :, -1:] * state + to_end[i].mT @ u
    return torch.cat(out, dim=2).transpose(1, 2)[:, :T], state
