"""What the command lines share, and generate.py's own."""

import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from clover import CloverHeads
from generate import STAGES, Interrupted, check_prompts, prepare
from hf.chat import load_chat_template, stop_tokens
from hf.checkpoint import FAMILIES, read_config, weight_files
from hf.tokenizer import TextStream, encode_prompt, load_encoding, tokenizer_hash
from model import GPT, InputError
from tools.compare import first_difference
from tools.tune import stage_times

DEMO = Path(__file__).parent.parent / "demo"
ROOM = 1024  # tokens that a conversation's caches have to spare; one that outgrows them is computed anew
HEAD_COLOURS = (32, 36, 34, 35, 33, 31)  # ANSI; a head beyond the last takes the last


# ---------------------------------------------------------------------------------------------------------------------
# Command line

class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, defaults in the help and no abbreviated flags."""

    def __init__(self, description=None, **options):
        options |= dict(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(description=description, **options)

    def error(self, message):
        raise InputError(f"{message} (--help lists the flags)")


def command(main):
    """Runs a command line: bad input is one line on standard error and exit code 2, without a traceback. SIGTERM is as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    try:
        main()
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_model_flags(parser):
    parser.add_argument("--model", default=str(DEMO), help="a Hugging Face checkpoint folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on CUDA, float32 elsewhere")


def pick_device(name):
    """A torch.device that exists here, or InputError."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # not on "meta", which computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {name!r} is not available here ({str(error).splitlines()[0]}); try --device cpu") from None
    return device


def load_model(args):
    """--model, --device, --dtype -> (GPT, its tiktoken.Encoding)."""
    device, dtype = pick_device(args.device), getattr(torch, args.dtype) if args.dtype else None
    embeddings, encoding = read_config(args.model).vocab_size, load_encoding(args.model)  # what is quick comes first
    if encoding.max_token_value >= embeddings:
        raise InputError(f"{args.model}: the tokenizer has ids up to {encoding.max_token_value}, the model only {embeddings} "
                         "embeddings; they do not belong together")
    return GPT.from_pretrained(args.model, dtype=dtype, device=device), encoding


def load_heads(path, args, model, encoding):
    """A heads folder, or the model folder's own `clover`; None for 'none' or where a model has no heads beside it."""
    path = path or (Path(args.model) / "clover" if (Path(args.model) / "clover").is_dir() else "none")
    return None if str(path) == "none" else CloverHeads.from_pretrained(path, model, tokenizer_hash(encoding))


class Cut:
    """Passes text on up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, strings):
        self.strings, self.held, self.ended = strings, "", False

    def feed(self, text):
        if self.ended:
            return ""
        self.held += text
        found = [place for string in self.strings if (place := self.held.find(string)) >= 0]
        self.ended = bool(found)
        beginnings = (n for string in self.strings for n in range(1, len(string)) if self.held.endswith(string[:n]))
        end = min(found) if found else len(self.held) - max(beginnings, default=0)
        text, self.held = self.held[:end], "" if found else self.held[end:]
        return text

    def finish(self):
        text, self.held = self.held, ""
        return text


def decode_text(encoding, tokens, stop=()):
    """Text of token ids without the stop token or string that ended it; ids that the tokenizer does not have (a padded
    vocabulary has such) give U+FFFD."""
    stream, cut = TextStream(encoding), Cut([s for s in stop if isinstance(s, str)])
    text = cut.feed(stream.feed([token for token in tokens if token not in stop]) + stream.finish())
    return text + cut.finish()


class Printer:
    """Prints text as it is accepted; on a terminal, each guessed token in the colour of the head that guessed it."""

    def __init__(self, encoding, stop):
        self.stream, self.stop, self.cut = TextStream(encoding), stop, Cut([s for s in stop if isinstance(s, str)])
        self.colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def show(self, tokens):
        for i, token in enumerate(tokens):
            text = self.cut.feed(self.stream.feed([token])) if token not in self.stop else ""
            if self.colours and i < len(tokens) - 1 and text:  # the last token of a step is the model's own
                text = f"\x1b[{HEAD_COLOURS[min(i, len(HEAD_COLOURS) - 1)]}m{text}\x1b[0m"
            print(text, end="", flush=True)

    def finish(self):
        print(self.cut.feed(self.stream.finish()) + self.cut.finish(), flush=True)


def statistics(output):
    """The lines that end a run."""
    shares = "  ".join(f"{n}: {output.accepted[n] / max(output.steps, 1):.0%}" for n in sorted(output.accepted))
    return (f"tree size {output.tree_size}; tokens per step by share of steps: {shares}\n"
            f"{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} tokens per second")


def report(output, encoding, prompts, stop):
    """The --json object of one run."""
    return dict(prompts=prompts, tokens=output.tokens, ended=output.ended,
                texts=[decode_text(encoding, tokens, stop) for tokens in output.tokens],
                tree_size=output.tree_size, beams=output.beams, batch_size=output.batch_size,
                steps=output.steps, seconds=output.seconds, tokens_per_step=output.tokens_per_step,
                tokens_per_second=output.tokens_per_second, accepted=dict(sorted(output.accepted.items())))


def explain(engine, model, heads, fit, graph):
    """The lines of --explain: what the tree was chosen from, and where the time of a step goes."""
    lines = [f"tree size {engine.tree_size}, {engine.beams} beams, batch size {engine.batch_size}, on {model.device}"]
    if fit and fit.table:
        lines += ["", "tree size   ms per step   tokens per step (expected)   tokens per second and sequence"]
        lines += [f"{size:>9}{seconds * 1e3:>14.2f}{tokens:>20.2f}{tokens / seconds:>26.0f}"
                  + ("   <- chosen" if size == fit.tree_size else "") for size, seconds, tokens in fit.table]
    elif fit:
        lines.append(f"these heads carry no acceptance table, hence a tree of {fit.tree_size} unmeasured; "
                     "train_heads.py --evaluate makes one")
    lines += ["", "ms per stage" + "".join(f"{stage:>10}" for stage in STAGES)]
    for tree_size in sorted({1, engine.tree_size}):
        times = stage_times(model, heads, engine.batch_size, tree_size, engine.sampling, engine.beams if tree_size > 1 else None, graph)
        lines.append(f"tree of {tree_size:<4}" + "".join(f"{times[stage] * 1e3:>10.2f}" for stage in STAGES))
    return "\n".join(lines)


def read_prompts(texts):
    """--prompt flags -> texts; '-' is standard input."""
    prompts = []
    for text in texts:
        if text == "-":
            try:
                text = sys.stdin.buffer.read().decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from None
        if not text:
            raise InputError("a prompt is empty; give it at least one character")
        prompts.append(text)
    return prompts


def tree_size_flag(text):
    return None if text == "auto" else int(text)


def parse(argv):
    parser = Parser("Continues prompts with a model's own text, faster by draft heads that guess ahead.")
    parser.add_argument("--prompt", action="append",
                        help="text to continue; repeatable; - reads standard input; without any, each line typed is one")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message to a chat model, by the folder's template; "
                        "without a prompt: a conversation")
    parser.add_argument("--system", help="what a chat model is told first")
    add_model_flags(parser)
    parser.add_argument("--heads", help="a folder of draft heads, or none; default: the model folder's clover, if it has one")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0, help="least probability of a token, as a share of the likeliest's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the output; repeatable")
    parser.add_argument("--tree-size", type=tree_size_flag, default="auto", metavar="N|auto",
                        help="nodes per step, root included; 1 is plain decoding; auto measures what is quickest here")
    parser.add_argument("--beams", type=int, help="paths kept while drafting; default: about the square root of the tree size")
    parser.add_argument("--batch-size", type=int, help="prompts decoded together; default: up to 8, as memory allows")
    parser.add_argument("--no-graph", action="store_true", help="on CUDA, run each step eagerly, not from a CUDA graph")
    parser.add_argument("--explain", action="store_true", help="measure the step anew, and say why this tree and where time goes")
    parser.add_argument("--compare", action="store_true", help="also decode plainly and compare speed and text")
    parser.add_argument("--json", action="store_true", help="print one json object instead of text")
    args = parser.parse_args(argv)
    if "" in args.stop:
        parser.error("--stop needs a text that is not empty")
    if args.system is not None and not args.chat:
        parser.error("--system is for chat models; give --chat with it")
    if not args.prompt:
        for flag in ("compare", "json", "explain"):
            if getattr(args, flag):
                parser.error(f"--{flag} needs a --prompt")
    return args


def warm(engine, prompts, max_new_tokens):
    """Runs a few steps, so that what follows is timed with everything loaded and compiled."""
    engine.generate(prompts[:1], min(4, max_new_tokens))
    return engine


def main(argv=None):
    args = parse(argv)
    texts = read_prompts(args.prompt or [])
    template = load_chat_template(args.model) if args.chat else None
    if args.chat and not template:
        raise InputError(f"{args.model}: has no chat template; leave out --chat, or take a model that was trained to chat")
    model, encoding = load_model(args)
    job = Job(args, model, encoding, load_heads(args.heads, args, model, encoding), template,
              [*stop_tokens(args.model, encoding), *args.stop],
              dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed))
    if texts:
        run(job, texts)
    else:
        converse(job)


class Job(NamedTuple):
    """What the command line has been asked for, loaded."""
    args: argparse.Namespace
    model: GPT
    encoding: object
    heads: CloverHeads | None
    template: object  # of chat prompts, or None
    stop: list        # token ids and texts
    sampling: dict

    def prepare(self, prompts, max_new_tokens, **options):
        a = self.args
        options = dict(heads=self.heads, tree_size=a.tree_size, beams=a.beams) | options
        options |= dict(batch_size=a.batch_size, graph=not a.no_graph)
        return prepare(self.model, prompts, max_new_tokens, **options, **self.sampling)

    def encode(self, messages):
        """Token ids of a conversation, or without a template of its last message."""
        if self.template:
            return self.encoding.encode(self.template.render(messages), allowed_special="all")
        return encode_prompt(self.encoding, messages[-1]["content"])

    def roomy(self, prompt):
        """An engine for a prompt and, where memory has room, for the turns after it."""
        try:
            return self.prepare([prompt], self.args.max_new_tokens + ROOM)
        except InputError:
            return self.prepare([prompt], self.args.max_new_tokens)

    def system(self):
        return [] if self.args.system is None else [dict(role="system", content=self.args.system)]


def run(job, texts):
    """Decodes the prompts and prints what came out, with statistics."""
    args, model, encoding, stop = job.args, job.model, job.encoding, job.stop
    prompts = [job.encode([*job.system(), dict(role="user", content=text)]) for text in texts]
    shown = ["" if job.template else text for text in texts]
    decode = lambda engine, on_tokens=None: engine.generate(prompts, args.max_new_tokens, stop, on_tokens, encoding)
    printer = Printer(encoding, stop) if len(prompts) == 1 and not args.json else None
    plain = explained = None
    engine = job.prepare(prompts, args.max_new_tokens, fresh=args.explain)
    if args.compare:
        warm(engine, prompts, args.max_new_tokens)
    if printer:
        print(shown[0], end="", flush=True)
    try:
        output = decode(engine, (lambda index, tokens: printer.show(tokens)) if printer else None)
    except Interrupted as interrupt:
        output, args.compare, args.explain = interrupt.output, False, False
    if args.explain:
        explained = explain(engine, model, job.heads, engine.fit, not args.no_graph)
    if printer:
        printer.finish()
    elif not args.json:
        for text, tokens in zip(shown, output.tokens):
            print(f"{text}{decode_text(encoding, tokens, stop)}\n{'-' * 40}")
    if not args.json:
        print(f"\n{statistics(output)}")
        if explained:
            print(f"\n{explained}")
    if args.compare:
        try:
            engine = None  # its memory is the next one's
            plain = decode(warm(job.prepare(prompts, args.max_new_tokens, heads=None, tree_size=1), prompts, args.max_new_tokens))
        except KeyboardInterrupt:
            print("interrupted: no comparison", file=sys.stderr)
    difference = first_difference(model, prompts, output.tokens, plain.tokens, **job.sampling) if plain else None
    if args.json:
        result = report(output, encoding, texts, stop)
        result |= dict(plain=report(plain, encoding, texts, stop), difference=difference) if plain else {}
        print(json.dumps(result | (dict(explained=explained.splitlines()) if explained else {})))
    elif plain:
        print(compare_lines(output, plain, difference))


def converse(job):
    """Reads a line, prints the model's text, and so on until the input ends: with a chat template the turns of a conversation,
    else each line a prompt by itself. What the turns have in common is computed once: the engine keeps its cache."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  lines can be edited
        print("/clear starts anew; Ctrl-C ends a reply, Ctrl-D the program", file=sys.stderr)
    messages, engine = job.system(), None
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from None
        if line.strip() == "/clear":
            messages = job.system()
        elif line.strip():
            turn = [*messages, dict(role="user", content=line)]
            try:
                prompt = job.encode(turn)
                check_prompts(job.model, [prompt])
            except InputError as error:  # such as a conversation that is too long
                print(f"{error}{'; /clear starts anew' if messages != job.system() else ''}", file=sys.stderr)
                continue
            if engine is None or min(len(prompt) + job.args.max_new_tokens, job.model.config.block_size) > engine.rows:
                engine = None  # its memory is the next one's
                engine = job.roomy(prompt)
            text, output = reply(job, engine, prompt)
            print(f"[{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} tokens per second]", file=sys.stderr)
            if job.template:
                messages = [*turn, dict(role="assistant", content=text)]


def reply(job, engine, prompt):
    """Prints what follows a prompt, as it comes -> (text, Output)."""
    printer = Printer(job.encoding, job.stop)
    try:
        output = engine.generate([prompt], job.args.max_new_tokens, job.stop, lambda index, tokens: printer.show(tokens),
                                 job.encoding, keep=True)
    except Interrupted as interrupt:
        output = interrupt.output
    printer.finish()
    return decode_text(job.encoding, output.tokens[0], job.stop), output


def compare_lines(output, plain, difference):
    """What --compare says."""
    speed_up = output.tokens_per_second / plain.tokens_per_second
    speed = f"plain decoding: {plain.tokens_per_second:.1f} tokens per second; speed-up {speed_up:.2f}x"
    if difference is None:
        return f"{speed}\nthe text is identical, all {plain.emitted} tokens"
    prompt, place, gap, kind = difference
    apart = "one of them ends there" if gap is None else f"the two scores are {gap:.2g} apart"
    return f"{speed}\nthe text differs first at new token {place} of prompt {prompt}: a {kind}, {apart}"


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def describe(path):
    """What a checkpoint folder holds, as lines of text; reads no weights. Raises InputError for what it cannot be."""
    c, files = read_config(path), weight_files(path)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(c).parameters())
    per_token = 2 * c.n_layer * c.n_kv_head * c.head_size
    size = lambda numbers, dtype: f"{numbers * dtype.itemsize / 1e9:.2f} GB in {str(dtype).removeprefix('torch.')}"
    scaling = f", {c.rope_scaling['rope_type']}" if c.rope_scaling else ""
    shards = f"{len(files)} files" if len(files) > 1 else files[0].name
    return "\n".join((
        f"family        {c.family} ({FAMILIES[c.family].architecture})",
        f"layers        {c.n_layer}, hidden size {c.n_embd}, MLP {c.n_inner}{' gated' if c.gated else ''}",
        f"heads         {c.n_head}, key/value heads {c.n_kv_head}, head size {c.head_size}",
        f"vocabulary    {c.vocab_size}, LM head {'tied to the embeddings' if c.tied else 'of its own'}",
        f"context       {c.block_size} tokens, positions by {c.positions}{scaling}",
        f"parameters    {parameters / 1e6:.1f} million: {size(parameters, torch.float32)}, {size(parameters, torch.bfloat16)}",
        f"weights       {shards}, {sum(f.stat().st_size for f in files) / 1e9:.2f} GB",
        f"KV cache      {per_token * 4 / 1024:.1f} KiB per token in float32, {per_token * 2 / 1024:.1f} KiB in bfloat16"))


def describe_command():
    """python model.py FOLDER"""
    def run():
        parser = Parser("What a Hugging Face checkpoint folder holds.")
        parser.add_argument("folder")
        print(describe(parser.parse_args().folder))
    command(run)
