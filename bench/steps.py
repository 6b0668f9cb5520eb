"""Single steps at the sizes of real models, with random weights: their times, and what a GPU does
in them."""

import contextlib
import statistics
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from backends import cpu
from backends.tensor_parallel import Group, group_of, no_room
from bench import Table, peers
from bench.decoding import GB, measure_bandwidth, open_record, parameter_bytes, step_bytes
from clover import CloverHeads, preset
from generate import DraftPlan, Sampling, capture
from model import GPT, GPTConfig, check_memory, free_memory, pick_device
from tools.timing import PREFIX, STAGES, seconds, stage_times, step_time, timing_decoder

FIELDS = "vocab_size n_layer n_head n_kv_head head_size n_embd n_inner".split()
QWEN = dict(tied=True, qkv_bias=True, family="qwen2")
SIZES = {  # name: (the model, its FIELDS, and other fields of its GPTConfig)
    "135m": ("SmolLM2 135M", (49152, 30, 9, 3, 64, 576, 1536), dict(tied=True)),
    "360m": ("SmolLM2 360M", (49152, 32, 15, 5, 64, 960, 2560), dict(tied=True)),
    "0.5b": ("Qwen2.5 0.5B", (151936, 24, 14, 2, 64, 896, 4864), QWEN),
    "1.5b": ("Qwen2.5 1.5B", (151936, 28, 12, 2, 128, 1536, 8960), QWEN),
    "7b": ("Llama 2 7B", (32000, 32, 32, 32, 128, 4096, 11008), {}),
    "8b": ("Llama 3 8B", (128256, 32, 32, 8, 128, 4096, 14336), {}),
    "30b": ("LLaMA 30B", (32000, 60, 52, 52, 128, 6656, 17920), {}),
    "70b": ("Llama 3 70B", (128256, 80, 64, 8, 128, 8192, 28672), {}),
    "70b-layer": ("one layer of Llama 3 70B, and its LM head",
                  (128256, 1, 64, 8, 128, 8192, 28672), {}),
}
FEW_TOKENS = 8192  # of a vocabulary of twice as many or more, random heads draft among these
SIZED = {"batch size": "batch_size {}", "tree size": "tree_size {}"}
STEPS = {**SIZED, "ms per step": "step_ms {:.2f}", "floor, ms": "floor_ms {:.2f}",
         "share of the floor": "share {:.0%}",
         **{f"{stage}, ms": f"stages_ms.{stage} {{:.2f}}" for stage in STAGES}}
GATHERS = {"gathers from the ranks, ms": "gathers_ms {:.2f}"}  # by themselves
LAUNCHES = {**SIZED, "launches": "launches {}", "in kernels, ms": "kernels_ms {:.2f}"}


def size_config(name):
    """The GPTConfig of a name in SIZES."""
    _, sizes, others = SIZES[name]
    fields = dict(tied=False, block_size=4096, rope_theta=500000.0) | dict(zip(FIELDS, sizes))
    return GPTConfig(**fields | others)


def random_model(name, device, dtype, group=None):
    """A GPT of a real model's sizes with random weights. InputError where memory has no room."""
    group = group or Group()
    with torch.device("meta"):
        model = GPT(size_config(name))
        group.divide(model)
        model.to(dtype)
    check_memory(f"random weights of {name} in {str(dtype).removeprefix('torch.')} take",
                 parameter_bytes(model), group.min(free_memory(device)), device,
                 "take another size or --dtype bfloat16")
    model = model.to_empty(device=device)
    for parameter_name, p in model.named_parameters():
        p.data.fill_(1) if parameter_name.endswith("norm.weight") else p.data.normal_(0, 0.02)
    group.connect(model)
    return model.requires_grad_(False).eval()


def random_heads(model, vocabulary=None):
    """Untrained Clover heads, which draft among this many ids, the first; 0: among all; None: among
    FEW_TOKENS where there are twice as many. InputError for more than there are."""
    if vocabulary is None:
        vocabulary = FEW_TOKENS if model.config.vocab_size >= 2 * FEW_TOKENS else 0
    with model.device:
        heads = CloverHeads(preset("clover"), model).to(model.dtype)
    heads.set_vocabulary(torch.arange(vocabulary))
    return heads.requires_grad_(False).eval()


def peak_memory(body):
    """GB of memory that this process has at most while body() runs, libraries and all. Where the
    system does not forget an earlier peak, this may be that one."""
    import resource  # which Windows has not
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts anew
    body()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GB


# -------------------------------------------------------------------------------------------------
# `python -m bench decode --random-weights`

def gathers(decoder):
    """A function that does nothing of a step but to gather from all ranks what it gathers."""
    group = group_of(decoder.model)
    gather = group.all_gather
    gathered = []
    with patch.object(group, "all_gather", lambda x: gathered.append(x.clone()) or gather(x)):
        decoder.step(decoder.plans[0])
    body = lambda: [group.all_gather(x) for x in gathered]
    if decoder.model.device.type != "cuda":
        return body
    body()  # NCCL takes its buffers
    replay = capture(body, decoder.model.device)
    return lambda: (replay(), gathered)[0]  # a graph keeps no tensor


@torch.inference_mode()
def measure_step(model, heads, batch_size, tree_size, bandwidth, args, others):
    """A row: the time of one step, of its stages and of other programs' steps, medians of --runs
    rounds, and the medians of the rounds' ratios. In a round all take turns, so that other work
    meets them alike. others: {name: a running one of peers.PROGRAMS}."""
    group = group_of(model)
    heads = heads if tree_size > 1 else None
    decoder = timing_decoder(model, heads, DraftPlan(tree_size - 1), batch_size=batch_size,
                             sampling=Sampling(args.temperature))
    bodies = dict(step=decoder.body())
    bodies |= dict(gathers=gathers(decoder)) if group.size > 1 else {}
    found = {name: program.body(tree_size) for name, program in others.items()}
    bodies |= {name: body for name, body in found.items() if body}
    times = {name: [] for name in bodies}
    for _ in range(args.runs):
        for name, body in bodies.items():
            times[name].append(seconds(body, model.device, group))
    row = {f"{name}_ms": 1e3 * statistics.median(found) for name, found in times.items()}
    for name, (a, b) in peers.RATIOS.items():
        if name in times:
            row[f"{name}_ratio"] = statistics.median(x / y for x, y in zip(times[a], times[b]))
    floor_ms = 1e3 * step_bytes(model, batch_size) / bandwidth
    stages = {name: 1e3 * time for name, time in stage_times(decoder).items()}
    return row | dict(floor_ms=floor_ms, share=floor_ms / row["step_ms"], stages_ms=stages)


def measure_steps(model, heads, batch_size, bandwidth, args, record, table):
    """Adds the rows of one batch size that are missing. Others run beside a batch of one."""
    missing = lambda size: not table.has(batch_size=batch_size, tree_size=size)
    sizes = list(filter(missing, args.tree_sizes))
    compared = batch_size == 1 and group_of(model).size == 1 and model.device.type == "cpu"
    rivals = peers.running(model) if sizes and compared else contextlib.nullcontext(({}, {}))
    with rivals as (others, words):
        record.update(dict(peers=words) if words else {})
        for size in sizes:
            label = dict(batch_size=batch_size, tree_size=size)
            try:
                table.add(label | measure_step(model, heads, batch_size, size, bandwidth, args,
                                               others))
            except no_room(group_of(model)):
                table.show(label | dict(step_ms="does not fit the memory"))


def kernel_times(body, device):
    """{kernel: [launches, ms]} of one body() on a GPU, by torch's profiler, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        body()
        torch.cuda.synchronize(device)
    found = {event.key: [event.count, event.self_device_time_total / 1e3]
             for event in profile.key_averages()
             if event.device_type == torch.autograd.DeviceType.CUDA}
    return dict(sorted(found.items(), key=lambda pair: -pair[1][1]))


@torch.inference_mode()
def profile_steps(model, heads, table, sampling):
    """Adds to the rows what the GPU did in their steps. A profiler may slow down what follows."""
    shown = Table(LAUNCHES)
    for row in table:
        if "kernels" not in row:
            drafting = heads if row["tree_size"] > 1 else None
            decoder = timing_decoder(model, drafting, DraftPlan(row["tree_size"] - 1),
                                     batch_size=row["batch_size"], sampling=sampling)
            found = kernel_times(decoder.body(), model.device)
            row |= dict(launches=sum(count for count, _ in found.values()), kernels=found,
                        kernels_ms=sum(ms for _, ms in found.values()))
            table.save()
        shown.show(row)


def bench(args, group):
    """The time of one step for each batch and tree size -> the Record."""
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else cpu.default_dtype(device, torch.bfloat16)
    model = random_model(args.random_weights, device, dtype, group)
    heads = random_heads(model, args.draft_vocabulary)
    record = open_record(args, group, bench="decode-random", model=args.random_weights,
                         device=str(device), dtype=str(dtype), prefix=PREFIX,
                         draft_vocabulary=heads.config.vocabulary)
    sampling = Sampling(args.temperature)
    record.update(weights_gb=parameter_bytes(model) / GB, heads_gb=parameter_bytes(heads) / GB)
    if device.type == "cpu":  # before anything else takes memory
        plan = DraftPlan(max(args.tree_sizes) - 1)
        step = lambda: step_time(timing_decoder(model, heads, plan, sampling=sampling))
        record.once("peak_rss_gb", partial(peak_memory, step))
    bandwidth = measure_bandwidth(record, device, group)
    held = "" if group.size == 1 else f" on each of {group.size} ranks"
    print(f"{SIZES[args.random_weights][0]}, {sum(p.numel() for p in model.parameters()) / 1e9:.2f}"
          f"B random parameters{held}; {PREFIX} tokens in the cache of each sequence")
    columns = GATHERS if group.size > 1 else peers.COLUMNS if device.type == "cpu" else {}
    table = record.table("steps", STEPS | columns)
    for batch_size in args.batch_sizes:
        measure_steps(model, heads, batch_size, bandwidth, args, record, table)
    if device.type == "cuda":
        profile_steps(model, heads, table, sampling)
    for name, words in record.get("peers", {}).items():
        print(f"{peers.PROGRAMS[name].title}: {words}")
    return record.done()
