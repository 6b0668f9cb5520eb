"""The loss of draft heads, in memory that does not grow with heads, tokens or vocabulary.

K heads over N tokens make K * N * V logits, and as many in their gradient: with K = 5, N = 4096 and
V = 152,000 that is 12 GB each. But the LM head is frozen, so the gradient of its input is known as
soon as the logits are. The forward pass computes both chunk by chunk and keeps [N, C] alone.

Head i (from 0) at position t guesses token t + 2 + i, which the model itself predicts at position
t + 1 + i. Losses are sums, not means: several processes add theirs up.
"""

import contextlib

import torch

# Logits at a time: 16 MB in float32, as a CPU's cache holds; more on a GPU, where a product of few
# rows takes as long to read the LM head as one of many. Memory holds six times as many numbers.
CHUNK = 2**22
CUDA_CHUNK = 2**26


def teacher_forced(heads, ids, documents=None, autocast=contextlib.nullcontext(), wrapped=None):
    """ids, documents [B, T + K + 1] -> (the model's hidden states [B, T + K, C], the heads' K
    outputs [B, T, C]). wrapped: DistributedDataParallel around the heads, called in their place."""
    K = heads.config.n_draft
    half = heads.model.dtype.itemsize == 2  # without autocast, as in decoding
    up_to = lambda end: None if documents is None else documents[:, :end]
    with torch.no_grad(), contextlib.nullcontext() if half else autocast:
        hidden = heads.model(ids[:, :-1], documents=up_to(-1))
    with autocast:
        return hidden, (wrapped or heads)(hidden[:, :-K], ids[:, 1:], up_to(-K - 1))


def guess_masks(tokens, K, loss_mask=None, documents=None):
    """Which guesses count, bool [K, B, T]: of tokens in loss_mask, default all, and not across a
    border of documents, default one. tokens, loss_mask, documents: [B, T + K + 1]."""
    T = tokens.shape[1] - K - 1
    loss_mask = torch.ones_like(tokens, dtype=torch.bool) if loss_mask is None else loss_mask
    documents = torch.zeros_like(tokens) if documents is None else documents
    ahead = [slice(i + 2, i + 2 + T) for i in range(K)]
    return torch.stack([loss_mask[:, at] & (documents[:, at] == documents[:, :T]) for at in ahead])


def head_losses(model, outputs, hidden, tokens, guess_mask, objective="distill", dtype=None):
    """Per head: (sum of cross-entropies in nats, hits), float32 [K] each, over the guesses in
    guess_mask [K, B, T]. A hit is a guess whose top-1 is the model's greedy token. outputs: K
    tensors [B, T, C], the heads' inputs to the LM head. hidden [B, T + K, C]: the model's states.
    tokens: int64 [B, T + K + 1]. objective: "distill", against the model's next-token distribution,
    or "data", against the tokens. dtype: of products."""
    dtype = dtype or model.head.weight.dtype
    teacher = model.norm(hidden).detach().to(dtype)
    states = [model.norm(out.to(hidden.dtype)).to(dtype) for out in outputs]
    weight = model.head.weight.to(dtype)
    return HeadLosses.apply(weight, teacher, tokens, guess_mask, objective, *states)


class HeadLosses(torch.autograd.Function):
    """`head_losses` after the final norm; weight [V, C], teacher, outputs of one dtype."""

    @staticmethod
    def forward(ctx, weight, teacher, tokens, guess_mask, objective, *outputs):
        T, K = outputs[0].shape[1], len(outputs)
        exact = torch.promote_types(weight.dtype, torch.float32)
        sums, hits = torch.zeros(2, K, dtype=exact, device=weight.device).unbind()
        ctx.grads = [torch.empty_like(x) for x in outputs]
        for rows, start, end in chunk_ranges(teacher, len(weight)):
            # contiguous: of a slice it would be a batch of products that each read the whole weight
            logits = (teacher[rows, start:end].contiguous() @ weight.T).to(exact)
            best = logits.argmax(dim=-1)                                     # (rows, end - start)
            probs = logits.softmax(dim=-1) if objective == "distill" else None  # (..., V)
            del logits
            for i, output in enumerate(outputs):
                first = max(start - 1 - i, 0)  # of the positions from which head i guesses the same
                last = min(end - 1 - i, T)
                if first >= last:
                    continue
                at = slice(first + 1 + i - start, last + 1 + i - start)  # these in best and probs
                here = (rows, slice(first, last))
                logits = (output[here].contiguous() @ weight.T).to(exact)
                top, guess = logits.max(dim=-1, keepdim=True)
                mask = guess_mask[i][here]
                hits[i] += (mask & (guess[..., 0] == best[:, at])).sum()
                text = tokens[rows, first + 2 + i:last + 2 + i, None]
                target = text if objective == "data" else probs[:, at]
                losses, gradient = cross_entropy_(logits.sub_(top), target, objective == "data")
                sums[i] += (losses * mask).sum()
                ctx.grads[i][here] = gradient.to(weight.dtype) @ weight * mask[..., None]
        ctx.mark_non_differentiable(hits)
        return sums, hits

    @staticmethod
    def backward(ctx, d_sums, _):
        grads = (grad * d.to(grad.dtype) for grad, d in zip(ctx.grads, d_sums.unbind()))
        return (None,) * 5 + tuple(grads)


def chunk_ranges(states, V):
    """Yields (slice of B, start, end) of states [B, length, C]: positions 1..length - 1, about as
    many at a time as have CHUNK logits."""
    B, length, _ = states.shape
    chunk = CUDA_CHUNK if states.is_cuda else CHUNK
    sequences = min(B, max(1, chunk // V))
    positions = max(1, chunk // (V * sequences))
    for b in range(0, B, sequences):
        for start in range(1, length, positions):
            yield slice(b, b + sequences), start, min(start + positions, length)


def cross_entropy_(logits, target, is_token):
    """logits [..., V], at most 0 -> (losses [...], gradient [..., V]); overwrites the logits.
    target: token ids [..., 1] if is_token, else probabilities [..., V]."""
    agreed = logits.gather(-1, target)[..., 0] if is_token else (target * logits).sum(dim=-1)
    mass = logits.exp_().sum(dim=-1)
    gradient = logits.div_(mass[..., None])
    if is_token:
        gradient.scatter_add_(-1, target, gradient.new_full(target.shape, -1.0))
    else:
        gradient -= target
    return mass.log() - agreed, gradient


@torch.no_grad()
def top_hits(heads, outputs, hidden, guess_mask, tops):
    """float32 [len(tops), K]: for each n of tops and each head, in how many guesses of guess_mask
    the model's greedy token is among the head's n likeliest; of equals the lower id comes first."""
    model = heads.model
    B, T, _ = outputs[0].shape
    V = model.config.vocab_size
    rows = max(1, (CUDA_CHUNK if hidden.is_cuda else CHUNK) // V)
    ids = torch.arange(V, device=hidden.device)
    drafted = ids >= 0 if heads.vocabulary is None else torch.isin(ids, heads.vocabulary)
    logits_of = lambda states: model.head.logits(model.norm(states))
    best = [logits_of(part).argmax(dim=-1) for part in hidden.flatten(0, 1).split(rows)]
    best = torch.cat(best).view(B, -1)
    hits = hidden.new_zeros(len(tops), len(outputs)).float()
    for i, out in enumerate(outputs):
        targets = best[:, i + 1:i + 1 + T].reshape(-1, 1)
        parts = (x.split(rows) for x in (out.flatten(0, 1), targets, guess_mask[i].flatten()))
        for states, target, mask in zip(*parts):
            logits = logits_of(states).masked_fill_(~drafted, -torch.inf)
            score = logits.gather(1, target)
            ranks = ((logits > score) | (logits == score) & (ids < target)).sum(dim=-1)
            mask = mask & drafted[target[:, 0]]
            hits[:, i] += torch.stack([((ranks < n) & mask).sum() for n in tops])
    return hits
