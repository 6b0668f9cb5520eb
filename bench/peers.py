"""Other programs beside ours, each where it is installed: the step times of llama.cpp and
transformers on the same random weights, and transformers' `generate` on the same checkpoint.

Both get the model's own weights and dtype, and PREFIX tokens in their caches. A step of theirs is a
forward pass of T more tokens, which leave the cache again. It computes all logits, but neither
drafts nor chooses a token, so it is a little less than a step of ours.
"""

import contextlib
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from backends.tensor_parallel import group_of
from hf.families import hf_config, split_weight
from model import MAX_TREE, InputError, check_memory, free_memory
from tools.timing import PREFIX

COLUMNS = {"llama.cpp, ms": "llama_cpp_ms {:.2f}", "ours over llama.cpp": "llama_cpp_ratio {:.2f}x",
           "transformers, ms": "transformers_ms {:.2f}",
           "transformers over ours": "transformers_ratio {:.2f}x"}
RATIOS = {"llama_cpp": ("step", "llama_cpp"), "transformers": ("transformers", "step")}
GGUF = {  # what a GGUFWriter adds: the field of a GPTConfig
    "vocab_size": "vocab_size", "context_length": "block_size", "block_count": "n_layer",
    "embedding_length": "n_embd", "feed_forward_length": "n_inner", "head_count": "n_head",
    "head_count_kv": "n_kv_head", "key_length": "head_size", "value_length": "head_size",
    "rope_dimension_count": "head_size", "rope_freq_base": "rope_theta",
    "layer_norm_rms_eps": "norm_eps"}


def stored_weights(model):
    """A model's weights as a checkpoint folder holds them: {tensor's name: tensor}, no copies."""
    return {stored: tensor for name, value in model.state_dict().items()
            if not (model.config.tied and name == "head.weight")
            for stored, tensor in split_weight(name, value, model.config).items()}


def write_gguf(model, path):
    """Writes a llama.cpp file without a tokenizer. Matrices keep their dtype; norms and biases are
    float32, as from llama.cpp's own converter. InputError for other families."""
    import gguf
    c = model.config
    if c.family not in ("llama", "qwen2"):
        raise InputError(f"the {c.family} family is not written here; expected llama or qwen2")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, c.family.upper()), c.n_layer)
    writer = gguf.GGUFWriter(path, c.family)
    writer.add_tokenizer_model("none")
    for name, field in GGUF.items():
        getattr(writer, f"add_{name}")(getattr(c, field))
    for name, value in stored_weights(model).items():
        if c.family == "llama" and ("self_attn.q_proj." in name or "self_attn.k_proj." in name):
            pairs = value.view(-1, 2, c.head_size // 2, *value.shape[1:]).transpose(1, 2)
            value = pairs.reshape(value.shape)  # with the two that are rotated together adjacent
        if value.dim() == 1:
            value = value.float()
        raw_dtype = None
        if value.dtype == torch.bfloat16:  # which numpy does not know
            value = value.view(torch.uint8)
            raw_dtype = gguf.GGMLQuantizationType.BF16
        name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(name, value.numpy(), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp on as many threads as torch. Its cache is float16 by default. InputError where
    memory has no room for the file of the weights, which it maps, or it does not load."""
    title = "llama.cpp"
    packages = "llama-cpp-python gguf"

    def __init__(self, model, stack):
        """stack: an ExitStack, which frees what llama.cpp took."""
        import gguf  # noqa: F401, here to be missed before anything is done
        import llama_cpp as lib
        self.lib = lib
        self.vocab_size = model.config.vocab_size
        self.version = f"llama-cpp-python {lib.__version__}"
        LlamaCpp.silence = lib.llama_log_callback(lambda *_: None)  # must outlive all calls
        lib.llama_log_set(LlamaCpp.silence, None)
        lib.llama_backend_init()
        loaded = self.load(model)
        stack.callback(lib.llama_model_free, loaded)
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = PREFIX + MAX_TREE
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self.context = loaded and lib.llama_init_from_model(loaded, settings)
        stack.callback(lib.llama_free, self.context)
        if not self.context:
            raise InputError("it does not load the file that was written for it")
        self.batch = lib.llama_batch_init(PREFIX + MAX_TREE, 0, 1)
        stack.callback(lib.llama_batch_free, self.batch)
        self.fill(range(PREFIX), 0, logits=False)
        self.decode()

    def load(self, model):
        """llama.cpp's own model, None where it does not load."""
        size = sum(p.nbytes for p in model.parameters())
        check_memory("the file of the weights takes", size, free_memory("cpu"), "cpu",
                     "take a smaller size")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = str(Path(folder) / "model.gguf")  # mapped: it outlives its name
            write_gguf(model, path)
            return self.lib.llama_model_load_from_file(path.encode(),
                                                       self.lib.llama_model_default_params())

    def fill(self, tokens, position, logits):
        """Makes the batch these tokens, from a position on; logits: whether it computes theirs."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token % self.vocab_size, position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, logits

    def decode(self):
        if code := self.lib.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode fails with code {code}")
        self.lib.llama_synchronize(self.context)

    def step(self):
        self.decode()
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), 0, PREFIX, -1)

    def body(self, tree_size):
        """A function that runs a step of T tokens, until the next call of this one."""
        self.fill(range(tree_size), PREFIX, logits=True)
        return self.step


def quiet_transformers():
    """transformers without its notes, or ImportError."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


class Transformers:
    """transformers' model of the family, with a DynamicCache, as its generate has by default."""
    title = packages = "transformers"

    @torch.inference_mode()
    def __init__(self, model, stack):
        transformers = quiet_transformers()
        self.version = f"transformers {transformers.__version__}"
        config = transformers.AutoConfig.for_model(**hf_config(model.config, model.dtype))
        kind = getattr(transformers, config.architectures[0])
        self.model = kind.from_pretrained(None, config=config, state_dict=stored_weights(model),
                                          dtype=model.dtype).eval()
        self.cache = transformers.DynamicCache()
        self.decode(torch.arange(PREFIX)[None] % model.config.vocab_size)

    def decode(self, tokens):
        """tokens [1, T] -> logits [1, T, V]; their keys and values go to the cache."""
        return self.model(tokens, past_key_values=self.cache, use_cache=True).logits

    def body(self, tree_size):
        """A function that runs a step of one token; None for a tree, whose mask generate lacks."""
        tokens = torch.zeros(1, 1, dtype=torch.int64)

        def step():
            self.decode(tokens)
            self.cache.crop(-1)
        return step if tree_size == 1 else None


PROGRAMS = {"llama_cpp": LlamaCpp, "transformers": Transformers}


@contextlib.contextmanager
def running(model):
    """Yields ({name: a program that runs the model, on a CPU}, {name: its version, or why it does
    not})."""
    made = {}
    words = {}
    with contextlib.ExitStack() as stack:
        for name, program in PROGRAMS.items():
            try:
                made[name] = program(model, stack)
                words[name] = made[name].version
            except ImportError:
                words[name] = f"not installed (pip install {program.packages})"
            except (InputError, OSError, RuntimeError) as error:  # no room, or a broken library
                words[name] = f"left out: {str(error).splitlines()[0]}"
        yield made, words


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, **flags):
    """transformers' greedy `generate`, one prompt at a time -> what bench.decoding reads of an
    Output, but for the number of steps."""
    texts = []
    start = time.perf_counter()
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=model.device)
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0,
                             do_sample=False, max_new_tokens=max_new_tokens, **flags)
        texts.append(out[0, len(prompt):].tolist())
    seconds = time.perf_counter() - start
    return SimpleNamespace(tokens=texts, seconds=seconds,
                           tokens_per_second=sum(map(len, texts)) / seconds)


def generating(model, folder, temperature, batch_size, prompts):
    """({name: `generate` of the checkpoint, with our dtype and device}, transformers' version, or
    why there are none)."""
    if group_of(model).size > 1 or temperature or batch_size != 1:
        return {}, "measured only on one rank, at temperature 0 and batch size 1"
    try:
        transformers = quiet_transformers()
    except ImportError:
        return {}, "not installed (pip install transformers)"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
    theirs = theirs.to(model.device).eval()
    theirs.generation_config.eos_token_id = None  # no text ends early, as with us
    made = {"transformers": partial(generate, theirs),
            "transformers, prompt lookup": partial(generate, theirs, prompt_lookup_num_tokens=10)}
    for program in made.values():
        program(prompts[:1], 8)  # what only the first call does
    return made, transformers.__version__
