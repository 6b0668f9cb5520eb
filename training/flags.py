"""The flags of train_heads.py and training.base. Like tools.flags it loads nothing large."""

import argparse

from tools.flags import Parser, add_model_flags, add_number, add_quantize_flag

# names and limits of clover.py and of training/, which would load torch
PRESETS = ("medusa", "hydra", "clover", "clover2")
MIXERS = ("attention", "concat", "none")
PROJECTORS = ("res", "linear")
MAX_DRAFT = 32
MAX_AUGMENT = 64
ON_POLICY_TOP = 4   # guesses of a head that drafting goes on from, with --on-policy-steps
SELF_PROMPTS = 1024  # by default, where the data are conversations
MIN_VOCABULARY = 8  # ids to draft among: the acceptance table is measured with as many beams


def heads_parser():
    """train_heads.py's."""
    parser = Parser("Trains draft heads on a frozen model.", prog="train_heads.py")
    add_model_flags(parser)
    add_quantize_flag(parser)
    add_run_flags(parser, steps=500, batch_size=8, block_size=None, lr=6e-3)
    add_head_flags(parser)
    parser.add_argument("--out", help="default: out/ and the preset's name")
    parser.add_argument("--objective", choices=("distill", "data"), default="distill",
                        help="train towards the model's next-token distribution or the text")
    add_number(parser, "--smooth-l1", 0, 1e6, float, default=0.0, metavar="X",
               help="add X times the SmoothL1 distance between the heads' and the model's states")
    add_number(parser, "--on-policy-steps", 0, 10**9, default=0, metavar="N",
               help="in the last N steps, train a head only after tokens that drafting would try: "
                    f"each among the {ON_POLICY_TOP} likeliest of the head before")
    add_number(parser, "--self-distill", 0, 10**7, metavar="N",
               help="let the model continue N prompts from the data, and train on that too; "
                    f"default: {SELF_PROMPTS} where the data are mostly chats, else 0")
    add_number(parser, "--self-distill-ratio", 0, 1, float, default=0.5, metavar="X",
               help="the share of windows from the model's own text")
    parser.add_argument("--shard-base", action="store_true", help="with torchrun: each GPU keeps a "
                        "part of the frozen model (FSDP2); default: if it has to")
    parser.add_argument("--evaluate", action="store_true", help="only measure the heads in --out")
    return parser


def add_data_flag(parser):
    parser.add_argument("--data", nargs="+", metavar="PATH",
                        help="files of text or .jsonl, folders, patterns; default: Python's "
                             "standard library")


def add_run_flags(parser, steps, batch_size, block_size, lr):
    add_data_flag(parser)
    add_number(parser, "--steps", 1, 10**9, default=steps)
    add_number(parser, "--batch-size", 1, 10**9, default=batch_size, help="sequences per step")
    add_number(parser, "--block-size", 1, 10**9, default=block_size,
               help="tokens per sequence; default: 256, or the context")
    add_number(parser, "--lr", 0, 10, float, above=True, default=lr, help="peak learning rate")
    add_number(parser, "--seed", 0, 2**31, default=1)
    parser.add_argument("--resume", action="store_true",
                        help="continue the run in --out, with its flags")


def add_head_flags(parser):
    """Adds the flags that say which heads are trained, see `head_config`."""
    switch = lambda text: dict(default=argparse.SUPPRESS, help=f"{text}; default: the preset's")
    parser.add_argument("--preset", default="clover", choices=PRESETS)
    add_number(parser, "--draft-heads", 1, MAX_DRAFT, dest="n_draft", metavar="N",
               **switch("how many heads, K"))
    add_number(parser, "--augment-layers", 0, MAX_AUGMENT,
               **switch("transformer blocks before the heads"))
    parser.add_argument("--mix", choices=MIXERS,
                        **switch("how a head takes in the token guessed before it"))
    parser.add_argument("--mix-before", action=argparse.BooleanOptionalAction,
                        **switch("take in the root before the augmenting block too"))
    parser.add_argument("--projector", choices=PROJECTORS,
                        **switch("what comes before the LM head"))
    parser.add_argument("--shared", action=argparse.BooleanOptionalAction,
                        **switch("all heads but the first share their weights"))
    parser.add_argument("--draft-vocabulary", type=vocabulary_size, metavar="N|auto",
                        help="let the heads draft only among the N most frequent tokens of the "
                             "data; 0: all; auto: as many as cover 97%% of the data, or all where "
                             "that is half of them or more; default: auto, or with --resume or "
                             "--evaluate what the heads in --out have")


def vocabulary_size(text):
    """--draft-vocabulary -> "auto" or a number."""
    if text == "auto":
        return text
    if not text.isdecimal() or 0 < int(text) < MIN_VOCABULARY:
        raise argparse.ArgumentTypeError("expected auto, 0 for all token ids, or "
                                         f"{MIN_VOCABULARY} of them or more, not {text!r}")
    return int(text)
