"""Trains draft heads on a frozen model: teacher forcing, against the model's own next-token distribution.

    python train_heads.py                                     # Clover heads for demo/, on the built-in corpus
    python train_heads.py --preset medusa --out out/medusa
    python train_heads.py --model DIR --data my_texts/ 'chats/*.jsonl.gz' --out out/heads
    torchrun --nproc-per-node 4 train_heads.py --model DIR --data my_texts/ --out out/heads
    python train_heads.py --evaluate --out DIR               # measures heads without training them

The text is tokenised once, into OUT/tokens. The frozen model's hidden states are computed on the fly, with bfloat16
products unless --dtype float32 is given. A run is saved every few minutes, on Ctrl-C and on SIGTERM. --resume continues
it and ends with the same heads as a run that was never stopped: on a CPU bit for bit, on a GPU up to rounding, where
attention's backward pass adds in no fixed order. log.jsonl has a line for each interval.
"""

import argparse
import gc
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.nn.parallel import DistributedDataParallel

from clover import MAX_AUGMENT, MAX_DRAFT, MIXERS, PRESETS, PROJECTORS, CloverHeads, model_identity, preset

from hf.chat import load_chat_template, stop_tokens
from hf.tokenizer import tokenizer_hash
from model import GPT, InputError, atomic_write
from tools import ranks
from tools.cli import DEMO, Parser, add_model_flags, command, load_model
from training.common import Log, Signals, add_flags, add_number, load_state, progress, set_learning_rate
from training.data import draft_vocabulary, load_tokens, open_tokens, prompts, store_tokens, tokens_key, window_batch
from training.evaluate import DECODED, head_accuracy, measure, plot, table
from training.loss import guess_masks, head_losses, state_losses, teacher_forced
from training.parallel import World, load_for_training
from training.self_distill import SELF_PROMPTS, SelfDistillation

HEAD_WEIGHT = 0.7   # head i counts 0.7^i in the loss, since decoding reaches later heads less often
ON_POLICY_TOP = 4   # the guesses of a head that drafting is taken to go on from, with --on-policy-steps
SHOW_EVERY = 20     # steps
SAVE_EVERY = 180.0  # seconds
PROMPTS = 32        # held-out ones, decoded to measure the heads
MIN_VOCABULARY = 8  # token ids to draft among: the acceptance table is measured with as many beams


class Run:
    """One training run: the heads, their optimiser, the step it is at."""

    def __init__(self, args, heads, tokenizer, world, state=None):
        self.args, self.out, self.tokenizer, self.world = args, Path(args.out), tokenizer, world
        self.heads, self.step, self.saved = heads.to(heads.model.device), 0, time.monotonic()
        self.optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.autocast = torch.autocast(heads.model.device.type, torch.bfloat16, enabled=args.dtype != "float32")
        if state:
            heads.set_vocabulary(state["heads"].pop("vocabulary", []))
            heads.load_state_dict(heads.state_dict() | state["heads"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        self.wrapped = heads
        if world.size > 1:
            self.wrapped = DistributedDataParallel(heads, broadcast_buffers=False, gradient_as_bucket_view=True)

    def train(self, corpus, self_distillation=None):
        """Trains to the last step -> True, or to the end of the step in which Ctrl-C or SIGTERM come -> False."""
        a, show = self.args, progress(self.step, self.args.steps, self.args.batch_size * self.args.block_size)
        log = Log(self.out / "log.jsonl", self.step) if self.world.rank == 0 else None
        with Signals() as signals:
            while self.step < a.steps and not self.interrupted(signals):
                own_text = self_distillation.tokens_so_far(self) if self_distillation else None
                loss, accuracies = self.train_step(*self.batch(corpus, own_text))
                if self.step % SHOW_EVERY == 0 or self.step == a.steps:
                    self.check_finite(loss)
                    if log:
                        shares = " ".join(f"{share:.3f}" for share in accuracies.tolist())
                        show(self.step, f"loss {loss:.3f}  accuracy {shares}")
                        log.add(step=self.step, tokens=self.step * a.batch_size * a.block_size, loss=loss.item(),
                                accuracy=accuracies.tolist(), lr=self.optimizer.param_groups[0]["lr"])
                if self.step < a.steps and time.monotonic() > self.saved + SAVE_EVERY:
                    self.save()
        return self.step == a.steps

    def train_step(self, ids, loss_mask, documents):
        """One optimiser step on a batch of windows -> (loss, head accuracies [K])."""
        losses, accuracies = self.losses(ids, loss_mask, documents)
        loss = sum(HEAD_WEIGHT ** i * head_loss for i, head_loss in enumerate(losses))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        set_learning_rate(self.optimizer, self.args.lr, self.step, self.args.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), accuracies

    def losses(self, ids, loss_mask, documents):
        """Windows as `batch` gives them -> (losses in nats, head accuracies), each [K], over all processes. Only
        this process's part of a loss has a gradient, times the number of processes, since DDP divides by it."""
        a, model, world = self.args, self.heads.model, self.world
        top_n = ON_POLICY_TOP if self.step >= a.steps - a.on_policy_steps else 0
        with self.autocast:
            hidden, outputs = teacher_forced(self.heads, ids, documents, self.wrapped)
            guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
            sums, hits, reached = head_losses(model, outputs, hidden, ids, guess_mask, a.objective, top_n)
            if a.smooth_l1:
                sums = sums + a.smooth_l1 * state_losses(model, outputs, hidden, reached)
        count = lambda mask: world.sum(mask.sum(dim=(1, 2)).float()).clamp(min=1)
        losses = sums / count(reached)
        total = world.sum(losses.detach().clone())
        return total + world.size * (losses - losses.detach()), world.sum(hits) / count(guess_mask)

    def batch(self, corpus, own_text):
        """This process's part of the step's windows; --self-distill-ratio of them from the model's own text. They are
        seeded by the step, so they are the same in a resumed run and with any number of processes."""
        a, seed, own_windows = self.args, self.args.seed * 1_000_003 + self.step, 0
        length = a.block_size + self.heads.config.n_draft + 1
        if own_text and len(own_text.ids) >= length:  # the first round may be shorter
            due = lambda step: int(a.self_distill_ratio * a.batch_size * step)  # up to a step
            own_windows = due(self.step + 1) - due(self.step)
        parts = [(corpus, a.batch_size - own_windows), (own_text, own_windows)][:2 if own_windows else 1]
        mine = slice(self.world.rank, None, self.world.size)
        return window_batch(parts, length, seed, self.heads.model.device, mine)

    def interrupted(self, signals):
        """Whether a signal came to any process. Several ask only every tenth step, since asking waits for all."""
        return (self.world.size == 1 or self.step % 10 == 0) and self.world.any(signals.came)

    def save(self, **info):
        """Writes heads and training state; `info` goes into heads.json. Where that fails, the last ones stay."""
        self.check_finite(*self.heads.parameters())
        self.saved = time.monotonic()
        if self.world.rank:
            return
        a = self.args
        data = [Path(p).name for p in a.data] if a.data else "the Python standard library's source"
        tokens = self.step * a.batch_size * a.block_size
        training = dict(steps=self.step, tokens=tokens, **flags(a), data=data, key=a.key)
        state = dict(settings=settings(a, self.heads), step=self.step, heads=self.heads.state_dict(),
                     optimizer=self.optimizer.state_dict())
        try:
            atomic_write(self.out / "train_state.pt", lambda tmp: torch.save(state, tmp))
            self.heads.save_pretrained(self.out, self.tokenizer, torch.bfloat16, training=training, **info)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save and safetensors raise nothing narrower
            raise InputError(f"{self.out}: step {self.step} cannot be saved ({str(error).splitlines()[0]}); what was "
                             "saved last is intact: make room and --resume") from None

    def check_finite(self, *tensors):
        if not all(bool(x.isfinite().all()) for x in tensors):
            raise InputError(f"training has diverged at step {self.step}: the loss or a weight is no number; "
                             f"{self.out} keeps what was saved before: start anew with a lower --lr")


def flags(args):
    """The flags that decide how heads are trained, and that a resumed run must repeat."""
    names = ("batch_size", "block_size", "lr", "seed", "objective", "smooth_l1", "on_policy_steps", "self_distill",
             "self_distill_ratio", "dtype")
    return {name: getattr(args, name) for name in names}


def settings(args, heads):
    """All that a resumed run must share with the run that was started. The draft vocabulary may change."""
    switches = {name: value for name, value in vars(args.config).items() if name != "vocabulary"}
    return dict(model=f"of hash {model_identity(heads.model)}", **switches, **flags(args), data=f"of hash {args.key}")


# ---------------------------------------------------------------------------------------------------------------------
# Before and after training

def check_resumed(args, heads, state):
    """Refuses to go on with a run that was started with other settings, or is done already."""
    wanted, saved = settings(args, heads), state["settings"]
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            raise InputError(f"{args.out} holds a run with {name.replace('_', '-')} {saved.get(name)}, not "
                             f"{wanted.get(name)}; repeat its flags and data, or choose another --out")
    if state["step"] > args.steps:
        raise InputError(f"{args.out} holds a run that is at step {state['step']} already; --steps {args.steps} is "
                         "less: choose more steps or another --out")


def prepare(args, world):
    """All that can go wrong before the first step -> (Run, {"train": Tokens, "heldout": Tokens}, SelfDistillation or
    None). Process 0 tokenises, unless the run to resume had other settings; all map the files."""
    out, template = Path(args.out), load_chat_template(args.model)
    state = load_state(out, args.resume, ("settings", "step", "heads", "optimizer"), "cpu")
    if state and args.self_distill is None:
        args.self_distill = state["settings"].get("self_distill")
    if not state and args.draft_vocabulary is None:
        args.draft_vocabulary = "auto"
    heads, encoding = load_for_training(args, world)
    args.block_size = check_sizes(args, heads)

    def store():
        args.key = tokens_key(args.data, encoding, template)
        if state:
            check_resumed(args, heads, state)
        store_tokens(out / "tokens", args.data, encoding, template, world.print)
    world.run_first(store)
    splits, meta = open_tokens(out / "tokens")
    args.key, kinds = meta["key"], meta["kinds"]
    if args.self_distill is None:
        mostly_chats = 2 * kinds.get("chat", 0) > sum(kinds.values())
        args.self_distill = SELF_PROMPTS if mostly_chats and not args.shard_base else 0
    if args.self_distill and args.shard_base:
        raise InputError("--self-distill lets the model decode, which a sharded one does not; take --self-distill 0")
    check_lengths(splits, args)
    heldout_prompts(splits["heldout"], heads.model)  # raises where there are none
    run = Run(args, heads, tokenizer_hash(encoding), world, state)
    if args.draft_vocabulary is not None:
        V = heads.model.config.vocab_size
        heads.set_vocabulary(draft_vocabulary(splits["train"].ids, args.draft_vocabulary, V, world.print))
    distillation = None
    if args.self_distill:
        distillation = SelfDistillation(run, splits["train"], stop_tokens(args.model, encoding), kinds)
    if world.rank == 0:
        for leftover in out.glob("*.*.tmp*"):  # of a run that was killed while it saved
            leftover.unlink()
    return run, splits, distillation


def check_sizes(args, heads):
    """Checks what depends on the model -> --block-size, by default 256 or what the context holds. After a window all
    heads must have a token to guess."""
    if args.draft_vocabulary not in (None, "auto"):
        check("draft vocabulary", args.draft_vocabulary, 0, heads.model.config.vocab_size, whole=True)
    longest = heads.model.config.block_size - heads.config.n_draft - 1
    size = args.block_size or min(256, longest)
    check("block size", size, 1, longest, whole=True)
    return size


def heldout_prompts(heldout, model):
    """The prompts that are decoded to measure heads; the context has room for DECODED tokens after each."""
    room = model.config.block_size - DECODED
    return prompts(heldout, PROMPTS, max(min(64, room // 2), 1), max_len=max(min(256, room), 1))


def finish(run, heldout):
    """Measures the trained heads, and prints how to use them. Process 0 does so alone, but a model that was sharded for
    training is held together by all, which decode it; where they do not divide its heads, nothing is decoded."""
    args, world, model = run.args, run.world, run.heads.model
    sizes = args.batch_size // world.size, args.block_size
    if not args.shard_base:
        world.close()
    elif world.divides(model.config):
        model = None  # the last reference but for run's
        ranks.watch_signals(world.rank)
        model = hold_together(run)
    else:
        top, model = head_accuracy(run.heads, heldout, *sizes, run.autocast), None
        run.save(accuracy=top[1], top_accuracy=top)
        world.print(table(top) + "\nmeasure the rest where it can be decoded: python train_heads.py --evaluate")
    if model and (args.shard_base or not world.rank):
        heads = CloverHeads.from_pretrained(run.out, model, run.tokenizer)
        found = measure(heads, heldout, heldout_prompts(heldout, model), *sizes)
    if args.shard_base:
        world.close()
    if world.rank:
        return
    if model:
        record(heads, run.out, run.tokenizer, found)
    plot(run.out)
    flag = "" if args.model == str(DEMO) else f"--model {args.model} "
    print(f"\nuse them:  python generate.py {flag}--heads {run.out} --prompt \"def fibonacci(n):\"")


def hold_together(run):
    """The model of a sharded run, divided for decoding; the run's own goes first."""
    dtype, run.heads, run.wrapped, run.optimizer = run.heads.model.dtype, None, None, None
    run.world.barrier()  # process 0 has saved
    gc.collect()  # FSDP's parts refer to each other
    return GPT.from_pretrained(run.args.model, dtype, run.world.device, run.world.group)


def record(heads, out, tokenizer, found, weights=False):
    """Prints what `measure` found, and adds it to the heads.json of heads that are saved; weights: writes them too."""
    print(table(**found))
    info = {name: value for name, value in heads.info.items() if name not in ("config", "base")} | found
    if weights:
        heads.save_pretrained(out, tokenizer, torch.bfloat16, **info)
    else:
        heads.save_record(out, tokenizer, **info)


def check_lengths(splits, args):
    """Refuses splits that are too short for a step of training or for the evaluation."""
    window = args.block_size + args.config.n_draft + 1
    for split, windows in (("train", args.batch_size), ("heldout", 1)):
        if len(splits[split].ids) < windows * window:
            raise InputError(f"expected at least {windows * window} tokens in the {split} split, {windows} windows of "
                             f"{window}, but it has {len(splits[split].ids)}; give more text, or a smaller "
                             "--block-size or --batch-size")


def evaluate_folder(args, world):
    """--evaluate: measures the heads in --out, and writes that into their heads.json. Several processes hold the model
    together."""
    if world.size > 1:
        ranks.watch_signals(world.rank)
    model, encoding = load_model(args, world.group)
    tokenizer, template = tokenizer_hash(encoding), load_chat_template(args.model)
    heads = CloverHeads.from_pretrained(args.out, model, tokenizer)
    size, heldout = check_sizes(args, heads), load_tokens(args.data, encoding, "heldout", template)
    if args.draft_vocabulary is not None:
        ids = load_tokens(args.data, encoding, "train", template).ids
        heads.set_vocabulary(draft_vocabulary(ids, args.draft_vocabulary, model.config.vocab_size, world.print))
    found = measure(heads, heldout, heldout_prompts(heldout, model), args.batch_size, size)
    world.close()
    if world.rank:
        return
    record(heads, args.out, tokenizer, found, weights=args.draft_vocabulary is not None)


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def make_parser():
    parser = Parser("Trains draft heads on a frozen model.")
    add_model_flags(parser)
    add_flags(parser, steps=500, batch_size=8, block_size=None, lr=6e-3)
    parser.add_argument("--preset", default="clover", help=f"one of {', '.join(PRESETS)}")
    switch = lambda text: dict(default=argparse.SUPPRESS, help=f"{text}; default: the preset's")
    add_number(parser, "--draft-heads", 1, MAX_DRAFT, dest="n_draft", metavar="N", **switch("how many heads, K"))
    add_number(parser, "--augment-layers", 0, MAX_AUGMENT, **switch("transformer blocks before the heads"))
    parser.add_argument("--mix", choices=(*MIXERS, "none"), **switch("how a head takes in the token guessed before it"))
    parser.add_argument("--mix-before", action=argparse.BooleanOptionalAction,
                        **switch("take in the root before the augmenting block too"))
    parser.add_argument("--projector", choices=tuple(PROJECTORS), **switch("what stands before the LM head"))
    parser.add_argument("--shared", action=argparse.BooleanOptionalAction,
                        **switch("all heads but the first share their weights"))
    parser.add_argument("--out", help="default: out/ and the preset's name")
    parser.add_argument("--objective", choices=("distill", "data"), default="distill",
                        help="train towards the model's next-token distribution or towards the text")
    add_number(parser, "--smooth-l1", 0, 1e6, float, default=0.0, metavar="X",
               help="add X times the SmoothL1 distance between the heads' states and the model's")
    add_number(parser, "--on-policy-steps", 0, 10**9, default=0, metavar="N",
               help="in the last N steps, train a head only after tokens that drafting would try: each among the "
                    f"{ON_POLICY_TOP} likeliest of the head before")
    add_number(parser, "--self-distill", 0, 10**7, metavar="N",
               help="let the model continue N prompts from the data, and train on that too; default: "
                    f"{SELF_PROMPTS} where the data are mostly chats, else 0")
    add_number(parser, "--self-distill-ratio", 0, 1, float, default=0.5, metavar="X",
               help="the share of windows from the model's own text")
    hidden = dict(default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # old names, still accepted
    add_number(parser, "--own-drafts", 0, 10**9, dest="on_policy_steps", **hidden)
    add_number(parser, "--self-share", 0, 1, float, dest="self_distill_ratio", **hidden)
    parser.add_argument("--draft-vocabulary", type=vocabulary_size, metavar="N|auto",
                        help="let the heads draft only among the N most frequent tokens of the data; 0: all; auto: as "
                             "many as cover 97%% of the data, or all where that is half of them or more; "
                             "default: auto, or with --resume or --evaluate what the heads in --out have")
    parser.add_argument("--shard-base", action="store_true",
                        help="with torchrun: leave each GPU a part of the frozen model (FSDP2); default: if it has to")
    parser.add_argument("--evaluate", action="store_true", help="train nothing; measure the heads in --out")
    return parser


def vocabulary_size(text):
    """--draft-vocabulary -> "auto" or a number."""
    if text == "auto":
        return text
    if not text.isdecimal() or 0 < int(text) < MIN_VOCABULARY:
        raise argparse.ArgumentTypeError(f"expected auto, 0 for all token ids, or {MIN_VOCABULARY} of them or more, "
                                         f"not {text!r}")
    return int(text)


def parse(argv):
    args = make_parser().parse_args(argv)
    args.out = args.out or f"out/{args.preset}"
    switches = vars(args).keys() & vars(PRESETS["clover"]).keys()
    args.config = preset(args.preset, **{name: getattr(args, name) for name in switches})
    check("on-policy steps", args.on_policy_steps, 0, args.steps, whole=True)
    return args


def main(argv=None):
    args = parse(argv)
    world = World(args)
    if args.evaluate:
        return evaluate_folder(args, world)
    run, splits, distillation = prepare(args, world)
    parameters = sum(p.numel() for p in run.heads.parameters())
    world.print(f"{args.preset} heads: {parameters / 1e6:.2f}M parameters; "
                f"{len(splits['train'].ids) / 1e6:.1f}M training tokens")
    if not run.step:
        run.save()  # so that --resume has something to continue from
    done = run.train(splits["train"], distillation)
    run.save()  # before the evaluation, so that Ctrl-C there loses nothing
    if done:
        finish(run, splits["heldout"])
    else:
        world.print(f"\ninterrupted at step {run.step}; --resume goes on from here")
        world.close()


if __name__ == "__main__":
    command(main)
