"""The loss of draft heads, in memory that does not grow with heads, tokens or vocabulary.

K heads over N tokens and a vocabulary of V make K * N * V logits, and their gradient as many again: with K = 5, N = 4096 and
V = 152,000 that is 12 GB each in float32. But the LM head is frozen, so the gradient with respect to what it reads is
known as soon as the logits are. Both are made here chunk by chunk in the forward pass, and only [N, C] is kept.

Letters: B sequences, T positions, K heads, C hidden size, V vocabulary. Head i (from 0) at position t guesses token t + 2 + i,
which the model itself chooses at position t + 1 + i. Sums are handed out rather than means, so that several processes, each
with a part of the batch, can add theirs up.
"""

import torch
import torch.nn.functional as F

CHUNK = 2**24       # logits at a time, 64 MB in float32; beside them stand the model's own probabilities, as many
CUDA_CHUNK = 2**26  # on a GPU, where a product of few rows would read the LM head again and again


def chunk_size(device):
    return CUDA_CHUNK if torch.device(device).type == "cuda" else CHUNK


def guessed_places(tokens, K, counts=None, documents=None):
    """Which guesses count, bool [K, B, T], for tokens [B, T + K + 1]. counts: bool, of the same shape, which tokens are to be
    guessed at all (default: all); documents: int64, likewise, numbers; a guess across a border does not count."""
    T = tokens.shape[1] - K - 1
    places = torch.ones(K, tokens.shape[0], T, dtype=torch.bool, device=tokens.device)
    for i in range(K):
        if counts is not None:
            places[i] &= counts[:, i + 2:i + 2 + T]
        if documents is not None:
            places[i] &= documents[:, i + 2:i + 2 + T] == documents[:, :T]
    return places


def head_losses(model, outputs, hidden, tokens, places, objective="distill", reach=0, chunk=None):
    """Per head: (sum of cross-entropies in nats, float32 [K]; hits, float32 [K]; the places they were summed over, bool [K, B, T]).

    outputs: K tensors [B, T, C], what the heads hand to the LM head. hidden [B, T + K, C]: the model's at positions
    0..T + K - 1; tokens int64 [B, T + K + 1]; places bool [K, B, T], see `guessed_places`. objective: "distill", against what
    the model would say, or "data", against what the text says. A hit is a first guess, at any of the given places, that is the
    model's own greedy token.
    reach n > 0: training on the heads' own drafts. A head then reads what the heads before it draft, their n likeliest tokens each,
    instead of what the text says; and as it is known only of the text's own tokens how the model would go on, the places
    left are those where each head before had the text's token among its n likeliest.
    Products are in autocast's dtype where it is on, sums in float32. The cross-entropies are differentiable with respect to the
    outputs. Logits exist for at most `chunk` numbers (or one position) at a time; with the model's probabilities, the gradient,
    and copies in both dtypes that is up to six times so many numbers.
    """
    teacher = model.norm(hidden).detach()
    kind = hidden.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else model.head.weight.dtype
    chunk = chunk or chunk_size(hidden.device)
    return HeadLosses.apply(model.head.weight.to(dtype), teacher.to(dtype), tokens, places, objective, reach, chunk,
                            *(model.norm(out).to(dtype) for out in outputs))


class HeadLosses(torch.autograd.Function):
    """`head_losses` after the final norm: weight [V, C], teacher [B, T + K, C], rows K times [B, T, C], all of one dtype."""

    @staticmethod
    def forward(ctx, weight, teacher, tokens, places, objective, reach, chunk, *rows):
        (B, T, _), K, V = rows[0].shape, len(rows), weight.shape[0]
        exact = torch.promote_types(weight.dtype, torch.float32)
        sums, hits = torch.zeros(2, K, dtype=exact, device=weight.device).unbind()
        grads = [torch.empty_like(row) if needed else None for row, needed in zip(rows, ctx.needs_input_grad[7:])]
        given, places = places, places.clone() if reach else places
        sequences = min(B, max(1, chunk // V))
        positions = max(1, chunk // (V * sequences))
        for b in range(0, B, sequences):
            part = slice(b, b + sequences)
            for start in range(1, T + K, positions):  # of the positions whose next token is guessed
                end = min(start + positions, T + K)
                probs = (teacher[part, start:end] @ weight.T).to(exact)  # logits, as yet: (sequences, end - start, V)
                best = probs.argmax(dim=-1)
                probs = probs.softmax(dim=-1) if objective == "distill" else None
                for i, row in enumerate(rows):  # in this order: where a head counts may depend on the one before
                    first, last = max(start - 1 - i, 0), min(end - 1 - i, T)  # the places from which head i guesses them
                    if first >= last:
                        continue
                    seen, here = slice(first + 1 + i - start, last + 1 + i - start), places[i, part, first:last]
                    logits = (row[part, first:last] @ weight.T).to(exact)
                    top, guess = logits.max(dim=-1, keepdim=True)
                    hits[i] += (given[i, part, first:last] & (guess[..., 0] == best[:, seen])).sum()
                    said = tokens[part, first + 2 + i:last + 2 + i, None]
                    if reach and i + 1 < K:
                        places[i + 1, part, first:last] &= here & ((logits > logits.gather(-1, said)).sum(dim=-1) < reach)
                    logits -= top  # from here on in place, up to the gradient
                    agreed = (probs[:, seen] * logits).sum(dim=-1) if objective == "distill" else logits.gather(-1, said)[..., 0]
                    mass = logits.exp_().sum(dim=-1)
                    sums[i] += ((mass.log() - agreed) * here).sum()
                    if grads[i] is not None:
                        gradient = logits.div_(mass[..., None])
                        if objective == "distill":
                            gradient -= probs[:, seen]
                        else:
                            gradient.scatter_add_(-1, said, gradient.new_full((), -1.0).expand(said.shape))
                        grads[i][part, first:last] = (gradient.to(weight.dtype) @ weight) * here[..., None]
        ctx.grads = grads
        places = places if reach else places.clone()  # an input handed out would count as changed in place
        ctx.mark_non_differentiable(hits, places)
        return sums, hits, places

    @staticmethod
    def backward(ctx, d_sums, *_):
        return (None,) * 7 + tuple(None if g is None else g * d.to(g.dtype) for g, d in zip(ctx.grads, d_sums.unbind()))


def state_losses(model, outputs, hidden, places):
    """Per head, float32 [K]: the sum, over the guesses that count, of the mean SmoothL1 distance between what the LM head would
    read of it and of the model, both after the final norm (Clover-2, arXiv 2408.00264, after EAGLE, 2401.15077).
    Arguments as for `head_losses`; differentiable with respect to the outputs."""
    T, teacher = outputs[0].shape[1], model.norm(hidden).detach().float()
    far = lambda i, out: F.smooth_l1_loss(model.norm(out).float(), teacher[:, i + 1:i + 1 + T], reduction="none").mean(dim=-1)
    return torch.stack([(far(i, out) * places[i]).sum() for i, out in enumerate(outputs)])


@torch.no_grad()
def top_hits(model, outputs, hidden, places, tops, chunk=None):
    """float32 [len(tops), K]: for each n of tops, how many of the guesses that count have the model's own greedy token among the n
    likeliest of a head; of equals the lower id counts as likelier. Logits are float32, as in decoding. Arguments as for
    `head_losses`; `chunk` logits at a time."""
    weight, (B, T, _) = model.head.weight, outputs[0].shape
    rows = max(1, (chunk or chunk_size(hidden.device)) // weight.shape[0])
    logits_of = lambda part: model.head.logits(model.norm(part))
    best = torch.cat([logits_of(part).argmax(dim=-1) for part in hidden.flatten(0, 1).split(rows)]).view(B, -1)
    ids, found = torch.arange(weight.shape[0], device=weight.device), []
    for i, out in enumerate(outputs):
        wanted, ranks = best[:, i + 1:i + 1 + T].flatten(), []
        for part, ids_wanted in zip(out.flatten(0, 1).split(rows), wanted.split(rows)):
            logits, ids_wanted = logits_of(part), ids_wanted[:, None]
            score = logits.gather(1, ids_wanted)
            ranks.append(((logits > score) | (logits == score) & (ids < ids_wanted)).sum(dim=-1))
        ranks = torch.cat(ranks)
        found.append(torch.stack([((ranks < n) & places[i].flatten()).sum().float() for n in tops]))
    return torch.stack(found, dim=1)
