"""What a request of OpenAI's form may ask for, and the form of the answers to it."""

import asyncio
import json
import time
import uuid
from functools import partial

from starlette.exceptions import HTTPException

from generate import Output, Sampling
from hf import expect
from hf.chat import SAMPLING
from model import InputError, check

MAX_BODY = 4 * 2**20  # bytes of a request
MAX_STOPS = 16        # its stop texts
FIELDS = dict(stream=bool, stream_options=dict, stop=str | list, show_steps=bool)
REFUSED = ("logprobs", "top_logprobs", "tools", "functions", "logit_bias", "presence_penalty",
           "frequency_penalty", "audio", "best_of", "suffix", "echo")
REASONS = dict(stop="stop", length="length", context="length")  # by `Sequence.ended`


class Job:
    """A request: what it asks for, checked, and what came of it. Raises InputError."""

    def __init__(self, body, chat, session, model):
        for name in REFUSED:
            expect(not body.get(name), f"{name} is not supported; leave it out")
        for name, kind in FIELDS.items():
            expect(isinstance(body.get(name), kind | None),
                   f"{name} must be of type {getattr(kind, '__name__', kind)}")
        expect(body.get("draft") in (None, "none"), 'draft must be "none", or left out')
        body = {name: value for name, value in body.items() if value is not None}
        stop = body.get("stop", [])
        stop = [stop] if isinstance(stop, str) else stop
        expect(len(stop) <= MAX_STOPS, f"stop may have {MAX_STOPS} texts, not {len(stop)}")
        self.stop = [*session.stop, *stop]
        given = {name: body[name] for name in (*SAMPLING, "seed") if name in body}
        self.sampling = Sampling(**session.sampling | given)
        self.limit = body.get("max_completion_tokens",
                              body.get("max_tokens", session.args.max_new_tokens))
        check("max_tokens", self.limit, 1, 2**31, whole=True)
        self.n = body.get("n", 1)
        check("n", self.n, 1, 128, whole=True)
        self.chat = chat
        self.texts = read_messages(body) if chat else read_prompts(body)  # of each, n choices
        self.count = self.n * len(self.texts)
        self.prompts = []  # token ids, of each choice
        self.stream = body.get("stream")
        self.usage = body.get("stream_options", {}).get("include_usage")  # after a stream
        self.show_steps = body.get("show_steps")
        self.plain = body.get("draft") == "none"  # steps in which no other text runs draft nothing
        self.output = Output()
        self.events = asyncio.Queue()  # what steps bring, or an exception
        self.loop = asyncio.get_running_loop()
        self.began = time.perf_counter()
        kind = "chat.completion" if chat else "text_completion"
        kind += ".chunk" if chat and self.stream else ""
        self.head = dict(id=uuid.uuid4().hex, object=kind, created=int(time.time()), model=model)

    async def parts(self, encoding):
        """Yields what steps bring: (which text, its tokens as texts, why it ended, more)."""
        stops = [stop for stop in self.stop if isinstance(stop, str)]
        streams = [encoding.stream(stops) for _ in range(self.count)]
        left = self.count
        while left:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            index, tokens, shown, ended = event
            pieces = ["" if t in self.stop else streams[index].feed([t]) for t in tokens]
            if ended:
                pieces[-1] += streams[index].finish()
                left -= 1
            yield index, pieces, ended, shown

    def answer(self, choices, **more):
        """The object of an answer, or of a part of one that is streamed."""
        return self.head | dict(choices=choices) | more

    def choice(self, index, text, ended, first=True):
        role = dict(role="assistant") if first else {}
        message = {"delta" if self.stream else "message": role | dict(content=text)}
        return dict(index=index, finish_reason=REASONS.get(ended), logprobs=None) | (
            message if self.chat else dict(text=text))

    def cost(self):
        """What the texts took: tokens, and how many of them were guessed."""
        prompt = sum(len(sequence.prompt) for sequence in self.output.sequences[::self.n])
        new = self.output.emitted
        return dict(usage=dict(prompt_tokens=prompt, completion_tokens=new,
                               total_tokens=prompt + new),
                    speculation=dict(steps=self.output.steps, guessed=self.output.accepted,
                                     tokens_per_step=round(self.output.tokens_per_step, 3)))


def read_messages(body):
    """[the conversation]; a content of several parts of text is joined."""
    text = lambda content: (content if isinstance(content, str)
                            else "".join(part["text"] for part in content))
    try:
        messages = [dict(role=message["role"], content=text(message["content"]))
                    for message in body["messages"]]
    except (KeyError, TypeError):
        messages = []
    expect(messages and all(isinstance(message["role"], str) for message in messages),
           "messages must be a list of objects with a role and a content, both of them texts")
    return [messages]


def read_prompts(body):
    texts = body.get("prompt")
    texts = [texts] if isinstance(texts, str) else texts
    expect(isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts),
           "prompt must be a text or a list of texts")
    return texts


async def read_object(request):
    """The JSON object that a request holds."""
    length = int(request.headers.get("content-length", 0))
    body = b""
    async for part in request.stream():
        body += part
        if max(length, len(body)) > MAX_BODY:
            raise HTTPException(413, f"a request may have {MAX_BODY} bytes; send a shorter one")
    try:
        value = json.loads(body, parse_constant=partial(expect, False))  # NaN
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not valid JSON: {error}") from None
    expect(isinstance(value, dict), "the body must be a JSON object")
    return value


async def until_gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


def as_error(message, status):
    """OpenAI's form of an error."""
    text = message.encode(errors="replace").decode()  # it may quote a lone surrogate
    kind = "invalid_request_error" if status < 500 else "server_error"
    return dict(error=dict(message=text[:1000], type=kind, param=None, code=None))


def as_event(value):
    return f"data: {json.dumps(value)}\n\n"


async def chain(first, rest):
    yield first
    async for item in rest:
        yield item
