"""What python generate.py runs: load, engine, loop, print."""

import contextlib
import json
import random
import sys

from backends import tensor_parallel
from common.files import decode
from generate import check_prompt
from model import InputError
from tools import errors
from tools.compare import against_plain
from tools.load import Prompt, load, make_engine, opening, read_grammar, read_prompts, read_tools
from tools.printer import Printer, speed


@errors.command()
def main(args):
    """Continues the prompts that the flags name, or without any starts a conversation."""
    group = tensor_parallel.start(args.device)
    if args.seed == -1:
        args.seed = group.on_first(lambda: random.getrandbits(31))
        print(f"seed: {args.seed}", file=sys.stderr)
    given = group.on_first(lambda: read_prompts(args))
    loaded = load(args, group)
    if not given:
        return converse(args, loaded)
    prompts = loaded.encode(given, args)
    grammars = loaded.compile(given, prompts)
    engine = make_engine(args, loaded, prompts, args.max_new_tokens, grammars=grammars)
    printer = Printer(args, loaded, [prompt.messages[-1]["content"] for prompt in given])
    output = printer.generate(engine, prompts, grammars)
    result = printer.report(output, engine)
    del engine  # frees its memory for the engine of --compare
    try:
        if None in output.ended:
            raise KeyboardInterrupt
        if args.compare:
            *plain, difference = against_plain(args, loaded, output, printer.say)
            result |= dict(plain=printer.as_json(*plain), difference=difference)
    finally:
        if args.json and not args.prompts:
            print(json.dumps(result))


def converse(args, loaded):
    """Answers each line of standard input. With --chat the lines are turns of one conversation,
    else each is a prompt of its own."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  enables line editing
        print("/clear starts over; Ctrl-C ends a reply, Ctrl-D the program", file=sys.stderr)
    messages, engine = opening(args), None
    grammar, tools = loaded.group.on_first(lambda: (read_grammar(args), read_tools(args)))
    while (line := loaded.group.on_first(read_line)) is not None:
        if line.strip() == "/clear":
            messages = opening(args)
        if line.strip() in ("", "/clear"):
            continue
        turn = [*messages, dict(role="user", content=line)]
        try:
            given = [Prompt(turn, tools, grammar)]
            prompts = loaded.encode(given, args)
            check_prompt(loaded.model.config, prompts[0])
            grammars = loaded.compile(given, prompts)
        except InputError as error:  # for example, the conversation is too long
            hint = "; /clear starts over" if messages != opening(args) else ""
            print(f"{error}{hint}", file=sys.stderr)
            continue
        needed = min(len(prompts[0]) + args.max_new_tokens, loaded.model.config.block_size)
        if engine is None or needed > engine.decoder.capacity:
            engine = None  # frees its memory for the next one
            engine = make_engine(args, loaded, prompts, args.max_new_tokens + 1024,  # later turns
                                 grammars=grammars)
        output = Printer(args, loaded).generate(engine, prompts, grammars)
        if not args.chat:
            print("-" * 40)
        if not args.quiet:
            print(f"[{speed(output)}]", file=sys.stderr)
        # SIGTERM ends the program, and so does Ctrl-C under torchrun
        if errors.received or (loaded.group.size > 1 and None in output.ended):
            raise KeyboardInterrupt
        if args.chat:
            reply = loaded.decode(output.tokens[0])  # calls as the model wrote them
            messages = [*turn, dict(role="assistant", content=reply)]


def read_line():
    """The next line of standard input; None at its end."""
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline()
        return decode(line, "standard input").rstrip("\r\n") if line else None
    with contextlib.suppress(EOFError):
        return input("> ")
