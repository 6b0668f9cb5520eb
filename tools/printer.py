"""What generate.py prints: texts as they come, and the statistics that end a run."""

import json
import os
import sys

from generate import Interrupted

HEAD_COLOURS = (32, 36, 34, 35, 31)  # ANSI; a head beyond the last takes the last
LOOKUP_COLOUR = 33


class Printer:
    """Prints a prompt and its text as it comes; on a terminal, each guessed token in the colour of
    the head that guessed it, or of lookup. Several texts are printed in order, when all before them
    have ended. With --json none is; of --prompts FILE, an object for each. trees: a `Drafts`."""

    def __init__(self, session, trees=None):
        self.session = session
        self.trees = trees
        self.streams = len(session.texts) <= 1 and not session.args.json
        self.done = {}     # index -> (tokens, why it ended), of texts that were not printed yet
        self.printed = 0   # texts
        self.stream = session.text_stream()
        self.colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.shown = ["" if session.template else text for text in session.texts]
        if self.streams:
            print("".join(self.shown), end="", flush=True)

    def show(self, index, tokens, path, plan):
        """What `on_step` calls."""
        if self.trees:
            self.trees.show(index, tokens, path, plan)
        for i, token in enumerate(tokens if self.streams else []):
            text = "" if token in self.session.stop else self.stream.feed([token])
            guessed = i < len(path) - 1  # the last token of a step is the model's own
            if self.colours and guessed and text:
                head = HEAD_COLOURS[min(i, len(HEAD_COLOURS) - 1)]
                colour = LOOKUP_COLOUR if path[i + 1] > plan.head_nodes else head
                text = f"\x1b[{colour}m{text}\x1b[0m"
            print(text, end="", flush=True)

    def end(self, sequence):
        """What `on_end` calls."""
        if not self.streams:
            self.done[sequence.index] = sequence.tokens, sequence.ended
            self.print_done()

    def print_done(self):
        while self.printed in self.done:
            self.print_text(self.printed, *self.done.pop(self.printed))
            self.printed += 1
        if len(self.shown) > 1 and sys.stderr.isatty():
            done = self.printed + len(self.done)
            print(f"\r{done} of {len(self.shown)} texts", end="", file=sys.stderr, flush=True)

    def print_text(self, index, tokens, ended):
        text = self.session.decode(tokens)
        if not self.session.args.json:
            print(f"{self.shown[index]}{text}\n{'-' * 40}", flush=True)
        elif self.session.args.prompts:
            print(json.dumps(dict(prompt=self.session.texts[index], text=text, tokens=tokens,
                                  ended=ended)), flush=True)

    def finish(self, output):
        if self.streams:
            print(self.stream.finish(), flush=True)
        else:  # what was interrupted, too
            self.done |= dict(enumerate(zip(output.tokens, output.ended)))
            self.print_done()


def print_texts(session, engine, prompts, trees=None, keep=False):
    """Continues the prompts and prints the texts -> Output, up to where Ctrl-C ended it. keep: see
    `Engine.generate`."""
    printer = Printer(session, trees)
    try:
        output = engine.generate(prompts, session.args.max_new_tokens, session.stop, printer.show,
                                 session.encoding, keep, printer.end)
    except Interrupted as interrupt:
        output = interrupt.output
    printer.finish(output)
    full = output.ended.count("context")
    if full and not session.args.json:
        texts = "the text" if len(prompts) == 1 else f"{full} of {len(prompts)} texts"
        context = session.model.config.block_size
        print(f"\n{texts} ended where the model's context of {context} tokens is full",
              file=sys.stderr)
    return output


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
