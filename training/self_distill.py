"""Text that the model itself writes, for heads to train on, since decoding is on such text."""

import shutil
import time

from clover import CloverHeads
from generate import generate
from model import InputError
from training.data import concatenate, document, open_tokens, prompts, write_tokens
from training.flags import SELF_PROMPTS

ROUNDS = 4
BATCH = 32  # prompts decoded together
TRIAL = 8   # tokens of the first batch that tell how long the rest will take
# Not measured: in half precision ties depend on it, and a resumed run must write the same text.
TREE_SIZE = 5


def number_of_prompts(args, kinds):
    """--self-distill, or its default for documents of these kinds, {kind: number}."""
    if args.self_distill is None:
        mostly_chats = 2 * kinds.get("chat", 0) > sum(kinds.values())
        return SELF_PROMPTS if mostly_chats and not args.shard_base else 0
    if args.self_distill and args.shard_base:
        raise InputError("a sharded model does not decode; take --self-distill 0")
    return args.self_distill


class SelfDistillation:
    """What the model writes after prompts from the corpus, in ROUNDS rounds over the run, greedily
    and at temperature 1 in turn. Each is kept in a folder, where a resumed run finds it."""

    def __init__(self, run, corpus, stop, kinds):
        """corpus: the training Tokens; stop: token ids; kinds: {kind: number} of the documents."""
        a = run.args
        context = run.heads.model.config.block_size
        self.folder = run.out / "self_distill"
        self.stop = stop
        self.tokens = None
        self.rounds = 0
        self.length = min(run.window, context // 2)
        self.prompts = prompts(corpus, a.self_distill, max(a.block_size // 4, 1), a.seed,
                               context - self.length)
        self.dtype = corpus.ids.dtype
        self.prompt_in_loss = set(kinds) == {"text"}  # a user's words are not
        if run.step == 0 and run.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier run
        run.world.barrier()

    def parts(self, run, corpus):
        """What the step's windows are drawn from, --self-distill-ratio of them from own text."""
        a = run.args
        own_text = self.tokens_so_far(run)
        due = lambda step: int(a.self_distill_ratio * a.batch_size * step)  # up to a step
        own = due(run.step + 1) - due(run.step)
        if not own or len(own_text.ids) < run.window:  # the first round may be shorter
            return [(corpus, a.batch_size)]
        return [(corpus, a.batch_size - own), (own_text, own)]

    def tokens_so_far(self, run):
        """The Tokens of all rounds that are due by the run's step."""
        while self.rounds < ROUNDS and run.step >= self.rounds * run.args.steps // ROUNDS:
            folder = self.folder / str(self.rounds)
            run.world.run_first(lambda: self.write_round(run, folder))
            new = open_tokens(folder)[0]["train"]
            self.tokens = concatenate([self.tokens, new]) if self.tokens else new
            self.rounds += 1
        return self.tokens

    def write_round(self, run, folder):
        """Writes a round's folder, unless this run wrote it before it was resumed."""
        if folder.exists():
            return
        given = self.prompts[self.rounds::ROUNDS]
        texts = []
        if given:
            began = time.monotonic()
            run.save()
            model = run.heads.model
            if self.rounds == 0:
                run.world.print(self.announcement(model))
            # a copy in the model's dtype
            heads = CloverHeads.from_pretrained(run.out, model) if run.step else None
            out = generate(model, given, self.length, heads, temperature=self.rounds % 2,
                           seed=run.args.seed, tree_size=TREE_SIZE, batch_size=BATCH,
                           stop=self.stop)
            texts = out.tokens
            run.world.print(f"the model wrote {out.emitted} tokens after {len(given)} prompts "
                            f"({out.tokens_per_step:.2f} per step) in "
                            f"{time.monotonic() - began:.0f} s")
        documents = []
        for prompt, text in zip(given, texts):
            in_loss = [self.prompt_in_loss] * len(prompt) + [True] * len(text)
            documents.append(("train", "text", document([*prompt, *text], in_loss, self.dtype)))
        write_tokens(folder, documents)

    def announcement(self, model):
        """The line before the first round: what will be done, about how long it will take, how to
        switch it off. Decodes a few tokens to tell."""
        began = time.monotonic()
        tokens = min(TRIAL, self.length)
        generate(model, self.prompts[:BATCH], tokens, tree_size=1, batch_size=BATCH)
        batches = ROUNDS * -(-len(self.prompts) // (ROUNDS * BATCH))
        seconds = (time.monotonic() - began) / tokens * self.length * batches
        duration = f"{seconds / 60:.0f} min" if seconds > 99 else f"{seconds:.0f} s"
        return (f"self-distillation: the model continues {len(self.prompts)} prompts by up to "
                f"{self.length} tokens each, in {ROUNDS} rounds over the run, for the heads to "
                f"learn from; about {duration} in all, less where texts end "
                "early; --self-distill 0 switches it off")
