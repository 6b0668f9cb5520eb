"""The `main` functions of generate.py and tools/serve.py. They parse their flags before
they import torch, so a typo is reported at once."""

import json

from tools.flags import parse_generate, parse_serve


def main(argv=None):
    """python generate.py: flags, load, engine, loop, print."""
    args = parse_generate(argv)
    from backends import tensor_parallel
    from tools.errors import command
    from tools.load import load, make_engine, read_prompts
    from tools.printer import Printer, converse
    with command():
        group = tensor_parallel.start(args.device)
        conversations = group.on_first(lambda: read_prompts(args))
        loaded = load(args, group)
        if not conversations:
            return converse(args, loaded)
        prompts = []
        for i, messages in enumerate(conversations, 1):
            source = f"{args.prompts}, prompt {i}: " if args.prompts else ""
            prompts.append(loaded.encode(messages, args.chat, source))
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


def serve(argv=None):
    """python -m tools.serve"""
    args = parse_serve(argv)
    from tools.errors import command
    from tools.serve import run
    with command():
        run(args)
