"""generate.py without --prompt: a conversation by the chat template, or prompts line by line."""

import contextlib
import sys

from backends import tensor_parallel
from backends.tensor_parallel import no_room
from generate import check_prompts
from model import InputError
from tools.printer import print_texts
from tools.tune import keep_times

HELP = "/clear starts anew, /help says this; Ctrl-C ends a reply, Ctrl-D the program"
SPARE = 1024  # tokens that a conversation may grow by before its caches are made anew


def converse(session):
    """Reads a line, prints the model's text, and so on to the end of the input. With a chat
    template the lines are turns of a conversation, else each is a prompt by itself. The engine
    keeps its cache: what turns have in common is computed once."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  lets lines be edited
        print(HELP, file=sys.stderr)
    messages, engine = [], None
    group = tensor_parallel.group_of(session.model)
    while (line := tensor_parallel.on_first(group, read_line)) is not None:
        if line.strip() == "/clear":
            messages = []
        if line.strip() == "/help":
            print(HELP, file=sys.stderr)
        if line.strip() in ("", "/clear", "/help"):
            continue
        turn = [*messages, dict(role="user", content=line)]
        try:
            prompt = session.encode(turn)
            check_prompts(session.model, [prompt])
        except InputError as error:  # such as a conversation that is too long
            print(f"{error}{'; /clear starts anew' if messages else ''}", file=sys.stderr)
            continue
        needed = len(prompt) + session.args.max_new_tokens
        needed = min(needed, session.model.config.block_size)
        if engine is None or needed > engine.decoder.capacity:
            engine = None  # frees its memory for the next one
            engine = roomy_engine(session, prompt, no_room(group))
        output = print_texts(session, engine, [prompt], keep=True)
        keep_times(engine)
        if not session.template:
            print("-" * 40)
        if not session.args.quiet:
            print(f"[{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} "
                  "tokens per second]", file=sys.stderr)
        # SIGTERM, and on ranks Ctrl-C, end more than a reply
        if tensor_parallel.signals or tensor_parallel.stopping.is_set():
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


def roomy_engine(session, prompt, no_room):
    """An engine for a prompt and, where memory has room, for the turns after it. no_room: the
    errors that say that it has none."""
    with contextlib.suppress(*no_room):
        return session.engine([prompt], session.args.max_new_tokens + SPARE)
    return session.engine([prompt])  # not while an error is handled: it holds the first's memory
