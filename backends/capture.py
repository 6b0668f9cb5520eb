"""Compiles and captures the steps of an engine ahead of time."""

import contextlib
from functools import partial
from itertools import product

import torch

from engine.clock import seconds_between, timestamp
from generate import FILTERED, GREEDY, NOISE, Plan

MODES = FILTERED, NOISE, GREEDY
LARGEST_STEP = 512    # most nodes of a step that `capture_all` captures
LARGEST_GUIDED = 128  # the same for batches with grammars, whose masks the host computes
MEMORY_LEFT = 0.05    # it stops when less than this share of the GPU's memory is free


def warm_up(engine, guided=False):
    """Compiles and captures every option of the policy, in the decoder's own sampling mode, while
    all slots are idle. guided: those of batches with grammars."""
    decoder = engine.decoder
    with decoder.context():
        for option in engine.policy.reading_options:
            plan = Plan(decoder.batch_size, *option, decoder.sampling.mode)
            for _ in range(2):  # compiles, then captures
                idle_step(engine, plan, guided).wait()


def idle_step(engine, plan, guided):
    """Starts a step of idle slots."""
    run = None
    if guided:
        engine.guide.begin([None] * plan.B, False)
        run = partial(engine.guide.step, engine.decoder)
    return engine.decoder.launch(plan, run=run)


def capture_all(engine, progress=iter, guided=False):
    """Captures, while all slots are idle, the policy's options in all sampling modes for 1, 2, 4,
    ... sequences: plain steps and a fixed tree size, then steps of up to LARGEST_STEP nodes, the
    largest first, until the GPU's memory is nearly full. Others are no options from then on.
    Replays each graph once, to learn its time. progress: wraps the list of steps, as tqdm does.
    guided: captures the steps of batches with grammars, of up to LARGEST_GUIDED nodes."""
    decoder = engine.decoder
    policy = engine.policy
    sizes = {2 ** i for i in range(decoder.batch_size.bit_length())} | {decoder.batch_size}
    options = {(1, 0), *policy.reading_options}
    largest = LARGEST_GUIDED if guided else LARGEST_STEP
    steps = [(B, T, depths) for B, (T, depths) in product(sizes, options)
             if B * T <= largest or T <= decoder.read_sizes[0] or T == policy.tree_size]
    needed = 1, policy.tree_size
    steps.sort(key=lambda step: (step[1] not in needed, -step[0] * step[1], step))
    captured = policy.captured[guided]
    captured.clear()
    for step in progress(steps):
        free, total = torch.cuda.mem_get_info(decoder.device)
        if free < MEMORY_LEFT * total:
            break
        with contextlib.suppress(torch.OutOfMemoryError), decoder.context():
            seconds = capture_modes(engine, step, guided)
            if not any(Plan(*step, mode) in decoder.eager for mode in MODES):
                policy.times.learn(*step, seconds)
                captured.add(step)
    if not guided:
        decoder.batch_sizes = sorted({B for B, T, _ in captured if T == (policy.tree_size or 1)})


def capture_modes(engine, step, guided):
    """Captures a step (B, T, depths) in all sampling modes -> its seconds in the last one."""
    device = engine.decoder.device
    for mode in MODES:
        plan = Plan(*step, mode)
        for _ in range(2):  # compiles, then captures
            idle_step(engine, plan, guided).wait()
        start = timestamp(device)
        idle_step(engine, plan, guided)
        seconds = seconds_between(start, timestamp(device))
    return seconds
