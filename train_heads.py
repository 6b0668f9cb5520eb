"""Trains draft heads on a frozen model: teacher forcing, against the model's own next-token distribution.

    python train_heads.py                                     # Clover heads for demo/, on the built-in corpus
    python train_heads.py --preset medusa --out out/medusa
    python train_heads.py --model DIR --data my_texts/ 'chats/*.jsonl.gz' --out out/heads
    torchrun --nproc-per-node 4 train_heads.py --model DIR --data my_texts/ --out out/heads

    python train_heads.py --evaluate --out DIR               # measures heads that are there, trains nothing

The text is tokenised once, into OUT/tokens. The frozen model's hidden states are computed on the fly, with bfloat16 products
unless --dtype float32 is given. Every few minutes the run is saved, and so it is on Ctrl-C and SIGTERM; --resume goes on from
there and ends with the same heads, bit for bit, as a run that was never stopped. log.jsonl has a line for each interval.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh

from hf.chat import load_chat_template, stop_tokens
from hf.checkpoint import read_config
from model import InputError, atomic_write
from clover import MIXERS, PRESETS, PROJECTORS, CloverHeads, model_identity, preset
from training.data import Tokens, load_tokens, open_tokens, prompts, save_tokens, store_tokens, stored_tokens, tokens_key
from training.evaluate import DECODED, head_accuracy, measure, plot, table, teacher_forced, window_batch
from generate import check, generate
from tools.cli import DEMO, Parser, add_model_flags, command, load_model
from training.loss import chunk_size, guessed_places, head_losses, state_losses
from model import GPT, free_memory
from hf.tokenizer import tokenizer_hash
from training.run import Log, Progress, Signals, World, add_training_flags, check_training_flags, load_state, set_learning_rate

SHOW_EVERY = 20    # steps
SAVE_EVERY = 180.0  # seconds
PROMPTS = 32        # held-out ones, decoded at the end
HEAD_WEIGHT = 0.7  # head i counts 0.7^i in the loss: what a later head guesses is reached less often
REACH = 4          # --own-drafts: of the likeliest guesses of a head, how many drafting goes on from; about default_beams of 17
OWN_PROMPTS = 1024  # that the model continues by itself where the data are chats
OWN_ROUNDS = 4     # in which it does so, with the heads as they are by then
OWN_TREE = 5       # nodes; not the tree that is quickest: in half precision ties depend on it, and a resumed run must write the same
GB = 1e9


# ---------------------------------------------------------------------------------------------------------------------
# A model that is too large for one device

def too_large(args):
    """Whether the frozen model takes more than 60% of the memory that its device has left."""
    with torch.device("meta"):
        numbers = sum(p.numel() for p in GPT(read_config(args.model)).parameters())
    size = 4 if args.dtype == "float32" else 2
    return args.device.startswith("cuda") and size * numbers > 0.6 * free_memory(args.device)


def shard(model, mesh):
    """Leaves each process its part of the blocks' weights (FSDP2); embedding, norm and LM head stay whole. The model comes in the
    host's memory and goes to the device block by block, where all of it need never be."""
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    whole = [module for module in (model.embed, model.embed_positions, model.norm, model.head) if module is not None]
    for module in whole:
        module.to(mesh.device_type)
    model.tie_and_place()
    # one root above the blocks: each would be its own, and a root's weights stay together after a pass
    fully_shard(model, mesh=mesh, ignored_params={p for module in whole for p in module.parameters()})


# ---------------------------------------------------------------------------------------------------------------------
# The run

class Run:
    """One training run: what is trained, and how it is saved and resumed."""

    def __init__(self, args, heads, tokenizer, world, vocabulary=None, state=None):
        self.args, self.out, self.tokenizer, self.world = args, Path(args.out), tokenizer, world
        self.heads = heads.to(heads.model.device)
        self.heads.set_vocabulary(vocabulary or [])
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.autocast = torch.autocast(heads.model.device.type, torch.bfloat16, enabled=args.dtype != "float32")
        self.step, self.saved = 0, time.monotonic()
        if state:
            self.resume(state, vocabulary)
        self.wrapped = self.heads
        if world.size > 1:
            self.wrapped = torch.nn.parallel.DistributedDataParallel(self.heads, broadcast_buffers=False, gradient_as_bucket_view=True)

    def resume(self, state, vocabulary):
        self.heads.set_vocabulary(state["heads"].get("vocabulary", []) if vocabulary is None else vocabulary)
        weights = {name: value for name, value in state["heads"].items() if name != "vocabulary"}
        self.heads.load_state_dict(weights | ({"vocabulary": self.heads.vocabulary} if self.heads.config.vocabulary else {}))
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def save(self, **info):
        """Writes the heads and the training state; InputError, with the last ones intact, where that fails."""
        self.check_finite(*self.heads.parameters())
        self.saved = time.monotonic()
        if self.world.rank:
            return
        a = self.args
        training = dict(steps=self.step, tokens=self.step * a.batch_size * a.block_size, **settings(a),
                        data=[Path(p).name for p in a.data] if a.data else "the Python standard library's source", key=a.key)
        state = dict(config=vars(self.heads.config), base=model_identity(self.heads.model), settings=settings(a), key=a.key,
                     step=self.step, heads=self.heads.state_dict(), optimizer=self.optimizer.state_dict())
        try:
            atomic_write(self.out / "train_state.pt", lambda tmp: torch.save(state, tmp))
            self.heads.save_pretrained(self.out, self.tokenizer, torch.bfloat16, training=training, **info)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save and safetensors have no narrower ones
            raise InputError(f"{self.out}: step {self.step} cannot be saved ({str(error).splitlines()[0]}); what was saved last is "
                             "intact: make room and --resume") from None

    def check_finite(self, *tensors):
        if not all(bool(x.isfinite().all()) for x in tensors):
            raise InputError(f"training has diverged at step {self.step}: the loss or a weight is no number; {self.out} keeps what was "
                             "saved before: start anew with a lower --lr")

    def batch(self, corpus, own):
        """This process's part of the step's windows, see `window_batch`. They are seeded by the step, so that a resumed run sees the
        same ones, and however many processes there are."""
        a, seed = self.args, self.args.seed * 1_000_003 + self.step
        own = own if own and len(own.ids) > a.block_size + self.heads.config.n_draft else None  # it may be but a few words yet
        due = lambda step: int(a.self_share * a.batch_size * step)  # windows of its own text, up to a step
        share = due(self.step + 1) - due(self.step) if own else 0
        parts = [window_batch(self.heads, tokens, size, a.block_size, seed)
                 for tokens, size in ((corpus, a.batch_size - share), (own, share)) if size]
        ids, counts = (torch.cat([part[i] for part in parts])[self.world.rank::self.world.size] for i in (0, 1))
        if all(part[2] is None for part in parts):
            return ids, counts, None
        documents = torch.cat([torch.zeros_like(part[0]) if part[2] is None else part[2] for part in parts])
        return ids, counts, documents[self.world.rank::self.world.size]

    def losses(self, ids, counts, documents):
        """Per head, over all processes: (its loss in nats, of which only this process's part has a gradient, times the number of
        processes, which DDP divides it by; head accuracy), each [K]."""
        a, model, world = self.args, self.heads.model, self.world
        reach = REACH if self.step >= a.steps - a.own_drafts else 0
        with self.autocast:
            hidden, outputs = teacher_forced(self.heads, ids, documents, self.wrapped)
            places = guessed_places(ids, len(outputs), counts, documents)
            sums, hits, reached = head_losses(model, outputs, hidden, ids, places, a.objective, reach)
            if a.smooth_l1:
                sums = sums + a.smooth_l1 * state_losses(model, outputs, hidden, reached)
        number = lambda places: world.sum(places.sum(dim=(1, 2)).float()).clamp(min=1)
        losses = sums / number(reached)
        whole = world.sum(losses.detach().clone())
        return whole + world.size * (losses - losses.detach()), world.sum(hits) / number(places)

    def train_step(self, *windows):
        """One optimiser step on a batch of windows -> (loss, head accuracies [K])."""
        a = self.args
        losses, accuracies = self.losses(*windows)
        loss = sum(HEAD_WEIGHT ** i * part for i, part in enumerate(losses))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        set_learning_rate(self.optimizer, a.lr, self.step, a.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), accuracies

    def stopped(self, signals):
        """Several processes ask one another every tenth step alone, since that waits for all of them."""
        return (self.world.size == 1 or self.step % 10 == 0) and self.world.any(signals.came)

    def train(self, corpus, own=None):
        """Trains to the last step, or until Ctrl-C or SIGTERM, which end the step that is going on first -> whether it was the
        last."""
        a, world, progress = self.args, self.world, Progress(self.step, self.args.steps, self.args.batch_size * self.args.block_size)
        log = Log(self.out / "log.jsonl", self.step) if world.rank == 0 else None
        with Signals() as signals:
            while self.step < a.steps and not self.stopped(signals):
                written = own.until(self) if own else None
                loss, accuracies = self.train_step(*self.batch(corpus, written))
                if self.step % SHOW_EVERY == 0 or self.step == a.steps:
                    self.check_finite(loss)
                    if log:
                        shares = " ".join(f"{share:.3f}" for share in accuracies.tolist())
                        progress.show(self.step, f"loss {loss:.3f}  accuracy {shares}")
                        log.add(step=self.step, tokens=self.step * a.batch_size * a.block_size, loss=loss.item(),
                                accuracy=accuracies.tolist(), lr=self.optimizer.param_groups[0]["lr"])
                if self.step < a.steps and time.monotonic() > self.saved + SAVE_EVERY:
                    self.save()
        return self.step == a.steps


# ---------------------------------------------------------------------------------------------------------------------
# Text that the model writes itself

class OwnText:
    """What the model itself writes after prompts from the corpus: that is what heads meet when decoding, and not the corpus.

    It is written in OWN_ROUNDS rounds, evenly over the run, greedy and at temperature 1 in turn, by generate.py with the heads
    as they are by then, and kept beside the corpus's tokens, so that a resumed run finds it.
    """

    def __init__(self, run, corpus, stop, kinds):
        a, c = run.args, run.heads.model.config
        self.folder, self.stop, self.written, self.rounds = run.out / "tokens", stop, None, 0
        self.length = min(a.block_size + run.heads.config.n_draft + 1, c.block_size // 2)
        self.prompts = prompts(corpus, a.self_distill, max(a.block_size // 4, 1), a.seed, c.block_size - self.length)
        self.dtype, self.counts = corpus.ids.dtype, set(kinds) == {"text"}  # what a user says does not count
        if run.step == 0 and run.world.rank == 0:  # what an earlier run left there is not this one's
            for file in self.folder.glob("own-*"):
                file.unlink()
        run.world.wait()

    def until(self, run):
        """The Tokens of all rounds that have begun by the run's step."""
        while self.rounds < OWN_ROUNDS and run.step >= self.rounds * run.args.steps // OWN_ROUNDS:
            name = f"own-{self.rounds}"
            run.world.first(lambda: self.write(run, name))
            new, self.rounds = open_tokens(self.folder, name, self.dtype), self.rounds + 1
            old = [self.written] if self.written else []
            self.written = Tokens(*(np.concatenate(arrays) for arrays in zip(*old, new)))
        return self.written

    def write(self, run, name):
        """Writes a round, unless this run did before it was stopped."""
        if (self.folder / f"{name}.flags").exists():
            return
        given, model = self.prompts[self.rounds::OWN_ROUNDS], run.heads.model
        if not given:
            save_tokens(self.folder, name, [], self.dtype)
            return
        run.save()
        heads = CloverHeads.from_pretrained(run.out, model) if run.step else None  # in the model's dtype, for inference
        began = time.monotonic()
        out = generate(model, given, self.length, heads, temperature=self.rounds % 2, seed=run.args.seed, tree_size=OWN_TREE,
                       batch_size=32, stop=self.stop)
        run.world.say(f"the model wrote {out.emitted} tokens after {len(given)} prompts ({out.tokens_per_step:.2f} per step) in "
                      f"{time.monotonic() - began:.0f} s")
        documents = (([*prompt, *text], [self.counts] * len(prompt) + [True] * len(text)) for prompt, text in zip(given, out.tokens))
        save_tokens(self.folder, name, documents, self.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Memory

def memory_plan(run):
    """What training takes, in bytes: {what: how much}. What the heads keep for the backward pass is counted on one window and on two,
    since some of it, autocast's copies of the weights, does not grow with the batch."""
    a, heads, model, c = run.args, run.heads, run.heads.model, run.heads.model.config
    one, two = kept_bytes(run, 1), kept_bytes(run, 2)
    rows, length = a.batch_size // run.world.size, a.block_size + heads.config.n_draft
    passing = length * model.dtype.itemsize * (5 * c.n_embd + 3 * c.n_inner + 3 * (c.n_head + 2 * c.n_kv_head) * c.head_size)
    mine = lambda p: (p.to_local() if hasattr(p, "to_local") else p).nbytes  # of a sharded weight
    return {"the model": sum(map(mine, model.parameters())),
            "heads, gradients and AdamW": 4 * sum(p.nbytes for p in heads.parameters()),
            "activations": one + (rows - 1) * (two - one) + rows * passing,
            "logits": 6 * 4 * chunk_size(model.device)}


def kept_bytes(run, batch_size):
    """Bytes that stand between the forward and the backward pass of so many windows."""
    heads, model, kept = run.heads, run.heads.model, {}
    outside = (*heads.parameters(), *model.embed.parameters(), *model.norm.parameters(), *model.head.parameters())
    weights = {p.untyped_storage().data_ptr() for p in outside}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    ids = torch.zeros(batch_size, run.args.block_size + heads.config.n_draft + 1, dtype=torch.int64, device=model.device)
    with run.autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _, outputs = teacher_forced(heads, ids)
        outputs = [model.norm(out) for out in outputs]
    return sum(kept.values()) + 2 * sum(out.nbytes for out in outputs)  # and what the loss hands back


def memory_line(run):
    plan = memory_plan(run)
    parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in plan.items())
    free = free_memory(run.heads.model.device) + plan["the model"]
    short = f"; only {free / GB:.1f} are free: a smaller --batch-size takes less" if sum(plan.values()) > free else ""
    return f"memory, about {sum(plan.values()) / GB:.2f} GB: {parts}{short}"


# ---------------------------------------------------------------------------------------------------------------------
# Command line

SWITCHES = {  # of CloverConfig, as flags; n_draft is --draft-heads
    "n_draft": dict(type=int, metavar="N", help="how many heads, K"),
    "augment_layers": dict(type=int, help="transformer blocks before the heads"),
    "mix": dict(choices=(*MIXERS, "none"), help="how a head takes in the token guessed before it"),
    "mix_before": dict(action=argparse.BooleanOptionalAction, help="take in the root before the augmenting block too"),
    "projector": dict(choices=tuple(PROJECTORS), help="what stands before the LM head"),
    "shared": dict(action=argparse.BooleanOptionalAction, help="all heads but the first share their weights"),
}


def parse(argv):
    parser = Parser("Trains draft heads on a frozen model.")
    add_model_flags(parser)
    add_training_flags(parser, steps=500, batch_size=8, block_size=None, lr=6e-3)
    parser.add_argument("--preset", default="clover", help=f"one of {', '.join(PRESETS)}")
    for name, options in SWITCHES.items():
        options = options | dict(default=argparse.SUPPRESS, help=f"{options['help']}; default: the preset's")
        parser.add_argument("--draft-heads" if name == "n_draft" else f"--{name.replace('_', '-')}", dest=name, **options)
    parser.add_argument("--out", help="default: out/ and the preset's name")
    parser.add_argument("--objective", choices=("distill", "data"), default="distill")
    parser.add_argument("--smooth-l1", type=float, default=0.0, metavar="X",
                        help="add X times the SmoothL1 distance between the heads' states and the model's")
    parser.add_argument("--own-drafts", type=int, default=0, metavar="N",
                        help=f"in the last N steps train a head only where drafting comes to it: behind tokens that each head before it "
                             f"has among its {REACH} likeliest")
    parser.add_argument("--self-distill", type=int, metavar="N",
                        help=f"let the model continue N prompts from the data, and train on that too; default: {OWN_PROMPTS} where the "
                             "data are chats, else 0")
    parser.add_argument("--self-share", type=float, default=0.5, metavar="X", help="of the windows, the share from the model's own text")
    parser.add_argument("--draft-vocabulary", type=int, metavar="N",
                        help="let the heads draft only among the N most frequent tokens of the data; 0: all; default: all, "
                             "or what heads to evaluate have")
    parser.add_argument("--shard-base", action="store_true", help="with torchrun: leave each GPU a part of the frozen model (FSDP2); "
                        "default where it does not fit one")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, measure the heads in --out and write it there")
    args = parser.parse_args(argv)
    args.out = args.out or f"out/{args.preset}"
    args.config = preset(args.preset, **{name: getattr(args, name) for name in SWITCHES if hasattr(args, name)})
    check("draft heads", args.config.n_draft, 1, 32, whole=True)
    check("augment layers", args.config.augment_layers, 0, 64, whole=True)
    check_training_flags(args)
    check("smooth L1", args.smooth_l1, 0, 1e6)
    check("own drafts", args.own_drafts, 0, args.steps, whole=True)
    check("self-distill", args.self_distill or 0, 0, 10**7, whole=True)
    check("self share", args.self_share, 0, 1)
    return args


def settings(args):
    """What a run must be resumed with."""
    names = ("batch_size", "block_size", "lr", "seed", "objective", "smooth_l1", "own_drafts", "self_distill", "self_share", "dtype")
    return {name: getattr(args, name) for name in names}


def check_origin(state, args, model):
    """Refuses to resume what is no run, or one of other heads or on another model."""
    config = state.get("config", {})
    if (config, state.get("base")) != (dict(vars(args.config), vocabulary=config.get("vocabulary")), model_identity(model)):
        raise InputError(f"{args.out} holds a run of preset {config.get('preset')!r} with other switches, or on another model; choose another "
                         "--out")


def check_settings(state, args):
    """Refuses to resume a run with other flags than it was started with, or to fewer steps than it has done."""
    for name, value in settings(args).items():
        if state["settings"][name] != value:
            raise InputError(f"{args.out} holds a run with --{name.replace('_', '-')} {state['settings'][name]}, not {value}; repeat its flags, "
                             "or choose another --out")
    if state["step"] > args.steps:
        raise InputError(f"{args.out} holds a run that is at step {state['step']} already; --steps {args.steps} is less: choose more steps or "
                         "another --out")


def most_frequent(tokens, n, vocab_size):
    """The n most frequent ids of tokens [N], most frequent first; of equals the lowest."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), 2**24):  # what is counted is copied
        counts += np.bincount(tokens[start:start + 2**24], minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:n].tolist()


def load(args, world):
    """--model for this process, and new heads on it -> (heads, encoding). One that is to be sharded comes in the host's memory."""
    if args.shard_base and world.size == 1:
        raise InputError("--shard-base shares the model out among processes; start them with torchrun --nproc-per-node N train_heads.py")
    args.shard_base = world.size > 1 and world.any(args.shard_base or too_large(args))
    if not args.shard_base:
        model, encoding = load_model(args)
        torch.manual_seed(args.seed)
        return CloverHeads(args.config, model), encoding
    mesh = init_device_mesh(world.device.type, (world.size,))
    dtype = args.dtype or ("bfloat16" if world.device.type == "cuda" else None)
    with world.in_turn():
        model, encoding = load_model(argparse.Namespace(**vars(args) | dict(device="cpu", dtype=dtype)))
        torch.manual_seed(args.seed)
        heads = CloverHeads(args.config, model)  # which copies the last block, so while that is whole
        shard(model, mesh)
    return heads, encoding


def tokens_of(args, encoding, world, state):
    """The splits, and how many documents there are of each kind; tokenised by the first process, mapped by all."""
    folder, template = Path(args.out) / "tokens", load_chat_template(args.model)

    def store():
        if state and state["key"] != tokens_key(args.data, encoding, template):
            raise InputError(f"{args.out} holds a run on other data, or on data that has changed since; repeat its --data, or choose another "
                             "--out")
        store_tokens(folder, args.data, encoding, template, world.say)
    world.first(store)
    splits, record = stored_tokens(folder)
    args.key = record["key"]
    return splits, record["kinds"]


def evaluate_folder(args, model, encoding):
    """--evaluate: measures the heads in --out, and writes that into their folder."""
    tokenizer, template = tokenizer_hash(encoding), load_chat_template(args.model)
    heads = CloverHeads.from_pretrained(args.out, model, tokenizer)
    size, heldout = block_size(args, model, heads.config), load_tokens(args.data, encoding, "heldout", template)
    if args.draft_vocabulary is not None:
        train = load_tokens(args.data, encoding, "train", template)
        heads.set_vocabulary(most_frequent(train.ids, args.draft_vocabulary, model.config.vocab_size))
    found = measure(heads, heldout, heldout_prompts(heldout, model), args.batch_size, size)
    info = {name: value for name, value in heads.info.items() if name not in ("config", "base")} | found
    if args.draft_vocabulary is None:
        heads.save_record(args.out, tokenizer, **info)
    else:
        heads.save_pretrained(args.out, tokenizer, torch.bfloat16, **info)
    print(table(**found))


def heldout_prompts(heldout, model):
    """What is decoded to measure heads: prompts that leave the context room for as many new tokens."""
    room = model.config.block_size - DECODED
    return prompts(heldout, PROMPTS, max(min(64, room // 2), 1), most=max(min(256, room), 1))


def longest(model, config):
    """Tokens of the longest window from which all heads can guess."""
    return model.config.block_size - config.n_draft - 1


def block_size(args, model, config):
    size = args.block_size or min(256, longest(model, config))
    check("block size", size, 1, longest(model, config), whole=True)
    return size


def check_lengths(splits, args):
    """Refuses, before anything is trained, splits that training or its evaluation would not do with."""
    window = args.block_size + args.config.n_draft + 1
    for (split, tokens), windows in zip(splits.items(), (args.batch_size, 1)):
        if len(tokens.ids) < windows * window:
            raise InputError(f"expected at least {windows * window} tokens in the {split} split, {windows} windows of {window}, but it has "
                             f"{len(tokens.ids)}; give more text, or a smaller --block-size or --batch-size")


def finish(run, heldout):
    """Measures what was trained, and says how to use it. A sharded model decodes nothing: it may not fit a device."""
    args, world, model = run.args, run.world, run.heads.model
    sizes = args.batch_size // world.size, args.block_size
    if args.shard_base:
        top = head_accuracy(run.heads, heldout, *sizes, run.autocast)
        run.save(accuracy=top[1], top_accuracy=top)
        world.say(table(top) + "\nmeasure the rest where the model fits one device: python train_heads.py --evaluate")
    world.end()
    if world.rank:
        return
    if not args.shard_base:
        found = measure(CloverHeads.from_pretrained(run.out, model), heldout, heldout_prompts(heldout, model), *sizes)
        run.save(**found)
        print(table(**found))
    plot(run.out)
    flag = "" if args.model == str(DEMO) else f"--model {args.model} "
    print(f"\nuse them:  python generate.py {flag}--heads {run.out} --prompt \"def fibonacci(n):\"")


def prepare(args, world):
    """All that can go wrong before the first step -> (Run, the splits, the model's own text or None)."""
    out = Path(args.out)
    if not args.resume and (out / "train_state.pt").exists():
        raise InputError(f"{out} holds a run already; --resume goes on with it, another --out starts a new one")
    state = load_state(out / "train_state.pt", "cpu") if args.resume else None
    heads, encoding = load(args, world)
    model = heads.model
    if args.draft_vocabulary is not None:
        check("draft vocabulary", args.draft_vocabulary, 0, model.config.vocab_size, whole=True)
    args.block_size = block_size(args, model, args.config)
    if state:
        check_origin(state, args, model)
    splits, kinds = tokens_of(args, encoding, world, state)
    if args.self_distill is None:
        chats = 2 * kinds.get("chat", 0) > sum(kinds.values())
        args.self_distill = OWN_PROMPTS if chats and not args.shard_base else 0
    if args.self_distill and args.shard_base:
        raise InputError("--self-distill lets the model decode, which a sharded one does not; take --self-distill 0")
    if state:
        check_settings(state, args)
    check_lengths(splits, args)
    heldout_prompts(splits["heldout"], model)
    frequent = None if args.draft_vocabulary is None else most_frequent(splits["train"].ids, args.draft_vocabulary, model.config.vocab_size)
    run = Run(args, heads, tokenizer_hash(encoding), world, frequent, state)
    own = OwnText(run, splits["train"], stop_tokens(args.model, encoding), kinds) if args.self_distill else None
    if world.rank == 0:
        for leftover in out.glob("*.tmp*"):  # of a run that was killed while it saved
            leftover.unlink()
    return run, splits, own


def main(argv=None):
    args = parse(argv)
    world = World(args)
    if args.evaluate:
        if world.size > 1:
            raise InputError("--evaluate is for one process; start it without torchrun")
        model, encoding = load_model(args)
        if args.draft_vocabulary is not None:
            check("draft vocabulary", args.draft_vocabulary, 0, model.config.vocab_size, whole=True)
        return evaluate_folder(args, model, encoding)
    run, splits, own = prepare(args, world)
    size = sum(p.numel() for p in run.heads.parameters())
    world.say(f"{args.preset} heads: {size / 1e6:.2f}M parameters; {len(splits['train'].ids) / 1e6:.1f}M training tokens")
    world.say(memory_line(run))
    if not run.step:
        run.save()  # from here on --resume has something to go on from
    done = run.train(splits["train"], own)
    run.save()  # before the evaluation: Ctrl-C there loses nothing
    if not done:
        world.say(f"\ninterrupted at step {run.step}; --resume goes on from here")
        return world.end()
    finish(run, splits["heldout"])


if __name__ == "__main__":
    command(main)
