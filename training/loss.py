"""The loss of draft heads, without storing logits for all heads and tokens.

K heads over N tokens have K * N * V logits, and a gradient as large: with K = 5, N = 4096 and
V = 152,000, 12 GB each. But the LM head is frozen, so the gradient of its input is known as soon as
the logits are. The forward pass computes both in chunks and keeps only that gradient, K * N * C.

Head i (from 0) at position t guesses token t + 2 + i, which the model predicts at position
t + 1 + i. With a draft vocabulary, the loss covers only its tokens, and V is its size. Losses are
sums, so that several processes can add them up.

dtype: of matrix products, float32 or bfloat16."""

from typing import NamedTuple

import torch

# Logits per chunk: 16 MB in float32, to fit a CPU's cache; larger on a GPU, where small products
# are bound by reading the LM head. Peak memory is about six such chunks.
CHUNK_LOGITS = 2**22
CUDA_CHUNK_LOGITS = 2**26


def chunk_rows(V, is_cuda):
    """How many positions to process at once."""
    return max(1, (CUDA_CHUNK_LOGITS if is_cuda else CHUNK_LOGITS) // V)


class Teacher(NamedTuple):
    """The model's outputs that heads learn from."""
    hidden: torch.Tensor     # [B, T, C]: output of the last block
    logsumexp: torch.Tensor  # float32 [B, T]: of the logits
    greedy: torch.Tensor     # int64 [B, T]: argmax of the logits


@torch.no_grad()
def teach(model, hidden, dtype=torch.float32):
    """The `Teacher` of hidden states [B, T, C]."""
    weight = model.head.weight.to(dtype)
    parts = []
    for states in hidden.flatten(0, 1).split(chunk_rows(model.config.vocab_size, hidden.is_cuda)):
        logits = (model.norm(states).to(dtype) @ weight.T).float()
        parts.append((logits.logsumexp(dim=-1), logits.argmax(dim=-1)))
    logsumexp, greedy = (torch.cat(part).view(hidden.shape[:2]) for part in zip(*parts))
    return Teacher(hidden, logsumexp, greedy)


def autocast(model, dtype):
    return torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


@torch.no_grad()
def hidden_states(model, ids, documents=None, dtype=torch.float32):
    """The model's hidden states [B, T, C] for token ids and their documents [B, T]."""
    is_half = model.dtype.itemsize == 2  # needs no autocast, like decoding
    with autocast(model, None if is_half else dtype):
        return model(ids, documents=documents)


def run_model(model, ids, documents=None, dtype=torch.float32):
    """The `Teacher` [B, T] of token ids and documents [B, T + 1]; ignores the last position."""
    documents = None if documents is None else documents[:, :-1]
    return teach(model, hidden_states(model, ids[:, :-1], documents, dtype), dtype)


def run_heads(heads, teacher, ids, documents=None, dtype=torch.float32):
    """The heads' K outputs [B, T, C], with teacher forcing. ids, documents: [B, T + K + 1]."""
    K = heads.config.n_draft
    documents = None if documents is None else documents[:, :-K - 1]
    with autocast(heads.model, dtype):
        return heads(teacher.hidden[:, :-K], ids[:, 1:], documents)


def guess_masks(tokens, K, loss_mask, documents=None):
    """Which guesses are in the loss, bool [K, B, T]: those of a token in loss_mask, in the same
    document as their position. tokens, loss_mask, documents: [B, T + K + 1]."""
    T = tokens.shape[1] - K - 1
    documents = torch.zeros_like(tokens) if documents is None else documents
    ahead = [slice(i + 2, i + 2 + T) for i in range(K)]
    return torch.stack([loss_mask[:, at] & (documents[:, at] == documents[:, :T]) for at in ahead])


def window_losses(heads, ids, loss_mask, documents=None, teacher=None, dtype=torch.float32):
    """Losses of a batch from `data.window_batch` -> the sums and hits of `head_losses`, and the
    number of guesses, each float32 [K]."""
    if teacher is None:  # no stored states
        teacher = run_model(heads.model, ids, documents, dtype)
    outputs = run_heads(heads, teacher, ids, documents, dtype)
    guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
    sums, hits = head_losses(heads, outputs, teacher, guess_mask, dtype)
    return sums, hits, guess_mask.sum(dim=(1, 2)).float()


def head_losses(heads, outputs, teacher, guess_mask, dtype=torch.float32):
    """Sums over guess_mask [K, B, T] for each head -> (cross-entropy against the model's next-token
    distribution in nats, hits: top-1 is the model's greedy token), each float32 [K]. outputs: K
    tensors [B, T, C], before the final norm. teacher: [B, T + K]."""
    norm = heads.model.norm
    weight = heads.model.head.weight
    greedy = teacher.greedy
    if heads.vocabulary is not None:  # token ids become indices into it, -1 if they are not in it
        rows = heads.vocabulary.long()
        index = rows.new_full((len(weight),), -1)
        index[rows] = torch.arange(len(rows), device=rows.device)
        weight = weight[rows]
        greedy = index[greedy]
    hidden = norm(teacher.hidden).detach().to(dtype)
    states = [norm(out.to(teacher.hidden.dtype)).to(dtype) for out in outputs]
    return HeadLosses.apply(weight.to(dtype), hidden, teacher.logsumexp, greedy, guess_mask,
                            *states)


class HeadLosses(torch.autograd.Function):
    """`head_losses` after the final norm."""

    @staticmethod
    def forward(ctx, weight, hidden, logsumexp, greedy, guess_mask, *outputs):
        K, B, T = guess_mask.shape
        sums, hits = torch.zeros(2, K, device=weight.device).unbind()
        ctx.grads = [torch.zeros_like(x) for x in outputs]
        counts = guess_mask.new_zeros(K, B, T + K)  # guess_mask by the teacher's position
        for i in range(K):
            counts[i, :, i + 1:i + 1 + T] = guess_mask[i]
        for rows, positions in chunks(counts.any(dim=0), chunk_rows(len(weight), weight.is_cuda)):
            target = (hidden[rows, positions] @ weight.T).float()
            target.sub_(logsumexp[rows, positions, None]).exp_()  # (rows, V)
            total = target.sum(dim=-1)  # 1, or the probability of the draft vocabulary
            best = greedy[rows, positions]
            for i, output in enumerate(outputs):
                counted = counts[i, rows, positions]
                at = rows, (positions - 1 - i).clamp(0, T - 1)
                logits = (output[at] @ weight.T).float()
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
    """Yields n (rows, positions) at a time where mask [B, length] is set. On a GPU yields all
    positions, set or not, as reading the mask would synchronise."""
    grid = torch.cartesian_prod(*(torch.arange(size, device=mask.device) for size in mask.shape))
    if mask.device.type == "cpu":
        grid = grid[mask.flatten()]
    for first in range(0, len(grid), n):
        yield grid[first:first + n].unbind(1)
