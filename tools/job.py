"""A request to tools/serve.py and its answer."""

import asyncio
import random
import time
import uuid
from functools import partial
from itertools import zip_longest

from generate import Sampling
from hf.calls import CallReader, Tools, message_of
from hf.tokenizer import encode_prompt
from model import InputError, expect
from tools.logprobs import chat_logprobs, completion_logprobs
from tools.prompts import without_thinking
from tools.request_fields import SAMPLING_FIELDS
from tools.statistics import Statistics


class TooLong(InputError):
    code = "context_length_exceeded"  # as in OpenAI's API


class Job:
    """A request and its results. body: from `request_fields.read`. Raises InputError for what this
    server cannot do."""

    def __init__(self, body, chat, app):
        expect(app.loaded.encoding.template or not chat,
               f"{app.name} has no chat template; use /v1/completions")
        self.body = body
        limit = body.get("max_tokens", app.args.max_new_tokens)
        self.limit = body.get("max_completion_tokens", limit)
        select = lambda *names: {name: body[name] for name in names if name in body}
        sampling = app.loaded.sampling | select(*SAMPLING_FIELDS)
        if sampling.get("seed", -1) == -1:  # no --seed, or a client's "any"
            sampling["seed"] = random.getrandbits(31)
        self.sampling = Sampling(**sampling)
        self.stop = [*app.loaded.stop, *body["stop"], *body["stop_token_ids"]]
        self.encoding = app.loaded.encoding
        self.chat = chat
        grammar = body["grammar"]
        tools = None
        if chat and body["tools"]:
            tools = Tools(self.encoding, body["tools"], **body["tool_choice"] or {},
                          parallel=body["parallel_tool_calls"], answer=grammar and grammar[1])
        self.tools = None if body["tool_choice"] is None else tools  # that may be called
        self.grammar = ("tools", self.tools) if self.tools else grammar
        must_call = self.tools and self.tools.required
        thinks = without_thinking(self.encoding.template) if grammar or must_call else {}
        effort = select("reasoning_effort")
        if "none" in effort.values():
            effort = dict(enable_thinking=False)
        self.template_kwargs = (thinks | effort | body["chat_template_kwargs"]
                                | select("add_generation_prompt", "continue_final_message")
                                | (dict(tools=tools.for_template) if tools else {}))
        self.inputs = [body["messages"]] if chat else body["prompt"]
        self.count = body["n"] * len(self.inputs)  # choices
        expect(self.count <= app.max_active, f"expected up to {app.max_active} sequences (this "
               f"server's --batch-size plus --queue), not {self.count}; send fewer, or a smaller n")
        self.sequences = []  # a `Sequence` for each choice
        self.readers = [self.tools and CallReader(self.tools) for _ in range(self.count)]
        self.statistics = Statistics()
        self.events = asyncio.Queue()  # results of steps, or an exception
        self.loop = asyncio.get_running_loop()
        self.started = time.perf_counter()
        kind = "chat.completion" if chat else "text_completion"
        kind += ".chunk" if chat and body["stream"] else ""
        self.head = dict(id=uuid.uuid4().hex, object=kind, created=int(time.time()), model=app.name,
                         seed=self.sampling.seed)

    def encode(self, app):
        """Encodes the inputs (messages, strings or token ids) as `sequences`."""
        encoding = self.encoding
        capacity = app.engine.decoder.capacity
        grammar = app.loaded.grammars.compile(*self.grammar) if self.grammar else None
        encode = partial(encoding.encode, allowed_special="all")
        encode = encode if self.chat else partial(encode_prompt, encoding)
        for value in self.inputs:
            if self.chat:
                value = encoding.template.render(value, **self.template_kwargs)
            if isinstance(value, str):
                value = encode(value)
            if len(value) >= capacity:
                # begins with OpenAI's sentence, by which clients know that they must shorten it
                raise TooLong(f"This model's maximum context length is {capacity} tokens. However, "
                              f"your messages resulted in {len(value)} tokens; shorten them to "
                              f"{capacity - 1}, or start the server with a larger --context")
            own = grammar and grammar.for_prompt(value)
            limit = min(self.limit, capacity - len(value))
            for _ in range(self.body["n"]):
                self.sequences.append(app.engine.sequence_class(
                    app.loaded.model.config, value, limit, self.sampling, self.stop,
                    len(self.sequences), encoding, own, self.body["top_logprobs"]))

    async def choices(self):
        """Yields the results of steps: (a choice, whole or the next part of a stream, the field
        clover beside it if the request asks for steps)."""
        shown = self.tools.tokens.values() if self.tools else ()
        streams = [sequence.stream or self.encoding.stream(
                       self.stop, shown, sequence.grammar and sequence.grammar.begin)
                   for sequence in self.sequences]
        left = self.count
        started = set()
        while left:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            index, tokens, pieces, ended, record, values = event
            pieces = pieces or [streams[index].piece(token) for token in tokens]
            offsets = [offset for offset, _ in pieces]
            pieces = [text for _, text in pieces]
            if ended:
                pieces[-1:] = ["".join(pieces[-1:]) + streams[index].finish()]
                left -= 1
            parts = self.read(index, pieces, tokens, ended)
            logprobs = self.logprobs(tokens, values, offsets)
            steps = dict(clover=dict(tokens=pieces) | record) if record else {}
            yield self.choice(index, parts, ended, logprobs, index not in started), steps
            started.add(index)

    def read(self, index, pieces, tokens, ended):
        """The parts of a choice's next text, as from `CallReader.feed`."""
        reader = self.readers[index]
        if not reader:
            return [("text", "".join(pieces), 0)]
        found = [part for piece, token in zip_longest(pieces, tokens)
                 for part in reader.feed(piece or "", token)]
        return found + reader.finish() if ended else found

    def logprobs(self, tokens, values, offsets):
        """The field logprobs of a choice, or None. offsets: of the tokens in its text."""
        if self.body["top_logprobs"] is None:
            return None
        if self.chat:
            return chat_logprobs(self.encoding, tokens, values)
        return completion_logprobs(self.encoding, tokens, values, offsets)

    def choice(self, index, parts, ended, logprobs, first):
        role = dict(role="assistant") if first else {}
        said = message_of(parts, self.body["stream"])
        text = said["content"]
        message = {"delta" if self.body["stream"] else "message": role | said}
        if ended == "stop" and self.tools and self.readers[index].is_complete:
            ended = "tool_calls"
        error = dict(error=self.sequences[index].error) if ended == "error" else {}
        return dict(index=index, finish_reason=ended, logprobs=logprobs) | error | (
            message if self.chat else dict(text=text))

    def usage(self):
        """The fields usage and speculation of a response."""
        counted = self.statistics
        prompt = sum(len(sequence.prompt) for sequence in self.sequences[::self.body["n"]])
        emitted = sum(len(sequence.tokens) for sequence in self.sequences)
        guessed = counted.accepted
        details = dict(accepted_prediction_tokens=guessed.total())
        cached = sum(sequence.cached for sequence in self.sequences[::self.body["n"]])
        usage = dict(prompt_tokens=prompt, completion_tokens=emitted,
                     total_tokens=prompt + emitted, completion_tokens_details=details,
                     prompt_tokens_details=dict(cached_tokens=cached))
        return dict(usage=usage, speculation=dict(
            steps=counted.steps, guessed=guessed,
            tokens_per_step=round(emitted / max(counted.steps, 1), 3)))
