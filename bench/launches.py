"""`python -m bench launches` counts the launches of a step without a GPU: every Triton kernel, and every torch
operation that is not a view.

The model is moved to the meta device, where operations have shapes and no values, and the Triton kernels are recorded
instead of run. torch may take more than one launch for an operation, so the figure is a lower bound.
"""

from collections import Counter
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from bench import Table
from clover import CloverHeads
from generate import Engine, Fixed, tree_variant
from model import GPT, InputError

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}


class Launches(TorchDispatchMode):
    """Counts operations by name, as `counts`, while it is active."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        with self:
            result = operation.decompose(*args, **kwargs or {})  # into the operations that have kernels
        if result is not NotImplemented:
            return result
        name = operation.overloadpacket.__name__
        if not operation.is_view and name not in FREE:
            self.counts[name] += 1
        return operation(*args, **kwargs or {})


@torch.inference_mode()
def step_launches(model, heads=None, **options):
    """Counter of the launches of one step, by operation. model and heads must be on the meta device; options are the
    Engine's."""
    from triton.runtime.jit import JITFunction
    launches = Launches()

    def run(kernel, *args, grid, warmup, **named):
        launches.counts[kernel.__name__.strip("_").removesuffix("_kernel")] += 1

    with (patch.object(JITFunction, "run", run), patch.object(kernels, "runs_triton", lambda *_: True),
          patch("model.runs_triton", lambda *_: True)):
        step = Engine(model, heads, graph=False, **options).body()
        step()  # whatever only the first one does
        launches.counts.clear()
        with launches:
            step()
    return launches.counts


def drafted(tree_size, heads):
    """The variants of T nodes: drafted by heads; and, where T > 2, by lookup, and by both."""
    others = [(None, True), (heads, True)] if tree_size > 2 else []
    return [tree_variant(tree_size, *drafters) for drafters in [(heads, False), *others]]


def bench(args):
    """`python -m bench launches`: prints rows for each tree size, returns what goes into the JSON line."""
    if not kernels.HAS_TRITON:
        raise InputError("counting launches needs triton, which is not installed; pip install triton")
    model = GPT.from_pretrained(args.model, torch.bfloat16, "cpu")  # the default on CUDA
    heads = CloverHeads.from_pretrained(args.heads, model).to("meta")
    model.to("meta")
    table = Table({"tree size": "tree_size {}", "drafted by": "drafted_by {}", "launches": "launches {}",
                   "most of them": "most {}"})
    for variant in (variant for tree_size in args.tree_sizes for variant in drafted(tree_size, heads)):
        counts = step_launches(model, heads, choice=Fixed(variant), capacity=min(512, model.config.block_size))
        table.add(dict(tree_size=variant.tree_size, drafted_by=str(variant), launches=counts.total(),
                       operations=counts), most=", ".join(f"{n} {name}" for name, n in counts.most_common(6)))
    return dict(bench="launches", model=args.model, steps=table)
