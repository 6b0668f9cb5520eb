"""Draft heads of other projects against what `speculators` computed with them (record_published.py)."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import record_published as recorded
from backends import cpu, cpu_library
from conftest import toy_model
from hf.heads import load_heads
from kernels import gumbel
from record_published import ANCHORS, BLOCK, BLOCKS, CASES, COMMITTED, MASK, ROWS, STEPS, SWITCHES, V

RESULTS = load_file(Path(__file__).with_name("published.safetensors"))


def all_rows(x, ids):
    """Rows of a draft vocabulary -> those of all tokens, 0 for the others."""
    return torch.zeros(V, *x.shape[1:]).index_copy(0, ids, x)


def base_of(weights, ids):
    """A toy model with a case's embeddings and LM head."""
    model = toy_model(vocab_size=V, tied=False, n_layer=4)
    model.embed.weight.copy_(weights["embed_tokens.weight"])
    model.head.weight.copy_(all_rows(weights["lm_head.weight"], ids))
    return model


# Formats: (case, weights as speculators names them, token ids of the draft vocabulary) -> config.json, weights

def speculators(case, weights, ids):
    is_eagle = case in SWITCHES
    states = [*range(recorded.STATES)]
    kind = "eagle3" if is_eagle else "dspark" if "dspark" in case else "dflash"
    config = dict(speculators_model_type=kind, transformer_layer_config=recorded.layers_of(case), architectures=["Any"],
                  draft_vocab_size=recorded.DRAFT_V, **SWITCHES.get(case, BLOCKS.get(case)))
    if is_eagle:
        methods = [dict(proposal_type="greedy", speculative_tokens=STEPS)]
        return config | dict(eagle_aux_hidden_state_layer_ids=states,
                             speculators_config=dict(proposal_methods=methods)), weights
    return config | dict(aux_hidden_state_layer_ids=states, block_size=BLOCK, mask_token_id=MASK), {
        name: x for name, x in weights.items() if name != "embed_tokens.weight"}


def specforge(case, weights, ids):
    """With the prefix of AngelSlim's."""
    config = recorded.layers_of(case) | SWITCHES[case] | dict(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(ids),
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2]))
    return config, {f"model.{name}".replace("layers.0.", "midlayer."): x for name, x in weights.items()
                    if "embed" not in name}


def zlab(case, weights, ids):
    """JetSpec's format, too."""
    config = recorded.layers_of(case) | dict(architectures=["DFlashDraftModel"], dflash_config=dict(
        mask_token_id=MASK, target_layer_ids=[0, 1, 2], block_size=BLOCK, causal_head=case == "causal"))
    return config, {name: x for name, x in weights.items() if name not in (
        "embed_tokens.weight", "lm_head.weight", "d2t", "t2d")}


def deepspec(case, weights, ids):
    config = recorded.layers_of(case) | BLOCKS[case] | dict(
        architectures=["Qwen3DSparkModel"], block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0, 1, 2])
    full = {name: all_rows(weights[name], ids) for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    confidence = {"confidence_head.proj.weight": torch.ones(1, 72), "confidence_head.proj.bias": torch.ones(1)}
    return config, {name: x for name, x in (weights | full | confidence).items() if name not in ("d2t", "t2d")}


PAIRS = [*((case, speculators) for case in CASES if case != "causal"), ("eagle3", specforge),
         ("eagle3-residual", specforge), ("dflash", zlab), ("causal", zlab), ("dspark", deepspec),
         ("dspark-gated", deepspec)]
by_format = pytest.mark.parametrize("case, form", PAIRS, ids=[f"{case}-{form.__name__}" for case, form in PAIRS])


class Loaded:
    """Heads loaded from a format, and the inputs and results of their case."""

    def __init__(self, path, case, form, packed=False):
        weights = recorded.weights_of(case)
        self.states, self.tokens = recorded.inputs_of(case)
        sums = torch.stack([x.double().sum() for x in (*weights.values(), self.states, self.tokens)])
        assert torch.equal(sums, RESULTS[f"{case}.checksum"]), "torch draws other integers: record again"
        self.ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
        config, tensors = form(case, weights, self.ids)
        (path / "config.json").write_text(json.dumps(config))
        save_file({name: x.contiguous() for name, x in tensors.items()}, path / "model.safetensors")
        self.model = base_of(weights, self.ids)
        if packed and cpu_library.library():
            cpu.apply(self.model)
        self.heads = load_heads(path, self.model)
        self.case = case

    def result(self, name):
        return RESULTS[f"{self.case}.{name}"]

    def rows(self, logits):
        """Logits of the draft vocabulary."""
        return logits if self.heads.vocabulary is not None else logits[..., self.ids]

    def read(self, lengths):
        """Sequences with these committed rows -> (h of the last ones or None, their roots, the cache)."""
        heads = self.heads
        cache = heads.new_cache(len(lengths), 99)
        cache.kv.fill_(9)  # rows that nothing wrote
        h = []
        for slot, n in enumerate(lengths):
            out = heads.augment(self.states[:, :n], self.tokens[None, 1:n + 1], cache=cache.one(slot))
            h.append(torch.zeros(1, recorded.C) if out is None else out[:, -1])
            cache.lengths[slot] = n
        return torch.cat(h), self.tokens[torch.tensor(lengths)], cache


class NotingHead(torch.nn.Module):
    """Notes the logits of each call."""

    def __init__(self, head):
        super().__init__()
        self.head, self.noted = head, []

    def topk(self, hidden, *rest):
        self.noted.append(self.head.logits(hidden))
        return self.head.topk(hidden, *rest)


@pytest.mark.parametrize("packed", [False, True])
@by_format
def test_logits_are_those_recorded(case, form, packed, tmp_path, exact):
    """Bug: a norm, residual, position, mask or weight that differs from the one that the heads were trained with; a row
    of the draft vocabulary for a token, a row of the block one place off. Sequences differ in length."""
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-4 if packed else 1e-5)
    loaded = Loaded(tmp_path, case, form, packed)
    heads = loaded.heads
    assert heads.vocabulary is None or torch.equal(heads.vocabulary.long(), loaded.ids)
    if case in SWITCHES:
        heads.head = NotingHead(heads.head)
        teacher = torch.nn.functional.pad(loaded.tokens[1:], (0, STEPS))

        def extend(logprobs, tokens, candidates, depth):
            candidates.tokens[:, depth, 0] = teacher[depth + 1:][:ROWS]
            candidates.parents[:, depth] = 0
        h, root, cache = loaded.read([*range(1, ROWS + 1)])
        heads.draft(h, root, STEPS, 1, extend=extend, cache=cache)
        close(torch.stack(heads.head.noted), loaded.result("logits"))
        return
    _, root, cache = loaded.read(ANCHORS)
    normed = heads.block_rows(root, cache)
    first = heads.config.first
    logits = loaded.rows(heads.lm_head.logits(normed.flatten(0, 1)).unflatten(0, normed.shape[:2]))
    close(logits, loaded.result("logits")[:, first:])
    if heads.config.markov_rank:
        previous = loaded.tokens[torch.tensor(ANCHORS)[:, None] + torch.arange(first, BLOCK)]
        bias = torch.cat([heads.bias(previous[:, k, None], normed[:, k]) for k in range(heads.n_draft)], dim=1)
        close(loaded.rows(bias), loaded.result("bias")[:, first:])


@pytest.mark.parametrize("case", ["dflash", "dspark", "dspark-masks"])
def test_block_heads_draft_a_beam_search(case, tmp_path, exact):
    """Bug: a beam with the bias of another one's token."""
    loaded = Loaded(tmp_path, case, speculators, packed=True)
    _, root, cache = loaded.read([COMMITTED])
    candidates = loaded.heads.draft(None, root, loaded.heads.n_draft, 4, cache=cache)
    weights = recorded.weights_of(case)
    logits = loaded.result("logits")[-1, loaded.heads.config.first:]
    paths = [((root.item(),), 0.0)]
    for depth in range(loaded.heads.n_draft):
        options = {}
        for path, joint in paths[:4]:
            row = logits[depth]
            if "dspark" in case:
                w1, w2 = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
                row = row + w2 @ w1[path[-1]]
            logprobs = row.log_softmax(-1).tolist()
            options |= {(*path, token): joint + x for token, x in zip(loaded.ids.tolist(), logprobs)}
        got = []
        for joint, token, parent in zip(*(column[0, depth].tolist() for column in candidates)):
            if parent >= 0:
                got.append(((*paths[parent][0], token), joint))
                assert joint == pytest.approx(options[got[-1][0]], abs=1e-4)
        best = sorted(options.values(), reverse=True)
        assert [joint for _, joint in got[:4]] == pytest.approx(best[:4], abs=1e-4)
        paths = got


@pytest.mark.parametrize("case", ["eagle3", "dflash", "dspark"])
def test_the_noise_is_the_samplers(case, tmp_path):
    """Bug: the noise of another position, sequence or token, which only costs acceptance."""
    loaded = Loaded(tmp_path, case, speculators)
    h, root, cache = loaded.read([3, COMMITTED])
    key = torch.tensor([7, 9]), torch.tensor([4, 1])
    sampling = torch.full((2,), 1e6), *key, cache.lengths  # so hot that only the noise counts
    candidates = loaded.heads.draft(h, root, STEPS, 1, sampling, cache=cache)
    for depth in range(STEPS):
        noise = gumbel(*key, cache.lengths + depth + 1, loaded.ids)
        assert torch.equal(candidates.tokens[:, depth, 0], loaded.ids[noise.argmax(-1)])
