"""Times a function, a decoding step, or the stages of a step."""

from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.benchmark import Timer

from engine.policy import Policy
from generate import Output, Plan, capture, decoder_class

STAGES = ("draft", "verify", "sample", "accept", "commit")
PREFIX = 256  # cached tokens while a step is timed


@dataclass
class Measured(Output):
    """The `Output` of one run over some prompts, by any program."""
    decode_seconds: float = 0.0  # without prefill and each prompt's first token
    prompt_tokens: int = 0


def seconds(body):
    """Seconds per call of body(), of the fastest block of calls in about 0.1 s, as other work only
    adds time."""
    timer = Timer("body()", globals=dict(body=body), num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times)


def copy_bandwidth(device):
    """Bytes per second, read and written, of a copy of 2 GiB (256 MiB on a CPU)."""
    size = 2**31 if device.type == "cuda" else 2**28
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


@torch.inference_mode()
def timing_decoder(model, heads, tree_size, lookup=False, **options):
    """A `Decoder` with one tree size, whose slots have PREFIX cached tokens, or as many as the
    model's context holds. options: the Decoder's."""
    capacity = min(PREFIX + 1, model.config.block_size)
    policy = Policy(model, heads, lookup, tree_size)
    decoder = decoder_class(model, policy.heads)(model, policy=policy, capacity=capacity, **options)
    decoder.slots.active.fill_(1)
    decoder.slots.cache.lengths.fill_(capacity - 1)
    return decoder


def decoder_seconds(decoder, body):
    """`seconds` of body(), a step or a stage of a `timing_decoder`, always at the same length."""
    lengths, heads_lengths = decoder.slots.cache.lengths, decoder.slots.heads_cache.lengths
    start = lengths.clone()

    def once():
        lengths.copy_(start)
        if heads_lengths is not lengths:  # in C, drafting reads new tokens: leave one unread
            heads_lengths.copy_(start).sub_(1).clamp_(min=0)
        body()
    return seconds(once)


@torch.inference_mode()
def stage_times(decoder):
    """{"step" or a stage of it: seconds} of a `timing_decoder`. Each is timed by itself, in a CUDA
    graph of its own if the decoder uses graphs. Drafting a tree of one node takes 0."""
    option, = decoder.policy.options
    plan = Plan(decoder.batch_size, *option, decoder.sampling.mode)
    times = dict.fromkeys(("step", *STAGES), 0.0)
    with decoder.context():
        times["step"] = decoder_seconds(decoder, partial(decoder.run, decoder.step, plan))
        draft = decoder.draft(plan)
        normed, hidden = decoder.verify(plan, draft)
        target = decoder.sample(plan, draft, normed)
        accepted = decoder.accept(plan, draft, target)
        arguments = dict(draft=(), verify=(draft,), sample=(draft, normed), accept=(draft, target),
                         commit=(draft, hidden, accepted))
        if plan.tree_size == 1:
            del arguments["draft"]  # launches nothing; torch warns about empty CUDA graphs
        for name, values in arguments.items():
            stage = partial(getattr(decoder, name), plan, *values)
            if decoder.pool is not None:
                stage = capture(stage, decoder.device)
            times[name] = decoder_seconds(decoder, stage)
    return times
