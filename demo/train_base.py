"""Trains demo/'s base model from scratch on the source code of Python's standard library and saves
it to out/base: `python -m demo.train_base`, about eight hours on two CPU cores. See README.md."""

import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, pre_tokenizers, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel

from backends import cpu
from hf.tokenizer import load_encoding
from model import GPT, GPTConfig
from train_heads import set_learning_rate
from training.data import load_tokens, split_records, window_batch
from training.runs import progress

OUT = Path("out/base")
DATA = None                         # None: the standard library; else a list of files and folders
CONFIG = GPTConfig(block_size=512)
STEPS = 14_700
LONG_FROM = 13_900                  # windows are LONG from this step on
SHORT = 16, 256                     # windows per step, tokens per window
LONG = 8, 512
LEARNING_RATE = 5e-3
COMPILE = True                      # needs a C++ compiler
HALF = cpu.torch_multiplies_bfloat16()

OUT.mkdir(parents=True)  # fails if it exists, so that a trained model is not overwritten

# demo/'s byte-level BPE with new merges; <|endoftext|> stays the last of its 4,096 tokens
demo = Path("demo")
tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
trainer = trainers.BpeTrainer(vocab_size=CONFIG.vocab_size - 1, show_progress=False,
                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
texts = [record.text for _, record in split_records(DATA, ["train"])]
tokenizer.train_from_iterator(texts, trainer)
tokenizer.save(str(OUT / "tokenizer.json"))
shutil.copy(demo / "tokenizer_config.json", OUT)
tokens, heldout = (load_tokens(DATA, load_encoding(OUT), split) for split in ("train", "heldout"))


def loss_of(model, ids):
    """Mean cross-entropy of windows [B, T + 1], in nats per token; fp32 loss. Products are in bf16
    where that is faster."""
    # flash attention is slower on a CPU
    with torch.autocast("cpu", torch.bfloat16, enabled=HALF), sdpa_kernel(SDPBackend.MATH):
        logits = model.lm_head(model(ids[:, :-1]))
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


model = GPT(CONFIG).init_weights(torch.Generator().manual_seed(1))
matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if not any(p is m for m in matrices)]
optimizers = (torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
              torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0))
loss_fn = torch.compile(loss_of) if COMPILE else loss_of
show = progress(0, STEPS, SHORT[0] * SHORT[1], print)
try:
    for step in range(STEPS):
        n, length = SHORT if step < LONG_FROM else LONG
        ids, *_ = window_batch(tokens, n, length, ahead=1, seed=1, step=step)
        loss = loss_fn(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            set_learning_rate(optimizer, LEARNING_RATE, step, STEPS)
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            show(step + 1, f"step {step + 1}/{STEPS}  loss {loss.item():.3f}")
finally:  # also after Ctrl-C
    model.save_pretrained(OUT, torch.bfloat16)

T = CONFIG.block_size
windows = torch.from_numpy(heldout.ids.astype(int)).unfold(0, T + 1, T)
with torch.no_grad():
    losses = [loss_of(model, window[None]).item() for window in windows]
print(f"held-out loss {sum(losses) / len(losses):.3f} nats per token")
