"""Models by their name on Hugging Face, "org/repo" or "org/repo:file": from the cache on this disk
that huggingface_hub keeps, else downloaded to it."""

import re
import shutil
from collections import defaultdict
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from model import InputError, check_memory, expect, read_json, warn

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
    folder = cached_folder(repo)
    path = folder and cached_model(repo, folder, choice)
    if path and (choice or path == folder and all(is_known(folder, part) for part in SETTINGS)):
        return path
    try:
        return download(repo, choice)
    except InputError:
        raise
    except Exception as error:  # huggingface_hub and its connection raise many kinds
        reason = explain(repo, error)
    expect(path, f"{name}: no such folder or file, here or whole in the cache; {reason}")
    warn(f"{name}: taken from the cache as it is; {reason}")
    return path


def cached_folder(repo):
    """The folder of the newest version that the cache knows, or None."""
    home = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    ref = home / "refs" / "main"
    folder = home / "snapshots" / ref.read_text().strip() if ref.is_file() else home
    return folder if ref.is_file() and folder.is_dir() else None


def cached_model(repo, folder, choice):
    """The Path of a model of which no file is missing, or None."""
    files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    try:
        names = choose(repo, files, choice)
        needed = {"config.json"}.union(*(read_json(folder / name)["weight_map"].values()
                                         for name in names if name.endswith(".index.json")))
    except (AttributeError, InputError, KeyError, TypeError):
        return None
    if names[0].endswith(".gguf"):
        count = re.search(SHARD, names[0])
        return folder / names[0] if len(names) == int(count[1] if count else 1) else None
    return folder if needed <= {*names} and {*TOKENIZERS} & {*names} else None


def is_known(folder, part):
    """Whether the cache has a file, or knows that the repository has not."""
    absent = folder.parents[1] / ".no_exist" / folder.name / part
    return (folder / part).exists() or absent.exists()


def download(repo, choice):
    """Fetches what is read of a repository -> the Path of the folder or of the GGUF file."""
    info = huggingface_hub.model_info(repo, files_metadata=True, timeout=20)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    names = choose(repo, sizes, choice)
    folder = cached_folder(repo)
    missing = [name for name in names if not (folder and (folder / name).exists())]
    if missing or folder.name != info.sha:
        home = Path(constants.HF_HUB_CACHE)
        home.mkdir(parents=True, exist_ok=True)
        check_memory(f"{repo}: its files take", sum(map(sizes.get, missing)),
                     shutil.disk_usage(home).free, home,
                     "make room, or set HF_HOME to a folder on another disk")
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=names))
    return folder / names[0] if names[0].endswith(".gguf") else folder


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
    kinds = "" if choice else "neither model.safetensors nor pytorch_model.bin, and "
    expect(models, f"{repo}: has {kinds}no GGUF file")
    labels = {name: re.search(r"(UD-)?[^-./]*$", name).group() for name in models}  # types: Q4_K_M
    named = re.sub(rf"({SHARD})?\.gguf$", "", choice).lower()
    found = [name for name, label in labels.items() if not choice
             or named in (name.lower(), Path(name).name.lower(), label.lower())]
    if len({*labels.values()}) < len(labels):
        labels = dict.fromkeys(labels)
    listed = " ".join(label or name for name, label in labels.items())
    expect(len(found) == 1, f"{repo}: give one of its GGUF files, as {repo}:NAME: {listed}")
    return models[found[0]]


def explain(repo, error):
    """Why a repository cannot be had, in one line."""
    if isinstance(error, errors.GatedRepoError):
        return (f"it is gated: accept its terms on https://huggingface.co/{repo}, then run hf auth "
                "login")
    if isinstance(error, errors.RepositoryNotFoundError):
        return "Hugging Face has no public repository of that name: check it, or run hf auth login"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return f"it could not be fetched from Hugging Face ({reason})"
