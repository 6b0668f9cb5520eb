"""Measurements: `python -m bench kernels | decode | heads`. Here: the tables they print and the machine they ran on."""

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import kernels


class Table(list):
    """Rows, as dicts, each printed when it is added. columns: {heading: "key format"}, as {"ms": "step_ms {:.2f}"}."""

    def __init__(self, columns):
        self.columns = [column.rsplit(" ", 1) for column in columns.values()]
        print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)

    def add(self, row, **shown):
        """shown: what is printed beside the row's values, or in their place."""
        self.append(row)
        self.show(row | shown)

    def show(self, row):
        """Prints a row without adding it: a text as it is, a dash for what is missing or None."""
        values = [(row.get(key), form) for key, form in self.columns]
        cells = ["-" if value is None else value if isinstance(value, str) else form.format(value)
                 for value, form in values]
        print("| " + " | ".join(cells) + " |", flush=True)


def machine():
    """What the numbers were measured on, for the JSON line."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    commit = subprocess.run("git rev-parse --short HEAD", shell=True, cwd=Path(__file__).parent, capture_output=True,
                            text=True).stdout.strip()  # nothing where git is not installed
    return dict(cpu=names[0] if names else platform.processor() or platform.machine(), cores=os.cpu_count(),
                threads=torch.get_num_threads(), python=platform.python_version(), torch=torch.__version__,
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                triton=kernels.triton.__version__ if kernels.HAS_TRITON else None, commit=commit or None)
