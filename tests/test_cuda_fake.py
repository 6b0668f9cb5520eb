"""The engine's CUDA paths without a GPU: the real code on fake CUDA tensors, which have shapes, dtypes and devices but
no values. Triton's launches are recorded, capture is emulated, and attention takes only what a fused kernel takes.

Mixed devices, wrong dtypes and shapes raise as on a GPU; so does every read of a value, which on a GPU would wait."""

import contextlib
import gc
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import generate as generate_module
import kernels
import model as models
from backends import gpu
from backends.capture import LARGEST_GUIDED, LARGEST_STEP, capture_all, warm_up
from backends.linear import Quantized
from backends.quantized import round_weight
from bench import timing
from conftest import MODELS, Operations, ToyGrammar, slow, toy_model
from engine.batching import Engine
from engine.guide import GuidedSequence
from engine.policy import Policy
from generate import GREEDY, NOISE, Decoder, Fixed, Sampling, capture
from generate import Engine as FifoEngine
from static import h200
from test_clover import random_heads
from test_drafters import MAKERS
from test_generate import Cycling
from train_heads import Trainer

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs triton")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CONTIGUOUS = torch.contiguous_format


class Indexing(TorchFunctionMode):
    """Emulates x[...], x.copy_, ~x, ..., for which a torch built without CUDA needs the device."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def __torch_function__(self, function, types, args=(), kwargs=None):
        mine = {torch.Tensor.__getitem__: self.get, torch.Tensor.__setitem__: self.set, torch.Tensor.copy_: self.copy,
                torch.Tensor.__invert__: torch.bitwise_not, torch.tensor: self.tensor,
                torch.Tensor.contiguous: lambda x: x if x.is_contiguous() else x.clone(memory_format=CONTIGUOUS),
                torch.Tensor.data_ptr: lambda x: 0}
        return mine.get(function, function)(*args, **kwargs or {})

    def tensor(self, data, dtype=None, **others):
        assert not self.world.capturing, "a tensor from the host's data while capturing"
        data = np.array(data)
        return torch.empty(data.shape, dtype=dtype or (FP32 if data.dtype.kind == "f" else torch.int64), **others)

    def get(self, x, index):
        """Applies integers, slices and None as a view, then indexes it by the tensors."""
        index = index if isinstance(index, tuple) else (index,)
        is_tensor = [isinstance(i, torch.Tensor) for i in index]
        slices = tuple(slice(None) if is_one else i for i, is_one in zip(index, is_tensor))
        if self.world.capturing:
            self.world.capturing.use("view", x)
        with in_kernel_invocation_manager(x.fake_mode):  # as a meta tensor, without dispatch, which takes time
            view = torch.Tensor.__getitem__(x, slices)
        view = FakeTensor(x.fake_mode, view, x.fake_device)
        dims = [i if is_one else None for i, is_one in zip(index, is_tensor) if not isinstance(i, int)]  # of the view
        return torch.ops.aten.index(view, dims) if any(is_tensor) else view

    def set(self, x, index, value):
        is_number = not isinstance(value, torch.Tensor)
        assert not (is_number and x.is_cuda), "a number from the host, for which the GPU would wait"
        view = self.get(x, index)
        view.fill_(value) if is_number else self.copy(view, value)

    def copy(self, x, value, non_blocking=False):
        assert torch.broadcast_shapes(value.shape, x.shape) == x.shape
        assert not (self.world.capturing and x.device != value.device), "a copy from the host while capturing"
        if self.world.capturing:
            self.world.capturing.use("copy_", x, value)
        return x


class Capture(TorchDispatchMode):
    """Raises if a graph reads host memory, which may be freed before a replay. Records {address: (weak reference,
    operation)} of the memory that the graph uses but did not allocate, `used`, and of its own, `made`."""

    def __init__(self):
        super().__init__()
        self.used, self.made = {}, {}

    def use(self, name, *values):
        for storage in storages(values):
            if storage._cdata not in self.made:
                self.used[storage._cdata] = StorageWeakRef(storage), name

    def live(self):
        """The memory that replays need: what the graph used, and its result."""
        return [*self.used.values(), *(held for held in self.made.values() if not held[0].expired())]

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        self.use(name, args, kwargs)
        result = operation(*args, **kwargs or {})
        for storage in storages(result):
            if storage._cdata not in self.used:
                self.made[storage._cdata] = StorageWeakRef(storage), name
        sources = [x.device.type for x in args if isinstance(x, torch.Tensor)]
        if name in ("lift_fresh", "_to_copy", "copy_") and {"cpu", "cuda"} <= {*sources, result.device.type}:
            raise RuntimeError(f"{name} from the host while capturing")
        return result


def tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def storages(values):
    return [x.untyped_storage() for x in tensors(values)]


class FakeEvent:
    """Stands in for torch.cuda.Event. at: the device's clock in milliseconds."""

    def __init__(self, world, enable_timing=False):
        self.world, self.timed, self.seen = world, enable_timing, False

    def record(self, stream):
        self.at = self.world.clock

    def synchronize(self):
        self.seen = True

    def elapsed_time(self, end):
        assert self.timed and end.timed and end.seen, "the host did not wait for what it times"
        return end.at - self.at


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph and torch.cuda.graph. A replay checks that the memory it needs still exists
    and that the decoders' tensors have not moved."""

    def __init__(self, world):
        self.world = world
        self.replays = 0
        self.duration = 1 + len(world.graphs)  # milliseconds

    @contextlib.contextmanager
    def capture(self):
        assert not self.world.capturing and self.world.workspaces_cleared, "a workspace of another graph"
        assert torch.is_inference_mode_enabled(), "a capture outside of inference mode"
        self.world.workspaces_cleared = False
        self.places = self.world.places()
        with Capture() as self.world.capturing:
            yield
        self.needs = self.world.capturing.live()
        self.world.capturing = None
        self.world.graphs.append(self)

    def replay(self):
        gone = [name for memory, name in self.needs if memory.expired()]
        assert not gone, f"a graph replays {gone} on memory that is gone"
        assert self.places == self.world.places()[:len(self.places)], "a graph replays where the decoder's tensors were"
        self.replays += 1
        self.world.clock += self.duration


class World:
    """The state of the fake GPU."""

    def __init__(self):
        self.capturing = None  # a `Capture`
        self.workspaces_cleared = False
        self.graphs = []
        self.launches = []
        self.clock = 0  # milliseconds: a launch takes 1000, a replay few
        self.decoders = []

    def places(self):
        """The places of each decoder's state tensors."""
        place = lambda x: (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride())
        parts = lambda slots: (vars(slots), vars(slots.cache), vars(slots.heads_cache))
        owned = lambda decoder: (parts(decoder.slots), vars(decoder), decoder.policy.counts, decoder.policy.chances)
        return [list(map(place, tensors(owned(decoder)))) for decoder in self.decoders]

    def clear_workspaces(self):
        self.workspaces_cleared = True


def fused_attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False, scale=None):
    """Checks arguments: flash attention has no float32 and no masks, efficient attention no grouped heads."""
    assert q.is_cuda and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    assert k.shape[1] == q.shape[1] or enable_gqa
    flash = q.dtype != torch.float32 and not isinstance(attn_mask, torch.Tensor)
    assert flash or not enable_gqa, "falls to MATH, which holds all scores"
    if isinstance(attn_mask, tuple):  # stands in for torch's bias, which fake tensors cannot make
        assert attn_mask == (q.shape[2], k.shape[2])
    elif attn_mask is not None:
        assert attn_mask.is_cuda and attn_mask.dtype in (torch.bool, q.dtype)
        torch.broadcast_shapes(attn_mask.shape, (*q.shape[:3], k.shape[2]))
    return torch.empty_like(q)


def read(x):
    """Values for `Accepted.to_lists`: each slot accepted one token. The tensor must be on the host."""
    assert x.device.type == "cpu"
    return np.ones(x.shape, int)


@pytest.fixture
def world(monkeypatch):
    from triton.runtime.jit import JITFunction
    world = World()
    graph = lambda graph, pool=None: graph.capture()
    cuda = dict(mem_get_info=lambda *_: (2**40, 2**40), empty_cache=lambda: None, synchronize=lambda *_: None,
                device=lambda *_: contextlib.nullcontext(), device_of=lambda *_: contextlib.nullcontext(),
                Event=partial(FakeEvent, world), current_stream=MagicMock(), graph_pool_handle=lambda: (0, 0),
                CUDAGraph=partial(FakeGraph, world), graph=graph)

    def launch(kernel, *args, grid, warmup, **named):
        assert all(x.is_cuda for x in args if isinstance(x, torch.Tensor)), kernel.__name__
        world.launches.append(kernel.__name__)
        world.clock += 1000
        if world.capturing:
            world.capturing.use(kernel.__name__, args, named)

    made = Decoder.__init__

    def make(decoder, *args, **named):
        made(decoder, *args, **named)
        world.decoders.append(decoder)

    for where, name, value in (
            *((torch.cuda, name, value) for name, value in cuda.items()), (kernels, "_gpu", lambda _: h200()),
            (torch._C, "_cuda_clearCublasWorkspaces", world.clear_workspaces), (JITFunction, "run", launch),
            (torch.Tensor, "pin_memory", lambda x: x), (F, "scaled_dot_product_attention", fused_attention),
            (bias, "causal_lower_right", lambda *shape: shape), (FakeTensor, "numpy", read),
            (FakeTensor, "tolist", lambda x: read(x).tolist()), (Decoder, "__init__", make)):
        monkeypatch.setattr(where, name, value, raising=False)
    with FakeTensorMode(), Indexing(world):
        yield world


MIXED = (1, 0), (5, 4), (6, 0), (13, 4)


@pytest.fixture
def start(request):
    """A function that makes a model and heads with real values, since heads read the LM head's scale, and moves them to
    a fake GPU: returns (world, model, heads). bits: quantises the layers."""
    def make(name="one layer", kind="clover", dtype=torch.bfloat16, bits=None, **switches):
        model = toy_model(block_size=2048, **MODELS.get(name, dict(n_layer=1)))
        make_heads = MAKERS.get(kind) or partial(random_heads, name=kind)
        heads = make_heads(model, **switches) if kind else None
        modules = [module.to(dtype) for module in (model, heads) if module is not None]
        weights = {} if bits is None else {layer: round_weight(model.get_parameter(f"{layer}.weight"), bits, 32)
                                           for layer in ("embed", *LAYERS[:4 * model.config.n_layer])}
        world = request.getfixturevalue("world")
        with patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True):
            for module in modules:
                module._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
        for layer, weight in weights.items():
            fake = [x if x is None else torch.empty(x.shape, dtype=x.dtype) for x in weight]
            gpu.put(model, layer, [Quantized(*fake)])
        for module in modules:
            gpu.apply(module)
        model.decoder = gpu.GraphDecoder
        return world, model, heads
    return make


LAYERS = [f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")]
PROMPTS = [1, 2, 3], [4], [*range(40)] * 15, [5, 6], [7] * 30


def plans(engine):
    """The plans of the steps that the decoder has captured, each in one graph."""
    assert all(replay and key[0] == "step" for key, replay in engine.decoder.graphs.items())
    return [plan for _, plan in engine.decoder.graphs]


def decode(model, heads):
    engine = Engine(model, policy=Cycling(model, heads, MIXED), batch_size=3, capacity=700)
    output = engine.generate(PROMPTS, 9)
    assert [len(tokens) for tokens in output.tokens] == [9] * 5
    return engine


@pytest.mark.parametrize("name, dtype, kind, switches", [
    ("llama", FP32, "clover", {}), ("alibi", FP16, "clover2", {}), ("gemma", BF16, "hydra", {}),
    ("llama", BF16, "medusa", {}), ("llama", BF16, "eagle3 of 33 tokens", {}), ("alibi", FP16, "eagle3", {}),
    ("llama", BF16, "dspark", dict(bits=4)), ("hybrid", BF16, "mtp", {}),
    ("llama", BF16, None, {}), ("llama", BF16, "clover", dict(vocabulary=20)), ("hybrid", BF16, "clover", {}),
    ("llama", BF16, "clover", dict(bits=4, vocabulary=20)), slow("untied-biased", FP16, "clover2", dict(bits=8)),
    slow("alibi", FP32, "clover", {}), slow("gpt2", BF16, "clover", {}), slow("qk-norm", FP16, "clover", {}),
    slow("olmo", FP32, "clover", {})], ids=str)
def test_every_model_decodes_on_a_fake_gpu(name, dtype, kind, switches, start, prefilled):
    """Bug: a tensor on the CPU, a wrong dtype, a read from the device between steps, attention by the MATH backend."""
    world, model, heads = start(name, kind, dtype, **switches)
    engine = decode(model, heads)
    assert plans(engine) == [(3, *option, GREEDY) for option in engine.policy.options]
    assert len(world.graphs) == len(engine.policy.options) and all(graph.replays for graph in world.graphs)
    assert prefilled[:2] == [(1, 512), (1, 23)]  # the last tokens of a long prompt, and short ones, are read by steps
    shown = []
    engine.generate(PROMPTS, 9, on_step=shown.append, with_trees=True)  # trees are copied from graphs, too
    assert all(len(column) == step.tree_size for step in shown for column in step.tree)
    assert sum(len(step.tokens) for step in shown) == 9 * 5


@pytest.mark.parametrize("mode", [GREEDY, NOISE])
def test_the_root_decodes_by_replays_on_a_fake_gpu(mode, start):
    """Bug: an operation without backends/ and engine/ that reads from the device, or that no graph can hold."""
    world, model, heads = start()
    model.decoder = None
    engine = FifoEngine(model, policy=Fixed(model, heads, True, 9), batch_size=3, capacity=700)
    for _ in range(2):
        output = engine.generate(PROMPTS, 9, sampling=[Sampling(float(mode))] * 5)
        assert (output.emitted, output.batch_steps) == (9 * 5, 9 + 9) and plans(engine) == [(3, 9, 4, mode)]
    # all but the first step, and those that ran while the host read the last one of three or two sequences
    assert [graph.replays for graph in world.graphs] == [2 * (10 + 10) - 1]


def test_sequences_with_different_sampling_share_a_step_on_a_fake_gpu(start):
    """Bug: a graph of another sampling mode, a wait for parameters, filters or noise that no sequence needs."""
    world, model, heads = start(kind=None)
    engine = Engine(model, policy=Policy(model, lookup=True, tree_size=4), batch_size=2, capacity=100)
    for mode, sampling in enumerate((Sampling(), Sampling(0.8), Sampling(0.8, top_k=5))):
        world.launches.clear()
        engine.generate([[1, 2], [3]], 9, sampling=[Sampling(), sampling])
        assert plans(engine) == [(2, 4, 0, seen) for seen in range(mode + 1)]
        assert len(world.graphs) == len(engine.decoder.graphs)
        assert ("_filtered_sample_kernel" in world.launches) == (mode == 2) != ("_project_kernel" in world.launches)


@pytest.mark.parametrize("tree_size, kind", [(None, None), slow(5, "clover")])
def test_a_server_captures_everything_beforehand(tree_size, kind, start):
    """Bug: a capture or an operation while requests run, in any sampling mode, for any number of them or for a prompt;
    steps of more rows than there are sequences; options that were left out are chosen; times that are not learnt."""
    world, model, heads = start(kind=kind)
    engine = Engine(model, policy=Policy(model, heads, True, tree_size), batch_size=6, capacity=200)
    policy = engine.policy
    seen = []
    capture_all(engine, lambda steps: seen.extend(steps) or steps)
    assert [*engine.decoder.batch_sizes] == [1, 2, 4, 6] and policy.captured == {False: {*seen}, True: set()}
    assert tree_size or {T for _, T, _ in seen} <= {1, *gpu.GraphDecoder.read_sizes, *gpu.GraphDecoder.tree_sizes}
    rows = [B * T for B, T, _ in seen]
    trees = [n for n, (_, T, _) in zip(rows, seen) if T not in (1, tree_size)]
    assert trees == sorted(trees, reverse=True) == rows[-len(trees):]
    assert len(engine.decoder.graphs) == 3 * len(seen) == len(world.graphs)
    assert all(n <= LARGEST_STEP for n in rows) and {B for B, T, _ in seen if T == 64} <= {1, 2, 4, 6}
    assert len(policy.times.corrections) > 6
    world.launches.clear()
    ran, names = [], set()
    note = lambda name, args, result: names.update([name] * any(x.is_cuda for x in tensors((args, result))))
    launch = engine.decoder.launch
    engine.decoder.launch = lambda plan, *rest: ran.append((plan.B, len(engine.running))) or launch(plan, *rest)
    for n in (1, 2, 3, 14):
        with Operations(note):
            for sampling in (Sampling(), Sampling(0.8), Sampling(0.8, top_k=5)):
                engine.generate([[*range(2 + 7 * n)] for n in range(n)], 5, sampling=[sampling] * n)
        policy.tree_size = 1  # a request without drafting
        engine.generate([[1, 2, 3]] * n, 5)
        policy.tree_size = tree_size
    assert not world.launches and len(world.graphs) == 3 * len(seen)
    assert names <= {"as_strided", "expand", "device", "to", "_to_copy", "zero_"}  # views, and copies to the host
    assert all(running <= B < 2 * running or B == 6 for B, running in ran) and {B for B, _ in ran} == {1, 2, 4, 6}


@pytest.mark.parametrize("tree_size, fits", [(None, 4), (None, 0), (5, 4), (1, 0)])
def test_a_server_captures_what_fits(tree_size, fits, start, monkeypatch):
    """Bug: captures until memory is full, an option without a graph, an error where nothing could be captured."""
    world, model, heads = start()
    engine = Engine(model, policy=Policy(model, heads, True, tree_size), batch_size=4, capacity=200)
    free = iter([2**40] * fits + [2**34] * 99)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (next(free), 2**40))
    capture_all(engine)
    assert len(engine.policy.captured[False]) == fits and len(world.graphs) == 3 * fits
    assert sum(map(len, engine.generate([[1, 2]] * 9, 5).tokens)) == 45 and (fits < 4 or len(world.graphs) == 12)


@pytest.mark.parametrize("guided", [False, True])
def test_a_capture_without_memory_is_not_tried_again(guided, start, monkeypatch):
    """Bug: a capture that fails in every step, or a graph that reads what an eager part no longer writes there."""
    world, model, heads = start()
    engine = Engine(model, policy=Policy(model, heads, False, 5, schema=True), batch_size=2, capacity=200)
    tried = []

    def full(body, *_):
        tried.append(body.func.__name__)
        raise torch.OutOfMemoryError
    monkeypatch.setattr(generate_module, "capture", full)
    with patch.object(ToyGrammar, "take", lambda _, tokens: len(tokens)):
        output = engine.generate([[1, 2], [3]], 9, grammars=[ToyGrammar(), None] if guided else None)
    assert output.emitted == 18 and not world.graphs
    assert len(tried) == len(engine.decoder.eager) <= 4 and {*tried} == {"draft" if guided else "step"}
    capture_all(engine)
    assert not engine.policy.captured[False]


def launched(engine, part):
    """Collects of each step whether it has a guide (part 1) or log-probabilities (part 2), and the steps in flight."""
    launch, seen = engine.decoder.launch, []

    def note(plan, with_trees, step):
        seen.append((step.args[part] is not None, len(engine.in_flight)))
        return launch(plan, with_trees, step)
    engine.decoder.launch = note
    return seen


def test_steps_with_grammars_are_three_graphs_on_a_fake_gpu(start):
    """Bug: a wait or a copy from the host inside a graph, a step in flight whose tokens a matcher needs, a capture
    while a server's requests run, another step for batches without grammars, memory that only one part owns."""
    world, model, heads = start()
    policy = Policy(model, heads, True, 5, schema=True)
    engine = Engine(model, policy=policy, batch_size=4, capacity=200)
    capture_all(engine)
    plain = len(world.graphs)
    capture_all(engine, guided=True)
    guided = policy.captured[True]
    assert len(world.graphs) - plain == 3 * 3 * len(guided) and guided < policy.captured[False]
    assert {part: sum(key[0] == part for key in engine.decoder.graphs) for part in ("draft", "verify", "finish")
            } == dict.fromkeys(("draft", "verify", "finish"), 3 * len(guided))
    assert max(B * T for B, T, _ in guided) == LARGEST_GUIDED and [*engine.decoder.batch_sizes] == [1, 2, 4]
    world.launches.clear()
    ahead = launched(engine, 1)
    for grammars in ([ToyGrammar(), None, None], [None] * 3):
        ahead.clear()
        before = [graph.replays for graph in world.graphs]
        with patch.object(ToyGrammar, "take", lambda _, tokens: len(tokens)):
            output = engine.generate([[1, 2], [*range(90)], [3] * 30], 20, grammars=grammars)
        after = [graph.replays - n for graph, n in zip(world.graphs, before)]
        assert [len(tokens) for tokens in output.tokens] == [20] * 3 and not world.launches
        is_guided = grammars[0] is not None
        assert any(after[plain:]) == is_guided == ((True, 0) in ahead) and (True, 1) not in ahead


@pytest.mark.parametrize("bits", [None, 4])
def test_log_probabilities_are_enqueued_beside_the_graphs_on_a_fake_gpu(bits, start):
    """Bug: a wait or a capture for a request that asks, one step in flight less, more rows than a head multiplies."""
    world, model, heads = start(kind=None, bits=bits)
    engine = Engine(model, policy=Policy(model, None, True, 5, schema=True), batch_size=4, capacity=200)
    warm_up(engine)
    warm_up(engine, guided=True)
    graphs = len(world.graphs)
    ahead, rows, logits = launched(engine, 2), [], engine.decoder.head.logits
    engine.decoder.head.logits = lambda hidden: rows.append(len(hidden)) or logits(hidden)
    for grammars in ([None] * 4, [ToyGrammar(), None, None, None]):
        add = partial(GuidedSequence, model.config, max_new_tokens=20, sampling=Sampling())
        sequences = [add([*range(30 * n + 1)], grammar=grammar, top_logprobs=top)
                     for n, (grammar, top) in enumerate(zip(grammars, (3, None, 0, 20)))]
        for sequence in sequences:
            engine.queue(sequence)
        with patch.object(ToyGrammar, "take", lambda _, tokens: len(tokens)):
            while engine.busy:
                engine.step()
        assert [len(sequence.logprobs) for sequence in sequences] == [20, 0, 20, 20]
    assert (True, 1) in ahead and (True, 0) in ahead and len(world.graphs) == graphs and max(rows) == 64


def test_steps_and_stages_are_timed_on_a_fake_gpu(start, monkeypatch):
    """Bug: an inference tensor filled outside inference mode, or a stage that cannot be captured by itself."""
    world, model, heads = start()
    monkeypatch.setattr(timing, "seconds", lambda body: [body() for _ in range(3)] and 1.0)
    for tree_size in (1, 13):
        decoder = timing.timing_decoder(model, heads, tree_size, lookup=True, batch_size=2)
        assert set(timing.stage_times(decoder)) == {"step", *timing.STAGES}
    assert len(world.graphs) == 2 + 4 + 5


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_policies_get_the_device_time_of_each_step(warm, start):
    """Bug: a duration that includes prefill, compilation or host time, or that of another size's step."""
    world, model, heads = start()
    engine = Engine(model, policy=Cycling(model, heads, MIXED), batch_size=3, capacity=700)
    if warm:
        warm_up(engine)
    engine.generate(PROMPTS, 40)
    slow = [] if warm else [None] * 2  # one compiles, one captures
    captured = MIXED if warm else [*MIXED[1:], MIXED[0]]  # in this order; the first option runs once, then the others
    for index, (T, _) in enumerate(captured):
        assert (seconds := engine.policy.seconds[T]) == slow + [(1 + index) / 1e3] * (len(seconds) - len(slow)) != slow


def cancel_all(engine):
    sequences = [engine.add(prompt, 9) for prompt in PROMPTS]
    engine.step()
    assert engine.running and engine.prefilling and engine.waiting
    for sequence in sequences:
        engine.cancel(sequence)


def fail(engine, name):
    """Raises in a method of the Decoder and leaves the engine as it is."""
    with patch.object(Decoder, name, side_effect=RuntimeError), pytest.raises(RuntimeError):
        for prompt in PROMPTS:
            engine.add(prompt, 9)
        while engine.busy:
            engine.step()


CHANGES = {"cleared": Engine.clear, "cancelled": cancel_all,
           "an error in a step": lambda engine: fail(engine, "launch"),
           "an error in a prompt, then cleared": lambda engine: (fail(engine, "prefill"), engine.clear()),
           "another batch": lambda engine: engine.generate([[8], [9] * 600], 20)}


@pytest.mark.parametrize("change", CHANGES)
def test_captured_graphs_stay_valid(change, start):
    """Bug: a graph that reads memory freed by `clear`, such as the plain tree's."""
    world, model, heads = start()
    engine = decode(model, heads)
    CHANGES[change](engine)
    gc.collect()
    before = [graph.replays for graph in world.graphs]
    engine.generate(PROMPTS, 20)
    assert all(graph.replays > n for graph, n in zip(world.graphs, before)) and len(world.graphs) == len(MIXED)


def test_a_capture_is_in_inference_mode(world):
    """Bug: a capture outside inference mode fails while a graph from inside it is alive (pytorch #166792)."""
    x = torch.ones(3, device="cuda")
    world.clear_workspaces()
    replay = capture(lambda: 2 * x, x.device)
    assert replay().is_inference() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("name, kind", [("llama", "clover"), ("alibi", "clover2"), ("gpt2", "hydra")])
def test_losses_of_training_on_a_fake_gpu(name, kind, start, monkeypatch):
    """Bug: a mask on the CPU, a loss that is read back, products in float32, sums in bfloat16, cuDNN attention."""
    world, model, heads = start(name, kind, BF16)
    allowed, products = [], set()
    operations = Operations(lambda name, args, _: products.update(x.dtype for x in args[:2] if name in ("mm", "addmm")))
    monkeypatch.setattr(models, "sdpa_kernel", lambda backends: allowed.extend(backends) or contextlib.nullcontext())
    # autocast would cast its float32 to bfloat16; the fake one does not
    attention = patch.object(F, "scaled_dot_product_attention", lambda q, *_, **__: q.bfloat16())
    with (patch.object(torch.cuda, "is_available", lambda: True), attention, torch.no_grad(), operations,
          patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True)):
        trainer = SimpleNamespace(heads=heads, dtype=BF16, reduce=lambda x: x)
        ids = torch.zeros(2, 40, dtype=torch.int64, device="cuda")
        loss, accuracies = Trainer.loss(trainer, ids, ids.bool(), ids)
    assert loss.shape == () and accuracies.shape == (heads.config.n_draft,)
    assert loss.dtype == FP32 and loss.is_cuda and products == {BF16}
    assert allowed and torch.nn.attention.SDPBackend.CUDNN_ATTENTION not in allowed


def move(decoder, accepted, old=[]):
    old.append(decoder.slots.state)  # still alive, but the host writes elsewhere
    decoder.slots.state = decoder.slots.state.clone()


PLANTED = {
    "_local_scalar_dense": lambda decoder, accepted: accepted.count.sum().item(),
    "host's data while capturing": lambda decoder, accepted: accepted.count.add_(torch.tensor([1] * 3, device="cuda")),
    "a number from the host": lambda decoder, accepted: decoder.slots.active.__setitem__(0, 1),
    "memory that is gone": lambda decoder, accepted: setattr(decoder.slots, "state", decoder.slots.state.clone()),
    "tensors were": move}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_defects_of_a_step_are_detected(error, start, monkeypatch):
    world, model, heads = start()
    commit = Decoder.commit

    def planted(decoder, plan, draft, hidden, accepted):
        PLANTED[error](decoder, accepted)
        commit(decoder, plan, draft, hidden, accepted)
    monkeypatch.setattr(Decoder, "commit", planted)
    with pytest.raises(Exception, match=error):
        decode(model, heads)
