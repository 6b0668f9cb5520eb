"""What a training run needs beside its data: config, files, schedule, progress, signals."""

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.files import atomic_write, read_json
from hf.paths import is_repository
from model import InputError, expect
from training.flags import FIXED, SELF, STORED, RunConfig

STATE_FILE = "train_state.pt"  # weights, optimizer, step
RUN_FILE = "run.json"          # RunConfig


def run_config(args, out):
    """The `RunConfig` from the flags; with --resume, flags not set default to the run in `out`.
    Raises InputError if this would overwrite that run or change a flag in FIXED."""
    flags = {name: value for name, value in vars(args).items() if name in STORED}
    if "model" in flags and not is_repository(args.model):
        flags["model"] = os.path.abspath(args.model)  # so that --resume works in any directory
    if flags.get("data") == [SELF] and (args.evaluate or args.resume):
        flags["data"] = [os.path.abspath(out / SELF)]  # the text that the run wrote
    if args.evaluate or not args.resume:
        expect(args.evaluate or not (out / STATE_FILE).exists(), f"{out} holds a run already; "
               "add --resume to continue it, or use another --out")
        return RunConfig(**flags)
    try:
        saved = read_json(out / RUN_FILE)
        expect(set(saved) == set(STORED), f"{RUN_FILE} has other flags")
    except InputError as error:
        raise InputError(f"{out}: --resume needs a run that this version saved there "
                         f"({error})") from None
    differ = "; ".join(f"{flag(name)} {saved[name]}, not {flags[name]}" for name in FIXED
                       if flags.get(name, saved[name]) != saved[name])
    expect(not differ, f"{out} holds a run with {differ}, which --resume cannot change")
    return replace(RunConfig(**saved), **flags)


def flag(name):
    """The flag of a field of `RunConfig`, without its dashes."""
    return name.replace("n_draft", "draft_heads").replace("_", "-")


@contextlib.contextmanager
def saving(what, advice):
    """Turns a failed write in its block into an InputError: "{what} (reason); {advice}"."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} ({reason}); {advice}") from None


def save_lines(path, values):
    text = "".join(json.dumps(value) + "\n" for value in values)
    atomic_write(path, lambda tmp: Path(tmp).write_text(text))


def save_file(path, value):
    def write(tmp):
        with open(tmp, "wb") as file:  # if torch opens the file, it hides why that failed
            torch.save(value, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, write)


def load_file(path, keys, mmap=False):
    """Reads these keys of a dict written by `save_file`. mmap: memory-map the tensors."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        return {key: value[key] for key in keys}
    except Exception as error:  # torch.load raises many types for a damaged file
        reason = repr(error).split("\\n")[0]
        raise InputError(f"{path}: damaged, or not of this version ({reason})") from None


def set_learning_rate(optimizer, peak, step, steps):
    """Linear warm-up over the first 2% of the steps, linear decay to zero over the last 40%."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / (0.02 * steps), (steps - step) / (0.4 * steps))


def progress(start, steps, tokens_per_step, log):
    """Returns show(step, line), which logs the line with tokens per second and time left."""
    began = time.perf_counter()

    def show(step, line):
        speed = (step - start) / (time.perf_counter() - began)  # steps per second
        left = timedelta(seconds=int(max(steps - step, 0) / speed))
        log(f"{line}  {speed * tokens_per_step:.0f} tokens/s  {left} left")
    return show


@contextlib.contextmanager
def noted_signals():
    """Yields a list to which Ctrl-C and SIGTERM add their numbers instead of ending the process. A
    second Ctrl-C interrupts. Later SIGTERMs do not: a parent process may repeat the first."""
    received = []

    def note(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
