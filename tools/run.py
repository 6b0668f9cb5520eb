"""What python generate.py runs: load, engine, loop, print."""

import json
import random
import sys

from backends import tensor_parallel
from generate import DEFAULT_BATCH, Sampling
from tools import errors
from tools.compare import against_plain, compile_all
from tools.conversation import converse
from tools.load import drafts, load, make_engine, new_tokens
from tools.printer import Printer
from tools.prompts import encode, read_prompts


@errors.command()
def main(args):
    """Continues the prompts that the flags name, or without any starts a conversation."""
    group = tensor_parallel.start(args.device)
    given = group.on_first(lambda: read_prompts(args))
    loaded = load(args, group)
    sampling = loaded.sampling
    if sampling["seed"] == -1 and Sampling(**sampling).temperature:
        sampling["seed"] = group.on_first(lambda: random.getrandbits(31))
        print(f"seed: {sampling['seed']}", file=sys.stderr)
    if not args.quiet:
        advise(args, loaded)
    if not given:
        return converse(args, loaded)
    config = loaded.model.config
    prompts, grammars = encode(loaded, given, args)
    longest = max(map(len, prompts))
    limit = new_tokens(args, config, longest, ends=args.chat or any(grammars))
    batch_size = min(len(prompts), args.batch_size or DEFAULT_BATCH)
    capacity = min(longest + limit, config.block_size)
    engine = make_engine(args, loaded, batch_size, capacity, guided=any(grammars))
    if args.compare:
        compile_all(engine, prompts, grammars)
    printer = Printer(args, loaded, [prompt.messages[-1]["content"] for prompt in given])
    output = printer.generate(engine, prompts, limit, grammars)
    result = printer.report(output, engine)
    del engine  # frees its memory for the engine of --compare
    try:
        if None in output.ended:
            raise KeyboardInterrupt
        if args.compare:
            engine = make_engine(args, loaded, batch_size, capacity, plain=True)
            result |= against_plain(loaded, engine, prompts, grammars, limit, output, printer)
    finally:
        if args.json and not args.prompts:
            print(json.dumps(result))


def advise(args, loaded):
    """Says what would speed decoding up, if no flag says that it is not wanted."""
    if not loaded.heads and args.heads != "none" and drafts(args, "heads") and args.tree_size != 1:
        print(f"{args.model}: no draft heads found, so n-gram lookup drafts alone; to train some: "
              f"python train_heads.py --model {args.model} --out out/clover, then --heads "
              "out/clover", file=sys.stderr)
