"""Text that the model itself writes, for heads to train on, since decoding is on such text."""

from pathlib import Path

import torch

from generate import generate
from model import InputError
from training.common import load_file, save_file
from training.data import Tokens, pack, prompts
from training.flags import SELF_PROMPTS

BATCH = 32     # prompts decoded together
TREE_SIZE = 5  # lookup drafts


def own_text(args, model, stored, stop):
    """The Tokens of what the model writes after --self-distill prompts from the training text, half
    of them greedily, half at temperature 1; None for no prompts. A file in --out keeps them for a
    resumed run. stored: what `open_tokens` gives; stop: token ids."""
    kinds = stored["kinds"]
    if args.self_distill is None:
        mostly_chats = 2 * kinds.get("chat", 0) > sum(kinds.values())
        args.self_distill = SELF_PROMPTS if mostly_chats and not args.shard_base else 0
    if not args.self_distill:
        return None
    if args.shard_base:
        raise InputError("a sharded model does not decode; take --self-distill 0")
    file = Path(args.out) / "self_distill.pt"
    if args.resume:
        return Tokens(*(x.numpy() for x in load_file(file, ["tokens"])["tokens"]))
    length = min(args.window, model.config.block_size // 2)
    starts = prompts(stored["train"], args.self_distill, max(args.block_size // 4, 1), args.seed,
                    model.config.block_size - length)
    print(f"self-distillation: the model continues {len(starts)} prompts by up to {length} tokens "
          "each, for the heads to learn from; --self-distill 0 switches it off", flush=True)
    documents = []
    for temperature in (0, 1):
        some = starts[temperature::2] or starts
        out = generate(model, some, length, lookup=True, temperature=temperature, seed=args.seed,
                       tree_size=TREE_SIZE, batch_size=BATCH, stop=stop)
        print(f"the model wrote {out.emitted} tokens after {len(some)} prompts at temperature "
              f"{temperature} in {out.seconds:.0f} s", flush=True)
        for prompt, text in zip(some, out.tokens):
            prompt_mask = [set(kinds) == {"text"}] * len(prompt)  # a user's words do not count
            documents.append((prompt + text, prompt_mask + [True] * len(text)))
    tokens = pack(documents)
    save_file(file, dict(tokens=[*map(torch.from_numpy, tokens)]), "make room and start it again")
    return tokens
