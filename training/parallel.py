"""A frozen model for each of several processes that train together, whole or divided among them."""

import argparse
import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh

from clover import CloverHeads, preset
from hf.families import read_config
from model import GPT, free_memory
from tools.cli import load_model
from training.flags import SWITCHES


def too_large(args):
    """Whether the frozen model takes more than 60% of its device's free memory."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(read_config(args.model)).parameters())
    size = parameters * (4 if args.dtype == "float32" else 2)
    return args.device.startswith("cuda") and size > 0.6 * free_memory(args.device)


def shard(model, mesh):
    """Leaves each process its part of the blocks' weights (FSDP2); the rest stays whole. The model
    goes from the host to the device block by block, so the device need never hold all of it."""
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    whole = set()
    for part in filter(None, (model.embed, model.embed_positions, model.norm, model.head)):
        part.to(mesh.device_type)
        whole |= set(part.parameters())
    model.tie_and_place()
    # one root above the blocks: otherwise each block is a root, and a root's weights stay gathered
    # after a pass
    fully_shard(model, mesh=mesh, ignored_params=whole)


def load_for_training(args, group):
    """--model for this process, and new heads on it -> (heads, encoding)."""
    args.shard_base = group.size > 1 and group.any(args.shard_base or too_large(args))
    loading = argparse.Namespace(**vars(args))
    device = torch.device(args.device).type
    # that of the device it trains on, also where the CPU loads it
    loading.dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    switches = {name: value for name, value in vars(args).items() if name in SWITCHES}
    turns = contextlib.nullcontext()
    if args.shard_base:
        loading.device = "cpu"
        turns = group.one_by_one()
        # before they take turns: it may make a group, which all make together
        mesh = init_device_mesh(device, (group.size,))
    with turns:
        model, encoding = load_model(loading, packed=False)
        torch.manual_seed(args.seed)
        # copies the last block, so before that is divided
        heads = CloverHeads(preset(args.preset, **switches), model)
        if args.shard_base:
            shard(model, mesh)
    return heads, encoding
