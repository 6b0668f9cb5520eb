"""How programs end. Exit codes: 0; 1 after a bug, with a traceback; 2 after bad input, an I/O error
or a lack of memory, with one line on standard error; 130 after Ctrl-C; 143 after SIGTERM."""

import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

import torch

from backends.tensor_parallel import SharedError, end_rank, lost_rank
from model import InputError

received = []  # [SIGTERM] after SIGTERM


def interrupt(number, frame):
    """Handles SIGTERM like Ctrl-C, and records it."""
    received.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def command():
    """Runs a program and ends it with its exit code. Under torchrun only rank 0 prints, except that
    an error of a single rank is printed there."""
    signal.signal(signal.SIGTERM, interrupt)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: no other file may get its number
            setattr(sys, name, open(os.devnull, "r+"))
    rank, stderr = os.environ.get("RANK", "0"), sys.stderr
    for stream in (sys.stdout, stderr):
        stream.reconfigure(errors="replace")  # "?" if a terminal cannot show a character
    if rank != "0":
        sys.stdout = sys.stderr = open(os.devnull, "w")
    code = 0
    try:
        yield
        sys.stdout.flush()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 128 + (received or [signal.SIGINT])[0]
    except Exception as error:
        if isinstance(error, OSError):  # else the flush at exit would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code, text = describe(error)
        if rank != "0":  # rank 0 prints a SharedError
            text = "" if isinstance(error, SharedError) else f"rank {rank}: {text}"
        stderr.write(text)
    end_rank(code)
    if code:
        sys.exit(code)


def describe(error):
    """The exit code after an error, and what to print: a line, or the traceback of a bug."""
    if isinstance(error, BrokenPipeError):  # the reader has enough, as in `| head`
        return 0, ""
    line = error_line(error)
    if line is None:
        return 1, traceback.format_exc()
    spec = sys.modules["__main__"].__spec__  # of `python -m`
    name = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    return 2, f"{name}: {line}\n"


def error_line(error):
    """The line to print for an error; None for a bug."""
    if isinstance(error, InputError):
        return str(error)
    reason = str(error).partition("\n")[0]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate mem" in reason:
        return f"out of memory ({reason}); use a smaller --batch-size or shorter prompts"
    if isinstance(error, OSError):
        return reason
    return lost_rank(error) if isinstance(error, RuntimeError) else None
