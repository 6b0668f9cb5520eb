"""Measurements, `python -m bench ...`: the tables they print, the JSON line they end with, and the
sizes of published models. Loads no torch, so that the command line can name them."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FORMS = dict(  # of a column's cells
    tokens_per_step="{:.2f}", tokens_per_second="{:.1f}", decoding_per_second="{:.1f}",
    speed_up="{:.2f}x", identical="{:.0%}", extra_over_first="{:.2f}", over_llama_cpp="{:.2f}x")
FIELDS = "vocab_size n_layer n_head n_kv_head head_size n_embd n_inner".split()
LLAMA = dict(block_size=8192, rope_theta=500000.0, tied=False)
SMOL = LLAMA | dict(tied=True)
QWEN = LLAMA | dict(qkv_bias=True, family="qwen2")
SIZES = {  # name: (the model, its FIELDS, the rest of its GPTConfig)
    "135m": ("SmolLM2 135M", (49152, 30, 9, 3, 64, 576, 1536), SMOL),
    "360m": ("SmolLM2 360M", (49152, 32, 15, 5, 64, 960, 2560), SMOL),
    "8b": ("Llama 3 8B", (128256, 32, 32, 8, 128, 4096, 14336), LLAMA),
    "32b": ("Qwen2.5 32B", (152064, 64, 40, 8, 128, 5120, 27648), QWEN),
    "70b": ("Llama 3 70B", (128256, 80, 64, 8, 128, 8192, 28672), LLAMA),
    "tiny": ("a tiny model", (97, 2, 4, 2, 16, 64, 96), LLAMA),  # for `bench gpu --dry-run`
}


class Table(list):
    """Rows, dicts that are printed as they are added. The first row's keys are the headings."""

    def add(self, row):
        if not self:
            self.columns = list(row)
            print("\n| " + " | ".join(self.columns).replace("_", " ") + " |")
            print("|" + " --- |" * len(self.columns))
        self.append(row)
        print("| " + " | ".join(cell(key, row[key]) for key in self.columns) + " |", flush=True)


def cell(column, value):
    if value is None:
        return "-"
    return FORMS.get(column, "{:.4g}").format(value) if isinstance(value, float) else str(value)


def finish(args, result):
    """Prints flags and result as one line of JSON, and writes it to the file that --out names."""
    from model import atomic_write
    flags = {flag: public(value) for flag, value in vars(args).items() if flag != "out"}
    line = json.dumps(flags | result | dict(machine=machine()))
    print(line, flush=True)
    if args.out:
        atomic_write(args.out, lambda tmp: Path(tmp).write_text(line + "\n"))


def public(value):
    """A flag's value; of a path only the name, since records are published."""
    if isinstance(value, list):
        return list(map(public, value))
    return Path(value).name if isinstance(value, str) else value


def machine():
    """What the numbers were measured on."""
    import torch

    import kernels
    commit = os.environ.get("CLOVER_COMMIT")  # for a copy without .git
    commit = commit or subprocess.run("git rev-parse --short HEAD", shell=True, cwd=ROOT, text=True,
                                      capture_output=True).stdout.strip()
    xllamacpp = sys.modules.get("xllamacpp")
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return dict(cpu=names[0] if names else platform.machine(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                threads=torch.get_num_threads(), python=platform.python_version(),
                torch=torch.__version__, commit=commit or None,
                xllamacpp=xllamacpp and f"{xllamacpp.__version__}, {xllamacpp.get_system_info()}",
                triton=kernels.triton.__version__ if kernels.HAS_TRITON else None)


def size_config(name):
    """The GPTConfig of a model in SIZES."""
    from model import GPTConfig
    _, sizes, others = SIZES[name]
    return GPTConfig(**dict(zip(FIELDS, sizes)), **others)
