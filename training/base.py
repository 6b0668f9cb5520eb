"""Trains the small base model of demo/ from scratch and writes it as a Hugging Face folder.

    python -m training.base --out out/base           # on the source of Python's standard library
    python -m training.base --out demo --evaluate    # the held-out loss of a model that is there
"""

if __name__ == "__main__":  # before torch is loaded, so that a typo is reported at once
    from training.flags import parse_base
    ARGS = parse_base()

import contextlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel

from backends.tensor_parallel import Group
from hf import checkpoint, expect, families
from hf.tokenizer import CODE_PATTERN, load_encoding
from model import GPT, GPTConfig, human, pick_device
from tools.cli import command
from training.common import progress, saving, set_learning_rate
from training.corpus import SPLITS, split_records
from training.data import load_tokens, to_device, window_batch
from training.flags import LOWEST

END_OF_TEXT = "<|endoftext|>"
SHOW_EVERY = 20  # steps


def train_tokenizer(documents, vocab_size, out):
    """Learns a byte-level BPE, whose last token is END_OF_TEXT, and writes it in `out`."""
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
    with saving(f"{out}: a tokenizer cannot be written there", "make room, or take another --out"):
        out.mkdir(parents=True, exist_ok=True)
        (out / "tokenizer.json").write_text(tokenizer.to_str())
        (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def loss_of(model, ids):
    """Mean cross-entropy in nats per token of windows [B, T + 1]; bf16 products, fp32 loss."""
    # on a CPU flash attention takes longer
    attention = sdpa_kernel(SDPBackend.MATH) if ids.is_cpu else contextlib.nullcontext()
    with torch.autocast(ids.device.type, torch.bfloat16), attention:
        logits = model.lm_head(model(ids[:, :-1]))
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, data, ids):
    """Prints the loss on all held-out tokens, in windows of the context that do not overlap."""
    T = min(model.config.block_size, len(ids) - 1)
    windows = (ids[i:i + T + 1].astype(int) for i in range(0, len(ids) - T, T))
    losses = [loss_of(model, to_device(window[None], model.device)).item() for window in windows]
    loss = sum(losses) / len(losses)
    n_bytes = sum(len(record.text.encode("utf-8", "surrogatepass"))
                  for _, record in split_records(data, ["heldout"]))
    print(f"held-out loss {loss:.3f} nats per token, {loss * len(ids) / n_bytes:.4f} per byte")


def train(model, tokens, args):
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = (  # Muon needs far fewer tokens here than AdamW does
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    loss_fn = torch.compile(loss_of) if args.compile else loss_of
    show = progress(0, args.steps, args.batch_size * args.block_size, Group().print)
    for step in range(1, args.steps + 1):
        seed = args.seed * 1_000_003 + step - 1  # each step has windows of its own
        ids, *_ = window_batch(tokens, args.batch_size, args.block_size + 1, seed, model.device)
        loss = loss_fn(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            set_learning_rate(optimizer, args.lr, step - 1, args.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % SHOW_EVERY == 0 or step == args.steps:
            show(step, f"step {step}/{args.steps}  loss {loss.item():.3f}")


def main(args):
    sizes = {name: value for name, value in vars(args).items() if name in LOWEST}
    c = GPTConfig(block_size=args.block_size, **sizes)
    families.parse_config(families.hf_config(c, torch.bfloat16))  # InputError for bad sizes
    device = pick_device(args.device)
    out = Path(args.out)
    if args.evaluate:
        model = checkpoint.load(out, torch.float32, device, quantize=args.quantize, packed=False)
        return evaluate(model, args.data, load_tokens(args.data, load_encoding(out), "heldout").ids)
    expect(not (out / "config.json").exists(), f"{out} holds a model already; choose another --out")
    pairs = split_records(args.data, SPLITS)
    train_tokenizer([record.text for split, record in pairs if split == "train"], c.vocab_size, out)
    tokens, heldout = (load_tokens(args.data, load_encoding(out), split) for split in SPLITS)
    model = GPT(c).init_weights(torch.Generator().manual_seed(args.seed)).to(device)
    sizes = (sum(p.numel() for p in model.parameters()), len(tokens.ids), len(heldout.ids))
    print("{} parameters; {} training tokens, {} held out".format(*map(human, sizes)), flush=True)
    try:
        train(model, tokens, args)
    finally:  # after Ctrl-C and SIGTERM too
        with saving(f"{out}: the model cannot be saved", "make room"):
            model.save_pretrained(out, torch.bfloat16)
    evaluate(model, args.data, heldout.ids)
    print(f"\nnext:  python train_heads.py --model {out}")


if __name__ == "__main__":
    command(lambda: main(ARGS))
