"""What python train_heads.py runs: prepare a run, train, evaluate."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from backends import tensor_parallel
from clover import CloverHeads, preset
from common.values import human
from hf.chat import load_chat_template, stop_tokens
from hf.heads import load_heads, read_record
from model import check, expect
from tools.prompts import read_prompt_file
from training import data, runs, writing
from training.evaluate import evaluate
from training.flags import SELF, SWITCHES, RunConfig, flag_of
from training.states import open_states, store_states

MIN_VOCABULARY = 8  # the smallest draft vocabulary: twice the default beam width
MIN_SELF_TOKENS = 30_000  # over a hundred texts, so that some are held out


def read_config(args, out, group):
    """The `RunConfig` from the flags and the preset. Raises InputError for bad values."""
    config = replace(runs.run_config(args, out), device=group.device)
    check("lr", config.lr, 1e-9, 10)
    check("seed", config.seed, 0, 2**31, whole=True)
    expect(config.draft_vocabulary in (None, 0) or config.draft_vocabulary >= MIN_VOCABULARY,
           f"draft vocabulary must be auto, 0 for all, or at least {MIN_VOCABULARY}")
    expect(not (config.templates and (config.prompts or config.data not in (None, [SELF]))),
           "--templates is for text that the model writes without --prompts or --data")
    expect(args.evaluate or config.batch_size % group.size == 0, f"a batch size of "
           f"{config.batch_size} cannot be split over {group.size} processes; use a multiple")
    if "init" in args:
        given = [flag_of(name) for name in ("preset", *SWITCHES, "draft_vocabulary")
                 if name in args]
        expect(not given, f"--init takes its heads as they are; leave out {', '.join(given)}")
        heads, _ = read_record(args.init)
    else:
        heads = preset(config.preset, **config.values_of(SWITCHES))
    return replace(config, **{name: getattr(heads, name) for name in ("preset", *SWITCHES)})


def prepare(config, out, group, resume):
    """Loads the model, data and saved state, and checks them -> (Run, training Tokens)."""
    keys = ("identity", "step", "heads", "optimizer", "log")
    state = runs.load_file(out / runs.STATE_FILE, keys) if resume else None
    writes = config.prompts or load_chat_template(config.model)
    if config.data == [SELF] or (config.data is None and writes):
        config = replace(config, data=[write_texts(config, out, group)])
    model, encoding = runs.load_frozen(config)
    torch.manual_seed(config.seed)
    if config.init and not state:
        heads = load_heads(config.init, model, encoding.hash, packed=False)
    else:
        heads = CloverHeads(preset(config.preset, **config.values_of(SWITCHES)), model)
    config = replace(config, block_size=runs.pick_block_size(config, heads))
    home = out  # the folder of the tokens; runs on the model's own text share them
    if config.data and len(config.data) == 1 and writing.written_by(config.data[0]) == model.hash:
        home = Path(config.data[0])

    def prepare_text():
        key = data.tokens_key(config.data, encoding)
        expect(not state or state["identity"] == [model.hash, key], f"{out} holds a run with "
               "another model or other data; --resume needs the same")
        stored = data.store_tokens(home / data.FILE, key, config.data, encoding,
                                   model.config.vocab_size)
        for leftover in {*out.glob("*.tmp*"), *home.glob("*.tmp*")}:  # from a killed run
            leftover.unlink()
        for split in data.SPLITS:  # raises if there is too little text
            data.window_batch(stored[split], 1, config.block_size, config.n_draft + 1, 0, 0)
        return key
    run = runs.Run(config, out, heads, encoding.hash, group.on_first(prepare_text), group, state)
    corpus = data.open_tokens(home / data.FILE)["train"]
    if config.store_states:
        group.on_first(lambda: store_states(home, model, corpus, group.print))
        corpus = corpus._replace(states=open_states(home, model, len(corpus.ids)))
    if not state and not config.init:
        data.set_draft_vocabulary(heads, corpus.ids[corpus.loss_mask], config.draft_vocabulary,
                                  group.print)
    return run, corpus


def write_texts(config, out, group):
    """Generates text with the model, or its answers to --prompts, and returns their folder."""
    model, encoding = runs.load_frozen(config)
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
    writer = writing.Writer(folder, model, encoding, stop, config.seed, prompts,
                            config.templates or [writing.TEMPLATES], group.print)
    for prompt in prompts or ():
        if prompt.grammar:  # a bad one fails here, not hours later
            writer.grammar_tokenizer.compile(*prompt.grammar)
    group.on_first(writer.claim)
    writer.write(goal, group.rank, group.size)
    group.barrier()
    return str(folder.absolute())


def train(config, out, group, resume):
    """Trains heads -> (the `RunConfig` with all defaults resolved, the exit code)."""
    run, corpus = prepare(config, out, group, resume)
    config = run.config
    parameters = sum(p.numel() for p in run.heads.parameters())
    group.print(f"{config.preset} heads: {human(parameters)} parameters; "
                f"{human(len(corpus.ids))} training tokens")
    if not run.step:
        run.save()  # so that --resume has a state to start from
    windows = partial(data.window_batch, corpus, config.batch_size, config.block_size,
                      config.n_draft + 1, config.seed, device=run.heads.model.device,
                      mine=slice(group.rank, None, group.size))
    code = run.train(windows)
    run.save()  # before the evaluation, so that Ctrl-C there loses nothing
    if code:
        group.print(f"\ninterrupted at step {run.step}; --resume continues from here")
    return config, code


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
