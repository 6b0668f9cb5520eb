"""llama.cpp beside ours, for `python -m bench decode --llama-cpp`: it decodes the same file and
prompts on as many threads, in the server of the package xllamacpp, called without HTTP."""

import time
from functools import partial
from types import SimpleNamespace

import torch

from generate import Output
from model import InputError

PLAIN = "llama.cpp", None
DRAFTERS = "", " ngram_simple", " ngram_cache", " ngram_map_k"  # ngram_mod recalls earlier rounds


def llama_cpp_ways(path, device, capacity, temperature, stop):
    """{(drafter, None): a function of prompts and new tokens} for each of DRAFTERS, by a server of
    its own. Raises InputError without the package."""
    try:
        import xllamacpp
    except ImportError as error:
        raise InputError(f"--llama-cpp needs the package xllamacpp ({error}); pip install "
                         "--no-deps xllamacpp") from None
    request = dict(temperature=temperature, samplers=["temperature"], seed=0, ignore_eos=not stop)
    ways = {}
    for drafter in DRAFTERS:
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.verbosity = 0
        params.n_ctx = capacity
        params.n_gpu_layers = 0 if device.type == "cpu" else -1
        params.cpuparams.n_threads = torch.get_num_threads()
        params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.cache_prompt = False
        params.cache_ram_mib = 0  # of earlier prompts
        kind = f"COMMON_SPECULATIVE_TYPE_{drafter.strip().upper() or 'NONE'}"
        params.speculative.types = [xllamacpp.common_speculative_type[kind]]
        params.speculative.ngram_map_k.size_n = 3  # a match of 12, the default, is rare in a chat
        params.speculative.ngram_map_k.size_m = 4
        ways[f"llama.cpp{drafter}", None] = partial(decode, xllamacpp.Server(params), request)
    return ways


def decode(server, request, texts, new):
    """An Output of what the server made of each prompt, after a few tokens that wake its threads.
    It knows how many tokens there are, not which."""
    output = Output(tree_size=None)
    server.handle_completions(request | dict(prompt=texts[0], n_predict=min(8, new)))
    started = time.perf_counter()
    for prompt in texts:
        answer = server.handle_completions(request | dict(prompt=prompt, n_predict=new))
        if "error" in answer:
            raise InputError(f"llama.cpp: {answer['error']['message']}")
        n = answer["timings"]["predicted_n"]
        output.sequences.append(SimpleNamespace(tokens=[None] * n))
        output.steps += n - answer["timings"].get("draft_n_accepted", 0)
    output.seconds = time.perf_counter() - started
    return output
