"""A model's files: the json parts, from its folder or its GGUF file, and those of its weights."""

from pathlib import Path

from hf.families import parse_config, text_config
from hf.paths import find_model, gguf_parts, is_gguf
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


def weight_files(path):
    """The files of a folder's weights, safetensors or else .bin; a GGUF file and its parts."""
    if is_gguf(path):
        return gguf_parts(path)
    for single in (path / "model.safetensors", path / "pytorch_model.bin"):
        if single.is_file():
            return [single]
        index = single.with_name(f"{single.name}.index.json")
        if index.is_file():
            shards = read_json(index).get("weight_map")
            expect(isinstance(shards, dict), f"{index}: expected a weight_map")
            return sorted({index.parent / Path(str(shard)).name for shard in shards.values()})
    raise InputError(f"{path}: no such file as model.safetensors or pytorch_model.bin; fetch it")
