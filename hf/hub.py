"""Downloads models and draft heads by their name on Hugging Face, "org/repo", or a GGUF file as
"org/repo:TYPE"."""

import re
from functools import cache
from glob import glob
from pathlib import Path

from huggingface_hub import list_repo_files, snapshot_download

from common.values import one_line
from model import InputError, expect

PARTS = ["config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt",
         "added_tokens.json", "special_tokens_map.json", "chat_template.*",
         "additional_chat_templates/*.jinja", "adapter_config.json",
         "heads.json", "heads.safetensors"]
SAFETENSORS = ["model.safetensors", "model-*.safetensors", "model.safetensors-*.safetensors",
               "model.safetensors.index.json"]
NO_MODEL = "mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"  # in names of GGUF files
BIN = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]


@cache
def fetch(name):
    """The Path of a model's folder or GGUF file, or of draft heads' folder, without a connection
    from huggingface_hub's cache. Raises InputError if it is not there either, or if several GGUF
    files have this TYPE."""
    repo, _, kind = name.partition(":")
    try:
        return fetch_gguf(repo, kind) if kind else fetch_folder(repo)
    except InputError:
        raise
    except Exception as error:  # huggingface_hub and its connection raise many types
        reason = one_line(f"{type(error).__name__}: {error}")
        raise InputError(f"{name}: no such folder or file, and downloading "
                         f"https://huggingface.co/{repo} failed ({reason})") from error


def fetch_folder(repo):
    folder = download(repo, [*PARTS, *SAFETENSORS])
    if not any(folder.glob("*.safetensors")):
        download(repo, BIN)
    names = "config.json", "adapter_config.json", "heads.json"
    is_folder = any((folder / name).exists() for name in names)
    return folder if is_folder else fetch_gguf(repo, "")


def fetch_gguf(repo, kind):
    """The Path of the GGUF model whose name is or ends in `kind`; downloads all its parts."""
    stem = lambda file: re.sub(r"(-\d+-of-\d+)?\.gguf$", "", file)
    try:
        found = list_repo_files(repo)
    except Exception:  # no connection; if nothing is cached, the next line raises the reason
        found = glob("**/*.gguf", root_dir=download(repo, []), recursive=True)  # follows links
    files = sorted(file for file in found if file.endswith(".gguf")
                   and not any(part in file.rpartition("/")[2] for part in NO_MODEL))
    ending = re.compile(rf"(.*[-./])?{re.escape(stem(kind))}", re.IGNORECASE)
    parts = [file for file in files if not kind or ending.fullmatch(stem(file))]
    names = " ".join(sorted({*map(stem, files)})) or "it has none"
    expect(len({*map(stem, parts)}) == 1, f"{repo}: pick a GGUF file, as {repo}:NAME: {names}")
    return download(repo, parts) / parts[0]


def download(repo, patterns):
    """The folder of a repository's files of these patterns; without a connection, of those in the
    cache."""
    return Path(snapshot_download(repo, allow_patterns=patterns))
