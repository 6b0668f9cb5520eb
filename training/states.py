"""The frozen model's hidden states of the training text, computed once and kept in a file. On a CPU
they take longer than the rest of a training step, so further passes and runs are faster."""

import shutil

import numpy as np
import torch

from common.values import human
from model import expect
from training.runs import progress, saving


@torch.inference_mode()
def store_states(folder, model, tokens, log=print):
    """Computes the states of all `data.Tokens`, before the final norm, unless they are there. Each
    document is read from its start, in pieces of the model's context. Two files of the folder grow
    a document at a time, the states and their token ids: a killed run continues them, and so does
    one on more text. Raises InputError if there is no room for them."""
    C, N = model.config.n_embd, len(tokens.ids)
    file, ids_file = state_files(folder, model)
    for path in (file, ids_file):
        path.touch()
    ends = np.append(tokens.starts[1:], N)
    stored = np.fromfile(ids_file, np.uint32)
    n = min(len(stored), file.stat().st_size // (2 * C), N)
    same = np.argmax(np.append(stored[:n] != tokens.ids[:n], True))  # rows of the same token ids
    done = int(max(ends[ends <= same], default=0))
    room = shutil.disk_usage(folder).free
    expect((N - done) * 2 * C < room, f"{file}: the states take {human((N - done) * 2 * C, 'B')}, "
           f"but {human(room, 'B')} are free; make room, or leave out --store-states")
    if done < N:
        log(f"computing the states of {human(N - done)} tokens, in {file}")
    show = progress(done, N, 1, log, every=60)
    most = min(model.config.block_size, int((ends - tokens.starts).max()))
    cache = model.new_cache(1, most)
    with (saving(f"{file}: cannot be written", "make room and --resume"), open(file, "ab") as rows,
          open(ids_file, "ab") as ids, model.blocks.decoding_context()):
        rows.truncate(done * 2 * C)
        ids.truncate(done * 4)
        for number in range(np.searchsorted(tokens.starts, done), len(ends)):
            for start in range(tokens.starts[number], ends[number], most):
                piece = tokens.ids[start:min(start + most, ends[number])]
                context = torch.from_numpy(piece.astype(np.int64)).to(model.device)
                states = model.prefill(context[None], cache)[0].to("cpu", torch.bfloat16)  # (T, C)
                rows.write(states.view(torch.int16).numpy())
                rows.flush()
                ids.write(piece)
            show(int(ends[number]), f"{human(ends[number])} of {human(N)} states")


def open_states(folder, model, N):
    """The states of the first N tokens: memory-mapped int16 [N, C], the bits of bfloat16."""
    file, _ = state_files(folder, model)
    return np.memmap(file, np.int16, "r", shape=(N, model.config.n_embd))


def state_files(folder, model):
    return [folder / f"states-{model.hash}.{suffix}" for suffix in ("bin", "ids")]
