"""`python -m bench cpu`: the CPU figures of README.md and docs/results.md, in one run."""

import json
from pathlib import Path

from bench import CHATS, CODING, decoding, operations, precision, record
from common.files import save_lines
from model import expect


def bench(args, parse):
    """Runs `parts`, or args.parts of them, and writes a line of args.out for each; lines of other
    parts stay if there is a choice. parse: flags of `bench` -> Namespace"""
    found = parts(args)
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


def parts(args):
    """{name: flags of `bench`}: with SmolLM2, with --coder's model, and at three sizes."""
    rival = ["--llama-cpp"] if args.llama_cpp else []
    models = {"": ("smollm2", 0.8, CHATS)}
    if args.coder:
        models["coder, "] = args.coder, 0.7, CODING
    found = {}
    for name, (model, temperature, chats) in models.items():
        decode = ["decode", "--model", model]
        once = ["--tree-sizes", "auto", "--temperatures", 0, temperature, "--runs", 1]
        plain = [*decode, *rival, "--drafters", "lookup", "--tree-sizes", 1]
        found |= {
            f"{name}chats": [*decode, "--chats", chats, *once],
            f"{name}precision": ["precision", "--model", model, "--chats", chats, *rival],
            f"{name}one sequence": [*decode, *rival, "--tree-sizes", "auto", "--chats", chats,
                                    "--prompts", 18, "--runs", 2],
            f"{name}batches": [*plain, "--batch-sizes", 8, 32, "--prompts", 32,
                               "--max-new-tokens", 64],
            f"{name}prefill": [*plain, "--prompts", 3, "--prompt-tokens", 512,
                               "--max-new-tokens", 4, "--runs", 5]}
        if args.chats:  # 16 of each kind of Spec-Bench
            found[f"{name}spec bench"] = [*decode, "--chats", args.chats, *once, "--prompts", 96]
    found["steps"] = ["decode", "--random-weights", "135m", "360m", "1.2b", "--quantize", "int4"]
    return found
