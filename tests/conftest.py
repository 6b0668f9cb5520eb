"""Small models and helpers for the tests."""

import json
import os
import shutil
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests run without network
if not os.access(os.path.expanduser("~"), os.W_OK):  # without a home, Triton would write to ./~
    triton_cache = tempfile.TemporaryDirectory()
    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache.name)

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from backends import cpu_layers, cpu_library
from clover import PRESETS, CloverHeads
from common.files import read_json
from model import GPT, GPTConfig, InputError
from recurrent.layers import DeltaConfig
from training.data import builtin_corpus

ROOT = Path(__file__).parent.parent
INTERPRETED = kernels.INTERPRETED.value
slow = partial(pytest.param, marks=pytest.mark.slow)
needs_compiler = pytest.mark.skipif(cpu_library.library() is None, reason="needs a C compiler, such as gcc")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items):
    """Under Triton's interpreter, which is slow, five of seven cases of a test are `slow`."""
    seen = Counter()
    for item in items if INTERPRETED else ():
        test = item.location[0], getattr(item, "originalname", item.name)
        if seen[test] % 7 not in (0, 3):  # neither always the first of two nor of three dtypes
            item.add_marker(pytest.mark.slow)
        seen[test] += 1


SHAPES = {
    "llama": dict(),
    "untied-biased": dict(tied=False, qkv_bias=True, proj_bias=True, mlp_bias=True),
    "qk-norm": dict(qk_norm="head", n_kv_head=1),
    "gpt2": dict(norm="layer", positions="learned", activation="gelu", gated=False, n_kv_head=4, qkv_bias=True,
                 proj_bias=True, mlp_bias=True),
    "alibi": dict(positions="alibi", n_head=6, n_kv_head=3),
    "alibi-window": dict(positions="alibi", n_head=6, n_kv_head=3, n_layer=3, windows=(0, 6, 6)),
    "gemma": dict(norm_at="both", qk_norm="head", n_layer=3, windows=(5, 0, 11), window_theta=500.0, activation="gelu",
                  embed_scale=8.0, attn_scale=0.2),
    "olmo": dict(norm_at="after", qk_norm="all", n_layer=3, windows=(7, 1, 0)),
    "partial": dict(rotary_size=12, n_layer=3, unrotated=(1,), windows=(0, 0, 8)),
}


DELTA = DeltaConfig(n_head=6, n_key_head=2, key_size=16, value_size=24)
MODELS = SHAPES | {  # and one with recurrent layers
    "hybrid": dict(mixers=(DELTA, None, DELTA), n_layer=3, attn_gate=True, qk_norm="head", rotary_size=8)}


def toy_model(seed=0, scale=4.0, **flags):
    """A random model with 97 tokens. scale: sharpens next-token distributions, so that guesses can be right."""
    sizes = dict(vocab_size=97, block_size=256, n_layer=2, n_head=4, n_kv_head=2, head_size=16, n_embd=64, n_inner=96)
    model = GPT(GPTConfig(**sizes | flags)).init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.mul_(scale)
            else:
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    return model.requires_grad_(False).eval()


class ToyGrammar:
    """A grammar for `toy_model`, and its matcher: each token allows some others, every third one only one."""
    stop, ended, error = [96], None, ""

    def __init__(self):
        self.last = 0

    def start(self):
        return ToyGrammar()

    def allowed(self, token):
        return [token * 5 % 97] if token % 3 == 0 and token else [(token * 5 + i) % 97 for i in range(1, 40)]

    def mask_after(self, token):
        bits = np.zeros(128, np.uint8)
        bits[self.allowed(token)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def mask(self):
        return self.mask_after(self.last)

    def masks(self, tokens, parents, out):
        out[:len(tokens)] = [self.mask_after(token) for token in [self.last, *tokens[1:]]]
        return True

    def forced(self):
        chain = [self.last]
        while len(next_tokens := self.allowed(chain[-1])) == 1 and len(chain) < 9:
            chain += next_tokens
        return chain[1:]

    def take(self, tokens):
        assert all(b in self.allowed(a) for a, b in zip([self.last, *tokens], tokens))
        self.last = tokens[-1]
        return len(tokens)


def random_prompts(lengths, vocab_size=97, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def refusal(call, *says):
    """The message of the InputError that call() raises. Asserts that it is one line and contains all of `says`."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(str(part) in message for part in says), message
    return message


def edit_weights(path, change, name="model.safetensors"):
    """Calls change(tensors) on the tensors of a file, and saves them."""
    tensors = load_file(path / name)
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, path / name)


def edit_json(file, part=None, **changes):
    """Changes values of a JSON file's object, or of a part of it."""
    record = json.loads(file.read_text())
    (record[part] if part else record).update(changes)
    file.write_text(json.dumps(record))


QKV, UP = [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
STACKS = {  # model_type: {tensor of a layer: Llama's, whose rows it stacks}
    "mistral": {}, "glm": {"mlp.gate_up_proj": UP}, "phi3": {"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": UP},
    "baichuan": {"self_attn.W_pack": QKV}}


def convert_llama(path, model_type, **config):
    """Turns a Llama folder without biases into one of a family that only stacks the tensors differently."""
    def stack(tensors):
        for layer in range(read_json(path / "config.json")["num_hidden_layers"]):
            for name, parts in STACKS[model_type].items():
                rows = [tensors.pop(f"model.layers.{layer}.{part}.weight") for part in parts]
                tensors[f"model.layers.{layer}.{name}.weight"] = torch.cat(rows)
    edit_weights(path, stack)
    edit_json(path / "config.json", model_type=model_type, **config)


def call_once(body, *_):  # in place of timing.seconds
    body()
    return 0.001


class Operations(TorchDispatchMode):
    """Calls note(name, arguments, result) after each torch operation."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        self.note(operation.overloadpacket.__name__, args, result)
        return result


@pytest.fixture
def prefilled(monkeypatch):
    """A list that collects the (rows, tokens) of each call of GPT.prefill."""
    shapes, prefill = [], GPT.prefill

    def note(self, tokens, *rest):
        shapes.append(tuple(tokens.shape))
        return prefill(self, tokens, *rest)
    monkeypatch.setattr(GPT, "prefill", note)
    return shapes


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are too small for a second one, which programs take


@pytest.fixture
def exact(monkeypatch):
    """Packs heads in floats: with 4 bits, torch and C round differently and some tokens differ."""
    monkeypatch.setattr(cpu_layers, "pack_rounded", cpu_layers.pack_floats)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no CUDA device")])])
def device(request):
    """Of a kernel's test. Fills new memory with NaN, which exposes reads of scratch memory before it is written."""
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import the inductor
    yield request.param
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="session")
def toy():
    return toy_model()


@pytest.fixture(scope="session")
def corpus():
    return tuple(file.read_text()[:20_000] for file in builtin_corpus("heldout")[:12])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A checkpoint folder with random weights, and a tokenizer of 256 bytes, 'ab' and an end-of-text token."""
    path = tmp_path_factory.mktemp("checkpoint")
    toy_model(vocab_size=258, block_size=128).save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def folder(checkpoint, tmp_path_factory):
    """A copy of the checkpoint with Clover heads beside it."""
    path = shutil.copytree(checkpoint, tmp_path_factory.mktemp("heads") / "checkpoint")
    model = GPT.from_pretrained(path, device="cpu", packed=False)
    CloverHeads(PRESETS["clover"], model).save_pretrained(path / "clover")
    return path


def write_tokenizer(path, added=()):
    """added: {text: whether it is special}; their ids are from 258 on."""
    tokens = {"<|endoftext|>": True, **dict(added)}.items()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [dict(id=257 + i, content=text, special=special, **flags) for i, (text, special) in enumerate(tokens)]
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = dict(type="BPE", vocab={symbol: i for i, symbol in enumerate(symbols)} | {"ab": 256}, merges=["a b"])
    spec = dict(version="1.0", added_tokens=added, normalizer=None,
                pre_tokenizer=byte_level, decoder=byte_level, model=model)
    (path / "tokenizer.json").write_text(json.dumps(spec))
