"""What generate.py prints: texts as they come, conversations, statistics, --json."""

import contextlib
import json
import os
import sys
from pathlib import Path

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
    its drafter. Prints several texts in order, each when all before it have ended. With --json
    prints none; of --prompts FILE, an object for each."""

    def __init__(self, args, loaded, texts=()):
        self.args = args
        self.loaded = loaded
        self.texts = texts   # of the prompts
        self.steps = []      # of --show-tree, as dicts
        self.emitted = [loaded.encoding.stream() for _ in texts] if args.show_tree else []
        self.streams = len(texts) <= 1 and not args.json
        self.sequences = {}  # index -> a `Sequence` that ended and is not printed yet
        self.printed = 0     # texts
        self.stream = loaded.encoding.stream(loaded.stop)
        self.colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.shown = ["" if args.chat else text for text in texts]
        if self.streams:
            print("".join(self.shown), end="", flush=True)

    def generate(self, engine, prompts):
        """Decodes the prompts and prints -> the Output, up to where Ctrl-C ended it."""
        try:
            output = engine.generate(prompts, self.args.max_new_tokens, self.loaded.stop, self.show,
                                     self.loaded.encoding, with_trees=self.args.show_tree)
        except Interrupted as interrupt:
            output = interrupt.output
        self.finish(output)
        return output

    def show(self, step):
        """Prints a `StepResult`."""
        index = step.sequence.index
        if self.args.show_tree:
            emitted = [self.emitted[index].feed([token]) for token in step.tokens]
            number = 1 + sum(one["prompt"] == index for one in self.steps)
            self.steps.append(dict(prompt=index, step=number, emitted=emitted)
                              | describe(step, self.loaded.encoding.decode))
        for i, token in enumerate(step.tokens if self.streams else []):
            text = self.stream.feed([token])
            if self.colours and text and i < len(step.drafters):  # else the model's own
                head = HEAD_COLOURS[min(i, len(HEAD_COLOURS) - 1)]
                colour = LOOKUP_COLOUR if step.drafters[i] == "lookup" else head
                text = f"\x1b[{colour}m{text}\x1b[0m"
            print(text, end="", flush=True)
        if step.sequence.ended and not self.streams:
            self.sequences[index] = step.sequence
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
        if full:
            self.say(f"\n{full} of {len(output.ended)} texts ended where the model's context of "
                     f"{self.loaded.model.config.block_size} tokens is full")

    def say(self, text):
        """Prints what is not the model's text."""
        if not self.args.json:
            print(text, file=sys.stderr)

    def report(self, output, engine):
        """Prints what the flags ask for beside the texts -> the --json object."""
        result = self.as_json(output)
        if not self.args.quiet:
            self.say(f"\n{statistics(output)}")
        if self.args.show_tree:
            result["drafts"] = self.steps
            self.say("\n".join(tree_lines(self.steps, len(self.texts))))
        if self.args.explain and None not in output.ended:
            result["explained"] = "\n".join(explain(engine, output)).splitlines()
            self.say("\n" + "\n".join(result["explained"]))
        return result

    def compare(self, output):
        """Decodes the prompts plainly, says how that compares -> what --json adds of it."""
        plain, difference = against_plain(self.args, self.loaded, output, self.say)
        return dict(plain=plain and self.as_json(plain), difference=difference)

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


def describe(step, decode):
    """A `StepResult` with a tree as a dict: the drafters of its tokens, the tree, and the path that
    the model accepted."""
    plan, tree = step.plan, step.tree
    drafted_by = ["root", *(f"head {depth}" for depth in tree.depths[1:])]
    drafted_by[plan.head_nodes + 1:] = ["lookup"] * plan.lookup_tokens
    used = [node for node, bits in enumerate(tree.ancestors) if bits]  # spare nodes have none
    number = {node: i for i, node in enumerate(used)}
    path = step.path[:len(step.tokens) + 1]  # a sequence may end inside it
    return dict(plan=str(plan),
                guessed_by=[*(drafted_by[node] for node in path[1:]), "model"][:len(step.tokens)],
                nodes=[decode([tree.tokens[node]]) for node in used],
                drafted_by=[drafted_by[node] for node in used],
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
        output = Printer(args, loaded).generate(engine, [prompt])
        if not args.chat:
            print("-" * 40)
        if not args.quiet:
            print(f"[{speed(output)}]", file=sys.stderr)
        # SIGTERM, and on ranks Ctrl-C, end more than a reply
        if errors.received or (loaded.group.size > 1 and None in output.ended):
            raise KeyboardInterrupt
        if args.chat:
            text = loaded.decode(output.tokens[0])
            messages = [*turn, dict(role="assistant", content=text)]


def read_line():
    """The next line of standard input, None at its end."""
    with utf8("standard input"), contextlib.suppress(EOFError):
        return input("> " if sys.stdin.isatty() else "")
