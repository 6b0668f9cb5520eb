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
import re
import socket
import sys
import traceback
from functools import partial
from operator import itemgetter
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from tqdm import tqdm

from backends import tensor_parallel
from backends.capture import capture_all
from common.values import warn
from hf.paths import SMOLLM2, find_model
from model import InputError, expect
from tools import request_fields
from tools.errors import command, error_line
from tools.job import Job
from tools.load import load, make_engine
from tools.printer import model_name
from tools.worker import Worker

PATIENCE = 30         # seconds for a body to arrive, a client to read, sequences to end on SIGTERM
KEEP_ALIVE = 75       # seconds an idle connection stays open: longer than clients reuse one
# a reserved name, also as containers see this machine, or an IP address: no site can have these
LOCAL = r"([\w-]+\.)*localhost|host\.(docker|containers)\.internal|[\d.]+|\[[\da-f:.]+\]"
MAX_BODY = 4 * 2**20  # bytes of a request
# h11: httptools loses the body of a request with `Upgrade: h2c`, as Java's HttpClient sends it
HTTP = dict(http="h11", ws="none", lifespan="off", timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=PATIENCE)
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not buffer


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


class App:
    """The request handlers. `asgi` is the ASGI application."""

    def __init__(self, args, loaded, context):
        """context: the most tokens of a sequence, prompt included."""
        self.args = args
        self.loaded = loaded
        grammars = []
        try:
            grammars = [loaded.grammars]  # else requests would wait for this
        except InputError as error:  # such as without llguidance
            warn(f"no structured output: {error}")
        self.engine = make_engine(args, loaded, args.batch_size, context, guided=bool(grammars))
        if self.engine.decoder.pool is not None:  # else requests would wait for captures
            for guided in (False, True)[:1 + len(grammars)]:
                progress = partial(tqdm, desc="capturing steps", leave=False)
                capture_all(self.engine, progress, guided)
        name = model_name(args)
        self.name = args.name or ("smollm2" if name == SMOLLM2 else name)
        self.max_active = args.batch_size + args.queue
        self.active = 0  # sequences running or waiting
        self.worker = Worker(self.engine)
        self.worker.start()
        route = lambda method, path, handler: Route(path, partial(self.guard, handler),
                                                    methods=[method])
        starlette = Starlette(
            routes=[route("GET", "/", self.page), route("GET", "/health", self.health),
                    route("GET", "/metrics", self.metrics), route("GET", "/models", self.models),
                    route("POST", "/chat/completions", partial(self.complete, True)),
                    route("POST", "/completions", partial(self.complete, False))],
            exception_handlers=dict.fromkeys((InputError, HTTPException, Exception), self.refuse))
        # all paths with or without /v1, since clients differ in what they call the base URL
        short = lambda path: re.sub(r"^/v1(?=/|$)", "", path.rstrip("/")) or "/"
        asgi = lambda scope, *rest: starlette(scope | dict(path=short(scope["path"])), *rest)
        self.asgi = CORSMiddleware(asgi, args.allow_origin, ("GET", "POST"), ("*",),
                                   allow_private_network=True)

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
        without_port = lambda address: re.sub(r":\d*$", "", address.lower())
        own = f"{socket.gethostname().partition('.')[0].lower()}.local"  # not others' .local names
        name = without_port(host)
        if not (re.fullmatch(LOCAL, name) or name in (own, *self.args.allow_host)):
            raise HTTPException(403, f"the Host {host!r} is not localhost, {own}, an IP address "
                                "or an --allow-host of this server")
        content_type, *_ = request.headers.get("content-type", "").split(";")
        if request.method == "POST" and content_type.strip().lower() != "application/json":
            raise HTTPException(415, "send the header Content-Type: application/json")
        if origin is None or {origin, "*"} & {*self.args.allow_origin}:
            return
        address = origin.partition("://")[2]
        if address != host and without_port(address) not in self.args.allow_host:
            raise HTTPException(403, f"the Origin {origin!r} is not an --allow-origin of this "
                                "server")

    async def refuse(self, request, error):
        status = getattr(error, "status_code", 400 if isinstance(error, InputError) else 500)
        return JSONResponse(self.as_error(error, status), status, getattr(error, "headers", None))

    def as_error(self, error, status=500):
        """An error object as in OpenAI's API. Hides the paths of the model and of its chat
        template."""
        message = getattr(error, "detail", None) or error_line(error)
        message = message or f"{type(error).__name__} in a step; see the server's log"
        for path in filter(None, (find_model(self.args.model), self.args.chat_template)):
            name = self.name if path != self.args.chat_template else os.path.basename(path)
            message = message.replace(str(path), name)
        message = message.encode(errors="replace").decode()  # it may quote a lone surrogate
        kind = "invalid_request_error" if status < 500 else "server_error"
        return dict(error=dict(message=message[:1000], type=kind, param=None,
                               code=getattr(error, "code", None)))

    async def complete(self, chat, request):
        try:
            body = await asyncio.wait_for(read_object(request), PATIENCE)
        except (asyncio.TimeoutError, ClientDisconnect):
            raise HTTPException(408, "the request body did not arrive in time") from None
        # a thread, as a large body takes long to check
        job = Job(await asyncio.to_thread(request_fields.read, body, chat), chat, self)
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
        await asyncio.to_thread(job.encode, self)
        self.worker.calls.put(partial(self.worker.add, job))
        if job.body["stream"]:
            response = StreamingResponse(self.events(job), headers=STREAM_HEADERS,
                                         media_type="text/event-stream")
        else:
            choices = [choice async for choice, _ in job.choices()]
            choices.sort(key=itemgetter("index"))
            response = JSONResponse(job.head | dict(choices=choices) | job.usage())
        await response(*asgi)

    async def events(self, job):
        """The server-sent events of a stream."""
        line = lambda value: f"data: {json.dumps(value)}\n\n"
        try:
            async for choice, steps in job.choices():
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
        model = dict(id=self.name, object="model", created=0, owned_by="clover",
                     max_model_len=self.engine.decoder.capacity,
                     chat=self.loaded.encoding.template is not None)
        return JSONResponse(dict(object="list", data=[model]))

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
    longest = loaded.model.config.block_size
    context = min(args.context or 4096, longest)
    if args.context and args.context > longest:
        warn(f"--context {args.context}: the model's is {longest}, which is used")
    app = App(args, loaded, context)
    gc.freeze()  # else each full collection scans all that was loaded
    server = Server(uvicorn.Config(app.asgi, log_level="error", **HTTP))
    host, port, *_ = listener.getsockname()
    host = f"[{host}]" if ":" in host else host
    url = f"http://{host}:{port}"
    print(f"{app.name}: API at {url}/v1, chat page at {url}", file=sys.stderr, flush=True)
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
