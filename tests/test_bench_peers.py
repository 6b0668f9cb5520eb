"""bench/peers.py: other programs run the same model, and their times are shown beside ours."""

import contextlib
import json
import shutil
import sys

import pytest
import torch

from backends.cpu import packs
from bench import __main__ as bench
from bench import peers, steps
from conftest import toy_model
from generate import generate
from model import GPT, InputError
from test_bench import TOY, run_fixture  # noqa: F401
from tools.timing import PREFIX

TIMES = "decode", "--random-weights", "7b"
SHAPES = {"llama": dict(), "untied": dict(tied=False), "qwen2": dict(family="qwen2", qkv_bias=True)}
FIELDS = dict(block_size=512, rope_theta=300.0, norm_eps=1e-3)  # none of which is anybody's default


@torch.inference_mode()
def expected_logits(model, tokens):
    """Our logits [T, V] of tokens after a prefix as the programs have it in their caches."""
    prefix = torch.arange(PREFIX) % model.config.vocab_size
    return model.lm_head(model(torch.cat((prefix, tokens))[None]))[0, PREFIX:].float()


def llama_cpp_logits(peer, tree_size):
    """float32 [T, V] of the batch that was decoded last."""
    logits = peer.lib.llama_get_logits(peer.context)
    return torch.tensor(logits[:tree_size * peer.vocab_size]).view(tree_size, -1)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 0.02), (torch.float16, 0.03), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_runs_the_same_model(shape, dtype, atol):
    """Bug: rows that are not permuted, or permuted where they should not be, a name, a bias or a number that the file
    lacks, a dtype that is another number format, tokens that stay in the cache. Its own cache is float16."""
    pytest.importorskip("gguf", reason="needs gguf")
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    model = toy_model(**SHAPES[shape], **FIELDS).to(dtype)
    with contextlib.ExitStack() as stack:
        peer, exact = peers.LlamaCpp(model, stack), model.float()
        for tree_size in (64, 1, 5):
            step, want = peer.body(tree_size), expected_logits(exact, torch.arange(tree_size))
            for _ in range(2):
                step()
                torch.testing.assert_close(llama_cpp_logits(peer, tree_size), want, rtol=0, atol=atol)
    assert want.std() > 20 * atol or dtype == torch.bfloat16


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_runs_the_same_model_from_the_same_memory(shape):
    """Bug: other weights, a copy of them, a token that stays in the cache."""
    pytest.importorskip("transformers", reason="needs transformers")
    model = toy_model(**SHAPES[shape], **FIELDS)
    peer, want = peers.Transformers(model, None), expected_logits(model, torch.arange(1))
    step = peer.body(1)
    for _ in range(2):
        with torch.inference_mode():
            step()
        assert peer.cache.get_seq_length() == PREFIX
    with torch.inference_mode():
        torch.testing.assert_close(peer.decode(torch.arange(1)[None])[0], want, rtol=1e-4, atol=1e-4)
    ours, theirs = ({p.untyped_storage().data_ptr() for p in m.parameters()} for m in (model, peer.model))
    assert theirs == ours and peer.body(4) is None


class Fake:
    """A program whose steps do nothing."""
    title, packages, version, closed = "fake", "fake", "1.0", 0

    def __init__(self, model, stack):
        stack.callback(self.close)

    def body(self, tree_size):
        return lambda: type(self)

    def close(self):
        type(self).closed += 1


class FakeOfOne(Fake):
    def body(self, tree_size):
        return super().body(tree_size) if tree_size == 1 else None


def test_times_are_taken_in_turns_and_ratios_round_by_round(run, monkeypatch):
    """Bug: a ratio of medians, or the wrong way round; a program that is timed after the others, not among them; one
    that runs beside a larger batch."""
    monkeypatch.setattr(peers, "PROGRAMS", dict(llama_cpp=Fake, transformers=FakeOfOne))
    times = iter([1, 2, 4, 10, 40, 10, 3, 3, 30] + [1, 2, 8, 4, 6, 3] + [7, 9, 8])
    order = []

    def seconds(body, device, group):
        order.append(getattr(body(), "__name__", "ours"))
        return next(times) / 1000
    monkeypatch.setattr(steps, "seconds", seconds)
    lines, result = run(*TIMES, "--batch-sizes", "1", "--tree-sizes", "1", "4", "--runs", "3")
    one, tree = result["steps"]
    assert order == ["ours", "Fake", "FakeOfOne"] * 3 + ["ours", "Fake"] * 3
    assert [one[f"{name}_ms"] for name in ("step", "llama_cpp", "transformers")] == pytest.approx([3, 3, 10])
    assert one["llama_cpp_ratio"] == pytest.approx(0.5) and one["transformers_ratio"] == pytest.approx(4)
    assert tree["step_ms"] == pytest.approx(6) and tree["llama_cpp_ratio"] == pytest.approx(2)
    assert tree["llama_cpp_ms"] == pytest.approx(3) and "transformers_ms" not in tree
    assert any(line.startswith("| 1 | 1 | 3.00 |") and line.endswith("| 3.00 | 0.50x | 10.00 | 4.00x |")
               for line in lines)
    _, larger = run(*TIMES, "--batch-sizes", "2", "--tree-sizes", "4", "--runs", "3")
    assert set(larger["steps"][0]) == {"batch_size", "tree_size", "step_ms", "floor_ms", "share", "stages_ms"}
    assert larger["steps"][0]["step_ms"] == pytest.approx(8) and "peers" not in larger
    assert result["peers"] == dict(llama_cpp="1.0", transformers="1.0") and "fake: 1.0" in lines


@pytest.mark.parametrize("missing", ["llama_cpp", "gguf"])
def test_a_program_that_is_not_installed_is_said_to_be_missing(run, monkeypatch, missing):
    for name in (missing, "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
    lines, result = run(*TIMES, "--batch-sizes", "1", "--tree-sizes", "1", "--runs", "1")
    assert lines[-2:] == ["llama.cpp: not installed (pip install llama-cpp-python gguf)",
                          "transformers: not installed (pip install transformers)"]
    assert result["peers"]["llama_cpp"] == "not installed (pip install llama-cpp-python gguf)" and result["complete"]
    assert set(result["steps"][0]) == {"batch_size", "tree_size", "step_ms", "floor_ms", "share", "stages_ms"}


def test_transformers_decodes_a_checkpoint_as_we_do(checkpoint, tmp_path, monkeypatch):
    """Bug: other texts than ours, the prompt among them, a text that ends early, flags that both programs share; rows
    where transformers cannot be compared."""
    pytest.importorskip("transformers", reason="needs transformers")
    model, given = GPT.from_pretrained(checkpoint, device="cpu"), [[104, 101, 105], [110, 32] * 6]
    want = generate(model, given, 12)
    folder = shutil.copytree(checkpoint, tmp_path / "ends early")
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=want.tokens[0][3])))
    programs, version = peers.generating(model, folder, 0.0, 1, given)
    assert list(programs) == ["transformers", "transformers, prompt lookup"] and version[0].isdigit()
    for program in programs.values():
        found = program(given, 12)
        assert found.tokens == want.tokens and found.tokens_per_second == pytest.approx(24 / found.seconds)
    assert [program.keywords for program in programs.values()] == [{}, dict(prompt_lookup_num_tokens=10)]
    for temperature, batch_size in ((0.5, 1), (0.0, 2)):
        programs, reason = peers.generating(model, checkpoint, temperature, batch_size, given)
        assert not programs and reason == "measured only on one rank, at temperature 0 and batch size 1"
    monkeypatch.setitem(sys.modules, "transformers", None)  # cannot be imported
    assert peers.generating(model, checkpoint, 0.0, 1, given)[1] == "not installed (pip install transformers)"


def test_a_program_without_room_is_left_out_in_words(monkeypatch):
    """Bug: a run that dies where only the comparison has no room, a program that is not closed after an error."""
    def no_room(model, stack):
        raise InputError("it takes 6 GB")
    no_room.packages = "none"
    monkeypatch.setattr(peers, "PROGRAMS", dict(llama_cpp=no_room, transformers=Fake))
    monkeypatch.setattr(Fake, "closed", 0)
    with pytest.raises(KeyboardInterrupt), peers.running(toy_model()) as (others, words):
        assert list(others) == ["transformers"]
        assert words == dict(llama_cpp="left out: it takes 6 GB", transformers="1.0")
        raise KeyboardInterrupt
    assert Fake.closed == 1


def test_llama_cpp_wants_room_for_its_file(monkeypatch):
    pytest.importorskip("gguf", reason="needs gguf")
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    model = toy_model()
    monkeypatch.setattr(peers, "free_memory", lambda device: 1000)
    with pytest.raises(InputError, match="file of the weights takes .* free on cpu"):
        peers.LlamaCpp(model, contextlib.ExitStack())
    with pytest.raises(InputError, match="gpt2 family.*llama or qwen2"):
        peers.write_gguf(toy_model(family="gpt2"), "nowhere")


@pytest.mark.parametrize("tokens, flag, want", [(97, None, 0), (97, 10, 10), (2**14, None, 2**13), (2**14, 0, 0)])
def test_the_draft_vocabulary_is_that_of_the_flag(monkeypatch, tokens, flag, want):
    """Bug: heads that draft among all ids in spite of the flag, a default that a small vocabulary does not have."""
    monkeypatch.setitem(steps.SIZES, "7b", ("a toy", (tokens, *TOY[1][1:]), {}))
    heads = steps.random_heads(steps.random_model("7b", torch.device("cpu"), torch.float32), flag)
    assert heads.vocabulary.tolist() == list(range(want)) if want else heads.vocabulary is None


def test_weights_and_peak_memory_are_recorded(run, monkeypatch):
    """Bug: the bytes of another dtype, a tied table counted twice, a peak taken before the weights are packed."""
    monkeypatch.setattr(peers, "PROGRAMS", {})
    monkeypatch.setitem(steps.SIZES, "7b", (*TOY[:2], steps.QWEN))
    models, packed, random_model, peak_memory = [], [], steps.random_model, steps.peak_memory

    def spy(body):
        packed.append(getattr(models[0].head, "packed_weight", None))
        peak = peak_memory(body)
        packed.append(getattr(models[0].head, "packed_weight", None))
        return peak
    monkeypatch.setattr(steps, "random_model", lambda *args: models.append(random_model(*args)) or models[0])
    monkeypatch.setattr(steps, "peak_memory", spy)
    result = run(*TIMES, "--batch-sizes", "1", "--tree-sizes", "3", "--runs", "1", "--dtype", "float32")[1]
    per_layer = 64 * 128 + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert result["weights_gb"] == pytest.approx(4e-9 * (97 * 64 + 2 * per_layer + 64))
    assert result["heads_gb"] > 0 and result["peak_rss_gb"] > result["weights_gb"]
    assert packed[0] is None and (packed[1] is not None) == packs(torch.float32)


def test_a_peak_of_memory_is_that_of_the_body():
    """Bug: an earlier peak, or what is left when the body has returned."""
    try:
        open("/proc/self/clear_refs", "w").close()
    except OSError:
        pytest.skip("needs Linux, which forgets a peak")
    large = steps.peak_memory(lambda: torch.ones(10**8))  # 0.4 GB, freed when it returns
    assert 0.3 < large - steps.peak_memory(lambda: None) < 0.5


def test_runs_default_to_three_and_to_five_with_random_weights():
    assert bench.parse(["decode"]).runs == 3 and bench.parse(["decode", "--random-weights", "8b"]).runs == 5
    assert bench.parse(["decode", "--random-weights", "8b", "--runs", "2"]).runs == 2
