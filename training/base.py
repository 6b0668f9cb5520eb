"""Trains the small base model of demo/ from scratch and writes it as a Hugging Face folder.

    python -m training.base --out out/base             # on the source of Python's standard library
    python -m training.base --out out/base --resume    # continue an earlier run
    python -m training.base --out demo --evaluate      # the held-out loss of a model that is there

Matrices learn by torch's Muon, which needs far fewer tokens here than AdamW does; the rest by
AdamW. The tokenizer is a byte-level BPE learned from the same text.
"""

import contextlib
import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf import checkpoint
from hf.tokenizer import CODE_PATTERN, load_encoding
from model import GPT, GPTConfig, InputError, atomic_write, human, pick_device
from tools.cli import command
from tools.flags import Parser, add_number, add_quantize_flag
from training import common
from training.common import (
    Signals,
    parse_run,
    path_flags,
    progress,
    save_run,
    saving,
    set_learning_rate,
)
from training.corpus import SPLITS, split_records
from training.data import (
    load_tokens,
    remove_empty,
    step_seed,
    store_tokens,
    to_device,
    window_batch,
)
from training.flags import add_run_flags

END_OF_TEXT = "<|endoftext|>"
# their least values
SIZES = dict(vocab_size=257, n_layer=1, n_head=1, n_kv_head=1, head_size=16, n_embd=1, n_inner=1)
FLAGS = ("steps", "batch_size", "block_size", "lr", "seed")  # that --resume takes, and may change
STATE = ("settings", "flags", "step", "model", "optimizer")  # what train_state.pt holds
SHOW_EVERY = 20   # steps
SAVE_EVERY = 250  # steps


def train_tokenizer(documents, vocab_size, out):
    """Learns a byte-level BPE of vocab_size tokens, and writes it as transformers does. The last
    is END_OF_TEXT, after documents in training and before a prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(CODE_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))])
    config = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=END_OF_TEXT,
                  eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)
    config = json.dumps(config, indent=2) + "\n"
    atomic_write(out / "tokenizer_config.json", lambda tmp: Path(tmp).write_text(config))
    atomic_write(out / "tokenizer.json", lambda tmp: Path(tmp).write_text(tokenizer.to_str()))


def loss_of(model, ids):
    """Mean cross-entropy in nats per token of windows [B, T + 1]; bf16 products, fp32 loss."""
    attention = contextlib.nullcontext()
    if ids.device.type == "cpu":
        attention = sdpa_kernel(SDPBackend.MATH)  # flash takes longer
    with torch.autocast(ids.device.type, torch.bfloat16), attention:
        logits = model.lm_head(model(ids[:, :-1]))
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, data, encoding):
    """Prints a model's loss on all held-out text, in windows of its context that do not overlap."""
    ids = load_tokens(data, encoding, "heldout").ids
    T = model.config.block_size
    if len(ids) <= T:
        raise InputError(f"expected more than {T} held-out tokens, the model's context, but got "
                         f"{len(ids)}; give more text")
    windows = (ids[i:i + T + 1].astype(int) for i in range(0, len(ids) - T, T))
    losses = [loss_of(model, to_device(window[None], model.device)).item() for window in windows]
    loss = sum(losses) / len(losses)
    records = split_records(data, ["heldout"], log=lambda line: None)  # load_tokens has told it
    n_bytes = sum(len(record.text.encode("utf-8", "surrogatepass")) for _, record in records)
    print(f"held-out loss {loss:.3f} nats per token, {loss * len(ids) / n_bytes:.4f} per byte; "
          f"{n_bytes / 1e6:.2f} MB")


class Run:
    """One training run: the model, its optimisers with one learning rate, the step it is at."""

    def __init__(self, args, config, device, state):
        self.args = args
        self.out = Path(args.out)
        self.device = device
        self.step = 0
        generator = torch.Generator().manual_seed(args.seed)
        self.model = GPT(config).init_weights(generator).to(device)
        matrices = [p for p in self.model.blocks.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if not any(p is m for m in matrices)]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
        self.loss = partial(torch.compile(loss_of) if args.compile else loss_of, self.model)
        if state:
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizer"]):
                optimizer.load_state_dict(saved)
            self.step = state["step"]

    def windows(self, tokens, seed):
        """Random windows of Tokens, int64 [B, T + 1]."""
        a = self.args
        return window_batch([(tokens, a.batch_size)], a.block_size + 1, seed, self.device)[0]

    def save(self):
        flags = {name: getattr(self.args, name) for name in FLAGS}
        state = dict(settings=sizes(self.model.config), flags=flags | path_flags(self.args),
                     step=self.step, model=self.model.state_dict(),
                     optimizer=[optimizer.state_dict() for optimizer in self.optimizers])
        save_run(self.out, state, partial(self.model.save_pretrained, self.out, torch.bfloat16))

    def train(self, tokens):
        """Trains to the last step -> 0, or to the end of that in which Ctrl-C or SIGTERM come ->
        the exit code."""
        a = self.args
        show = progress(self.step, a.steps, a.batch_size * a.block_size)
        with Signals() as signals:
            while self.step < a.steps and not signals.came:
                loss = self.loss(self.windows(tokens, step_seed(a.seed, self.step)))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                for optimizer in self.optimizers:
                    set_learning_rate(optimizer, a.lr, self.step, a.steps)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                self.step += 1
                if self.step % SHOW_EVERY == 0 or self.step == a.steps:
                    show(self.step, f"loss {loss.item():.3f}")
                if self.step % SAVE_EVERY == 0:
                    self.save()
        self.save()
        if self.step == a.steps:
            return 0
        print(f"\ninterrupted at step {self.step}; --resume goes on from here", flush=True)
        return signals.exit_code


def parse(argv):
    parser = Parser("Trains a small base model from scratch.", prog="python -m training.base")
    add_run_flags(parser, steps=3000, batch_size=16, block_size=256, lr=5e-3)
    parser.add_argument("--out", help="default: out/base")
    for name, smallest in SIZES.items():
        add_number(parser, f"--{name.replace('_', '-')}", smallest, 2**20,
                   default=getattr(GPTConfig, name))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true",
                        help="torch.compile the loss; needs a C++ compiler on a CPU")
    parser.add_argument("--evaluate", action="store_true",
                        help="measure the model in --out on held-out text")
    add_quantize_flag(parser)
    args = parse_run(parser, argv, STATE, lambda args: "out/base")
    if args.quantize and not args.evaluate:
        parser.error("--quantize is for --evaluate")
    c = args.config = GPTConfig(block_size=args.block_size, **sizes(args))
    if c.n_head % c.n_kv_head or c.head_size % 2 or not 16 <= c.head_size <= 256:
        raise InputError("n_head must be a multiple of n_kv_head, and head_size even, from 16 to "
                         f"256; got {c.n_head} and {c.n_kv_head}, {c.head_size}")
    return args


def sizes(values):
    """The SIZES of the flags or of a GPTConfig."""
    return {name: getattr(values, name) for name in SIZES}


def start_folder(out, args):
    """Makes a new run's folder, with its tokenizer; bad data leaves nothing there."""
    pairs = split_records(args.data, SPLITS, log=lambda line: None)  # load_tokens will tell it
    texts = [record.text for split, record in pairs if split == "train"]
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        with saving(f"{out}: a tokenizer cannot be written there", "make room, or choose another "
                    "--out"):
            out.mkdir(parents=True, exist_ok=True)
            train_tokenizer(texts, args.vocab_size, out)
    finally:
        remove_empty(missing)  # after an error


def main(argv=None):
    args = parse(argv)
    device = pick_device(args.device)
    out = Path(args.out)
    if args.evaluate:
        model = checkpoint.load(out, torch.float32, device, quantize=args.quantize, packed=False)
        return evaluate(model, args.data, load_encoding(out))
    state = vars(args).pop("state")  # which is large: nothing may keep it
    if state:
        common.check_resumed(out, args.steps, state, sizes(args.config))
    else:
        start_folder(out, args)
    encoding = load_encoding(out)
    splits, _ = store_tokens(out / "tokens", args.data, encoding)
    tokens, heldout = (splits[split] for split in SPLITS)
    run = Run(args, args.config, device, state)
    run.windows(heldout, 0)  # raises before training where the evaluation has too few tokens
    size = sum(p.numel() for p in run.model.parameters())
    print(f"{human(size)} parameters; {human(len(tokens.ids))} training tokens, "
          f"{human(len(heldout.ids))} held out", flush=True)
    interrupted = run.train(tokens)
    if not interrupted:
        evaluate(run.model, args.data, encoding)
        print(f"\nnext:  python train_heads.py --model {out}")
    return interrupted


if __name__ == "__main__":
    command(main)
