"""hf/hub.py: models by their name on Hugging Face. The cache and the two calls of huggingface_hub are faked."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from huggingface_hub import errors

from conftest import refusal
from hf import hub
from hf.chat import stop_tokens
from hf.checkpoint import describe
from hf.files import read_config
from hf.paths import find_heads, find_model
from hf.tokenizer import load_encoding
from model import GPT, InputError
from tools.flags import parse_generate, parse_serve
from tools.load import load_model, sampling_flags
from training.flags import parse_heads
from training.runs import run_config

SHA = "0123456789abcdef0123456789abcdef01234567"
READ = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json"]
OTHERS = ("README.md", "model.fp16.safetensors", "pytorch_model.bin", "original/params.json", "onnx/model.onnx")
FULL = "Qwen-0.5B-Q4_K_M.gguf", "Qwen-0.5B-UD-Q4_K_M.gguf", "Qwen-0.5B-Q8_0-00001-of-00002.gguf", \
    "Qwen-0.5B-Q8_0-00002-of-00002.gguf", "mmproj-f16.gguf", "README.md"


class Hub:
    """A fake hub with repositories, {name: folder}, and a cache in huggingface_hub's layout. calls: the requests so
    far, None for a listing, else the files to download. error: raised by listings."""

    def __init__(self, cache):
        self.cache, self.repositories, self.calls, self.error = cache, {}, [], None

    def model_info(self, repo, timeout):
        self.calls.append(None)
        if self.error:
            raise self.error
        root = self.repositories[repo]
        names = (file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file())
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    def snapshot_download(self, repo, allow_patterns):
        self.calls.append(sorted(allow_patterns))
        return self.store(repo, allow_patterns)

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
def site(checkpoint, tmp_path, monkeypatch):
    """A `Hub` with org/model, which has more files than we read, and org/GGUF."""
    hub.fetch.cache_clear()
    site = Hub(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(site.cache))
    monkeypatch.setattr("huggingface_hub.model_info", site.model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", site.snapshot_download)
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "generation_config.json").write_text('{"do_sample": true, "eos_token_id": 3}')
    (folder / "tokenizer_config.json").write_text("{}")
    for name in OTHERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{")
    ggufs = tmp_path / "ggufs"
    ggufs.mkdir()
    for name in FULL:
        (ggufs / name).write_text(name)
    site.repositories = {"org/model": folder, "org/GGUF": ggufs}
    yield site
    hub.fetch.cache_clear()


def again():
    """The model that the next process finds."""
    hub.fetch.cache_clear()
    return find_model("org/model")


def test_a_repository_is_fetched_once_and_only_what_is_read(site, capsys):
    """Catches downloads of other formats of the weights, a request in each run, and programs that reject the name."""
    want = GPT.from_pretrained(site.repositories["org/model"], device="cpu")
    got = GPT.from_pretrained("org/model", device="cpu")
    assert site.calls == [None, READ] and got.hash == want.hash and got.config == want.config
    assert again() == site.cache / "models--org--model/snapshots" / SHA
    assert stop_tokens("org/model", load_encoding("org/model")) == [3]
    assert "chat_template.jinja" in describe("org/model")
    args = parse_generate(["--model", "org/model", "--prompt", "x"])
    assert args.model == parse_serve(["--model", "org/model"]).model == "org/model"
    model, encoding = load_model(args)
    assert model.hash == want.hash and encoding.n_vocab == 258 and find_heads("org/model") == []
    assert sampling_flags(args)["temperature"] == 1.0
    assert "sampling defaults of org/model: " in capsys.readouterr().err
    run = run_config(parse_heads(["--model", "org/model"]), site.cache)
    assert run.model == "org/model"  # so that --resume works in any directory
    assert site.calls == [None, READ]


def test_files_that_may_be_missing_are_asked_for_and_a_new_version_is_fetched(site, monkeypatch):
    """Catches a model that another program cached without its stop tokens."""
    site.store("org/model", READ[:2] + READ[3:])
    assert stop_tokens("org/model", load_encoding("org/model")) == [3]
    site.repositories["org/model"].joinpath("tokenizer_config.json").unlink()
    (folder := again()).joinpath("tokenizer_config.json").unlink()
    site.calls.clear()
    assert again() == folder and site.calls == [None, READ[:-1]]
    monkeypatch.setattr("test_hf_hub.SHA", "1" * 40)
    assert again() == folder.with_name("1" * 40)


def test_a_local_path_wins(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_model("org/none.gguf").name == "none.gguf" and str(find_model("./org/model")) == "org/model"
    shutil.copytree(site.repositories["org/model"], "org/model")
    assert read_config("org/model") and str(find_model("org/model")) == "org/model" and not site.calls


@pytest.mark.parametrize("files, read", [
    (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"], 3),
    (["pytorch_model.bin", "rust_model.ot"], 1),
    (["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "tf_model.h5", "x.gguf"], 2)])
def test_weights_are_chosen_as_they_are_read(files, read):
    """Catches shards without their index, .bin beside safetensors, a GGUF file preferred to a folder."""
    assert hub.choose("org/x", ["config.json", "config.py", *files], "") == ["config.json", *files[:read]]


@pytest.mark.parametrize("choice, indices", [
    ("Q4_K_M", [0]), ("q4_k_m", [0]), ("UD-Q4_K_M", [1]), ("Qwen-0.5B-Q4_K_M.gguf", [0]), ("Q8_0", [2, 3]),
    (FULL[3], [2, 3])])
def test_a_gguf_file_is_chosen_by_type_or_name(choice, indices, site):
    """Catches a choice that downloads other files, a single part, or a type with the same ending."""
    names = [FULL[i] for i in indices]
    path = find_model(f"org/GGUF:{choice}")
    assert site.calls == [None, names] and path.read_text() == names[0]
    hub.fetch.cache_clear()
    assert find_model(f"org/GGUF:{choice}") == path and len(site.calls) == 2


def test_several_gguf_files_are_listed(site):
    for name in ("org/GGUF", "org/GGUF:Q5_0", "org/GGUF:K_M", "org/model:Q4_0"):
        says = "has no GGUF file" if "model" in name else "as org/GGUF:NAME: Qwen-0.5B-Q4_K_M Qwen-0.5B-Q8_0 Qwen"
        refusal(lambda: find_model(name), name.split(":")[0], says)
    assert site.calls == [None] * 4
    files = ["a-Q8_0.gguf", "b/b-Q8_0.gguf"]
    refusal(lambda: hub.choose("org/x", files, "Q8_0"), "a-Q8_0 b/b-Q8_0")
    assert hub.choose("org/x", files, "b-Q8_0.gguf") == files[1:]
    refusal(lambda: hub.choose("org/x", FULL[:3], "Q8_0"), "lacks some parts of Q8_0")
    site.store("org/GGUF", [FULL[0]])
    site.error = OSError("offline")
    assert find_model("org/GGUF").name == FULL[0]  # the only cached one


ERRORS = {"offline": (errors.OfflineModeIsEnabled("offline mode\nis on"), "offline mode is on"),
          "no disk": (OSError(28, "No space left on device"), "No space left"),
          "gated": (errors.GatedRepoError("no", response=Mock(headers={})), "GatedRepoError"),
          "unknown": (errors.RepositoryNotFoundError("no", response=Mock(headers={})), "RepositoryNotFoundError")}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_had_is_refused_in_a_line_unless_the_cache_has_it(case, site, capsys):
    """Catches a traceback, a cached model that needs the network, an incomplete model in the cache."""
    site.error, says = ERRORS[case]
    for call in (GPT.from_pretrained, load_encoding, describe, find_model):
        refusal(lambda: call("org/model"), "org/model", says)
    with pytest.raises(InputError):
        load_model(parse_generate(["--model", "org/model"]))
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        refusal(again, says)
        site.store("org/model", [name])
    capsys.readouterr()
    folder = again()  # optional files may be missing, so the hub was asked
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "taken from the cache" in said and says in said
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=dict(a="model-2.safetensors"))))
    refusal(again, says)
