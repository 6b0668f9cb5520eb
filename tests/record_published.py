"""Records what `speculators` computes with small random draft heads, for tests/test_published.py:

    pip install speculators==0.9.0
    python tests/record_published.py

writes tests/published.safetensors. Weights and inputs are drawn as integers, which torch's generator draws alike in all
versions, so they are not stored. The package is only needed to record."""

from pathlib import Path

import torch
from safetensors.torch import save_file

FILE = Path(__file__).with_name("published.safetensors")
V, DRAFT_V, C, N_HEAD, N_KV_HEAD, D, INNER, RANK = 128, 96, 64, 4, 2, 32, 96, 8
STATES = 3  # of the model's, which the heads read
ROWS = 16   # of the sequence
MASK = 127
COMMITTED = 9  # rows before a block is drafted
BLOCK = 6
ANCHORS = 1, 5, COMMITTED  # where blocks begin
STEPS = 4  # tokens that EAGLE-3 drafts
SWITCHES = {  # of EAGLE-3's cases
    "eagle3": {}, "eagle3-residual": dict(norm_before_residual=True), "eagle3-fc-norm": dict(fc_norm=True),
    "eagle3-output": dict(norm_output=True, norm_before_fc=True), "eagle3-qwen": dict(norm_output=True, fc_norm=True)}
BLOCKS = {  # of block heads' cases; causal is JetSpec's, which the package lacks
    "dflash": {}, "causal": {}, "dspark": dict(markov_rank=RANK, markov_head_type="vanilla"),
    "dspark-gated": dict(markov_rank=RANK, markov_head_type="gated"),
    "dspark-masks": dict(markov_rank=RANK, markov_head_type="vanilla", sample_from_anchor=False)}
CASES = *SWITCHES, *BLOCKS
# of weights, by the end of their name
SCALES = {"embed_tokens": 1.0, "markov_w1": 1.0, "fc": 0.125, "lm_head": 0.125, "q_proj": 0.0625, "k_proj": 0.0625}


def layers_of(case):
    """The part of config.json that describes the layers."""
    is_eagle = case in SWITCHES
    return dict(model_type="llama" if is_eagle and case != "eagle3-qwen" else "qwen3", vocab_size=V, hidden_size=C,
                num_hidden_layers=1 if is_eagle else 2, num_attention_heads=N_HEAD, num_key_value_heads=N_KV_HEAD,
                head_dim=D, intermediate_size=INNER, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=5000.0,
                max_position_embeddings=256, attention_bias=case == "eagle3-residual", tie_word_embeddings=False)


def draw(generator, *shape, scale=1.0):
    """Multiples of scale / 64 from -2 scale to 2 scale."""
    return torch.randint(-128, 129, shape, generator=generator) * (scale / 64)


def weights_of(case):
    """{tensor: values} of a case, as speculators names them."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    is_eagle, layers, switches = case in SWITCHES, layers_of(case), SWITCHES.get(case, BLOCKS.get(case))
    inputs = 2 * C if is_eagle else C
    shapes = {"fc": (C, STATES * C), "norm": (C,), "embed_tokens": (V, C), "lm_head": (DRAFT_V, C)}
    if not is_eagle:
        shapes["hidden_norm"] = C,
    if "markov_rank" in switches:
        shapes |= {"markov_head.markov_w1": (V, RANK), "markov_head.markov_w2": (DRAFT_V, RANK)}
    if case == "dspark-gated":
        shapes["markov_head.gate_proj"] = RANK, C + RANK
    shapes |= {f"fc_norm.{i}": (C,) for i in range(STATES) if switches.get("fc_norm")}
    if switches.get("norm_before_fc"):
        shapes["input_norm"] = STATES * C,
    for i in range(layers["num_hidden_layers"]):
        layer = {"input_layernorm": (C,), "post_attention_layernorm": (C,), "self_attn.o_proj": (C, N_HEAD * D),
                 "mlp.gate_proj": (INNER, C), "mlp.up_proj": (INNER, C), "mlp.down_proj": (C, INNER)}
        layer |= {f"self_attn.{x}_proj": (n * D, inputs) for x, n in zip("qkv", (N_HEAD, N_KV_HEAD, N_KV_HEAD))}
        if layers["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": (D,), "self_attn.k_norm": (D,)}
        if is_eagle:
            layer["hidden_norm"] = C,
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1
        scale = SCALES.get(name.split(".")[-1], 0.25)
        tensors[f"{name}.weight"] = draw(generator, *shape, scale=scale) + is_norm
        if name == "markov_head.gate_proj" or layers["attention_bias"] and "self_attn" in name:
            tensors[f"{name}.bias"] = draw(generator, shape[0], scale=0.25)
    ids = torch.randperm(V, generator=generator)[:DRAFT_V].sort().values
    return tensors | {"d2t": ids - torch.arange(DRAFT_V), "t2d": torch.isin(torch.arange(V), ids)}


def inputs_of(case):
    """The model's states [1, ROWS, STATES * C] and the sequence's tokens [ROWS + 1]."""
    generator = torch.Generator().manual_seed(100 + CASES.index(case))
    states = draw(generator, 1, ROWS, STATES * C)
    return states, torch.randint(0, MASK, (ROWS + 1,), generator=generator)


# ---------------------------------------------------------------------------------------------------------------------
# With the package

def reference(case):
    """The package's model of a case."""
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from transformers import AutoConfig
    layers = layers_of(case)
    own = AutoConfig.for_model(**layers)
    own._attn_implementation = "eager"
    common = dict(transformer_layer_config=own, draft_vocab_size=DRAFT_V)
    if case in SWITCHES:
        model = Eagle3DraftModel(Eagle3SpeculatorConfig(
            **common, **SWITCHES[case], eagle_aux_hidden_state_layer_ids=[*range(STATES)]))
    else:
        common |= dict(block_size=BLOCK, mask_token_id=MASK, aux_hidden_state_layer_ids=[*range(STATES)])
        if "markov_rank" in BLOCKS[case]:
            model = DSparkDraftModel(DSparkSpeculatorConfig(**common, **BLOCKS[case], enable_confidence_head=False))
        else:
            model = DFlashDraftModel(DFlashSpeculatorConfig(**common))
    missing, unexpected = model.load_state_dict(weights_of(case), strict=False)
    assert not unexpected and all(name.startswith("verifier_") for name in missing), (missing, unexpected)
    return model.eval()


def record_eagle3(case):
    """Logits [STEPS, ROWS, DRAFT_V] of rows that read the states and the tokens after them, then of each drafted row
    after it: at step k row i reads token i + k and its own output of step k - 1."""
    model, logits = reference(case), []
    model.lm_head.register_forward_hook(lambda _, __, result: logits.append(result[0]))
    states, tokens = inputs_of(case)
    rows = torch.arange(ROWS)[None]
    model(states, tokens[None, 1:], torch.zeros_like(rows), position_ids=rows, ttt_steps=STEPS)
    return {"logits": torch.stack(logits)}


def record_blocks(case):
    """Logits and bias [blocks, BLOCK, DRAFT_V], the bias with the sequence's own tokens."""
    from speculators.models.dflash import core
    model = reference(case)
    states, tokens = inputs_of(case)
    core.select_anchors = lambda *_: (torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool))
    if case == "causal":
        build = model._create_attention_mask
        later = torch.full([len(ANCHORS) * BLOCK] * 2, -torch.inf).triu(1)
        later = torch.nn.functional.pad(later, (ROWS, 0))
        model._create_attention_mask = lambda *args, **others: build(*args, **others) + later
    ones = torch.ones(1, ROWS)
    hidden, logits, *_ = model._backbone_forward(states, tokens[None, :ROWS], ones, states[..., :C],
                                                 torch.zeros(1, ROWS, dtype=torch.long), max_anchors=len(ANCHORS))
    hidden, logits = (x.view(len(ANCHORS), BLOCK, -1) for x in (hidden, logits))
    results = {"logits": logits}
    markov = getattr(model, "markov_head", None)
    if markov is not None:
        previous = tokens[torch.tensor(ANCHORS)[:, None] + torch.arange(BLOCK)]
        results["bias"] = markov.block_bias(prev_token_ids=previous, hidden_states=hidden)
    return results


@torch.no_grad()
def record():
    tensors = {}
    for case in CASES:
        results = record_eagle3(case) if case in SWITCHES else record_blocks(case)
        results["checksum"] = torch.stack([x.double().sum() for x in (*weights_of(case).values(), *inputs_of(case))])
        tensors |= {f"{case}.{name}": x.contiguous() for name, x in results.items()}
    save_file(tensors, FILE)
    print(f"{FILE}: {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    record()
