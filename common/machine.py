"""What the machine has: devices, free memory, checked before something large is allocated, CPUs."""

import contextlib
import math
import os
import re
from pathlib import Path

import torch

from common.values import human
from model import InputError, expect


def pick_device(name=None):
    """A torch.device, default CUDA if there is a GPU. Raises InputError if it is not available."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {name!r} is not available here ({reason}); try --device "
                         "cpu") from None
    return device


def check_memory(what, size, device, advice, group=None):
    """Raises InputError if size, in bytes, exceeds the free memory of a device, or the least of
    those of all ranks, which call this together. what: such as "the weights take"."""
    free = free_memory(device)
    if group:  # of backends/tensor_parallel.py
        free = group.min(free)
    expect(size <= free, f"{what} {human(size, 'B')}, but {human(free, 'B')} are free on {device}; "
           f"{advice}")


def free_memory(device, root="/"):
    """Bytes that can still be allocated on a device; infinity where the system does not say. Of
    main memory: MemAvailable, or less where a cgroup (v2) around this process has a limit.
    root: for tests."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # except what live CUDA graphs reserve
        return torch.cuda.mem_get_info(device)[0]
    free = 1024 * find(Path(root, "proc/meminfo"), r"MemAvailable: *(\d+)", math.inf)
    for group in cgroups(root):
        kept = find(group / "memory.current", r"(\d+)")
        kept -= find(group / "memory.stat", r"inactive_file (\d+)")  # can be dropped
        free = min(free, max(find(group / "memory.max", r"(\d+)", math.inf) - kept, 0))
    return free


def weight_bytes(model):
    """Bytes of a `GPT`'s weights and tables. Packed layers count their own, in `nbytes`."""
    parts = *model.parameters(), *model.tables, *model.modules()
    return sum(getattr(x, "nbytes", 0) for x in parts)


def available_cpus(root="/"):
    """CPUs that the machine, or a cgroup's quota, leaves this process; at least 1."""
    cpus = os.cpu_count() or 1
    for group in cgroups(root):
        limit = find(group / "cpu.max", r"(\d+)", math.inf)  # "max": none
        cpus = min(cpus, limit / find(group / "cpu.max", r"\d+ (\d+)$", 100_000))
    return max(int(cpus), 1)


def cgroups(root):
    """Paths of this process's cgroup and those above: a container may only see one of these."""
    own = find(Path(root, "proc/self/cgroup"), "0::/(.*)", "", str)
    own = Path(root, "sys/fs/cgroup", own)
    return own, *own.parents


def find(file, pattern, missing=0, kind=int):
    """What a pattern's group matches at the start of a line in a file, as this kind of value."""
    with contextlib.suppress(OSError):
        if match := re.search(f"^{pattern}", file.read_text(), re.MULTILINE):
            return kind(match[1])
    return missing
