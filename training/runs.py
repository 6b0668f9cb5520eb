"""A training run and what it needs beside its data: config, files, progress, signals."""

import contextlib
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from safetensors import SafetensorError

from backends import cpu
from common.files import read_json, save_lines
from common.values import warn
from hf.paths import is_repository
from model import InputError, check, expect, replace_file
from tools.load import load_model
from train_heads import Trainer
from training.flags import FIXED, SELF, STORED, TRAINING, RunConfig, flag_of

STATE_FILE = "train_state.pt"  # weights, optimizer, step
RUN_FILE = "run.json"          # RunConfig
SAVE_EVERY = 180.0             # seconds
STANDARD_LIBRARY = "the Python standard library's source"  # in heads.json, without --data


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
        expect(args.evaluate or (out / RUN_FILE).exists()
               or not (out / "heads.safetensors").exists(),
               f"{out} holds heads that no run there wrote; use another --out")
        return RunConfig(**flags)
    try:
        saved = read_json(out / RUN_FILE)
        expect(set(saved) == set(STORED), f"{RUN_FILE} has other flags")
    except InputError as error:
        raise InputError(f"{out}: --resume needs a run that this version saved there "
                         f"({error})") from None
    differ = "; ".join(f"{flag_of(name)[2:]} {saved[name]}, not {flags[name]}" for name in FIXED
                       if flags.get(name, saved[name]) != saved[name])
    expect(not differ, f"{out} holds a run with {differ}, which --resume cannot change")
    return replace(RunConfig(**saved), **flags)


def load_frozen(config):
    """The model that heads are trained on, and its tokenizer: on a GPU plain and in bfloat16, also
    faster to write many texts together; on a CPU packed, which is faster and takes less memory."""
    if config.device.startswith("cuda"):
        return load_model(config, packed=False, dtype=torch.bfloat16)
    return load_model(config)


@contextlib.contextmanager
def saving(what, advice):
    """Turns a failed write in its block into an InputError: "{what} (reason); {advice}"."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} ({reason}); {advice}") from None


def save_file(path, value):
    def write(tmp):
        with open(tmp, "wb") as file:  # if torch opens the file, it hides why that failed
            try:
                torch.save(value, file)
            except RuntimeError as error:  # raised by torch while it handles the file's OSError
                raise error.__context__ or error from None
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)


def load_file(path, keys, mmap=False):
    """Reads these keys of a dict written by `save_file`. mmap: memory-map the tensors."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        return {key: value[key] for key in keys}
    except Exception as error:  # torch.load raises many types for a damaged file
        reason = repr(error).split("\\n")[0]
        raise InputError(f"{path}: damaged, or not of this version ({reason})") from None


def progress(start, steps, tokens_per_step, log, every=0):
    """Returns show(step, line), which logs the line with tokens per second and time left, unless
    it is not the last one and `every` seconds have not passed since the line before."""
    began = shown = time.perf_counter()

    def show(step, line):
        nonlocal shown
        if step < steps and time.perf_counter() < shown + every:
            return
        shown = time.perf_counter()
        speed = max(step - start, 1) / (time.perf_counter() - began)  # steps per second
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


class Run:
    """A training run that writes to folder `out`. tokenizer: its hash. key: the key of its
    tokens. state: the saved state to resume from."""

    def __init__(self, config, out, heads, tokenizer, key, group, state=None):
        self.config = config
        self.out = out
        self.heads = heads
        self.tokenizer = tokenizer
        self.key = key
        self.group = group
        self.trainer = Trainer(heads, config.steps, config.lr, product_dtype(config, group),
                               group.all_reduce)
        self.log = []  # the lines of log.jsonl
        self.last_save = time.monotonic()
        if state:
            self.log = state["log"]
            self.trainer.step = state["step"]
            heads.set_vocabulary(state["heads"].get("vocabulary", []))
            heads.load_state_dict(state["heads"])
            self.trainer.optimizer.load_state_dict(state["optimizer"])

    @property
    def step(self):
        return self.trainer.step

    def train(self, windows):
        """Trains on windows(step) until the last step, Ctrl-C or SIGTERM. Returns the exit code."""
        config = self.config
        show = progress(self.step, config.steps, config.tokens_per_step, self.group.print)
        with noted_signals() as signals:
            for loss, accuracies in self.trainer.train(windows):
                if self.trainer.is_shown():
                    self.check_finite(loss)
                    self.report(show, loss.item(), accuracies.tolist())
                if self.step == config.steps:
                    break
                if time.monotonic() > self.last_save + SAVE_EVERY:
                    self.save()
                # several processes check every tenth step, to sync less
                checks = self.group.size == 1 or self.step % 10 == 0
                if checks and self.group.any(bool(signals)):
                    # if another process got the signal, assume SIGTERM
                    return 128 + (signals or [signal.SIGTERM])[0]
        return 0

    def report(self, show, loss, accuracies):
        tokens = self.step * self.config.tokens_per_step
        self.log.append(dict(step=self.step, tokens=tokens, loss=loss, accuracy=accuracies,
                             lr=self.trainer.optimizer.param_groups[0]["lr"]))
        show(self.step, self.trainer.describe(loss, accuracies))

    def save(self):
        """Writes the heads, then the state, so that the previous state survives any failure."""
        self.check_finite(*self.heads.parameters())
        self.last_save = time.monotonic()
        if self.group.rank:
            return
        config, heads = self.config, self.heads
        path = self.out / STATE_FILE
        training = dict(steps=self.step, tokens=self.step * config.tokens_per_step,
                        init=config.init and Path(config.init).name,
                        **config.values_of(TRAINING), **data_record(config.data, self.key))
        state = dict(identity=[heads.model.hash, self.key], step=self.step, log=self.log,
                     heads=heads.state_dict(), optimizer=self.trainer.optimizer.state_dict())
        advice = "make room and --resume" if path.exists() else "make room and start it again"
        with saving(f"{self.out}: step {self.step} cannot be saved", advice):
            self.out.mkdir(parents=True, exist_ok=True)
            save_lines(self.out / RUN_FILE, [config.values_of(STORED)])  # the heads are this run's
            heads.save_pretrained(self.out, self.tokenizer, torch.bfloat16, training=training)
            save_lines(self.out / "log.jsonl", self.log)
            save_file(path, state)

    def check_finite(self, *tensors):
        finite = all(x.isfinite().all() for x in tensors)
        expect(finite, f"training diverged at step {self.step}: a value is not finite; "
               f"{self.out} keeps the last good state; start again with a lower --lr")


def product_dtype(config, group):
    """The dtype of matrix products: --dtype, or else bfloat16 where it is faster than float32. On a
    CPU where it is not, prints a line."""
    if config.dtype:
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    if config.device.startswith("cuda") or cpu.torch_multiplies_bfloat16():
        return torch.bfloat16
    if group.rank == 0:
        warn(cpu.SLOW_BFLOAT16)
    return torch.float32


def data_record(paths, key):
    """What heads.json records about --data: names without folders, since it may be published."""
    return dict(data=[Path(path).name for path in paths or ()] or STANDARD_LIBRARY, key=key)


def pick_block_size(config, heads):
    """--block-size; default 256, or less if the model's context is too short for such windows."""
    longest = heads.model.config.block_size - heads.config.n_draft - 1
    size = config.block_size or min(256, longest)
    check("block size", size, 1, longest, whole=True)
    return size
