"""Several processes, or ranks, that torchrun started. generate.py's hold one model together; rank 0 alone reads prompts
and prints.

    torchrun --nproc-per-node 4 generate.py --model path/to/large --prompt "..."
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from model import Group, InputError

NUMBERS = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"  # what torchrun sets, and MASTER_ADDR
PATIENCE = timedelta(hours=24)  # of a rank that waits for another, such as for a prompt; one that has ended is noticed
GRACE = 2.0  # seconds in which rank 0 speaks before another rank does, and in which a rank that was told to end may end


def launched():
    return dist.is_available() and dist.is_torchelastic_launched()


def numbers():
    """This process's rank, the number of ranks, and its number on this machine, as torchrun says; without it 0, 1, 0.
    Raises InputError where torchrun's variables are incomplete."""
    if not launched():
        return 0, 1, 0
    missing = [name for name in NUMBERS if not os.environ.get(name, "").isdigit()]
    missing += [] if os.environ.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if missing:
        raise InputError(f"torchrun sets {missing[0]}, but it is missing; start this with torchrun")
    return tuple(int(os.environ[name]) for name in NUMBERS[:3])


def start(args):
    """The `Group` of the ranks that torchrun started. Gives args.device its number."""
    from tools.cli import pick_device  # not above: tools/cli.py reads this file
    rank, size, local_rank = numbers()
    if size > 1:
        if args.device.startswith("cuda:"):
            raise InputError("with torchrun every process takes a GPU of its own; expected --device cuda, not "
                             f"{args.device}")
        gpus, wanted = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
        alone = gpus == 1 and not local_rank  # torchrun --virtual-local-rank shows each process one GPU
        if args.device == "cuda" and gpus < wanted and not alone:
            raise InputError(f"{wanted} processes on this machine need as many GPUs, but it has {gpus}; take another "
                             "--nproc-per-node")
        args.device = f"cuda:{local_rank}" if args.device == "cuda" else args.device
        device, backend = pick_device(args.device), dict(backend="gloo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = dict(backend="cpu:gloo,cuda:nccl", device_id=device)  # so that a barrier knows its device
        dist.init_process_group(timeout=PATIENCE, **backend)
    return Group(rank, size)


@contextlib.contextmanager
def joined(args, argv):
    """`start`, for a command line that all ranks were given. Where one of them ends early, all do."""
    if numbers()[1] == 1:
        yield Group()
        return
    try:
        group = start(args)
        group.gather(torch.zeros(2**18, device=args.device))  # NCCL takes its buffers before memory is counted
        watch_signals(group.rank)
        check_same(group, argv, "were started with different flags")
        yield group
        if not told.is_set():  # else the others stand elsewhere
            every(group, None)
            end(0)  # NCCL's own end would wait for the graphs that hold its calls
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        first, *_, last = *str(error).splitlines(), ""  # NCCL's reason is in the last line
        what = f"NCCL failed, or another process has ended ({first} {last})" if "NCCL" in first else (
            f"another process has ended, or cannot be reached ({first})")
        raise InputError(what) from None


# ---------------------------------------------------------------------------------------------------------------------
# How ranks speak and end

told = threading.Event()  # whether Ctrl-C or SIGTERM has come to a rank


def voice():
    """Silences all ranks but 0 -> a function that prints a line on standard error from any. What all ranks find, rank 0
    tells: another one waits, and where that ends it, says nothing."""
    if not launched():
        return partial(print, file=sys.stderr)
    rank, errors = os.environ.get("RANK", "0"), sys.stderr
    if rank != "0":
        sys.stdout = sys.stderr = open(os.devnull, "w", errors="replace")

    def tell(line):
        with contextlib.suppress(KeyboardInterrupt):  # as SIGTERM ends a rank before `watch_signals`
            if rank == "0":
                print(line, file=errors, flush=True)
            elif not told.wait(GRACE):
                print(f"rank {rank}: {line}", file=errors, flush=True)

    def fail(_, error, __):
        tell("".join(traceback.format_exception(error)).rstrip())
        if dist.is_available() and dist.is_initialized():
            end(1)
    sys.excepthook = fail
    return tell


def end(code):
    """Ends this process. One of several does so at once: what libraries do at a process's end may wait for the others,
    which stand elsewhere."""
    if dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def watch_signals(rank):
    """Lets Ctrl-C and SIGTERM end this rank: rank 0 as they end a process alone, after it has printed what there is;
    the others a little later, so that it need not wait for them in vain. A thread sees to that, since Python's own
    handlers have to wait for whatever waits for another rank."""
    def handle(*at):
        told.set()
        if not rank:
            signal.default_int_handler(*at)

    def watch():
        while os.read(arrived, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
            pass
        told.set()
        time.sleep(GRACE * (1 if rank else 2))
        if not rank:
            print("ended while waiting for another process", file=sys.stderr, flush=True)
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    arrived, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------------------------------------------------------------
# How ranks agree

def every(group, value):
    """The values of all ranks."""
    values = [value] * group.size
    if group.size > 1:
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


def on_first(group, action):
    """What action() returns on rank 0, on all ranks; or the InputError that it raises."""
    return group.first(agree(group, lambda: None if group.rank else action()))
