"""Several processes, or ranks, that torchrun started. Under it generate.py's hold one model together, and rank 0 alone
reads prompts and prints.

    torchrun --nproc-per-node 4 generate.py --model path/to/large --prompt "..."
"""

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hf.tokenizer import tokenizer_hash
from model import Group, InputError, identity
from tools.cli import Session, pick_device, read_prompts

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # what torchrun sets
PATIENCE = timedelta(minutes=10)  # for another rank: it may be reading a large checkpoint
GRACE = 2.0  # seconds that rank 0 has before another rank speaks or ends


def numbers():
    """This process's rank, the number of ranks, and its number on this machine, as torchrun says; without it 0, 1, 0.
    Raises InputError where torchrun's variables are incomplete."""
    if not dist.is_torchelastic_launched():
        return 0, 1, 0
    missing = [name for name in NAMES if not os.environ.get(name, "").isdigit()]
    if missing:
        raise InputError(f"torchrun sets {', '.join(NAMES)}, but {missing[0]} is missing; start this with torchrun")
    return tuple(int(os.environ[name]) for name in NAMES)


def start(args, patience=PATIENCE):
    """The `Group` of the ranks that torchrun started. Gives args.device its number. patience: a timedelta, after which
    a rank waits no longer for another."""
    rank, size, local_rank = numbers()
    if size > 1:
        if args.device.startswith("cuda:"):
            raise InputError("with torchrun every process takes a GPU of its own; expected --device cuda, not "
                             f"{args.device}")
        args.device = f"cuda:{local_rank}" if args.device == "cuda" else args.device
        device, backend = pick_device(args.device), dict(backend="gloo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = dict(backend="cpu:gloo,cuda:nccl", device_id=device)  # so that a barrier knows its device
        dist.init_process_group(timeout=patience, **backend)
    return Group(rank, size)


@contextlib.contextmanager
def joined(args, argv):
    """`start`, for a command line that all ranks were given: only rank 0 is heard, and errors end all ranks."""
    rank, size, _ = numbers()
    if size == 1:
        yield Group()
        return
    errors, told = sys.stderr, []
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *at: told.append(at) or (leave() if rank else signal.default_int_handler(*at)))
    try:
        group = start(args)
        check_same(group, argv, "were started with different flags")
        yield group
        if not told:  # else the others stand elsewhere
            dist.barrier()
    except InputError as error:
        if rank:  # what all ranks find, rank 0 tells; torchrun ends the others when one has ended
            time.sleep(GRACE)
            print(f"rank {rank}: {error}", file=errors)
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).split("\n")[0]
        raise InputError(f"another process has ended, or cannot be reached ({reason})") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_session(args, group):
    """The `Session` of a rank, which has read what the others have."""
    texts = group.first(agree(group, lambda: [] if group.rank else read_prompts(args.prompt or [])))
    session = agree(group, lambda: Session(args, texts, group))
    if group.size > 1:
        heads = session.heads and identity(session.heads.state_dict())
        files = session.model.identity, heads, tokenizer_hash(session.encoding), session.sampling, session.stop
        check_same(group, files, "have read different files")
    return session


def leave():
    """Ends this process a little later: until then rank 0, which prints what there is, does not wait for it in vain."""
    threading.Timer(GRACE, os._exit, [0]).start()


def every(group, value):
    """The values of all ranks."""
    values = [value]
    if group.size > 1:
        values *= group.size
        dist.all_gather_object(values, value)
    return values


def check_same(group, value, what):
    if any(other != value for other in every(group, value)):
        raise InputError(f"the processes {what}; start all with the same torchrun command and the same files")


def agree(group, action):
    """action() on every rank, in which no rank may wait for another. Where it raises InputError on any of them, all
    raise the first one's."""
    result = failed = None
    try:
        result = action()
    except InputError as error:
        failed = error
    for rank, failure in enumerate(every(group, failed and str(failed))):
        if failure is not None:
            raise failed if rank == group.rank else InputError(f"rank {rank}: {failure}" if rank else failure)
    return result
