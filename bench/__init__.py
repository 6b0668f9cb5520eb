"""Measurements, `python -m bench ...`: their tables, their records, the machine they ran on."""

import json
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import kernels
from model import InputError, atomic_write, read_json


def cell(row, column):
    """The text of a table's cell. column: "key format", as in "ms {:.2f}"; a key "stages.draft"
    leads into a dict. What is missing is a dash; a text, such as an error, ends at its colon."""
    key, form = column.split(" {", 1)
    value = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        return "-"
    return value.split(": ")[0] if isinstance(value, str) else ("{" + form).format(value)


class Table(list):
    """Rows, as dicts, each printed when it is added. columns: {heading: column, see `cell`}. kept:
    rows that are there already. save() is called after every addition."""

    def __init__(self, columns, kept=(), save=lambda: None):
        super().__init__(kept)
        self.columns, self.save = list(columns.values()), save
        print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
        for row in self:
            self.show(row)

    def add(self, *rows, **shown):
        """shown: what is printed beside a row's values, or in their place."""
        self.extend(rows)
        for row in rows:
            self.show(row | shown)
        self.save()

    def show(self, row):
        """Prints a row without adding it."""
        print("| " + " | ".join(cell(row, column) for column in self.columns) + " |", flush=True)

    def has(self, **label):
        """Whether a row has these values."""
        return any(label.items() <= row.items() for row in self)


class Record(dict):
    """What a command measures, the object of its JSON line. With a path it is also a file, written
    anew after every row: a command that was stopped goes on with what is missing, until `complete`.
    Raises InputError for a file that holds a run with other settings or on another machine: a
    machine with a GPU is the same where gpu, torch and triton are. any_machine: what is there came
    from one that need not be this one."""

    def __init__(self, path=None, any_machine=False, **settings):
        super().__init__(settings, machine=machine())
        self.path = path
        kept = read_json(path) if path and Path(path).is_file() else {}
        before = kept.get("machine", {})
        same_gpu = before.get("gpu") and all(before[x] == self["machine"][x]
                                             for x in ("gpu", "torch", "triton"))
        if same_gpu or before and any_machine:
            self["machine"] = before  # another host, or a later commit, goes on with it
        for name, value in json.loads(json.dumps(self)).items() if kept else ():
            if kept.get(name) != value:
                raise InputError(f"{path} holds a run with {name} {kept.get(name)}, not {value}; "
                                 "delete it, or choose another --out")
        kept.pop("error", None)
        self.update(kept, complete=False)
        self.save()

    def save(self):
        if self.path:
            write_file(self.path, json.dumps(self) + "\n")

    def table(self, name, columns):
        """A Table whose rows are kept under this name."""
        self[name] = Table(columns, self.get(name, ()), self.save)
        return self[name]

    def once(self, name, measure):
        """measure(), kept under this name; what is there is not measured again."""
        if name not in self:
            self[name] = measure()
            self.save()
        return self[name]

    def done(self):
        self["complete"] = True
        self.save()
        return self


def write_file(path, text):
    """Raises InputError where the folder takes no file."""
    try:
        atomic_write(path, lambda tmp: Path(tmp).write_text(text, encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); "
                         "choose another --out") from None


def make_folder(path):
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be made a folder ({error.strerror}); "
                         "choose another --out") from None


def machine():
    """What the numbers were measured on, for the JSON line."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    commit = subprocess.run("git rev-parse --short HEAD", shell=True, cwd=Path(__file__).parent,
                            capture_output=True, text=True).stdout.strip()  # "" without git
    return dict(cpu=names[0] if names else platform.processor() or platform.machine(),
                cores=os.cpu_count(), threads=torch.get_num_threads(),
                python=platform.python_version(), torch=torch.__version__,
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                triton=kernels.triton.__version__ if kernels.HAS_TRITON else None,
                commit=commit or None)


def hardware(machine):
    """Such as "2 cores of an AMD EPYC", of a record's machine."""
    n, cpu = machine["threads"], machine["cpu"]
    return machine["gpu"] or f"{n} core{'s' * (n > 1)} of a{'n' * (cpu[0] in 'AEIO')} {cpu}"
