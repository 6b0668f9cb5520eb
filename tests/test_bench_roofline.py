"""bench/roofline.py: the prediction is the sum it says it is, and has the shape that is known."""

import json

import pytest
import torch

import kernels
from bench import __main__ as bench
from bench import decoding, roofline
from clover import PRESETS, CloverHeads, preset
from generate import DraftPlan
from model import GPT, GPTConfig, InputError
from static import step_launches
from tools.flags import DEMO
from tools.timing import PREFIX

CONFIG = GPTConfig(vocab_size=1000, n_layer=3, n_head=8, n_kv_head=2, head_size=16, n_embd=128, n_inner=256)
SLOW = roofline.GPU(bandwidth=1e-3, peak=1e9, memory=1.0, launch=0.0)   # bytes are all that counts
WEAK = roofline.GPU(bandwidth=1e9, peak=1e-3, memory=1.0, launch=0.0)   # FLOPs are
DULL = roofline.GPU(bandwidth=1e9, peak=1e9, memory=1.0, launch=3.0)    # launches are


@pytest.fixture
def run(capsys):
    """Runs `bench roofline` with flags: (its printed lines, the object of its last line)."""
    def run(*flags):
        bench.main(["roofline", *flags])
        *lines, last = capsys.readouterr().out.strip().splitlines()
        return lines, json.loads(last)
    return run


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_gains_over_batch_sizes_have_the_shape_of_the_papers_figure(run, gpu):
    """Figure 2 of arXiv 2405.00263: 30 B parameters, speculation length 5, acceptance 0.4. Bug: a gain that does not
    fall when the arithmetic runs out."""
    lines, result = run("--model", "30b", "--gpu", gpu, "--acceptance", "0.4", "--tree-sizes", "6", "--prefix", "0")
    gains = [row["speed_up"] for row in result["rows"]]
    assert "prediction" in lines[0] and "not a measurement" in lines[0] and result["predicted"]
    assert 1.4 < gains[0] < sum(0.4 ** i for i in range(6)) and gains[-1] < 0.5
    assert all(later <= earlier for earlier, later in zip(gains, gains[1:]))
    last = int(result["pays"]["6"].removeprefix("pays up to batch size "))
    assert 32 <= last < 128 and f"T = 6: pays up to batch size {last}" in lines
    assert all((row["speed_up"] > 1) == (row["batch_size"] <= last) for row in result["rows"])


def test_bytes_of_a_plain_step_are_those_of_the_measured_floor():
    """Bug: weights that are not read, a cache of other sizes, an embedding table that no step reads."""
    for tied in (True, False):
        config = GPTConfig(**vars(CONFIG) | dict(tied=tied))
        model = GPT(config).to(torch.bfloat16)
        want = decoding.step_bytes(model, 50) / 1e9
        got = roofline.Prediction(SLOW, config, PRESETS["clover"], PREFIX - 1).step(50, 1)
        assert got == pytest.approx(want, rel=1e-3)


def test_a_step_is_the_sum_that_is_written_down():
    """Bug: FLOPs, launches, heads, beams or the augmenting block counted wrongly. Here by the modules themselves."""
    heads = CloverHeads(preset("clover"), GPT(CONFIG).init_weights())
    count = lambda module: sum(p.numel() for p in module.parameters())
    B, T, K, W, lm_head = 4, 16, 4, 4, 1000 * 128
    layer, head, augment = count(heads.model.blocks[0]), count(heads.heads[0]), count(heads.augment_blocks[0])
    step = lambda gpu, heads=PRESETS["clover"], **chain: roofline.Prediction(gpu, CONFIG, heads, 100, **chain).step
    products = B * T * (3 * layer + lm_head) + (B + 3 * B * W) * (head + lm_head) + B * (K + 1) * augment
    attention = B * 8 * 16 * (3 * T * (100 + T) + (K + 1) * (100 + K + 1))
    assert step(WEAK)(B, T) * 1e9 == pytest.approx(2 * products + 4 * attention, rel=1e-6)
    weights = 3 * layer + lm_head + K * (head + lm_head) + augment
    cache = B * 2 * 2 * 16 * (3 * (100 + T) + 100 + K + 1)
    assert step(SLOW)(B, T) * 1e9 == pytest.approx(2 * (weights + cache), rel=1e-6)
    assert step(DULL)(B, T) * 1e6 == pytest.approx(3 * (3 * 10 + 10 + 4 * 14 + 10 + 6), rel=1e-3)
    chain = step(WEAK, chain=True)(1, 6) - step(WEAK, chain=True)(1, 5)  # a head, a row of each layer, one of the block
    more = layer * 3 + lm_head + head + lm_head + augment + 2 * 8 * 16 * (3 * (6 * 106 - 5 * 105) + 6 * 106 - 5 * 105)
    assert chain * 1e9 == pytest.approx(2 * more, rel=1e-6)
    medusa, few = PRESETS["medusa"], preset("clover", vocabulary=100)
    assert step(WEAK, medusa)(B, T) < step(WEAK, preset("hydra"))(B, T)
    assert step(SLOW)(B, T) - step(SLOW, few)(B, T) == pytest.approx(2 * 4 * 900 * 128 / 1e9)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind, size", [("int8", 1), ("int4", 67 / 128)])
def test_packed_weights_take_fewer_bytes(kind, size, tied):
    """Bug: an LM head of 4 bits, heads that are packed too, a tied LM head that takes the embeddings' place."""
    config = GPTConfig(**vars(CONFIG) | dict(tied=tied))
    layer = sum(p.numel() for p in GPT(config).blocks[0].parameters())
    whole, packed = (roofline.Prediction(SLOW, config, PRESETS["clover"], quantize=name) for name in (None, kind))
    saved = 3 * layer * (2 - size) + 1000 * 128  # bytes
    assert (whole.step(2, 1) - packed.step(2, 1)) * 1e9 == pytest.approx(saved, rel=1e-6)
    assert (whole.step(2, 3) - packed.step(2, 3)) * 1e9 == pytest.approx(saved + 2 * 1000 * 128, rel=1e-6)
    kept = 2 * 1000 * 128 if tied else 0
    assert (whole.memory(2, 3) - packed.memory(2, 3)) * 1e9 == pytest.approx(saved - kept, rel=1e-6)


@pytest.mark.skipif(not kernels.HAS_TRITON or kernels.INTERPRETED.value, reason="needs triton, not interpreted")
@pytest.mark.parametrize("n_layer, tree_size", [(2, 1), (8, 4), (8, 16)])
def test_launches_are_about_those_of_a_step(n_layer, tree_size):
    """Bug: a prediction for kernels that are not these any more."""
    model = GPT(GPTConfig(vocab_size=500, n_layer=n_layer)).init_weights()
    heads = CloverHeads(preset("clover"), model).to("meta")
    plan = DraftPlan(tree_size - 1)
    used = heads if plan.head_nodes else None
    found = step_launches(model.to("meta"), used, plans=(plan,), capacity=1000).total()
    us = 1e6 * roofline.Prediction(DULL, model.config, PRESETS["clover"]).step(1, tree_size)
    assert us / DULL.launch == pytest.approx(found, rel=0.1)


def test_tokens_per_step_come_from_the_heads_or_the_chance(run, tmp_path):
    """Bug: another table, temperature or tree; a chain's bonus token forgotten."""
    flags = ["--model", str(DEMO), "--batch-sizes", "1", "--tree-sizes", "4", "16"]
    rows = run(*flags)[1]["rows"]
    table = json.loads((DEMO / "clover" / "heads.json").read_text())["acceptance"]
    want = lambda t, n: 1 + sum(sum(row[:n - 1]) for row in table[t][:n - 1])
    assert [row["tokens_per_step"] for row in rows] == pytest.approx([want("0", 4), want("0", 16)])
    rows = run(*flags, "--temperature", "1")[1]["rows"]
    assert rows[1]["tokens_per_step"] == pytest.approx(want("1", 16))
    rows = run(*flags, "--acceptance", "0.5")[1]["rows"]
    assert rows[0]["tokens_per_step"] == 1.875
    assert rows[0]["tokens_per_second"] == pytest.approx(1875 / rows[0]["step_ms"])
    assert rows[0]["speed_up"] == pytest.approx(1.875 * rows[0]["plain_ms"] / rows[0]["step_ms"])
    CloverHeads(preset("clover"), GPT(CONFIG).init_weights()).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no acceptance table.*--acceptance"):
        run("--heads", str(tmp_path))


def test_rows_that_do_not_fit_are_left_out(run):
    """Bug: a gain at a batch size that no memory holds."""
    lines, result = run("--model", "30b", "--gpu", "a100", "--acceptance", "0.4", "--tree-sizes", "6")
    assert [row["batch_size"] for row in result["rows"]] == [1, 2, 4, 8, 16]
    assert result["pays"]["6"] == "pays for all 28 sequences that the memory holds"
    prediction = roofline.Prediction(roofline.GPUS["a100"], roofline.sizes("30b"), PRESETS["clover"], chain=True)
    assert prediction.memory(28, 6) <= 80 < prediction.memory(29, 6)
    with pytest.raises(InputError, match="70b on h100.*141 GB.*80; take another"):
        run("--model", "70b", "--gpu", "h100")
    assert run("--acceptance", "0", "--tree-sizes", "4")[1]["pays"]["4"] == "does not pay"
    with pytest.raises(InputError, match="nowhere: no such folder; expected a .* checkpoint folder"):
        run("--model", "nowhere")


def test_the_prediction_is_held_against_measured_steps(run, tmp_path):
    """Bug: a row beside another's time, another model's sizes, a CPU's steps taken for a GPU's."""
    gpu = roofline.GPUS["h200"]
    step = roofline.Prediction(gpu, roofline.sizes("7b"), PRESETS["clover"], 256).step
    row = lambda B, T: dict(batch_size=B, tree_size=T, step_ms=2e3 * step(B, T))
    record = dict(bench="decode-random", model="7b", prefix=256, draft_vocabulary=0, steps=[row(1, 1), row(8, 16)],
                  machine=dict(gpu="NVIDIA H200"))
    (tmp_path / "other.json").write_text('{"bench": "decode"}')
    (tmp_path / "cpu.json").write_text(json.dumps(record | dict(machine=dict(gpu=None))))
    with pytest.raises(InputError, match="holds no steps measured on a GPU"):
        run("--check", str(tmp_path))
    (tmp_path / "steps.json").write_text(json.dumps(record))
    few = roofline.Prediction(gpu, roofline.sizes("7b"), preset("clover", vocabulary=1000), 256)
    times = dict(batch_size=1, tree_size=8, step_ms=3e3 * few.step(1, 8))
    (tmp_path / "steps2.json").write_text(json.dumps(record | dict(steps=[times], draft_vocabulary=1000)))
    lines, result = run("--check", str(tmp_path))
    assert [row["ratio"] for row in result["rows"]] == pytest.approx([2.0, 2.0, 3.0])
    assert "NVIDIA H200" in lines[0] and any(line.startswith("| 7b | 8 | 16 |") for line in lines)
