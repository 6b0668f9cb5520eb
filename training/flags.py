"""The flags of train_heads.py and the config of a run. Does not load torch."""

import argparse
import os
from dataclasses import dataclass, field, fields

from tools.flags import DEMO, Parser, add_model_flags, at_least, home

absolute = lambda path: os.path.abspath(home(path))  # an argparse type
SELF = "self"  # --data self: text that the model generates
SWITCHES = ("n_draft", "augment_layers", "mix", "mix_before", "projector", "shared")
COUNT = dict(type=at_least(1), metavar="N")
ON_OFF = dict(action=argparse.BooleanOptionalAction)


def flag(default, help, **options):
    """A field with a flag of its name, and its options of `add_argument`."""
    return field(default=default, metadata=dict(help=help) | options)


@dataclass(frozen=True)
class RunConfig:
    """The flags of a training run. All but the device are saved with it; --resume rejects changes
    to those in FIXED. None: depends on the preset, the model or the data."""
    model: str = str(DEMO)
    data: list | None = None    # absolute paths, or SELF
    prompts: str | None = None  # absolute path
    init: str | None = None     # absolute path
    templates: list | None = flag(None, "draw half of the user messages from these templates; "
        "default: training/prompts.json, general; training/coding.json is for coding models",
        nargs="+", type=absolute, metavar="FILE")
    steps: int = flag(500, "default: 500", **COUNT)
    batch_size: int = flag(8, "sequences per step, of all processes; default: 8", **COUNT)
    block_size: int | None = flag(None, "tokens per sequence; default: 256, if the context allows",
                                  **COUNT)
    lr: float = flag(6e-3, "peak learning rate; default: 0.006", type=float, metavar="X")
    seed: int = flag(1, "default: 1", type=int, metavar="N")
    self_tokens: int | None = flag(None, "tokens that the model writes; default: steps x batch "
                                   "size x block size, for one pass", **COUNT)
    store_states: bool = flag(False, "compute the frozen model's hidden states of the text once, "
        "into a file of 2 C bytes per token: on a CPU further passes are faster",
        action="store_true")
    template_kwargs: dict = field(default_factory=dict)
    dtype: str | None = None
    quantize: str | None = None
    preset: str = flag("clover", "default: clover; docs/training.md lists presets and their "
                       "switches, the next six flags", metavar="NAME")
    n_draft: int | None = flag(None, "number of heads", type=int, metavar="K")
    augment_layers: int | None = flag(None, "augmenting blocks before the heads", type=int,
                                      metavar="N")
    mix: str | None = flag(None, "how a head reads the previously drafted token", metavar="NAME")
    mix_before: bool | None = flag(None, "mix in the newest token before the augmenting blocks",
                                   **ON_OFF)
    projector: str | None = flag(None, "layer before the LM head", metavar="NAME")
    shared: bool | None = flag(None, "all heads but the first share weights", **ON_OFF)
    draft_vocabulary: int | None = flag(None, "draft only the N most frequent tokens; 0: all; "
        "default: auto: those that cover 97%% of the text", type=at_least(0, auto=True),
        metavar="N|auto")
    device: str | None = None

    @property
    def tokens_per_step(self):
        return self.batch_size * self.block_size

    def values_of(self, names):
        return {name: getattr(self, name) for name in names}


STORED = [field.name for field in fields(RunConfig) if field.name != "device"]
FIXED = [name for name in STORED if name not in ("model", "data", "steps")]
TRAINING = STORED[STORED.index("batch_size"):STORED.index("preset")]  # recorded in heads.json


def flag_of(name):
    """The flag of a field of `RunConfig`."""
    return "--" + name.replace("n_draft", "draft_heads").replace("_", "-")


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
    source = run.add_mutually_exclusive_group()
    add_data_flag(source, "self: text that the model generates; default: self for a chat model, "
                          "else Python's standard library")
    source.add_argument("--prompts", type=absolute, metavar="FILE", help="train on the "
                        "model's answers to these: a prompt per line, or .jsonl objects with a "
                        '"prompt" or "messages"')
    for each in fields(RunConfig):
        if each.metadata:
            run.add_argument(flag_of(each.name), dest=each.name, **each.metadata)
    return parser.parse_args(argv, argparse.Namespace(device=None))


def add_data_flag(parser, default="default: Python's standard library"):
    path = lambda name: name if name == SELF else absolute(name)
    parser.add_argument("--data", nargs="+", type=path, metavar="PATH",
                        help=f"text, .jsonl or .json files, and folders; {default}")
