"""Loads draft heads of any format, with all checks of their files, and their hash."""

import json
import math
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError

from clover import BINS, CloverConfig, CloverHeads, norm_hash, sizes_of
from common.files import check_content, files_hash
from common.values import one_line
from hf.paths import find_model, is_gguf
from hf.published_heads import has_mtp, load_mtp, load_published
from model import InputError, expect

SHIPPED = Path(__file__).parent.parent / "demo"  # heads for some models, a folder each


def default_heads(name, model):
    """The folder of the draft heads to use for a loaded model if no others are chosen: clover in
    the folder `name`, else those in demo/ that were trained on this model, in whatever format and
    from wherever it was loaded, else the model's own file, if it holds MTP heads; None without. A
    folder with one of its two files counts: reading it raises an error that names the other."""
    path = Path(name)
    own = (path.parent if is_gguf(path) else path) / "clover"
    if any((own / file).exists() for file in ("heads.json", "heads.safetensors")):
        return own
    for record in sorted(SHIPPED.glob("*/heads.json")):
        base = read_record(record.parent)[1]["base"]
        if base.get("norm") == norm_hash(model) and base["sizes"] == sizes_of(model):
            return record.parent
    path = find_model(name)
    return path if has_mtp(path) else None


def load_heads(path, model, tokenizer="", packed=True):
    """The draft heads in a folder or a Hugging Face repository, with their `hash`: `CloverHeads`,
    those of `load_published`, or the MTP heads in a model's folder or GGUF file. packed: as in
    `CloverHeads.from_pretrained`. Raises InputError for a missing or broken folder, and for heads
    of another model or tokenizer."""
    path = find_model(path)
    if not (path / "heads.json").exists():
        if has_mtp(path):
            return load_mtp(path, model)
        if (path / "config.json").exists():
            return load_published(path, model)
    read_record(path)
    try:
        check_content(path / "heads.safetensors")
        heads = CloverHeads.from_pretrained(path, model, tokenizer, packed)
    except (OSError, SafetensorError, RuntimeError, TypeError) as error:
        raise InputError(
            f"{path}/heads.safetensors: missing, truncated, or not the weights of these heads "
            f"({one_line(error)}); fetch or train them again") from None
    heads.hash = files_hash([Path(path, "heads.safetensors")])
    return heads


def read_record(path):
    """heads.json of a folder -> (`CloverConfig`, the record). Raises InputError if it is missing or
    malformed."""
    path = Path(path)
    expect(path.is_dir(), f"{path}: no such folder; expected heads from train_heads.py")
    types = {field.name: type(field.default) for field in fields(CloverConfig)}
    try:
        record = json.loads((path / "heads.json").read_bytes())
        config = CloverConfig(**record["config"]).check()
        modes = ("greedy", "sampled") if "acceptance" in record else ()
        tables = [record["acceptance"][mode] for mode in modes]  # [accepted, proposed] by bin
        valid = ({name: type(value) for name, value in record["config"].items()} == types
                 and {"sizes", "tokenizer", "embedding_scale"} <= set(record["base"])
                 and all(len(rows) == BINS and all(0 <= right <= n < math.inf for right, n in rows)
                         for rows in tables))
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):
        valid = False
    expect(valid, f"{path}/heads.json: missing, or not a record that this version of "
           "train_heads.py writes; fetch or train these heads again")
    return config, record
