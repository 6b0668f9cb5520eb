"""How programs end: errors in one line, exit codes, signals."""

import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

import torch

from backends import tensor_parallel
from model import InputError

received = []  # SIGTERM, once it was sent


def interrupt(number, frame):
    """The handler of SIGTERM: interrupts as Ctrl-C does, and notes it."""
    received.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def command():
    """Around a program. Bad input, a lack of memory, and files or output that cannot be read or
    written are one line on standard error and exit code 2; Ctrl-C and SIGTERM are 130 and 143."""
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
    """Prints an error -> the exit code. A rank other than the first prints only its own errors."""
    if isinstance(error, OSError):  # the interpreter would flush standard output again, and fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the reader of our output is gone, as with `| head`
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
    """What to print of an error; None for a bug, which needs its traceback."""
    reason = str(error).partition("\n")[0]
    if isinstance(error, InputError):
        return str(error)
    # on a CPU torch raises a RuntimeError
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if memory or "can't allocate memory" in reason:
        return f"out of memory ({reason}); use a smaller --batch-size, or shorter texts"
    if isinstance(error, OSError):
        return reason
    return tensor_parallel.lost_rank(error) if isinstance(error, RuntimeError) else None
