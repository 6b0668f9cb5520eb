"""What training.base and train_heads.py share."""

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from safetensors import SafetensorError

from clover import PRESETS, preset
from model import InputError, atomic_write, check

FLAGS = dict(n_draft="draft_heads")  # switches of heads whose flags have another name


def head_config(args):
    switches = vars(args).keys() & vars(PRESETS["clover"]).keys()
    return preset(args.preset, **{name: getattr(args, name) for name in switches})


def check_sizes(args, heads):
    """Checks what depends on the model -> --block-size, by default 256 or what the context holds
    with a token after the block for each head to guess."""
    config = heads.model.config
    if args.draft_vocabulary not in (None, "auto"):
        check("draft vocabulary", args.draft_vocabulary, 0, config.vocab_size, whole=True)
    longest = config.block_size - heads.config.n_draft - 1
    size = args.block_size or min(256, longest)
    check("block size", size, 1, longest, whole=True)
    return size


def parse_run(parser, argv, keys, default_out):
    """The flags of a run. With --resume those that are not given are the saved ones, and `state` is
    `load_state`'s; default_out: these flags -> --out where it is not given."""
    args = parser.parse_args(argv)
    out = args.out or default_out(args)
    state = None if args.evaluate else load_state(Path(out), args.resume, keys)
    if state:
        saved = argparse.Namespace(**state["settings"] | state["flags"])
        args = parser.parse_args(argv, saved)  # which sets what is given, and what is not there yet
    args.out = out
    args.state = state
    return args


def path_flags(args):
    """--model and --data as they are saved, for --resume from anywhere."""
    paths = dict(data=args.data and [os.path.abspath(path) for path in args.data])
    return paths | (dict(model=os.path.abspath(args.model)) if "model" in args else {})


def load_state(out, resume, keys):
    """The training state in a run's folder, a dict with these keys; None for a new run."""
    path = out / "train_state.pt"
    if not resume and path.exists():
        raise InputError(f"{out} holds a run already; --resume goes on with it, another --out "
                         "starts a new one")
    if not resume:
        return None
    if not path.exists():
        raise InputError(f"{path}: no such file; --resume needs a run that was saved there")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if set(state) != set(keys):
            raise ValueError(f"it should have {', '.join(keys)}")
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path}: not a training state of this command and version ({reason}); "
                         "start anew in another --out") from None
    return state


def check_resumed(out, steps, state, settings):
    """Refuses to go on with a run of other settings (a dict), or of more steps than are wanted."""
    saved = state["settings"]
    differ = [f"{FLAGS.get(name, name).replace('_', '-')} {saved.get(name)}, not {value}"
              for name, value in settings.items() if saved.get(name) != value]
    if differ:
        raise InputError(f"{out} holds a run with {'; '.join(differ)}: --resume goes on with the "
                         "same flags, model and data; leave out what differs, or choose another "
                         "--out")
    if state["step"] > steps:
        raise InputError(f"{out} holds a run that is at step {state['step']} already; --steps "
                         f"{steps} is less: choose more steps or another --out")


@contextlib.contextmanager
def saving(what, advice):
    """Around writing files. Raises InputError, with the reason, where they cannot be written.
    what: such as "OUT: step 9 cannot be saved"."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # these raise nothing narrower
        cause = error
        while cause and not isinstance(cause, OSError):  # torch hides it
            cause = cause.__context__
        reason = (cause and cause.strerror) or str(error).split("\n")[0]
        raise InputError(f"{what} ({reason}); {advice}") from None


def save_run(out, state, save_pretrained):
    """Writes a run's training state into its folder, then calls save_pretrained(). Where a run's
    first state cannot be saved, nothing is left that the same command would not start over."""
    def write(tmp):
        with open(tmp, "wb") as file:  # torch's own file does not say why it fails
            torch.save(state, file)

    path = out / "train_state.pt"
    first = not path.exists()
    advice = ("nothing is kept: make room and start it again" if first else
              "what was saved last is intact: make room and --resume")
    try:
        with saving(f"{out}: step {state['step']} cannot be saved", advice):
            atomic_write(path, write)
            save_pretrained()
    except InputError:
        if first:
            path.unlink(missing_ok=True)
        raise


def set_learning_rate(optimizer, peak, step, steps):
    """Rises linearly over the first 2% of the steps, falls linearly to zero over the last 40%."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / (0.02 * steps), (steps - step) / (0.4 * steps))


def progress(start, steps, tokens_per_step):
    """A function that prints a step, what the caller measured, tokens per second, the time left."""
    began = time.perf_counter()

    def show(step, measured):
        speed = (step - start) / (time.perf_counter() - began)  # steps per second
        left = int((steps - step) / speed)
        print(f"step {step}/{steps}  {measured}  {speed * tokens_per_step:.0f} tokens/s  "
              f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left", flush=True)
    return show


class Log:
    """A file of json lines. A resumed run drops those after the step that it resumes from."""

    def __init__(self, path, step):
        self.path = path
        with self.saving():
            lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
            kept = [line for line in lines
                    if line.endswith("}\n") and json.loads(line).get("step", step + 1) <= step]
            atomic_write(path, lambda tmp: Path(tmp).write_text("".join(kept)))

    def add(self, **values):
        with self.saving(), open(self.path, "a") as file:
            file.write(json.dumps(values) + "\n")

    def saving(self):
        return saving(f"{self.path}: cannot be written", "make room and --resume")


class Signals:
    """Inside `with Signals() as signals`, Ctrl-C and SIGTERM only set `signals.came`, to their
    number. A second Ctrl-C interrupts; a second SIGTERM does not, as a parent process may have sent
    it too."""

    def __enter__(self):
        self.came = 0
        numbers = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def note(self, number, frame):
        if self.came and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.came = number

    @property
    def exit_code(self):
        """What a command ends with, as shells count. Of ranks only one may have been signalled."""
        return 128 + (self.came or signal.SIGTERM)

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
