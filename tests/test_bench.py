"""bench.py: the tables say what a run of `generate` says."""

import json

import pytest

import bench
from clover import PRESETS, CloverHeads
from data import heldout_prompts, load_encoding
from generate import generate
from model import GPT, InputError


def test_bench_heads_prints_tables_and_one_json_line(checkpoint, tmp_path, capsys):
    """Catches a row that belongs to other heads, or a ratio the wrong way round."""
    model = GPT.from_pretrained(checkpoint, device="cpu")
    folders = [tmp_path / name for name in ("medusa", "clover")]
    for folder in folders:
        CloverHeads(PRESETS[folder.name], model).save_pretrained(folder)
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps(dict(text=f"def f{i}(): return {i} " * 40)) + "\n" for i in range(200)))
    bench.main(["heads", "--model", str(checkpoint), "--device", "cpu", "--heads", *map(str, folders), "--data", str(text),
                "--prompts", "3", "--prompt-length", "16", "--max-new-tokens", "12", "--tree-sizes", "6", "--temperatures", "0.5"])
    *lines, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    medusa, clover = result["decoding"]
    assert medusa["heads"] == "medusa" and medusa["extra_over_first"] == 1.0
    assert clover["extra_over_first"] == pytest.approx((clover["tokens_per_step"] - 1) / (medusa["tokens_per_step"] - 1))
    assert clover["identical"] == medusa["identical"] == 1.0
    assert set(result["accuracy"]) == {"medusa", "clover"} and result["machine"]["torch"]
    prompts = heldout_prompts(load_encoding(checkpoint), 3, 16, paths=[text])
    heads = CloverHeads.from_pretrained(folders[1], model)
    want = generate(model, prompts, 12, heads, tree_size=6, temperature=0.5, batch_size=1)
    assert clover["tokens_per_step"] == want.tokens_per_step
    assert any(line.startswith("| clover | 0.5 | 6 |") for line in lines)


def test_bad_flags_are_refused():
    with pytest.raises(InputError, match="prompts must be"):
        bench.main(["heads", "--prompts", "0"])
    with pytest.raises(InputError, match="kernel"):
        bench.main(["kernel"])
