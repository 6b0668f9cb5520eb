"""Trains draft heads on a frozen model, towards the model's own next-token distribution.

    python train_heads.py                          # Clover heads for demo/, on the built-in corpus
    python train_heads.py --model DIR --data my_texts/ 'chats/*.jsonl.gz' --out out/heads
    python train_heads.py --evaluate --out DIR     # measures heads without training them

A run is saved every few minutes, on Ctrl-C and on SIGTERM. With --resume it ends with the same
heads as a run that was never stopped: on a CPU bit for bit, on a GPU up to rounding.
"""

import sys

if __name__ == "__main__":  # before torch is loaded, so that a typo in a flag is told at once
    from training.flags import main
    sys.exit(main())

import contextlib
import json
import signal
import time
from pathlib import Path

import torch

from backends import tensor_parallel
from clover import CloverHeads, model_hash, preset
from hf.chat import load_chat_template, stop_tokens
from model import InputError, atomic_write, check, expect, human
from tools.load import load_model
from training import common, data, writing
from training.corpus import SPLITS
from training.evaluate import SECONDS, measure, record
from training.flags import RUN_FILE, SAVED, SELF, STATE_FILE, SWITCHES, TRAINING
from training.loss import guess_masks, head_losses, run_heads, run_model

HEAD_WEIGHT = 0.7   # head i counts 0.7^i in the loss, since decoding reaches later heads less often
SHOW_EVERY = 20     # steps
SAVE_EVERY = 180.0  # seconds
STANDARD_LIBRARY = "the Python standard library's source"  # in heads.json, for no --data


class Run:
    def __init__(self, args, heads, encoding, group, home, state=None):
        self.args = args
        self.out = Path(args.out)
        self.home = home  # of tokens and states
        self.encoding = encoding
        self.group = group
        self.heads = heads.to(heads.model.device)
        self.step = state["step"] if state else 0
        self.log = state["log"] if state else []  # of log.jsonl
        self.began = self.saved = time.monotonic()
        self.optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0,
                                           fused=True)
        self.dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16  # of products
        self.autocast = torch.autocast(heads.model.device.type, torch.bfloat16,
                                       enabled=self.dtype == torch.bfloat16)
        if state:
            heads.set_vocabulary(state["heads"].pop("vocabulary", []))
            heads.load_state_dict(heads.state_dict() | state["heads"])
            self.optimizer.load_state_dict(state["optimizer"])

    def train(self, corpus):
        """Trains to the last step -> 0, or until Ctrl-C or SIGTERM come -> the exit code."""
        a = self.args
        show = common.progress(self.step, a.steps, a.batch_size * a.block_size, self.group.print)
        with common.noted_signals() as signals:
            while self.step < a.steps and not self.interrupted(signals):
                loss, accuracies = self.train_step(*self.batch(corpus))
                if self.step % SHOW_EVERY == 0 or self.step == a.steps:
                    self.check_finite(loss)
                    self.report(show, loss.item(), accuracies.tolist())
                if self.step < a.steps and time.monotonic() > self.saved + SAVE_EVERY:
                    self.save()
        # of ranks only one may have been signalled
        return 0 if self.step >= a.steps else 128 + (signals or [signal.SIGTERM])[0]

    def interrupted(self, signals):
        """Whether a signal came to any process; asking waits for all, so every tenth step."""
        return (self.group.size == 1 or self.step % 10 == 0) and self.group.any(bool(signals))

    def report(self, show, loss, accuracies):
        tokens = self.step * self.args.batch_size * self.args.block_size
        self.log.append(dict(step=self.step, tokens=tokens, loss=loss, accuracy=accuracies,
                             lr=self.optimizer.param_groups[0]["lr"]))
        shown = " ".join(map("{:.3f}".format, accuracies))
        show(self.step, f"step {self.step}/{self.args.steps}  loss {loss:.3f}  accuracy {shown}")

    def batch(self, corpus):
        a, group = self.args, self.group
        seed = a.seed * 1_000_003 + self.step  # each step has windows of its own
        return data.window_batch(corpus, a.batch_size, a.window, seed, self.heads.model.device,
                                 slice(group.rank, None, group.size), self.heads.model.dtype)

    def train_step(self, *windows):
        """One optimiser step on a batch of windows -> (loss, head accuracies [K])."""
        losses, accuracies = self.losses(*windows)
        loss = sum(HEAD_WEIGHT ** i * head_loss for i, head_loss in enumerate(losses))
        loss.backward()
        for parameter in self.heads.parameters():
            self.group.all_reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        common.set_learning_rate(self.optimizer, self.args.lr, self.step, self.args.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), accuracies

    def losses(self, ids, loss_mask, documents, teacher):
        """A batch of windows -> (losses in nats, head accuracies), each [K], over all processes.
        Only this process's part of a loss has a gradient."""
        group, heads = self.group, self.heads
        if teacher is None:  # no states are stored
            teacher = run_model(heads.model, ids, documents, self.dtype, self.autocast)
        with self.autocast:
            outputs = run_heads(heads, teacher, ids, documents)
        guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
        sums, hits = head_losses(heads, outputs, teacher, ids, guess_mask, self.args.objective,
                                 self.dtype)
        count = group.all_reduce(guess_mask.sum(dim=(1, 2)).float()).clamp(min=1)
        losses = sums / count
        total = group.all_reduce(losses.detach().clone())
        accuracies = group.all_reduce(hits) / count
        return total + (losses - losses.detach()), accuracies

    def save(self):
        """Writes the heads, then the state: if anything fails, the state before is intact."""
        self.check_finite(*self.heads.parameters())
        self.saved = time.monotonic()
        if self.group.rank:
            return
        a, heads = self.args, self.heads
        path = self.out / STATE_FILE
        training = dict(steps=self.step, tokens=self.step * a.batch_size * a.block_size,
                        **{name: getattr(a, name) for name in TRAINING},
                        **data_record(a.data, a.key))
        state = dict(identity=[model_hash(heads.model), a.key], step=self.step, log=self.log,
                     heads=heads.state_dict(), optimizer=self.optimizer.state_dict())
        flags = vars(a) | vars(heads.config)
        files = {"log.jsonl": "".join(json.dumps(line) + "\n" for line in self.log),
                 RUN_FILE: json.dumps({name: flags[name] for name in SAVED})}
        advice = "make room and --resume" if path.exists() else "make room and start it again"
        with common.saving(f"{self.out}: step {self.step} cannot be saved", advice):
            heads.save_pretrained(self.out, self.encoding.hash, torch.bfloat16, training=training)
            for name, text in files.items():
                atomic_write(self.out / name, lambda tmp: Path(tmp).write_text(text))
            common.save_file(path, state, advice)

    def check_finite(self, *tensors):
        finite = all(bool(x.isfinite().all()) for x in tensors)
        expect(finite, f"training has diverged at step {self.step}: a number is not finite; "
               f"{self.out} keeps what was saved; start again with a lower --lr")


def data_record(paths, key):
    """What heads.json says about --data; only names, since it may be published."""
    return dict(data=[Path(path).name for path in paths or ()] or STANDARD_LIBRARY, key=key)


def prepare(args, group):
    """All that can go wrong before the first step -> (Run, training Tokens)."""
    out = Path(args.out)
    keys = ("identity", "step", "heads", "optimizer", "log")
    state = common.load_file(out / STATE_FILE, keys) if args.resume else None
    template = load_chat_template(args.model)
    if args.data is None and template:
        args.data = [SELF]
    if args.data == [SELF]:
        args.data = [write_texts(args, group)]
    heads, encoding = new_heads(args)
    check_block_size(args, heads)
    base = model_hash(heads.model)
    home = out  # of tokens and states; several runs share those of texts that the model wrote
    if args.data and len(args.data) == 1 and writing.written_by(args.data[0]) == base:
        home = Path(args.data[0])

    def prepare_text():
        expect(args.batch_size % group.size == 0, f"the batch size is that of all {group.size} "
               f"processes together, but they do not divide {args.batch_size}; take a multiple")
        key = data.tokens_key(args.data, encoding, template)
        identity = [base, key]
        if state and state["identity"] != identity:
            raise InputError(f"{out} holds a run with another model or other data (hashes "
                             f"{state['identity']}, now {identity}): --resume needs the same")
        stored = data.store_tokens(home / data.FILE, key, args.data, encoding, template)
        for leftover in {*out.glob("*.tmp*"), *home.glob("*.tmp*")}:  # of a run that was killed
            leftover.unlink()
        for split in SPLITS:  # raises where there is too little text
            data.window_batch(stored[split], 1, args.window, 0, "cpu")
        return key
    args.key = group.on_first(prepare_text)
    run = Run(args, heads, encoding, group, home, state)
    corpus = data.open_tokens(home / data.FILE)["train"]
    rounded = f"-{args.quantize}" if args.quantize else ""  # which changes states, but not the hash
    file = home / f"states-{base}{rounded}.npy"
    if file.exists() or args.steps * args.batch_size * args.block_size >= 2 * len(corpus.ids):
        states = data.store_states(file, heads.model, corpus, group, run.autocast, run.dtype)
        corpus = corpus._replace(states=states)
    if not state:
        data.set_draft_vocabulary(heads, corpus.ids[corpus.loss_mask], args.draft_vocabulary,
                                  group.print)
    return run, corpus


def new_heads(args):
    """--model, and new heads on it -> (heads, encoding)."""
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model, encoding = load_model(args, packed=False, dtype=dtype)
    torch.manual_seed(args.seed)
    switches = {name: value for name, value in vars(args).items() if name in SWITCHES}
    return CloverHeads(preset(args.preset, **switches), model), encoding


def write_texts(args, group):
    """Lets the model write texts, in the dtype that it decodes in -> their folder."""
    model, encoding = load_model(args)
    folder = Path(args.out) / SELF
    goal = args.self_tokens or args.steps * args.batch_size * (args.block_size or 256) // 4
    writer = writing.Writer(folder, model, encoding, stop_tokens(args.model, encoding), args.seed,
                            group.print)
    group.on_first(writer.claim)
    group.print(f"the model writes {human(goal)} tokens for its heads to train on, in {folder}")
    writer.write(goal, group.rank, group.size)
    group.barrier()
    return str(folder.absolute())


def check_block_size(args, heads):
    """--block-size is by default 256, or what the context holds with a token for each head."""
    ahead = heads.config.n_draft + 1
    longest = heads.model.config.block_size - ahead
    args.block_size = args.block_size or min(256, longest)
    check("block size", args.block_size, 1, longest, whole=True)
    args.window = args.block_size + ahead


def finish(run):
    """Measures the trained heads, and prints how to use them; process 0 does so alone."""
    args, group = run.args, run.group
    args.batch_size //= group.size
    if args.dtype != "float32":
        args.dtype = None  # that of decoding
    seconds = max(SECONDS, (time.monotonic() - run.began) / 10)
    run.heads = run.optimizer = None  # frees the model
    group.close()
    if group.rank:
        return
    evaluate(args, tensor_parallel.Group(), seconds, run.home)
    chat = " --chat" if load_chat_template(args.model) else ""
    print(f"\nuse them:  python generate.py --model {args.model} --heads {run.out}{chat}")


def evaluate(args, group, seconds=SECONDS, home=None):
    """Measures the heads in --out, and adds that to their record. All processes hold the model.
    home: of the tokens, default as --data says."""
    model, encoding = load_model(args, group, packed=False)
    heads = CloverHeads.from_pretrained(args.out, model, encoding.hash)
    trained = heads.info.get("training", {}).get("quantize")
    expect(args.quantize == trained, f"{args.out}: heads are measured with the --quantize of their "
           f"training, here {trained or 'none'}; give the same")
    check_block_size(args, heads)
    heldout, measured_on = heldout_tokens(args, heads, encoding, home)
    results = measure(heads, heldout, args.batch_size, args.block_size, seconds, group.print)
    if group.rank == 0:
        record(heads, args.out, encoding.hash, results | dict(measured_on=measured_on))


def heldout_tokens(args, heads, encoding, home=None):
    """(Tokens of --data, else of the heads' training; what heads.json says about them)."""
    names = heads.info.get("training", {}).get("data")
    out = Path(args.out)
    if home or args.data is None:
        for home in [home] if home else (out, out / SELF):
            with contextlib.suppress(InputError):
                stored = data.open_tokens(home / data.FILE)
                return stored["heldout"], dict(data=names, key=stored["key"])
        expect(names == STANDARD_LIBRARY, f"{out}: the tokens that these heads were trained on "
               f"({names}) are not there any more; give these data, or others, with --data")
    tokens = data.load_tokens(args.data, encoding, "heldout", encoding.template)
    return tokens, data_record(args.data, data.tokens_key(args.data, encoding, encoding.template))


def main(args):
    group = tensor_parallel.start(args)
    if args.evaluate:
        return evaluate(args, group)
    run, corpus = prepare(args, group)
    parameters = sum(p.numel() for p in run.heads.parameters())
    group.print(f"{args.preset} heads: {human(parameters)} parameters; "
                f"{human(len(corpus.ids))} training tokens")
    if not run.step:
        run.save()  # so that --resume has something to continue from
    interrupted = run.train(corpus)
    run.save()  # before the evaluation, so that Ctrl-C there loses nothing
    if interrupted:
        group.print(f"\ninterrupted at step {run.step}; --resume goes on from here")
    else:
        finish(run)
    return interrupted
