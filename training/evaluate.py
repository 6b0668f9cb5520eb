"""How good draft heads are: head accuracy, tokens per step, which nodes of trees are accepted."""

import torch

from generate import DraftPlan, FixedPolicy, generate, prepare
from model import MAX_TREE
from training.common import saving
from training.data import prompts, window_batch
from training.loss import guess_masks, teacher_forced, top_hits

PROMPTS = 32  # held-out ones, decoded to measure the heads
DECODED = 64  # new tokens per prompt
TREE_SIZE = 17
TOPS = (1, 2, 4, 8)  # head accuracy is measured for these n


def heldout_prompts(heldout, model):
    """PROMPTS of the held-out Tokens; the context has room for DECODED tokens after each."""
    room = model.config.block_size - DECODED
    return prompts(heldout, PROMPTS, max(min(64, room // 2), 1), max_len=max(min(256, room), 1))


@torch.no_grad()
def head_accuracy(heads, heldout, batch_size, block_size, batches=16):
    """{n: K shares} for n of TOPS: in how many places of fixed held-out windows the model's own
    greedy token is among a head's n likeliest."""
    hits = guesses = 0
    length = block_size + heads.config.n_draft + 1
    for seed in range(batches):
        ids, loss_mask, documents = window_batch([(heldout, batch_size)], length, seed,
                                                 heads.model.device)
        hidden, outputs = teacher_forced(heads, ids, documents)
        guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
        hits = hits + top_hits(heads, outputs, hidden, guess_mask, TOPS)
        guesses = guesses + guess_mask.sum(dim=(1, 2))
    return dict(zip(TOPS, (hits / guesses.clamp(min=1)).tolist()))


@torch.inference_mode()
def acceptance(model, heads, prompts, temperature, max_new_tokens=64, batch_size=8):
    """How often node n of a tree, the n-th likeliest, was accepted at depth d: row d - 1, column
    n - 1 of [[share] * 63] * K. Counted with trees of 64 nodes and 8 beams: a smaller tree is the
    front of a larger one, and fewer beams find nearly as much, so one table serves all sizes."""
    engine = prepare(model, prompts, max_new_tokens, heads, batch_size=batch_size, graph=False,
                     policy=FixedPolicy(DraftPlan(MAX_TREE - 1)), temperature=temperature)
    hits = torch.zeros(heads.config.n_draft, MAX_TREE - 1)

    def count(index, tokens, path, plan):
        for depth, node in enumerate(path[1:]):
            hits[depth, node - 1] += 1
    output = engine.generate(prompts, max_new_tokens, on_step=count)
    return (hits / output.steps).tolist()


def measure(heads, heldout, batch_size, block_size, log=print):
    """The measurements for heads.json, as a dict. log: called with a line before each."""
    log("measuring 1 of 4: head accuracy")
    top = head_accuracy(heads, heldout, batch_size, block_size)
    starts = heldout_prompts(heldout, heads.model)
    log(f"measuring 2 of 4: {len(starts)} prompts, greedy, tree size {TREE_SIZE}")
    out = generate(heads.model, starts, DECODED, heads, tree_size=TREE_SIZE)
    tables = {}
    for part, temperature in enumerate((0.0, 1.0), start=3):
        log(f"measuring {part} of 4: acceptance at temperature {temperature:g}")
        rows = acceptance(heads.model, heads, starts, temperature, DECODED)
        tables[f"{temperature:g}"] = [[round(share, 4) for share in row] for row in rows]
    return dict(accuracy=top[1], top_accuracy=top, prompts=len(starts),
                tokens_per_step=out.tokens_per_step, acceptance=tables)


def record(heads, out, tokenizer, measured, weights=False):
    """Prints what was measured and adds it to the heads' heads.json; weights: saves these too."""
    print("held-out accuracy" + "".join(f"{f'top {n}':>9}" for n in TOPS))
    for i, row in enumerate(zip(*measured["top_accuracy"].values()), start=1):
        print(f"head {i:<12}" + "".join(f"{share:>9.1%}" for share in row))
    print(f"{measured['tokens_per_step']:.2f} tokens per step over {measured['prompts']} held-out "
          f"prompts, greedy, tree size {TREE_SIZE}")
    info = dict(training=heads.info.get("training", {})) | measured
    with saving(f"{out}: what was measured cannot be written", "make room and --evaluate"):
        if weights:
            heads.save_pretrained(out, tokenizer, torch.bfloat16, **info)
        else:
            heads.save_record(out, tokenizer, **info)
