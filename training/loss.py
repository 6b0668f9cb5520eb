"""The rows of the loss on CUDA: one pass of a Triton kernel each, in place, instead of the torch
functions of train_heads.py, whose letters are used here."""

import torch

import train_heads
from kernels import FINITE_MIN, runs_triton, tl, triton


def teacher_targets(logits, drafted=None):
    """`train_heads.teacher_targets`."""
    if not runs_triton(logits):
        return train_heads.teacher_targets(logits, drafted)
    R, V = logits.shape
    n = V if drafted is None else len(drafted)
    target, mass = logits.new_empty(R, n, dtype=torch.float32), logits.new_empty(R).float()
    greedy = torch.empty_like(mass, dtype=torch.int64)
    _teacher_kernel[R,](logits, drafted, target, mass, greedy, V, n, BLOCK=2048, num_warps=8)
    return target, mass, greedy


def cross_entropy(logits, target, mass):
    """`train_heads.cross_entropy`; the gradient replaces the logits."""
    if not runs_triton(logits):
        return train_heads.cross_entropy(logits, target, mass)
    loss = torch.empty_like(mass)
    guess = torch.empty_like(mass, dtype=torch.int64)
    _cross_entropy_kernel[len(logits),](logits, target, mass, loss, guess, logits.shape[1],
                                        BLOCK=2048, num_warps=8)
    return loss, guess, logits


ROWS = teacher_targets, cross_entropy  # for train_heads.head_losses


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
