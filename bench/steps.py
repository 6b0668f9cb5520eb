"""`python -m bench decode --random-weights SIZE`: single steps at the sizes of real models, against
the time in which the memory moves what a step reads."""

import statistics
from itertools import product

import torch

from backends import cpu
from backends.tensor_parallel import start
from bench import Table
from bench.sizes import SIZES, size_config
from clover import CloverHeads, preset
from generate import DraftPlan, Sampling
from model import GPT, check_memory, free_memory, pick_device
from tools.timing import PREFIX, copy_bandwidth, stage_times, step_time, timing_decoder


def random_model(name, device, dtype, group):
    """A GPT of a real model's sizes with random weights. InputError where memory has no room."""
    with torch.device("meta"):
        model = GPT(size_config(name))
        group.divide(model)
        model.to(dtype)
    check_memory(f"random weights of {name} in {str(dtype).removeprefix('torch.')} take",
                 sum(p.nbytes for p in model.parameters()), group.min(free_memory(device)), device,
                 "take another size or --dtype bfloat16")
    model = model.to_empty(device=device)
    for parameter_name, p in model.named_parameters():
        p.data.fill_(1) if parameter_name.endswith("norm.weight") else p.data.normal_(0, 0.02)
    group.connect(model)
    return model.requires_grad_(False).eval()


def random_heads(model, vocabulary):
    """Untrained Clover heads, which draft among the first `vocabulary` token ids; 0: among all."""
    with model.device:
        heads = CloverHeads(preset("clover"), model).to(model.dtype)
    if vocabulary < model.config.vocab_size:
        heads.set_vocabulary(torch.arange(vocabulary))
    return heads.requires_grad_(False).eval()


def step_bytes(model, batch_size):
    """What one step must read, on each rank: the weights, but for an embedding table that is not
    the LM head as well, and the keys and values of PREFIX tokens of each sequence."""
    c = model.blocks[0].attn.config
    weights = sum(p.nbytes for p in model.parameters())
    if model.embed.weight is not model.head.weight:
        weights -= model.embed.weight.nbytes
    row = 2 * c.n_layer * c.n_kv_head * c.head_size * model.dtype.itemsize
    return weights + batch_size * PREFIX * row


def bench(args):
    """Prints the time of one step for each batch and tree size -> the result."""
    group = start(args)
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else cpu.default_dtype(device, torch.bfloat16)
    bandwidth = copy_bandwidth(device)
    model = random_model(args.random_weights, device, dtype, group)
    heads = random_heads(model, args.draft_vocabulary)
    print(f"{SIZES[args.random_weights][0]} with random weights; {PREFIX} tokens in the cache of "
          f"each sequence; copies at {bandwidth / 1e9:.1f} GB/s (bytes read and written)")
    table = Table()
    for B, T in product(args.batch_sizes, args.tree_sizes):
        decoder = timing_decoder(model, heads if T > 1 else None, DraftPlan(T - 1), batch_size=B,
                                 sampling=Sampling(args.temperature))
        ms = 1e3 * statistics.median(step_time(decoder) for _ in range(args.runs))
        floor = 1e3 * step_bytes(model, B) / bandwidth
        stages = {f"{stage}_ms": 1e3 * time for stage, time in stage_times(decoder).items()}
        table.add(dict(batch_size=B, tree_size=T, step_ms=ms, floor_ms=floor, share=floor / ms)
                  | stages)
    group.close()
    return dict(bench="decode-random", model=args.random_weights, device=str(device),
                dtype=str(dtype), prefix=PREFIX, temperature=args.temperature, runs=args.runs,
                ranks=group.size, draft_vocabulary=heads.config.vocabulary,
                copy_gb_per_s=bandwidth / 1e9, steps=table)
