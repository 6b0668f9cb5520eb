"""What training needs beside the training: files, the schedule, signals."""

import contextlib
import signal
import time
from datetime import timedelta

import torch
from safetensors import SafetensorError

from model import InputError, atomic_write


@contextlib.contextmanager
def saving(what, advice):
    """Around writing files: InputError with the reason where they cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} ({reason}); {advice}") from None


def save_file(path, value, advice):
    def write(tmp):
        with open(tmp, "wb") as file:  # torch's own file does not say why it fails
            torch.save(value, file)
    with saving(f"{path}: cannot be written", advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, write)


def load_file(path, keys, mmap=False):
    """The dict with these keys that `save_file` wrote. mmap: its tensors stay in the file."""
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
    """A function that logs what the caller says of a step, tokens per second, the time left."""
    began = time.perf_counter()

    def show(step, line):
        speed = (step - start) / (time.perf_counter() - began)  # steps per second
        left = timedelta(seconds=int(max(steps - step, 0) / speed))
        log(f"{line}  {speed * tokens_per_step:.0f} tokens/s  {left} left")
    return show


@contextlib.contextmanager
def noted_signals():
    """Inside, Ctrl-C and SIGTERM only add their number to the list that this gives. A second Ctrl-C
    interrupts; a second SIGTERM does not, as a parent process may have sent it too."""
    came = []

    def note(number, frame):
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
