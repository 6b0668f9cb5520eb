"""The library of cpu.c, which the system's `cc` compiles once for this CPU; loaded by ctypes. cpu.h
declares its structs, constants and functions."""

import ctypes
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch

from clover import BINS, MAX_DRAFT, SCHEMA, SOURCES
from common.files import value_hash
from common.machine import find
from common.values import one_line, warn
from generate import MAX_CHAIN
from kernels import runs_triton
from model import MAX_TREE, replace_file

LARGEST = 16    # largest tree size that a step chooses by itself
GROUP = 32      # inputs that share an activation scale; quantized weights are padded to a multiple
MAX_HEAD = 256  # largest head size
THREADS = []    # number of threads for cpu.c, inside `kernel_threads`
FOLDER = Path(__file__).parent  # of cpu.c and cpu.h
MACROS = dict(GROUP=GROUP, MAX_HEAD=MAX_HEAD, MAX_TREE=MAX_TREE, MAX_DEPTH=MAX_DRAFT,
              MAX_CHAIN=MAX_CHAIN, LARGEST=LARGEST, BINS=BINS, SCHEMA=SCHEMA,
              SOURCES=SOURCES)  # defined in cpu.c


def read_header(text):
    """The enum constants and structs (as ctypes.Structure) that cpu.h declares, by name, and
    `functions`: {name: types of its arguments}. Pointers to numbers become c_void_p."""
    text = re.sub("//.*", "", text)
    types = dict(int=c_int, int32_t=c_int32, int64_t=c_int64, float=c_float)
    structs = {}

    def declared(fields):  # (name, type) pairs of `type name, *name;`
        for kind, names in re.findall(r"(?:const |struct )*(\w+) ([^;]+);", fields):
            for star, name in re.findall(r"(\*?)(\w+)", names):
                target = POINTER(structs[kind]) if kind in structs else c_void_p
                yield name, target if star else structs.get(kind) or types[kind]
    constants = {}
    for body in re.findall(r"^enum {(.*?)}", text, re.S | re.M):
        value = -1
        for name, number in re.findall(r"(\w+)(?: = (-?\d+))?", body):
            value = constants[name] = int(number or value + 1)
    for name, body in re.findall(r"^typedef struct (\w+) {(.*?)^}", text, re.S | re.M):
        structs[name] = type(name, (ctypes.Structure,), dict(_fields_=[*declared(body)]))
    functions = {name: [kind for _, kind in declared(arguments.replace(",", ";") + ";")]
                 for name, arguments in re.findall(r"^\w+ (\w+)\((.*?)\);", text, re.S | re.M)}
    return SimpleNamespace(**constants, **structs, functions=functions)


header = read_header((FOLDER / "cpu.h").read_text())


def is_usable(device):
    """Whether cpu.c runs on this device."""
    return device.type == "cpu" and not runs_triton(torch.empty(0)) and library() is not None


@lru_cache
def library():
    """cpu.c, compiled for this CPU. If that fails, prints one line and returns one that was cached
    for this CPU before, or None."""
    try:
        loaded = load_or_build(compiler_command())
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        command = error.cmd[0] if isinstance(error, subprocess.CalledProcessError) else ""
        output = getattr(error, "stderr", None) or (command and f"{command} fails") or str(error)
        reason = next((line for line in output.splitlines() if "error" in line.lower()), output)
        loaded = load_cached(f"cpu-{source_key()}-*.so")
        effect = (f"with the C kernels of {loaded._name}" if loaded else
                  "without the C kernels, which is several times slower")
        warn(f"decoding runs {effect}: they cannot be compiled and loaded ({one_line(reason)}); "
             "install a C compiler, such as gcc, or set CC to one, and XDG_CACHE_HOME to a folder "
             "that is not mounted noexec")
    if loaded:
        for name, types in header.functions.items():
            getattr(loaded, name).argtypes = types
    return loaded


def compiler_command():
    """$CC or cc with its flags, $CLOVER_CFLAGS last. Package managers set CFLAGS for the oldest CPU
    that they support: of these, flags for instructions, optimisation and code do not count."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = [flag for flag in shlex.split(os.environ.get("CFLAGS", ""))
             if not flag.startswith(("-m", "-O", "-f"))]
    own = shlex.split(os.environ.get("CLOVER_CFLAGS", ""))
    return [*compiler, *flags, "-O3", native, "-std=gnu11", "-shared", "-fPIC", "-pthread",
            "-fno-math-errno", "-fno-trapping-math", *own]


def load_or_build(command):
    """The library that a compiler command builds from cpu.c, from the cache if it is there."""
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    command = [*command, *(f"-D{name}={value}" for name, value in MACROS.items())]
    macros = run([*command, "-dM", "-E", "-x", "c", os.devnull]).stdout  # compiler, CPU features
    name = f"cpu-{source_key()}-{value_hash((command, macros))}.so"
    if loaded := load_cached(name):
        return loaded
    with tempfile.TemporaryDirectory() as temporary:
        built = Path(temporary, name)
        warn("compiling the C kernels for this CPU, which takes some seconds, once")
        run([*command, str(FOLDER / "cpu.c"), "-o", str(built), "-lm"])
        if loaded := load_cached(name, built):
            return loaded
        loaded = ctypes.CDLL(str(built))
    warn("the C kernels are compiled anew in each run, which takes seconds; set XDG_CACHE_HOME to "
         "a folder that can be written")
    return loaded


def load_cached(pattern, built=None):
    """The newest library that matches a pattern, from the first of `cache_folders` that has one and
    from which it loads; None without. built: a file to put there first."""
    for folder in cache_folders():
        with suppress(OSError):  # none, broken, or the folder is read-only, full or mounted noexec
            if built:
                replace_file(folder / built.name, partial(shutil.copyfile, built))
            file = max(folder.glob(pattern), key=os.path.getmtime, default=folder)
            return ctypes.CDLL(str(file))
    return None


def source_key():
    """A hash of what kernels depend on besides the compiler: the sources, CLOVER_CFLAGS and, unless
    they name one, the CPU."""
    flags = os.environ.get("CLOVER_CFLAGS", "")
    cpu = find(Path("/proc/cpuinfo"), r"(?:flags|Features)\s*:(.*)", platform.processor(), str)
    sources = [(FOLDER / name).read_bytes() for name in ("cpu.c", "cpu.h")]
    names_cpu = re.search("-m(arch|cpu)=", flags)
    return value_hash((sources, MACROS, flags, None if names_cpu else cpu))


def cache_folders():
    """The user's cache folder, and a temporary one in which nobody else can plant a library."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clover"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    with suppress(OSError):
        folder = Path(tempfile.gettempdir(), f"clover-{os.getuid()}")
        folder.mkdir(0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid == os.getuid() and status.st_mode == stat.S_IFDIR | 0o700:
            yield folder


def lanes():
    """Outputs that a packed weight interleaves: the numbers in a vector of this CPU."""
    return c_int32.in_dll(library(), "lanes").value


def instructions(device):
    """What cpu.c was compiled for; "none" if it does not run on this device."""
    name = c_char_p.in_dll(library(), "instructions").value if is_usable(device) else b"none"
    return name.decode()


# --------------------------------------------------------------------------------------------------
# Threads

class kernel_threads:
    """Leaves torch one thread and cpu.c the number that torch had. Torch's threads would spin for a
    millisecond after each operation, and no torch operation of a step is worth a second one."""

    def __enter__(self):
        THREADS.append(torch.get_num_threads())
        torch.set_num_threads(1)

    def __exit__(self, *_):
        torch.set_num_threads(THREADS.pop())


def threads():
    return THREADS[-1] if THREADS else torch.get_num_threads()
