"""Trains draft heads on a frozen model: teacher forcing, against the model's own next-token distribution.

    python train_heads.py                                     # Clover heads for demo/, on the built-in corpus
    python train_heads.py --preset medusa --out out/medusa
    python train_heads.py --model DIR --data my_texts/ --out out/heads

    python train_heads.py --evaluate --out DIR               # measures heads that are there, trains nothing

The frozen model's hidden states are computed on the fly, with bfloat16 products unless --dtype float32 is given. Ctrl-C
saves what is there; --resume goes on from it.
"""

from pathlib import Path

import numpy as np
import torch

from checkpoint import InputError, atomic_write
from clover import PRESETS, CloverHeads, model_identity, preset
from data import batch, heldout_prompts, load_tokens
from fit import acceptance
from generate import DEMO, Parser, add_model_flags, check, command, generate, load_model
from loss import head_losses
from tokenizer import tokenizer_hash
from train_base import Progress, add_training_flags, check_training_flags, load_state, make_folder, set_learning_rate

SHOW_EVERY, SAVE_EVERY = 20, 500  # steps
PROMPTS = 32  # held-out ones, decoded at the end
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
    """Head accuracy on fixed held-out windows: a list of K."""
    rows = [forward(heads, windows(tokens, args, heads, seed), "distill", autocast)[1] for seed in range(batches)]
    return torch.stack(rows).mean(0).tolist()


def measure(heads, heldout, prompts, args, autocast):
    """What a heads folder says of its heads: head accuracy, how often each node of a tree is accepted when decoding greedily
    and at temperature 1 (see fit.py), and tokens per step with a tree of 17."""
    accuracy = evaluate(heads, heldout, args, autocast)
    tables = {f"{t:g}": acceptance(heads.model, heads, prompts, t) for t in (0.0, 1.0)}
    rounded = {t: [[round(share, 4) for share in row] for row in table] for t, table in tables.items()}
    speed = generate(heads.model, prompts, 64, heads, tree_size=17).tokens_per_step
    return dict(accuracy=accuracy, tokens_per_step=speed, acceptance=rounded)


def most_frequent(tokens, n):
    """The n most frequent ids of tokens [N], most frequent first; of equals the lowest."""
    counts = np.bincount(tokens)
    return np.argsort(-counts, kind="stable")[:n].tolist()


def table(accuracy, tokens_per_step, **_):
    """The table that ends a run."""
    lines = ["head    held-out accuracy"] + [f"{i + 1:>4}    {share:>17.1%}" for i, share in enumerate(accuracy)]
    return "\n".join(lines + [f"{tokens_per_step:.2f} tokens per step over {PROMPTS} held-out prompts, greedy, tree size 17"])


class Run:
    """One training run: what is trained, and how it is saved and resumed."""

    def __init__(self, args, model, encoding, vocabulary=None):
        self.args, self.out, self.tokenizer = args, Path(args.out), tokenizer_hash(encoding)
        torch.manual_seed(args.seed)
        self.heads = CloverHeads(preset(args.preset), model).to(model.device)
        self.heads.set_vocabulary(vocabulary or [])
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=args.dtype != "float32")
        self.step = 0
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
        a = self.args
        training = dict(steps=self.step, tokens=self.step * a.batch_size * a.block_size, batch_size=a.batch_size,
                        block_size=a.block_size, lr=a.lr, seed=a.seed, objective=a.objective,
                        data=[Path(p).name for p in a.data] if a.data else "the Python standard library's source")
        self.heads.save_pretrained(self.out, self.tokenizer, torch.bfloat16, training=training, **info)
        state = dict(preset=a.preset, base=model_identity(self.heads.model), step=self.step,
                     heads=self.heads.state_dict(), optimizer=self.optimizer.state_dict())
        atomic_write(self.out / "train_state.pt", lambda tmp: torch.save(state, tmp))

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
        return loss, accuracies

    def train(self, tokens):
        """Trains to the last step, or until Ctrl-C. Batches are seeded by the step, so a resumed run sees the same ones."""
        a, progress = self.args, Progress(self.step, self.args.steps, self.args.batch_size * self.args.block_size)
        try:
            while self.step < a.steps:
                loss, accuracies = self.train_step(windows(tokens, a, self.heads, a.seed * 1_000_003 + self.step))
                if self.step % SHOW_EVERY == 0 or self.step == a.steps:
                    shares = " ".join(f"{share:.3f}" for share in accuracies.tolist())
                    progress.show(self.step, f"loss {loss:.3f}  accuracy {shares}")
                if self.step % SAVE_EVERY == 0:
                    self.save()
        except KeyboardInterrupt:
            print(f"\ninterrupted at step {self.step}; --resume goes on from here", flush=True)


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
    run = Run(args, model, encoding, frequent)
    windows(heldout, args, run.heads, 0)  # what the evaluation needs is here, or we say so before training
    make_folder(run.out)
    size = sum(p.numel() for p in run.heads.parameters())
    print(f"{args.preset} heads: {size / 1e6:.2f}M parameters; {len(train_tokens) / 1e6:.1f}M training tokens", flush=True)
    run.train(train_tokens)
    run.save()  # before the evaluation: a second Ctrl-C there loses nothing
    found = measure(CloverHeads.from_pretrained(run.out, model), heldout, prompts, args, run.autocast)
    run.save(**found)
    flag = "" if args.model == str(DEMO) else f"--model {args.model} "
    print(f"{table(**found)}\n\nuse them:  python generate.py {flag}--heads {run.out} --prompt \"def fibonacci(n):\"")


if __name__ == "__main__":
    command(main)
