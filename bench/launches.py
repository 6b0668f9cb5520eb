"""Counts the launches of a step without a GPU: every Triton kernel, and every torch operation that is not a view.

The model is moved to the meta device, where operations have shapes and no values, and the Triton kernels are recorded
instead of run. torch may take more than one launch for an operation, so the figure is a lower bound.
"""

from collections import Counter
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from generate import Engine

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
        engine = Engine(model, heads, graph=False, **options)
        engine.step()  # whatever only the first one does
        launches.counts.clear()
        with launches:
            engine.step()
    return launches.counts
