"""N processes, or ranks, that torchrun started and that hold one model together (tensor
parallelism, arXiv 1909.08053, section 3). A rank holds whole attention heads with their cache, a
part of the MLP and of the vocabulary. Rank 0 alone reads prompts and prints.

    torchrun --nproc-per-node 4 generate.py --model path/to/large --prompt "..."
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from backends.quantized import QuantizedLMHead
from kernels import gumbel, sum_parts
from model import Block, InputError, LMHead, free_memory, pick_device

# what torchrun sets
VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
# of a rank that waits for another, such as for a prompt; one that ended is noticed at once
TIMEOUT = timedelta(hours=24)
# seconds in which rank 0 speaks before another rank does, and in which a rank told to end may end
GRACE = 2.0


# --------------------------------------------------------------------------------------------------
# The group, and a model divided among it

class Group:
    """The N ranks, of which this process is `rank`. Group() is one process alone. The others need
    torch.distributed to be initialised."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    def rows(self, n, first=0):
        """This rank's slice of n rows, of which the first is row `first`."""
        return slice(first + n * self.rank // self.size, first + n * (self.rank + 1) // self.size)

    def all_gather(self, x):
        """[N, *x.shape], the same on all ranks."""
        if self.size == 1:
            return x[None]
        gathered = x.new_empty(self.size * x.numel())
        dist.all_gather_single(gathered, x.reshape(-1))
        return gathered.view(self.size, *x.shape)

    def broadcast(self, value):
        """Rank 0's value, which pickle can write, on all ranks."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def min(self, number):
        """The smallest of the ranks' numbers, as a float."""
        return self.all_gather(torch.tensor([number], dtype=torch.float64)).min().item()

    def sum(self, x, bias=None):
        """The sum over the ranks, plus a bias, in float32 or more and in the order of their
        numbers. So all get the same bits, and a row's do not depend on the other rows, as those of
        an all-reduce may."""
        return sum_parts(self.all_gather(x).view(self.size, -1), bias).view(x.shape)

    def shard_config(self, config):
        """The GPTConfig of a rank's part of a block. Of fewer key/value heads than ranks, several
        ranks hold each. Raises InputError where the ranks do not divide what they share."""
        c, N = config, self.size
        divides = not (c.n_head % N or c.n_inner % N or (c.n_kv_head % N and N % c.n_kv_head))
        if not divides or N > c.vocab_size:
            raise InputError(f"{N} processes do not divide {c.n_head} heads, {c.n_kv_head} "
                             f"key/value heads, an MLP of {c.n_inner} and {c.vocab_size} tokens; "
                             "take another --nproc-per-node")
        n_kv_head = max(c.n_kv_head // N, 1)
        return replace(c, n_head=c.n_head // N, n_kv_head=n_kv_head, n_inner=c.n_inner // N)

    def shard_slices(self, name, config):
        """What this rank holds of a parameter: None for all of it, else (the dimension that is cut,
        its slices)."""
        if self.size == 1:
            return None
        Hq, Hkv, D = config.n_head, config.n_kv_head, config.head_size
        if ".attn.qkv." in name:
            keys = (Hq + self.rank * Hkv // self.size) * D  # the first row of its key/value heads
            values = keys + Hkv * D
            size = max(Hkv // self.size, 1) * D
            return 0, [self.rows(Hq * D), slice(keys, keys + size), slice(values, values + size)]
        if config.qk_norm == "all" and ".attn.q_norm." in name:
            return 0, [self.rows(Hq * D)]
        if config.qk_norm == "all" and ".attn.k_norm." in name:
            keys = self.rank * Hkv // self.size * D
            return 0, [slice(keys, keys + max(Hkv // self.size, 1) * D)]
        if ".mlp.up." in name:
            n = config.n_inner
            return 0, [self.rows(n, first) for first in range(0, n * (1 + config.gated), n)]
        if name.endswith("attn.proj.weight"):
            return 1, [self.rows(Hq * D)]
        if name.endswith("mlp.down.weight"):
            return 1, [self.rows(config.n_inner)]
        return (0, [self.rows(config.vocab_size)]) if name == "head.weight" else None

    def divide(self, model):
        """Gives a `GPT` without weights the layers of this rank's sizes. Raises as `shard_config`
        does."""
        own = self.shard_config(model.config)
        if self.size == 1:
            return
        model.blocks = nn.ModuleList(Block(own, layer) for layer in range(own.n_layer))
        if not model.config.tied:
            rows = self.rows(model.config.vocab_size)
            model.head = LMHead(model.config.n_embd, rows.stop - rows.start, bias=False)

    def connect(self, model):
        """Lets the layers of such a model, whose weights are there, work together."""
        model.group = self
        if self.size == 1:
            return
        config = model.config
        for block in model.blocks:
            block.attn.proj = RowParallelLinear(block.attn.proj, self)
            block.mlp.down = RowParallelLinear(block.mlp.down, self)
            if config.qk_norm == "all":
                block.attn.q_norm = ParallelNorm(block.attn.q_norm, self)
                block.attn.k_norm = ParallelNorm(block.attn.k_norm, self)
        if config.tied:
            own = model.embed.weight[self.rows(config.vocab_size)]
            model.head.weight = nn.Parameter(own, requires_grad=False)
        model.head = VocabParallelHead(model.head, self, config.vocab_size)
        if model.slopes is not None:
            model.slopes = model.slopes[self.rows(config.n_head)]
        model.free_memory = lambda: self.min(free_memory(model.device))

        def refuse(path, dtype=None):
            raise InputError(f"{path}: one of {self.size} ranks holds a part of the model; save it "
                             "from one process")
        model.save_pretrained = refuse


def group_of(model):
    """The ranks that hold a model; Group() for one of this process alone."""
    return getattr(model, "group", Group())


def no_room(group):
    """The errors that say that memory has no room. Ranks do not run out of it alike: where that
    was not foreseen, all end."""
    return (InputError,) if group.size > 1 else (InputError, torch.OutOfMemoryError)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank holds the columns for its part of the inputs: the ranks'
    results are added."""

    def __init__(self, linear, group):
        super().__init__()
        self.bias = linear.bias
        linear.bias = None
        self.local = linear
        self.group = group

    def forward(self, x):
        return self.group.sum(self.local(x), self.bias)


class ParallelNorm(nn.Module):
    """RMSNorm over what all ranks have, of which each holds as many numbers."""

    def __init__(self, local, group):
        super().__init__()
        self.weight = local.weight
        self.eps = local.eps
        self.group = group

    def forward(self, x):
        squares = x.float().pow(2).mean(dim=-1, keepdim=True)
        mean = self.group.sum(squares) / self.group.size
        return (x * (mean + self.eps).rsqrt() * self.weight).to(x.dtype)


class VocabParallelHead(nn.Module):
    """An LM head of which each rank holds rows first, first + 1, ... The results are those of the
    whole."""

    def __init__(self, local, group, vocab_size):
        super().__init__()
        self.local = local
        self.group = group
        self.vocab_size = vocab_size
        self.first = group.rows(vocab_size).start
        self.local_ids = {}  # {vocab_ids: those among this rank's rows, counted from `first`}

    def row_logits(self, hidden, tokens):
        """The logits of one of this rank's rows for each hidden state, float64 [M]."""
        rows = self.local.weight[tokens].double()
        if isinstance(self.local, QuantizedLMHead):
            rows = self.local.rows(tokens).double()
        return (hidden.double() * rows).sum(dim=-1)

    def topk(self, hidden, k, vocab_ids=None):
        """As `LMHead.topk`; of equal logits on two ranks, either may come first."""
        rows = self.local_rows(vocab_ids)
        M = len(hidden)
        n = min(k, len(self.local.weight if rows is None else rows))
        # k logits, k token ids, the log-sum-exp
        lists = hidden.new_full((M, 2 * k + 1), -math.inf, dtype=torch.float64)
        if n:
            logprobs, tokens = self.local.topk(hidden, n, rows)
            lse = self.row_logits(hidden, tokens[:, 0]) - logprobs[:, 0]
            lists[:, :n] = logprobs + lse[:, None]
            lists[:, k:k + n] = tokens + self.first
            lists[:, -1] = lse
        lists = self.group.all_gather(lists).transpose(0, 1)  # (M, N, 2 k + 1)
        logits, tokens, lse = lists.split((k, k, 1), dim=2)
        logits, columns = logits.flatten(1).sort(dim=-1, descending=True, stable=True)  # (M, N k)
        tokens = tokens.flatten(1).gather(1, columns[:, :k]).long()
        return (logits[:, :k] - lse.logsumexp(dim=1)).float(), tokens

    def local_rows(self, vocab_ids):
        """Those of vocab_ids that are this rank's, counted from `first`; None for all."""
        if vocab_ids is None:
            return None
        if vocab_ids not in self.local_ids:
            own = vocab_ids - self.first
            self.local_ids[vocab_ids] = own[(own >= 0) & (own < len(self.local.weight))]
        return self.local_ids[vocab_ids]

    def sample(self, hidden, temperature, seed, sequence, position):
        """As `LMHead.sample`."""
        own = self.local.sample(hidden, temperature, seed, sequence, position, self.first)
        tokens = own + self.first
        score = self.row_logits(hidden, own) / (temperature or 1.0)
        if temperature:
            score += gumbel(seed, sequence, position, tokens[:, None])[:, 0]
        gathered = self.group.all_gather(torch.stack((score, tokens.double())))  # (N, 2, M)
        score, tokens = gathered.unbind(1)
        best = score.argmax(dim=0, keepdim=True)  # the first rank's, of equals
        return tokens.gather(0, best)[0].long()

    def logits(self, hidden):
        """float32 [M, V]."""
        return self.all_columns(self.local.logits(hidden))

    def forward(self, x):
        """x [..., C] -> logits [..., V]."""
        return self.all_columns(self.local(x))

    def all_columns(self, logits):
        """All ranks' logits [..., V] from each one's own; their numbers may differ by one."""
        N, V = self.group.size, self.vocab_size
        parts = self.group.all_gather(F.pad(logits, (0, -(-V // N) - logits.shape[-1])))
        sizes = [V * (i + 1) // N - V * i // N for i in range(N)]
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes)], dim=-1)

    def embedding(self, tokens):
        """As `LMHead.embedding`."""
        own = tokens - self.first
        here = (own >= 0) & (own < len(self.local.weight))
        rows = self.local.embedding(own.where(here, 0)) * here[..., None]
        return self.group.sum(rows)  # of which one is not 0

    def sum_of_squares(self):
        """As `LMHead.sum_of_squares`."""
        return self.group.sum(self.local.sum_of_squares())


# --------------------------------------------------------------------------------------------------
# How ranks start

def launched():
    return dist.is_available() and dist.is_torchelastic_launched()


def numbers():
    """This process's rank, the number of ranks, and its number on this machine, as torchrun says;
    without it 0, 1, 0. Raises InputError where torchrun's variables are incomplete."""
    if not launched():
        return 0, 1, 0
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise InputError(f"torchrun sets {missing[0]}, but it is missing; start this with torchrun")
    return tuple(int(os.environ[name]) for name in VARIABLES[:3])


def start(args):
    """The `Group` of the ranks that torchrun started. Gives args.device its number."""
    rank, size, local_rank = numbers()
    if size == 1:
        return Group()
    if args.device.startswith("cuda:"):
        raise InputError("with torchrun every process takes a GPU of its own; expected --device "
                         f"cuda, not {args.device}")
    gpus, wanted = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    alone = gpus == 1 and not local_rank  # torchrun --virtual-local-rank shows each process one GPU
    if args.device == "cuda" and gpus < wanted and not alone:
        raise InputError(f"{wanted} processes on this machine need as many GPUs, but it has "
                         f"{gpus}; take another --nproc-per-node")
    args.device = f"cuda:{local_rank}" if args.device == "cuda" else args.device
    device = pick_device(args.device)
    backend = dict(backend="gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # a barrier has to know its device
        backend = dict(backend="cpu:gloo,cuda:nccl", device_id=device)
    dist.init_process_group(timeout=TIMEOUT, **backend)
    return Group(rank, size)


@contextlib.contextmanager
def joined(args, argv):
    """`start`, for a command line that all ranks were given. Where one of them ends early, all
    do."""
    if numbers()[1] == 1:
        yield Group()
        return
    try:
        group = start(args)
        # NCCL takes its buffers before memory is counted
        group.all_gather(torch.zeros(2**18, device=args.device))
        watch_signals(group.rank)
        check_same(group, argv, "were started with different flags")
        yield group
        if not stopping.is_set():  # else the others are elsewhere
            all_gather_objects(group, None)
            end_rank(0)  # NCCL's own end would wait for the graphs that hold its calls
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        first, *_, last = *str(error).splitlines(), ""  # NCCL's reason is in the last line
        what = f"another process has ended, or cannot be reached ({first})"
        if "NCCL" in first:
            what = f"NCCL failed, or another process has ended ({first} {last})"
        raise InputError(what) from None


# --------------------------------------------------------------------------------------------------
# How ranks speak and end

stopping = threading.Event()  # set when Ctrl-C or SIGTERM has come to a rank
signals = []                  # SIGTERM, once it has come


def interrupt(number, frame):
    """A signal's handler: SIGTERM acts as Ctrl-C, but is remembered."""
    if number == signal.SIGTERM:
        signals.append(number)
    raise KeyboardInterrupt


def error_printer():
    """Silences all ranks but 0 -> a function that prints a line on standard error from any. What
    all ranks find, rank 0 prints: another one waits, and says nothing if that ends it."""
    if not launched():
        return partial(print, file=sys.stderr)
    rank, errors = os.environ.get("RANK", "0"), sys.stderr
    if rank != "0":
        sys.stdout = sys.stderr = open(os.devnull, "w", errors="replace")

    def print_error(line):
        # before `watch_signals`, SIGTERM raises this
        with contextlib.suppress(KeyboardInterrupt):
            if rank == "0":
                print(line, file=errors, flush=True)
            elif not stopping.wait(GRACE):
                print(f"rank {rank}: {line}", file=errors, flush=True)

    def fail(_, error, __):
        print_error("".join(traceback.format_exception(error)).rstrip())
        end_rank(1)
    sys.excepthook = fail
    return print_error


def end_rank(code):
    """Ends this process at once, if it is a rank: what libraries do at a process's end may wait for
    the others, which are elsewhere."""
    if dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def watch_signals(rank):
    """Lets Ctrl-C and SIGTERM end this rank: rank 0 as they end a process alone, after it has
    printed what there is; the others a little later, so that it does not wait for them in vain. A
    thread does this, since Python's own handlers run only after a call that waits for another
    rank."""
    def handle(*at):
        stopping.set()
        if not rank:
            interrupt(*at)

    def watch():
        while os.read(arrived, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
            pass
        stopping.set()
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


# --------------------------------------------------------------------------------------------------
# How ranks agree

def all_gather_objects(group, value):
    """The values of all ranks."""
    values = [value] * group.size
    if group.size > 1:
        dist.all_gather_object(values, value)
    return values


def check_same(group, value, what):
    if any(other != value for other in all_gather_objects(group, value)):
        raise InputError(f"the processes {what}; start all with the same torchrun command and the "
                         "same files")


def raise_together(group, action):
    """action() on every rank, in which no rank may wait for another. Where it raises InputError on
    any of them, all raise the first one's."""
    result = failed = None
    try:
        result = action()
    except InputError as error:
        failed = error
    for rank, failure in enumerate(all_gather_objects(group, failed and str(failed))):
        if failure is not None:
            message = f"rank {rank}: {failure}" if rank else failure
            raise failed if rank == group.rank else InputError(message)
    return result


def on_first(group, action):
    """What action() returns on rank 0, on all ranks; or the InputError that it raises."""
    return group.broadcast(raise_together(group, lambda: None if group.rank else action()))


class _Shim: pass
Group.all_gather_objects = all_gather_objects
Group.check_same = check_same
Group.raise_together = raise_together
Group.on_first = on_first
Group.local_rank = 0
def is_lost(error): return False
_start = start
def start(args):
    args.device = args.device or "cpu"
    return _start(args)
