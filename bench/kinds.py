"""`python -m bench kinds`: trains several kinds of draft heads side by side, on the same batches,
whose hidden states and next-token distributions are computed once."""

import re
from pathlib import Path

import torch

from backends import tensor_parallel
from bench import Table
from clover import CloverHeads, preset
from model import check, expect
from train_heads import (
    HEAD_WEIGHT,
    SHOW_EVERY,
    Trainer,
    guess_masks,
    head_losses,
    run_heads,
    run_model,
)
from training import data, runs
from training.evaluate import BATCHES
from training.flags import SWITCHES, RunConfig, parse_heads
from training.loss import ROWS
from training.program import load_frozen


def trainer_of(flags, model, args):
    """The `Trainer` of a kind. flags: a preset of train_heads.py, perhaps with switches or --lr.
    Raises InputError for other flags and bad values."""
    own = vars(parse_heads(["--preset", *flags.split()]))
    others = {name for name in own if own[name]} - {"preset", "lr", *SWITCHES}
    expect(not others, f"{flags!r}: a kind has a preset, its switches and --lr; give "
           f"{', '.join(f'--{runs.flag(name)}' for name in sorted(others))} for all kinds")
    lr = own.get("lr", RunConfig.lr)
    check("lr", lr, 0, 10, above=True)
    torch.manual_seed(args.seed)
    switches = {name: own[name] for name in SWITCHES if name in own}
    return Trainer(CloverHeads(preset(own["preset"], **switches), model), args.steps, lr)


def bench(args):
    """Trains the kinds, writes each to a folder in --out, prints and returns their accuracy."""
    group = tensor_parallel.start(args.device)
    config = RunConfig(model=args.model, device=group.device, dtype=args.dtype,
                       quantize=args.quantize, template_kwargs=args.template_kwargs)
    model, encoding = load_frozen(config)
    dtype = runs.product_dtype(config, group)
    kinds = [trainer_of(flags, model, args) for flags in args.kinds]
    expect(len({kind.heads.config.n_draft for kind in kinds}) == 1,
           "the kinds have different numbers of heads; give all the same --draft-heads")
    size = runs.pick_block_size(config, kinds[0].heads)
    out = Path(args.out)
    folders = [out / re.sub(r"[^\w.]+", "-", flags) for flags in args.kinds]
    for folder in folders:
        expect(not folder.exists(), f"{folder} exists; use another --out")
    keys = data.tokens_keys(args.data, encoding)
    tokens = data.store_tokens(out / data.FILE, keys, args.data, encoding, model.config.vocab_size)
    corpus = tokens["train"]
    log = lambda line: print(line, flush=True)
    ids = corpus.ids[corpus.loss_mask]
    for kind in kinds:
        data.set_draft_vocabulary(kind.heads, ids, args.draft_vocabulary, log)

    def window_losses(split, seed, step):
        """(losses, hits) of each kind's heads, [kinds, K], and the number of guesses [K]."""
        K = kinds[0].heads.config.n_draft
        ids, loss_mask, documents = data.window_batch(tokens[split], args.batch_size, size, K + 1,
                                                      seed, step, model.device)
        hidden = run_model(model, ids, documents, dtype)
        outputs = [output for kind in kinds
                   for output in run_heads(kind.heads, hidden, ids, documents, dtype)]
        guess_mask = guess_masks(ids, K, loss_mask, documents)
        sums = head_losses(kinds[0].heads, hidden, outputs, guess_mask, dtype, ROWS)
        return *(x.view(len(kinds), K) for x in sums), guess_mask.sum(dim=(1, 2))

    weights = HEAD_WEIGHT ** torch.arange(kinds[0].heads.config.n_draft, device=model.device)
    show = runs.progress(0, args.steps, args.batch_size * size, log)
    for step in range(args.steps):
        losses, _, guesses = window_losses("train", args.seed, step)
        losses = losses / guesses.clamp(min=1)
        (losses * weights).sum().backward()
        for kind in kinds:
            kind.update()
        if (step + 1) % SHOW_EVERY == 0:
            firsts = " ".join(map("{:.3f}".format, losses[:, 0].tolist()))
            show(step + 1, f"step {step + 1}/{args.steps}  loss of head 1: {firsts}")
    with torch.no_grad():
        _, hits, guesses = (sum(x) for x in zip(*(window_losses("heldout", 0, step)
                                                  for step in range(BATCHES))))
    table = Table()
    accuracies = (hits / guesses.clamp(min=1)).tolist()
    for kind, folder, accuracy in zip(kinds, folders, accuracies):
        training = dict(steps=args.steps, tokens=args.steps * args.batch_size * size,
                        batch_size=args.batch_size, block_size=size, lr=kind.lr, seed=args.seed,
                        **runs.data_record(args.data, tokens["key"]))
        kind.heads.save_pretrained(folder, encoding.hash, torch.bfloat16,
                                   training=training, accuracy=accuracy)
        table.add(dict(kind=folder.name) | {f"head {i}": x for i, x in enumerate(accuracy, 1)})
    return dict(trained_on=args.steps * args.batch_size * size, accuracy=table)
