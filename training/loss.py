"""The loss of draft heads, in memory that does not grow with heads, tokens or vocabulary.

K heads over N tokens make K * N * V logits, and as many in their gradient: with K = 5, N = 4096 and
V = 152,000 that is 12 GB each. But the LM head is frozen, so the gradient of its input is known as
soon as the logits are. The forward pass computes both chunk by chunk and keeps only [N, C].

Head i (from 0) at position t guesses token t + 2 + i, which the model itself predicts at position
t + 1 + i. Heads with a draft vocabulary learn only the probabilities of its tokens: V is its size.
Losses are sums, not means: several processes add theirs up.

dtype: of matrix products, float32 or bfloat16; None: the model's."""

from typing import NamedTuple

import torch

# Logits at a time: 16 MB in float32, which fit a CPU's cache; more on a GPU, where a product of few
# rows is bound by reading the LM head. Memory holds six times as many numbers.
CHUNK = 2**22
CUDA_CHUNK = 2**26


def chunk_rows(V, is_cuda):
    return max(1, (CUDA_CHUNK if is_cuda else CHUNK) // V)


class Teacher(NamedTuple):
    """What heads learn from, at each position."""
    hidden: torch.Tensor     # [B, T, C]: the model's last-block output
    logsumexp: torch.Tensor  # float32 [B, T], of its logits
    greedy: torch.Tensor     # int64 [B, T]: its likeliest token


@torch.no_grad()
def teach(model, hidden, dtype=None):
    """The `Teacher` of hidden states [B, T, C]."""
    weight = None if dtype is None else model.head.weight.to(dtype)
    parts = []
    for states in hidden.flatten(0, 1).split(chunk_rows(model.config.vocab_size, hidden.is_cuda)):
        normed = model.norm(states)
        if dtype is None:
            logits = model.head.logits(normed)
        else:
            logits = (normed.to(dtype) @ weight.T).float()
        parts.append((logits.logsumexp(dim=-1), logits.argmax(dim=-1)))
    logsumexp, greedy = (torch.cat(part).view(hidden.shape[:2]) for part in zip(*parts))
    return Teacher(hidden, logsumexp, greedy)


def autocast(model, dtype):
    return torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


@torch.no_grad()
def hidden_states(model, ids, documents=None, dtype=None):
    """The model's hidden states [B, T, C] for token ids and their documents [B, T]."""
    is_half = model.dtype.itemsize == 2  # which runs as in decoding
    with autocast(model, None if is_half else dtype):
        return model(ids, documents=documents)


def run_model(model, ids, documents=None, dtype=None):
    """The `Teacher` of token ids and documents [B, T + 1], of which the last is not read."""
    documents = None if documents is None else documents[:, :-1]
    return teach(model, hidden_states(model, ids[:, :-1], documents, dtype), dtype)


def run_heads(heads, teacher, ids, documents=None, dtype=None):
    """The heads' K outputs [B, T, C] by teacher forcing. ids, documents: [B, T + K + 1]."""
    K = heads.config.n_draft
    up_to = None if documents is None else documents[:, :-K - 1]
    with autocast(heads.model, dtype):
        return heads(teacher.hidden[:, :-K], ids[:, 1:], up_to)


def guess_masks(tokens, K, loss_mask, documents=None):
    """Which guesses count, bool [K, B, T]: those of tokens in loss_mask, in the same document.
    tokens, loss_mask, documents: [B, T + K + 1]."""
    T = tokens.shape[1] - K - 1
    documents = torch.zeros_like(tokens) if documents is None else documents
    ahead = [slice(i + 2, i + 2 + T) for i in range(K)]
    return torch.stack([loss_mask[:, at] & (documents[:, at] == documents[:, :T]) for at in ahead])


def window_losses(heads, ids, loss_mask, documents=None, teacher=None, dtype=None):
    """Of windows as `data.window_batch` gives them, for each head, float32 [K]: the two of
    `head_losses`, and the number of guesses."""
    if teacher is None:  # no states are stored
        teacher = run_model(heads.model, ids, documents, dtype)
    outputs = run_heads(heads, teacher, ids, documents, dtype)
    guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
    sums, hits = head_losses(heads, outputs, teacher, guess_mask, dtype)
    return sums, hits, guess_mask.sum(dim=(1, 2)).float()


def head_losses(heads, outputs, teacher, guess_mask, dtype=None):
    """Per head: (sum of cross-entropies against the model's next-token distribution in nats, hits:
    top-1 is the model's greedy token), float32 [K] each, over guess_mask [K, B, T]. outputs: K
    tensors [B, T, C], inputs to the LM head. teacher: a `Teacher` of [B, T + K]."""
    norm = heads.model.norm
    weight = heads.model.head.weight
    greedy = teacher.greedy
    if heads.vocabulary is not None:  # ids become indices into it, -1 for any other
        rows = heads.vocabulary.long()
        index = rows.new_full((len(weight),), -1)
        index[rows] = torch.arange(len(rows), device=rows.device)
        weight = weight[rows]
        greedy = index[greedy]
    dtype = dtype or weight.dtype
    hidden = norm(teacher.hidden).detach().to(dtype)
    states = [norm(out.to(teacher.hidden.dtype)).to(dtype) for out in outputs]
    return HeadLosses.apply(weight.to(dtype), hidden, teacher.logsumexp, greedy, guess_mask,
                            *states)


class HeadLosses(torch.autograd.Function):
    """`head_losses` after the final norm."""

    @staticmethod
    def forward(ctx, weight, hidden, logsumexp, greedy, guess_mask, *outputs):
        K, B, T = guess_mask.shape
        exact = torch.promote_types(weight.dtype, torch.float32)
        sums, hits = torch.zeros(2, K, dtype=exact, device=weight.device).unbind()
        ctx.grads = [torch.zeros_like(x) for x in outputs]
        counts = guess_mask.new_zeros(K, B, T + K)  # by the position that predicts what is guessed
        for i in range(K):
            counts[i, :, i + 1:i + 1 + T] = guess_mask[i]
        for rows, positions in chunks(counts.any(dim=0), chunk_rows(len(weight), weight.is_cuda)):
            target = (hidden[rows, positions] @ weight.T).to(exact)
            target.sub_(logsumexp[rows, positions, None]).exp_()  # (rows, V)
            total = target.sum(dim=-1)  # 1, or the draft vocabulary's share
            best = greedy[rows, positions]
            for i, output in enumerate(outputs):
                counted = counts[i, rows, positions]
                at = rows, (positions - 1 - i).clamp(0, T - 1)
                logits = (output[at] @ weight.T).to(exact)
                top, guess = logits.max(dim=-1, keepdim=True)
                hits[i] += (counted & (guess[:, 0] == best)).sum()
                agreed = (target * logits.sub_(top)).sum(dim=-1)
                mass = logits.exp_().sum(dim=-1)
                sums[i] += ((total * mass.log() - agreed) * counted).sum()
                gradient = logits.mul_((total / mass)[:, None]).sub_(target)
                gradient = gradient.to(weight.dtype) @ weight * counted[:, None]
                ctx.grads[i].index_put_(at, gradient, accumulate=True)
        ctx.mark_non_differentiable(hits)
        return sums, hits

    @staticmethod
    def backward(ctx, d_sums, _):
        grads = (grad * d.to(grad.dtype) for grad, d in zip(ctx.grads, d_sums.unbind()))
        return (None,) * 5 + tuple(grads)


def chunks(mask, n):
    """Yields (rows, positions) where mask [B, length] is set, n at a time; on a GPU all of them,
    since the host would have to wait for the mask."""
    grid = torch.cartesian_prod(*(torch.arange(size, device=mask.device) for size in mask.shape))
    if mask.device.type == "cpu":
        grid = grid[mask.flatten()]
    for first in range(0, len(grid), n):
        yield grid[first:first + n].unbind(1)
