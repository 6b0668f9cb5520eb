"""Finds models by their name on Hugging Face, "org/repo" or "org/repo:file", in huggingface_hub's
cache, or downloads them."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from model import InputError, expect, read_json, warn

SHARD = r"-\d+-of-(\d+)"
SETTINGS = "generation_config.json", "tokenizer_config.json"  # optional, but change the output
TOKENIZERS = "tokenizer.json", "merges.txt", "tokenizer.model"  # one of these is needed
PARTS = ("config.json", *SETTINGS, *TOKENIZERS, "vocab.json", "added_tokens.json",
         "special_tokens_map.json", "chat_template.jinja", "chat_template.json")


@cache
def fetch(name):
    """The Path of a model's folder or GGUF file. Raises InputError if the name is ambiguous, or
    the model is not in the cache and cannot be downloaded."""
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
    except Exception as error:  # huggingface_hub and its connection raise many types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    expect(path, f"{name}: no such folder or file, not complete in the cache, and downloading "
           f"https://huggingface.co/{repo} failed ({reason})")
    warn(f"{name}: taken from the cache without checking for updates ({reason})")
    return path


def model_path(folder, names):
    return Path(folder, names[0] if names[0].endswith(".gguf") else "")


def cached(repo, choice):
    """The Path of a model if all files it needs are in the cache, else None."""
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
    is_complete = needed <= {*names} and {*TOKENIZERS} & {*names}
    return path if path != folder or is_complete else None


def choose(repo, files, choice):
    """Picks the files to download: a folder's, or one GGUF model's. choice: its name or type."""
    parts = [part for part in PARTS if part in files]
    formats = [] if choice else [("model", ".safetensors"), ("pytorch_model", ".bin")]
    for stem, suffix in formats:
        if stem + suffix in files:
            return [*parts, stem + suffix]
        if f"{stem}{suffix}.index.json" in files:
            shards = re.compile(rf"{stem}({SHARD}{suffix}|{suffix}\.index\.json)")
            return [*parts, *filter(shards.fullmatch, files)]
    models = defaultdict(list)  # {name without .gguf: its file, or the parts of a split one}
    for file in sorted(files):
        if file.endswith(".gguf") and not Path(file).name.startswith(("mmproj", "imatrix")):
            models[re.sub(rf"({SHARD})?\.gguf$", "", file)].append(file)
    expect(models, f"{repo}: has no GGUF file" + " and no safetensors or .bin" * (not choice))
    choice_name = re.sub(rf"({SHARD})?\.gguf$", "", choice).lower()
    type_of = lambda name: re.search(r"(ud-)?[^-./]*$", name).group()  # such as q4_k_m
    matches = [parts for name, parts in models.items() if not choice
               or choice_name in (name.lower(), Path(name).name.lower(), type_of(name.lower()))]
    expect(len(matches) == 1, f"{repo}: pick a GGUF file, as {repo}:NAME: {' '.join(models)}")
    count = re.search(SHARD, matches[0][0])
    expect(not count or len(matches[0]) == int(count[1]),
           f"{repo}: lacks some parts of {choice or matches[0][0]}")
    return matches[0]
