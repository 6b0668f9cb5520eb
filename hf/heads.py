"""Loads draft heads of any format, with all checks of their record, and their hash."""

import math
from dataclasses import fields
from pathlib import Path

import clover
from clover import BINS, CloverConfig, CloverHeads
from common.files import files_hash
from hf.paths import is_repository
from hf.published import load_published
from model import expect


def load_heads(path, model, tokenizer=""):
    """The draft heads in a folder or a Hugging Face repository, with their `hash`: `CloverHeads`,
    whose tokenizer and record are checked, or those of `load_published`. Raises InputError."""
    if is_repository(path):
        from hf import hub
        path = hub.fetch(path, is_heads=True)
    path = Path(path)
    if (path / "config.json").exists() and not (path / "heads.json").exists():
        return load_published(path, model)
    read_record(path)
    heads = CloverHeads.from_pretrained(path, model, tokenizer)
    heads.hash = files_hash([path / "heads.safetensors"])
    return heads


def read_record(path):
    """`clover.read_record`, which also checks the types of all values."""
    config, record = clover.read_record(Path(path))
    types = {field.name: type(field.default) for field in fields(CloverConfig)}
    modes = ("greedy", "sampled") if "acceptance" in record else ()
    try:
        tables = [record["acceptance"][mode] for mode in modes]  # [accepted, proposed] by bin
        valid = ({name: type(value) for name, value in record["config"].items()} == types
                 and all(len(rows) == BINS and all(0 <= right <= n < math.inf for right, n in rows)
                         for rows in tables))
    except (KeyError, TypeError, ValueError):
        valid = False
    expect(valid, f"{path}/heads.json: a value is missing or has the wrong type; fetch or train "
           "these heads again")
    return config, record
