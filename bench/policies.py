"""How well `auto` selects, told in seconds: texts are decoded again of which is known, token by
token, what heads and lookup would have found, with the times of steps that were measured."""

import random
import statistics
from bisect import bisect_right
from collections import Counter, deque
from functools import partial
from itertools import product

import numpy as np

from bench import Record, Table
from bench.decoding import load, settings, text_prompts
from generate import DraftPlan, FixedPolicy, Sampling, prepare
from tools.policy import AdaptivePolicy, StepTimes
from tools.timing import step_time, timing_decoder
from tools.tune import fit

BATCH_SIZES = 1, 2, 4, 8, 16, 32  # whose steps are timed
NODES = 23     # of the heads' tree and
CHAIN = 20     # tokens of lookup's chain, of which is recorded whether they were right
SINGLES = [DraftPlan(), *(DraftPlan(n) for n in (1, 2, 3, 4, 5, 7, 9, 11, 15, NODES)),
           *(DraftPlan(0, n) for n in (4, 10, CHAIN)),
           *(DraftPlan(nodes, n) for nodes in (1, 2, 3, 4, 5, 7, 9, 11, 15) for n in (4, 10))]
NOISE = 0.08   # of a step's log time
SEEDS = 6      # runs that count
COLUMNS = {"temperature": "temperature {}", "batch size": "batch_size {}",
           "best single plan": "best {}", "tokens per second": "best_rate {:.0f}",
           "plain": "plain {:.2f}x", "auto": "auto {:.2f}x", "least": "least {:.2f}x"}


# --------------------------------------------------------------------------------------------------
# What is recorded

def trace(model, heads, prompt, new, temperature):
    """A text -> dict(prompt, tokens, nodes, right): at each token the nodes of the heads' tree that
    were right, root left out, and how many tokens of lookup's chain."""
    decode = partial(one_by_one, model, heads, prompt, new, temperature)
    tokens, nodes = decode(DraftPlan(NODES))
    _, right = decode(DraftPlan(0, CHAIN))
    return dict(prompt=prompt, tokens=tokens, nodes=nodes, right=list(map(len, right)))


def one_by_one(model, heads, prompt, new, temperature, plan):
    """Decodes, but keeps one token of each step -> (the text, the accepted nodes of each step)."""
    engine = prepare(model, [prompt], new, heads, policy=FixedPolicy(plan), graph=False,
                     temperature=temperature)
    decoder, accept, nodes = engine.decoder, engine.decoder.accept, []

    def accept_one(plan, tree, target):
        accepted = accept(plan, tree, target)
        nodes.append(accepted.path[0, 1:accepted.count].tolist())
        accepted.count.fill_(1)
        accepted.last.zero_()
        return accepted
    decoder.accept = accept_one
    return engine.generate([prompt], new).tokens[0], nodes


def time_steps(model, heads, temperature, capacity):
    """{"nodes+tokens": seconds of a step by BATCH_SIZES}; of plans without heads also under
    "... alone", where no heads read."""
    def times(heads, plan):
        return [step_time(timing_decoder(model, heads, plan, capacity, batch_size=batch_size,
                                         sampling=Sampling(temperature)))
                for batch_size in BATCH_SIZES]
    found = {name_of(plan): times(heads, plan) for plan in SINGLES}
    return found | {name_of(plan, False): times(None, plan)
                    for plan in SINGLES if not plan.head_nodes}


def name_of(plan, reads=True):
    alone = "" if reads or plan.head_nodes else " alone"
    return f"{plan.head_nodes}+{plan.lookup_tokens}{alone}"


# --------------------------------------------------------------------------------------------------
# The replay

class Text:
    """A trace that is decoded, as a `generate.Sequence`."""

    def __init__(self, trace):
        self.prompt, self.tokens = trace["prompt"], trace["tokens"]
        self.nodes, self.right = trace["nodes"], trace["right"]
        self.done = 0

    def step(self, plan):
        """-> (tokens, path)"""
        by_heads = bisect_right(self.nodes[self.done], plan.head_nodes)
        by_lookup = min(self.right[self.done], plan.lookup_tokens)
        path = [0, *self.nodes[self.done][:by_heads]]
        path += [plan.head_nodes + 1] * (by_lookup - by_heads)
        tokens = self.tokens[self.done:self.done + len(path)]
        self.done += len(path)
        return tokens, path


def replay(policy, traces, batch_size, times, noise=0.0, seed=0, slower=lambda threads, step: 1):
    """Decodes the texts as an `Engine` does -> (tokens per second, {plan: steps}). times:
    `time_steps`. slower(number of threads, step): by what a step takes longer."""
    rng = random.Random(seed)
    waiting, running, plans = deque(map(Text, traces)), [], Counter()
    reads = any(plan.head_nodes for plan in policy.plans)
    seconds = tokens = 0
    policy.start(may_drop_heads=True)
    while waiting or running:
        while waiting and len(running) < batch_size:
            running.append(waiting.popleft())
        reads = reads and not policy.drops_heads
        plan = policy.select()
        by_batch = times[name_of(plan, reads)]
        taken = np.interp(len(running), BATCH_SIZES, by_batch) * rng.lognormvariate(0, noise)
        taken *= slower(getattr(policy, "threads", 1), sum(plans.values()))
        found = [(text, *text.step(plan)) for text in running]
        policy.update(plan, found, taken)
        seconds += taken
        tokens += sum(len(emitted) for _, emitted, _ in found)
        plans[plan] += 1
        running = [text for text in running if text.done < len(text.tokens)]
    return tokens / seconds, plans


def singles(traces, batch_size, times):
    """{plan: tokens per second of a run that takes nothing else}"""
    return {plan: replay(FixedPolicy(plan), traces, batch_size, times)[0] for plan in SINGLES}


def adaptive(model, heads, temperature, batch_size, times, known=True):
    """The policy of `fit`; with the times that `tools.tune.probe` would measure, if known."""
    policy = fit(model, heads, True, batch_size, Sampling(temperature))
    plans = [plan for plan in policy.plans if plan in SINGLES]
    cost = policy.times.cost
    if known:
        ends = lambda name: [float(np.interp(n, BATCH_SIZES, times[name])) for n in (1, batch_size)]
        reads, alone = name_of(DraftPlan()), name_of(DraftPlan(), reads=False)
        cost.set_measured({plan: ends(name_of(plan)) for plan in plans},
                          [max(a - b, 0.0) for a, b in zip(ends(reads), ends(alone))])
    return AdaptivePolicy(StepTimes(cost, plans, {1: 0.0}), policy.found)


def compare(model, heads, record, temperature, batch_size, texts=slice(None)):
    """A row of the table: auto over the best single plan, mean and least of SEEDS runs."""
    traces = record[f"texts at {temperature:g}"][texts]
    times = record["times, sampled" if temperature else "times, greedy"]
    rates = singles(traces, batch_size, times)
    best = max(rates, key=rates.get)
    auto = []
    for seed in range(SEEDS):
        policy = adaptive(model, heads, temperature, batch_size, times)
        rate, _ = replay(policy, traces, batch_size, times, NOISE, seed)
        auto.append(rate / rates[best])
    return dict(temperature=temperature, batch_size=batch_size, best=str(best),
                best_rate=rates[best], plain=rates[DraftPlan()] / rates[best],
                auto=statistics.fmean(auto), least=min(auto))


def bench(args):
    """`python -m bench policy`: records what --out does not hold, then replays."""
    model, heads, heldout, encoding = load(args, args.heads[-1:])
    (name, heads), = heads.items()
    record = Record(args.out, any_machine=True, bench="policy", **settings(args, model), heads=name,
                    text=args.text)
    given = text_prompts(heldout, encoding, args.prompts, args)
    for t in args.temperatures:
        texts = lambda: [trace(model, heads, prompt, args.max_new_tokens, t) for prompt in given]
        times = lambda: time_steps(model, heads, t, args.prompt_length + args.max_new_tokens)
        record.once(f"texts at {t:g}", texts)
        record.once("times, sampled" if t else "times, greedy", times)
    # half of the texts are for tuning the policy, the other half for the table
    table = Table(COLUMNS)
    for t, batch_size in product(args.temperatures, args.batch_sizes):
        table.add(compare(model, heads, record, t, batch_size, slice(1, None, 2)))
    record.done()
    return settings(args, model) | dict(bench="policy", recorded_on=record["machine"], replay=table)
