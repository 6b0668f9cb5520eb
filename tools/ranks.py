"""generate.py under torchrun: processes that hold one model together. Rank 0 alone reads prompts and prints.

    torchrun --nproc-per-node 4 generate.py --model path/to/large --prompt "..."
"""

import contextlib
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from model import Group, InputError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # what torchrun sets
PATIENCE = timedelta(minutes=10)              # for another rank: it may be reading a large checkpoint


@contextlib.contextmanager
def joined(args, argv):
    """The `Group` that torchrun started, or that of one process. Gives args.device its number."""
    from tools.cli import pick_device
    if not dist.is_torchelastic_launched():
        yield Group()
        return
    missing = [name for name in NAMES if not os.environ.get(name, "").isdigit()]
    if missing:
        raise InputError(f"torchrun sets {', '.join(NAMES)}, but {missing[0]} is missing; start this with torchrun")
    rank, size, local_rank = (int(os.environ[name]) for name in NAMES)
    if args.device.startswith("cuda:") and size > 1:
        raise InputError("with torchrun every process takes a GPU of its own; expected --device cuda, not "
                         f"{args.device}")
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        leave_when_told()
    args.device = f"cuda:{local_rank}" if args.device == "cuda" else args.device
    backend, device = dict(backend="gloo"), pick_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = dict(backend="cpu:gloo,cuda:nccl", device_id=device)
    dist.init_process_group(timeout=PATIENCE, **backend)
    group = Group(rank, size)
    agree(group, lambda: None if same(group, argv) else refuse("the processes were started with different flags"))
    yield group
    dist.barrier()
    dist.destroy_process_group()


def leave_when_told():
    """Lets Ctrl-C and SIGTERM end this rank, but a second later: until then rank 0, which prints what there is, does
    not wait for it in vain."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: threading.Timer(1.0, os._exit, [0]).start())


def refuse(reason):
    raise InputError(f"{reason}; start all with the same torchrun command")


def shared(group, value):
    """Rank 0's value, which pickle can write, on all ranks."""
    values = [value]
    if group.size > 1:
        dist.broadcast_object_list(values)
    return values[0]


def same(group, value):
    """Whether a value is the same on all ranks."""
    return shared(group, value) == value


def agree(group, action):
    """action() on every rank. Where it raises InputError on any of them, all raise the first one's."""
    if group.size == 1:
        return action()
    result = failed = None
    try:
        result = action()
    except InputError as error:
        failed = str(error)
    failures = [None] * group.size
    dist.all_gather_object(failures, failed)
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise InputError(failure if not rank or failures[0] is not None else f"rank {rank}: {failure}")
    return result
