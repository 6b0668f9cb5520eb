"""Measurements, `python -m bench ...`: the tables they print and the JSON line they end with."""

import json
import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FORMS = dict(tokens_per_step="{:.2f}", tokens_per_second="{:.1f}", speed_up="{:.2f}x",
             extra_tokens="{:.2f}", extra_over_first="{:.2f}", speed_up_over_first="{:.2f}x",
             over_best_plan="{:.2f}x", identical="{:.0%}")  # of a column's cells


class Table(list):
    """Rows, dicts that are printed as they are added. The first row's keys are the headings; what
    it has in lists and dicts is left out."""

    def add(self, row):
        if not self:
            self.columns = [key for key in row if not isinstance(row[key], (dict, list))]
            print("\n| " + " | ".join(self.columns).replace("_", " ") + " |")
            print("|" + " --- |" * len(self.columns))
        self.append(row)
        print("| " + " | ".join(cell(key, row[key]) for key in self.columns) + " |", flush=True)


def cell(column, value):
    if value is None:
        return "-"
    return FORMS.get(column, "{:.4g}").format(value) if isinstance(value, float) else str(value)


def finish(args, result):
    """Prints flags and result as one line of JSON, and writes it to the file that --out names. Of
    folders only the names are kept: records are published."""
    from model import atomic_write
    out = vars(args).pop("out")
    flags = {name: name_only(value) for name, value in vars(args).items()}
    line = json.dumps(flags | result | dict(machine=machine()))
    print(line, flush=True)
    if out:
        atomic_write(out, lambda tmp: Path(tmp).write_text(line + "\n"))


def name_only(value):
    if isinstance(value, list):
        return list(map(name_only, value))
    return Path(value).name if isinstance(value, (str, Path)) else value


def machine():
    """What the numbers were measured on."""
    import torch

    import kernels
    commit = subprocess.run("git rev-parse --short HEAD", shell=True, cwd=ROOT, text=True,
                            capture_output=True).stdout.strip()  # "" without git
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return dict(cpu=names[0] if names else platform.machine(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                threads=torch.get_num_threads(), python=platform.python_version(),
                torch=torch.__version__, commit=commit or None,
                triton=kernels.triton.__version__ if kernels.HAS_TRITON else None)
