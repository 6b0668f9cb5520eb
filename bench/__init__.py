"""Measurements: `python -m bench kernels | decode | heads`. Here: the tables they print and the machine they ran on."""

import os
import platform
import subprocess
from pathlib import Path

import torch

import kernels


def print_head(*names):
    print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names), flush=True)


def print_row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


class Table:
    """A table that prints each row, a dict, as it is added. columns: {heading: (key of a row, format of its value)}."""

    def __init__(self, columns):
        self.columns, self.rows = columns, []
        print_head(*columns)

    def add(self, row):
        self.rows.append(row)
        print_row(*("-" if row[key] is None else form.format(row[key]) for key, form in self.columns.values()))


def machine():
    """What the numbers were measured on, as a dict for the JSON line."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = names[0] if names else cpu
    try:
        git = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = done.stdout.strip() or None
    except OSError:  # git is not installed
        commit = None
    return dict(cpu=cpu, cores=os.cpu_count(), threads=torch.get_num_threads(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                python=platform.python_version(), torch=torch.__version__,
                triton=kernels.triton.__version__ if kernels.HAS_TRITON else None, commit=commit)
