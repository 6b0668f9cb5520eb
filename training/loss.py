"""The loss of draft heads, without storing logits for all heads and tokens.

K heads over N tokens have K * N * V logits, and a gradient as large: with K = 5, N = 4096 and
V = 152,000, 12 GB each. But the LM head is frozen, so the gradient of its input can be taken as
soon as the logits are known. The forward pass does so chunk by chunk, and keeps only that gradient,
K * N * C. With torch.utils.checkpoint instead, training steps take 1.3 times as long.

Head i (from 0) at position t guesses token t + 2 + i, which the model predicts at position
t + 1 + i. With a draft vocabulary, the loss covers only its tokens. Losses are sums, so that
several processes can add them up.

dtype: of matrix products, float32 or bfloat16."""

import torch
import torch.nn.functional as F

# Logits per chunk: 16 MB in float32, to fit a CPU's cache; larger on a GPU, where small products
# are bound by reading the LM head. Peak memory is about six such chunks.
CHUNK_LOGITS = 2**22
CUDA_CHUNK_LOGITS = 2**26


def autocast(model, dtype):
    return torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


@torch.no_grad()
def run_model(model, ids, documents=None, dtype=torch.float32):
    """The model's hidden states [B, T, C] for all but the last of the token ids [B, T + 1], and
    their documents likewise."""
    documents = None if documents is None else documents[:, :-1]
    is_half = model.dtype.itemsize == 2  # needs no autocast, like decoding
    with autocast(model, None if is_half else dtype):
        return model(ids[:, :-1], documents=documents)


def run_heads(heads, hidden, ids, documents=None, dtype=torch.float32):
    """The heads' K outputs [B, T, C], with teacher forcing. hidden: [B, T + K, C] from `run_model`;
    ids, documents: [B, T + K + 1]."""
    K = heads.config.n_draft
    documents = None if documents is None else documents[:, :-K - 1]
    with autocast(heads.model, dtype):
        return heads(hidden[:, :-K], ids[:, 1:], documents)


def guess_masks(tokens, K, loss_mask, documents=None):
    """Which guesses are in the loss, bool [K, B, T]: those of a token in loss_mask, in the same
    document as their position. tokens, loss_mask, documents: [B, T + K + 1]."""
    T = tokens.shape[1] - K - 1
    documents = torch.zeros_like(tokens) if documents is None else documents
    ahead = [slice(i + 2, i + 2 + T) for i in range(K)]
    return torch.stack([loss_mask[:, at] & (documents[:, at] == documents[:, :T]) for at in ahead])


def window_losses(heads, ids, loss_mask, documents=None, dtype=torch.float32):
    """Losses of a batch from `data.window_batch` -> the sums and hits of `head_losses`, and the
    number of guesses, each float32 [K]."""
    hidden = run_model(heads.model, ids, documents, dtype)
    outputs = run_heads(heads, hidden, ids, documents, dtype)
    guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
    sums, hits = head_losses(heads, hidden, outputs, guess_mask, dtype)
    return sums, hits, guess_mask.sum(dim=(1, 2)).float()


def head_losses(heads, hidden, outputs, guess_mask, dtype=torch.float32):
    """Sums over guess_mask [K, B, T] for each head -> (cross-entropy against the model's next-token
    distribution in nats, hits: top-1 is the model's greedy token), each float32 [K]. hidden:
    [B, T + K, C] of the model; outputs: K tensors [B, T, C]; both before the final norm."""
    K, B, T = guess_mask.shape
    norm = heads.model.norm
    weight = heads.model.head.weight.to(dtype)  # (V, C)
    drafted = slice(None) if heads.vocabulary is None else heads.vocabulary.long()
    tokens = torch.arange(len(weight), device=weight.device)[drafted]
    weights = weight[drafted]
    teacher = norm(hidden).to(dtype)
    states = [norm(out.to(hidden.dtype)).to(dtype) for out in outputs]
    grads = [torch.zeros_like(x) for x in states]
    sums, hits = torch.zeros(2, K, device=weight.device).unbind()
    counts = guess_mask.new_zeros(K, B, T + K)  # guess_mask by the teacher's position
    for i in range(K):
        counts[i, :, i + 1:i + 1 + T] = guess_mask[i]
    for rows, positions in chunks(counts.any(dim=0), chunk_rows(weight)):
        logits = (teacher[rows, positions] @ weight.T).float()  # (n, V)
        greedy = logits.argmax(dim=-1)
        total = logits.logsumexp(dim=-1, keepdim=True)
        target = logits[:, drafted].sub_(total).exp_()
        for i in range(K):
            at = rows, (positions - 1 - i).clamp(0, T - 1)
            counted = counts[i, rows, positions]
            loss, guess, gradient = cross_entropy(states[i][at], weights, target, counted)
            sums[i] += loss
            hits[i] += (counted & (tokens[guess] == greedy)).sum()
            grads[i].index_put_(at, gradient, accumulate=True)
    slope = torch.stack([(state * grad).sum() for state, grad in zip(states, grads)])
    return sums + (slope - slope.detach()), hits  # the value of sums, and their gradient


def cross_entropy(states, weight, target, counted):
    """The loss of a chunk: the cross-entropy of states [n, C] against target [n, V], summed over
    the rows that are counted -> (loss, top-1 index [n], gradient of the loss [n, C])."""
    states = states.detach().requires_grad_(torch.is_grad_enabled())
    logits = (states @ weight.T).float()
    loss = (F.cross_entropy(logits, target, reduction="none") * counted).sum()
    guess = logits.argmax(dim=-1)
    if not loss.requires_grad:  # heads are only measured
        return loss, guess, torch.zeros_like(states)
    gradient, = torch.autograd.grad(loss, states)
    return loss.detach(), guess, gradient


def chunk_rows(weight):
    """How many positions to process at once."""
    return max(1, (CUDA_CHUNK_LOGITS if weight.is_cuda else CHUNK_LOGITS) // len(weight))


def chunks(mask, n):
    """Yields n (rows, positions) at a time where mask [B, length] is set. On a GPU yields all
    positions, set or not, as reading the mask would synchronise."""
    grid = torch.cartesian_prod(*(torch.arange(size, device=mask.device) for size in mask.shape))
    if mask.device.type == "cpu":
        grid = grid[mask.flatten()]
    for first in range(0, len(grid), n):
        yield grid[first:first + n].unbind(1)
