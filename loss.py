"""The loss of draft heads, in memory that does not grow with heads, tokens or vocabulary.

K heads over N tokens and a vocabulary of V make K * N * V logits, and their gradient as many again: with K = 5, N = 4096 and
V = 152,000 that is 12 GB each in float32. But the LM head is frozen, so the gradient with respect to what it reads is
known as soon as the logits are. Both are made here chunk by chunk in the forward pass, and only [N, C] is kept.

Letters: B sequences, T positions, K heads, C hidden size, V vocabulary.
"""

import torch

CHUNK = 2**24  # logits at a time, 64 MB in float32; beside them stand the model's own probabilities, as many


def head_losses(model, outputs, hidden, tokens, objective="distill", chunk=CHUNK):
    """Per head the mean cross-entropy in nats, and the head accuracy: (losses [K], accuracies [K]), both float32.

    outputs: K tensors [B, T, C], what the heads hand to the LM head; head i (from 0) at position t guesses token t + 2 + i.
    hidden [B, T + K, C]: the model's at positions 0..T + K - 1; tokens int64 [B, T + K + 1]. objective: "distill", against
    what the model would say, or "data", against what the text says. Accuracy is the share of positions where the
    head's first guess is the model's own greedy token. Products are in autocast's dtype where it is on, sums in float32.
    Differentiable with respect to the outputs. Logits exist for at most `chunk` numbers (or one position) at a time; with the
    model's probabilities, the gradient, and copies in both dtypes that is up to six times so many numbers.
    """
    teacher = model.norm(hidden).detach()
    kind = hidden.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else model.head.weight.dtype
    return HeadLosses.apply(model.head.weight.to(dtype), teacher.to(dtype), tokens, objective, chunk,
                            *(model.norm(out).to(dtype) for out in outputs))


class HeadLosses(torch.autograd.Function):
    """`head_losses` after the final norm: weight [V, C], teacher [B, T + K, C], rows K times [B, T, C], all of one dtype."""

    @staticmethod
    def forward(ctx, weight, teacher, tokens, objective, chunk, *rows):
        (B, T, _), K, V = rows[0].shape, len(rows), weight.shape[0]
        exact = torch.promote_types(weight.dtype, torch.float32)
        sums, hits = torch.zeros(2, K, dtype=exact, device=weight.device).unbind()
        grads = [torch.empty_like(row) if needed else None for row, needed in zip(rows, ctx.needs_input_grad[5:])]
        sequences = min(B, max(1, chunk // V))
        positions = max(1, chunk // (V * sequences))
        for b in range(0, B, sequences):
            part = slice(b, b + sequences)
            for start in range(1, T + K, positions):  # of the positions whose next token is guessed
                end = min(start + positions, T + K)
                probs = (teacher[part, start:end] @ weight.T).to(exact)  # logits, as yet: (sequences, end - start, V)
                best = probs.argmax(dim=-1)
                probs = probs.softmax(dim=-1) if objective == "distill" else None
                for i, row in enumerate(rows):
                    first, last = max(start - 1 - i, 0), min(end - 1 - i, T)  # the places from which head i guesses them
                    if first >= last:
                        continue
                    seen = slice(first + 1 + i - start, last + 1 + i - start)
                    logits = (row[part, first:last] @ weight.T).to(exact)
                    hits[i] += (logits.argmax(dim=-1) == best[:, seen]).sum()
                    if objective == "distill":
                        sums[i] += logits.logsumexp(dim=-1).sum() - (probs[:, seen] * logits).sum()
                    else:
                        said = tokens[part, first + 2 + i:last + 2 + i, None]
                        sums[i] += (logits.logsumexp(dim=-1) - logits.gather(-1, said)[..., 0]).sum()
                    if grads[i] is not None:
                        gradient = logits.softmax(dim=-1)
                        if objective == "distill":
                            gradient -= probs[:, seen]
                        else:
                            gradient.scatter_add_(-1, said, gradient.new_full((), -1.0).expand(said.shape))
                        grads[i][part, first:last] = (gradient.to(weight.dtype) @ weight) / (B * T)
        ctx.grads = grads
        losses, accuracies = sums / (B * T), hits / (B * T)
        ctx.mark_non_differentiable(accuracies)
        return losses, accuracies

    @staticmethod
    def backward(ctx, d_losses, _):
        return (None,) * 5 + tuple(None if g is None else g * d for g, d in zip(ctx.grads, d_losses.unbind()))


@torch.no_grad()
def top_accuracies(model, outputs, hidden, tops, chunk=CHUNK):
    """float32 [len(tops), K]: for each n of tops, the share of positions where the model's own greedy token is among the n likeliest
    of a head; of equals the lower id counts as likelier. outputs and hidden as for `head_losses`; `chunk` logits at a time."""
    weight, (B, T, _) = model.head.weight, outputs[0].shape
    rows = max(1, chunk // weight.shape[0])
    best = torch.cat([model.lm_head(part).argmax(dim=-1) for part in hidden.flatten(0, 1).split(rows)]).view(B, -1)
    ids, shares = torch.arange(weight.shape[0], device=weight.device), []
    for i, out in enumerate(outputs):
        wanted, ranks = best[:, i + 1:i + 1 + T].flatten(), []
        for part, ids_wanted in zip(out.flatten(0, 1).split(rows), wanted.split(rows)):
            logits, ids_wanted = model.lm_head(part), ids_wanted[:, None]
            score = logits.gather(1, ids_wanted)
            ranks.append(((logits > score) | (logits == score) & (ids < ids_wanted)).sum(dim=-1))
        ranks = torch.cat(ranks)
        shares.append(torch.stack([(ranks < n).float().mean() for n in tops]))
    return torch.stack(shares, dim=1)
