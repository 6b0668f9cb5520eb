"""Text that the model itself writes, for heads to train on: decoding is on the model's own text, not on the
corpus's."""

import shutil
import time

from clover import CloverHeads
from generate import generate
from training.data import concatenate, document, open_tokens, prompts, write_tokens

SELF_PROMPTS = 1024  # by default, where the data are conversations
ROUNDS = 4
TREE_SIZE = 5  # not measured: in half precision ties depend on it, and a resumed run must write the same text


class SelfDistillation:
    """What the model writes after prompts from the corpus, in ROUNDS rounds spread evenly over the run.

    Rounds are greedy and at temperature 1 in turn, and use the heads as they are by then. Each is kept in a folder of
    tokens, where a resumed run finds it.
    """

    def __init__(self, run, corpus, stop, kinds):
        """corpus: the training Tokens; stop: the token ids that end a text; kinds: {kind: number} of the documents."""
        a, c = run.args, run.heads.model.config
        self.folder, self.stop, self.tokens, self.rounds = run.out / "self_distill", stop, None, 0
        self.length = min(a.block_size + run.heads.config.n_draft + 1, c.block_size // 2)
        self.prompts = prompts(corpus, a.self_distill, max(a.block_size // 4, 1), a.seed, c.block_size - self.length)
        self.dtype = corpus.ids.dtype
        self.prompt_in_loss = set(kinds) == {"text"}  # a user's words are not
        if run.step == 0 and run.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier run
        run.world.barrier()

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
        given, texts, model, began = self.prompts[self.rounds::ROUNDS], [], run.heads.model, time.monotonic()
        if given:
            run.save()
            heads = CloverHeads.from_pretrained(run.out, model) if run.step else None  # a copy in the model's dtype
            out = generate(model, given, self.length, heads, temperature=self.rounds % 2, seed=run.args.seed,
                           tree_size=TREE_SIZE, batch_size=32, stop=self.stop)
            texts = out.tokens
            run.world.print(f"the model wrote {out.emitted} tokens after {len(given)} prompts "
                            f"({out.tokens_per_step:.2f} per step) in {time.monotonic() - began:.0f} s")
        in_loss = self.prompt_in_loss
        documents = (document([*prompt, *text], [in_loss] * len(prompt) + [True] * len(text), self.dtype)
                     for prompt, text in zip(given, texts))
        write_tokens(folder, (("train", "text", tokens) for tokens in documents))
