"""Trains draft heads on a frozen model, towards the model's own next-token distribution.

    python train_heads.py                          # Clover heads for demo/, on the built-in corpus
    python train_heads.py --preset medusa --out out/medusa
    python train_heads.py --model DIR --data my_texts/ 'chats/*.jsonl.gz' --out out/heads
    torchrun --nproc-per-node 4 train_heads.py --model DIR --data my_texts/ --out out/heads
    python train_heads.py --evaluate --out DIR     # measures heads without training them

The text is tokenised once, into OUT/tokens. Products are in bfloat16 unless --dtype float32 is
given. A run is saved every few minutes, on Ctrl-C and on SIGTERM. --resume ends with the same heads
as a run that was never stopped: on a CPU bit for bit, on a GPU up to rounding.
"""

import contextlib
import gc
import time
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # a mistake in the flags is told before torch is loaded
    from training.flags import heads_parser
    heads_parser().parse_args()

import torch
from torch.nn.parallel import DistributedDataParallel

from backends import tensor_parallel
from clover import CloverHeads, model_hash
from hf import checkpoint
from hf.chat import load_chat_template, stop_tokens
from model import InputError, check, human
from tools.cli import command, load_model
from tools.flags import DEMO
from training import common, data
from training.common import (
    Log,
    Signals,
    path_flags,
    progress,
    save_run,
    set_learning_rate,
)
from training.corpus import corpus_name
from training.evaluate import head_accuracy, heldout_prompts, measure, plot, record, table
from training.flags import ON_POLICY_TOP, heads_parser
from training.loss import guess_masks, head_losses, state_losses, teacher_forced
from training.parallel import World, load_for_training
from training.self_distill import SelfDistillation, number_of_prompts

HEAD_WEIGHT = 0.7   # head i counts 0.7^i in the loss, since decoding reaches later heads less often
SHOW_EVERY = 20     # steps
SAVE_EVERY = 180.0  # seconds
STANDARD_LIBRARY = "the Python standard library's source"  # in heads.json, for no --data
STATE = ("settings", "flags", "step", "heads", "optimizer")  # what train_state.pt holds


class Run:
    """One training run: the heads, their optimiser, the step it is at."""

    def __init__(self, args, heads, tokenizer, world, state=None):
        self.args = args
        self.out = Path(args.out)
        self.tokenizer = tokenizer
        self.world = world
        self.heads = heads.to(heads.model.device)
        self.window = args.block_size + heads.config.n_draft + 1  # all heads have a token to guess
        self.step_tokens = args.batch_size * args.block_size
        self.step = 0
        self.saved = time.monotonic()
        self.optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0,
                                           fused=True)
        self.autocast = torch.autocast(heads.model.device.type, torch.bfloat16,
                                       enabled=args.dtype != "float32")
        if state:
            heads.set_vocabulary(state["heads"].pop("vocabulary", []))
            heads.load_state_dict(heads.state_dict() | state["heads"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        self.wrapped = heads
        if world.size > 1:
            self.wrapped = DistributedDataParallel(heads, forward_sync_buffers=False,
                                                   gradient_as_bucket_view=True)

    def train(self, corpus, distillation=None):
        """Trains to the last step -> 0, or until Ctrl-C or SIGTERM come -> the exit code."""
        a = self.args
        show = progress(self.step, a.steps, self.step_tokens)
        log = Log(self.out / "log.jsonl", self.step) if self.world.rank == 0 else None
        parts = [(corpus, a.batch_size)]
        with Signals() as signals:
            while self.step < a.steps and not self.interrupted(signals):
                if distillation:
                    parts = distillation.parts(self, corpus)
                loss, accuracies = self.train_step(*self.batch(parts))
                if self.step % SHOW_EVERY == 0 or self.step == a.steps:
                    self.check_finite(loss)
                    if log:
                        shown = " ".join(map("{:.3f}".format, accuracies.tolist()))
                        show(self.step, f"loss {loss:.3f}  accuracy {shown}")
                        lr = self.optimizer.param_groups[0]["lr"]
                        log.add(step=self.step, tokens=self.step * self.step_tokens,
                                loss=loss.item(), accuracy=accuracies.tolist(), lr=lr)
                if self.step < a.steps and time.monotonic() > self.saved + SAVE_EVERY:
                    self.save()
        return 0 if self.step == a.steps else signals.exit_code

    def batch(self, parts):
        """This process's part of the step's windows, from (Tokens, number of windows) pairs."""
        seed = data.step_seed(self.args.seed, self.step)
        mine = slice(self.world.rank, None, self.world.size)
        return data.window_batch(parts, self.window, seed, self.heads.model.device, mine)

    def train_step(self, ids, loss_mask, documents):
        """One optimiser step on a batch of windows -> (loss, head accuracies [K])."""
        losses, accuracies = self.losses(ids, loss_mask, documents)
        loss = sum(HEAD_WEIGHT ** i * head_loss for i, head_loss in enumerate(losses))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        set_learning_rate(self.optimizer, self.args.lr, self.step, self.args.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), accuracies

    def losses(self, ids, loss_mask, documents):
        """A batch of windows -> (losses in nats, head accuracies), each [K], over all processes.
        Only this process's part of a loss has a gradient, times their number: DDP divides by it."""
        a, model, world = self.args, self.heads.model, self.world
        top_n = ON_POLICY_TOP if self.step >= a.steps - a.on_policy_steps else 0
        with self.autocast:
            hidden, outputs = teacher_forced(self.heads, ids, documents, self.wrapped)
            guess_mask = guess_masks(ids, len(outputs), loss_mask, documents)
            sums, hits, reached = head_losses(model, outputs, hidden, ids, guess_mask, a.objective,
                                              top_n)
            if a.smooth_l1:
                sums = sums + a.smooth_l1 * state_losses(model, outputs, hidden, reached)
        count = lambda mask: world.sum(mask.sum(dim=(1, 2)).float()).clamp(min=1)
        losses = sums / count(reached)
        total = world.sum(losses.detach().clone())
        return total + world.size * (losses - losses.detach()), world.sum(hits) / count(guess_mask)

    def interrupted(self, signals):
        """Whether a signal came to any process; asking waits for all, so every tenth step."""
        return (self.world.size == 1 or self.step % 10 == 0) and self.world.any(signals.came)

    def save(self, **info):
        """Writes training state and heads, `info` in their record; what fails leaves the last."""
        self.check_finite(*self.heads.parameters())
        self.saved = time.monotonic()
        if self.world.rank:
            return
        a = self.args
        training = dict(steps=self.step, tokens=self.step * self.step_tokens, **flags(a),
                        **data_record(a.data, a.key))
        kept = dict(steps=a.steps, quantize=a.quantize, **path_flags(a))
        state = dict(settings=settings(a, self.heads), flags=kept,
                     step=self.step, heads=self.heads.state_dict(),
                     optimizer=self.optimizer.state_dict())
        save_run(self.out, state, partial(self.heads.save_pretrained, self.out, self.tokenizer,
                                          torch.bfloat16, training=training, **info))

    def check_finite(self, *tensors):
        if not all(bool(x.isfinite().all()) for x in tensors):
            raise InputError(f"training has diverged at step {self.step}: the loss or a weight is "
                             f"not a number; {self.out} keeps what was saved before: start anew "
                             "with a lower --lr")


def flags(args):
    """The flags that decide how heads are trained, and that a resumed run must repeat."""
    names = ("batch_size", "block_size", "lr", "seed", "objective", "smooth_l1", "on_policy_steps",
             "self_distill", "self_distill_ratio", "dtype")
    return {name: getattr(args, name) for name in names}


def data_record(paths, key):
    """What heads.json says about --data; names alone, as it may be published."""
    return dict(data=[Path(path).name for path in paths or ()] or STANDARD_LIBRARY, key=key)


def settings(args, heads):
    """All that a resumed run must share with the one that was started."""
    switches = {name: value for name, value in vars(args.config).items() if name != "vocabulary"}
    return dict(model=f"of hash {model_hash(heads.model)}", **switches, **flags(args),
                data=f"of hash {args.key}")


# --------------------------------------------------------------------------------------------------
# Before and after training

def prepare(args, world):
    """All that can go wrong before the first step -> (Run, {"train": Tokens, "heldout": Tokens},
    SelfDistillation or None). Process 0 tokenises; all map the files."""
    out = Path(args.out)
    template = load_chat_template(args.model)
    state = vars(args).pop("state")  # which is large: nothing may keep it
    if not state and args.draft_vocabulary is None:
        args.draft_vocabulary = "auto"
    heads, encoding = load_for_training(args, world)
    args.block_size = common.check_sizes(args, heads)

    def store():
        args.key = data.tokens_key(args.data, encoding, template)
        if state:
            common.check_resumed(out, args.steps, state, settings(args, heads))
        data.store_tokens(out / "tokens", args.data, encoding, template, world.print)
        for leftover in out.glob("*.*.tmp*"):  # of a run that was killed while it saved
            leftover.unlink()
    world.run_first(store)
    splits, meta = data.open_tokens(out / "tokens")
    args.key = meta["key"]
    args.self_distill = number_of_prompts(args, meta["kinds"])
    run = Run(args, heads, encoding.hash, world, state)
    data.check_length(splits, run.window, args.batch_size)
    heldout_prompts(splits["heldout"], heads.model)  # raises where there are none
    if args.draft_vocabulary is not None:
        heads.set_vocabulary(data.draft_vocabulary(splits["train"].ids, args.draft_vocabulary,
                                                   heads.model.config.vocab_size, world.print))
    distillation = None
    if args.self_distill:
        stop = stop_tokens(args.model, encoding)
        distillation = SelfDistillation(run, splits["train"], stop, meta["kinds"])
    return run, splits, distillation


def finish(run, heldout):
    """Measures the trained heads, and prints how to use them. Where the processes do not divide the
    heads of a model that was sharded for training, nothing is decoded."""
    args, world = run.args, run.world
    sizes = args.batch_size // world.size, args.block_size
    if args.shard_base and not world.divides(run.heads.model.config):
        top = head_accuracy(run.heads, heldout, *sizes, run.autocast)
        run.save(accuracy=top[1], top_accuracy=top, measured_on=data_record(args.data, args.key))
        world.print(f"{table(top)}\nthe rest, where it can be decoded: train_heads.py --evaluate")
        world.close()
    else:
        measure_run(run, heldout, sizes)
    if not world.rank:
        plot(run.out)
        flag = "" if args.model == str(DEMO) else f"--model {args.model} "
        prompt = '--prompt "def fibonacci(n):"'
        if load_chat_template(args.model):
            prompt = '--chat --prompt "What is a prime number?"'
        print(f"\nuse them:  python generate.py {flag}--heads {run.out} {prompt}")


def measure_run(run, heldout, sizes):
    """Measures a run's heads by decoding. Process 0 does so alone, but a model that was sharded for
    training is held together by all."""
    world, together = run.world, run.args.shard_base
    if together:
        tensor_parallel.watch_signals(world.rank)
        dtype = run.heads.model.dtype
        run.heads = run.wrapped = run.optimizer = None  # frees the sharded model
        world.barrier()  # process 0 has saved
        gc.collect()  # FSDP's parts refer to each other
        model = checkpoint.load(run.args.model, dtype, world.device, world.group,
                                run.args.quantize, packed=False)
    else:
        world.close()
        if world.rank:
            return
        model = run.heads.model
    heads = CloverHeads.from_pretrained(run.out, model, run.tokenizer)
    found = measure(heads, heldout, *sizes, world.print)
    if together:
        world.close()
    if not world.rank:
        found["measured_on"] = data_record(run.args.data, run.args.key)
        record(heads, run.out, run.tokenizer, found)


def evaluate_folder(args, world):
    """Measures the heads in --out, and adds that to their record. All processes hold the model."""
    if world.size > 1:
        tensor_parallel.watch_signals(world.rank)
    model, encoding = load_model(args, world.group, packed=False)
    tokenizer = encoding.hash
    template = load_chat_template(args.model)
    heads = CloverHeads.from_pretrained(args.out, model, tokenizer)
    if heads.info["base"]["weights"] != model.hash:  # whose record this would write anew
        raise InputError(f"{args.out}: these heads were trained on the model before it was "
                         "rounded; measure them without --quantize")
    block_size = common.check_sizes(args, heads)
    load_split, measured_on = evaluation_data(args, heads, encoding, template, world.print)
    heldout = load_split("heldout")
    chosen = args.draft_vocabulary is not None
    if chosen:
        ids = load_split("train").ids
        V = model.config.vocab_size
        heads.set_vocabulary(data.draft_vocabulary(ids, args.draft_vocabulary, V, world.print))
    found = measure(heads, heldout, args.batch_size, block_size, world.print)
    world.close()
    if not world.rank:
        record(heads, args.out, tokenizer, found | dict(measured_on=measured_on), weights=chosen)


def evaluation_data(args, heads, encoding, template, log):
    """What heads are measured on: --data, else what they were trained on -> (a function that gives
    a split's Tokens, what heads.json says about them). Raises InputError where the data of their
    training are not there any more."""
    training = heads.info.get("training", {})
    names, key = training.get("data"), training.get("key")
    if args.data is None:
        folder = Path(args.out) / "tokens"
        with contextlib.suppress(InputError):
            splits, meta = data.open_tokens(folder)
            if meta["key"] == key:
                return splits.get, dict(data=names, key=key)
        if names != STANDARD_LIBRARY:
            names = " ".join(names or ["data that heads.json does not name"])
            raise InputError(f"{args.out}: these heads were trained on {names}, of which {folder} "
                             "has no tokens any more; give them, or other data, with --data")
    found = data_record(args.data, data.tokens_key(args.data, encoding, template))
    if found["key"] != key:
        log(f"measuring on {corpus_name(args.data)}, which is not or no longer what the heads were "
            "trained on")
    return partial(data.load_tokens, args.data, encoding, template=template), found


# --------------------------------------------------------------------------------------------------
# Command line

def parse(argv):
    args = common.parse_run(heads_parser(), argv, STATE, lambda args: f"out/{args.preset}")
    args.config = common.head_config(args)
    check("on-policy steps", args.on_policy_steps, 0, args.steps, whole=True)
    return args


def main(argv=None):
    args = parse(argv)
    world = World(args)
    if args.evaluate:
        return evaluate_folder(args, world)
    run, splits, distillation = prepare(args, world)
    parameters = sum(p.numel() for p in run.heads.parameters())
    world.print(f"{args.preset} heads: {human(parameters)} parameters; "
                f"{human(len(splits['train'].ids))} training tokens")
    if not run.step:
        run.save()  # so that --resume has something to continue from
    interrupted = run.train(splits["train"], distillation)
    run.save()  # before the evaluation, so that Ctrl-C there loses nothing
    if interrupted:
        world.print(f"\ninterrupted at step {run.step}; --resume goes on from here")
        world.close()
    else:
        finish(run, splits["heldout"])
    return interrupted


if __name__ == "__main__":
    command(main)
