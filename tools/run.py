"""What python generate.py runs: load, engine, loop, print."""

import contextlib
import json
import random
import sys

from backends import tensor_parallel
from common.files import decode
from generate import DEFAULT_BATCH, check_prompt
from model import InputError
from tools import errors
from tools.compare import against_plain, compile_all
from tools.load import load, make_engine
from tools.printer import Printer, speed
from tools.prompts import encode, opening, read_prompts, read_shape


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
    prompts, grammars = encode(loaded, given, args)
    batch_size = min(len(prompts), args.batch_size or DEFAULT_BATCH)
    capacity = min(max(map(len, prompts)) + args.max_new_tokens, loaded.model.config.block_size)
    engine = make_engine(args, loaded, batch_size, capacity, guided=any(grammars))
    if args.compare:
        compile_all(engine, prompts, grammars)
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
    shape = loaded.group.on_first(lambda: read_shape(args))
    while (line := loaded.group.on_first(read_line)) is not None:
        if line.strip() == "/clear":
            messages = opening(args)
        if line.strip() in ("", "/clear"):
            continue
        turn = [*messages, dict(role="user", content=line)]
        try:
            prompts, grammars = encode(loaded, [shape._replace(messages=turn)], args)
            check_prompt(loaded.model.config, prompts[0])
        except InputError as error:  # for example, the conversation is too long
            hint = "; /clear starts over" if messages != opening(args) else ""
            print(f"{error}{hint}", file=sys.stderr)
            continue
        needed = min(len(prompts[0]) + args.max_new_tokens, loaded.model.config.block_size)
        if engine is None or needed > engine.decoder.capacity:
            engine = None  # frees its memory for the next one
            room = min(needed + 1024, loaded.model.config.block_size)  # for later turns
            engine = make_engine(args, loaded, 1, room, guided=any(grammars))
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
