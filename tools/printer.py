"""What generate.py prints: streamed text, statistics, --json."""

import contextlib
import json
import os
import sys

from generate import Output
from tools.statistics import Statistics, drafter, guessed_by

COLOURS = {"lookup": 33, "schema": 92, "head 1": 32, "head 2": 36, "head 3": 34, "head 4": 35}
OTHER_COLOUR = 31  # ANSI, like COLOURS


class Printer:
    """Streams the output of a single prompt; on a terminal, guessed tokens have the colour of their
    drafter. Prints several outputs in the order of their prompts, each when it and all before it
    are complete. --json prints no text; with --prompts FILE it prints an object per prompt."""

    def __init__(self, args, loaded, prompts=()):
        self.args = args
        self.loaded = loaded
        self.prompts = prompts  # as text
        self.steps = []         # dicts, for --show-tree
        self.statistics = Statistics()
        self.streams = len(prompts) <= 1 and not args.json
        self.output = Output()
        self.printed = 0        # sequences
        self.colours = has_colours(sys.stdout)
        if self.streams and not args.chat:
            print("".join(prompts), end="", flush=True)

    def generate(self, engine, prompts, limit, grammars):
        """Decodes the prompts, up to `limit` new tokens, and prints the text. Returns the Output,
        partial after Ctrl-C."""
        self.stream = self.loaded.stream(grammars[0])
        with contextlib.suppress(KeyboardInterrupt):
            engine.generate(prompts, limit, self.loaded.stop, self.show, self.loaded.encoding,
                            with_trees=self.args.show_tree, grammars=grammars,
                            output=self.output)
        self.finish(limit)
        return self.output

    def show(self, step):
        """Prints the tokens of a `StepResult`."""
        index = step.sequence.index
        self.statistics.count(step)
        if self.args.show_tree:
            decode = self.loaded.encoding.decode
            number = 1 + sum(one["prompt"] == index for one in self.steps)
            emitted = [decode([token]) for token in step.tokens]
            self.steps.append(dict(prompt=index, step=number, emitted=emitted)
                              | step_record(step, decode))
        if self.streams:
            for token, source in zip(step.tokens, guessed_by(step)):
                text = self.stream.feed([token])
                is_painted = self.colours and text and source != "model"
                print(painted(text, source) if is_painted else text, end="", flush=True)
        elif step.sequence.ended:
            self.print_complete()

    def print_complete(self, partial=False):
        """Prints the outputs that have ended. partial: the others, too."""
        for sequence in self.output.sequences[self.printed:]:
            if not (sequence.ended or partial):
                break
            prompt = self.prompts[sequence.index]
            text = self.loaded.decode(sequence.tokens, sequence.grammar)
            if not self.args.json:
                print(f"{'' if self.args.chat else prompt}{text}\n{'-' * 40}", flush=True)
            elif self.args.prompts:
                print(json.dumps(dict(prompt=prompt, text=text, tokens=sequence.tokens,
                                      ended=sequence.ended)), flush=True)
            self.printed += 1

    def finish(self, limit):
        """Prints what is left, partial sequences after Ctrl-C included, and what was cut."""
        if self.streams:
            print(self.stream.finish(), flush=True)
        else:
            self.print_complete(partial=True)
        for sequence in self.output.sequences:
            if sequence.error:
                self.say(f"\nprompt {sequence.index + 1}: {sequence.error}")
        context = self.loaded.model.config.block_size
        for ended, why in (("length", f"after {limit} new tokens; --max-new-tokens sets this"),
                           ("context", f"by the end of the model's context of {context} tokens")):
            if number := self.output.ended.count(ended):
                self.say(f"\n{number} of {len(self.output.ended)} outputs cut {why}")

    def say(self, text):
        """Prints a line to standard error, unless the --json object has the same information."""
        if not self.args.json or self.args.prompts:
            print(text, file=sys.stderr)

    def report(self, output, engine):
        """Prints statistics and --show-tree. Returns the --json object."""
        counted = self.statistics
        result = self.as_json(output, counted) | dict(expected_ms=expected_ms(engine, counted))
        if self.args.show_tree:
            result["drafts"] = self.steps
            self.say("\n".join(tree_lines(self.steps, len(self.prompts))))
        if not self.args.quiet:
            self.say(f"\n{summary(output, counted)}")
        return result

    def as_json(self, output, counted):
        """The --json object of one run, an `Output` and its `Statistics`."""
        names = ("tokens", "ended", "batch_size", "steps", "seconds", "tokens_per_step",
                 "tokens_per_second")
        return {name: getattr(output, name) for name in names} | dict(
            tree_size=counted.tree_size, accepted=counted.accepted, sizes=counted.sizes,
            model=model_name(self.args), sampling=self.loaded.sampling, prompts=self.prompts,
            texts=[self.loaded.decode(one.tokens, one.grammar) for one in output.sequences],
            step_lengths=dict(sorted(counted.step_lengths.items())))


def has_colours(stream):
    """Whether a stream is a terminal that shows colours."""
    return (stream.isatty() and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb")


def painted(text, drafter):
    return f"\x1b[{COLOURS.get(drafter, OTHER_COLOUR)}m{text}\x1b[0m"


def model_name(args):
    """The name of --model's folder or file, as it was given: links are not followed."""
    return os.path.basename(os.path.abspath(args.model))


def summary(output, counted):
    """The lines printed after a run."""
    share = lambda part, total: f"{part / max(total, 1):.0%}"
    accepted = counted.accepted
    sources = {**accepted, "the model": output.emitted - accepted.total()}
    shares = [f"{share(n, output.emitted)} by {name}" for name, n in sorted(sources.items())]
    lengths = [f"{n} in {share(steps, output.steps)}"
               for n, steps in sorted(counted.step_lengths.items())]
    return (f"tokens: {', '.join(shares)}\n"
            f"tokens per step: {', '.join(lengths)} of steps\n"
            f"{counted.tree_size:.2f} nodes and {speed(output)}")


def expected_ms(engine, counted):
    """{tree size: milliseconds that the policy expects of a step, heads left out}, for 1, 2, 4, ...
    and the sizes that were used. {} if it has timed no step, as in plain decoding."""
    policy = engine.policy
    if policy.times.unit is None:
        return {}
    sizes = {2**i for i in range(policy.largest.bit_length())} | {*counted.sizes}
    seconds = {T: policy.times.seconds(engine.decoder.batch_size, T, 0) for T in sorted(sizes)}
    return {T: round(1e3 * s, 3) for T, s in seconds.items()}


def speed(output):
    return (f"{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} tokens "
            "per second")


def step_record(step, decode):
    """A `StepResult` with a tree as a dict: the drafter of each token, the tree, the accepted
    path."""
    tree = step.tree
    T = sum(map(bool, tree.ancestors))  # spare nodes are at the end and have no ancestors
    return dict(tree_size=step.tree_size,
                guessed_by=guessed_by(step),
                nodes=[decode([token]) for token in tree.tokens[:T]],
                drafted_by=["root", *map(drafter, tree.sources[1:T], tree.depths[1:T])],
                probabilities=[round(p, 3) for p in tree.probabilities[:T]],
                parents=[-1, *tree.parents[1:T]],
                path=step.path[:len(step.tokens) + 1])  # a sequence may end inside it


def tree_lines(steps, prompts):
    """The lines of --show-tree: the first four trees, a line per node, indented below its
    parent."""
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
