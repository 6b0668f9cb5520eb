"""A conversation on standard input: with --chat its lines are turns of one, else each is a prompt
of its own."""

import contextlib
import re
import sys
from functools import partial

from common.files import decode
from generate import check_prompt
from model import InputError
from tools import errors
from tools.load import CONTEXT, REPLY, make_engine, new_tokens
from tools.printer import Printer, has_colours, model_name, painted, speed
from tools.prompts import encode, opening, read_shape

QUOTES = '"""'
ENDS = "/bye", "/exit", "/quit", "exit", "quit"
HELP = f"""/clear starts over, /bye ends the program, /help prints this
{QUOTES} begins and ends a message of several lines, and pasted lines are one message
Ctrl-C ends a reply or clears the line, twice the program; Ctrl-D ends it, too"""


def converse(args, loaded):
    """Answers each message until the end of standard input."""
    config = loaded.model.config
    shape = loaded.group.on_first(lambda: read_shape(args))
    is_guided = bool(shape.tools or shape.grammar)
    engine = make_engine(args, loaded, 1, min(CONTEXT, config.block_size), guided=is_guided)
    if sys.stdin.isatty():
        prepare_terminal()
        print(f"{banner(args, engine.policy)}\n{HELP}", file=sys.stderr)
    read = partial(read_message, args.chat or sys.stdin.isatty(), loaded.group.size == 1)
    messages = opening(args)
    while (text := loaded.group.on_first(read)) is not None:
        if text == "/clear":
            messages = opening(args)
            continue
        turn = [*messages, dict(role="user", content=text)]
        try:
            prompts, grammars = encode(loaded, [shape._replace(messages=turn)], args)
            check_prompt(config, prompts[0])
            length = len(prompts[0])
            needed = min(length + (args.max_new_tokens or REPLY), config.block_size)
            if needed > engine.decoder.capacity:
                engine = engine.grown(min(2 * needed, config.block_size))
        except InputError as error:  # for example, the conversation is too long
            hint = "; /clear starts over" if messages != opening(args) else ""
            print(f"{error}{hint}", file=sys.stderr)
            continue
        limit = new_tokens(args, config, length, args.chat or is_guided, engine.decoder.capacity)
        output = Printer(args, loaded).generate(engine, prompts, limit, grammars)
        if not args.chat:
            print("-" * 40)
        if not args.quiet:
            print(f"[{speed(output)}]", file=sys.stderr)
        # SIGTERM ends the program, and so does Ctrl-C under torchrun
        if errors.received or (loaded.group.size > 1 and None in output.ended):
            raise KeyboardInterrupt
        if None in output.ended and output.tokens[0]:  # what the engine dropped is still cached
            engine.keep_prefix(0, prompts[0] + output.tokens[0])
        if args.chat:
            reply = loaded.decode(output.tokens[0])  # calls as the model wrote them
            messages = [*turn, dict(role="assistant", content=reply)]


def banner(args, policy):
    """The model, and its drafters in their colours."""
    names = [f"head {i + 1}" for i in range(policy.depth)]
    names += ["lookup"] * policy.lookup + ["schema"] * policy.schema
    if has_colours(sys.stderr):
        names = [painted(name, name) for name in names]
    return f"{model_name(args)}; tokens guessed by {', '.join(names) or 'nothing'}"


def prepare_terminal():
    """Enables line editing, and lets several pasted lines be one."""
    with contextlib.suppress(ImportError):  # not on Windows
        import readline
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off


def read_message(takes_commands, may_interrupt):
    """The next message of standard input, or "/clear"; None at its end. may_interrupt: a single
    Ctrl-C only clears the line."""
    is_interrupted = False
    while True:
        try:
            text = read_lines(takes_commands)
        except KeyboardInterrupt:
            if is_interrupted or errors.received or not (may_interrupt and sys.stdin.isatty()):
                raise
            is_interrupted = True
            print("\nCtrl-C again ends the program", file=sys.stderr)
            continue
        is_interrupted = False
        word = (text or "").strip()
        if text is None or takes_commands and word in ENDS:
            return None
        if takes_commands and word == "/clear":
            return word
        if takes_commands and re.fullmatch(r"/\w*", word):
            print(HELP if word == "/help" else f"there is no {word}\n{HELP}", file=sys.stderr)
        elif word:
            return text


def read_lines(takes_quotes):
    """A line, or the lines between QUOTES; None at the end."""
    text = read_line("> ")
    # pasted lines are complete
    if not takes_quotes or text is None or "\n" in text or not text.startswith(QUOTES):
        return text
    text = text.removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES) and (line := read_line("... ")) is not None:
        text += f"\n{line}"
    return text.rstrip().removesuffix(QUOTES).strip("\n")


def read_line(prompt):
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline()
        return decode(line, "standard input").rstrip("\r\n") if line else None
    with contextlib.suppress(EOFError):
        return input(prompt)
