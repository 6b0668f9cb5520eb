"""Models by their name on Hugging Face, "org/repo" or "org/repo:file": from the cache on this disk
that huggingface_hub keeps, else downloaded to it."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from model import InputError, expect, read_json, warn

SHARD = r"-\d+-of-(\d+)"  # in names of the files of one model
SETTINGS = "generation_config.json", "tokenizer_config.json"  # which change output
TOKENIZERS = "tokenizer.json", "merges.txt", "tokenizer.model"  # one of these is needed
PARTS = ("config.json", *SETTINGS, *TOKENIZERS, "vocab.json", "added_tokens.json",
         "special_tokens_map.json", "chat_template.jinja", "chat_template.json")


@cache
def fetch(name):
    """The Path of a model's folder or GGUF file. Raises InputError, in one line, where the choice
    is not clear or the repository cannot be had."""
    repo, _, choice = name.partition(":")
    path = cached(repo, choice)
    if path and (choice or all((path / part).exists() for part in SETTINGS)):
        return path
    try:
        listed = huggingface_hub.model_info(repo, timeout=20).siblings
        names = choose(repo, [file.rfilename for file in listed], choice)
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=names)
        return model_path(folder, names)
    except InputError:
        raise
    except Exception as error:  # huggingface_hub and its connection raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    expect(path, f"{name}: no such folder or file, here or whole in the cache, and it cannot be "
           f"fetched from https://huggingface.co/{repo} ({reason})")
    warn(f"{name}: taken from the cache as it is ({reason})")
    return path


def model_path(folder, names):
    return Path(folder, names[0] if names[0].endswith(".gguf") else "")


def cached(repo, choice):
    """The Path of a model of which no file is missing in the cache, or None."""
    home = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    try:
        folder = home / "snapshots" / (home / "refs" / "main").read_text()
        files = [file.relative_to(folder).as_posix() for file in folder.rglob("*")]
        names = choose(repo, files, choice)
        needed = {"config.json"}.union(*(read_json(folder / name)["weight_map"].values()
                                         for name in names if name.endswith(".index.json")))
    except (AttributeError, InputError, KeyError, OSError, TypeError):
        return None
    path = model_path(folder, names)
    is_whole = needed <= {*names} and {*TOKENIZERS} & {*names}
    return path if path != folder or is_whole else None


def choose(repo, files, choice):
    """Those names of a repository's files that are read: of a folder, or of one GGUF model."""
    parts = [part for part in PARTS if part in files]
    for stem, suffix in [] if choice else [("model", ".safetensors"), ("pytorch_model", ".bin")]:
        if stem + suffix in files:
            return [*parts, stem + suffix]
        if f"{stem}{suffix}.index.json" in files:
            shards = re.compile(rf"{stem}({SHARD}{suffix}|{suffix}\.index\.json)")
            return [*parts, *filter(shards.fullmatch, files)]
    models = defaultdict(list)  # {name: its file, or those that it was split into}
    for file in sorted(files):
        if file.endswith(".gguf") and not Path(file).name.startswith(("mmproj", "imatrix")):
            models[re.sub(rf"({SHARD})?\.gguf$", "", file)].append(file)
    expect(models, f"{repo}: has no GGUF file" + " and no weights of a folder" * (not choice))
    wanted = re.sub(rf"({SHARD})?\.gguf$", "", choice).lower()
    kind = lambda name: re.search(r"(ud-)?[^-./]*$", name).group()  # such as q4_k_m
    found = [parts for name, parts in models.items() if not choice
             or wanted in (name.lower(), Path(name).name.lower(), kind(name.lower()))]
    expect(len(found) == 1, f"{repo}: give one of its GGUF files, as {repo}:NAME: "
           f"{' '.join(models)}")
    count = re.search(SHARD, found[0][0])
    expect(not count or len(found[0]) == int(count[1]), f"{repo}: has not all parts of {choice}")
    return found[0]
