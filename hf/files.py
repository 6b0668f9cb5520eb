"""Reads a model's JSON files from its folder, or their equivalents from a GGUF file."""

from contextlib import contextmanager

from common.files import read_json
from hf.families import family_of, text_config
from hf.paths import find_model, is_gguf
from model import InputError, expect


def part_file(path, name):
    """Where a model's JSON file `name` is read from: the folder's file, or the GGUF file."""
    return path if is_gguf(path) else path / name


def read_part(path, name):
    """The contents of JSON file `name` in a model's folder, or their equivalent in a GGUF file."""
    if not is_gguf(path):
        return read_json(path / name)
    from hf import gguf  # takes long to import
    return gguf.read_part(path, name)


def optional_part(path, name):
    """Like `read_part`, but {} if the file does not exist."""
    path = find_model(path)
    return read_part(path, name) if part_file(path, name).exists() else {}


def read_family(path):
    """The `Family` of a folder or GGUF file. Raises InputError if it is broken or unsupported."""
    path = find_model(path)
    file = part_file(path, "config.json")
    expect(path.exists(), f"{path}: not found; expected a Hugging Face folder or a GGUF file")
    expect(file.exists() or not (path / "adapter_config.json").exists(), f"{path}: is a LoRA "
           "adapter, not a model; merge it into its model, with peft's merge_and_unload")
    raw = text_config(read_part(path, "config.json"))
    with named_errors(file):
        return family_of(raw)


@contextmanager
def named_errors(file):
    """Turns errors of the values of a JSON file into InputErrors that name it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = "" if isinstance(error, InputError) else "a value is missing or has the wrong type: "
        raise InputError(f"{file}: {what}{error}") from None
