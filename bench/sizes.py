"""The sizes of published models. Loads no torch, so that the command line can name them."""

FIELDS = "vocab_size n_layer n_head n_kv_head head_size n_embd n_inner".split()
LLAMA = dict(block_size=4096, rope_theta=500000.0, tied=False)
SMOL = LLAMA | dict(tied=True)
QWEN = LLAMA | dict(tied=True, qkv_bias=True, family="qwen2")
SIZES = {  # name: (the model, its FIELDS, the rest of its GPTConfig)
    "135m": ("SmolLM2 135M", (49152, 30, 9, 3, 64, 576, 1536), SMOL),
    "360m": ("SmolLM2 360M", (49152, 32, 15, 5, 64, 960, 2560), SMOL),
    "0.5b": ("Qwen2.5 0.5B", (151936, 24, 14, 2, 64, 896, 4864), QWEN),
    "1.5b": ("Qwen2.5 1.5B", (151936, 28, 12, 2, 128, 1536, 8960), QWEN),
    "7b": ("Llama 2 7B", (32000, 32, 32, 32, 128, 4096, 11008), LLAMA),
    "8b": ("Llama 3 8B", (128256, 32, 32, 8, 128, 4096, 14336), LLAMA),
    "70b": ("Llama 3 70B", (128256, 80, 64, 8, 128, 8192, 28672), LLAMA),
    "70b-layer": ("a layer of Llama 3 70B", (128256, 1, 64, 8, 128, 8192, 28672), LLAMA),
}


def size_config(name):
    """The GPTConfig of a model in SIZES."""
    from model import GPTConfig
    _, sizes, others = SIZES[name]
    return GPTConfig(**dict(zip(FIELDS, sizes)), **others)
