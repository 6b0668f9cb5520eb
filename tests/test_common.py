"""common/: devices and memory."""

import math

import pytest
import torch

from common.machine import available_cpus, free_memory, pick_device
from conftest import needs_cuda, refusal
from generate import capture
from test_hf_tokenizer import write


@pytest.mark.parametrize("name", ["meta", "mps", "cuda:99", "abacus"])
def test_devices_without_a_backend_are_refused(name):
    refusal(lambda: pick_device(name), f"device '{name}' is not available here")


LIMITS = {  # case: (/proc/self/cgroup, {group: (limit, use, use that can be dropped)}, free), in GB
    "a limit above": ("0::/a/b", {"a/b": (2, 1, 0.5), "a": ("max", 9, 0)}, 1.5),
    "the least of several": ("0::/a/b", {"a/b": (9, 1, 0), "a": (2, 1.75, 0.5), ".": (4, 2, 0)}, 0.75),
    "more than the machine's": ("0::/a", {"a": (100, 1, 0)}, 8),
    "full": ("0::/a", {"a": (1, 2, 0)}, 0),
    "the path is the host's": ("0::/docker/0123", {".": (2, 1, 0.5)}, 1.5),
    "not Linux": ("", {}, math.inf)}


@pytest.mark.parametrize("case", LIMITS)
def test_a_containers_limit_bounds_the_free_memory(case, tmp_path):
    """Bug: MemAvailable alone, the machine's, so that a model that does not fit in the container is killed."""
    own, groups, free = LIMITS[case]
    files = {"proc/self/cgroup": own, "proc/meminfo": "MemFree: 1 kB\nMemAvailable:  7812500 kB\n"} if own else {}
    for group, sizes in groups.items():
        sizes = [size if size == "max" else int(size * 10**9) for size in sizes]
        values = {"memory.max": sizes[0], "memory.current": sizes[1],
                  "memory.stat": f"inactive_file_x 1\ninactive_file {sizes[2]}\n"}
        files |= {f"sys/fs/cgroup/{group}/{name}": str(value) for name, value in values.items()}
    assert free_memory("cpu", write(tmp_path, files)) == free * 10**9


@pytest.mark.parametrize("own, files, cpus", [
    ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
    ("0::/", {"cpu.max": "20000 40000"}, 1), ("", {}, 8), ("0::/docker/0", {"cpu.max": "150000 50000"}, 3)])
def test_a_containers_quota_bounds_the_cpus(own, files, cpus, tmp_path, monkeypatch):
    """Bug: a thread for each CPU of the machine, which wait for one another."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    files = {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}
    assert available_cpus(write(tmp_path, files | {"proc/self/cgroup": f"{own}\n"})) == cpus


@pytest.mark.gpu
@needs_cuda
def test_memory_of_a_graph_is_not_free_while_it_lives():
    """Catches memory counted as free that only a captured CUDA graph can use: here 1 GiB."""
    x = torch.ones(2**28, device="cuda")
    before = free_memory("cuda")
    body = lambda: (2 * x).sum()
    body()
    replay = capture(body, x.device)
    assert free_memory("cuda") < before - 0.9 * 2**30
    del replay
    assert free_memory("cuda") > before - 0.1 * 2**30
