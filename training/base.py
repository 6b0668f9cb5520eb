"""Trains the small base model of demo/ from scratch and writes it as a Hugging Face folder.

    python -m training.base --out out/base                 # the built-in corpus: this machine's Python standard library
    python -m training.base --out out/base --resume        # continue an earlier run

Matrices learn by torch's Muon, which needs far fewer tokens here than AdamW does; the rest by AdamW. The tokenizer is a
byte-level BPE learned from the same text.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F

from generate import check
from hf.tokenizer import end_of_text, load_encoding
from model import GPT, GPTConfig, InputError, atomic_write
from tools.cli import Parser, command, pick_device
from training.common import Progress, Signals, add_flags, check_flags, load_state, make_folder, set_learning_rate
from training.corpus import split_records
from training.data import batch, token_array

END_OF_TEXT = "<|endoftext|>"
# a word with one character before it, up to three digits, punctuation with its line end, line ends, other space
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SIZES = ("vocab_size", "n_layer", "n_head", "n_kv_head", "head_size", "n_embd", "n_inner")  # of GPTConfig, as flags
SHOW_EVERY, SAVE_EVERY = 20, 250  # steps


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer

def train_tokenizer(documents, vocab_size, out):
    """Learns a byte-level BPE of vocab_size tokens, the last being END_OF_TEXT, and writes it as transformers does."""
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise InputError("learning a tokenizer needs the tokenizers package: pip install tokenizers") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)
    atomic_write(out / "tokenizer_config.json", lambda tmp: Path(tmp).write_text(json.dumps(config, indent=2) + "\n"))
    atomic_write(out / "tokenizer.json", lambda tmp: tokenizer.save(tmp, pretty=False))


# ---------------------------------------------------------------------------------------------------------------------
# Training

class Optimizer:
    """Muon for the matrices inside the blocks, AdamW for the rest (embedding, norms, biases), with one learning
    rate."""

    def __init__(self, model, lr, steps):
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if not any(p is m for m in matrices)]
        self.lr, self.steps, self.parts = lr, steps, [
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]

    def step(self, step):
        for part in self.parts:
            set_learning_rate(part, self.lr, step, self.steps)
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self):
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states):
        for part, state in zip(self.parts, states):
            part.load_state_dict(state)


def loss_of(model, tokens):
    """Mean cross-entropy in nats per token of windows [B, T + 1]; bf16 products, fp32 loss."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model.lm_head(model(tokens[:, :-1]))
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def window(tokens, args, seed, device):
    generator = torch.Generator().manual_seed(seed)
    return batch(tokens, args.batch_size, args.block_size + 1, generator).to(device)


@torch.no_grad()
def heldout_loss(loss_fn, tokens, args, device, batches=16):
    """The mean loss over fixed random windows of the held-out tokens."""
    return sum(loss_fn(window(tokens, args, seed, device)).item() for seed in range(batches)) / batches


class Run:
    """One training run: the model, its optimiser, the step it is at."""

    def __init__(self, args, config, device, state=None):
        self.args, self.out, self.device, self.step = args, Path(args.out), device, 0
        self.model = GPT(config).init_weights(torch.Generator().manual_seed(args.seed)).to(device)
        self.optimizer = Optimizer(self.model, args.lr, args.steps)
        loss_fn = lambda tokens: loss_of(self.model, tokens)
        self.loss_fn = torch.compile(loss_fn) if args.compile else loss_fn
        if state:
            try:
                self.model.load_state_dict(state["model"])
            except RuntimeError:
                raise InputError(f"{self.out} holds a model of other sizes; repeat its flags or choose another "
                                 "--out") from None
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def save(self):
        state = dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict(), step=self.step)
        atomic_write(self.out / "train_state.pt", lambda tmp: torch.save(state, tmp))
        self.model.save_pretrained(self.out, torch.bfloat16)

    def train(self, tokens):
        """Trains to the last step, or until Ctrl-C or SIGTERM, which let the current step finish. Windows are seeded by
        the step, so that a resumed run sees the same ones."""
        a, progress = self.args, Progress(self.step, self.args.steps, self.args.batch_size * self.args.block_size)
        with Signals() as signals:
            while self.step < a.steps and not signals.came:
                loss = self.loss_fn(window(tokens, a, a.seed * 1_000_003 + self.step, self.device))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step(self.step)
                self.step += 1
                if self.step % SHOW_EVERY == 0 or self.step == a.steps:
                    progress.show(self.step, f"loss {loss.item():.3f}")
                if self.step % SAVE_EVERY == 0:
                    self.save()
        self.save()
        if self.step < a.steps:
            print(f"\ninterrupted at step {self.step}; --resume goes on from here", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def parse(argv):
    parser = Parser("Trains a small base model from scratch.", prog="python -m training.base")
    add_flags(parser, steps=3000, batch_size=16, block_size=256, lr=5e-3)
    parser.add_argument("--out", default="out/base")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(GPTConfig, name))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss; needs a C++ compiler on a CPU")
    args = parser.parse_args(argv)
    check_flags(args)
    for name in SIZES:
        check(name, getattr(args, name), 1, 2**20, whole=True)
    if args.vocab_size < 257 or args.n_head % args.n_kv_head or args.head_size % 2 or not 16 <= args.head_size <= 256:
        raise InputError("vocab_size must be at least 257, n_head a multiple of n_kv_head, head_size even, from 16 to "
                         f"256; got {args.vocab_size}, {args.n_head} and {args.n_kv_head}, {args.head_size}")
    return args


def main(argv=None):
    args = parse(argv)
    device, out = pick_device(args.device), Path(args.out)
    texts = {split: [record.text for _, record in split_records(args.data, [split])] for split in ("train", "heldout")}
    state = load_state(out, args.resume, ("model", "optimizer", "step"), device)
    if not args.resume:  # only now: bad data leaves nothing behind
        make_folder(out)
        train_tokenizer(texts["train"], args.vocab_size, out)
    encoding = load_encoding(out)
    train_tokens, heldout = (token_array(texts[split], encoding, end_of_text(encoding)) for split in texts)
    window(heldout, args, 0, device)  # raises before training where the evaluation has too few tokens
    config = GPTConfig(block_size=args.block_size, **{name: getattr(args, name) for name in SIZES})
    run = Run(args, config, device, state)
    size = sum(p.numel() for p in run.model.parameters())
    print(f"{size / 1e6:.2f}M parameters; {len(train_tokens) / 1e6:.1f}M training tokens, "
          f"{len(heldout) / 1e6:.2f}M held out", flush=True)
    run.train(train_tokens)
    print(f"held-out loss {heldout_loss(run.loss_fn, heldout, args, device):.3f} nats per token\n\n"
          f"next:  python train_heads.py --model {out}")


if __name__ == "__main__":
    command(main)
