"""The decoding loop, and the command line over it.

    python generate.py --prompt "def fibonacci(n):"
    python generate.py --prompt "import os" --temperature 0.8 --top-p 0.9 --compare

One step: draft a tree, verify it in one forward pass, choose the model's own token at every node, accept the path that
agrees, commit it. Plain decoding is the same step with a tree of one node.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from clover import MAX_TREE, CloverHeads, root_tree
from data import TextStream, end_of_text, load_encoding, tokenizer_hash
from kernels import commit_path, gumbel, gumbel_argmax, project_sample
from model import GPT, InputError

DEMO = Path(__file__).parent / "demo"
TREE_SIZE = 17
BATCH_SIZE = 8
# what two orders of summing may differ by, in units of the dtype's eps times the largest logit
ROUNDINGS = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}
HEAD_COLOURS = (32, 36, 34, 35, 33, 31)  # ANSI; a head beyond the last takes the last


# ---------------------------------------------------------------------------------------------------------------------
# Choosing and accepting

@dataclass
class Sampling:
    """How the model's own next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check("temperature", self.temperature, 0, 1e4)
        check("top-k", self.top_k, 0, 2**31, whole=True)
        check("top-p", self.top_p, 0, 1, above=True)
        check("seed", self.seed, -2**63, 2**63 - 1, whole=True)

    @property
    def filtered(self):
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def check(name, value, low, high, whole=False, above=False):
    """Refuses a number that is not in low..high (not low itself with `above`), nan included."""
    kind = int if whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high or (above and value == low):
        raise InputError(f"{name} must be {'a whole number' if whole else 'a number'} "
                         f"{'above' if above else 'from'} {low} to {high}, not {value!r}")


def keep_likely(logits, top_k, top_p):
    """logits [M, V] with the tokens outside the top_k and then outside the nucleus of mass top_p (arXiv 1904.09751) at
    -inf. The most likely token always stays; tokens that tie with the last one kept stay too."""
    ranked = logits.sort(dim=-1, descending=True).values
    if 0 < top_k < logits.shape[-1]:
        ranked[:, top_k:] = -math.inf
    probs = ranked.softmax(dim=-1)
    kept = (probs.cumsum(dim=-1) - probs < top_p) & (ranked > -math.inf)  # the mass before a token is under top_p
    last = ranked.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    return logits.masked_fill(logits < last, -math.inf)


def choose(model, hidden, sampling, sequence, positions):
    """The model's own next token [B, T] at every node: hidden [B, T, C], sequence [B], positions [B, T] of the nodes."""
    (B, T, C), s = hidden.shape, sampling
    rows = model.norm(hidden).view(B * T, C)
    place = sequence[:, None].expand(B, T).reshape(-1), (positions + 1).reshape(-1)
    if not s.filtered:
        return project_sample(rows, model.head.weight, s.temperature, s.seed, *place).view(B, T)
    logits = keep_likely(model.head(rows).float() / s.temperature, s.top_k, s.top_p)
    return gumbel_argmax(logits, 1.0, s.seed, *place).view(B, T)


def accept(tree, chosen, longest):
    """Walks from the root: a node is accepted when it is its parent's chosen token and its parent is accepted.

    tree of [B, T], chosen int64 [B, T] -> path int64 [B, longest] (accepted nodes, root first, then zeros), count int32 [B].
    """
    B, T = chosen.shape
    bits = torch.ones_like(chosen) << torch.arange(T, device=chosen.device)
    wrong = (tree.tokens != chosen.gather(1, tree.parents)) & (tree.depths > 0)
    refused = (bits * wrong).sum(dim=1, keepdim=True)  # the set of refused nodes, one bit each
    accepted = (tree.ancestors != 0) & (tree.ancestors & refused == 0)
    place = torch.where(accepted, tree.depths, longest)  # everything else lands in a spare column
    nodes = torch.arange(T, device=chosen.device).expand(B, T)
    path = torch.zeros(B, longest + 1, dtype=torch.int64, device=chosen.device).scatter_(1, place, nodes)
    return path[:, :longest], accepted.sum(dim=1).to(torch.int32)


# ---------------------------------------------------------------------------------------------------------------------
# The loop

class Slots:
    """B sequences decoded together, each a slot with its part of the caches. All tensors keep their shapes."""

    def __init__(self, model, heads, batch, rows, tree_size, beams, sampling):
        device = model.device
        self.model, self.sampling, self.tree_size, self.beams = model, sampling, tree_size, beams
        self.heads = heads if tree_size > 1 else None
        self.longest = 1 + (min(heads.config.heads, tree_size - 1) if self.heads else 0)  # nodes of a path
        self.cache = model.new_cache(batch, rows + tree_size)
        self.root = torch.zeros(batch, dtype=torch.int64, device=device)
        self.sequence = torch.zeros(batch, dtype=torch.int64, device=device)
        self.active = torch.zeros(batch, dtype=torch.int32, device=device)
        if self.heads:
            self.heads_cache = heads.new_cache(batch, rows + self.longest)
            self.state = torch.zeros(batch, model.config.n_embd, dtype=model.dtype, device=device)
            steps = torch.arange(self.longest, device=device)
            self.chain = ((2 << steps) - 1).expand(batch, -1)  # ancestors of a plain sequence of nodes

    def fill(self, slot, prompt, sequence):
        """Takes a prompt in. Its last token becomes the root, so that each step after this one emits what it accepts."""
        tokens = torch.tensor([prompt], device=self.model.device)
        cache = self.cache.slot(slot)
        cache.lengths.zero_()
        self.root[slot], self.sequence[slot], self.active[slot] = tokens[0, -1], sequence, 1
        if self.heads:
            self.state[slot] = 0
            self.heads_cache.lengths[slot] = 0
        if len(prompt) == 1:
            return
        for hidden, start in self.model.prefill(tokens[:, :-1], cache):
            if self.heads:
                end = start + hidden.shape[1]
                positions = torch.arange(start, end, device=tokens.device)[None]
                states = self.heads.augment(hidden, tokens[:, start + 1:end + 1], positions, self.heads_cache.slot(slot))
                self.state[slot] = states[0, -1]
                self.heads_cache.lengths[slot] = end

    def release(self, slot):
        """An idle slot goes on computing, since shapes are fixed: on an empty sequence, and nobody listens."""
        self.active[slot] = 0
        self.cache.lengths[slot] = 0
        if self.heads:
            self.heads_cache.lengths[slot] = 0

    def step(self):
        """One step for every slot -> emitted tokens int64 [B, K + 1] and how many of each row count, int32 [B]."""
        lengths = self.cache.lengths
        tree = self.heads.draft(self.state, self.root, self.tree_size, self.beams) if self.heads else root_tree(self.root)
        # nodes past the context's end are never emitted, but a learned position must exist for them
        positions = (lengths[:, None] + tree.depths).clamp(max=self.model.config.block_size - 1)
        hidden = self.model(tree.tokens, positions, self.cache, tree.ancestors)  # (B, T, C)
        chosen = choose(self.model, hidden, self.sampling, self.sequence, lengths[:, None] + tree.depths)
        path, count = accept(tree, chosen, self.longest)
        count = count * self.active
        commit_path(self.cache.kv, lengths, path, count)
        emitted = chosen.gather(1, path)  # the token after each accepted node: the accepted ones, then the bonus token
        last = (count - 1).clamp(min=0).long()[:, None]
        if self.heads:
            self.extend(hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[2])), emitted, last)
            self.heads_cache.lengths += count
        self.root.copy_(torch.where(self.active > 0, emitted.gather(1, last)[:, 0], self.root))
        self.cache.lengths += count
        return emitted, count

    def extend(self, hidden, tokens, last):
        """Takes the accepted nodes' hidden [B, K + 1, C] and the tokens after them into the heads' own cache."""
        steps = torch.arange(self.longest, device=hidden.device)
        positions = self.heads_cache.lengths[:, None] + steps
        states = self.heads.augment(hidden, tokens, positions, self.heads_cache, self.chain)
        self.state.copy_(states.gather(1, last[:, :, None].expand(-1, 1, states.shape[2]))[:, 0])


@dataclass
class Output:
    """What `generate` returns. tokens: the new tokens of each prompt, in the order of the prompts."""
    tokens: list
    steps: int = 0                                   # verify steps, counted per sequence
    seconds: float = 0.0                             # wall time, prefill included
    accepted: Counter = field(default_factory=Counter)  # tokens a step emitted (its path length) -> how many steps did

    @property
    def emitted(self):
        return sum(map(len, self.tokens))

    @property
    def tokens_per_step(self):
        return self.emitted / max(self.steps, 1)

    @property
    def tokens_per_second(self):
        return self.emitted / max(self.seconds, 1e-9)

    def take(self, index, tokens, limit, stop):
        """Appends one step's tokens up to the limit or the first stop token -> (tokens taken, whether it is done)."""
        tokens = tokens[:limit - len(self.tokens[index])]
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop), None)
        taken = tokens[:end]
        self.tokens[index] += taken
        self.steps += 1
        self.accepted[len(taken)] += 1
        return taken, end is not None or len(self.tokens[index]) >= limit


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`; `output` holds what there was."""

    def __init__(self, output):
        super().__init__()
        self.output = output


def check_prompts(model, prompts):
    c = model.config
    if not prompts:
        raise InputError("no prompt was given; give at least one")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {i} is empty; it needs at least one token")
        if len(prompt) >= c.block_size:
            raise InputError(f"prompt {i} has {len(prompt)} tokens; the model's context of {c.block_size} leaves room for "
                             f"at most {c.block_size - 1} and one new token: shorten the prompt")
        if min(prompt) < 0 or max(prompt) >= c.vocab_size:
            raise InputError(f"prompt {i} has token ids outside 0..{c.vocab_size - 1}; is this the model's own tokenizer?")


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, heads=None, *, temperature=0.0, top_k=0, top_p=1.0, seed=0,
             tree_size=None, beams=None, stop=(), batch_size=None, on_tokens=None):
    """Continues prompts (lists of token ids) with the model's own tokens: the same ones with any heads, tree or batch.

    tree_size: nodes T verified per step, root included (1 is plain decoding; default 17 with heads); beams: W, default
    about the square root of T. stop: token ids that end a sequence, themselves kept. batch_size: sequences decoded
    together, default up to 8; a finished one makes room for the next prompt. on_tokens(index, tokens) is called with the
    tokens of each step. Returns `Output`. Raises InputError for what cannot be decoded, Interrupted on Ctrl-C.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    tree_size = TREE_SIZE if tree_size is None else tree_size
    check("tree size", tree_size, 1, MAX_TREE, whole=True)
    tree_size = tree_size if heads else 1
    beams = min(math.isqrt(tree_size), model.config.vocab_size) if beams is None else beams
    check("beams", beams, 1, min(32, model.config.vocab_size), whole=True)
    check("max new tokens", max_new_tokens, 1, 2**31, whole=True)
    check_prompts(model, prompts)
    batch = min(len(prompts), BATCH_SIZE if batch_size is None else batch_size)
    check("batch size", batch, 1, 2**16, whole=True)
    limits = [min(max_new_tokens, model.config.block_size - len(prompt)) for prompt in prompts]
    rows = max(len(prompt) + limit for prompt, limit in zip(prompts, limits))
    slots = Slots(model, heads, batch, rows, tree_size, beams, sampling)
    output, began = Output([[] for _ in prompts]), time.perf_counter()
    try:
        run(slots, prompts, limits, set(stop), output, on_tokens)
    except KeyboardInterrupt:
        output.seconds = time.perf_counter() - began
        raise Interrupted(output) from None
    output.seconds = time.perf_counter() - began
    return output


def run(slots, prompts, limits, stop, output, on_tokens):
    """Keeps the slots filled and steps until every prompt is done."""
    waiting, at = iter(range(len(prompts))), {}  # at: slot -> the prompt in it
    for slot in range(len(slots.root)):
        at[slot] = next(waiting)
        slots.fill(slot, prompts[at[slot]], at[slot])
    while at:
        emitted, counts = (x.tolist() for x in slots.step())
        for slot, index in list(at.items()):
            tokens, done = output.take(index, emitted[slot][:counts[slot]], limits[index], stop)
            if on_tokens:
                on_tokens(index, tokens)
            if done:
                slots.release(slot)
                del at[slot]
                following = next(waiting, None)
                if following is not None:
                    at[slot] = following
                    slots.fill(slot, prompts[following], following)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing with plain decoding

@torch.inference_mode()
def first_difference(model, prompts, ours, plain, **sampling):
    """The first token where two outputs differ: None, or (prompt, place, gap, kind).

    gap: how far the worse of the two tokens is below the best score there (logit, or logit / temperature + noise). kind is
    "tie" when that is within rounding of the model's dtype, so that the order of summation may decide, else "bug". Where
    one text just ends earlier there is no gap (None), and no excuse.
    """
    s = Sampling(**sampling)
    for i, (a, b) in enumerate(zip(ours, plain)):
        at = next((j for j in range(max(len(a), len(b))) if a[j:j + 1] != b[j:j + 1]), None)
        if at is None:
            continue
        if at >= min(len(a), len(b)):
            return i, at, None, "bug"
        context = torch.tensor([list(prompts[i]) + a[:at]], device=model.device)
        scores = model.lm_head(model(context)[:, -1]).float()
        scale = s.temperature or 1.0
        rounding = ROUNDINGS[model.dtype] * torch.finfo(model.dtype).eps * scores.abs().max().item() / scale
        if s.temperature > 0:
            tokens = torch.arange(scores.shape[-1], device=model.device)
            place = (torch.tensor([x], device=model.device) for x in (i, context.shape[1]))
            scores = keep_likely(scores / scale, s.top_k, s.top_p) + gumbel(s.seed, *place, tokens)
        gap = (scores.max() - scores[0, [a[at], b[at]]].min()).item()
        return i, at, gap, "tie" if gap <= rounding else "bug"
    return None


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
    """Runs a command line: bad input is one line on standard error and exit code 2, without a traceback."""
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
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {name!r} is not available here ({str(error).splitlines()[0]}); try --device cpu") from None
    return device


def load_model(args):
    """--model, --device, --dtype -> (GPT, its tiktoken.Encoding)."""
    device, dtype = pick_device(args.device), getattr(torch, args.dtype) if args.dtype else None
    model, encoding = GPT.from_pretrained(args.model, dtype=dtype, device=device), load_encoding(args.model)
    if encoding.max_token_value >= model.config.vocab_size:
        raise InputError(f"{args.model}: the tokenizer has ids up to {encoding.max_token_value}, the model only "
                         f"{model.config.vocab_size} embeddings; they do not belong together")
    return model, encoding


def load_heads(path, args, model, encoding):
    """A heads folder, or the model folder's own `clover`; None for 'none' or where a model has no heads beside it."""
    path = path or (Path(args.model) / "clover" if (Path(args.model) / "clover").is_dir() else "none")
    return None if str(path) == "none" else CloverHeads.from_pretrained(path, model, tokenizer_hash(encoding))


def decode_text(encoding, tokens):
    """Text of token ids; ids that the tokenizer does not have (a padded vocabulary has such) give U+FFFD."""
    stream = TextStream(encoding)
    return stream.feed(tokens) + stream.finish()


class Printer:
    """Prints text as it is accepted; on a terminal, each guessed token in the colour of the head that guessed it."""

    def __init__(self, encoding, hidden):
        self.stream, self.encoding, self.hidden = TextStream(encoding), encoding, hidden
        self.colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def show(self, tokens):
        for i, token in enumerate(tokens):
            text = self.stream.feed([token]) if token not in self.hidden else ""
            if self.colours and i < len(tokens) - 1 and text:  # the last token of a step is the model's own
                text = f"\x1b[{HEAD_COLOURS[min(i, len(HEAD_COLOURS) - 1)]}m{text}\x1b[0m"
            print(text, end="", flush=True)

    def finish(self):
        print(self.stream.finish(), flush=True)


def statistics(output):
    """The lines that end a run."""
    shares = "  ".join(f"{n}: {output.accepted[n] / max(output.steps, 1):.0%}" for n in sorted(output.accepted))
    return (f"tokens per step by share of steps: {shares}\n"
            f"{output.tokens_per_step:.2f} tokens per step, {output.tokens_per_second:.1f} tokens per second")


def report(output, encoding, prompts):
    """The --json object of one run."""
    return dict(prompts=prompts, tokens=output.tokens, texts=[decode_text(encoding, tokens) for tokens in output.tokens],
                steps=output.steps, seconds=output.seconds, tokens_per_step=output.tokens_per_step,
                tokens_per_second=output.tokens_per_second, accepted=dict(sorted(output.accepted.items())))


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


def parse(argv):
    parser = Parser("Continues prompts with a model's own text, faster by draft heads that guess ahead.")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; repeatable; - reads standard input")
    add_model_flags(parser)
    parser.add_argument("--heads", help="a folder of draft heads, or none; default: the model folder's clover, if it has one")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree-size", type=int, default=TREE_SIZE, help="nodes per step, root included; 1 is plain decoding")
    parser.add_argument("--compare", action="store_true", help="also decode plainly and compare speed and text")
    parser.add_argument("--json", action="store_true", help="print one json object instead of text")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    texts = read_prompts(args.prompt)
    model, encoding = load_model(args)
    heads = load_heads(args.heads, args, model, encoding)
    prompts = [encoding.encode(text, allowed_special="all") for text in texts]
    sampling = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    stop = [end_of_text(encoding)]
    decode = lambda heads, on_tokens=None: generate(model, prompts, args.max_new_tokens, heads, tree_size=args.tree_size,
                                                    stop=stop, on_tokens=on_tokens, **sampling)
    printer = Printer(encoding, stop) if len(prompts) == 1 and not args.json else None
    try:
        if args.compare:  # both runs are timed with everything loaded and compiled
            decode(heads), decode(None)
        if printer:
            print(texts[0], end="", flush=True)
        output = decode(heads, (lambda index, tokens: printer.show(tokens)) if printer else None)
    except Interrupted as interrupt:
        output, args.compare = interrupt.output, False
    if args.json:
        result = report(output, encoding, texts)
    elif printer:
        printer.finish()
    else:
        for text, tokens in zip(texts, output.tokens):
            print(f"{text}{decode_text(encoding, [t for t in tokens if t not in stop])}\n{'-' * 40}")
    if not args.json:
        print(f"\n{statistics(output)}")
    plain = None
    if args.compare:
        try:
            plain = decode(None)
        except Interrupted:
            print("interrupted: no comparison", file=sys.stderr)
    if plain:
        difference = first_difference(model, prompts, output.tokens, plain.tokens, **sampling)
        if args.json:
            result |= dict(plain=report(plain, encoding, texts), difference=difference)
        else:
            print(compare_lines(output, plain, difference))
    if args.json:
        print(json.dumps(result))


def compare_lines(output, plain, difference):
    """What --compare says."""
    speed_up = output.tokens_per_second / plain.tokens_per_second
    speed = f"plain decoding: {plain.tokens_per_second:.1f} tokens per second; speed-up {speed_up:.2f}x"
    if difference is None:
        return f"{speed}\nthe text is identical, all {plain.emitted} tokens"
    prompt, place, gap, kind = difference
    apart = "one of them ends there" if gap is None else f"the two scores are {gap:.2g} apart"
    return f"{speed}\nthe text differs first at new token {place} of prompt {prompt}: a {kind}, {apart}"


if __name__ == "__main__":
    command(main)
