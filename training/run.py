"""What train_base.py and train_heads.py share: flags, the learning rate, what is printed and logged, signals, processes."""

import contextlib
import json
import os
import pickle
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from model import InputError, atomic_write
from generate import check
from tools.cli import pick_device


# ---------------------------------------------------------------------------------------------------------------------
# Flags and files

def add_data_flag(parser):
    parser.add_argument("--data", nargs="+", metavar="PATH", help="files of text or .jsonl, folders, patterns; default: Python's standard library")


def add_training_flags(parser, steps, batch_size, block_size, lr):
    add_data_flag(parser)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="sequences per step")
    parser.add_argument("--block-size", type=int, default=block_size, help="tokens per sequence; None: 256, or the context")
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")


def check_training_flags(args):
    for name in ("steps", "batch_size"):
        check(name.replace("_", " "), getattr(args, name), 1, 10**9, whole=True)
    if args.block_size is not None:
        check("block size", args.block_size, 1, 10**9, whole=True)
    check("learning rate", args.lr, 0, 10, above=True)
    check("seed", args.seed, 0, 2**31, whole=True)


def load_state(path, device):
    """A training state as atomic_write left it."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict):
            raise RuntimeError(f"it holds a {type(state).__name__}")
        return state
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; --resume needs a run that was saved there") from None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise InputError(f"{path}: not a training state ({str(error).splitlines()[0]}); start without --resume") from None


def make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be made a folder ({error.strerror}); choose another --out") from None


def set_learning_rate(optimizer, peak, step, steps):
    """Up for 2% of the steps, held, and down to zero in a straight line over the last 40%."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / (0.02 * steps), (steps - step) / (0.4 * steps))


class Progress:
    """The line that a training run prints: step, what the caller measured, tokens per second, time left."""

    def __init__(self, start, steps, tokens_per_step):
        self.start, self.steps, self.tokens_per_step = start, steps, tokens_per_step
        self.began = time.perf_counter()

    def show(self, step, measured):
        speed = (step - self.start) / (time.perf_counter() - self.began)  # steps per second
        left = int((self.steps - step) / speed)
        print(f"step {step}/{self.steps}  {measured}  {speed * self.tokens_per_step:.0f} tokens/s  "
              f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left", flush=True)


class Log:
    """A file of json lines, one for each interval. What a killed run wrote past the step it goes on from is dropped."""

    def __init__(self, path, step):
        self.path = path
        with self.disk():
            lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
            kept = [line for line in lines if line.endswith("}\n") and json.loads(line).get("step", step + 1) <= step]
            atomic_write(path, lambda tmp: Path(tmp).write_text("".join(kept)))

    def add(self, **values):
        with self.disk(), open(self.path, "a") as file:
            file.write(json.dumps(values) + "\n")

    @contextlib.contextmanager
    def disk(self):
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror}); what was saved last is intact: make room and "
                             "--resume") from None


class Signals:
    """Within it Ctrl-C and SIGTERM only set `came`; a second Ctrl-C ends the program as ever. SIGTERM may come twice, to a process
    and through the one that started it."""

    def __enter__(self):
        self.came, self.before = False, {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number, frame):
        if self.came and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.came = True

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------------------------
# One process, or several

class World:
    """The processes that torchrun started, or this one alone. The first of them writes and prints; all must see its files."""

    def __init__(self, args):
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK") if dist.is_torchelastic_launched() else ()
        self.size, self.rank, self.local = [int(os.environ[name]) for name in names] or (1, 0, 0)
        if self.size > 1:
            check_divides(args.batch_size, self.size)
            if args.device.startswith("cuda:"):
                raise InputError(f"with torchrun every process takes a GPU of its own; expected --device cuda, not {args.device}")
            args.device = f"cuda:{self.local}" if args.device == "cuda" else args.device
            self.device = pick_device(args.device)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=timedelta(hours=24))

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, tensor):
        """The tensor, summed over all processes."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag):
        """Whether any process says so. It waits for the device only where there are several."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def wait(self):
        if self.size > 1:
            dist.barrier()

    def first(self, action):
        """Lets the first process do what is done once. The others wait for it, and end where it fails."""
        failed = None
        if self.rank == 0:
            try:
                action()
            except InputError as error:
                failed = error
        if self.any(failed is not None):
            raise failed or InputError("the first process cannot go on, see there")

    @contextlib.contextmanager
    def in_turn(self):
        """One process of a machine after the other, so that not all hold a whole model in its memory at once. All machines must
        have as many processes."""
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        for turn in range(self.local):
            self.wait()
        yield
        for turn in range(self.local, local_size):
            self.wait()

    def end(self):
        """After it every process is alone."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()


def check_divides(batch_size, processes):
    if batch_size % processes:
        raise InputError(f"the batch size is that of all processes together and must divide by their number, but {batch_size} does "
                         f"not by {processes}; take {batch_size // processes * processes or processes}")
