"""The loss of draft heads, without storing logits for all heads and tokens.

K heads over N tokens have K * N * V logits, and a gradient as large: with K = 5, N = 4096 and
V = 152,000, 12 GB each. But the LM head is frozen, so the gradient of its input can be taken as
soon as the logits are known. The forward pass does so chunk by chunk, and keeps only that gradient,
K * N * C. With torch.utils.checkpoint instead, training steps take 1.3 times as long.

Head i (from 0) at position t guesses token t + 2 + i, which the model predicts at position
t + 1 + i. With a draft vocabulary, the loss covers only its tokens. Losses are sums, so that
several processes can add them up.

dtype: of matrix products, float32 or bfloat16. R: rows of a chunk. n: size of the draft
vocabulary."""

from itertools import cycle

import torch
import torch.nn.functional as F
from torch.func import functional_call

from kernels import FINITE_MIN, runs_triton, tl, triton

# Logits per chunk: 16 MB in float32, to fit a CPU's cache; larger on a GPU, where small products
# are bound by reading the LM head. Peak memory is about six such chunks.
CHUNK_LOGITS = 2**22
CUDA_CHUNK_LOGITS = 2**27


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
    inputs = hidden[:, :-K], ids[:, 1:], documents
    if heads.model.dtype == dtype:  # as in decoding; autocast would compute norms in float32
        weights = {name: weight.to(dtype) for name, weight in heads.named_parameters()}
        return functional_call(heads, weights, inputs)
    with autocast(heads.model, dtype):
        return heads(*inputs)


def guess_masks(tokens, K, loss_mask, documents=None):
    """Which guesses are in the loss, bool [K, B, T]: those of a token in loss_mask, in the same
    document as their position. tokens, loss_mask, documents: [B, T + K + 1]."""
    T = tokens.shape[1] - K - 1
    documents = torch.zeros_like(tokens) if documents is None else documents
    ahead = [slice(i + 2, i + 2 + T) for i in range(K)]
    return torch.stack([loss_mask[:, at] & (documents[:, at] == documents[:, :T]) for at in ahead])


def window_losses(heads, ids, loss_mask, documents=None, dtype=torch.float32):
    """Losses of a batch from `data.window_batch` -> the losses and hits of `head_losses`, and the
    number of guesses, each float32 [K]."""
    hidden = run_model(heads.model, ids, documents, dtype)
    outputs = run_heads(heads, hidden, ids, documents, dtype)
    guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
    losses, hits = head_losses(heads, hidden, outputs, guess_mask, dtype)
    return losses, hits, guess_mask.sum(dim=(1, 2)).float()


def head_losses(heads, hidden, outputs, guess_mask, dtype=torch.float32):
    """Sums over guess_mask [K, B, T] for each head -> (cross-entropy against the model's next-token
    distribution in nats, hits: top-1 is the model's greedy token), each float32 [K]. hidden:
    [B, T + K, C] of the model; outputs: K tensors [B, T, C]; both before the final norm. outputs
    of n kinds of heads with one draft vocabulary, n K tensors, give n K results."""
    K = len(guess_mask)
    norm = heads.model.norm
    weight = heads.model.head.weight.to(dtype)  # (V, C)
    drafted = heads.vocabulary
    drafted_weight = weight if drafted is None else weight[drafted]  # (n, C)
    teacher = norm(hidden).to(dtype).flatten(0, 1)  # (B (T + K), C)
    # head i's position t is in row t + 1 + i, as the model's prediction of the same token
    shifts = [(i + 1, K - 1 - i) for i in range(K)]
    states = [F.pad(norm(out.to(hidden.dtype)).to(dtype), (0, 0, *shift)).flatten(0, 1)
              for out, shift in zip(outputs, cycle(shifts))]
    counted = torch.stack([F.pad(mask, shift).flatten() for mask, shift in zip(guess_mask, shifts)])
    counted = counted.repeat(len(outputs) // K, 1)  # (n K, B (T + K))
    grads = [torch.zeros_like(x) for x in states]
    wants_gradient = torch.is_grad_enabled()
    chunk_logits = CUDA_CHUNK_LOGITS if weight.is_cuda else CHUNK_LOGITS
    losses, hits = torch.zeros(2, *counted.shape, device=weight.device)
    with torch.no_grad():
        for rows in chunks(counted.any(dim=0), max(1, chunk_logits // len(weight))):
            target, mass, greedy = teacher_targets(teacher[rows] @ weight.T, drafted)
            for i, state in enumerate(states):
                losses[i, rows], guess, gradient = cross_entropy(state[rows] @ drafted_weight.T,
                                                                 target, mass)
                guess = guess if drafted is None else drafted[guess]
                hits[i, rows] = (guess == greedy).float()
                if wants_gradient:
                    grads[i][rows] = gradient @ drafted_weight
    slopes = torch.stack([(x * grad).sum(-1) for x, grad in zip(states, grads)]).float()
    losses = losses + (slopes - slopes.detach())  # the value of losses, and their gradient
    return (losses * counted).sum(dim=1), (hits * counted).sum(dim=1)


def chunks(mask, n):
    """Yields n row numbers at a time where mask [rows] is set. On a GPU yields slices of all rows,
    set or not, as reading the mask would synchronise."""
    if mask.device.type == "cpu":
        yield from mask.nonzero()[:, 0].split(n)
    else:
        yield from (slice(first, first + n) for first in range(0, len(mask), n))


# --------------------------------------------------------------------------------------------------
# Rows of logits: on CUDA one pass of a kernel each, in place

def teacher_targets(logits, drafted=None):
    """The model's logits [R, V] -> (its probabilities of the draft vocabulary [R, n], their sum
    [R], both float32, and the greedy token [R])."""
    if not runs_triton(logits):
        logits = logits.float()
        target = logits.softmax(dim=-1)
        target = target if drafted is None else target[:, drafted]
        return target, target.sum(dim=-1), logits.argmax(dim=-1)
    R, V = logits.shape
    n = V if drafted is None else len(drafted)
    target, mass = logits.new_empty(R, n, dtype=torch.float32), logits.new_empty(R).float()
    greedy = torch.empty_like(mass, dtype=torch.int64)
    _teacher_kernel[R,](logits, drafted, target, mass, greedy, V, n, BLOCK=2048, num_warps=8)
    return target, mass, greedy


def cross_entropy(logits, target, mass):
    """A head's logits [R, n] and the model's target [R, n] of sum mass [R] -> (cross-entropy [R],
    top-1 [R], the gradient [R, n] in logits' dtype)."""
    if runs_triton(logits):
        loss = torch.empty_like(mass)
        guess = torch.empty_like(mass, dtype=torch.int64)
        _cross_entropy_kernel[len(logits),](logits, target, mass, loss, guess, logits.shape[1],
                                            BLOCK=2048, num_warps=8)
        return loss, guess, logits
    dtype, logits = logits.dtype, logits.float()
    top, guess = logits.max(dim=-1, keepdim=True)
    probabilities = logits.softmax(dim=-1)
    total = (top - probabilities.gather(1, guess).log())[:, 0]
    loss = total * mass - (logits * target).sum(dim=-1)
    gradient = probabilities.mul_(mass[:, None]).sub_(target)
    return loss, guess[:, 0], gradient.to(dtype)


@triton.jit
def _row_stats(x_ptr, n, BLOCK: tl.constexpr):
    """log(sum(exp(x))) and the first column of the maximum, for a row x of n values."""
    columns = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], FINITE_MIN, tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        at = first + columns
        x = tl.load(x_ptr + at, mask=at < n, other=FINITE_MIN).to(tl.float32)  # [BLOCK]
        higher = tl.maximum(best, x)
        total = total * tl.exp(best - higher) + tl.exp(x - higher)
        best_at = tl.where(x > best, at, best_at)
        best = higher
    top = tl.max(best, 0)
    total = tl.sum(total * tl.exp(best - top), 0)
    return top + tl.log(total), tl.min(tl.where(best == top, best_at, n), 0)


@triton.jit
def _teacher_kernel(logits_ptr, drafted_ptr, target_ptr, mass_ptr, greedy_ptr, V, n,
                    BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    total, greedy = _row_stats(logits_ptr, V, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = at if drafted_ptr is None else tl.load(drafted_ptr + at, mask=at < n, other=0)
        x = tl.load(logits_ptr + token, mask=at < n, other=0.0).to(tl.float32)  # [BLOCK]
        target = tl.where(at < n, tl.exp(x - total), 0.0)
        mass += target
        tl.store(target_ptr + row * n + at, target, mask=at < n)
    tl.store(mass_ptr + row, tl.sum(mass, 0))
    tl.store(greedy_ptr + row, greedy)


@triton.jit
def _cross_entropy_kernel(logits_ptr, target_ptr, mass_ptr, loss_ptr, guess_ptr, n,
                          BLOCK: tl.constexpr):
    """Program (row). Overwrites the logits with the gradient: mass * softmax(logits) - target."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * n
    total, guess = _row_stats(logits_ptr, n, BLOCK)
    mass = tl.load(mass_ptr + row)
    product = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + at, mask=at < n, other=0.0).to(tl.float32)  # [BLOCK]
        target = tl.load(target_ptr + row * n + at, mask=at < n, other=0.0)  # [BLOCK]
        product += x * target
        gradient = tl.exp(x - total) * mass - target
        tl.store(logits_ptr + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < n)
    tl.store(loss_ptr + row, total * mass - tl.sum(product, 0))
    tl.store(guess_ptr + row, guess)
