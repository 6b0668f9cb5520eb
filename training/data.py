"""Training data: tokens and the model's hidden states, their files, training windows, prompts."""

import contextlib
import hashlib
import itertools
import shutil
from typing import NamedTuple

import numpy as np
import torch

from hf.chat import end_of_text
from model import InputError, check_memory, expect
from training import corpus
from training.common import load_file, progress, save_file, saving
from training.corpus import SPLITS, builtin_corpus, find_files, split_records
from training.loss import Teacher, hidden_states, teach

FILE = "tokens.pt"      # in --out, or beside the text that the model wrote
COVERAGE = 0.97         # share of the training tokens that an "auto" draft vocabulary covers
VOCABULARY_STEP = 1024  # its size is a multiple of this
SPAN = 2048             # for stored states, longer documents are read in parts of this many tokens
BATCH = 8192            # maximum tokens per forward pass
EXTRA = 4               # int16 values after each state: logsumexp (float32), greedy token (int32)


class Tokens(NamedTuple):
    """Concatenated documents."""
    ids: np.ndarray        # uint32 [N]
    loss_mask: np.ndarray  # bool [N]: the token is a training target
    starts: np.ndarray     # int64, ascending: offset of each document's first token
    states: np.ndarray | None = None  # int16 [N, C + EXTRA] from `store_states`, if stored


def pack(documents):
    ids, loss_masks = zip(*documents)
    starts = np.cumsum([0, *map(len, ids)])[:-1]
    return Tokens(np.concatenate(ids).astype(np.uint32), np.concatenate(loss_masks), starts)


def encode_record(record, encoding):
    """Encodes a Record -> (token ids, loss mask). Texts and completions end with end_of_text and
    begin with the tokenizer's prefix if that differs. Special tokens are not matched in texts."""
    special = () if record.kind == "text" else "all"
    parts = [(encoding.encode(text, allowed_special=special), in_loss)
             for text, in_loss in record.parts]
    if record.kind != "chat":
        end = [end_of_text(encoding)]
        prefix = [] if encoding.prefix == end else encoding.prefix
        parts = [(prefix, False), *parts, (end, True)]
    ids = [token for ids, _ in parts for token in ids]
    loss_mask = np.repeat([in_loss for _, in_loss in parts], [len(ids) for ids, _ in parts])
    return np.array(ids, np.uint32), loss_mask


def encode_splits(paths, splits, encoding):
    """Encodes the documents of `split_records` -> {split: Tokens}."""
    documents = {split: [] for split in splits}
    for split, record in split_records(paths, splits, encoding.template):
        documents[split].append(encode_record(record, encoding))
    return {split: pack(pairs) for split, pairs in documents.items()}


def load_tokens(paths, encoding, split):
    return encode_splits(paths, [split], encoding)[split]


def tokens_key(paths, encoding):
    """16 hex digits: a hash of the tokenizer, template, and each file's path, size and mtime."""
    groups = map(builtin_corpus, SPLITS) if paths is None else map(find_files, paths)
    files = sorted((str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns)
                   for file in itertools.chain(*groups))
    template = encoding.template and (encoding.template.source, encoding.template.tokens)
    parts = (encoding.hash, encoding.prefix, template, files, corpus.TEXT_SUFFIXES, corpus.PIECE)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def store_tokens(file, key, paths, encoding, vocab_size):
    """Writes the token file unless it has this `tokens_key` already, and returns its `open_tokens`.
    Raises InputError for token ids of vocab_size and up."""
    with contextlib.suppress(InputError):
        stored = open_tokens(file)
        if stored["key"] == key:
            return stored
    tokens = encode_splits(paths, SPLITS, encoding)
    expect(all((tokens[split].ids < vocab_size).all() for split in SPLITS), "--data has token "
           f"ids of {vocab_size} and up, for which the model has no embeddings; remove them")
    for states in file.parent.glob("states-*.npy"):  # they belong to the old tokens
        states.unlink()
    arrays = {split: list(map(torch.from_numpy, tokens[split][:3])) for split in SPLITS}
    with saving(f"{file}: cannot be written", "make room, or use another --out"):
        save_file(file, dict(key=key) | arrays)
    return open_tokens(file)


def open_tokens(file):
    """Opens a token file -> {"key": its `tokens_key`, split: memory-mapped Tokens}."""
    stored = load_file(file, ("key", *SPLITS), mmap=True)
    return stored | {split: Tokens(*(x.numpy() for x in stored[split])) for split in SPLITS}


def set_draft_vocabulary(heads, ids, n, log=print):
    """Restricts heads to the n most frequent token ids in an array, ties to the lower id. n 0: all
    token ids. n None: enough for COVERAGE, or all if that takes half of the vocabulary or more."""
    vocab_size = heads.model.config.vocab_size
    counts = np.bincount(ids, minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    if n is None:
        covered = counts[order].cumsum() / counts.sum()
        needed = int(np.searchsorted(covered, COVERAGE)) + 1
        n = -(-needed // VOCABULARY_STEP) * VOCABULARY_STEP
        n = n if 2 * n < vocab_size else 0
        log(f"draft vocabulary: {n or 'all'} of {vocab_size} token ids; {needed} cover "
            f"{COVERAGE:.0%} of the training tokens")
    heads.set_vocabulary(order[:n].tolist())


def window_batch(tokens, n, length, seed, device, mine=slice(None), dtype=torch.float32):
    """Draws n random windows of `Tokens` and returns the slice `mine` of them: ids int64, loss_mask
    bool, documents int64 (0, 1, ... in each window; None if no window has two), each [windows,
    length]; a `Teacher` of all but the last position in a dtype, None if no states are stored."""
    last = len(tokens.ids) - length
    expect(last >= 0, f"expected {length} tokens or more in each split, got {len(tokens.ids)}; "
           "give more text, or a smaller --block-size")
    starts = torch.randint(last + 1, (n, 1), generator=torch.Generator().manual_seed(seed))
    columns = (starts.numpy() + np.arange(length))[mine]
    documents = np.searchsorted(tokens.starts, columns, side="right")
    documents -= documents[:, :1]
    crosses = documents.any()
    arrays = tokens.ids[columns].astype(np.int64), tokens.loss_mask[columns], documents
    ids, loss_mask, documents = (to_device(array, device) for array in arrays)
    teacher = None
    if tokens.states is not None:
        teacher = unpack_teacher(to_device(tokens.states[columns[:, :-1]], device), dtype)
    return ids, loss_mask, documents if crosses else None, teacher


def to_device(array, device):
    """Copies a numpy array to a device. The copy to CUDA is asynchronous, from pinned memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    on_gpu = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if on_gpu else tensor).to(device, non_blocking=on_gpu)


def prompts(tokens, n, length, seed=0):
    """Draws n prompts, lists of token ids, from random documents, each used once before any is used
    again. From a text: `length` tokens, fewer if no document is longer, never its last. From a
    completion or chat: up to 4 * length tokens before an answer."""
    rng = np.random.default_rng(seed)
    ends = np.append(tokens.starts[1:], len(tokens.ids))
    length = min(length, int((ends - tokens.starts).max()) - 1)

    def prompt_of(i):  # None if the document is too short, or has no answer
        start = tokens.starts[i]
        mask = tokens.loss_mask[start:ends[i]]
        answers = np.flatnonzero(mask & ~np.append(False, mask[:-1]))  # first token of each
        if len(answers) == 1 and answers[0] <= 2 and mask[-1]:  # a text, perhaps after a prefix
            if len(mask) > length:
                first = start + rng.integers(len(mask) - length)
                return tokens.ids[first:first + length].tolist()
        elif (answers > 0).any():
            answer = rng.choice(answers[answers > 0])
            return tokens.ids[start + max(answer - 4 * length, 0):start + answer].tolist()
    chosen = {}  # document -> prompt
    for i in rng.permutation(len(tokens.starts)):
        if len(chosen) < n and (prompt := prompt_of(i)):
            chosen[i] = prompt
    expect(chosen, "prompts need documents of two tokens or more; give more text")
    again = itertools.islice(itertools.cycle(chosen), n - len(chosen))
    return [*chosen.values(), *map(prompt_of, again)]


# Hidden states of the frozen model are computed once and stored, with the logsumexp of the logits:
# then the probabilities of a draft vocabulary need only its rows of the LM head.

def unpack_teacher(rows, dtype):
    """Unpacks rows of `store_states`, int16 [B, T, C + EXTRA] -> `Teacher`, hidden in a dtype."""
    hidden, logsumexp, greedy = rows.split((rows.shape[-1] - EXTRA, 2, 2), dim=-1)
    return Teacher(hidden.view(torch.bfloat16).to(dtype),
                   logsumexp.contiguous().view(torch.float32)[..., 0],
                   greedy.contiguous().view(torch.int32)[..., 0].long())


def span_batches(tokens, longest):
    """Cuts documents into spans (start, end) of up to `longest` tokens, batched by length."""
    ends = np.append(tokens.starts[1:], len(tokens.ids))
    spans = [(first, min(first + longest, end)) for start, end in zip(tokens.starts, ends)
             for first in range(start, end, longest)]
    spans.sort(key=lambda span: span[0] - span[1])
    n = max(1, BATCH // longest)
    return [spans[i:i + n] for i in range(0, len(spans), n)]


def store_states(file, model, tokens, group, dtype):
    """The model's states for `Tokens`, int16 [N, C + EXTRA], memory-mapped from a file. If it does
    not exist, all processes of the group write it together."""
    shape = (len(tokens.ids), model.config.n_embd + EXTRA)
    if not file.exists():
        temporary = file.with_name(f"{file.name}.tmp")
        group.on_first(lambda: create(temporary, shape))
        rows = np.load(temporary, mmap_mode="r+")
        batches = span_batches(tokens, min(SPAN, model.config.block_size))
        show = progress(0, len(batches), shape[0] // len(batches), group.print)
        for i in range(group.rank, len(batches), group.size):
            write_states(rows, model, tokens, batches[i], dtype)
            if i // group.size % 10 == 0:
                show(i + 1, f"step {i + 1}/{len(batches)}  hidden states")
        rows.flush()
        group.barrier()
        group.on_first(lambda: temporary.rename(file))
    return np.load(file, mmap_mode="r")


def create(file, shape):
    """Creates a .npy file of int16 zeros. Raises InputError if the disk has too little space."""
    check_memory("hidden states take", 2 * shape[0] * shape[1],
                 shutil.disk_usage(file.parent).free, file.parent, "use less text")
    with saving(f"{file}: cannot be written", "make room and start it again"):
        np.lib.format.open_memmap(file, "w+", np.int16, shape)


def write_states(rows, model, tokens, spans, dtype):
    texts = [torch.from_numpy(tokens.ids[start:end].astype(np.int64)) for start, end in spans]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    hidden = hidden_states(model, ids.to(model.device), dtype=dtype)
    hidden, logsumexp, greedy = teach(model, hidden.bfloat16(), dtype)
    parts = hidden, logsumexp.float()[..., None], greedy.int()[..., None]
    states = torch.cat([x.view(torch.int16) for x in parts], dim=-1).cpu().numpy()
    for state, (start, end) in zip(states, spans):
        rows[start:end] = state[:end - start]
