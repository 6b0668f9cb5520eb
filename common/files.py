"""Reads, writes and identifies files."""

import hashlib
import json
import os
from pathlib import Path

from model import InputError, expect

SAMPLES = 64   # how many samples of a file are hashed
SAMPLE = 4096  # bytes per sample


def atomic_write(path, write):
    """Calls write(temporary path), then renames the file: readers see the old or the new one."""
    tmp = f"{path}.tmp{os.getpid()}"
    try:
        write(tmp)
        os.chmod(tmp, 0o644)  # safetensors makes files that only their owner can read
        os.replace(tmp, path)
    finally:
        Path(tmp).unlink(missing_ok=True)


def read_json(path):
    """The object in a JSON file. Raises InputError if it is missing or malformed."""
    try:
        value = json.loads(Path(path).read_bytes())  # bytes: a byte order mark is skipped
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a checkpoint folder with it") from None
    except (OSError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from None
    expect(isinstance(value, dict), f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def content_hash(file):
    """A hash of all bytes of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def files_hash(files):
    """16 hex digits that identify files by their sizes and samples, whatever their names."""
    sha = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        sha.update(f"{size} ".encode())
        with file.open("rb") as opened:
            for i in range(SAMPLES):
                opened.seek(max(size - SAMPLE, 0) * i // (SAMPLES - 1))
                sha.update(opened.read(SAMPLE))
    return sha.hexdigest()[:16]
