"""Several processes that train together, started by torchrun, and a frozen model that is divided
among them."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from backends import tensor_parallel
from clover import CloverHeads
from hf.families import read_config
from model import GPT, InputError, free_memory, pick_device
from tools.cli import load_model


class World:
    """The processes that torchrun started, or this one alone. Process 0 prints and writes files,
    which all must see."""

    def __init__(self, args):
        self.rank, self.size, self.local_rank = tensor_parallel.numbers()
        if args.batch_size % self.size and not args.evaluate:
            raise InputError("the batch size is that of all processes together and must divide by "
                             f"their number, but {args.batch_size} does not by {self.size}; take "
                             "a multiple")
        self.group = tensor_parallel.start(args)  # they can hold a model together, to decode it
        self.device = pick_device(args.device)

    def divides(self, config):
        """Whether these processes could hold a model of this GPTConfig together."""
        try:
            return bool(self.group.shard_config(config))
        except InputError:
            return False

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, tensor):
        """The tensor, summed in place over all processes."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag):
        """Whether the flag is true in any process. With several this waits for the device."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def barrier(self):
        if self.size > 1:
            dist.barrier()

    def run_first(self, action):
        """Runs action() in process 0, while the others wait. If it raises InputError, all raise
        one."""
        failed = None
        if self.rank == 0:
            try:
                action()
            except InputError as error:
                failed = error
        if self.any(failed is not None):
            self.close()  # gloo's threads abort a process that ends with an open group
            raise failed or InputError("the first process cannot go on, see its message")

    @contextlib.contextmanager
    def one_by_one(self):
        """Runs the body in one process of each machine at a time: a machine's memory then holds one
        whole model. All machines must have the same number of processes."""
        for _ in range(self.local_rank):
            self.barrier()
        yield
        for _ in range(self.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
            self.barrier()

    def close(self):
        """Ends the group: no process waits for another from here on."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()


def too_large(args):
    """Whether the frozen model takes more than 60% of its device's free memory."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(read_config(args.model)).parameters())
    size = parameters * (4 if args.dtype == "float32" else 2)
    return args.device.startswith("cuda") and size > 0.6 * free_memory(args.device)


def shard(model, mesh):
    """Leaves each process its part of the blocks' weights (FSDP2); embedding, norm and LM head stay
    whole. The model comes in the host's memory and goes to the device block by block, so the device
    need never hold all of it."""
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    parts = model.embed, model.embed_positions, model.norm, model.head
    unsharded = [part for part in parts if part is not None]
    for part in unsharded:
        part.to(mesh.device_type)
    model.tie_and_place()
    whole = {p for part in unsharded for p in part.parameters()}
    # one root above the blocks: otherwise each block is a root, and a root's weights stay gathered
    # after a pass
    fully_shard(model, mesh=mesh, ignored_params=whole)


def load_for_training(args, world):
    """--model for this process, and new heads on it -> (heads, encoding)."""
    if args.shard_base and world.size == 1:
        raise InputError("--shard-base divides the model among processes; start them with torchrun "
                         "--nproc-per-node N train_heads.py")
    args.shard_base = world.size > 1 and world.any(args.shard_base or too_large(args))
    given = argparse.Namespace(**vars(args))
    # that of the device it trains on, also where the CPU loads it
    given.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if args.shard_base:
        given.device = "cpu"
        # here, where no process waits for another: it may make a group, which all make together
        mesh = init_device_mesh(world.device.type, (world.size,))
    # when sharded, each process loads into the host's memory
    with world.one_by_one() if args.shard_base else contextlib.nullcontext():
        model, encoding = load_model(given, packed=False)
        torch.manual_seed(args.seed)
        heads = CloverHeads(args.config, model)  # copies the last block, so before that is divided
        if args.shard_base:
            shard(model, mesh)
    return heads, encoding
