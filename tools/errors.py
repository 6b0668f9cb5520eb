"""How programs end: one-line errors, exit codes, signals."""

import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

import torch

from backends import tensor_parallel
from model import InputError

received = []  # [SIGTERM] after SIGTERM


def interrupt(number, frame):
    """Handles SIGTERM like Ctrl-C, and records it."""
    received.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def command():
    """Runs a program. Bad input, I/O errors and a lack of memory print one line on standard error
    and exit with 2. Other exceptions exit with 1, Ctrl-C with 130, SIGTERM with 143."""
    signal.signal(signal.SIGTERM, interrupt)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # "?" if a terminal cannot show a character
    errors = sys.stderr
    if os.environ.get("RANK", "0") != "0":  # only rank 0 prints
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
        code = report(error, errors)
    tensor_parallel.end_rank(code)
    if code:
        sys.exit(code)


def report(error, errors):
    """Prints an error to `errors` and returns the exit code. Only rank 0 prints a `SharedError`."""
    if isinstance(error, OSError):  # otherwise the interpreter flushes standard output and fails
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as in `| head`
        return 0
    line = error_line(error)
    if line is None:
        traceback.print_exc(file=errors)
        return 1
    spec = sys.modules["__main__"].__spec__
    name = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not isinstance(error, tensor_parallel.SharedError):
        print(f"rank {rank}: " * (rank != "0") + f"{name}: {line}", file=errors)
    return 2


def error_line(error):
    """The message to print for an error; None for a bug, which needs a traceback."""
    if isinstance(error, InputError):
        return str(error)
    reason = str(error).partition("\n")[0]
    # on a CPU torch raises a plain RuntimeError
    is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if is_memory or "can't allocate memory" in reason:
        return f"out of memory ({reason}); use a smaller --batch-size or shorter prompts"
    if isinstance(error, OSError):
        return reason
    return tensor_parallel.lost_rank(error) if isinstance(error, RuntimeError) else None
