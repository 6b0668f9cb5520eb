"""What generate.py prints: texts as they come, conversations, statistics, --json."""

import contextlib
import json
import os
import sys
from functools import partial
from pathlib import Path

from clover import Tree
from generate import Interrupted, check_prompt
from model import InputError
from tools import errors
from tools.compare import against_plain
from tools.load import make_engine, opening, utf8
from tools.timing import explain

HEAD_COLOURS = (32, 36, 34, 35, 31)  # ANSI; a head beyond the last takes the last
LOOKUP_COLOUR = 33


class Printer:
    """Prints a prompt and its text as it comes; on a terminal, each guessed token in the colour of
    the head that guessed it, or of lookup. Prints several texts in order, each when all before it
    have ended. With --json prints none; of --prompts FILE, an object for each."""

    def __init__(self, args, loaded, engine, texts=()):
        self.args = args
        self.loaded = loaded
        self.engine = engine
        self.texts = texts  # of the prompts
        self.drafts = None
        if args.show_tree:
            self.drafts = Drafts(engine, loaded.encoding.decode)
            self.emitted = [loaded.encoding.stream() for _ in texts]
        self.steps = []  # of --show-tree, as dicts for --json
        self.streams = len(texts) <= 1 and not args.json
        self.sequences = {}  # index -> a `Sequence` that ended and is not printed yet
        self.printed = 0     # texts
        self.stream = loaded.text_stream()
        self.colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.shown = ["" if args.chat else text for text in texts]
        if self.streams:
            print("".join(self.shown), end="", flush=True)

    def show(self, sequence, tokens, path, plan):
        """What `Engine.generate` calls with each result of a step."""
        if self.drafts:
            emitted = [self.emitted[sequence.index].feed([token]) for token in tokens]
            number = 1 + sum(step["prompt"] == sequence.index for step in self.steps)
            self.steps.append(dict(prompt=sequence.index, step=number, emitted=emitted)
                              | self.drafts.describe(sequence, tokens, path, plan))
        for i, token in enumerate(tokens if self.streams else []):
            text = "" if token in self.loaded.stop else self.stream.feed([token])
            if self.colours and text and i < len(path) - 1:  # the last one is the model's own
                head = HEAD_COLOURS[min(i, len(HEAD_COLOURS) - 1)]
                colour = LOOKUP_COLOUR if path[i + 1] > plan.head_nodes else head
                text = f"\x1b[{colour}m{text}\x1b[0m"
            print(text, end="", flush=True)
        if sequence.ended and not self.streams:
            self.sequences[sequence.index] = sequence
            self.print_ended()

    def print_ended(self):
        while sequence := self.sequences.pop(self.printed, None):
            text = self.loaded.decode(sequence.tokens)
            if not self.args.json:
                print(f"{self.shown[sequence.index]}{text}\n{'-' * 40}", flush=True)
            elif self.args.prompts:
                print(json.dumps(dict(prompt=self.texts[sequence.index], text=text,
                                      tokens=sequence.tokens, ended=sequence.ended)), flush=True)
            self.printed += 1

    def finish(self, output):
        """Prints the rest of the texts, up to where Ctrl-C ended them."""
        if self.streams:
            print(self.stream.finish(), flush=True)
        else:
            self.sequences |= {sequence.index: sequence for sequence in output.sequences}
            self.print_ended()
        full = output.ended.count("context")
        if full and not self.args.json:
            print(f"\n{full} of {len(output.ended)} texts ended where the model's context of "
                  f"{self.loaded.model.config.block_size} tokens is full", file=sys.stderr)

    def report(self, output):
        """Prints what the flags ask for beside the texts, or all of it as json."""
        args = self.args
        finished = None not in output.ended
        result = self.as_json(output)
        say = (lambda text: None) if args.json else partial(print, file=sys.stderr)
        if not args.quiet:
            say(f"\n{statistics(output)}")
        if self.drafts:
            result["drafts"] = self.steps
            say("\n".join(tree_lines(self.steps, len(self.texts))))
        if args.explain and finished:
            result["explained"] = "\n".join(explain(self.engine, output)).splitlines()
            say("\n" + "\n".join(result["explained"]))
        if args.compare and finished:
            self.engine = self.drafts = None  # frees their memory for the next one
            plain, difference = against_plain(args, self.loaded, output, say)
            result |= dict(plain=plain and self.as_json(plain), difference=difference)
        if args.json and not args.prompts:
            print(json.dumps(result))

    def as_json(self, output):
        """The --json object of one run."""
        names = ("tokens", "ended", "tree_size", "batch_size", "steps", "seconds",
                 "tokens_per_step", "tokens_per_second", "accepted")
        return {name: getattr(output, name) for name in names} | dict(
            model=Path(self.args.model).resolve().name,
            sampling=self.loaded.sampling,
            prompts=self.texts,
            texts=list(map(self.loaded.decode, output.tokens)),
            step_lengths=dict(sorted(output.step_lengths.items())),
            plans={str(plan): dict(steps=steps, tokens=tokens)
                   for plan, (steps, tokens) in output.plans.items()})


def statistics(output):
    """The lines that end a run."""
    share = lambda n, of: f"{n / max(of, 1):.0%}"
    plans = sorted(output.plans.items(), key=lambda item: -item[1][0])
    drafted_by = ", ".join(f"{plan} {share(steps, output.steps)}" for plan, (steps, _) in plans)
    guessed = ", ".join(f"{share(n, output.emitted)} by {name}"
                        for name, n in sorted(output.accepted.items()))
    lengths = "  ".join(f"{n}: {share(steps, output.steps)}"
                        for n, steps in sorted(output.step_lengths.items()))
    return (f"drafted by: {drafted_by}\n"
            f"tokens guessed: {guessed or 'none'}; tokens per step by share of steps: {lengths}\n"
            f"{speed(output)}")


def speed(output):
    return (f"{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} tokens "
            "per second")


class Drafts:
    """Records the trees of an engine's steps, and what the model accepted of them; not of a graph,
    which is replayed. Where it can, no step runs ahead. `wanted`: whether to record."""

    def __init__(self, engine, decode):
        self.engine = engine
        self.decode = decode
        self.trees = {}  # sequence -> the tree of its last step
        self.wanted = engine.decoder.pool is None
        if self.wanted:
            engine.decoder.steps_ahead = 0
            self.draft = engine.decoder.draft
            engine.decoder.draft = self.record

    def record(self, plan):
        """Takes the place of Decoder.draft."""
        tree = self.draft(plan)
        self.trees = {}
        if self.wanted:
            columns = [column.tolist() for column in tree]
            self.trees = {sequence: Tree(*(column[slot] for column in columns))
                          for slot, sequence in self.engine.running.items()}
        return tree

    def describe(self, sequence, tokens, path, plan):
        """A result of `Engine.step` as a dict: what guessed its tokens, and, where it was recorded,
        the tree, and what the model accepted of it."""
        path = path[:len(tokens) + 1]  # a text may end inside it
        guessed = ["lookup" if node > plan.head_nodes else f"head {depth}"
                   for depth, node in enumerate(path[1:], start=1)]
        result = dict(plan=str(plan), guessed_by=[*guessed, "model"][:len(tokens)])
        tree = self.trees.get(sequence)
        if not tree:
            return result
        used = [node for node, bits in enumerate(tree.ancestors) if bits]  # spare nodes have none
        number = {node: i for i, node in enumerate(used)}
        drafters = ["root", *(f"head {depth}" for depth in tree.depths[1:])]
        drafters[plan.head_nodes + 1:] = ["lookup"] * plan.lookup_tokens
        return result | dict(
            nodes=[self.decode([tree.tokens[node]]) for node in used],
            drafted_by=[drafters[node] for node in used],
            parents=[number[tree.parents[node]] if node else -1 for node in used],
            path=[number[node] for node in path])


def tree_lines(steps, prompts):
    """The first trees of --show-tree as text: a line for each node, below its parent and further to
    the right."""
    for step in [step for step in steps if len(step["nodes"]) > 1][:4]:
        prompt = f"prompt {step['prompt'] + 1}, " if prompts > 1 else ""
        yield (f"\n{prompt}step {step['step']}, {step['plan']}; * accepted, + added by the model "
               "itself")
        paths = [(0,)]
        for node, parent in enumerate(step["parents"][1:], start=1):
            paths.append((*paths[parent], node))
        for *above, node in sorted(paths):
            mark = "*" if node in step["path"][1:] else " "
            words = "   " * len(above) + repr(step["nodes"][node])
            drafter = step["drafted_by"][node].replace("root", "the newest token")
            yield f"{mark} {words:<44}  {drafter}"
        if step["guessed_by"][-1:] == ["model"]:
            yield f"+ {step['emitted'][-1]!r}"


def converse(args, loaded):
    """Reads a line, prints the model's text, and so on to the end of the input. With --chat the
    lines are turns of a conversation, else each is a prompt by itself."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  lets lines be edited
        print("/clear starts anew; Ctrl-C ends a reply, Ctrl-D the program", file=sys.stderr)
    messages, engine = opening(args), None
    while (line := loaded.group.on_first(read_line)) is not None:
        if line.strip() == "/clear":
            messages = opening(args)
        if line.strip() in ("", "/clear"):
            continue
        turn = [*messages, dict(role="user", content=line)]
        try:
            prompt = loaded.encode(turn, args.chat)
            check_prompt(loaded.model, prompt)
        except InputError as error:  # such as a conversation that is too long
            hint = "; /clear starts anew" if messages != opening(args) else ""
            print(f"{error}{hint}", file=sys.stderr)
            continue
        needed = min(len(prompt) + args.max_new_tokens, loaded.model.config.block_size)
        if engine is None or needed > engine.decoder.capacity:
            engine = None  # frees its memory for the next one
            room_to_grow = args.max_new_tokens + 1024
            engine = make_engine(args, loaded, [prompt], room_to_grow)
        output = reply(args, loaded, engine, prompt)
        # SIGTERM, and on ranks Ctrl-C, end more than a reply
        if errors.received or (loaded.group.size > 1 and None in output.ended):
            raise KeyboardInterrupt
        if args.chat:
            text = loaded.decode(output.tokens[0])
            messages = [*turn, dict(role="assistant", content=text)]


def reply(args, loaded, engine, prompt):
    """Prints the text that follows a prompt -> its Output, up to where Ctrl-C ended it."""
    printer = Printer(args, loaded, engine)
    try:
        output = engine.generate([prompt], args.max_new_tokens, loaded.stop, printer.show,
                                 loaded.encoding)
    except Interrupted as interrupt:
        output = interrupt.output
    printer.finish(output)
    if not args.chat:
        print("-" * 40)
    if not args.quiet:
        print(f"[{speed(output)}]", file=sys.stderr)
    return output


def read_line():
    """The next line of standard input, None at its end."""
    with utf8("standard input"), contextlib.suppress(EOFError):
        return input("> " if sys.stdin.isatty() else "")
