"""What generate.py prints: texts as they come, the statistics that end a run, --json."""

import json
import os
import sys
from functools import partial
from pathlib import Path

from generate import Interrupted
from tools.compare import against_plain
from tools.drafts import Drafts
from tools.timing import explain

HEAD_COLOURS = (32, 36, 34, 35, 31)  # ANSI; a head beyond the last takes the last
LOOKUP_COLOUR = 33


class Printer:
    """Prints a prompt and its text as it comes; on a terminal, each guessed token in the colour of
    the head that guessed it, or of lookup. Several texts are printed in order, when all before them
    have ended. With --json none is; of --prompts FILE, an object for each."""

    def __init__(self, session, engine):
        self.session = session
        self.engine = engine
        self.drafts = Drafts(engine, session) if session.args.show_tree else None
        self.streams = len(session.texts) <= 1 and not session.args.json
        self.sequences = {}  # index -> a `Sequence` that ended and is not printed yet
        self.printed = 0     # texts
        self.stream = session.text_stream()
        self.colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.shown = ["" if session.template else text for text in session.texts]

    def run(self, prompts):
        """Continues the prompts and prints the texts -> Output, up to where Ctrl-C ended it."""
        session = self.session
        if self.streams:
            print("".join(self.shown), end="", flush=True)
        try:
            output = self.engine.generate(prompts, session.args.max_new_tokens, session.stop,
                                          self.show, session.encoding)
        except Interrupted as interrupt:
            output = interrupt.output
        if self.streams:
            print(self.stream.finish(), flush=True)
        else:  # what was interrupted, too
            self.sequences |= {sequence.index: sequence for sequence in output.sequences}
            self.print_ended()
        full = output.ended.count("context")
        if full and not session.args.json:
            texts = "the text" if len(prompts) == 1 else f"{full} of {len(prompts)} texts"
            context = session.model.config.block_size
            print(f"\n{texts} ended where the model's context of {context} tokens is full",
                  file=sys.stderr)
        return output

    def show(self, sequence, tokens, path, plan):
        """What `Engine.generate` calls with each result of a step."""
        if self.drafts:
            self.drafts.show(sequence, tokens, path, plan)
        for i, token in enumerate(tokens if self.streams else []):
            text = "" if token in self.session.stop else self.stream.feed([token])
            guessed = i < len(path) - 1  # the last token of a step is the model's own
            if self.colours and guessed and text:
                head = HEAD_COLOURS[min(i, len(HEAD_COLOURS) - 1)]
                colour = LOOKUP_COLOUR if path[i + 1] > plan.head_nodes else head
                text = f"\x1b[{colour}m{text}\x1b[0m"
            print(text, end="", flush=True)
        if sequence.ended and not self.streams:
            self.sequences[sequence.index] = sequence
            self.print_ended()

    def print_ended(self):
        args = self.session.args
        while sequence := self.sequences.pop(self.printed, None):
            text = self.session.decode(sequence.tokens)
            if not args.json:
                print(f"{self.shown[sequence.index]}{text}\n{'-' * 40}", flush=True)
            elif args.prompts:
                print(json.dumps(dict(prompt=self.session.texts[sequence.index], text=text,
                                      tokens=sequence.tokens, ended=sequence.ended)), flush=True)
            self.printed += 1
        if len(self.shown) > 1 and sys.stderr.isatty():
            ended = self.printed + len(self.sequences)
            print(f"\r{ended} of {len(self.shown)} texts", end="", file=sys.stderr, flush=True)

    def report(self, output):
        """Prints what the flags ask for beside the texts, or all of it as json."""
        session = self.session
        args = session.args
        finished = None not in output.ended
        result = as_json(session, output)
        say = (lambda text: None) if args.json else partial(print, file=sys.stderr)
        if not args.quiet:
            say(f"\n{statistics(output)}")
        if self.drafts:
            result["drafts"] = self.drafts.steps
            say("\n".join(self.drafts.lines()))
        if args.explain and finished:
            result["explained"] = "\n".join(explain(self.engine, output)).splitlines()
            say("\n" + "\n".join(result["explained"]))
        if args.compare and finished:
            self.engine = self.drafts = None  # frees their memory for the next one
            plain, difference = against_plain(session, output, say)
            result |= dict(plain=plain and as_json(session, plain), difference=difference)
        if args.json and not args.prompts:
            print(json.dumps(result))


def as_json(session, output):
    """The --json object of one run."""
    names = ("tokens", "ended", "tree_size", "batch_size", "steps", "seconds", "tokens_per_step",
             "tokens_per_second", "accepted")
    return {name: getattr(output, name) for name in names} | dict(
        model=Path(session.args.model).resolve().name,
        sampling=session.sampling,
        prompts=session.texts,
        texts=list(map(session.decode, output.tokens)),
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
            f"{output.tokens_per_step:.2f} tokens per step, "
            f"{output.tokens_per_second:.1f} tokens per second")
