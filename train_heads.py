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
import torch.distributed as dist
from safetensors import SafetensorError

from chat import load_chat_template, stop_tokens
from checkpoint import InputError, atomic_write, read_config, read_json
from clover import MIXERS, PRESETS, PROJECTORS, CloverHeads, model_identity, preset
from data import Tokens, open_tokens, prompts, save_tokens, store_tokens
from evaluate import accepted, head_accuracy, measure, plot, table, teacher_forced, window_batch
from generate import DEMO, Parser, add_model_flags, check, command, generate, load_model, pick_device
from loss import CHUNK, guessed_places, head_losses, state_losses
from model import GPT, free_memory
from tokenizer import tokenizer_hash
from training import Log, Progress, Signals, World, add_training_flags, check_training_flags, load_state, set_learning_rate

SHOW_EVERY = 20    # steps
SAVE_EVERY = 180.0  # seconds
PROMPTS = 32        # held-out ones, decoded at the end
HEAD_WEIGHT = 0.7  # head i counts 0.7^i in the loss: what a later head guesses is reached less often
REACH = 4          # --own-drafts: the text's token is among so many likeliest guesses of each head before; about default_beams of 17
OWN_PROMPTS = 1024  # that the model continues by itself where the data are chats
OWN_ROUNDS = 4     # in which it does so, with the heads as they are by then
GB = 1e9


# ---------------------------------------------------------------------------------------------------------------------
# A model that is too large for one device

def too_large(args):
    """Whether the frozen model takes more than 60% of the memory that its device has left."""
    with torch.device("meta"):
        numbers = sum(p.numel() for p in GPT(read_config(args.model)).parameters())
    size = 4 if args.dtype == "float32" else 2
    return args.device.startswith("cuda") and size * numbers > 0.6 * free_memory(args.device)


def shard(model, device):
    """Leaves each process its part of the blocks' weights (FSDP2); embedding, norm and LM head stay whole. The model comes in the
    host's memory and goes to the device block by block, where all of it need never be."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    for module in (model.embed, model.embed_positions, model.norm, model.head):
        if module is not None:
            module.to(device)
    model.tie_and_place()


# ---------------------------------------------------------------------------------------------------------------------
# The run

class Run:
    """One training run: what is trained, and how it is saved and resumed."""

    def __init__(self, args, config, model, encoding, world, vocabulary=None, state=None):
        self.args, self.out, self.tokenizer, self.world = args, Path(args.out), tokenizer_hash(encoding), world
        torch.manual_seed(args.seed)
        heads = CloverHeads(config, model)  # which copies the last block, so while that is whole
        if args.shard_base:
            shard(model, torch.device(args.device))
        self.heads = heads.to(model.device)
        self.heads.set_vocabulary(vocabulary or [])
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=args.dtype != "float32")
        self.step, self.saved = 0, time.monotonic()
        if state:
            self.resume(state, vocabulary)
        self.wrapped = torch.nn.parallel.DistributedDataParallel(self.heads) if world.size > 1 else self.heads

    def resume(self, state, vocabulary):
        config = dict(vars(self.heads.config), vocabulary=state.get("config", {}).get("vocabulary"))
        if (state.get("config"), state.get("base")) != (config, model_identity(self.heads.model)):
            name = state.get("config", {}).get("preset")
            raise InputError(f"{self.out} holds a run of preset {name!r} with other switches, or on another model; choose another --out")
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
        training = dict(steps=self.step, tokens=self.step * a.batch_size * a.block_size, batch_size=a.batch_size,
                        block_size=a.block_size, lr=a.lr, seed=a.seed, objective=a.objective, smooth_l1=a.smooth_l1,
                        own_drafts=a.own_drafts, self_distill=a.self_distill, self_share=a.self_share,
                        data=[Path(p).name for p in a.data] if a.data else "the Python standard library's source")
        state = dict(config=vars(self.heads.config), base=model_identity(self.heads.model), step=self.step,
                     heads=self.heads.state_dict(), optimizer=self.optimizer.state_dict())
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
            sums, hits, counted = head_losses(model, outputs, hidden, ids, places, a.objective, reach)
            total = world.sum(counted.clone()).clamp(min=1)
            losses = sums / total
            if a.smooth_l1:
                all_places = world.sum(places.sum(dim=(1, 2)).float()).clamp(min=1)
                losses = losses + a.smooth_l1 * state_losses(model, outputs, hidden, places) / all_places
        whole = world.sum(losses.detach().clone())
        return whole + world.size * (losses - losses.detach()), world.sum(hits) / total

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

    def train(self, corpus, own=None):
        """Trains to the last step, or until Ctrl-C or SIGTERM, which end the step that is going on first -> whether it was the
        last."""
        a, world, progress = self.args, self.world, Progress(self.step, self.args.steps, self.args.batch_size * self.args.block_size)
        log = Log(self.out / "log.jsonl", self.step) if world.rank == 0 else None
        with Signals() as signals:
            while self.step < a.steps and not world.any(signals.came):
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

    def __init__(self, run, corpus, stop, chat):
        a = run.args
        self.folder, self.stop, self.chat, self.written, self.rounds = run.out / "tokens", stop, chat, None, 0
        self.prompts = prompts(corpus, a.self_distill, max(a.block_size // 4, 1), a.seed)
        self.length = a.block_size + run.heads.config.heads + 1
        self.dtype = corpus.ids.dtype
        if not a.resume and run.world.rank == 0:  # what an earlier run left there is not this one's
            for file in self.folder.glob("own-*"):
                file.unlink()
        run.world.wait()

    def until(self, run):
        """The Tokens of all rounds that have begun by the run's step."""
        while self.rounds < OWN_ROUNDS and run.step >= self.rounds * run.args.steps // OWN_ROUNDS:
            name = f"own-{self.rounds}"
            if run.world.rank == 0 and not (self.folder / f"{name}.flags").exists():
                self.write(run, name)
            run.world.wait()
            new, self.rounds = open_tokens(self.folder, name, self.dtype), self.rounds + 1
            old = [self.written] if self.written else []
            self.written = Tokens(*(np.concatenate(arrays) for arrays in zip(*old, new)))
        return self.written

    def write(self, run, name):
        given, model = self.prompts[self.rounds::OWN_ROUNDS], run.heads.model
        if not given:
            return save_tokens(self.folder, name, [], self.dtype)
        run.save()
        heads = CloverHeads.from_pretrained(run.out, model)  # in the model's dtype, for inference
        if run.step:
            heads.info["acceptance"] = accepted(heads, given[:8])
        began = time.monotonic()
        out = generate(model, given, self.length, heads if run.step else None, temperature=self.rounds % 2, seed=run.args.seed,
                       batch_size=32, stop=self.stop)
        run.world.say(f"the model wrote {out.emitted} tokens after {len(given)} prompts ({out.tokens_per_step:.2f} per step) in "
                      f"{time.monotonic() - began:.0f} s")
        documents = (([*prompt, *text], [not self.chat] * len(prompt) + [True] * len(text)) for prompt, text in zip(given, out.tokens))
        save_tokens(self.folder, name, documents, self.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Memory

def memory_plan(run):
    """What training takes, in bytes: {what: how much}. What the heads keep for the backward pass is counted on one window."""
    a, heads, model = run.args, run.heads, run.heads.model
    ids = torch.zeros(1, a.block_size + heads.config.heads + 1, dtype=torch.int64, device=model.device)
    outside = (*heads.parameters(), *model.embed.parameters(), *model.norm.parameters(), *model.head.parameters())
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in outside}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with run.autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden, outputs = teacher_forced(heads, ids)
        outputs = [model.norm(out) for out in outputs]
    c, rows = model.config, a.batch_size // run.world.size
    passing = ids.numel() * (4 * c.n_embd + 3 * c.n_inner + 3 * (c.n_head + 2 * c.n_kv_head) * c.head_size) * hidden.element_size()
    mine = lambda p: (p.to_local() if hasattr(p, "to_local") else p).nbytes  # of a sharded weight
    return {"the model": sum(map(mine, model.parameters())),
            "heads, gradients and AdamW": 4 * sum(p.nbytes for p in heads.parameters()),
            "activations": rows * (sum(kept.values()) + 2 * sum(out.nbytes for out in outputs) + hidden.nbytes + passing),
            "logits": 6 * 4 * CHUNK}


def memory_line(run):
    plan = memory_plan(run)
    parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in plan.items())
    free = free_memory(run.heads.model.device) + plan["the model"]
    short = f"; only {free / GB:.1f} are free: a smaller --batch-size takes less" if sum(plan.values()) > free else ""
    return f"memory, about {sum(plan.values()) / GB:.2f} GB: {parts}{short}"


# ---------------------------------------------------------------------------------------------------------------------
# Command line

SWITCHES = {  # of CloverConfig, as flags
    "heads": dict(type=int, help="how many, K"),
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
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    parser.add_argument("--out", help="default: out/ and the preset's name")
    parser.add_argument("--objective", choices=("distill", "data"), default="distill")
    parser.add_argument("--smooth-l1", type=float, default=0.0, metavar="X",
                        help="add X times the SmoothL1 distance between the heads' states and the model's")
    parser.add_argument("--own-drafts", type=int, default=0, metavar="N",
                        help=f"in the last N steps train a head only behind guesses of its own: where each head before it has the "
                             f"text's token among its {REACH} likeliest")
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
    check("heads", args.config.heads, 1, 32, whole=True)
    check("augment layers", args.config.augment_layers, 0, 64, whole=True)
    check_training_flags(args)
    check("smooth L1", args.smooth_l1, 0, 1e6)
    check("own drafts", args.own_drafts, 0, args.steps, whole=True)
    check("self-distill", args.self_distill or 0, 0, 10**7, whole=True)
    check("self share", args.self_share, 0, 1)
    return args


def most_frequent(tokens, n):
    """The n most frequent ids of tokens [N], most frequent first; of equals the lowest."""
    counts = np.bincount(tokens)
    return np.argsort(-counts, kind="stable")[:n].tolist()


def load(args, world):
    """--model for this process -> (GPT, encoding). One that is to be sharded comes in the host's memory."""
    if args.shard_base and world.size == 1:
        raise InputError("--shard-base shares the model out among processes; start them with torchrun --nproc-per-node N train_heads.py")
    args.shard_base = args.shard_base or world.size > 1 and too_large(args)
    if not args.shard_base:
        return load_model(args)
    device, dtype = pick_device(args.device), args.dtype
    with world.in_turn():
        host = argparse.Namespace(**vars(args) | dict(device="cpu", dtype=dtype or ("bfloat16" if device.type == "cuda" else None)))
        return load_model(host)


def tokens_of(args, encoding, world):
    """The splits, and whether they are chats; tokenised by one process of each machine, mapped by all."""
    store = lambda: store_tokens(Path(args.out) / "tokens", args.data, encoding, load_chat_template(args.model), world.say)
    if world.local == 0:
        store()
    world.wait()
    return store(), "chat" in read_json(Path(args.out) / "tokens" / "tokens.json")["kinds"]


def evaluate_folder(args, model, encoding, world):
    """--evaluate: measures the heads in --out, and writes that into their folder."""
    tokenizer = tokenizer_hash(encoding)
    heads = CloverHeads.from_pretrained(args.out, model, tokenizer)
    args.block_size = block_size(args, model, heads.config)
    splits, _ = tokens_of(args, encoding, world)
    if args.draft_vocabulary is not None:
        heads.set_vocabulary(most_frequent(splits["train"].ids, args.draft_vocabulary))
    given = prompts(splits["heldout"], PROMPTS, min(64, longest(model, heads.config) // 2 + 1))
    found = measure(heads, splits["heldout"], given, args.batch_size, args.block_size, torch.autocast(model.device.type, enabled=False))
    info = {name: value for name, value in heads.info.items() if name not in ("config", "base")}
    heads.save_pretrained(args.out, tokenizer, torch.bfloat16, **info | found)
    print(table(**found))


def longest(model, config):
    """Tokens of the longest window from which all heads can guess."""
    return model.config.block_size - config.heads - 1


def block_size(args, model, config):
    size = args.block_size or min(256, longest(model, config))
    check("block size", size, 1, longest(model, config), whole=True)
    return size


def finish(run, heldout, given):
    """Measures what was trained, and says how to use it. A sharded model decodes nothing: it may not fit a device."""
    args, world, sizes = run.args, run.world, (run.args.batch_size, run.args.block_size)
    if args.shard_base:
        top = head_accuracy(run.heads, heldout, *sizes, run.autocast)
        run.save(accuracy=top[1], top_accuracy=top)
        world.say(table(top) + "\nmeasure the rest where the model fits one device: python train_heads.py --evaluate")
    world.end()
    if world.rank:
        return
    if not args.shard_base:
        found = measure(CloverHeads.from_pretrained(run.out, run.heads.model), heldout, given, *sizes, run.autocast)
        run.save(**found)
        print(table(**found))
    plot(run.out)
    flag = "" if args.model == str(DEMO) else f"--model {args.model} "
    print(f"\nuse them:  python generate.py {flag}--heads {run.out} --prompt \"def fibonacci(n):\"")


def main(argv=None):
    args = parse(argv)
    world = World(args)
    if not args.evaluate and not args.resume and (Path(args.out) / "train_state.pt").exists():
        raise InputError(f"{args.out} holds a run already; --resume goes on with it, another --out starts a new one")
    if args.evaluate and world.size > 1:
        raise InputError("--evaluate is for one process; start it without torchrun")
    model, encoding = load(args, world)
    if args.draft_vocabulary is not None:
        check("draft vocabulary", args.draft_vocabulary, 0, model.config.vocab_size, whole=True)
    if args.evaluate:
        return evaluate_folder(args, model, encoding, world)
    args.block_size = block_size(args, model, args.config)
    state = load_state(Path(args.out) / "train_state.pt", "cpu") if args.resume else None
    splits, chat = tokens_of(args, encoding, world)
    if args.self_distill is None:
        args.self_distill = OWN_PROMPTS if chat and not args.shard_base else 0
    if args.self_distill and args.shard_base:
        raise InputError("--self-distill lets the model decode, which a sharded one does not; take --self-distill 0")
    frequent = None if args.draft_vocabulary is None else most_frequent(splits["train"].ids, args.draft_vocabulary)
    run = Run(args, args.config, model, encoding, world, frequent, state)
    given = prompts(splits["heldout"], PROMPTS, min(64, longest(model, args.config) // 2 + 1))
    for tokens in splits.values():  # what training and evaluation need is here, or we say so before
        window_batch(run.heads, tokens, args.batch_size, args.block_size, 0)
    size = sum(p.numel() for p in run.heads.parameters())
    world.say(f"{args.preset} heads: {size / 1e6:.2f}M parameters; {len(splits['train'].ids) / 1e6:.1f}M training tokens")
    world.say(memory_line(run))
    run.save()  # from here on --resume has something to go on from
    own = OwnText(run, splits["train"], stop_tokens(args.model, encoding), chat) if args.self_distill else None
    done = run.train(splits["train"], own)
    run.save()  # before the evaluation: Ctrl-C there loses nothing
    if not done:
        world.say(f"\ninterrupted at step {run.step}; --resume goes on from here")
        return world.end()
    finish(run, splits["heldout"], given)


if __name__ == "__main__":
    command(main)
