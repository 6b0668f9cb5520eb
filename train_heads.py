"""Trains draft heads on a frozen model: teacher forcing, against the model's own next-token distribution.

    python train_heads.py                                     # Clover heads for demo/, on the built-in corpus
    python train_heads.py --preset medusa --out out/medusa
    python train_heads.py --model DIR --data my_texts/ --out out/heads

    python train_heads.py --evaluate --out DIR               # measures heads that are there, trains nothing

The frozen model's hidden states are computed on the fly, with bfloat16 products unless --dtype float32 is given. Every few
minutes the run is saved, and so it is on Ctrl-C and SIGTERM; --resume goes on from there and ends with the same heads, bit
for bit, as a run that was never stopped. log.jsonl in the folder has a line for each interval.
"""

import json
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from checkpoint import InputError, atomic_write
from clover import PRESETS, CloverHeads, model_identity, preset
from data import batch, heldout_prompts, load_tokens
from fit import acceptance
from generate import DEMO, Parser, add_model_flags, check, command, generate, load_model
from loss import head_losses, top_accuracies
from tokenizer import tokenizer_hash
from train_base import Progress, add_training_flags, check_training_flags, load_state, make_folder, set_learning_rate

SHOW_EVERY = 20    # steps
SAVE_EVERY = 180.0  # seconds
PROMPTS = 32        # held-out ones, decoded at the end
TOPS = (1, 2, 4, 8)  # of a head's guesses, how many count
HEAD_WEIGHT = 0.7  # head i counts 0.7^i in the loss: what a later head guesses is reached less often


def windows(tokens, args, heads, seed):
    """Random training windows [batch_size, block_size + K + 1]: every position has a token for the last head to guess."""
    length = args.block_size + heads.config.heads + 1
    return batch(tokens, args.batch_size, length, torch.Generator().manual_seed(seed)).to(heads.model.device)


def forward(heads, tokens, objective, autocast):
    """tokens [B, T + K + 1] -> per head (mean cross-entropy in nats [K], head accuracy [K]), see loss.py."""
    model, K = heads.model, heads.config.heads
    with autocast:
        with torch.no_grad():
            hidden = model(tokens[:, :-1])
        return head_losses(model, heads(hidden[:, :-K], tokens[:, 1:]), hidden, tokens, objective)


@torch.no_grad()
def evaluate(heads, tokens, args, autocast, batches=16):
    """Head accuracy on fixed held-out windows: {n: a list of K shares}, of positions where the model's own greedy token is among a
    head's n likeliest, n of TOPS."""
    model, K, shares = heads.model, heads.config.heads, []
    for seed in range(batches):
        window = windows(tokens, args, heads, seed)
        with autocast:
            hidden = model(window[:, :-1])
            shares.append(top_accuracies(model, heads(hidden[:, :-K], window[:, 1:]), hidden, TOPS))
    return dict(zip(TOPS, torch.stack(shares).mean(0).tolist()))


def decoded(heads, prompts):
    """Tokens per step of greedy decoding with a tree of 17, and its 95% interval over draws of such prompts (bootstrap)."""
    steps = Counter()
    out = generate(heads.model, prompts, 64, heads, tree_size=17, on_tokens=lambda index, tokens: steps.update([index]))
    counts = np.array([(len(tokens), steps[i]) for i, tokens in enumerate(out.tokens)])
    draws = counts[np.random.default_rng(0).integers(len(counts), size=(10_000, len(counts)))].sum(axis=1)
    low, high = np.percentile(draws[:, 0] / draws[:, 1], (2.5, 97.5))
    return dict(tokens_per_step=out.tokens_per_step, tokens_per_step_interval=[round(low, 4), round(high, 4)])


def measure(heads, heldout, prompts, args, autocast):
    """What a heads folder says of its heads: head accuracy, how often each node of a tree is accepted when decoding greedily
    and at temperature 1 (see fit.py), and tokens per step."""
    top = evaluate(heads, heldout, args, autocast)
    tables = {f"{t:g}": acceptance(heads.model, heads, prompts, t) for t in (0.0, 1.0)}
    rounded = {t: [[round(share, 4) for share in row] for row in table] for t, table in tables.items()}
    return dict(accuracy=top[1], top_accuracy=top, **decoded(heads, prompts), acceptance=rounded)


def most_frequent(tokens, n):
    """The n most frequent ids of tokens [N], most frequent first; of equals the lowest."""
    counts = np.bincount(tokens)
    return np.argsort(-counts, kind="stable")[:n].tolist()


def table(top_accuracy, tokens_per_step, tokens_per_step_interval, **_):
    """The table that ends a run."""
    lines = ["held-out accuracy" + "".join(f"{f'top {n}':>9}" for n in TOPS)]
    lines += [f"head {i + 1:<12}" + "".join(f"{share:>9.1%}" for share in row) for i, row in enumerate(zip(*top_accuracy.values()))]
    low, high = tokens_per_step_interval
    return "\n".join(lines + [f"{tokens_per_step:.2f} tokens per step (95% interval {low:.2f} to {high:.2f}) over {PROMPTS} held-out prompts, "
                              "greedy, tree size 17"])


class Run:
    """One training run: what is trained, and how it is saved and resumed."""

    def __init__(self, args, model, encoding, vocabulary=None):
        self.args, self.out, self.tokenizer = args, Path(args.out), tokenizer_hash(encoding)
        torch.manual_seed(args.seed)
        self.heads = CloverHeads(preset(args.preset), model).to(model.device)
        self.heads.set_vocabulary(vocabulary or [])
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=args.dtype != "float32")
        self.step, self.saved = 0, time.monotonic()
        if args.resume:
            state = load_state(self.out / "train_state.pt", model.device)
            if (state.get("preset"), state.get("base")) != (args.preset, model_identity(model)):
                raise InputError(f"{self.out} holds a run of preset {state.get('preset')!r}, or on another model; "
                                 f"choose another --out")
            self.heads.set_vocabulary(state["heads"].get("vocabulary", []) if vocabulary is None else vocabulary)
            weights = {name: value for name, value in state["heads"].items() if name != "vocabulary"}
            self.heads.load_state_dict(weights | ({"vocabulary": self.heads.vocabulary} if self.heads.config.vocabulary else {}))
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def save(self, **info):
        """Writes the heads and the training state; InputError, with the last ones intact, where that fails."""
        self.check_finite(*self.heads.parameters())
        a = self.args
        training = dict(steps=self.step, tokens=self.step * a.batch_size * a.block_size, batch_size=a.batch_size,
                        block_size=a.block_size, lr=a.lr, seed=a.seed, objective=a.objective,
                        data=[Path(p).name for p in a.data] if a.data else "the Python standard library's source")
        state = dict(preset=a.preset, base=model_identity(self.heads.model), step=self.step,
                     heads=self.heads.state_dict(), optimizer=self.optimizer.state_dict())
        try:
            atomic_write(self.out / "train_state.pt", lambda tmp: torch.save(state, tmp))
            self.heads.save_pretrained(self.out, self.tokenizer, torch.bfloat16, training=training, **info)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save and safetensors have no narrower ones
            raise InputError(f"{self.out}: step {self.step} cannot be saved ({str(error).splitlines()[0]}); what was saved last is "
                             "intact: make room and --resume") from None
        self.saved = time.monotonic()

    def check_finite(self, *tensors):
        if not all(bool(x.isfinite().all()) for x in tensors):
            raise InputError(f"training has diverged at step {self.step}: the loss or a weight is no number; {self.out} keeps what was "
                             "saved before: start anew with a lower --lr")

    def train_step(self, tokens):
        """One optimiser step on a batch of windows -> (loss, head accuracies [K])."""
        a = self.args
        losses, accuracies = forward(self.heads, tokens, a.objective, self.autocast)
        loss = sum(HEAD_WEIGHT ** i * part for i, part in enumerate(losses))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        set_learning_rate(self.optimizer, a.lr, self.step, a.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), accuracies

    def train(self, tokens):
        """Trains to the last step, or until Ctrl-C or SIGTERM, which end the step that is going on first -> whether it was the
        last. Batches are seeded by the step, so a resumed run sees the same ones."""
        a, progress = self.args, Progress(self.step, self.args.steps, self.args.batch_size * self.args.block_size)
        log = Log(self.out / "log.jsonl", self.step)
        with Signals() as signals:
            while self.step < a.steps and not signals.came:
                loss, accuracies = self.train_step(windows(tokens, a, self.heads, a.seed * 1_000_003 + self.step))
                shown = self.step % SHOW_EVERY == 0 or self.step == a.steps
                if shown:
                    self.check_finite(loss)
                    shares = " ".join(f"{share:.3f}" for share in accuracies.tolist())
                    progress.show(self.step, f"loss {loss:.3f}  accuracy {shares}")
                    log.add(step=self.step, tokens=self.step * a.batch_size * a.block_size, loss=loss.item(),
                            accuracy=accuracies.tolist(), lr=self.optimizer.param_groups[0]["lr"])
                if self.step < a.steps and time.monotonic() > self.saved + SAVE_EVERY:
                    self.save()
        return self.step == a.steps


class Log:
    """A file of json lines, one for each interval. What a killed run wrote past the step it goes on from is dropped."""

    def __init__(self, path, step):
        self.path = path
        lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
        kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= step]
        atomic_write(path, lambda tmp: Path(tmp).write_text("".join(kept)))

    def add(self, **values):
        with open(self.path, "a") as file:
            file.write(json.dumps(values) + "\n")


class Signals:
    """Within it Ctrl-C and SIGTERM only set `came`; a second one ends the program as ever."""

    def __enter__(self):
        self.came, self.before = False, {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number, frame):
        self.came = True
        self.__exit__()

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def parse(argv):
    parser = Parser("Trains draft heads on a frozen model.")
    add_model_flags(parser)
    add_training_flags(parser, steps=500, batch_size=8, block_size=None, lr=6e-3)
    parser.add_argument("--preset", default="clover", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--out", help="default: out/ and the preset's name")
    parser.add_argument("--objective", choices=("distill", "data"), default="distill")
    parser.add_argument("--draft-vocabulary", type=int, metavar="N",
                        help="let the heads draft only among the N most frequent tokens of the data; 0: all; default: all, "
                             "or what heads to evaluate have")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, measure the heads in --out and write it there")
    args = parser.parse_args(argv)
    args.out = args.out or f"out/{args.preset}"
    preset(args.preset)
    check_training_flags(args)
    return args


def main(argv=None):
    args = parse(argv)
    model, encoding = load_model(args)
    if args.draft_vocabulary is not None:
        check("draft vocabulary", args.draft_vocabulary, 0, model.config.vocab_size, whole=True)
    tokenizer = tokenizer_hash(encoding)
    there = CloverHeads.from_pretrained(args.out, model, tokenizer) if args.evaluate else None
    longest = model.config.block_size - (there.config if there else PRESETS[args.preset]).heads - 1
    args.block_size = args.block_size or min(256, longest)
    check("block size", args.block_size, 1, longest, whole=True)
    train_tokens, heldout = (load_tokens(args.data, encoding, split) for split in ("train", "heldout"))
    prompts = heldout_prompts(encoding, PROMPTS, min(64, longest // 2 + 1), paths=args.data)
    frequent = None if args.draft_vocabulary is None else most_frequent(train_tokens, args.draft_vocabulary)
    if there:
        if frequent is not None:
            there.set_vocabulary(frequent)
        autocast = torch.autocast(model.device.type, enabled=False)
        found = measure(there, heldout, prompts, args, autocast)
        info = {name: value for name, value in there.info.items() if name not in ("config", "base")}
        there.save_pretrained(args.out, tokenizer, torch.bfloat16, **info | found)
        print(table(**found))
        return
    if not args.resume and (Path(args.out) / "train_state.pt").exists():
        raise InputError(f"{args.out} holds a run already; --resume goes on with it, another --out starts a new one")
    run = Run(args, model, encoding, frequent)
    windows(heldout, args, run.heads, 0)  # what the evaluation needs is here, or we say so before training
    make_folder(run.out)
    size = sum(p.numel() for p in run.heads.parameters())
    print(f"{args.preset} heads: {size / 1e6:.2f}M parameters; {len(train_tokens) / 1e6:.1f}M training tokens", flush=True)
    run.save()  # from here on --resume has something to go on from
    done = run.train(train_tokens)
    run.save()  # before the evaluation: Ctrl-C there loses nothing
    if not done:
        print(f"\ninterrupted at step {run.step}; --resume goes on from here", flush=True)
        return
    found = measure(CloverHeads.from_pretrained(run.out, model), heldout, prompts, args, run.autocast)
    run.save(**found)
    flag = "" if args.model == str(DEMO) else f"--model {args.model} "
    print(f"{table(**found)}\n\nuse them:  python generate.py {flag}--heads {run.out} --prompt \"def fibonacci(n):\"")


if __name__ == "__main__":
    command(main)
