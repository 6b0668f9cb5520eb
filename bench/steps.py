"""`python -m bench decode --random-weights SIZE`: single steps at the sizes of real models, against
the time in which the memory moves what a step reads."""

from itertools import product

import torch

from backends import cpu
from bench import Table
from bench.sizes import SIZES, size_config
from clover import CloverHeads, preset
from generate import DraftPlan, Sampling
from model import GPT, check_memory, free_memory, pick_device
from tools.timing import PREFIX, copy_bandwidth, stage_times, step_time, timing_decoder

DRAFT_VOCABULARY = 8192


def random_model(name, device, dtype):
    """A GPT of a real model's sizes, and Clover heads that draft among DRAFT_VOCABULARY token ids,
    with random weights. InputError where memory has no room."""
    with torch.device("meta"):
        model = GPT(size_config(name)).to(dtype)
    check_memory(f"random weights of {name} in {str(dtype).removeprefix('torch.')} take",
                 sum(p.nbytes for p in model.parameters()), free_memory(device), device,
                 "take another size or --dtype bfloat16")
    model = model.to_empty(device=device).requires_grad_(False).eval()
    for parameter_name, p in model.named_parameters():
        p.fill_(1) if parameter_name.endswith("norm.weight") else p.normal_(0, 0.02)
    with model.device:
        heads = CloverHeads(preset("clover"), model).to(dtype).requires_grad_(False).eval()
    heads.set_vocabulary(torch.arange(min(DRAFT_VOCABULARY, model.config.vocab_size)))
    return model, heads


def step_bytes(model, batch_size):
    """What one step must read: the weights, but for an embedding table that is not the LM head as
    well, and the keys and values of PREFIX tokens of each sequence."""
    c = model.config
    weights = sum(p.nbytes for p in model.parameters())
    table = 0 if c.tied else model.embed.weight.nbytes
    row = 2 * c.n_layer * c.n_kv_head * c.head_size * model.dtype.itemsize
    return weights - table + batch_size * PREFIX * row


def bench(args):
    """Prints the time of one step for each batch and tree size -> the result."""
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else cpu.default_dtype(device, torch.bfloat16)
    bandwidth = copy_bandwidth(device)
    model, heads = random_model(args.random_weights, device, dtype)
    print(f"{SIZES[args.random_weights][0]} with random weights; {PREFIX} tokens in each cache")
    table = Table()
    for B, T in product(args.batch_sizes, args.tree_sizes):
        decoder = timing_decoder(model, heads if T > 1 else None, DraftPlan(T - 1), batch_size=B,
                                 sampling=Sampling(args.temperature))
        ms = 1e3 * step_time(decoder)
        floor = 1e3 * step_bytes(model, B) / bandwidth
        row = dict(batch_size=B, tree_size=T, step_ms=ms, floor_ms=floor, share=floor / ms)
        table.add(row | {f"{name}_ms": 1e3 * time for name, time in stage_times(decoder).items()})
    return dict(model=args.random_weights, heads="clover", device=str(device), dtype=str(dtype),
                prefix=PREFIX, draft_vocabulary=heads.config.vocabulary,
                copy_gb_per_s=bandwidth / 1e9, steps=table)
