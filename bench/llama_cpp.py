"""llama.cpp for `python -m bench decode --llama-cpp`: llama-cpp-python, compiled for this CPU,
decodes the same file and prompts with the same number of threads."""

import logging
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from bench.timing import Measured
from model import InputError, expect

INSTALL = "pip install --no-binary llama-cpp-python llama-cpp-python"  # compiles for this CPU
N_BATCH = 512  # prompt tokens per call


def llama_cpp_methods(path, device, batch_size, capacity, temperature, stop):
    """{("llama.cpp", None): function like `decoding.start_decoding`}. capacity: the most tokens of
    a sequence."""
    model = LlamaCpp(import_llama_cpp(), path, device, batch_size, capacity, temperature)
    return {("llama.cpp", None): lambda texts, new: partial(decode, model, stop, new=new)}


def import_llama_cpp():
    """The package. Raises InputError without it."""
    try:
        import llama_cpp
    except ImportError as error:
        raise InputError(f"--llama-cpp needs llama-cpp-python ({error}); {INSTALL}") from None
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # it prints each tensor
    return llama_cpp


class LlamaCpp:
    """A model and a context of `batch_size` sequences, through llama.cpp's C functions."""

    def __init__(self, api, path, device, batch_size, capacity, temperature):
        self.api = api
        self.batch_size = batch_size
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0 if device.type == "cpu" else -1
        self.model = api.llama_model_load_from_file(str(path).encode(), params)
        params = api.llama_context_default_params()
        params.n_ctx = batch_size * capacity
        params.n_seq_max = batch_size
        size = max(N_BATCH, batch_size)
        params.n_batch = params.n_ubatch = size
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        self.context = self.model and api.llama_init_from_model(self.model, params)
        expect(self.context, f"{path}: llama.cpp cannot load it; see its messages above")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(size, 0, 1)
        self.sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        last = api.llama_sampler_init_greedy()
        if temperature:
            api.llama_sampler_chain_add(self.sampler, api.llama_sampler_init_temp(temperature))
            last = api.llama_sampler_init_dist(0)
        api.llama_sampler_chain_add(self.sampler, last)

    def __del__(self):  # each temperature and batch size loads the model again
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def evaluate(self, rows, logits=True):
        """Runs rows (sequence, token, position). logits: whether `sample` will read theirs."""
        self.batch.n_tokens = len(rows)
        for i, (sequence, token, position) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = logits
        if self.api.llama_decode(self.context, self.batch):
            raise InputError(f"llama.cpp cannot decode {len(rows)} tokens; see its messages above")

    def prefill(self, sequence, prompt):
        """Reads a prompt and returns the first new token."""
        self.read(sequence, prompt, 1)
        return self.sample(0)

    def read(self, sequence, tokens, n):
        """Reads tokens; the logits after the last n are kept."""
        rows = [(sequence, token, position) for position, token in enumerate(tokens)]
        for first in range(0, len(rows) - n, N_BATCH):
            self.evaluate(rows[first:min(first + N_BATCH, len(rows) - n)], logits=False)
        self.evaluate(rows[-n:])

    def logits(self, tokens, n):
        """Logits after each of the last n <= N_BATCH tokens of a sequence, float32 [n, V]."""
        self.forget(0, 0)
        self.read(0, tokens, n)
        V = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        rows = [self.api.llama_get_logits_ith(self.context, i) for i in range(n)]
        return np.stack([np.ctypeslib.as_array(row, (V,)) for row in rows])

    def sample(self, row):
        return self.api.llama_sampler_sample(self.sampler, self.context, row)

    def forget(self, sequence, start):
        """Removes the cache rows from `start` on."""
        self.api.llama_memory_seq_rm(self.memory, sequence, start, -1)


def decode(model, stop, prompts, new):
    """Decodes `new` tokens for each prompt; returns a `Measured`."""
    decode_batch(model, stop, prompts[:model.batch_size], min(8, new))  # wakes the threads
    started = time.perf_counter()
    batches = [prompts[i:i + model.batch_size] for i in range(0, len(prompts), model.batch_size)]
    outputs, steps, seconds = zip(*(decode_batch(model, stop, batch, new) for batch in batches))
    sequences = [SimpleNamespace(tokens=output) for batch in outputs for output in batch]
    return Measured(sequences, sum(steps) + len(prompts), seconds=time.perf_counter() - started,
                    decode_seconds=sum(seconds), prompt_tokens=sum(map(len, prompts)))


def decode_batch(model, stop, prompts, new):
    """Returns each prompt's new tokens, and the steps (summed) and seconds after prefill."""
    for i in range(len(prompts)):
        model.forget(i, 0)
    texts = [[*prompt, model.prefill(i, prompt)] for i, prompt in enumerate(prompts)]
    limits = [len(prompt) + new for prompt in prompts]
    goes_on = lambda i: len(texts[i]) < limits[i] and texts[i][-1] not in stop
    started = time.perf_counter()
    steps = 0
    while active := list(filter(goes_on, range(len(prompts)))):
        model.evaluate([(i, texts[i][-1], len(texts[i]) - 1) for i in active])
        for row, i in enumerate(active):
            texts[i].append(model.sample(row))
        steps += len(active)
    seconds = time.perf_counter() - started
    return [text[len(prompt):] for text, prompt in zip(texts, prompts)], steps, seconds
