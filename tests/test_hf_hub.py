"""hf/hub.py: models by their name on Hugging Face. The hub is faked; offline, huggingface_hub reads a real cache."""

import shutil
from unittest.mock import Mock

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from huggingface_hub.utils import filter_repo_objects

from clover import CloverHeads, preset
from conftest import refusal
from hf import hub
from hf.chat import stop_tokens
from hf.files import read_family
from hf.heads import default_heads, load_heads
from hf.paths import find_model
from hf.tokenizer import load_encoding
from model import GPT, InputError
from test_hf_checkpoint import theirs_of
from test_hf_gguf import random_blocks, write
from test_hf_tokenizer import write as write_files
from tools.flags import parse_generate, parse_serve
from tools.load import load_model, sampling_flags
from training.flags import parse_heads
from training.runs import run_config

SHA = "0123456789abcdef0123456789abcdef01234567"
READ = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json"]
fill = lambda root, names: write_files(root, {name: name for name in names})  # which contain their names
OTHERS = ("README.md", "model.fp16.safetensors", "pytorch_model.bin", "original/params.json", "onnx/model.onnx")
FULL = "Qwen-0.5B-Q4_K_M.gguf", "Qwen-0.5B-Q4_K_S.gguf", "q/Qwen-0.5B-Q8_0-00001-of-00002.gguf", \
    "q/Qwen-0.5B-Q8_0-00002-of-00002.gguf", "mmproj.f16.gguf", "mmproj-Q4_K_M.gguf", "Q-imatrix.gguf", "README.md"


class Hub:
    """A fake hub with repositories, {name: folder}, and a cache in huggingface_hub's layout. downloads: the names of
    the files in each."""

    def __init__(self, cache):
        self.cache, self.repositories, self.downloads = cache, {}, []

    def list_repo_files(self, repo):
        root = self.repositories[repo]
        return [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]

    def snapshot_download(self, repo, allow_patterns):
        self.downloads.append(sorted(filter_repo_objects(self.list_repo_files(repo), allow_patterns=allow_patterns)))
        return self.store(repo, self.downloads[-1])

    def store(self, repo, names):
        home = self.cache / f"models--{repo.replace('/', '--')}"
        for name in names:
            blob, link = home / "blobs" / name.replace("/", "-"), home / "snapshots" / SHA / name
            for file in (blob, link, home / "refs/main"):
                file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.repositories[repo] / name, blob)
            link.unlink(missing_ok=True)
            link.symlink_to(blob)
            (home / "refs/main").write_text(SHA)
        return str(home / "snapshots" / SHA)


@pytest.fixture
def offline(checkpoint, tmp_path, monkeypatch):
    """A `Hub` that cannot be reached, with org/model, which has more files than we read, and org/GGUF."""
    site = Hub(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(site.cache))
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "generation_config.json").write_text('{"do_sample": true, "eos_token_id": 3}')
    (folder / "tokenizer_config.json").write_text("{}")
    site.repositories = {"org/model": folder, "org/GGUF": tmp_path / "ggufs"}
    fill(folder, OTHERS)
    fill(tmp_path / "ggufs", FULL)
    hub.fetch.cache_clear()
    yield site
    hub.fetch.cache_clear()


@pytest.fixture
def site(offline, monkeypatch):
    """A `Hub` that can be reached."""
    for name in ("list_repo_files", "snapshot_download"):
        monkeypatch.setattr(hub, name, getattr(offline, name))
    return offline


def test_a_repository_is_fetched_once_and_only_what_is_read(site, monkeypatch, capsys):
    """Catches downloads of other formats of the weights or beside a local path, and programs that reject the name."""
    want = GPT.from_pretrained(site.repositories["org/model"], device="cpu")
    got = GPT.from_pretrained("org/model", device="cpu")
    assert got.hash == want.hash and got.config == want.config
    assert find_model("org/model") == site.cache / "models--org--model/snapshots" / SHA
    assert stop_tokens("org/model", load_encoding("org/model")) == [3]
    args = parse_generate(["--model", "org/model", "--prompt", "x"])
    monkeypatch.setattr("tools.flags.find_spec", bool)  # the server's flags are parsed without its packages
    assert args.model == parse_serve(["--model", "org/model"]).model == "org/model"
    model, encoding = load_model(args)
    assert model.hash == want.hash and encoding.n_vocab == 258
    assert sampling_flags(args)["temperature"] == 1.0
    assert "temperature 1 " in capsys.readouterr().err
    run = run_config(parse_heads(["--model", "org/model"]), site.cache)
    assert run.model == "org/model"  # so that --resume works in any directory
    monkeypatch.chdir(site.cache.parent)
    assert find_model("org/none.gguf").name == "none.gguf" and str(find_model("./org/model")) == "org/model"
    shutil.copytree(site.repositories["org/model"], "org/model")
    assert read_family("org/model") and str(find_model("org/model")) == "org/model" and site.downloads == [READ]


@pytest.mark.parametrize("name", ["{}/folder", "{}/files/m-Q4_K_M.gguf", "{}/files/m-f32.gguf", "org/folder",
                                  "org/files:Q4_K_M"])
def test_heads_that_ship_are_found_however_a_model_is_loaded(name, site, tmp_path, monkeypatch):
    """Catches heads found by a path only, those of a fine-tuned model, and those beside the model passed over."""
    theirs = theirs_of("llama-tied", hidden_size=256, intermediate_size=256).bfloat16()
    folder, files, shipped = (tmp_path / part for part in ("folder", "files", "demo"))
    theirs.save_pretrained(folder)
    files.mkdir()
    quantized = lambda name, x: (random_blocks(Type.Q4_K, x.shape), Type.Q4_K) if "ffn" in name else (x, None)
    for file, convert in (("m-Q4_K_M.gguf", quantized), ("m-f32.gguf", lambda name, x: (x, None))):
        write(files / file, "llama", theirs.float(), convert=convert)
    site.repositories |= {"org/folder": folder, "org/files": files}
    monkeypatch.setattr("hf.heads.SHIPPED", shipped)
    plain = GPT.from_pretrained(folder, device="cpu", packed=False)
    for norm in (1, 2):
        torch.nn.init.constant_(plain.norm.weight, norm)
        CloverHeads(preset("medusa"), plain).save_pretrained(shipped / f"{norm}")
    name = name.format(tmp_path)
    model = GPT.from_pretrained(name, device="cpu")
    assert default_heads(name, model) is None
    CloverHeads(preset("medusa"), GPT.from_pretrained(folder, device="cpu")).save_pretrained(shipped / "3")
    assert default_heads(name, model) == shipped / "3"
    if name.startswith("/"):
        own = (tmp_path / name).with_name("clover") if name.endswith("gguf") else tmp_path / name / "clover"
        own.mkdir()
        (own / "heads.json").write_text("{}")
        assert default_heads(name, model) == own


def test_heads_are_fetched_by_name(site, folder, tmp_path):
    """Bug: heads that only load from a folder, a download of their other formats."""
    site.repositories["org/heads"] = fill(shutil.copytree(folder / "clover", tmp_path / "heads"), OTHERS)
    model = GPT.from_pretrained(folder, device="cpu")
    args = parse_generate(["--heads", "org/heads"])
    assert load_heads(args.heads, model).hash == load_heads(folder / "clover", model).hash
    assert site.downloads == [["heads.json", "heads.safetensors"]]


@pytest.mark.parametrize("files", [
    ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
    ["model.safetensors-00001-of-00001.safetensors", "model.safetensors.index.json"],  # Qwen 3.5
    ["pytorch_model.bin"], ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]])
def test_weights_are_chosen_as_they_are_read(files, site):
    """Catches shards without their index, and a repository that has only .bin files."""
    root = site.repositories["org/model"]
    for name in ("model.safetensors", "pytorch_model.bin"):
        (root / name).unlink()
    fill(root, [*files, "tf_model.h5", "consolidated.safetensors"])
    found = {file.name for file in find_model("org/model").iterdir()}
    assert found == {*READ, *files} - {"model.safetensors"}


@pytest.mark.parametrize("choice, indices", [
    ("Q4_K_M", [0]), ("q4_k_m", [0]), ("Qwen-0.5B-Q4_K_S.gguf", [1]), ("Q8_0", [2, 3]),
    (FULL[3], [2, 3])])
def test_a_gguf_file_is_chosen_by_type_or_name(choice, indices, site):
    """Catches a choice that downloads other files or a single part."""
    names = [FULL[i] for i in indices]
    assert find_model(f"org/GGUF:{choice}").read_text() == names[0] and site.downloads == [names]


def test_gguf_files_are_listed_if_the_name_does_not_pick_one(site):
    says = "as org/GGUF:NAME: Qwen-0.5B-Q4_K_M Qwen-0.5B-Q4_K_S q/Qwen-0.5B-Q8_0"
    for name in ("org/GGUF", "org/GGUF:Q5_0", "org/GGUF:K_M", "org/GGUF:.", "org/GGUF:f16"):
        refusal(lambda: find_model(name), says)
    refusal(lambda: find_model("org/model:Q4_0"), "as org/model:NAME: it has none")
    (site.repositories["org/GGUF"] / "other-Q4_K_M.gguf").touch()
    refusal(lambda: find_model("org/GGUF:Q4_K_M"), "other-Q4_K_M")
    assert {*map(len, site.downloads)} == {0}
    for name in ("other-Q4_K_M.gguf", *FULL[1:4]):  # leaves one model, and a projector
        (site.repositories["org/GGUF"] / name).unlink()
    assert find_model("org/GGUF").read_text() == FULL[0]
    folder = site.repositories["org/model"]
    (folder / "config.json").rename(folder / "adapter_config.json")
    refusal(lambda: read_family("org/model"), "is a LoRA adapter")  # and not searched for GGUF files


def test_offline_the_cache_is_used(offline):
    """Catches a cached model that needs the network, an incomplete one not refused, GGUF files behind a link."""
    for name in ("org/model", "org/GGUF:Q8_0"):
        refusal(lambda: find_model(name), name, "HF_HUB_OFFLINE=0")
    offline.store("org/model", READ[:3])
    refusal(lambda: GPT.from_pretrained("org/model"), "expected model.safetensors")
    offline.store("org/model", READ[3:])
    assert GPT.from_pretrained("org/model", device="cpu").config.vocab_size == load_encoding("org/model").n_vocab
    offline.store("org/GGUF", FULL[1:4])
    assert find_model("org/GGUF:Q8_0").read_text() == FULL[2]
    refusal(lambda: find_model("org/GGUF:Q4_K_M"), "as org/GGUF:NAME: Qwen-0.5B-Q4_K_S q/Qwen-0.5B-Q8_0")
    home = offline.cache / "models--org--GGUF"
    for number, folder in enumerate([home / f"snapshots/{SHA}/q", home / "snapshots"]):
        folder.rename(home / str(number))
        folder.symlink_to(home / str(number))
    assert find_model("org/GGUF:Q8_0").read_text() == FULL[2]


def test_an_error_of_the_hub_is_one_line(site, monkeypatch):
    """Bug: a traceback where the disk is full."""
    monkeypatch.setattr(hub, "snapshot_download", Mock(side_effect=OSError(28, "No space\nleft on device")))
    for call in (GPT.from_pretrained, load_encoding, find_model):
        refusal(lambda: call("org/model"), "org/model", "No space left")
    with pytest.raises(InputError):
        load_model(parse_generate(["--model", "org/model"]))
