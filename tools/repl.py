"""generate.py without --prompt: a conversation by the chat template, or prompts line by line."""

import contextlib
import sys

import torch

from generate import check_prompt
from model import InputError
from tools import cli
from tools.printer import Printer

HELP = "/clear starts anew, /help says this; Ctrl-C ends a reply, Ctrl-D the program"
SPARE = 1024  # tokens that a conversation may grow by before its caches are made anew


def converse(session):
    """Reads a line, prints the model's text, and so on to the end of the input. With a chat
    template the lines are turns of a conversation, else each is a prompt by itself."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  lets lines be edited
        print(HELP, file=sys.stderr)
    messages, engine = [], None
    while (line := session.group.on_first(read_line)) is not None:
        if line.strip() == "/clear":
            messages = []
        if line.strip() == "/help":
            print(HELP, file=sys.stderr)
        if line.strip() in ("", "/clear", "/help"):
            continue
        turn = [*messages, dict(role="user", content=line)]
        try:
            prompt = session.encode(turn)
            check_prompt(session.model, prompt)
        except InputError as error:  # such as a conversation that is too long
            print(f"{error}{'; /clear starts anew' if messages else ''}", file=sys.stderr)
            continue
        needed = len(prompt) + session.args.max_new_tokens
        needed = min(needed, session.model.config.block_size)
        if engine is None or needed > engine.decoder.capacity:
            engine = None  # frees its memory for the next one
            engine = roomy_engine(session, prompt)
        output = Printer(session, engine).run([prompt])
        if not session.template:
            print("-" * 40)
        if not session.args.quiet:
            print(f"[{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} "
                  "tokens per second]", file=sys.stderr)
        # SIGTERM, and on ranks Ctrl-C, end more than a reply
        if cli.received or (session.group.size > 1 and None in output.ended):
            raise KeyboardInterrupt
        if session.template:
            messages = [*turn, dict(role="assistant", content=session.decode(output.tokens[0]))]


def read_line():
    """The next line of standard input, None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text ({error.reason} at byte "
                         f"{error.start})") from None


def roomy_engine(session, prompt):
    """An engine for a prompt and, where memory has room, for the turns after it."""
    # ranks do not run out of memory alike: where that was not foreseen, all end
    alone = session.group.size == 1
    with contextlib.suppress(InputError, *([torch.OutOfMemoryError] if alone else [])):
        return session.engine([prompt], session.args.max_new_tokens + SPARE)
    return session.engine([prompt])  # outside the except: the traceback keeps the first one alive
