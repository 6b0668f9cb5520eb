"""CPU inference with the kernels in cpu.c: one call of it per stage of a step.

`apply(model, heads)` replaces linear layers, LM head, embedding and blocks by packed ones. These
only decode: they cannot be trained, moved or saved. Without a C compiler the model runs on torch's
operations."""

import ctypes
import math
from contextlib import suppress
from ctypes import c_int32
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from backends import cpu_layers
from backends.cpu_layers import PackedBlocks, PackedEmbedding, PackedLinear, PackedLMHead, pointer
from backends.cpu_library import LARGEST, header, is_usable, library, threads
from backends.slots import SomeSlots, batch_of
from clover import Tree
from common.values import warn
from engine.policy import Policy
from generate import FILTERED, MAX_CHAIN, Accepted, Draft
from model import KVCache

FEWER = 1.15    # more threads must be this much faster than fewer to be used
BUDGET = 0.25   # seconds to measure that
SLOW_BFLOAT16 = ("torch multiplies bfloat16 slowly on this CPU, so the default dtype is float32 "
                 "(--dtype bfloat16 takes less memory)")


def apply(model, heads=None):
    """Packs a `GPT` and its `CloverHeads` for decoding, in place. Does nothing unless `is_usable`.
    Raises InputError for a dtype that cpu.c does not support."""
    if not is_usable(model.device):
        return
    cpu_layers.pack(model)
    if heads:
        cpu_layers.pack(heads)
    if isinstance(model.blocks, PackedBlocks):
        model.decoder = CompiledDecoder
    if model.config.tied and isinstance(model.head, PackedLMHead):
        model.embed = PackedEmbedding(model.head, model.dtype)


def put(model, name, parts):
    """Replaces the layer `name` by a packed layer made of `PackedWeight`s."""
    layer = model.get_submodule(name)
    weight = cpu_layers.stack(parts, getattr(layer, "bias", None))
    if name != "embed":
        model.set_submodule(name, cpu_layers.LAYERS[type(layer)](weight))
    elif model.config.tied:
        model.head = PackedLMHead(weight)  # also serves as the embeddings
    else:
        model.embed = PackedEmbedding(PackedLinear(weight), model.dtype)


def is_exact(model):
    """Whether hidden states have the same bits for any tree and batch size."""
    return isinstance(model.blocks, PackedBlocks) and isinstance(model.head, PackedLMHead)


def trim_memory():
    """Returns freed memory to the system, which glibc would keep; reading weights frees a lot."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def choose_threads(seconds):
    """Sets torch's number of threads to one, unless 2, 4 or its present number are faster.
    seconds() runs a step and returns its duration. Compares means rather than minima: beside other
    work on the machine, threads wait for one another."""
    most = torch.get_num_threads()
    if most == 1:
        return
    torch.set_num_threads(1)
    seconds()  # warm-up
    total = dict.fromkeys(sorted({1, min(2, most), min(4, most), most}), 0.0)
    while sum(total.values()) < BUDGET:
        for n in total:
            torch.set_num_threads(n)
            total[n] += seconds()
    best = 1
    for n in total:
        if FEWER * total[n] < total[best]:
            best = n
    torch.set_num_threads(best)


def default_dtype(device, stored, packed, rank=0):
    """bfloat16 on a GPU, and on a CPU with C kernels for weights stored in bfloat16; otherwise
    float32. Also float32 on a CPU where torch multiplies bfloat16 slowly, unless layers will be
    `packed`; rank 0 prints that."""
    if device.type == "cuda":
        return torch.bfloat16
    if stored != torch.bfloat16 or library() is None:
        return torch.float32
    if packed or torch_multiplies_bfloat16():
        return torch.bfloat16
    if rank == 0:
        warn(SLOW_BFLOAT16)
    return torch.float32


def torch_multiplies_bfloat16():
    """Whether torch multiplies bfloat16 by instructions made for it. Without them its products take
    2 to 10 times as long as in float32. oneDNN alone also accepts AVX-512 without BF16."""
    features = getattr(torch.cpu, "get_capabilities", dict)()
    onednn = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # not on macOS
    has_products = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return has_products and onednn is not None and onednn()


# --------------------------------------------------------------------------------------------------
# Decoding

class PackedDecoder(SomeSlots):
    """A `generate.Decoder` for heads that cpu.c does not run. It keeps float32 up to the LM head
    like `CompiledDecoder`, so that both compute the same bits."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.tensors = []  # keeps alive what the struct points to
        self.norm = cpu_layers.norm_struct(model.norm, self.tensors)

    def verify(self, plan, draft):
        model = self.model
        hidden, normed, states = model.blocks.run(
            model.embeddings(draft.tree.tokens, draft.positions), model.tables, draft.positions,
            replace(self.slots.cache, slots=draft.batch.slots), draft.tree.ancestors,
            layers=self.hidden_layers, norm=self.norm)
        return normed, states if self.hidden_layers else hidden


class CompiledDecoder(PackedDecoder):
    """A `generate.Decoder` with one call of cpu.c per stage. A step runs only the slots that hold
    sequences. The augmenting blocks, or the heads' layer, read accepted tokens only when the heads
    draft again, so the heads' cache may be shorter than the model's. Each step overwrites the
    results of the one before."""
    tree_sizes = range(2, LARGEST + 1)
    chooses_size = True

    @classmethod
    def for_heads(cls, heads):
        """This class, if heads are None or cpu.c runs them: a `PackedHeads` or `PackedLayer`."""
        runs = heads is None or hasattr(getattr(heads, "heads", None), "struct")
        return cls if runs else PackedDecoder

    @torch.inference_mode()
    def __init__(self, model, **options):
        super().__init__(model, **options)
        B = self.batch_size
        rows = B * self.max_tree
        P = self.path_limit(self.max_tree)
        cache = self.slots.heads_cache
        self.slots.heads_cache = KVCache(cache.kv, torch.zeros_like(cache.lengths))
        self.slot_array = (c_int32 * B)(*range(B))
        self.running = list(range(B))
        integers = partial(torch.zeros, dtype=torch.int64)
        self.results = dict(
            tree=integers(5 * rows), probabilities=torch.zeros(rows), drafted=torch.zeros(2),
            chain=integers(B * (1 + MAX_CHAIN)), positions=integers(rows), target=integers(rows),
            accepted=integers(B * (3 * P + 2)), x=torch.zeros(rows * model.config.n_embd),
            normed=torch.zeros(rows * model.config.n_embd))
        if model.dtype == torch.bfloat16:
            self.results["hidden"] = torch.zeros_like(self.results["x"], dtype=model.dtype)
        self.reads = getattr(self.heads, "g", None)  # makes what heads read of the model's states
        self.stops = sorted({*self.hidden_layers, len(model.blocks)})
        self.results["stops"] = torch.tensor(self.stops, dtype=torch.int32)
        if self.hidden_layers:
            states = len(self.stops) * len(self.results["x"])
            self.results["states"] = torch.zeros(states, dtype=model.dtype)
        self.views = {}    # (B, T) -> views of the results
        self.embeds = (isinstance(model.embed, PackedEmbedding) and model.embed_positions is None
                       and model.config.embed_scale == 1)
        self.struct = self.step_struct()

    def step_struct(self):
        """The `header.Step` that points to this decoder's tensors."""
        model = self.model
        slots = self.slots
        policy = self.policy
        tensors = self.results | dict(
            chances=policy.chances, counts=policy.counts,
            lengths=slots.cache.lengths, heads_lengths=slots.heads_cache.lengths,
            history=slots.history, active=slots.active, root=slots.all.root,
            sequence=slots.all.sequence, seed=slots.all.sampling["seed"],
            temperature=slots.all.sampling["temperature"], state=slots.state)
        if isinstance(policy, Policy):  # else nobody reads `drafted`, and T is fixed
            tensors |= dict(seconds=policy.step_seconds, drafted=policy.drafted)
        struct = header.Step(
            blocks=model.blocks.structs, n_blocks=len(model.blocks),
            n_delta=len(model.blocks) - len(slots.cache.kv), norm=self.norm, K=policy.depth,
            W=self.beams, with_lookup=policy.lookup, words=-(-model.config.vocab_size // 32),
            history_stride=slots.history.stride(0),
            trees=self.slot_pass(slots.cache, model.tables),
            **{name: pointer(x) for name, x in tensors.items()})
        if self.embeds:
            struct.embed = model.embed.table.packed.linear
        if isinstance(self.head, PackedLMHead):
            struct.head = self.head.packed.linear
        if self.heads:
            self.add_heads(struct)
        return struct

    def add_heads(self, struct):
        model = self.model
        heads = self.heads.heads
        heads.struct.rows = self.heads.lm_head.packed.linear
        heads.struct.ids = pointer(self.heads.vocabulary)
        cache = self.slots.heads_cache
        rows = self.batch_size, self.slots.cache.kv.shape[4]
        self.hidden_rows = cache.kv.new_zeros(*rows, model.config.n_embd)
        struct.heads = ctypes.pointer(heads.struct)
        struct.paths = self.slot_pass(cache, getattr(self.heads, "tables", model.tables))
        struct.augment = heads.augment
        struct.n_augment = len(cache.kv)
        struct.hidden_rows = self.hidden_rows.data_ptr()
        struct.hidden_stride = self.hidden_rows.stride(0)

    def slot_pass(self, cache, tables):
        a_pass = cpu_layers.pass_struct((self.batch_size, 1), tables, cache.kv, cache.lengths)
        a_pass.slots = ctypes.addressof(self.slot_array)
        a_pass.states = cpu_layers.states_struct(cache.states)
        return a_pass

    def place(self, running):
        self.running = list(running)
        self.struct.trees.B = len(self.running)
        self.slot_array[:len(self.running)] = self.running
        return self.running

    def samples_in_torch(self, plan):
        return plan.mode == FILTERED or not self.struct.head.k

    def draft(self, plan, masks=None, forced=None):
        struct = self.struct
        struct.first_masks = pointer(masks)
        struct.forced = pointer(forced)
        struct.tree_size = plan.tree_size or 0
        struct.depths = plan.depths
        struct.trees.threads = struct.paths.threads = threads()
        cpu_layers.check_room(library().step_draft(struct), struct.trees)
        key = struct.trees.B, struct.T
        if key not in self.views:
            self.views[key] = self.step_views(*key)
        self.view = self.views[key]
        batch = None  # cpu.c reads the slots itself
        if self.samples_in_torch(plan):
            batch = batch_of(self.slots, torch.tensor(self.running))
        return Draft(batch, self.view.tree, self.view.positions, None)

    def step_views(self, B, T):
        P = self.struct.P
        view = lambda name, *shape: self.results[name][:math.prod(shape)].view(shape)
        C = self.model.config.n_embd
        packed = view("accepted", B, 3 * P + 2)
        return SimpleNamespace(
            tree=Tree(*view("tree", 5, B, T), view("probabilities", B, T)),
            positions=view("positions", B, T), x=view("x", B, T, C), normed=view("normed", B, T, C),
            hidden=view("hidden" if "hidden" in self.results else "x", B, T, C),
            states=[view("states", len(self.stops), B, T, C)[self.stops.index(layer)]
                    for layer in self.hidden_layers],
            target=view("target", B, T), packed=packed, accepted=unpacked(packed))

    def verify(self, plan, draft):
        view = self.view
        if not self.embeds:
            view.x.copy_(self.model.embeddings(draft.tree.tokens, draft.positions))
        cpu_layers.check_room(library().step_verify(self.struct), self.struct.trees)
        if self.reads:
            states = torch.cat(view.states, -1) if view.states else view.hidden
            view.hidden.copy_(self.reads(states))
        return view.normed, view.hidden

    def sample(self, plan, draft, normed, masks=None):
        if self.samples_in_torch(plan):
            return self.view.target.copy_(super().sample(plan, draft, normed, masks))
        self.struct.noise = plan.mode
        self.struct.masks = pointer(masks)
        library().step_sample(self.struct)
        return self.view.target

    def accept(self, plan, draft, target):
        library().step_accept(self.struct)
        return self.view.accepted

    def commit(self, plan, draft, hidden, accepted):
        library().step_commit(self.struct)

    def to_host(self, accepted):
        return unpacked(self.view.packed.clone())

    def prefill(self, slot, prompt, start, end):
        self.forget(slot, start)
        super().prefill(slot, prompt, start, end)

    def read_prompt(self, slot, hidden, tokens, start):
        """Stores the hidden states. The heads read them when they first draft."""
        rows = self.reads(hidden) if self.reads else hidden
        self.hidden_rows[slot, start:start + hidden.shape[1]] = rows[0]
        self.slots.state[slot] = 0

    def begin(self, slot, sequence, start):
        self.forget(slot, start)
        super().begin(slot, sequence, start)

    @torch.inference_mode()
    def forget(self, slot, start):
        """Lets the heads read a slot's rows from `start` on again, which get other tokens."""
        self.slots.heads_cache.lengths[slot].clamp_(max=start)


def unpacked(packed):
    """The `Accepted` in what cpu.c's step_accept writes, int64 [B, 3 P + 2]."""
    P = packed.shape[1] // 3
    *columns, counts = packed.tensor_split((P, 2 * P, 3 * P), dim=1)  # faster than slices
    return Accepted(*columns, counts[:, 0])
