"""llama.cpp beside ours, for `python -m bench decode --llama-cpp`: the server of the package
xllamacpp, called without HTTP, decodes the same file and prompts on as many threads."""

import time
from functools import partial

import torch

from bench import Measured
from model import InputError

PLAIN = "llama.cpp", None
DRAFTERS = "", " ngram_simple", " ngram_cache", " ngram_map_k"  # ngram_mod recalls earlier rounds


def llama_cpp_ways(path, device, capacity, temperature, stop):
    """{(drafter, None): a function of prompts and new tokens}, each with a server of its own."""
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


def decode(server, request, prompts, new):
    """`Measured` with a server, after a few tokens that wake its threads. Its answers tell how many
    tokens there are, not which."""
    ask = lambda prompt, n: server.handle_completions(request | dict(prompt=prompt, n_predict=n))
    ask(prompts[0], min(8, new))
    started = time.perf_counter()
    answers = [ask(prompt, new) for prompt in prompts]
    seconds = time.perf_counter() - started
    if errors := [answer["error"] for answer in answers if "error" in answer]:
        raise InputError(f"llama.cpp: {errors[0]['message']}")
    tokens = [[None] * answer["timings"]["predicted_n"] for answer in answers]
    accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
    return Measured(tokens, sum(map(len, tokens)) - accepted, seconds)
