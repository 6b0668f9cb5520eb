"""The flags of train_heads.py, parsed before torch is loaded."""

import argparse
import json
import os
import sys
from pathlib import Path

from tools.flags import Parser, add_model_flags, add_number, add_quantize_flag

# names and limits of clover.py, model.py and training/, which would load torch
PRESETS = ("medusa", "hydra", "clover", "clover2")
MIXERS = ("attention", "concat", "none")
PROJECTORS = ("res", "linear")
MAX_DRAFT = 32
MAX_AUGMENT = 64
MIN_VOCABULARY = 8   # ids to draft among: the acceptance table is measured with as many beams

STATE_FILE = "train_state.pt"  # in --out: weights, optimizer, step
RUN_FILE = "run.json"          # in --out: the flags that --resume takes over
SWITCHES = ("n_draft", "augment_layers", "mix", "mix_before", "projector", "shared")
SELF = "self"                  # of --data: texts that the model writes
TRAINING = ("batch_size", "block_size", "lr", "seed", "objective", "self_tokens", "dtype",
            "quantize")  # what heads.json says of the training
# a resumed run cannot change these
FIXED = ("preset", *SWITCHES, *TRAINING, "draft_vocabulary")
SAVED = (*FIXED, "steps", "model", "data")


def main(argv=None):
    """python train_heads.py"""
    args = parse_heads(argv)
    import train_heads  # loads torch
    from tools.errors import command
    with command():
        if code := train_heads.main(args):
            sys.exit(code)


def parse_heads(argv=None):
    """train_heads.py's flags. With --resume those that are not given are the saved run's."""
    parser = heads_parser()
    args = parser.parse_args(argv)
    out = args.out or f"out/{args.preset}"
    if args.resume and not args.evaluate:
        try:
            saved = json.loads((Path(out) / RUN_FILE).read_text())
            if set(saved) != set(SAVED):
                raise ValueError(f"{RUN_FILE} has other flags")
        except (OSError, TypeError, ValueError) as error:
            parser.error(f"{out}: --resume needs a run that this version saved there ({error})")
        args = parser.parse_args(argv, argparse.Namespace(**saved))  # sets only what argv gives
        flag = lambda name: name.replace("n_draft", "draft_heads").replace("_", "-")
        differ = "; ".join(f"{flag(name)} {saved[name]}, not {vars(args)[name]}" for name in FIXED
                           if vars(args)[name] != saved[name])
        if differ:
            parser.error(f"{out} holds a run with {differ}, which --resume cannot change")
    elif not args.evaluate and (Path(out) / STATE_FILE).exists():
        parser.error(f"{out} holds a run already; --resume goes on with it, or take another --out")
    if 0 < (args.draft_vocabulary or 0) < MIN_VOCABULARY:
        parser.error(f"--draft-vocabulary takes auto, 0 for all, or at least {MIN_VOCABULARY}")
    args.out = out
    args.model = os.path.abspath(args.model)  # for --resume from anywhere
    args.data = args.data and [path if path == SELF else os.path.abspath(path)
                               for path in args.data]
    return args


def heads_parser():
    parser = Parser("Trains draft heads on a frozen model.", prog="train_heads.py")
    add_model_flags(parser)
    add_quantize_flag(parser)
    data = ("self: what the model writes; default: self for a chat model, else Python's standard "
            "library")
    add_data_flag(parser, data)
    add_number(parser, "--steps", 1, 10**9, default=500)
    add_number(parser, "--batch-size", 1, 10**9, default=8, help="sequences per step")
    add_number(parser, "--block-size", 1, 10**9,
               help="tokens per sequence; default: 256, or what the context holds")
    add_number(parser, "--lr", 0, 10, float, above=True, default=6e-3, help="peak learning rate")
    add_number(parser, "--seed", 0, 2**31, default=1)
    parser.add_argument("--preset", default="clover", choices=PRESETS)
    switches = parser.add_argument_group("switches", "default: the preset's",
                                         argument_default=argparse.SUPPRESS)
    add_number(switches, "--draft-heads", 1, MAX_DRAFT, dest="n_draft", metavar="K")
    add_number(switches, "--augment-layers", 0, MAX_AUGMENT, help="blocks before the heads")
    switch = switches.add_argument
    on_off = argparse.BooleanOptionalAction
    switch("--mix", choices=MIXERS, help="how a head takes in the token guessed before it")
    switch("--mix-before", action=on_off, help="take in the root before the augmenting block too")
    switch("--projector", choices=PROJECTORS, help="what comes before the LM head")
    switch("--shared", action=on_off, help="all heads but the first share their weights")
    add_number(parser, "--draft-vocabulary", 0, 2**31, auto=True, metavar="N|auto",
               help="draft among the N most frequent tokens of the data; 0: all; default: auto, "
                    "what covers 97%% of the data, if under half")
    add = parser.add_argument
    add("--out", help="default: out/ and the preset's name")
    add("--resume", action="store_true", help="continue the run in --out")
    add("--objective", choices=("distill", "data"), default="distill",
        help="train towards the model's next-token distribution or the text")
    add_number(parser, "--self-tokens", 1, 10**12, metavar="N", help="tokens that the model writes "
               "for --data self; default: a quarter of those to train on")
    add("--evaluate", action="store_true", help="only measure the heads in --out")
    return parser


def add_data_flag(parser, default="default: Python's standard library"):
    parser.add_argument("--data", nargs="+", metavar="PATH", help="files of text or .jsonl, "
                        f"folders, patterns; {default}")
