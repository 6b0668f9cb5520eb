"""What training needs beside the training: files, the schedule, signals, the frozen model."""

import contextlib
import copy
import signal
import time
from datetime import timedelta

import torch
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh

from clover import CloverHeads, preset
from hf.families import read_config
from model import GPT, InputError, atomic_write, free_memory
from tools.cli import load_model
from training.flags import SWITCHES


@contextlib.contextmanager
def saving(what, advice):
    """Around writing files: InputError with the reason where they cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} ({reason}); {advice}") from None


def save_file(path, value, advice):
    def write(tmp):
        with open(tmp, "wb") as file:  # torch's own file does not say why it fails
            torch.save(value, file)
    with saving(f"{path}: cannot be written", advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, write)


def load_file(path, keys, mmap=False):
    """The dict with these keys that `save_file` wrote. mmap: its tensors stay in the file."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        return {key: value[key] for key in keys}
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = repr(error).split("\\n")[0]
        raise InputError(f"{path}: damaged, or not of this version ({reason})") from None


def set_learning_rate(optimizer, peak, step, steps):
    """Rises linearly over the first 2% of the steps, falls linearly to zero over the last 40%."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / (0.02 * steps), (steps - step) / (0.4 * steps))


def progress(start, steps, tokens_per_step, log):
    """A function that logs a step, what the caller measured, tokens per second, the time left."""
    began = time.perf_counter()

    def show(step, measured):
        speed = (step - start) / (time.perf_counter() - began)  # steps per second
        left = timedelta(seconds=int((steps - step) / speed))
        log(f"step {step}/{steps}  {measured}  {speed * tokens_per_step:.0f} tokens/s  {left} left")
    return show


@contextlib.contextmanager
def noted_signals():
    """Inside, Ctrl-C and SIGTERM only add their number to the list that this gives. A second Ctrl-C
    interrupts; a second SIGTERM does not, as a parent process may have sent it too."""
    came = []

    def note(number, frame):
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def too_large(args):
    """Whether the frozen model takes more than 60% of its GPU's free memory."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(read_config(args.model)).parameters())
    size = parameters * (4 if args.dtype == "float32" else 2)
    return args.device.startswith("cuda") and size > 0.6 * free_memory(args.device)


def shard(model, mesh):
    """Leaves each process its part of the blocks' weights (FSDP2); the rest stays whole. The device
    gets the model block by block, so it need never hold all of it."""
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    parts = (model.embed, model.embed_positions, model.norm, model.head)
    whole = torch.nn.ModuleList(filter(None, parts)).to(mesh.device_type)
    model.tie_and_place()
    # otherwise each block is a root, and a root's weights stay gathered after a pass
    fully_shard(model, mesh=mesh, ignored_params=set(whole.parameters()))


def load_for_training(args, group):
    """--model for this process, and new heads on it -> (heads, encoding)."""
    args.shard_base = group.size > 1 and group.any(args.shard_base or too_large(args))
    device = torch.device(args.device).type
    loading = copy.copy(args)
    loading.dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    switches = {name: value for name, value in vars(args).items() if name in SWITCHES}
    if args.shard_base:
        loading.device = "cpu"
        mesh = init_device_mesh(device, (group.size,))  # all ranks at once, so not in turns
    with group.one_by_one() if args.shard_base else contextlib.nullcontext():
        model, encoding = load_model(loading, packed=False)
        torch.manual_seed(args.seed)
        heads = CloverHeads(preset(args.preset, **switches), model)  # copies the last block
        if args.shard_base:
            shard(model, mesh)
    return heads, encoding
