"""An OpenAI-compatible server with a chat page.

    python -m tools.serve --model smollm2 --port 8000

The event loop reads requests and writes responses; one thread owns the engine. A request's output
does not depend on other requests: it equals that of `generate()` with the same arguments."""

if __name__ == "__main__":  # before torch is imported, so that a mistyped flag fails at once
    from tools.flags import parse_serve
    args = parse_serve()

import asyncio
import gc
import hmac
import json
import os
import queue
import random
import re
import socket
import sys
import threading
import time
import traceback
import uuid
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from tqdm import tqdm

from backends import cpu_library, tensor_parallel
from backends.capture import capture_all
from common.values import warn
from generate import Sampling
from hf.calls import CallReader, Tools, message_of
from hf.paths import SMOLLM2, find_model
from hf.tokenizer import encode_prompt
from model import InputError, expect
from tools import fields
from tools.errors import command, error_line
from tools.load import load, make_engine
from tools.logprobs import chat_logprobs, completion_logprobs
from tools.metrics import Metrics
from tools.printer import step_record
from tools.prompts import without_thinking
from tools.statistics import Statistics

PATIENCE = 30         # seconds for a body to arrive, a client to read, sequences to end on SIGTERM
KEEP_ALIVE = 75       # seconds an idle connection stays open: longer than clients reuse one
# a reserved name, also as containers see this machine, or an IP address: no site can have these
LOCAL = r"([\w-]+\.)*localhost|host\.(docker|containers)\.internal|[\d.]+|\[[\da-f:.]+\]"
MAX_BODY = 4 * 2**20  # bytes of a request
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not buffer


class TooLong(InputError):
    code = "context_length_exceeded"  # as in OpenAI's API


class Job:
    """A request and its results. body: from `fields.read`. Raises InputError for what this server
    cannot do."""

    def __init__(self, body, chat, app):
        expect(app.loaded.encoding.template or not chat,
               f"{app.name} has no chat template; use /v1/completions")
        self.body = body
        limit = body.get("max_tokens", app.args.max_new_tokens)
        self.limit = body.get("max_completion_tokens", limit)
        select = lambda *names: {name: body[name] for name in names if name in body}
        sampling = app.loaded.sampling | select(*fields.SAMPLING_FIELDS)
        if sampling.get("seed", -1) == -1:  # no --seed, or a client's "any"
            sampling["seed"] = random.getrandbits(31)
        self.sampling = Sampling(**sampling)
        self.stop = [*app.loaded.stop, *body["stop"], *body["stop_token_ids"]]
        self.encoding = app.loaded.encoding
        self.chat = chat
        tools = Tools(self.encoding, body["tools"], **body["tool_choice"] or {},
                      parallel=body["parallel_tool_calls"]) if chat and body["tools"] else None
        self.tools = None if body["tool_choice"] is None else tools  # that may be called
        self.grammar = ("tools", self.tools) if self.tools else body["grammar"]
        may_think = not self.grammar or (self.tools and not self.tools.required)
        thinks = {} if may_think else without_thinking(self.encoding.template)
        self.template_kwargs = (thinks | body["chat_template_kwargs"]
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

    async def parts(self):
        """Yields the results of steps: (index of the choice, text of each new token, the same as
        parts of text and calls, why the sequence ended or None, `step_record` or None, the field
        logprobs)."""
        shown = self.tools.tokens.values() if self.tools else ()
        streams = [self.encoding.output_stream(self.stop, shown) for _ in range(self.count)]
        hidden = [sequence.grammar and sequence.grammar.begin  # text up to this token
                  for sequence in self.sequences]
        lengths = [0] * self.count  # of the texts so far
        left = self.count
        while left:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            index, tokens, ended, record, values = event
            pieces = []
            offsets = []
            for token in tokens:
                offsets.append(lengths[index] + len(streams[index].held))
                is_hidden = hidden[index] is not None
                pieces.append("" if is_hidden else streams[index].feed([token]))
                lengths[index] += len(pieces[-1])
                if token == hidden[index]:
                    hidden[index] = None
            if ended:
                pieces[-1:] = ["".join(pieces[-1:]) + streams[index].finish()]
                left -= 1
            parts = self.read(index, pieces, tokens, ended)
            yield index, pieces, parts, ended, record, self.logprobs(tokens, values, offsets)

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

    def choice(self, index, parts, ended, logprobs, first=True):
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
        usage = dict(prompt_tokens=prompt, completion_tokens=emitted,
                     total_tokens=prompt + emitted, completion_tokens_details=details)
        return dict(usage=usage, speculation=dict(
            steps=counted.steps, guessed=guessed,
            tokens_per_step=round(counted.tokens_per_step, 3)))


def host_name(address):
    """host:port without the port, in lower case."""
    return re.sub(r":\d*$", "", address.lower())


async def read_object(request):
    """The body of a request, a JSON object."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"the body has over {MAX_BODY} bytes; send a shorter one")
    try:
        value = json.loads(body, parse_constant=partial(expect, False))  # no NaN
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not valid JSON: {error}") from None
    expect(isinstance(value, dict), "the body must be a JSON object")
    return value


class Worker(threading.Thread):
    """The thread that owns the engine. Puts the results of steps into the `events` of jobs."""

    def __init__(self, engine):
        super().__init__(daemon=True)
        self.engine = engine
        self.tree_size = engine.policy.tree_size  # unless drafting is off
        self.jobs = {}  # sequence -> its Job
        self.calls = queue.SimpleQueue()  # functions to run between two steps
        self.metrics = Metrics(cpu_library.instructions(engine.decoder.device))

    def run(self):
        try:
            while True:
                while not (self.engine.busy and self.calls.empty()):  # idle: wait for a call
                    self.calls.get()()
                try:
                    self.step()
                except Exception as error:  # such as out of memory
                    self.reset(error)
        finally:  # `run` has queued sys.exit, or the GPU is lost: even `clear` failed
            for job in set(self.jobs.values()):
                self.send(job, RuntimeError("the engine has ended"))

    def step(self):
        running = self.engine.running.values() or self.jobs
        plain = all("draft" in self.jobs[sequence].body for sequence in running)
        self.engine.policy.tree_size = 1 if plain else self.tree_size
        with_trees = any(job.body["show_steps"] for job in self.jobs.values())
        for step in self.engine.step(with_trees):
            sequence = step.sequence
            job = self.jobs[sequence]
            if not job.statistics.steps:
                self.metrics.first_token(time.perf_counter() - job.started)
            self.metrics.statistics.count(step)
            job.statistics.count(step)
            record = step_record(step, job.encoding.decode) if job.body["show_steps"] else None
            streams = job.body["stream"]
            if streams or sequence.ended:  # otherwise there is no need to wake the event loop
                new = step if streams else sequence
                self.send(job, (sequence.index, new.tokens, sequence.ended, record, new.logprobs))
            if sequence.ended:
                del self.jobs[sequence]

    def send(self, job, event):
        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(job.events.put_nowait, event)

    def add(self, job):
        try:
            for sequence in job.sequences:
                self.engine.queue(sequence)
                self.jobs[sequence] = job
        except Exception as error:
            self.cancel(job)
            self.send(job, error)

    def cancel(self, job):
        for sequence in job.sequences:
            self.engine.cancel(sequence)
            self.jobs.pop(sequence, None)

    def reset(self, error):
        """Fails the jobs with a sequence in the step that raised an error; others stay queued."""
        waiting = list(self.engine.waiting)
        self.engine.clear()
        for job in {self.jobs[sequence] for sequence in self.jobs.keys() - set(waiting)}:
            self.cancel(job)
            self.send(job, error)
        self.engine.waiting.extend(sequence for sequence in waiting if sequence in self.jobs)


class App:
    """The request handlers. `asgi` is the ASGI application."""

    def __init__(self, args, loaded, context):
        """context: the most tokens of a sequence, prompt included."""
        file = Path(args.model)
        self.args = args
        self.loaded = loaded
        grammars = []
        if find_spec("llguidance"):
            try:
                grammars = [loaded.grammars]  # else requests would wait for this
            except InputError as error:
                warn(f"no structured output: {error}")
        self.engine = make_engine(args, loaded, args.batch_size, context, guided=bool(grammars))
        if self.engine.decoder.pool is not None:  # else requests would wait for captures
            for guided in (False, True)[:1 + len(grammars)]:
                progress = partial(tqdm, desc="capturing steps", leave=False)
                capture_all(self.engine, progress, guided)
        name = os.path.basename(os.path.abspath(file))  # as it was given: links are not followed
        self.name = args.name or ("smollm2" if file.name == SMOLLM2 else name)
        self.max_active = args.batch_size + args.queue
        self.active = 0  # sequences running or waiting
        self.worker = Worker(self.engine)
        self.worker.start()
        route = lambda method, path, handler: Route(path, partial(self.guard, handler),
                                                    methods=[method])
        starlette = Starlette(
            routes=[route("GET", "/", self.page), route("GET", "/health", self.health),
                    route("GET", "/metrics", self.metrics), route("GET", "/v1/models", self.models),
                    route("GET", "/v1/models/{name:path}", self.models),
                    route("POST", "/v1/chat/completions", partial(self.complete, True)),
                    route("POST", "/v1/completions", partial(self.complete, False))],
            exception_handlers=dict.fromkeys((InputError, HTTPException, Exception), self.refuse))
        without_slash = lambda scope, *rest: starlette(
            scope | dict(path=scope["path"].rstrip("/") or "/"), *rest)
        self.asgi = CORSMiddleware(without_slash, args.allow_origin, ("GET", "POST"), ("*",))

    async def guard(self, handler, request):
        """Calls a handler if the request has the API key or, without one, is of no other site."""
        path = request.url.path
        if self.args.api_key and path not in ("/", "/health"):
            self.check_key(request.headers.get("authorization", ""))
        if not self.args.api_key and path != "/health":
            self.check_site(request)
        return await handler(request)

    def check_key(self, header):
        scheme, _, key = header.partition(" ")
        key = key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if not hmac.compare_digest(key, self.args.api_key.encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    def check_site(self, request):
        """Refuses what a page of another site can send: a request under a name that its owner made
        an alias of this address (DNS rebinding), or one that browsers send without asking us."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        own = f"{socket.gethostname().partition('.')[0].lower()}.local"  # not others' .local names
        name = host_name(host)
        if not (re.fullmatch(LOCAL, name) or name in (own, *self.args.allow_host)):
            raise HTTPException(403, f"the Host {host!r} is not localhost, {own}, an IP address "
                                "or an --allow-host of this server")
        content_type, *_ = request.headers.get("content-type", "").split(";")
        if request.method == "POST" and content_type.strip().lower() != "application/json":
            raise HTTPException(415, "send the header Content-Type: application/json")
        if origin is None or {origin, "*"} & {*self.args.allow_origin}:
            return
        address = origin.partition("://")[2]
        if address != host and host_name(address) not in self.args.allow_host:
            raise HTTPException(403, f"the Origin {origin!r} is not an --allow-origin of this "
                                "server")

    async def refuse(self, request, error):
        status = getattr(error, "status_code", 400 if isinstance(error, InputError) else 500)
        self.worker.metrics.responses[status] += 1
        return JSONResponse(self.as_error(error, status), status, getattr(error, "headers", None))

    def as_error(self, error, status=500):
        """An error object as in OpenAI's API. Hides the model's path."""
        message = getattr(error, "detail", None) or error_line(error)
        message = message or f"{type(error).__name__} in a step; see the server's log"
        message = message.replace(str(find_model(self.args.model)), self.name)
        message = message.encode(errors="replace").decode()  # it may quote a lone surrogate
        kind = "invalid_request_error" if status < 500 else "server_error"
        return dict(error=dict(message=message[:1000], type=kind, param=None,
                               code=getattr(error, "code", None)))

    def check_name(self, name):
        if name not in (None, self.name):
            raise HTTPException(404, f"this server's model is {self.name!r}, not {name!r}")

    async def complete(self, chat, request):
        try:
            body = await asyncio.wait_for(read_object(request), PATIENCE)
        except (asyncio.TimeoutError, ClientDisconnect):
            raise HTTPException(408, "the request body did not arrive in time") from None
        self.check_name(body.get("model"))
        # a thread, as a large body takes long to check
        job = Job(await asyncio.to_thread(fields.read, body, chat), chat, self)
        if not self.worker.is_alive():
            raise HTTPException(503, "the engine cannot continue; restart the server")
        if self.active + job.count > self.max_active:
            raise HTTPException(429, "the queue is full; try again", {"retry-after": "1"})
        return partial(self.respond, job)

    async def respond(self, job, scope, receive, send):
        """Sends the response, unless the client disconnects."""
        self.active += job.count
        timed_send = lambda message: asyncio.wait_for(send(message), PATIENCE)
        answer = asyncio.create_task(self.answer(job, scope, receive, timed_send))
        disconnect = asyncio.create_task(receive())  # the only message after a body
        try:
            await asyncio.wait((answer, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            self.active -= job.count
            answer.cancel()
            disconnect.cancel()
            self.worker.calls.put(partial(self.worker.cancel, job))

    async def answer(self, job, *asgi):
        """Runs a job and sends its output, as a stream or at once."""
        await asyncio.to_thread(self.encode, job)
        self.worker.calls.put(partial(self.worker.add, job))
        if job.body["stream"]:
            response = StreamingResponse(self.events(job), headers=STREAM_HEADERS,
                                         media_type="text/event-stream")
        else:
            choices = [None] * job.count
            async for index, _, parts, ended, _, values in job.parts():  # once for each choice
                choices[index] = job.choice(index, parts, ended, values)
            response = JSONResponse(job.head | dict(choices=choices) | job.usage())
        self.worker.metrics.responses[200] += 1
        await response(*asgi)

    def encode(self, job):
        """Encodes the inputs (messages, strings or token ids) as job.sequences."""
        encoding = self.loaded.encoding
        grammar = self.loaded.grammars.compile(*job.grammar) if job.grammar else None
        encode = partial(encoding.encode, allowed_special="all")
        encode = encode if job.chat else partial(encode_prompt, encoding)
        for value in job.inputs:
            if job.chat:
                value = encoding.template.render(value, **job.template_kwargs)
            if isinstance(value, str):
                self.check_length(encoding.least_tokens(value), " or more")
                value = encode(value)
            self.check_length(len(value))
            own = grammar and grammar.for_prompt(value)
            limit = min(job.limit, self.engine.decoder.capacity - len(value))
            for _ in range(job.body["n"]):
                job.sequences.append(self.engine.sequence_class(
                    self.loaded.model.config, value, limit, job.sampling, job.stop,
                    len(job.sequences), encoding, own, job.body["top_logprobs"]))

    def check_length(self, tokens, or_more=""):
        longest = self.engine.decoder.capacity - 1
        if tokens > longest:
            # begins with OpenAI's sentence, by which clients know that they must shorten a prompt
            raise TooLong(f"This model's maximum context length is {longest + 1} tokens. However, "
                          f"your messages resulted in {tokens} tokens{or_more}; shorten them to "
                          f"{longest}, or start the server with a larger --context")

    async def events(self, job):
        """The server-sent events of a stream."""
        line = lambda value: f"data: {json.dumps(value)}\n\n"
        started = set()
        try:
            async for index, pieces, parts, ended, record, values in job.parts():
                choice = job.choice(index, parts, ended, values, index not in started)
                started.add(index)
                steps = dict(clover=dict(tokens=pieces) | record) if record else {}
                yield line(job.head | dict(choices=[choice]) | steps)
            if job.body["stream_options"].get("include_usage"):
                yield line(job.head | dict(choices=[]) | job.usage())
        except Exception as error:
            traceback.print_exc()
            yield line(self.as_error(error))
        yield "data: [DONE]\n\n"

    async def page(self, request):
        policy = {"content-security-policy": "connect-src 'self'; default-src 'unsafe-inline'"}
        return FileResponse(Path(__file__).with_name("page.html"), headers=policy)

    async def health(self, request):
        alive = self.worker.is_alive()
        return JSONResponse(dict(status="ok" if alive else "failed"), 200 if alive else 503)

    async def models(self, request):
        name = request.path_params.get("name")
        self.check_name(name)
        chat = self.loaded.encoding.template is not None
        model = dict(id=self.name, object="model", created=0, owned_by="clover", chat=chat)
        return JSONResponse(dict(object="list", data=[model]) if name is None else model)

    async def metrics(self, request):
        running = len(self.engine.running) + bool(self.engine.prefilling)
        text = self.worker.metrics.text(self.name, running, len(self.engine.waiting))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def listen(host, port):
    """A listening socket; on :: it also accepts IPv4."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else answers wait for 40 ms
    return listener


@command()
def main(args):
    """Serves until SIGTERM or Ctrl-C."""
    try:
        listener = listen(args.host, args.port)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {args.host}, port {args.port}: {error}") from None
    group = tensor_parallel.start(args.device)
    expect(group.size == 1, "the server is one process; start it without torchrun")
    loaded = load(args, group)
    context = min(args.context or 4096, loaded.model.config.block_size)
    app = App(args, loaded, context)
    gc.freeze()  # else each full collection scans all that was loaded
    times = dict(timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=PATIENCE)
    server = Server(uvicorn.Config(app.asgi, lifespan="off", log_level="warning", **times))
    host, port, *_ = listener.getsockname()
    host = f"[{host}]" if ":" in host else host
    print(f"{app.name}: http://{host}:{port}", file=sys.stderr, flush=True)
    server.run(sockets=[listener])
    app.worker.calls.put(sys.exit)  # ends the thread after its current step
    app.worker.join(PATIENCE)


class Server(uvicorn.Server):
    def handle_exit(self, number, frame):
        """On a signal, refuses new requests and lets running ones end; on a second, exits."""
        if self.should_exit:
            os._exit(128 + number)
        self.should_exit = True


if __name__ == "__main__":
    main(args)
