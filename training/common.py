"""Files, the learning rate's schedule and signals, for training."""

import contextlib
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from safetensors import SafetensorError

from model import InputError, atomic_write


@contextlib.contextmanager
def saving(what, advice):
    """Around writing files. Raises InputError, with the reason, where they cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} ({reason}); {advice}") from None


def save_text(path, text):
    atomic_write(path, lambda tmp: Path(tmp).write_text(text))


def save_file(path, value):
    def write(tmp):
        with open(tmp, "wb") as file:  # where it opens a file itself, torch hides why that fails
            torch.save(value, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, write)


def load_file(path, keys, mmap=False):
    """Reads a dict with these keys, as `save_file` wrote it. mmap: its tensors stay in the file."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        return {key: value[key] for key in keys}
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = repr(error).split("\\n")[0]
        raise InputError(f"{path}: damaged, or not of this version ({reason})") from None


def set_learning_rate(optimizer, peak, step, steps):
    """Rises linearly over the first 2% of the steps, falls linearly to zero over the last 40%."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / (0.02 * steps), (steps - step) / (0.4 * steps))


def progress(start, steps, tokens_per_step, log):
    """A function that logs a step and a line about it, with tokens per second and time left."""
    began = time.perf_counter()

    def show(step, line):
        speed = (step - start) / (time.perf_counter() - began)  # steps per second
        left = timedelta(seconds=int(max(steps - step, 0) / speed))
        log(f"{line}  {speed * tokens_per_step:.0f} tokens/s  {left} left")
    return show


@contextlib.contextmanager
def noted_signals():
    """Inside, Ctrl-C and SIGTERM only add their numbers to a list. A second Ctrl-C interrupts; a
    second SIGTERM does not, since a parent process may have sent it too."""
    received = []

    def note(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
