"""Training data: documents of text and chat files, their splits, their tokens, and what is drawn
from them: training windows and prompts."""

import contextlib
import hashlib
import itertools
import os
import re
import sysconfig
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.files import OBJECTS, content_hash, read_objects, read_text, value_hash
from common.values import warn
from hf.bpe import any_of
from hf.chat import end_of_text
from hf.messages import messages_of, tools_of
from model import InputError, expect
from training.runs import STATE_FILE, load_file, save_file, saving

FILE = "tokens.pt"      # in --out, or beside the text that the model wrote
ABOUT = "written_by.json"  # beside it, with the model's hash
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go",
                 ".rs", ".jsonl", ".jsonl.gz")
SPLITS = ("train", "heldout")
INSTALLED = {"site-packages", "dist-packages", "__pycache__", "node_modules"}  # and .*
NO_CODE = INSTALLED | {"encodings"}  # and *data
MOST_REFUSED = 0.1  # share of the chats that the template may refuse; more are an error
PART_OF_NAME = re.compile(r"[<\[/|\uff5c\w]*$")  # at a text's end, such as "</th"
PIECE = 4096  # characters; longer texts are cut into pieces, each of which goes to either split
COVERAGE = 0.97         # share of the training tokens that an "auto" draft vocabulary covers
VOCABULARY_STEP = 1024  # its size is a multiple of this


# --------------------------------------------------------------------------------------------------
# Documents

class Record(NamedTuple):
    """A document as (text, in_loss) pairs; in_loss: its tokens are training targets. kind: "text",
    "completion" (the loss covers all but the prompt), "chat" (only the assistant's turns), or
    "written": by the model, (token ids, in_loss) pairs, a prompt and its answer after the other."""
    parts: tuple
    kind: str = "text"
    refused: str = ""  # why the chat template refuses it

    @property
    def text(self):
        return "".join(str(part) for part, _ in self.parts)


def builtin_corpus(split):
    """The source files of Python's standard library in a split, which need no download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    is_code = lambda path: not any(part in NO_CODE or part.endswith("data") for part in path.parts)
    files = [file for file in sorted(root.rglob("*.py")) if is_code(file.relative_to(root))
             and split_of(file.relative_to(root).as_posix()) == split]
    expect(files, f"{root}: no code for the {split} split; use --data")
    return files


def find_files(path):
    """The file at a path, or the text files in a folder, also those behind links, each once. Leaves
    out hidden and installed folders, those of training runs, and what cannot be read."""
    path = Path(path)
    expect(os.access(path, os.R_OK), f"{path}: no such file or folder, or no right to read it")
    if path.is_file():
        return [path]
    found = {}  # real path -> path
    visited = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if STATE_FILE in names or real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if name not in INSTALLED and name[0] != ".")
        for file in (Path(folder, name) for name in sorted(names)):
            if file.name.endswith(TEXT_SUFFIXES) and os.access(file, os.R_OK):
                found.setdefault(file.resolve(), file)
    return sorted(found.values())


def read_records(paths, template=None, key=None):
    """Yields a `Record` for each document with text to train on; a warning counts the others.
    template: the `ChatTemplate` for chats; those it refuses are left out. key: the `format_key` of
    token ids to read. Raises InputError for a path without documents, a malformed line, and if more
    than MOST_REFUSED of the chats are refused."""
    chats = 0
    refused = []
    empty = []  # where there is no text
    for path in paths:
        found = False
        for file in find_files(path):
            for where, record in read_file(file, template, key):
                chats += record.kind == "chat"
                found |= bool(record.text or record.refused)
                if record.refused:
                    refused.append(f"{where}: {record.refused}")
                elif record.text:
                    yield record
                else:
                    empty.append(where)
        expect(found, f"{path}: expected UTF-8 text, or chats with an assistant's answer, to train "
               "on; got none; check the path")
    if empty:
        warn(f"left out of the data: {len(empty)} files or lines without UTF-8 text or an "
             f"assistant's answer; the first is {empty[0]}")
    if refused:
        problem = (f"the chat template refuses {len(refused)} of {chats} chats; the first is "
                   f"{refused[0]}")
        expect(len(refused) <= MOST_REFUSED * chats, f"{problem}; correct or remove them")
        warn(f"{problem}; skipping these")


def read_file(file, template=None, key=None):
    """Yields (place, `Record`) for each document of a file; one that is not UTF-8 has no text."""
    if file.name.endswith(OBJECTS):
        expected = 'an object with "text", "prompt" and "completion", "messages" or "conversations"'
        parse = partial(parse_record, template, key)
        for where, record in read_objects(file, parse, expected):
            yield f"{file}, {where}", record
        return
    try:
        text = read_text(file)
    except InputError:
        text = ""
    yield str(file), Record(((text, True),))


def parse_record(template, key, value):
    """The Record of an object with "text", else "prompt" and "completion", else chat messages; of
    one that `Writer` wrote, its token ids, if they have the format of this key."""
    if key and value.get("format") == key:
        ids = value.get("ids")
        expect(all(type(token) is int and 0 <= token < 2**32 for part in ids for token in part),
               "its ids are not lists of token ids")
        return Record(tuple((part, i % 2 > 0) for i, part in enumerate(ids)), "written")
    text, prompt, completion = map(value.get, ("text", "prompt", "completion"))
    if text is not None:
        record = Record(((text, True),))
    elif isinstance(prompt, list) and isinstance(completion, list):  # TRL's
        return chat_record(template, value | dict(messages=prompt + completion), len(prompt))
    elif prompt is not None and completion is not None:
        record = Record(((prompt, False), (completion, True)), "completion")
    else:
        return chat_record(template, value)
    valid = all(isinstance(part, str) for part, _ in record.parts)
    expect(valid, f"its {record.kind} is not a string")
    return record


def chat_record(template, value, first=0):
    """The Record of chat messages, with the assistant's turns from number `first` on in the loss.
    Answers before the first question, as in later parts of a long ShareGPT chat, are left out, as
    many templates refuse them."""
    expect(template, "messages need a model with a chat template")
    messages = messages_of(value)
    asked = next((i for i, turn in enumerate(messages) if turn["role"] == "user"), 0)
    opening = [turn for turn in messages[:asked] if turn["role"] != "assistant"]
    first = max(first - asked + len(opening), 1)  # at least 1: many refuse an empty chat
    try:
        parts = chat_parts(opening + messages[asked:], tools_of(value), first, template)
        return Record(parts, "chat")
    except InputError as error:
        return Record((), "chat", str(error))


def chat_parts(messages, tools, first, template):
    """The (text, in_loss) pairs of a chat up to the assistant's last turn. The loss covers the
    assistant's turns from number `first` on: each from where the text leaves the prompt for it."""
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    render = partial(template.render, **tools)
    # if the template drops the reasoning of earlier turns, only the last turn is as generated
    for answers in (turns, turns[-1:]):
        parts = []
        before = ""  # each text must be a prefix of the next
        for i in answers:
            prompt = render(messages[:i])
            asked = render(messages[:i], add_generation_prompt=False)
            text = render(messages[:i + 1], add_generation_prompt=False)
            start = shared_length(prompt, text)
            least = max(len(before), shared_length(asked.rstrip(), prompt))
            if start < least or not text.startswith(before):
                break
            parts += (text[len(before):start], False), (text[start:], True)
            before = text
        else:
            return tuple(parts)
    raise InputError("the chat template does not render a prefix of a chat as a prefix of its text")


def shared_length(prompt, text):
    """The length of the longest common prefix; if the prompt goes on otherwise, as with <think>,
    without a name that it divides."""
    shared = os.path.commonprefix([prompt, text])
    return len(shared if shared == prompt else PART_OF_NAME.sub("", shared))


def split_of(text):
    """The split of a text, by its hash: 1 in 20 is held out."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % 20 == 0 else "train"


def continued(parts):
    """Joins the prompts and answers of a written Record -> the parts of its documents. A prompt
    that does not continue the answer before, as where a template drops reasoning, begins a new
    document."""
    documents = []
    ids = []
    for (prompt, _), (answer, _) in zip(parts[::2], parts[1::2]):
        if not ids or prompt[:len(ids)] != ids:
            documents.append([])
            ids = []
        documents[-1] += (prompt[len(ids):], False), (answer, True)
        ids = prompt + answer
    return documents


def split_records(paths, splits, template=None, key=None):
    """Yields (split, Record) for the documents in some of SPLITS. paths None: the built-in corpus.
    Texts are cut, so that one file can fill both splits; neighbours in a split are joined again."""
    if paths is None:
        for split in splits:
            for file in builtin_corpus(split):
                yield from ((split, record) for _, record in read_file(file) if record.text)
        return
    missing = set(splits)
    for record in read_records(paths, template, key):
        whole = record.kind != "text"  # completions and chats are not cut
        pieces = [record.text[i:i + PIECE] for i in range(0, len(record.text), PIECE)]
        for split, run in itertools.groupby([record.text] if whole else pieces, split_of):
            if split in splits:
                missing.discard(split)
                parts = record.parts if whole else (("".join(run), True),)
                for document in continued(parts) if record.kind == "written" else [parts]:
                    yield split, Record(document, record.kind)
    expect(not missing, f"{' '.join(map(str, paths))}: too little text, none is in the split "
           f"{' or '.join(missing)}; give more, or a larger --self-tokens")


# --------------------------------------------------------------------------------------------------
# Tokens

class Tokens(NamedTuple):
    """Concatenated documents."""
    ids: np.ndarray        # uint32 [N]
    loss_mask: np.ndarray  # bool [N]: the token is a training target
    starts: np.ndarray     # int64, ascending: offset of each document's first token
    states: np.ndarray | None = None  # int16 [N, C], from `states.store_states`


def pack(documents):
    ids, loss_masks = zip(*documents)
    starts = np.cumsum([0, *map(len, ids)])[:-1]
    return Tokens(np.concatenate(ids).astype(np.uint32), np.concatenate(loss_masks), starts)


def encode_record(record, encoding):
    """Encodes a Record -> (token ids, loss mask). Texts and completions end with end_of_text and
    begin with the tokenizer's prefix if that differs. Special tokens are not matched in texts."""
    special = () if record.kind == "text" else "all"
    parts = [(encoding.encode(text, allowed_special=special) if isinstance(text, str) else text,
              in_loss) for text, in_loss in record.parts]
    if record.kind in ("text", "completion"):
        end = [end_of_text(encoding)]
        prefix = [] if encoding.prefix == end else encoding.prefix
        parts = [(prefix, False), *parts, (end, True)]
    ids = [token for ids, _ in parts for token in ids]
    loss_mask = np.repeat([in_loss for _, in_loss in parts], [len(ids) for ids, _ in parts])
    return np.array(ids, np.uint32), loss_mask


def encode_splits(paths, splits, encoding):
    """Encodes the documents of `split_records` -> {split: Tokens}."""
    documents = {split: [] for split in splits}
    key = format_key(encoding)
    special = [text for text, i in encoding.special_tokens.items() if i in encoding.control_ids]
    names = re.compile(any_of(set(special)) if special else "(?!)")
    spelled = []  # the first special token in each text that has some
    for split, record in split_records(paths, splits, encoding.template, key):
        documents[split].append(encode_record(record, encoding))
        if record.kind == "text" and (match := names.search(record.text)):
            spelled.append(match[0])
    if spelled and paths is not None:
        warn(f"{len(spelled)} of the texts contain special tokens, such as {spelled[0]}, which are "
             'read as plain text; for chats use "messages", for other text with special tokens '
             '"prompt" and "completion"')
    return {split: pack(pairs) for split, pairs in documents.items()}


def load_tokens(paths, encoding, split):
    return encode_splits(paths, [split], encoding)[split]


def format_key(encoding):
    """16 hex digits: a hash of the tokenizer, the chat template and its variables."""
    template = encoding.template and (encoding.template.source, encoding.template.variables)
    return value_hash((encoding.hash, encoding.prefix, template))


def tokens_key(paths, encoding):
    """16 hex digits that identify the data's tokens: a hash of the `format_key` and of each file's
    content."""
    if paths is None:
        paths = [file for split in SPLITS for file in builtin_corpus(split)]
    contents = sorted((file.suffix, content_hash(file))
                      for path in paths for file in find_files(path))
    return value_hash((format_key(encoding), contents, PIECE))


def store_tokens(file, key, paths, encoding, vocab_size):
    """Writes the token file unless it has this `tokens_key` already, and returns its
    `open_tokens`. Raises InputError for token ids of vocab_size and up."""
    with contextlib.suppress(InputError):
        stored = open_tokens(file)
        if stored["key"] == key:
            return stored
    tokens = encode_splits(paths, SPLITS, encoding)
    expect(all((tokens[split].ids < vocab_size).all() for split in SPLITS), "--data has token "
           f"ids of {vocab_size} and up, for which the model has no embeddings; remove them")
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


# --------------------------------------------------------------------------------------------------
# Windows and prompts

def window_batch(tokens, n, block_size, ahead, seed, step, device="cpu", mine=slice(None)):
    """The n windows of a step, block_size tokens and the `ahead` after them, and of these windows
    the slice `mine`: ids int64, loss_mask bool, documents int64 (one number per document; None if
    no window has two), each [windows, block_size + ahead], and the states of all but the last of
    the tokens, bfloat16 [windows, block_size + ahead - 1, C], or None. Steps 0, 1, ... pass over
    the tokens again and again, each time in another order. Raises InputError for too few tokens."""
    N = len(tokens.ids)
    length = block_size + ahead
    expect(N >= length, f"expected {length} tokens or more in each split, got {N}; give more text, "
           "or a smaller --block-size")
    numbers = np.arange(step * n, step * n + n)[mine]
    starts = [window_starts(N, block_size, seed, i // (N // block_size))[i % (N // block_size)]
              for i in numbers.tolist()]
    laps, columns = np.divmod(np.array(starts)[:, None] + np.arange(length), N)
    documents = np.searchsorted(tokens.starts, columns, side="right") + laps * len(tokens.starts)
    documents -= documents[:, :1]
    crosses = documents.any()
    arrays = tokens.ids[columns].astype(np.int64), tokens.loss_mask[columns], documents
    ids, loss_mask, documents = (to_device(array, device) for array in arrays)
    states = None
    if tokens.states is not None:
        states = to_device(tokens.states[columns[:, :-1]], device).view(torch.bfloat16)
    return ids, loss_mask, documents if crosses else None, states


@lru_cache(maxsize=2)  # a step reads one or two
def window_starts(N, block_size, seed, number):
    """Where the windows of pass `number` over N tokens begin, in their order: int64
    [N // block_size]. They follow one another from a random token on, and around the end."""
    rng = np.random.default_rng((seed, number))
    return (rng.integers(N) + block_size * rng.permutation(N // block_size)) % N


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
