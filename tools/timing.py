"""How long a body, a step or its stages take."""

import math
import time
from functools import partial

import torch

from backends.tensor_parallel import Group, group_of
from generate import Decoder, DraftPlan, capture

STAGES = ("draft", "verify", "sample", "accept", "commit")
PREFIX = 256  # tokens in the cache while a step is timed


def seconds(body, device, group=Group()):
    """Time of one body(): on a CPU the fastest call, since other work on the machine only adds; on
    CUDA the mean of calls back to back, the fastest of some rounds. Takes about 0.1 s, or three
    rounds of what is slower. group: the ranks that run body() together; rank 0's time counts."""
    calls = 10 if device.type == "cuda" else 1

    def once():
        start = time.perf_counter()
        for _ in range(calls):
            body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls
    body()
    times = [once() for _ in range(3)]
    more = group.broadcast(math.ceil(0.1 / max(calls * min(times), 1e-6)) - 3)  # on all ranks
    return group.broadcast(min(times + [once() for _ in range(more)]))


def copy_bandwidth(device):
    """Bytes read and written per second by a copy of 2 GiB, on a CPU of 256 MiB."""
    size = 2**31 if device.type == "cuda" else 2**28
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device)


@torch.inference_mode()
def timing_decoder(model, heads, plan, prefix=PREFIX, **options):
    """A `Decoder` of one plan that can step forever: its slots are idle, with `prefix` tokens in
    the cache, or as many as the model's context has room for. options: the Decoder's."""
    capacity = min(prefix + 1, model.config.block_size)
    decoder = Decoder(model, heads, capacity=capacity, plans=(plan,), **options)
    decoder.slots.cache.lengths.fill_(capacity - 1)
    return decoder


@torch.inference_mode()
def step_time(decoder):
    """Seconds of one step of a `timing_decoder`, on CUDA of its graph."""
    step = partial(decoder.run, *decoder.plans)
    step()  # the first one compiles and captures
    return seconds(step, decoder.model.device, group_of(decoder.model))


@torch.inference_mode()
def stage_times(decoder):
    """{stage: seconds} of one step of a `timing_decoder`, each stage timed by itself; as a CUDA
    graph of its own, if the decoder uses graphs. The draft of a tree of one is 0."""
    plan, = decoder.plans
    device = decoder.model.device
    decoder.step(plan)  # compiles all stages
    tree = decoder.draft(plan)
    positions = decoder.slots.cache.lengths[:, None] + tree.depths
    normed, hidden = decoder.verify(tree, positions)
    target = decoder.sample(normed, positions)
    accepted = decoder.accept(plan, tree, target)
    arguments = dict(draft=(plan,), verify=(tree, positions), sample=(normed, positions),
                     accept=(plan, tree, target), commit=(plan, hidden, accepted))
    if plan.tree_size == 1:
        del arguments["draft"]  # launches nothing, and torch warns of an empty CUDA graph
    times = dict.fromkeys(STAGES, 0.0)
    for name, values in arguments.items():
        stage = partial(getattr(decoder, name), *values)
        if decoder.pool is not None:
            stage = capture(stage, device)
        times[name] = seconds(stage, device, group_of(decoder.model))
    return times


def explain(engine, output):
    """The lines of --explain: what each step was selected from, how often, and where time goes."""
    decoder = engine.decoder
    yield (f"batch size {decoder.batch_size}, on {decoder.model.device}, "
           f"{torch.get_num_threads()} threads")
    if len(decoder.plans) > 1:  # as an `AdaptivePolicy` believes at the end
        yield (f"\n{'drafted by':<24}{'ms per step':>12}{'tokens per step: expected':>28}"
               f"{'found':>8}{'share of steps':>17}")
        for plan in decoder.plans:
            steps, tokens = output.plans.get(plan, (0, 0))
            ms, expected = 1e3 * engine.policy.seconds(plan), engine.policy.tokens(plan)
            found = f"{tokens / steps:.2f}" if steps else "-"
            yield (f"{str(plan):<24}{ms:>12.2f}{expected:>28.2f}{found:>8}"
                   f"{steps / max(output.steps, 1):>17.0%}")
    yield f"\n{'ms per stage':<24}" + "".join(f"{stage:>10}" for stage in STAGES)
    sampling = max((s.sampling for s in output.sequences), key=lambda sampling: sampling.mode)
    most = max(output.plans, key=lambda plan: output.plans[plan][0], default=decoder.plans[0])
    for plan in dict.fromkeys((DraftPlan(), most)):
        times = stage_times(timing_decoder(
            decoder.model, decoder.heads, plan, batch_size=decoder.batch_size,
            beams=decoder.beams, sampling=sampling, graph=decoder.pool is not None))
        yield f"{str(plan):<24}" + "".join(f"{1e3 * t:>10.2f}" for t in times.values())
