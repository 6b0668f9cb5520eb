"""Loads draft heads with all checks of their record, and their hash."""

import math
from dataclasses import fields
from pathlib import Path

import clover
from clover import BINS, CloverConfig, CloverHeads
from common.files import files_hash
from model import expect


def load_heads(path, model, tokenizer=""):
    """`CloverHeads.from_pretrained`, but checks the record's types too and sets `hash`."""
    read_record(path)
    heads = CloverHeads.from_pretrained(path, model, tokenizer)
    heads.hash = files_hash([Path(path, "heads.safetensors")])
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
