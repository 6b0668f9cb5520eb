"""llama.cpp beside ours, for `python -m bench decode --llama-cpp`: llama-cpp-python, compiled for
this CPU, decodes the same file and prompts on as many threads."""

import time
from functools import partial

import numpy as np
import torch

from bench import Measured
from model import InputError, expect

PLAIN = "llama.cpp", None
INSTALL = "pip install --no-binary llama-cpp-python llama-cpp-python"  # compiles for this CPU
N_BATCH = 512  # most tokens of one call


def llama_cpp_ways(path, device, batch_size, capacity, temperature, stop):
    """{(drafter, None): function of prompts and new tokens -> `Measured`}: plainly, and with the
    package's prompt lookup of 2 tokens, which its authors advise for CPUs. capacity: tokens of a
    sequence."""
    try:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except ImportError as error:
        raise InputError(f"--llama-cpp needs llama-cpp-python ({error}); {INSTALL}") from None
    model = LlamaCpp(llama_cpp, path, device, batch_size, capacity, temperature)
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=2)
    return {PLAIN: partial(decode, model, stop, lambda tokens: []),
            ("llama.cpp lookup", None): partial(
                decode, model, stop, lambda tokens: lookup(np.array(tokens, np.intc)).tolist())}


class LlamaCpp:
    """A model and a context of `batch_size` sequences, by the C functions."""

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
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        self.context = self.model and api.llama_init_from_model(self.model, params)
        expect(self.context, f"{path}: llama.cpp cannot load it; see what it printed")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(N_BATCH, 0, 1)
        self.sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        last = api.llama_sampler_init_greedy()
        if temperature:
            api.llama_sampler_chain_add(self.sampler, api.llama_sampler_init_temp(temperature))
            last = api.llama_sampler_init_dist(0)
        api.llama_sampler_chain_add(self.sampler, last)

    def __del__(self):  # each temperature and batch size has a model of its own
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def evaluate(self, rows):
        """Runs tokens (sequence, token, position), and keeps the logits of all in the last call."""
        for first in range(0, len(rows), N_BATCH):
            part = rows[first:first + N_BATCH]
            self.batch.n_tokens = len(part)
            for i, (sequence, token, position) in enumerate(part):
                self.batch.token[i] = token
                self.batch.pos[i] = position
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = sequence
                self.batch.logits[i] = len(rows) <= N_BATCH or first + i == len(rows) - 1
            if self.api.llama_decode(self.context, self.batch):
                raise InputError(f"llama.cpp refuses {len(part)} tokens")

    def read(self, sequence, prompt):
        """The first new token after a prompt."""
        self.evaluate([(sequence, token, i) for i, token in enumerate(prompt[:-1])])
        self.evaluate([(sequence, prompt[-1], len(prompt) - 1)])
        return self.sample(0)

    def sample(self, row):
        return self.api.llama_sampler_sample(self.sampler, self.context, row)

    def forget(self, sequence, start):
        """Takes the rows from `start` on out of the cache."""
        self.api.llama_memory_seq_rm(self.memory, sequence, start, -1)


def decode(model, stop, draft, prompts, new):
    """`Measured`, after a few tokens that wake the threads. draft: function of a text's tokens ->
    guesses of those that follow."""
    decode_batch(model, stop, draft, prompts[:model.batch_size], min(8, new))
    started = time.perf_counter()
    batches = [prompts[i:i + model.batch_size] for i in range(0, len(prompts), model.batch_size)]
    made, steps, seconds = zip(*(decode_batch(model, stop, draft, batch, new) for batch in batches))
    tokens = [sequence for batch in made for sequence in batch]
    return Measured(tokens, sum(steps) + len(prompts), time.perf_counter() - started,
                    sum(map(len, tokens)) - len(prompts), sum(steps), sum(seconds),
                    sum(map(len, prompts)))


def decode_batch(model, stop, draft, prompts, new):
    """-> new tokens of each prompt; steps, summed over them, and seconds after the prompts' own"""
    for i in range(len(prompts)):
        model.forget(i, 0)
    made = [[model.read(i, prompt)] for i, prompt in enumerate(prompts)]
    goes_on = lambda i: len(made[i]) < new and made[i][-1] not in stop
    began, steps = time.perf_counter(), 0
    while active := list(filter(goes_on, range(len(prompts)))):
        guesses = {i: draft(prompts[i] + made[i])[:new - len(made[i]) - 1] for i in active}
        model.evaluate([(i, token, len(prompts[i]) + len(made[i]) - 1 + j) for i in active
                        for j, token in enumerate([made[i][-1], *guesses[i]])])
        row = 0
        for i in active:
            for j, guess in enumerate([*guesses[i], None]):
                made[i].append(model.sample(row + j))
                if made[i][-1] != guess or not goes_on(i):
                    break
            row += 1 + len(guesses[i])
            model.forget(i, len(prompts[i]) + len(made[i]) - 1)
        steps += len(active)
    return made, steps, time.perf_counter() - began
