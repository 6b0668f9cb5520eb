"""Trains draft heads on a frozen model: teacher forcing, against the model's own next-token distribution.

    python train_heads.py                                     # Clover heads for demo/, on the built-in corpus
    python train_heads.py --preset medusa --out out/medusa
    python train_heads.py --model DIR --data my_texts/ --out out/heads

The frozen model's hidden states are computed on the fly, with bfloat16 products unless --dtype float32 is given. Ctrl-C
saves what is there; --resume goes on from it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from clover import PRESETS, CloverHeads, model_identity, preset
from data import batch, heldout_prompts, load_tokens, tokenizer_hash
from generate import DEMO, Parser, add_model_flags, check, command, generate, load_model
from model import InputError, atomic_write
from train_base import Progress, add_training_flags, check_training_flags, load_state, make_folder, set_learning_rate

SHOW_EVERY, SAVE_EVERY = 20, 500  # steps
HEAD_WEIGHT = 0.7  # head i counts 0.7^i in the loss: what a later head guesses is reached less often


def windows(tokens, args, heads, seed):
    """Random training windows [batch_size, block_size + K + 1]: every position has a token for the last head to guess."""
    length = args.block_size + heads.config.heads + 1
    return batch(tokens, args.batch_size, length, torch.Generator().manual_seed(seed)).to(heads.model.device)


def forward(heads, tokens, autocast):
    """tokens [B, T + K + 1] -> (the model's logits [B, T + K, V], the heads' logits, K times [B, T, V])."""
    model, K = heads.model, heads.config.heads
    with autocast:
        with torch.no_grad():
            hidden = model(tokens[:, :-1])
            teacher = model.lm_head(hidden)
        outputs = heads(hidden[:, :-K], tokens[:, 1:])
        return teacher, [model.lm_head(out) for out in outputs]


def losses(teacher, guesses, tokens, objective):
    """Per head the mean cross-entropy in nats against what the model would say (distill) or what the text says (data)."""
    T = guesses[0].shape[1]
    probs = teacher.softmax(dim=-1, dtype=torch.float32) if objective == "distill" else None
    for i, logits in enumerate(guesses):
        logits = logits.float()
        if objective == "data":
            yield F.cross_entropy(logits.flatten(0, 1), tokens[:, i + 2:i + 2 + T].flatten())
        else:
            yield (logits.logsumexp(dim=-1) - (probs[:, i + 1:i + 1 + T] * logits).sum(dim=-1)).mean()


@torch.no_grad()
def accuracies(teacher, guesses):
    """Head accuracy, one number per head: the share of positions where its top-1 is the model's own greedy token."""
    T, best = guesses[0].shape[1], teacher.argmax(dim=-1)
    return [(logits.argmax(dim=-1) == best[:, i + 1:i + 1 + T]).float().mean().item() for i, logits in enumerate(guesses)]


@torch.no_grad()
def evaluate(heads, tokens, args, autocast, batches=16):
    """Head accuracy on fixed held-out windows: a list of K."""
    rows = [accuracies(*forward(heads, windows(tokens, args, heads, seed), autocast)) for seed in range(batches)]
    return [sum(column) / batches for column in zip(*rows)]


def table(accuracy, tokens_per_step):
    """The table that ends a run."""
    lines = ["head    held-out accuracy"] + [f"{i + 1:>4}    {share:>17.1%}" for i, share in enumerate(accuracy)]
    return "\n".join(lines + [f"{tokens_per_step:.2f} tokens per step over 8 held-out prompts, greedy, tree size 17"])


class Run:
    """One training run: what is trained, and how it is saved and resumed."""

    def __init__(self, args, model, encoding):
        self.args, self.out, self.tokenizer = args, Path(args.out), tokenizer_hash(encoding)
        torch.manual_seed(args.seed)
        self.heads = CloverHeads(preset(args.preset), model).to(model.device)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=args.dtype != "float32")
        self.step = 0
        if args.resume:
            state = load_state(self.out / "train_state.pt", model.device)
            if (state.get("preset"), state.get("base")) != (args.preset, model_identity(model)):
                raise InputError(f"{self.out} holds a run of preset {state.get('preset')!r}, or on another model; "
                                 f"choose another --out")
            self.heads.load_state_dict(state["heads"])
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
        """One optimiser step on a batch of windows -> (loss, head accuracies; those only in a step that shows them)."""
        a = self.args
        teacher, guesses = forward(self.heads, tokens, self.autocast)
        loss = sum(HEAD_WEIGHT ** i * part for i, part in enumerate(losses(teacher, guesses, tokens, a.objective)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        set_learning_rate(self.optimizer, a.lr, self.step, a.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        shown = self.step % SHOW_EVERY == 0 or self.step == a.steps
        return loss.item(), accuracies(teacher, guesses) if shown else None

    def train(self, tokens):
        """Trains to the last step, or until Ctrl-C. Batches are seeded by the step, so a resumed run sees the same ones."""
        a, progress = self.args, Progress(self.step, self.args.steps, self.args.batch_size * self.args.block_size)
        try:
            while self.step < a.steps:
                loss, accuracy = self.train_step(windows(tokens, a, self.heads, a.seed * 1_000_003 + self.step))
                if accuracy:
                    shares = " ".join(f"{share:.3f}" for share in accuracy)
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
    args = parser.parse_args(argv)
    args.out = args.out or f"out/{args.preset}"
    preset(args.preset)
    check_training_flags(args)
    return args


def main(argv=None):
    args = parse(argv)
    model, encoding = load_model(args)
    longest = model.config.block_size - PRESETS[args.preset].heads - 1
    args.block_size = args.block_size or min(256, longest)
    check("block size", args.block_size, 1, longest, whole=True)
    train_tokens, heldout = (load_tokens(args.data, encoding, split) for split in ("train", "heldout"))
    run = Run(args, model, encoding)
    prompts = heldout_prompts(encoding, 8, min(64, longest // 2 + 1), paths=args.data)
    windows(heldout, args, run.heads, 0)  # what the evaluation needs is here, or we say so before training
    make_folder(run.out)
    size = sum(p.numel() for p in run.heads.parameters())
    print(f"{args.preset} heads: {size / 1e6:.2f}M parameters; {len(train_tokens) / 1e6:.1f}M training tokens", flush=True)
    run.train(train_tokens)
    run.save()  # before the evaluation: a second Ctrl-C there loses nothing
    accuracy = evaluate(run.heads, heldout, args, run.autocast)
    heads = CloverHeads.from_pretrained(run.out, model)
    speed = generate(model, prompts, 64, heads, tree_size=17).tokens_per_step
    run.save(accuracy=accuracy, tokens_per_step=speed)
    flag = "" if args.model == str(DEMO) else f"--model {args.model} "
    print(f"{table(accuracy, speed)}\n\nuse them:  python generate.py {flag}--heads {run.out} --prompt \"def fibonacci(n):\"")


if __name__ == "__main__":
    command(main)
