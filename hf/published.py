"""Loads draft heads in other projects' formats, told apart by config.json: speculators (EAGLE-3,
DFlash, DSpark), SpecForge and AngelSlim (EAGLE-3), z-lab and JetSpec (DFlash), DeepSpec (DSpark)."""

from dataclasses import replace
from pathlib import Path

import torch

from backends.tensor_parallel import VocabParallelHead
from clover import MAX_DRAFT
from common.files import files_hash, read_json
from common.values import one_of
from drafters.eagle3 import Eagle3Heads
from drafters.published import BlockConfig, Eagle3Config
from hf.checkpoint import BUFFERS, match_parameters, short, weight_files
from hf.families import LLAMA_NAMES, Family, family_of, value_of
from hf.tensors import open_tensors
from model import InputError, check, expect

NAMES = LLAMA_NAMES | {  # our parameter names -> the checkpoint's, as in hf/families.py
    "fc": ("fc",),
    "fc_norm.N": ("fc_norm.N",),
    "input_norm": ("input_norm",),
    "hidden_norm": ("hidden_norm",),
    "blocks.N.hidden_norm": ("model.layers.N.hidden_norm",),
    "markov_w1": ("markov_head.markov_w1",),
    "markov_w2": ("markov_head.markov_w2",),
    "gate": ("markov_head.gate_proj",),
}
UNREAD = "confidence_head.", "verifier_norm.", "verifier_lm_head.", "t2d"  # tensors
CLASSES = {Eagle3Config: Eagle3Heads}
DRAFT_TOKENS = 7  # K of EAGLE-3, where config.json does not say
SPECULATORS = "eagle3", "dflash", "dspark"  # speculators_model_type
ARCHITECTURES = "LlamaForCausalLMEagle3", "DFlashDraftModel", "Qwen3DSparkModel"
SWITCHES = "norm_before_fc", "fc_norm", "norm_output"  # of EAGLE-3 in speculators


def load_published(path, model):
    """The heads in a folder, for a `GPT` that may be packed. Raises InputError for heads of another
    model, a format or an option that is not supported, and broken files."""
    path = Path(path)
    expect(not isinstance(model.head, VocabParallelHead), f"{path}: heads of this format run in one "
           "process; start without torchrun")
    tensors, ids = read_tensors(path, model)
    file = path / "config.json"
    try:
        family, config = read_config(read_json(file), model, tensors)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = "" if isinstance(error, InputError) else "a value is missing or has the wrong type: "
        raise InputError(f"{file}: {what}{error}") from None
    with torch.device("meta"):  # without memory and random numbers: weights follow
        heads = CLASSES[type(config)](config, model)
    matches = match_parameters(path, heads, family, tensors)
    weights = {name: torch.cat([tensor.load() for _, tensor in sorted(parts)])
               for name, parts in matches.items()}
    heads.load_state_dict(weights, strict=False, assign=True)
    n = config.vocabulary
    expect(not n or ids is not None and len(ids) == n, f"{path}: expected d2t with the {n} tokens of "
           "a draft vocabulary, as config.json says; download the heads again")
    heads.vocabulary = ids if n else None
    heads.hash = files_hash(weight_files(path))
    return heads.place()


# --------------------------------------------------------------------------------------------------
# config.json -> configuration

def read_config(raw, model, tensors):
    """-> (`Family` of the heads' layers, `Eagle3Config` or `BlockConfig`)."""
    if raw.get("speculators_model_type") is not None:
        kind = one_of("speculators_model_type", raw["speculators_model_type"], SPECULATORS)
        layers = raw["transformer_layer_config"]
        read = speculators_eagle3 if kind == "eagle3" else speculators_block
    else:
        kind = one_of("architectures", (raw.get("architectures") or [None])[0], ARCHITECTURES)
        layers = raw
        read = dict(zip(ARCHITECTURES, (specforge, zlab, deepspec)))[kind]
    one_of("model_type", layers.get("model_type"), ("llama", "qwen3"))
    family = family_of(layers)
    own, base = family.config, model.config
    for name in ("vocab_size", "n_embd"):
        theirs, ours = getattr(own, name), getattr(base, name)
        expect(theirs == ours, f"these heads belong to a model with {name} {theirs}, not {ours}")
    has_window = own.windows or "sliding_attention" in (layers.get("layer_types") or ())
    expect(not has_window, "layers with sliding windows are not supported")
    config = read(raw, replace(own, block_size=base.block_size), base.n_layer)
    ids = config.hidden_layers
    expect(ids and all(type(i) is int and 0 <= i <= base.n_layer for i in ids),
           f"these heads read layers that a model of {base.n_layer} layers does not have")
    check("draft tokens", config.n_draft, 1, MAX_DRAFT, whole=True)
    rows = value_of(raw, "draft_vocab_size", int, own.vocab_size)
    config = replace(config, vocabulary=rows if rows != own.vocab_size else 0,
                     own_embed="embed_tokens.weight" in tensors,
                     own_head="lm_head.weight" in tensors or rows != own.vocab_size)
    return Family(names=NAMES, **vars(config.layers)), config


def default_layers(n):
    """EAGLE-3's choice of a model with n layers: the states after 2, n / 2 and n - 3 of them."""
    return 2, n // 2, n - 3


def eagle3(raw, layers, n_draft, hidden_layers, **switches):
    expect(layers.n_layer == 1, f"EAGLE-3 heads of {layers.n_layer} layers are not supported, only "
           "of one")
    before = value_of(raw, "norm_before_residual", bool, False)
    return Eagle3Config(layers, n_draft, tuple(hidden_layers), norm_before_residual=before,
                        **switches)


def speculators_eagle3(raw, layers, n):
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return eagle3(raw, layers, methods[0].get("speculative_tokens", DRAFT_TOKENS),
                  raw.get("eagle_aux_hidden_state_layer_ids") or default_layers(n),
                  **{name: value_of(raw, name, bool, False) for name in SWITCHES})


def specforge(raw, layers, n):
    for name in SWITCHES:
        expect(not raw.get(name), f"{name} is not supported in this format")
    own = raw.get("eagle_config") or {}
    expect(own.get("use_aux_hidden_state", True), "heads that read only the last layer are not "
           "supported")
    outputs = own.get("eagle_aux_hidden_state_layer_ids")  # 0: of the first layer
    return eagle3(raw, layers, DRAFT_TOKENS,
                  [i + 1 for i in outputs] if outputs else default_layers(n))


def block(raw, layers, size, hidden_layers, mask_token, first, **options):
    check("block_size", size, 1 + first, MAX_DRAFT, whole=True)
    check("mask_token_id", mask_token, 0, layers.vocab_size - 1, whole=True)
    rank = raw.get("markov_rank", 0)
    check("markov_rank", rank, 0, 2**16, whole=True)
    kind = one_of("markov_head_type", raw.get("markov_head_type", "vanilla"), ("vanilla", "gated"))
    return BlockConfig(replace(layers, qk_norm="head"), size - first, tuple(hidden_layers),
                       mask_token=mask_token, first=first, markov_rank=rank,
                       markov_gated=kind == "gated", **options)


def speculators_block(raw, layers, n):
    is_dspark = raw["speculators_model_type"] == "dspark"
    from_anchor = value_of(raw, "sample_from_anchor", bool, is_dspark)
    return block(raw, layers, raw["block_size"],
                 raw.get("aux_hidden_state_layer_ids") or default_layers(n), raw["mask_token_id"],
                 1 - from_anchor)


def zlab(raw, layers, n):
    own = raw.get("dflash_config") or {}
    d = layers.n_layer
    outputs = own.get("target_layer_ids") or [  # 0: of the first layer
        round(1 + k * (n - 4) / (d - 1)) if d > 1 else n // 2 for k in range(d)]
    return block({}, layers, raw.get("block_size") or own["block_size"], [i + 1 for i in outputs],
                 own["mask_token_id"], 1, causal=bool(own.get("causal_head")))


def deepspec(raw, layers, n):
    return block(raw, layers, raw["block_size"], [i + 1 for i in raw["target_layer_ids"]],
                 raw["mask_token_id"], 0)


# --------------------------------------------------------------------------------------------------
# Tensors

def read_tensors(path, model):
    """-> ({name: StoredTensor} of the weights, the draft vocabulary's token ids int32 or None).
    Leaves out embeddings and an LM head that are the model's."""
    files = weight_files(path)
    expect(all(file.suffix == ".safetensors" for file in files), f"{path}: heads of this format are "
           "only read from safetensors; save them as such")
    tensors = {}
    for file in files:
        for name, tensor in open_tensors(file).items():
            name = short(name).replace("midlayer.", "layers.0.")
            if not name.startswith(UNREAD) and not name.endswith(BUFFERS):
                tensors[name] = tensor
    offsets = tensors.pop("d2t", None)  # token = row + offset
    ids = None
    if offsets:
        ids = torch.arange(len(offsets.load())) + offsets.load()
        V = model.config.vocab_size
        expect(ids.min() >= 0 and ids.max() < V and len(ids.unique()) == len(ids),
               f"{offsets.file}: d2t has token ids outside 0..{V - 1}, or one twice")
    for name, rows in (("embed_tokens.weight", model.embed),
                       ("lm_head.weight", model.head.embedding)):
        if name in tensors and is_same(tensors[name], rows, model):
            del tensors[name]
    return tensors, None if ids is None else ids.int()


def is_same(tensor, rows, model):
    """Whether a stored tensor has the model's rows. rows: token ids -> [n, C]."""
    V, C = model.config.vocab_size, model.config.n_embd
    if tensor.shape != (V, C):
        return False
    values = tensor.load()
    return all(torch.equal(rows(ids.to(model.device)).to(values).cpu(), values[ids])
               for ids in torch.arange(V).split(4096))
