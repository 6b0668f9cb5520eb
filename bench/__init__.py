"""Measurements: `python -m bench`. This file has the sizes of published models, prints tables and
makes records. It loads no torch, so that flags are checked at once."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHATS = ROOT / "bench" / "prompts.jsonl"
CODING = ROOT / "bench" / "coding.jsonl"
FIELDS = "vocab_size n_layer n_head n_kv_head head_size n_embd n_inner".split()
LLAMA = dict(block_size=8192, rope_theta=500000.0, tied=False)
SMOL = LLAMA | dict(tied=True)
QWEN = LLAMA | dict(qkv_bias=True)
HYBRID = SMOL | dict(attn_gate=True, qk_norm="head", rotary_size=64)
MODEL_SIZES = {  # name: values of FIELDS, other fields of GPTConfig
    "135m": ((49152, 30, 9, 3, 64, 576, 1536), SMOL),             # SmolLM2
    "360m": ((49152, 32, 15, 5, 64, 960, 2560), SMOL),
    "1.2b": ((128256, 16, 32, 8, 64, 2048, 8192), SMOL),          # Llama 3.2
    "8b": ((128256, 32, 32, 8, 128, 4096, 14336), LLAMA),         # Llama 3
    "32b": ((152064, 64, 40, 8, 128, 5120, 27648), QWEN),         # Qwen2.5
    "70b": ((128256, 80, 64, 8, 128, 8192, 28672), LLAMA),
    "0.8b-hybrid": ((248320, 24, 8, 2, 256, 1024, 3584), HYBRID | dict(mixers=(16, 16))),
    "4b-hybrid": ((248320, 32, 16, 4, 256, 2560, 9216), HYBRID | dict(mixers=(32, 16))),  # Qwen 3.5
    "0.8b": ((248320, 24, 8, 2, 128, 1024, 5888), SMOL),  # as large as the hybrids
    "4b": ((248320, 32, 20, 4, 128, 2560, 12416), SMOL),
    "tiny": ((97, 2, 4, 2, 16, 64, 96), LLAMA | dict(block_size=512)),  # for `gpu --dry-run`
}


def size_config(name):
    """The GPTConfig of a model in MODEL_SIZES."""
    from model import GPTConfig
    from recurrent.layers import DeltaConfig
    sizes, others = MODEL_SIZES[name]
    config = GPTConfig(**dict(zip(FIELDS, sizes)), **others)
    if config.mixers:
        delta = DeltaConfig(*config.mixers, 128, 128)
        config.mixers = (delta, delta, delta, None) * (config.n_layer // 4)
    return config


class Table(list):
    """Rows (dicts with the same keys), printed as Markdown when they are added."""

    def add(self, row):
        if not self:
            print("\n| " + " | ".join(row).replace("_", " ") + " |\n|" + " --- |" * len(row))
        self.append(row)
        print("| " + " | ".join(map(cell, row.values())) + " |", flush=True)


def cell(value):
    return "-" if value is None else str(round(value, 3) if isinstance(value, float) else value)


def record(args, result):
    """A result with its flags and the machine."""
    flags = {flag: public(value) for flag, value in vars(args).items() if flag != "out"}
    return flags | result | dict(machine=machine())


def public(value):
    """A flag's value, with paths cut to their names, since records are published."""
    if isinstance(value, list):
        return [public(x) for x in value]
    return Path(value).name if isinstance(value, str) else value


def machine():
    """The hardware and the versions of a measurement."""
    import torch

    import kernels
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True,
                         capture_output=True).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    about = cpuinfo.read_text() if cpuinfo.is_file() else ""
    cpus = re.findall(r"model name\s*: (.*)", about)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)", about, re.M)
    vectors = re.findall(r"\b(?:avx|fma|f16c|amx|asimd|sve)\w*", flags[1]) if flags else []
    llama_cpp = sys.modules.get("llama_cpp")
    return dict(cpu=cpus[0] if cpus else platform.machine(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                cpu_flags=" ".join(vectors), cc=os.environ.get("CC"),
                cflags=os.environ.get("CLOVER_CFLAGS"),
                threads=torch.get_num_threads(), python=platform.python_version(),
                torch=torch.__version__,
                commit=os.environ.get("CLOVER_COMMIT") or git or None,  # for a copy without .git
                llama_cpp=llama_cpp and f"{llama_cpp.__version__}, "
                f"{llama_cpp.llama_print_system_info().decode()}",
                triton=kernels.triton.__version__ if kernels.HAS_TRITON else None)
