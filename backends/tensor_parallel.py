"""Multi-process training and tensor parallelism (arXiv 1909.08053, section 3) under torchrun. Each
of N ranks holds some attention heads with their KV cache, and a slice of the MLP and of the
vocabulary. Only rank 0 reads prompts, prints and writes files.

    torchrun --nproc-per-node 4 generate.py --model path/to/large --prompt "..."
"""

import os
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from backends.sampling import filtered_sample
from common.machine import pick_device
from kernels import best_tokens
from model import Block, Blocks, InputError, LMHead, expect

TIMEOUT = timedelta(hours=24)  # for collectives; if a rank ends, torchrun ends the others


class SharedError(InputError):
    """An error that all ranks raise and only rank 0 prints."""


@dataclass(eq=False)
class Group:
    """The N ranks, of which this process is `rank`, on `device`. Group() is a single process;
    larger groups need torch.distributed to be initialised, as in `start`."""
    rank: int = 0
    size: int = 1
    device: str | None = None

    # Collectives

    def all_gather(self, x):
        """The ranks' tensors of equal shape -> [N, *x.shape] on all ranks."""
        if self.size == 1:
            return x[None]
        gathered = x.new_empty(self.size * x.numel())
        gather = getattr(dist, "all_gather_single", None)  # new in torch 2.13
        (gather or dist.all_gather_into_tensor)(gathered, x.reshape(-1))
        return gathered.view(self.size, *x.shape)

    def all_reduce(self, tensor):
        """Sums over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum(self, x, bias=None):
        """The sum over the ranks, plus a bias, in float32 or float64. Adds in rank order: unlike in
        an all-reduce, the bits of a row do not depend on other rows."""
        exact = torch.promote_types(x.dtype, torch.float32)
        total = reduce(torch.add, self.all_gather(x).to(exact))
        return (total if bias is None else total + bias).to(x.dtype)

    def min(self, number):
        """The smallest of the ranks' numbers, as a float."""
        return self.all_gather(torch.tensor([number], dtype=torch.float64)).min().item()

    def any(self, flag):
        """Whether the flag is true on any rank."""
        return self.min(not flag) == 0

    def broadcast(self, value):
        """Rank 0's value (picklable) on all ranks."""
        return self.all_gather_objects(value)[0]

    def all_gather_objects(self, value):
        """The list of all ranks' values (picklable)."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self):
        if self.size > 1:
            dist.barrier()

    # Errors are raised on all ranks together, so that none waits for another

    def check_same(self, value, what):
        """Raises InputError if the ranks' values differ. what: "have read different files"."""
        if any(other != value for other in self.all_gather_objects(value)):
            raise SharedError(f"the processes {what}; start all with the same torchrun command "
                               "and the same files")

    def raise_together(self, action):
        """Runs action(), which must not use collectives, on every rank and returns its result. If
        it raises InputError on some ranks, all ranks raise the first one's."""
        failed = None
        try:
            result = action()
        except InputError as error:
            failed = str(error)
        for rank, message in enumerate(self.all_gather_objects(failed)):
            if message is not None:
                raise SharedError(f"rank {rank}: {message}" if rank else message)
        return result

    def on_first(self, action):
        """Runs action() on rank 0 only; its result, or its InputError, reaches all ranks."""
        return self.broadcast(self.raise_together(lambda: None if self.rank else action()))

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def close(self):
        """Waits for all ranks, then ends the group."""
        self.barrier()
        if self.size > 1:
            dist.destroy_process_group()

    # Sharding a model

    def own_slice(self, n, first=0):
        """This rank's slice of the n rows that start at row `first`."""
        return slice(first + n * self.rank // self.size, first + n * (self.rank + 1) // self.size)

    def shard_config(self, config):
        """The GPTConfig of this rank's shard of a block. With more ranks than key/value heads,
        several ranks hold the same one. Raises InputError if sizes are not divisible."""
        c, N = config, self.size
        expect(not c.mixers and not c.attn_gate, "a model with recurrent layers is not divided "
               "over processes; run one process")
        divides = not (c.n_head % N or c.n_inner % N or (c.n_kv_head % N and N % c.n_kv_head))
        expect(divides and N <= c.vocab_size, f"{N} processes do not divide {c.n_head} heads, "
               f"{c.n_kv_head} key/value heads, an MLP of {c.n_inner} and {c.vocab_size} tokens; "
               "take another --nproc-per-node")
        n_kv_head = max(c.n_kv_head // N, 1)
        return replace(c, n_head=c.n_head // N, n_kv_head=n_kv_head, n_inner=c.n_inner // N)

    def shard_slices(self, name, config):
        """This rank's shard of a parameter: (sharded dimension, slices of it); None if the
        parameter is not sharded."""
        if self.size == 1:
            return None
        c, D = config, config.head_size
        queries = self.own_slice(c.n_head * D)
        first_key = self.rank * c.n_kv_head // self.size * D
        n_keys = max(c.n_kv_head // self.size, 1) * D
        keys = lambda start: slice(start + first_key, start + first_key + n_keys)
        shards = {
            ".attn.qkv.": (0, [queries, keys(c.n_head * D), keys((c.n_head + c.n_kv_head) * D)]),
            ".attn.proj.weight": (1, [queries]),
            ".mlp.up.": (0, [self.own_slice(c.n_inner, i * c.n_inner) for i in range(1 + c.gated)]),
            ".mlp.down.weight": (1, [self.own_slice(c.n_inner)]),
            "head.weight": (0, [self.own_slice(c.vocab_size)])}
        if c.qk_norm == "all":
            shards |= {".attn.q_norm.": (0, [queries]), ".attn.k_norm.": (0, [keys(0)])}
        return next((shard for part, shard in shards.items() if part in name), None)

    def divide(self, model):
        """Gives a `GPT` without weights layers of this rank's sizes."""
        if self.size == 1:
            return
        config = self.shard_config(model.config)
        model.blocks = Blocks(Block(config, layer) for layer in range(config.n_layer))
        if not model.config.tied:
            rows = self.own_slice(model.config.vocab_size)
            model.head = LMHead(model.config.n_embd, rows.stop - rows.start, bias=False)

    def connect(self, model):
        """Connects the layers of a divided model by collectives, once it has its weights."""
        if self.size == 1:
            return
        config = model.config
        for block in model.blocks:
            block.attn.query_heads = self.own_slice(config.n_head)
            block.attn.proj = RowParallelLinear(block.attn.proj, self)
            block.mlp.down = RowParallelLinear(block.mlp.down, self)
            if config.qk_norm == "all":
                block.attn.q_norm = ParallelNorm(block.attn.q_norm, self)
                block.attn.k_norm = ParallelNorm(block.attn.k_norm, self)
        if config.tied:
            own = model.embed.weight[self.own_slice(config.vocab_size)]
            model.head.weight = nn.Parameter(own, requires_grad=False)
            model.head.out_features = len(own)
        model.head = VocabParallelHead(model.head, self, config.vocab_size)


# --------------------------------------------------------------------------------------------------
# Layers

class RowParallelLinear(nn.Module):
    """A linear layer whose input channels are split across the ranks, which sum their outputs."""

    def __init__(self, linear, group):
        super().__init__()
        self.bias = linear.bias
        linear.bias = None
        self.local = linear
        self.group = group

    def forward(self, x):
        return self.group.sum(self.local(x), self.bias)


class ParallelNorm(nn.Module):
    """RMSNorm over the channels of all ranks, each of which has equally many."""

    def __init__(self, local, group):
        super().__init__()
        self.local = local
        self.group = group

    def forward(self, x):
        squares = x.float().pow(2).mean(dim=-1, keepdim=True)
        mean = self.group.sum(squares) / self.group.size
        return (x * (mean + self.local.eps).rsqrt() * self.local.weight).to(x.dtype)


class VocabParallelHead(nn.Module):
    """`LMHead` with its rows split across the ranks. All ranks gather all logits and choose the
    same tokens."""
    sample_filtered = staticmethod(LMHead.sample_filtered)

    def __init__(self, local, group, vocab_size, selected=slice(None)):
        super().__init__()
        self.local = local
        self.group = group
        self.vocab_size = vocab_size
        self.selected = selected  # the tokens that `topk` considers

    def select(self, tokens):
        return VocabParallelHead(self.local, self.group, self.vocab_size, tokens)

    def topk(self, hidden, k, vocab_ids=None, noise=None):
        return best_tokens(self.logits(hidden)[:, self.selected], k, vocab_ids, noise)

    def sample(self, hidden, temperature, seed, sequence, position, masks=None):
        return filtered_sample(
            self.logits(hidden.flatten(0, 1)), temperature=temperature, top_k=0, top_p=1.0,
            min_p=0.0, seed=seed, sequence=sequence,
            position=(position + 1).view(-1), masks=masks).view_as(position)

    def logits(self, hidden):
        return self.all_columns(self.local.logits(hidden))

    def forward(self, x):
        return self.all_columns(self.local(x))

    def all_columns(self, logits):
        """Gathers the ranks' logits -> [..., V]. Their vocabulary slices may differ by a token."""
        N, V = self.group.size, self.vocab_size
        parts = self.group.all_gather(F.pad(logits, (0, -(-V // N) - logits.shape[-1])))
        sizes = [V * (i + 1) // N - V * i // N for i in range(N)]
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes)], dim=-1)

    def embedding(self, tokens):
        own = tokens - self.group.own_slice(self.vocab_size).start
        here = (own >= 0) & (own < self.local.out_features)
        return self.group.sum(self.local.embedding(own.where(here, 0)) * here[..., None])


# --------------------------------------------------------------------------------------------------
# Start and end

def start(device=None):
    """The `Group` of the ranks that torchrun started, each on its own GPU or on the CPU; without
    torchrun a single process. device: the value of --device, or None."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if size == 1:
        return Group(device=device)
    if device.startswith("cuda:"):
        raise SharedError(f"each rank takes its own GPU; expected --device cuda, not {device}")
    name = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    device = pick_device(name)
    options = dict(backend="gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dict(backend="cpu:gloo,cuda:nccl", device_id=device)  # barriers need the id
    dist.init_process_group(timeout=TIMEOUT, **options)
    group = Group(int(os.environ["RANK"]), size, name)
    group.all_gather(torch.zeros(2**18, device=device))  # NCCL allocates before we measure memory
    group.check_same(sys.argv[1:], "were started with different flags")
    return group


def lost_rank(error):
    """The message for a RuntimeError that means another rank has ended; None for other errors."""
    first, *others = str(error).splitlines() or [""]
    if "NCCL" in first:
        reason = " ".join([first, *others[-1:]])  # the last line says why
        return f"NCCL failed, or another process has ended ({reason})"
    if "gloo" in first or isinstance(error, getattr(dist, "DistError", ())):
        return f"another process has ended, or cannot be reached ({first})"
    return None


def end_rank(code):
    """Ends this process immediately if it is a rank, since libraries' exit handlers may wait for
    the other ranks."""
    if dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
