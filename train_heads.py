"""Trains draft heads on a frozen model, by distillation of its next-token distribution.

    python train_heads.py                          # Clover heads for demo/, on the built-in corpus
    python train_heads.py --model DIR --data my_texts/ chats/*.jsonl.gz --out out/heads
    python train_heads.py --init DIR --data PATH   # starts from trained heads
    python train_heads.py --evaluate --out DIR     # measures heads without training them

A run is saved every few minutes, on Ctrl-C and on SIGTERM. --resume leads to the same heads as an
uninterrupted run: bit for bit on a CPU, up to rounding on a GPU.

The program is in training/. This file has the objective and the loop, which also train on any
tensor of token ids: `train(heads, ids, steps=500, batch_size=8, block_size=256, lr=6e-3)`.

Letters: B windows, T positions of a window, K draft heads, C hidden size, V vocabulary, n size of
the draft vocabulary (V without one), R rows of a chunk."""

if __name__ == "__main__":  # parse the flags before loading torch, to report a typo at once
    from contextlib import suppress
    with suppress(ModuleNotFoundError):  # the last lines name the folder that is missing
        from training.flags import parse_heads
        args = parse_heads()

import sys

import torch
import torch.nn.functional as F
from torch.func import functional_call

from kernels import float_logits
from model import InputError, check, needs_folders

HEAD_WEIGHT = 0.7  # head i's loss has weight 0.7^i: decoding reaches later heads less often
SHOW_EVERY = 20    # steps
# per chunk: on a CPU to fit its cache; on a GPU more, since each product reads the LM head
CHUNK_LOGITS = 2**22
CUDA_CHUNK_LOGITS = 2**25


# --------------------------------------------------------------------------------------------------
# Hidden states. dtype: of matrix products, float32 or bfloat16.

@torch.no_grad()
def run_model(model, ids, documents=None, dtype=torch.float32):
    """The hidden states [B, T, C] of the token ids and documents [B, T + 1] but the last ones."""
    documents = None if documents is None else documents[:, :-1]
    casts = dtype == torch.bfloat16 and model.dtype.itemsize > 2 and not model.blocks.is_packed
    with torch.autocast(model.device.type, torch.bfloat16, enabled=casts):
        return model(ids[:, :-1], documents=documents)


def run_heads(heads, hidden, ids, documents=None, dtype=torch.float32):
    """The heads' K outputs [B, T, C], with teacher forcing. hidden: [B, T + K, C] from `run_model`;
    ids, documents: [B, T + K + 1]."""
    K = heads.config.n_draft
    documents = None if documents is None else documents[:, :-K - 1]
    inputs = ids[:, 1:], documents
    hidden = hidden[:, :-K]
    if heads.model.dtype == dtype and not heads.model.blocks.is_packed:  # as in decoding
        weights = {name: weight.to(dtype) for name, weight in heads.named_parameters()}
        return functional_call(heads, weights, (hidden, *inputs))
    with torch.autocast(heads.model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        return heads(hidden.float(), *inputs)


# --------------------------------------------------------------------------------------------------
# The objective. Head i (from 0) at position t guesses token t + 2 + i, which the model predicts at
# position t + 1 + i. Heads learn the model's distribution over the draft vocabulary, where the next
# token of the text is in it. In text that the model sampled, this weights a position by the
# probability of the draft vocabulary there. Losses are sums, so that processes can add them up.
#
# K heads over B T positions have K B T n logits, and a gradient as large: with K = 5, B T = 4096
# and n = 152,000, 12 GB each. But the LM head is frozen, so the gradient of its input can be taken
# as soon as the logits are known. The forward pass does so chunk by chunk, and keeps only that
# gradient, K B T C. With torch.utils.checkpoint instead, training steps take 1.3 times as long.

def guess_masks(tokens, K, loss_mask, documents=None):
    """Which guesses count, bool [K, B, T]: those of a token in loss_mask, in the same document as
    their position. tokens, loss_mask, documents: [B, T + K + 1]."""
    T = tokens.shape[1] - K - 1
    documents = torch.zeros_like(tokens) if documents is None else documents
    ahead = [slice(i + 2, i + 2 + T) for i in range(K)]
    return torch.stack([loss_mask[:, at] & (documents[:, at] == documents[:, :T]) for at in ahead])


def window_losses(heads, ids, loss_mask, documents=None, hidden=None, dtype=torch.float32):
    """Losses of windows [B, T + K + 1], as in `Trainer.train_step` -> the losses and hits of
    `head_losses`, and the number of guesses, each float32 [K]. Tokens that are not in the draft
    vocabulary are guesses without loss or hit."""
    hidden = run_model(heads.model, ids, documents, dtype) if hidden is None else hidden
    hidden = hidden.to(heads.model.dtype)
    outputs = run_heads(heads, hidden, ids, documents, dtype)
    guesses = guess_masks(ids, len(outputs), loss_mask, documents).sum(dim=(1, 2)).float()
    if heads.vocabulary is not None:
        loss_mask = loss_mask & torch.isin(ids, heads.vocabulary)
    guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
    return *head_losses(heads, hidden, outputs, guess_mask, dtype), guesses


def head_losses(heads, hidden, outputs, guess_mask, dtype=torch.float32):
    """Sums over guess_mask [K, B, T] for each head -> (cross-entropy against the model's
    distribution over the draft vocabulary in nats, hits: top-1 is the model's), each float32 [K].
    hidden: [B, T + K, C] of the model; outputs: K tensors [B, T, C]; both before the final norm."""
    K = len(guess_mask)
    norm = heads.model.norm
    weight = heads.model.head.embedding(heads.vocabulary)  # (n, C)
    head_weight = weight.to(dtype)
    teacher = norm(hidden).flatten(0, 1)  # (B (T + K), C)
    # head i's position t is in row t + 1 + i, as the model's prediction of the same token
    shifts = [(i + 1, K - 1 - i) for i in range(K)]
    states = [F.pad(norm(out.to(hidden.dtype)).to(dtype), (0, 0, *shift)).flatten(0, 1)
              for out, shift in zip(outputs, shifts)]
    counted = torch.stack([F.pad(mask, shift).flatten() for mask, shift in zip(guess_mask, shifts)])
    grads = [torch.zeros_like(x) for x in states]
    wants_gradient = torch.is_grad_enabled()
    chunk_logits = CUDA_CHUNK_LOGITS if teacher.is_cuda else CHUNK_LOGITS
    losses, hits = torch.zeros(2, *counted.shape, device=teacher.device)
    for chunk in chunks(counted.any(dim=0), max(1, chunk_logits // len(weight))):
        target = float_logits(teacher[chunk], weight).softmax(dim=-1)  # (R, n)
        greedy = target.argmax(dim=-1)
        for i, state in enumerate(states):
            state = state[chunk].detach().requires_grad_(wants_gradient)
            logits = (state @ head_weight.T).float()
            loss = F.cross_entropy(logits, target, reduction="none")
            losses[i, chunk] = loss.detach()
            hits[i, chunk] = (logits.argmax(dim=-1) == greedy).float()
            if wants_gradient:
                grads[i][chunk], = torch.autograd.grad(loss.sum(), state)
    # x * grad, for a constant grad, has the gradient that is wanted; its value cancels
    linear = torch.stack([(x * grad).sum(-1) for x, grad in zip(states, grads)]).float()
    losses = losses + (linear - linear.detach())
    return (losses * counted).sum(dim=1), (hits * counted).sum(dim=1)


def chunks(mask, n):
    """Yields n row numbers at a time where mask [rows] is set. On a GPU yields slices of all rows,
    set or not, as reading the mask would synchronise."""
    if mask.device.type == "cpu":
        yield from mask.nonzero()[:, 0].split(n)
    else:
        yield from (slice(first, first + n) for first in range(0, len(mask), n))


# --------------------------------------------------------------------------------------------------
# The loop

def set_learning_rate(optimizer, peak, step, steps):
    """Linear warm-up over the first 2% of the steps, linear decay to zero over the last 40%."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / (0.02 * steps), (steps - step) / (0.4 * steps))


class Trainer:
    """Heads in training, float32 on the model's device. lr: the highest learning rate. reduce: sums
    a tensor over the ranks in place and returns it; each trains on its part of a batch."""

    def __init__(self, heads, steps, lr, dtype=torch.float32, reduce=lambda x: x):
        self.heads = heads.to(heads.model.device, torch.float32).requires_grad_().train()
        self.steps = steps
        self.lr = lr
        self.dtype = dtype
        self.reduce = reduce
        self.step = 0
        self.optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0,
                                           fused=True)

    def train(self, windows):
        """Trains on windows(step), the arguments of `train_step`, until the last step. Yields the
        (loss, head accuracies [K]) of each step."""
        while self.step < self.steps:
            yield self.train_step(*windows(self.step))

    def train_step(self, ids, loss_mask, documents=None, hidden=None):
        """Does one optimizer step on windows of token ids [B, T + K + 1] -> (loss, head accuracies
        [K]). loss_mask: the tokens to guess, bool; documents: the number of each token's document,
        None if no window has two; both like ids. hidden: as from `run_model`, if it is known."""
        loss, accuracies = self.loss(ids, loss_mask, documents, hidden)
        loss.backward()
        self.update()
        return loss.detach(), accuracies

    def loss(self, ids, loss_mask, documents, hidden=None):
        """The (loss in nats, head accuracies [K]) of a batch over all processes. The gradient
        covers only this process's part of the batch."""
        losses, hits, guesses = window_losses(self.heads, ids, loss_mask, documents, hidden,
                                              self.dtype)
        count = self.reduce(guesses).clamp(min=1)
        weights = HEAD_WEIGHT ** torch.arange(len(count), device=count.device)
        loss = (losses * weights / count).sum()
        total = self.reduce(loss.detach().clone())
        return total + (loss - loss.detach()), self.reduce(hits) / count

    def update(self):
        """Changes the weights by their gradients."""
        for parameter in self.heads.parameters():
            self.reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        set_learning_rate(self.optimizer, self.lr, self.step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def is_shown(self):
        """Whether this step's loss is read, which waits for a GPU."""
        return self.step % SHOW_EVERY == 0 or self.step == self.steps

    def describe(self, loss, accuracies):
        """The line that reports a step."""
        shown = " ".join(map("{:.3f}".format, accuracies))
        return f"step {self.step}/{self.steps}  loss {loss:.3f}  accuracy {shown}"


def train(heads, ids, *, steps, batch_size, block_size, lr, seed=1, dtype=torch.float32, log=print):
    """Trains heads on token ids, an integer tensor [N], in windows of block_size positions that
    begin at random ids. Leaves the heads ready to decode. Raises InputError for too few ids."""
    model = heads.model
    ahead = heads.config.n_draft + 1
    check("block size", block_size, 1, model.config.block_size - ahead, whole=True)
    check("number of token ids", len(ids), block_size + ahead, 2**63)
    places = ids.unfold(0, block_size + ahead, 1)  # a view
    generator = torch.Generator().manual_seed(seed)

    def windows(step):
        batch = places[torch.randint(len(places), (batch_size,), generator=generator)]
        batch = batch.to(model.device, torch.int64)
        return batch, torch.ones_like(batch, dtype=torch.bool)
    trainer = Trainer(heads, steps, lr, dtype)
    for loss, accuracies in trainer.train(windows):
        if trainer.is_shown():
            log(trainer.describe(loss.item(), accuracies.tolist()))
    heads.to(model.dtype).requires_grad_(False).eval()


if __name__ == "__main__":
    try:
        with needs_folders():
            from tools.errors import command
            from training.program import main  # imports this file as a module
    except InputError as error:
        print(f"train_heads.py: {error}", file=sys.stderr)
        sys.exit(2)
    with command():
        if code := main(args):
            sys.exit(code)
