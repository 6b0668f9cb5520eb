"""The flags of train_heads.py and the config of a run. Does not load torch."""

import argparse
import os
from dataclasses import dataclass, field, fields

from tools.flags import DEMO, Parser, add_model_flags, add_quantize_flag, at_least, home

absolute = lambda path: os.path.abspath(home(path))  # an argparse type
SELF = "self"  # --data self: text that the model generates
SWITCHES = ("n_draft", "augment_layers", "mix", "mix_before", "projector", "shared")


@dataclass(frozen=True)
class RunConfig:
    """The flags of a training run. All but the device are saved with it; --resume rejects changes
    to those in FIXED. None: depends on the preset, the model or the data."""
    model: str = str(DEMO)
    data: list | None = None  # absolute paths, or SELF
    steps: int = 500
    batch_size: int = 8       # total over all processes
    block_size: int | None = None
    lr: float = 6e-3
    seed: int = 1
    self_tokens: int | None = None
    store_states: bool = False
    template_kwargs: dict = field(default_factory=dict)
    dtype: str | None = None
    quantize: str | None = None
    preset: str = "clover"
    n_draft: int | None = None
    augment_layers: int | None = None
    mix: str | None = None
    mix_before: bool | None = None
    projector: str | None = None
    shared: bool | None = None
    draft_vocabulary: int | None = None
    init: str | None = None   # absolute path
    prompts: str | None = None  # absolute path
    templates: list | None = None  # absolute paths
    device: str | None = None

    @property
    def tokens_per_step(self):
        return self.batch_size * self.block_size

    def select(self, names):
        return {name: getattr(self, name) for name in names}


STORED = [field.name for field in fields(RunConfig) if field.name != "device"]
FIXED = [name for name in STORED if name not in ("model", "data", "steps")]
TRAINING = FIXED[:FIXED.index("preset")]  # recorded in heads.json


def parse_heads(argv=None):
    """Parses train_heads.py's flags. A field of `RunConfig` is set only if its flag is given."""
    parser = Parser("Trains draft heads on a frozen model.", prog="train_heads.py")
    parser.add_argument("--out", type=home, metavar="DIR",
                        help="default: out/ and the preset's name")
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of("--resume", action="store_true", help="continue the run in --out")
    one_of("--init", type=absolute, metavar="DIR", default=argparse.SUPPRESS,
           help="start from these heads, with their preset, switches and draft vocabulary")
    parser.add_argument("--evaluate", action="store_true", help="only measure the heads in --out")
    run = parser.add_argument_group("run", "with --resume, defaults are those of the saved run",
                                    argument_default=argparse.SUPPRESS)
    add_model_flags(run, argparse.SUPPRESS)
    add_quantize_flag(run)
    source = run.add_mutually_exclusive_group()
    add_data_flag(source, "self: text that the model generates; default: self for a chat model, "
                          "else Python's standard library")
    source.add_argument("--prompts", type=absolute, metavar="FILE", help="train on the "
                        "model's answers to these: a prompt per line, or .jsonl objects with a "
                        '"prompt" or "messages"')
    add = run.add_argument
    count = dict(type=at_least(1), metavar="N")
    add("--templates", nargs="+", type=absolute, metavar="FILE", help="draw half of the user "
        "messages from these templates; default: training/prompts.json, general; "
        "training/coding.json is for coding models")
    add("--self-tokens", **count, help="tokens that the model writes; default: steps x batch size "
        "x block size, for one pass")
    add("--store-states", action="store_true", help="compute the frozen model's hidden states of "
        "the text once, into a file of 2 C bytes per token: on a CPU further passes are faster")
    add("--steps", **count, help=f"default: {RunConfig.steps}")
    add("--batch-size", **count, help=f"sequences per step; default: {RunConfig.batch_size}")
    add("--block-size", **count, help="tokens per sequence; default: 256, if the context allows")
    add("--lr", type=float, metavar="X", help=f"peak learning rate; default: {RunConfig.lr}")
    add("--seed", type=int, metavar="N", help=f"default: {RunConfig.seed}")
    add("--preset", metavar="NAME", help=f"default: {RunConfig.preset}; docs/training.md lists "
        "presets and their switches, the next six flags")
    add("--draft-heads", dest="n_draft", type=int, metavar="K")
    add("--augment-layers", type=int, metavar="N", help="augmenting blocks before the heads")
    add("--mix", metavar="NAME", help="how a head reads the previously drafted token")
    on_off = argparse.BooleanOptionalAction
    add("--mix-before", action=on_off, help="mix in the newest token before the augmenting blocks")
    add("--projector", metavar="NAME", help="layer before the LM head")
    add("--shared", action=on_off, help="all heads but the first share weights")
    add("--draft-vocabulary", type=at_least(0, auto=True), metavar="N|auto", help="draft only the "
        "N most frequent tokens; 0: all; default: auto: those that cover 97%% of the text")
    return parser.parse_args(argv, argparse.Namespace(device=None))


def add_data_flag(parser, default="default: Python's standard library"):
    path = lambda name: name if name == SELF else absolute(name)
    parser.add_argument("--data", nargs="+", type=path, metavar="PATH",
                        help=f"text, .jsonl or .json files, and folders; {default}")
