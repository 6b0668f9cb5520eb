"""Trains draft heads on a frozen model, by distillation of its next-token distribution.

    python train_heads.py                          # Clover heads for demo/, on the built-in corpus
    python train_heads.py --model DIR --data my_texts/ chats/*.jsonl.gz --out out/heads
    python train_heads.py --init DIR --data PATH   # starts from trained heads
    python train_heads.py --evaluate --out DIR     # measures heads without training them

A run is saved every few minutes, on Ctrl-C and on SIGTERM. --resume leads to the same heads as an
uninterrupted run: bit for bit on a CPU, up to rounding on a GPU.
"""

import sys

if __name__ == "__main__":  # parse the flags before loading torch, to report a typo at once
    from training.flags import parse_heads
    args = parse_heads()

import contextlib
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch

from backends import cpu, tensor_parallel
from clover import CloverHeads, preset
from common.values import human, warn
from hf.chat import load_chat_template, stop_tokens
from hf.heads import load_heads, model_hash, read_record
from model import InputError, check, expect
from tools.errors import command
from tools.load import load_model, read_prompt_file
from training import data, runs, writing
from training.evaluate import measure, record
from training.flags import SELF, STORED, SWITCHES, TRAINING, RunConfig
from training.loss import window_losses

SHOW_EVERY = 20     # steps
SAVE_EVERY = 180.0  # seconds
HEAD_WEIGHT = 0.7   # head i's loss has weight 0.7^i: decoding reaches later heads less often
MIN_VOCABULARY = 8  # the smallest draft vocabulary: twice the default beam width
MIN_SELF_TOKENS = 30_000  # over a hundred texts, so that some are held out
STANDARD_LIBRARY = "the Python standard library's source"  # in heads.json, without --data


class Run:
    """A training run that writes to folder `out`. tokenizer: its hash. key: the training data's
    `tokens_key`. state: the saved state to resume from."""

    def __init__(self, config, out, heads, tokenizer, key, group, state=None):
        self.config = config
        self.out = out
        self.heads = heads.to(heads.model.device, torch.float32).requires_grad_().train()
        self.tokenizer = tokenizer
        self.key = key
        self.group = group
        self.step = state["step"] if state else 0
        self.log = state["log"] if state else []  # the lines of log.jsonl
        self.last_save = time.monotonic()
        self.optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0,
                                           fused=True)
        self.dtype = product_dtype(config, group)
        if state:
            heads.set_vocabulary(state["heads"].get("vocabulary", []))
            heads.load_state_dict(state["heads"])
            self.optimizer.load_state_dict(state["optimizer"])

    def train(self, corpus):
        """Trains until the last step, Ctrl-C or SIGTERM. Returns the exit code."""
        config, group, heads = self.config, self.group, self.heads
        mine = slice(group.rank, None, group.size)  # this process's part of a batch
        show = runs.progress(self.step, config.steps, config.tokens_per_step, group.print)
        with runs.noted_signals() as signals:
            while self.step < config.steps and not self.interrupted(signals):
                windows = data.window_batch(corpus, config.batch_size, config.block_size,
                                            config.n_draft + 1, config.seed, self.step,
                                            heads.model.device, mine)
                loss, accuracies = self.train_step(*windows)
                if self.step % SHOW_EVERY == 0 or self.step == config.steps:
                    self.check_finite(loss)
                    self.report(show, loss.item(), accuracies.tolist())
                if self.step < config.steps and time.monotonic() > self.last_save + SAVE_EVERY:
                    self.save()
        # if another process got the signal, assume SIGTERM
        return 0 if self.step >= config.steps else 128 + (signals or [signal.SIGTERM])[0]

    def interrupted(self, signals):
        """Whether any process got a signal; of several, checked every tenth step to sync less."""
        return (self.group.size == 1 or self.step % 10 == 0) and self.group.any(bool(signals))

    def report(self, show, loss, accuracies):
        tokens = self.step * self.config.tokens_per_step
        self.log.append(dict(step=self.step, tokens=tokens, loss=loss, accuracy=accuracies,
                             lr=self.optimizer.param_groups[0]["lr"]))
        shown = " ".join(map("{:.3f}".format, accuracies))
        show(self.step, f"step {self.step}/{self.config.steps}  loss {loss:.3f}  accuracy {shown}")

    def train_step(self, *windows):
        """Does one optimizer step on a batch of windows -> (loss, head accuracies [K])."""
        loss, accuracies = self.loss(*windows)
        loss.backward()
        for parameter in self.heads.parameters():
            self.group.all_reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        runs.set_learning_rate(self.optimizer, self.config.lr, self.step, self.config.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), accuracies

    def loss(self, ids, loss_mask, documents):
        """The (loss in nats, head accuracies [K]) of a batch over all processes. The gradient
        covers only this process's part of the batch."""
        group = self.group
        losses, hits, guesses = window_losses(self.heads, ids, loss_mask, documents, self.dtype)
        count = group.all_reduce(guesses).clamp(min=1)
        weights = HEAD_WEIGHT ** torch.arange(len(count), device=count.device)
        loss = (losses * weights / count).sum()
        total = group.all_reduce(loss.detach().clone())
        return total + (loss - loss.detach()), group.all_reduce(hits) / count

    def save(self):
        """Writes the heads, then the state, so that the previous state survives any failure."""
        self.check_finite(*self.heads.parameters())
        self.last_save = time.monotonic()
        if self.group.rank:
            return
        config, heads = self.config, self.heads
        path = self.out / runs.STATE_FILE
        training = dict(steps=self.step, tokens=self.step * config.tokens_per_step,
                        init=config.init and Path(config.init).name,
                        **config.select(TRAINING), **data_record(config.data, self.key))
        state = dict(identity=[model_hash(heads.model), self.key], step=self.step, log=self.log,
                     heads=heads.state_dict(), optimizer=self.optimizer.state_dict())
        advice = "make room and --resume" if path.exists() else "make room and start it again"
        with runs.saving(f"{self.out}: step {self.step} cannot be saved", advice):
            heads.save_pretrained(self.out, self.tokenizer, torch.bfloat16, training=training)
            runs.save_lines(self.out / "log.jsonl", self.log)
            runs.save_lines(self.out / runs.RUN_FILE, [config.select(STORED)])
            runs.save_file(path, state)

    def check_finite(self, *tensors):
        finite = all(x.isfinite().all() for x in tensors)
        expect(finite, f"training diverged at step {self.step}: a value is not finite; "
               f"{self.out} keeps the last good state; start again with a lower --lr")


def product_dtype(config, group):
    """The dtype of matrix products: --dtype, or else bfloat16 where it is faster than float32. On a
    CPU where it is not, prints a line."""
    if config.dtype:
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    if on_cuda(config) or cpu.torch_multiplies_bfloat16():
        return torch.bfloat16
    if group.rank == 0:
        warn(cpu.SLOW_BFLOAT16)
    return torch.float32


def data_record(paths, key):
    """What heads.json records about --data: names without folders, since it may be published."""
    return dict(data=[Path(path).name for path in paths or ()] or STANDARD_LIBRARY, key=key)


def read_config(args, out, group):
    """The `RunConfig` from the flags and the preset. Raises InputError for bad values."""
    config = replace(runs.run_config(args, out), device=group.device)
    check("lr", config.lr, 0, 10, above=True)
    check("seed", config.seed, 0, 2**31, whole=True)
    expect(config.draft_vocabulary in (None, 0) or config.draft_vocabulary >= MIN_VOCABULARY,
           f"draft vocabulary must be auto, 0 for all, or at least {MIN_VOCABULARY}")
    expect(args.evaluate or config.batch_size % group.size == 0, f"a batch size of "
           f"{config.batch_size} cannot be split over {group.size} processes; use a multiple")
    if "init" in args:
        given = [f"--{runs.flag(name)}" for name in ("preset", *SWITCHES, "draft_vocabulary")
                 if name in args]
        expect(not given, f"--init takes its heads as they are; leave out {', '.join(given)}")
        heads, _ = read_record(args.init)
    else:
        heads = preset(config.preset, **config.select(SWITCHES))
    return replace(config, **{name: getattr(heads, name) for name in ("preset", *SWITCHES)})


def prepare(config, out, group, resume):
    """Loads the model, data and saved state, and checks them -> (Run, training Tokens)."""
    keys = ("identity", "step", "heads", "optimizer", "log")
    state = runs.load_file(out / runs.STATE_FILE, keys) if resume else None
    writes = config.prompts or load_chat_template(config.model)
    if config.data == [SELF] or (config.data is None and writes):
        config = replace(config, data=[write_texts(config, out, group)])
    model, encoding = load_frozen(config)
    torch.manual_seed(config.seed)
    if config.init and not state:
        heads = load_heads(config.init, model, encoding.hash)
    else:
        heads = CloverHeads(preset(config.preset, **config.select(SWITCHES)), model)
    config = replace(config, block_size=pick_block_size(config, heads))
    base = model_hash(model)
    home = out  # the folder of the tokens; runs on the model's own text share them
    if config.data and len(config.data) == 1 and writing.written_by(config.data[0]) == base:
        home = Path(config.data[0])

    def prepare_text():
        key = data.tokens_key(config.data, encoding)
        expect(not state or state["identity"] == [base, key], f"{out} holds a run with another "
               "model or other data; --resume needs the same")
        stored = data.store_tokens(home / data.FILE, key, config.data, encoding,
                                   model.config.vocab_size)
        for leftover in {*out.glob("*.tmp*"), *home.glob("*.tmp*")}:  # from a killed run
            leftover.unlink()
        for split in data.SPLITS:  # raises if there is too little text
            data.window_batch(stored[split], 1, config.block_size, config.n_draft + 1, 0, 0)
        return key
    run = Run(config, out, heads, encoding.hash, group.on_first(prepare_text), group, state)
    corpus = data.open_tokens(home / data.FILE)["train"]
    if not state and not config.init:
        data.set_draft_vocabulary(heads, corpus.ids[corpus.loss_mask], config.draft_vocabulary,
                                  group.print)
    return run, corpus


def load_frozen(config):
    """The model that heads are trained on, in bfloat16 on a GPU, and its tokenizer."""
    dtype = torch.bfloat16 if on_cuda(config) else torch.float32
    return load_model(config, packed=False, dtype=dtype)


def on_cuda(config):
    return config.device.startswith("cuda")


def write_texts(config, out, group):
    """Generates text with the model, or its answers to --prompts, and returns their folder."""
    # packed weights are faster on a CPU, not for the many sequences that a GPU decodes together
    model, encoding = load_frozen(config) if on_cuda(config) else load_model(config)
    prompts = None
    if config.prompts:
        missing = None if encoding.template else "a model with a chat template"
        prompts = group.raise_together(
            lambda: read_prompt_file(config.prompts, missing, encoding.template))
        expect(all(prompt.messages[-1]["role"] != "assistant" for prompt in prompts),
               f"{config.prompts}: a prompt ends with an answer; end each with the user's message")
    folder = out / SELF
    enough = max(config.steps * config.batch_size * (config.block_size or 256), MIN_SELF_TOKENS)
    goal = config.self_tokens or enough
    group.print(f"generating {human(goal)} tokens of training text with the model, in {folder}")
    stop = stop_tokens(config.model, encoding)
    writer = writing.Writer(folder, model, encoding, stop, config.seed, prompts, group.print)
    for prompt in prompts or ():
        if prompt.grammar:  # a bad one fails here, not hours later
            writer.grammar_tokenizer.compile(*prompt.grammar)
    group.on_first(writer.claim)
    writer.write(goal, group.rank, group.size)
    group.barrier()
    return str(folder.absolute())


def pick_block_size(config, heads):
    """--block-size; default 256, or less if the model's context is too short for such windows."""
    longest = heads.model.config.block_size - heads.config.n_draft - 1
    size = config.block_size or min(256, longest)
    check("block size", size, 1, longest, whole=True)
    return size


def evaluate(config, out):
    """Measures the heads in `out`, adds the results to heads.json, and prints how to use them."""
    model, encoding = load_model(config, packed=False)
    heads = load_heads(out, model, encoding.hash)
    size = pick_block_size(config, heads)
    heldout, measured_on = heldout_tokens(config, out, heads, encoding)
    results = measure(heads, heldout, config.batch_size, size)
    record(heads, out, encoding.hash, results | dict(measured_on=measured_on))
    chat = " --chat" if encoding.template else ""
    print(f"\nto use them:  python generate.py --model {config.model} --heads {out}{chat}")


def heldout_tokens(config, out, heads, encoding):
    """Held-out Tokens of --data, by default of the training data -> (Tokens, `data_record`)."""
    about = heads.info.get("training", {})
    if config.data:
        about = data_record(config.data, data.tokens_key(config.data, encoding))
    for folder in (out, out / SELF, *map(Path, config.data or ())):
        with contextlib.suppress(InputError):
            stored = data.open_tokens(folder / data.FILE)
            if stored["key"] == about.get("key"):
                return stored["heldout"], {name: about[name] for name in ("data", "key")}
    expect(config.data or about.get("data") == STANDARD_LIBRARY, f"{out}: the tokens of the "
           f"training data ({about.get('data')}) are gone; give --data")
    about = data_record(config.data, data.tokens_key(config.data, encoding))
    return data.load_tokens(config.data, encoding, "heldout"), about


def train(config, out, group, resume):
    """Trains heads -> (the `RunConfig` with all defaults resolved, the exit code)."""
    run, corpus = prepare(config, out, group, resume)
    parameters = sum(p.numel() for p in run.heads.parameters())
    group.print(f"{config.preset} heads: {human(parameters)} parameters; "
                f"{human(len(corpus.ids))} training tokens")
    if not run.step:
        run.save()  # so that --resume has a state to start from
    code = run.train(corpus)
    run.save()  # before the evaluation, so that Ctrl-C there loses nothing
    if code:
        group.print(f"\ninterrupted at step {run.step}; --resume continues from here")
    return run.config, code


def main(args):
    """Trains and evaluates heads, or only evaluates them. Returns the exit code."""
    group = tensor_parallel.start(args.device)
    out = Path(args.out or f"out/{getattr(args, 'preset', RunConfig.preset)}")
    config = group.raise_together(lambda: read_config(args, out, group))
    code = 0
    if not args.evaluate:
        config, code = train(config, out, group, args.resume)
    group.close()
    if code == 0 and group.rank == 0:
        evaluate(config, out)
    return code


if __name__ == "__main__":
    with command():
        if code := main(args):
            sys.exit(code)
