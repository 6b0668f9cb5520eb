"""What generate.py prints: texts as they come, conversations, statistics, --json."""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch

from generate import Interrupted, check_prompt, drafter
from hf.text import decode
from model import InputError
from tools import errors
from tools.compare import against_plain
from tools.load import make_engine, opening
from tools.timing import STAGES, stage_times, timing_decoder

COLOURS = {"lookup": 33, "head 1": 32, "head 2": 36, "head 3": 34, "head 4": 35}  # ANSI; else 31


class Printer:
    """Prints a prompt and its text as it comes; on a terminal, each guessed token in the colour of
    its drafter. Prints several texts in order, each when all before it have ended. With --json
    prints none; of --prompts FILE, an object for each."""

    def __init__(self, args, loaded, texts=()):
        self.args = args
        self.loaded = loaded
        self.texts = texts   # of the prompts
        self.steps = []      # of --show-tree, as dicts
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
            decode = self.loaded.encoding.decode
            number = 1 + sum(one["prompt"] == index for one in self.steps)
            emitted = [decode([token]) for token in step.tokens]
            self.steps.append(dict(prompt=index, step=number, emitted=emitted)
                              | describe(step, decode))
        for token, by in zip(step.tokens if self.streams else [], [*step.drafters, "model"]):
            text = self.stream.feed([token])
            if self.colours and text and by != "model":
                text = f"\x1b[{COLOURS.get(by, 31)}m{text}\x1b[0m"
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
        """Prints what is not the model's text, unless the object of --json holds it."""
        if not self.args.json or self.args.prompts:
            print(text, file=sys.stderr)

    def report(self, output, engine):
        """Prints what the flags ask for beside the texts -> the --json object."""
        result = self.as_json(output)
        if self.args.show_tree:
            result["drafts"] = self.steps
            self.say("\n".join(tree_lines(self.steps, len(self.texts))))
        if self.args.explain and None not in output.ended:
            result["explained"] = "\n".join(explain(engine, output)).splitlines()
            self.say("\n" + "\n".join(result["explained"]))
        elif not self.args.quiet:
            self.say(f"\n{statistics(output)}")
        return result

    def compare(self, output):
        """Decodes the prompts plainly, says how that compares -> what --json adds of it."""
        plain, difference = against_plain(self.args, self.loaded, output, self.say)
        return dict(plain=plain and self.as_json(plain), difference=difference)

    def as_json(self, output):
        """The --json object of one run."""
        names = ("tokens", "ended", "tree_size", "batch_size", "steps", "seconds",
                 "tokens_per_step", "tokens_per_second", "accepted", "sizes")
        return {name: getattr(output, name) for name in names} | dict(
            model=Path(self.args.model).resolve().name,
            sampling=self.loaded.sampling,
            prompts=self.texts,
            texts=list(map(self.loaded.decode, output.tokens)),
            step_lengths=dict(sorted(output.step_lengths.items())))


def statistics(output):
    """The lines that end a run."""
    share = lambda n, of: f"{n / max(of, 1):.0%}"
    guessed = {**output.accepted, "the model": output.emitted - output.accepted.total()}
    by = ", ".join(f"{share(n, output.emitted)} by {name}" for name, n in sorted(guessed.items()))
    lengths = "  ".join(f"{n}: {share(steps, output.steps)}"
                        for n, steps in sorted(output.step_lengths.items()))
    return (f"tokens: {by}\n"
            f"tokens per step by share of steps: {lengths}\n"
            f"{output.tree_size:.2f} nodes and {speed(output)}")


def explain(engine, output):
    """The lines of --explain: who guessed, what the policy chose from, and where time goes."""
    decoder, policy, B = engine.decoder, engine.policy, engine.decoder.batch_size
    seconds = policy.durations.seconds
    yield f"batch size {B}, on {decoder.device}, {torch.get_num_threads()} threads"
    yield statistics(output)
    if policy.durations.unit:  # else no step has told it the machine's speed
        yield f"\n{'nodes T':<12}{'share of steps':>16}{'tokens per step':>17}{'expected ms':>13}"
        for T in sorted({2**i for i in range(policy.largest.bit_length())} | set(output.sizes)):
            steps, tokens = output.sizes.get(T, (0, 0))
            yield (f"{T:<12}{steps / output.steps:>16.0%}{tokens / max(steps, 1):>17.2f}"
                   f"{1e3 * seconds(B, T, 0):>13.2f}")
    if policy.durations.unit and policy.heads:  # with the augmenting block
        yield f"{'a head':<45}{1e3 * (seconds(B, 1, 1) - seconds(B, 1, 0)):>13.2f}"
    yield f"\n{'ms per stage':<12}" + "".join(f"{stage:>10}" for stage in STAGES)
    for T in dict.fromkeys((1, max(output.sizes, key=output.sizes.get))):  # the most used
        times = stage_times(timing_decoder(
            decoder.model, policy.heads, T, lookup=policy.lookup, batch_size=B,
            beams=decoder.beams, sampling=decoder.sampling, graph=decoder.pool is not None))
        yield f"{f'T = {T}':<12}" + "".join(f"{1e3 * t:>10.2f}" for t in times.values())


def speed(output):
    return (f"{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} tokens "
            "per second")


def describe(step, decode):
    """A `StepResult` with a tree as a dict: who guessed its tokens, the tree, and the path that the
    model accepted."""
    tree = step.tree
    T = sum(map(bool, tree.ancestors))  # but for spare nodes, which are the last
    return dict(tree_size=step.tree_size,
                guessed_by=[*step.drafters, "model"][:len(step.tokens)],
                nodes=[decode([token]) for token in tree.tokens[:T]],
                drafted_by=["root", *map(drafter, tree.sources[1:T], tree.depths[1:T])],
                probabilities=[round(p, 3) for p in tree.probabilities[:T]],
                parents=[-1, *tree.parents[1:T]],
                path=step.path[:len(step.tokens) + 1])  # a sequence may end inside it


def tree_lines(steps, prompts):
    """The first trees of --show-tree as text: a line for each node, below its parent and further to
    the right."""
    for step in [step for step in steps if len(step["nodes"]) > 1][:4]:
        prompt = f"prompt {step['prompt'] + 1}, " if prompts > 1 else ""
        yield f"\n{prompt}step {step['step']}; * accepted, + added by the model itself"
        paths = [(0,)]
        for node, parent in enumerate(step["parents"][1:], start=1):
            paths.append((*paths[parent], node))
        for *above, node in sorted(paths):
            mark = "*" if node in step["path"][1:] else " "
            words = "   " * len(above) + repr(step["nodes"][node])
            by = f"{step['drafted_by'][node]}, {step['probabilities'][node]:.0%}"
            yield f"{mark} {words:<44}  {by if above else 'the newest token'}"
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
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline()
        return decode(line, "standard input").rstrip("\r\n") if line else None
    with contextlib.suppress(EOFError):
        return input("> ")
