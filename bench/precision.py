"""`python -m bench precision`: next-token distributions as decoding computes them, beside those of
the same weights in float32, by torch, at each token of the model's own greedy answers."""

from itertools import chain
from statistics import fmean, stdev

import torch

from bench import Table
from bench.decoding import read_chats
from bench.llama_cpp import N_BATCH, LlamaCpp, import_llama_cpp
from engine.batching import Engine
from engine.policy import Policy
from hf import checkpoint
from hf.paths import find_model
from model import check
from tools.load import load_model


def bench(args):
    """`bench precision`: prints a row for each program and returns the result."""
    check("max new tokens", args.max_new_tokens, 1, N_BATCH, whole=True)
    api = import_llama_cpp() if args.llama_cpp else None
    model, encoding = load_model(args)
    groups, stop = read_chats(args.chats, args.model, encoding, args.prompts)
    answers = [decode(model, prompt, args.max_new_tokens, stop)
               for prompt in chain(*groups.values())]
    programs = {f"Clover, {str(model.dtype).removeprefix('torch.')}": [x for _, x in answers]}
    texts = [text for text, _ in answers]
    if api:
        theirs = LlamaCpp(api, find_model(args.model), model.device, 1, max(map(len, texts)), 0.0)
        programs["llama.cpp"] = [torch.tensor(theirs.logits(text, len(ours))).log_softmax(-1)
                                 for text, ours in answers]
    del model  # two models might not fit in memory
    exact = checkpoint.load(args.model, torch.float32, args.device, quantize=args.quantize,
                            packed=False)
    expected = [logprobs_of(exact, text, len(ours)) for text, ours in answers]
    table = Table()
    for program, found in programs.items():
        table.add(dict(program=program) | compare(expected, found))
    return dict(precision=table)


def decode(model, prompt, new, stop):
    """Decodes plainly -> (the prompt and the answer but for its last token, the log-probabilities
    from which each token of the answer was chosen, float32 [n, V])."""
    V = model.config.vocab_size
    capacity = min(len(prompt) + new, model.config.block_size)
    engine = Engine(model, policy=Policy(model), capacity=capacity)
    sequence = engine.add(prompt, new, stop=stop)
    sequence.top_logprobs = V
    rows = []
    while engine.busy:
        for step in engine.step():
            (_, found), = step.logprobs
            sequence.logprobs.clear()  # a dict of the whole vocabulary for each token
            rows.append(torch.empty(V))
            rows[-1][[*found]] = torch.tensor([*found.values()])
    return prompt + sequence.tokens[:-1], torch.stack(rows)


@torch.inference_mode()
def logprobs_of(model, tokens, n):
    """The log-probabilities after each of the last n tokens, float32 [n, V] on the CPU."""
    hidden = model(torch.tensor([tokens], device=model.device))
    return model.lm_head(hidden[0, -n:]).log_softmax(-1).cpu()


def compare(expected, found):
    """Part of a row: the share of positions with the same likeliest token, and the mean of the
    Kullback-Leibler divergence from `expected` in nats / 1000, with its standard error. expected,
    found: log-probabilities [n, V] of each text."""
    same = []
    divergences = []
    for p, q in zip(expected, found, strict=True):
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        divergences += (1000 * p.exp() * (p - q)).sum(-1).tolist()
    return dict(positions=len(same), same_top_1=fmean(same), millinats=fmean(divergences),
                error=stdev(divergences) / len(same) ** 0.5)
