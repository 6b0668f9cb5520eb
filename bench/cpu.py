"""`python -m bench cpu`: the CPU figures of README.md and docs/results.md, in one run."""

import json
from pathlib import Path

import gguf
import numpy as np

from bench import CHATS, CODING, decoding, operations, precision, record
from common.files import save_lines
from hf.paths import find_model
from model import expect, replace_file

FORMATS = "Q4_1", "Q4_0", "Q8_0"  # of SmolLM2: the published file, and two made from it


def bench(args, parse):
    """Runs `parts`, or args.parts of them, and writes a line of args.out for each; lines of other
    parts stay if there is a choice. parse: flags of `bench` -> Namespace"""
    files = {name: requantized(find_model("smollm2"), name, args.out) for name in FORMATS}
    found = parts(args, files)
    chosen = args.parts or [*found]
    for part in chosen:
        expect(part in found, f"--parts: expected some of {', '.join(map(repr, found))}, not "
               f"{part!r}")
    out = Path(args.out)
    before = map(json.loads, out.open()) if args.parts and out.exists() else ()
    rows = {row["part"]: row for row in before}
    for part in chosen:
        own = parse(list(map(str, found[part])))
        print(f"\n{part}: python -m bench {' '.join(map(str, found[part]))}", flush=True)
        rows[part] = dict(part=part) | record(own, measure(own))
        save_lines(out, rows.values())


def measure(args):
    """The result of `bench decode` or `bench precision`."""
    if args.command == "precision":
        return precision.bench(args)
    return (operations if args.random_weights else decoding).bench(args)


def parts(args, files):
    """{name: flags of `bench`}. files: {format: a GGUF file of SmolLM2}."""
    rival = ["--llama-cpp"] if args.llama_cpp else []
    both = ["--drafters", "heads+lookup", "--tree-sizes", "auto"]
    found = {"prompts": [*answers("smollm2", 0.8, CHATS), *both]}
    models = {"": ("smollm2", 0.8, CHATS)}
    if args.coder:
        models["coder, "] = args.coder, 0.7, CODING
        found["coder, coding"] = [*answers(*models["coder, "]), *rival]
    for name, (model, temperature, chats) in models.items():
        found[f"{name}precision"] = ["precision", "--model", model, "--chats", chats, *rival]
        if args.chats:
            found[f"{name}spec bench"] = [*answers(model, temperature, args.chats),
                                          "--prompts", 96]  # 16 of each kind of Spec-Bench
    plain = ["--drafters", "lookup", "--tree-sizes", 1]
    for name, file in files.items():
        drafters = plain if name == "Q4_0" else both  # its output repeats itself: easy to guess
        found[f"{name}, one sequence"] = ["decode", "--model", file, *drafters, *rival, "--chats",
                                          CHATS, "--prompts", 18, "--runs", 2]
    for name, file in [*files.items(), *[("coder", args.coder)] * bool(args.coder)]:
        model = ["decode", "--model", file, *plain, *rival]
        found |= {
            f"{name}, batches": [*model, "--batch-sizes", 8, 32, "--prompts", 32,
                                 "--max-new-tokens", 64, "--runs", 3],
            f"{name}, prefill": [*model, "--prompts", 3, "--prompt-tokens", 512,
                                 "--max-new-tokens", 4, "--runs", 5]}
    found["steps"] = ["decode", "--random-weights", "135m", "360m", "1.2b", "--quantize", "int4"]
    return found


def answers(model, temperature, chats):
    """Flags: chats answered once, greedily and sampled, by all drafters that the model has."""
    return ["decode", "--model", model, "--chats", chats, "--temperatures", 0, temperature,
            "--tree-sizes", "auto", "--runs", 1]


def requantized(source, name, out):
    """A copy of a GGUF file in another format, beside `out`, made by the gguf package."""
    if name in source.name:
        return source
    target = Path(out).absolute().with_name(source.name.replace("Q4_1", name))
    if target.exists():
        return target
    kind = gguf.GGMLQuantizationType[name]
    reader = gguf.GGUFReader(source)
    value = lambda key: reader.fields[key].contents()

    def write(tmp):
        writer = gguf.GGUFWriter(tmp, value("general.architecture"))
        for field in reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], item)
        for tensor in reader.tensors:
            data, stored = tensor.data, tensor.tensor_type
            if stored == gguf.GGMLQuantizationType.Q4_1:  # not the embedding, which has 8 bits
                data, stored = gguf.quantize(gguf.dequantize(data, stored), kind), kind
            writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    replace_file(target, write)
    return target
