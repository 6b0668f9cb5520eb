"""What python generate.py runs: load, engine, loop, print."""

import json

from backends import tensor_parallel
from tools.errors import command
from tools.load import load, make_engine, read_prompts
from tools.printer import Printer, converse


@command()
def main(args):
    """Continues the prompts that the flags name, or without any starts a conversation."""
    group = tensor_parallel.start(args.device)
    conversations = group.on_first(lambda: read_prompts(args))
    loaded = load(args, group)
    if not conversations:
        return converse(args, loaded)
    prompts = loaded.encode_all(conversations, args)
    engine = make_engine(args, loaded, prompts, args.max_new_tokens)
    printer = Printer(args, loaded, [messages[-1]["content"] for messages in conversations])
    output = printer.generate(engine, prompts)
    result = printer.report(output, engine)
    del engine  # frees its memory for the engine of --compare
    interrupted = None in output.ended
    if args.compare and not interrupted:
        result |= printer.compare(output)
        interrupted = result["plain"] is None
    if args.json and not args.prompts:
        print(json.dumps(result))
    if interrupted:
        raise KeyboardInterrupt
