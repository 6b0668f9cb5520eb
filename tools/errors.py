"""How programs end: errors in one line, exit codes, signals."""

import contextlib
import errno
import os
import signal
import sys
import traceback
from pathlib import Path

import torch

from backends import tensor_parallel
from model import InputError

received = []  # SIGTERM, once it has come


def interrupt(number, frame):
    """SIGTERM's handler: acts as Ctrl-C, but is remembered."""
    received.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def command():
    """Around a program. Bad input, a lack of memory, and output that has no room are one line on
    standard error and exit code 2; Ctrl-C and SIGTERM are 130 and 143."""
    signal.signal(signal.SIGTERM, interrupt)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # "?" where a terminal cannot show a character
    errors = sys.stderr
    if os.environ.get("RANK", "0") != "0":  # rank 0 prints for all
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
    """Prints an error, of another rank than the first only its own -> the exit code."""
    line = error_line(error)
    code = 1 if line is None else 2
    spec = sys.modules["__main__"].__spec__
    name = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    rank = os.environ.get("RANK", "0")
    if line is None:
        traceback.print_exc(file=errors)
    elif line and (rank == "0" or not isinstance(error, tensor_parallel.SharedError)):
        print(f"rank {rank}: " * (rank != "0") + f"{name}: {line}", file=errors)
    if isinstance(error, OSError):  # nothing more can be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0 if line == "" else code
    return code


def error_line(error):
    """What to print of an error, "" for nothing; None where it is a bug, whose traceback counts."""
    reason = str(error).partition("\n")[0]
    if isinstance(error, InputError):
        return str(error)
    # torch has no type of its own for a CPU's lack of memory
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in reason:
        return f"out of memory ({reason}); take a smaller --batch-size, or shorter texts"
    if isinstance(error, BrokenPipeError):  # the reader of our output is gone, as with `| head`
        return ""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
        return f"standard output cannot be written: {error.strerror}"
    return tensor_parallel.lost_rank(error) if isinstance(error, RuntimeError) else None
