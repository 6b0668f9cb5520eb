"""Reads the json parts of a model from its folder, or from its GGUF file."""

from hf.families import parse_config, text_config
from hf.paths import find_model, is_gguf
from model import InputError, expect, read_json


def part_file(path, name):
    """The file that holds a json part of a model."""
    return path if is_gguf(path) else path / name


def read_part(path, name):
    """The object in a json file of a model's folder, or its counterpart in a GGUF file."""
    if not is_gguf(path):
        return read_json(path / name)
    try:
        from hf import gguf
    except ModuleNotFoundError as error:
        expect(error.name != "gguf", f"{path}: GGUF files need the gguf package; pip install gguf")
        raise
    return gguf.read_part(path, name)


def optional_part(path, name):
    """As `read_part`; {} if the file does not exist."""
    path = find_model(path)
    return read_part(path, name) if part_file(path, name).exists() else {}


def read_config(path):
    """The GPTConfig of a folder or a GGUF file. InputError for a broken or unsupported one."""
    path = find_model(path)
    file = part_file(path, "config.json")
    expect(path.exists(), f"{path}: no such folder or file; expected a Hugging Face folder or a "
           "GGUF file")
    raw = text_config(read_part(path, "config.json"))
    try:
        return parse_config(raw)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        what = "" if isinstance(error, InputError) else "a value has the wrong type: "
        raise InputError(f"{file}: {what}{error}") from None
