"""A frozen model for each of several processes that train together, whole or divided among them."""

import contextlib
import copy

import torch
from torch.distributed.device_mesh import init_device_mesh

from clover import CloverHeads, preset
from hf.families import read_config
from model import GPT, free_memory
from tools.cli import load_model
from training.flags import SWITCHES


def too_large(args):
    """Whether the frozen model takes more than 60% of its GPU's free memory."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(read_config(args.model)).parameters())
    size = parameters * (4 if args.dtype == "float32" else 2)
    return args.device.startswith("cuda") and size > 0.6 * free_memory(args.device)


def shard(model, mesh):
    """Leaves each process its part of the blocks' weights (FSDP2); the rest stays whole. The device
    gets the model block by block, so it need never hold all of it."""
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    parts = (model.embed, model.embed_positions, model.norm, model.head)
    whole = torch.nn.ModuleList(filter(None, parts)).to(mesh.device_type)
    model.tie_and_place()
    # otherwise each block is a root, and a root's weights stay gathered after a pass
    fully_shard(model, mesh=mesh, ignored_params=set(whole.parameters()))


def load_for_training(args, group):
    """--model for this process, and new heads on it -> (heads, encoding)."""
    args.shard_base = group.size > 1 and group.any(args.shard_base or too_large(args))
    device = torch.device(args.device).type
    loading = copy.copy(args)
    loading.dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    switches = {name: value for name, value in vars(args).items() if name in SWITCHES}
    if args.shard_base:
        loading.device = "cpu"
        mesh = init_device_mesh(device, (group.size,))  # all ranks at once, so not in turns
    with group.one_by_one() if args.shard_base else contextlib.nullcontext():
        model, encoding = load_model(loading, packed=False)
        torch.manual_seed(args.seed)
        heads = CloverHeads(preset(args.preset, **switches), model)  # copies the last block
        if args.shard_base:
            shard(model, mesh)
    return heads, encoding
