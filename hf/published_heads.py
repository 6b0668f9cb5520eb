"""Loads draft heads in other projects' formats: EAGLE-3 by speculators, SpecForge and AngelSlim,
DFlash by speculators, z-lab and JetSpec, DSpark by speculators and DeepSpec; and the MTP heads in a
model's own folder or GGUF file."""

from dataclasses import replace

import torch

from backends.tensor_parallel import VocabParallelHead
from clover import MAX_DRAFT
from common.files import files_hash, read_json
from common.values import one_of
from drafters.base import BlockConfig, Eagle3Config
from drafters.block import BlockHeads
from drafters.eagle3 import Eagle3Heads
from drafters.mtp import DEPTH, MTPHeads
from hf import checkpoint
from hf.families import LLAMA_NAMES, Family, family_of, text_config, value_of
from hf.files import named_errors, optional_part, read_family
from hf.tensors import MTP, open_tensors
from model import check, expect

NAMES = LLAMA_NAMES | {  # our parameters -> tensors, as in hf/families.py
    **{name: (name,) for name in ("fc", "fc_norm.N", "input_norm", "hidden_norm")},
    "blocks.N.embed_norm": ("layers.N.input_layernorm",),
    "blocks.N.state_norm": ("layers.N.hidden_norm",),
    "markov_w1": ("markov_head.markov_w1",),
    "markov_w2": ("markov_head.markov_w2",),
    "gate": ("markov_head.gate_proj",),
}
MTP_NAMES = LLAMA_NAMES | {
    "blocks.N.fc": ("fc",),
    "blocks.N.embed_norm": ("pre_fc_norm_embedding",),
    "blocks.N.state_norm": ("pre_fc_norm_hidden",),
}
UNREAD = "confidence_head.", "verifier_norm.", "verifier_lm_head.", "t2d"  # tensors
CLASSES = {Eagle3Config: Eagle3Heads, BlockConfig: BlockHeads}
# in config.json, speculators_model_type or else the architecture
EAGLE3 = "eagle3", "LlamaForCausalLMEagle3"
DSPARK = "dspark", "Qwen3DSparkModel"
FORMATS = *EAGLE3, *DSPARK, "dflash", "DFlashDraftModel"
EAGLE3_SIGN = "layers.0.hidden_norm.weight"  # a tensor of theirs only, whatever the architecture
# Keys for the layers that heads read. In speculators and vLLM, at the top of config.json, a number
# counts the blocks before the state. Elsewhere it is the index of the last of these blocks.
BLOCKS_BEFORE = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
LAST_BLOCK = "eagle_aux_hidden_state_layer_ids", "target_layer_ids", "dspark_target_layer_ids"
SWITCHES = "norm_before_fc", "fc_norm", "norm_output"  # of EAGLE-3 by speculators
EAGLE3_DEPTH = 7  # K, where config.json does not say


def load_published(path, model):
    """The heads in a folder, for a `GPT`, which may be packed. Raises InputError for heads of
    another model, for formats and options that are not supported, and for broken files."""
    expect(not isinstance(model.head, VocabParallelHead),
           f"{path}: these heads only run in one process; start without torchrun")
    raw = read_json(path / "config.json")
    tensors = open_heads(path)
    with named_errors(path / "config.json"):
        config = read_config(raw, model.config, EAGLE3_SIGN in tensors)
    tokens = take_tokens(path, tensors, model)
    n = config.vocabulary
    expect(n == 0 or len(tokens) == n, f"{path}: expected the {n} tokens of a draft vocabulary, as "
           f"config.json says, got {len(tokens)} in d2t; download the heads again")
    config = replace(config, own_embed="embed_tokens.weight" in tensors,
                     own_head="lm_head.weight" in tensors or n > 0)
    heads = read_heads(path, CLASSES[type(config)], config, model, NAMES, tensors)
    heads.vocabulary = tokens if n else None
    return heads.place()


def load_mtp(path, model):
    """The MTP heads in the folder or GGUF file of a `GPT`, which may be packed."""
    family = read_family(path)
    layers = replace(family.config, n_layer=1, mixers=())
    with named_errors(path):
        check_sizes(layers, model.config)
    stored = checkpoint.text_tensors(path, family)
    tensors = {name.removeprefix(MTP): tensor for name, tensor in stored.items()
               if name.startswith(MTP)}
    take_tokens(path, tensors, model)
    config = Eagle3Config(layers, DEPTH, (), norm_output=True,
                          own_embed="embed_tokens.weight" in tensors,
                          own_head="lm_head.weight" in tensors)
    return read_heads(path, MTPHeads, config, model, MTP_NAMES, tensors, family.norm_offset).place()


def has_mtp(path):
    """Whether a folder or GGUF file holds MTP heads that `load_mtp` reads: of one layer."""
    raw = text_config(optional_part(path, "config.json"))
    is_one_layer = raw.get("mtp_num_hidden_layers") == 1
    return is_one_layer and f"{MTP}fc.weight" in checkpoint.stored_tensors(path)


def read_heads(path, heads_class, config, model, names, tensors, norm_offset=0.0):
    """Heads with the weights in {name: StoredTensor}. names, norm_offset: as in `Family`."""
    with torch.device("meta"):  # without memory and random numbers: weights follow
        heads = heads_class(config, model)
    family = Family(config.layers, names, norm_offset=norm_offset)
    sources = checkpoint.match_parameters(path, heads, family, tensors)
    weights = {name: torch.cat([tensor.load() for tensor in source.tensors])
               for name, source in sources.items()}
    heads.load_state_dict(weights, strict=False, assign=True)
    heads.hash = files_hash(checkpoint.weight_files(path))
    return heads


def read_config(raw, base, is_eagle3=False):
    """config.json and the model's `GPTConfig` -> `Eagle3Config` or `BlockConfig`. is_eagle3: told
    by the tensors, where config.json has another name for the architecture."""
    is_speculators = raw.get("speculators_model_type") is not None
    architectures = raw.get("architectures") or [None]
    name = raw["speculators_model_type"] if is_speculators else architectures[0]
    if is_eagle3 and name not in FORMATS:
        name = EAGLE3[1]
    kind = one_of("draft heads of type", name, FORMATS)
    layers = raw["transformer_layer_config"] if is_speculators else raw
    one_of("model_type", layers["model_type"], ("llama", "qwen3"))
    own = family_of(layers).config
    check_sizes(own, base)
    expect(not own.windows and "sliding_attention" not in (layers.get("layer_types") or ()),
           "layers with sliding windows are not supported")
    own = replace(own, block_size=base.block_size)
    if kind in EAGLE3:
        config = read_eagle3(raw, kind, own, base.n_layer)
    else:
        config = read_block(raw, kind, own)
    check("draft tokens", config.n_draft, 1, MAX_DRAFT, whole=True)
    for layer in config.hidden_layers:
        check("layers that are read", layer, 0, base.n_layer, whole=True)
    rows = value_of(raw, "draft_vocab_size", int, own.vocab_size)
    return replace(config, vocabulary=rows if rows < own.vocab_size else 0)


def check_sizes(own, base):
    """Raises InputError unless the `GPTConfig`s of heads and a model have these sizes in common."""
    for key in ("vocab_size", "n_embd"):
        theirs, ours = getattr(own, key), getattr(base, key)
        expect(theirs == ours, f"these heads belong to a model of {key} {theirs}, not {ours}")


def layers_read(raw):
    """How many blocks run before each state that heads read; None if config.json does not say."""
    for key in BLOCKS_BEFORE:
        if raw.get(key):
            return tuple(raw[key])
    for part in (raw.get("eagle_config") or {}, raw.get("dflash_config") or {}, raw):
        for key in LAST_BLOCK:
            if part.get(key):
                return tuple(i + 1 for i in part[key])
    return None


def read_eagle3(raw, kind, layers, n):
    is_speculators = kind == "eagle3"
    switches = {name: value_of(raw, name, bool, False) for name in SWITCHES}
    expect(is_speculators or not any(switches.values()),
           f"{', '.join(SWITCHES)}: only supported in the format of speculators")
    own = raw if is_speculators else raw.get("eagle_config") or {}
    expect(layers.n_layer == 1 and own.get("use_aux_hidden_state", True),
           "only EAGLE-3 with one layer that reads several of the model's states is supported")
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return Eagle3Config(
        layers, methods[0].get("speculative_tokens", EAGLE3_DEPTH),
        layers_read(raw) or (2, n // 2, n - 3),  # the default of all projects
        norm_before_residual=value_of(raw, "norm_before_residual", bool, False), **switches)


def read_block(raw, kind, layers):
    own = raw | (raw.get("dflash_config") or {})
    hidden_layers = layers_read(raw)
    expect(hidden_layers, "does not say which layers the heads read, such as by target_layer_ids; "
           "download the heads again")
    first = int(not value_of(own, "sample_from_anchor", bool, kind in DSPARK))
    check("mask_token_id", own["mask_token_id"], 0, layers.vocab_size - 1, whole=True)
    rank = own.get("markov_rank") or 0
    check("markov_rank", rank, 0, 2**16, whole=True)
    markov = one_of("markov_head_type", own.get("markov_head_type") or "vanilla",
                    ("vanilla", "gated"))
    return BlockConfig(
        replace(layers, qk_norm="head"), value_of(own, "block_size", int) - first,
        hidden_layers, mask_token=own["mask_token_id"], first=first,
        causal=value_of(own, "causal_head", bool, False), markov_rank=rank,
        markov_gated=markov == "gated")


def open_heads(path):
    """{name: StoredTensor} of a folder's heads."""
    files = checkpoint.weight_files(path)
    expect(all(file.suffix == ".safetensors" for file in files),
           f"{path}: these heads are only read from safetensors; convert them")
    tensors = {checkpoint.short(name).replace("midlayer.", "layers.0."): tensor
               for file in files for name, tensor in open_tensors(file).items()}
    return {name: tensor for name, tensor in tensors.items()
            if not name.startswith(UNREAD) and not name.endswith(checkpoint.BUFFERS)}


def take_tokens(path, tensors, model):
    """The tokens of a draft vocabulary, int32 [n] or []. Removes them from tensors, and embeddings
    and an LM head that are the model's."""
    tokens = torch.empty(0, dtype=torch.int64)
    if "d2t" in tensors:  # token - row
        tokens = tensors.pop("d2t").load()
        tokens = tokens + torch.arange(len(tokens))
    V, C = model.config.vocab_size, model.config.n_embd
    expect(((tokens >= 0) & (tokens < V)).all() and len(tokens.unique()) == len(tokens),
           f"{path}: d2t has token ids outside 0..{V - 1}, or one twice; download the heads again")
    for name, rows in (("embed_tokens.weight", model.embed),
                       ("lm_head.weight", model.head.embedding)):
        if name in tensors and tensors[name].shape == (V, C):
            values = tensors[name].load()
            same = lambda ids: torch.equal(rows(ids.to(model.device)).to(values), values[ids])
            if all(map(same, torch.arange(V).split(4096))):
                del tensors[name]
    return tokens.int()
