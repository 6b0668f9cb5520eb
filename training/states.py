"""The frozen model's hidden states in a file mapped into memory: it runs once per text, however
often heads read it. Beside each state are the model's greedy token and the logsumexp of its logits,
from which its distribution over any token ids follows by their rows of the LM head alone."""

import shutil

import numpy as np
import torch

from model import InputError, human
from training.common import progress, saving
from training.loss import Teacher, hidden_states, teach

SPAN = 2048   # tokens of a document that the model reads at once; longer ones are cut
BATCH = 8192  # tokens of a forward pass
BESIDE = 4    # int16 numbers after a state's: logsumexp, as float32, and token, as int32


def pack_teacher(teacher):
    """A `Teacher` as int16 [B, T, C + BESIDE], its states in bfloat16."""
    beside = teacher.logsumexp.float(), teacher.greedy.int()
    parts = [teacher.hidden.bfloat16(), *(x[..., None] for x in beside)]
    return torch.cat([x.view(torch.int16) for x in parts], dim=-1)


def unpack_teacher(packed, dtype):
    """`pack_teacher`'s int16 [B, T, C + BESIDE] -> `Teacher`, its states in a dtype."""
    hidden, logsumexp, greedy = packed.split((packed.shape[-1] - BESIDE, 2, 2), dim=-1)
    return Teacher(hidden.view(torch.bfloat16).to(dtype),
                   logsumexp.contiguous().view(torch.float32)[..., 0],
                   greedy.contiguous().view(torch.int32)[..., 0].long())


def span_batches(tokens, longest):
    """Batches of (start, end), pieces of documents of at most `longest` tokens, each batch of about
    equally long ones."""
    ends = np.append(tokens.starts[1:], len(tokens.ids))
    spans = [(first, min(first + longest, end)) for start, end in zip(tokens.starts, ends)
             for first in range(start, end, longest)]
    spans.sort(key=lambda span: span[0] - span[1])
    batches = []
    while spans:
        n = max(1, BATCH // (spans[0][1] - spans[0][0]))
        batches.append(spans[:n])
        del spans[:n]
    return batches


@torch.no_grad()
def store_states(file, model, tokens, group, autocast, dtype):
    """Writes the states of `Tokens` to a file, unless they are there, by all processes of a group
    -> them, mapped into memory, int16 [N, C + BESIDE]."""
    shape = (len(tokens.ids), model.config.n_embd + BESIDE)
    if not file.exists():
        temporary = file.with_name(f"{file.name}.tmp")
        group.on_first(lambda: create(temporary, shape))
        rows = np.load(temporary, mmap_mode="r+")
        batches = span_batches(tokens, min(SPAN, model.config.block_size))
        show = progress(0, len(batches), shape[0] // len(batches), group.print)
        for i in range(group.rank, len(batches), group.size):
            write_states(rows, model, tokens, batches[i], autocast, dtype)
            if i // group.size % 10 == 0:
                show(i + 1, f"step {i + 1}/{len(batches)}  hidden states")
        rows.flush()
        group.barrier()
        group.on_first(lambda: temporary.rename(file))
    return np.load(file, mmap_mode="r")


def create(file, shape):
    """Makes an empty file of int16 numbers. Refuses one that does not fit the disk."""
    size = 2 * shape[0] * shape[1]
    free = shutil.disk_usage(file.parent).free
    print(f"hidden states of {human(shape[0])} tokens take {human(size, 'B')} of the "
          f"{human(free, 'B')} that are free in {file.parent}", flush=True)
    if size > free:
        raise InputError(f"{file.parent}: no room for hidden states; take fewer texts, or "
                         "another --out")
    with saving(f"{file}: cannot be written", "make room and start it again"):
        np.lib.format.open_memmap(file, "w+", np.int16, shape)


def write_states(rows, model, tokens, spans, autocast, dtype):
    """Runs the model on a batch of spans, and writes their rows."""
    ids = torch.zeros(len(spans), max(end - start for start, end in spans), dtype=torch.int64)
    for row, (start, end) in zip(ids, spans):
        row[:end - start] = torch.from_numpy(tokens.ids[start:end].astype(np.int64))
    hidden = hidden_states(model, ids.to(model.device), autocast=autocast)
    packed = pack_teacher(teach(model, hidden.bfloat16(), dtype)).cpu().numpy()
    for row, (start, end) in zip(packed, spans):
        rows[start:end] = row[:end - start]
