"""A server with OpenAI's endpoints, and a page to chat on.

    python -m tools.serve --model smollm2 --port 8000

The event loop reads requests and writes answers; one thread owns the engine. A text depends on its
request alone, whatever runs beside it: it is what `generate()` gives for the same arguments."""

import asyncio
import hmac
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # flags are parsed before torch is loaded, so a typo is told at once
    from tools.flags import parse_serve
    ARGS = parse_serve()

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from generate import DraftPlan
from hf import SMOLLM2, expect
from hf.tokenizer import encode_prompt
from model import InputError
from tools.cli import Session, command, error_line
from tools.printer import Drafts, guessed_by
from tools.protocol import Job, as_error, as_event, chain, read_object, until_gone

CONTEXT = 4096        # tokens of a text, where neither --context nor the model says fewer
PATIENCE = 30         # seconds: for a body to arrive, a client to read, texts to end on SIGTERM
PAGE = Path(__file__).with_name("page.html")
FROM_HERE = {"content-security-policy": "connect-src 'self'; default-src 'unsafe-inline'"}


class Worker(threading.Thread):
    """Owns the engine. `calls`: functions that others want to run between two steps. What steps
    bring goes to the `events` of jobs."""

    def __init__(self, engine, encoding):
        super().__init__(daemon=True)
        self.engine = engine
        self.encoding = encoding
        self.jobs = {}  # sequence -> its Job
        self.calls = queue.SimpleQueue()
        self.select = engine.policy.select
        engine.policy.select = self.select_plan
        # a graph that is replayed shows no trees
        self.drafts = Drafts(engine, encoding.decode) if engine.decoder.pool is None else None

    def run(self):
        try:
            while True:
                while not (self.engine.busy and self.calls.empty()):
                    self.calls.get()()
                try:
                    self.step()
                except Exception as error:  # a lack of memory, too
                    self.reset(error)
        finally:  # even `clear` failed: a GPU is lost
            for job in set(self.jobs.values()):
                self.tell(job, RuntimeError("the engine has ended"))

    def select_plan(self):
        """The policy's, or plain where all texts ask for it: a plan is of a step, not of a text."""
        plain = all(self.jobs[sequence].plain for sequence in self.engine.running.values())
        return DraftPlan() if plain else self.select()

    def step(self):
        if self.drafts:
            self.drafts.wanted = any(job.show_steps for job in self.jobs.values())
        for sequence, tokens, path, plan in self.engine.step():
            job = self.jobs[sequence]
            shown = dict(plan=str(plan), guessed_by=guessed_by(tokens, path, plan))
            if job.show_steps and self.drafts:
                shown = self.drafts.describe(sequence, tokens, path, plan)
            job.output.count(tokens, path, plan)
            self.tell(job, (sequence.index, tokens, shown, sequence.ended))
            if sequence.ended:
                del self.jobs[sequence]

    def tell(self, job, event):
        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(job.events.put_nowait, event)

    def add(self, job):
        try:
            for index, prompt in enumerate(job.prompts):
                limit = min(job.limit, self.engine.decoder.capacity - len(prompt))
                sequence = self.engine.add(prompt, limit, job.sampling, job.stop, self.encoding,
                                           index)
                job.output.sequences.append(sequence)
                self.jobs[sequence] = job
        except Exception as error:
            self.cancel(job)
            self.tell(job, error)

    def cancel(self, job):
        for sequence in job.output.sequences:
            self.engine.cancel(sequence)
            self.jobs.pop(sequence, None)

    def reset(self, error):
        """After an error in a step: jobs of which a text was running fail, others go on waiting."""
        waiting = list(self.engine.waiting)
        failed = {self.jobs[sequence] for sequence in self.jobs.keys() - set(waiting)}
        for job in failed:
            self.tell(job, error)
        self.jobs = {sequence: job for sequence, job in self.jobs.items() if job not in failed}
        self.engine.clear()
        self.engine.waiting.extend(sequence for sequence in waiting if sequence in self.jobs)


class App:
    """The handlers of requests. `starlette` is the ASGI application."""

    def __init__(self, session, engine):
        args = session.args
        file = Path(args.model)
        self.session = session
        self.engine = engine
        self.name = args.name or ("smollm2" if file.name == SMOLLM2 else file.resolve().name)
        self.room = args.batch_size + args.queue  # texts that may run and wait
        self.taken = 0
        self.counts = Counter()
        self.longest = max(map(len, session.encoding.package.get_vocab()))  # characters of a token
        self.worker = Worker(engine, session.encoding)
        self.worker.start()
        handlers = {("GET", "/"): self.page, ("GET", "/health"): self.health,
                    ("GET", "/metrics"): self.metrics, ("GET", "/v1/models"): self.models,
                    ("POST", "/v1/chat/completions"): partial(self.complete, True),
                    ("POST", "/v1/completions"): partial(self.complete, False)}
        self.starlette = Starlette(
            routes=[Route(path, partial(self.guard, handler), methods=[method])
                    for (method, path), handler in handlers.items()],
            exception_handlers=dict.fromkeys((InputError, HTTPException, Exception), self.refuse))

    async def guard(self, handler, request):
        """Calls a handler, if the request brings the key."""
        key = self.session.args.api_key
        given = request.headers.get("authorization", "").encode("latin-1")
        if key and request.url.path not in ("/", "/health"):
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                raise HTTPException(401, "the API key is missing or wrong")
        return await handler(request)

    async def refuse(self, request, error):
        status = getattr(error, "status_code", 400 if isinstance(error, InputError) else 500)
        self.counts[f'requests_total{{status="{status}"}}'] += 1
        retry = {"retry-after": "1"} if status == 429 else None
        return JSONResponse(as_error(self.message(error), status), status, retry)

    def message(self, error):
        """A sentence about an error, without the model's path."""
        text = getattr(error, "detail", None) or error_line(error)
        text = text or f"{type(error).__name__} in a step; the server's log has more"
        return text.replace(f"{self.session.args.model}/", f"{self.name}/")

    async def complete(self, chat, request):
        try:
            body = await asyncio.wait_for(read_object(request), PATIENCE)
        except (asyncio.TimeoutError, ClientDisconnect):
            raise HTTPException(408, "the request did not arrive whole") from None
        if body.get("model") not in (None, self.name):
            raise HTTPException(404, f"this server has {self.name!r}, not {body['model']!r}")
        job = Job(body, chat, self.session, self.name)
        expect(job.count <= self.room, f"a request may ask for {self.room} texts, not {job.count}")
        if not self.worker.is_alive():
            raise HTTPException(503, "the engine has ended; start the server anew")
        if self.taken + job.count > self.room:
            raise HTTPException(429, "too many texts wait; try again")
        return partial(self.respond, job)

    async def respond(self, job, scope, receive, send):
        """Answers, until the client goes away."""
        self.taken += job.count
        timed = lambda message: asyncio.wait_for(send(message), PATIENCE)  # to a client that reads
        answer = asyncio.create_task(self.answer(job, scope, receive, timed))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            self.taken -= job.count
            self.counts["steps_total"] += job.output.steps
            self.counts["tokens_total"] += job.output.emitted
            answer.cancel()
            gone.cancel()
            self.worker.calls.put(partial(self.worker.cancel, job))

    async def answer(self, job, *asgi):
        """Sends the texts, whole or as they come."""
        await asyncio.to_thread(self.encode, job)
        self.worker.calls.put(partial(self.worker.add, job))
        parts = job.parts(self.session.encoding)
        parts = chain(await anext(parts), parts)  # an error before it is an answer of its own
        self.counts["first_token_seconds_sum"] += time.perf_counter() - job.began
        self.counts["first_token_seconds_count"] += 1
        if job.stream:
            response = StreamingResponse(self.events(job, parts), media_type="text/event-stream")
        else:
            texts = [""] * job.count
            async for index, pieces, *_ in parts:
                texts[index] += "".join(pieces)
            ended = [sequence.ended for sequence in job.output.sequences]
            choices = list(map(job.choice, range(job.count), texts, ended))
            response = JSONResponse(job.answer(choices, **job.cost()))
        self.counts['requests_total{status="200"}'] += 1
        await response(*asgi)

    def encode(self, job):
        """Makes token ids of the texts. Those that cannot fit are refused before they cost much."""
        encoding = self.session.encoding
        capacity = self.engine.decoder.capacity
        for text in job.texts:
            size = sum(len(message["content"]) for message in text) if job.chat else len(text)
            expect(size < self.longest * capacity, f"a prompt of {size} characters is too long")
            ids = encoding.chat(text) if job.chat else encode_prompt(encoding, text)
            expect(0 < len(ids) < capacity, f"the prompt has {len(ids)} tokens; this server takes "
                   f"1 to {capacity - 1}")
            job.prompts += [ids] * job.n

    async def events(self, job, parts):
        """The lines of a stream."""
        begun = set()
        try:
            async for index, pieces, ended, shown in parts:
                choice = job.choice(index, "".join(pieces), ended, index not in begun)
                begun.add(index)
                more = dict(clover=dict(tokens=pieces) | shown) if job.show_steps else {}
                yield as_event(job.answer([choice], **more))
            if job.usage:
                yield as_event(job.answer([], **job.cost()))
        except Exception as error:
            traceback.print_exc()
            yield as_event(as_error(self.message(error), 500))
        yield "data: [DONE]\n\n"

    async def page(self, request):
        return FileResponse(PAGE, headers=FROM_HERE)

    async def health(self, request):
        alive = self.worker.is_alive()
        return JSONResponse(dict(status="ok" if alive else "failed"), 200 if alive else 503)

    async def models(self, request):
        chat = self.session.encoding.template is not None
        model = dict(id=self.name, object="model", created=0, owned_by="clover", chat=chat)
        return JSONResponse(dict(object="list", data=[model]))

    async def metrics(self, request):
        """In the text format of Prometheus."""
        steps, tokens = self.counts["steps_total"], self.counts["tokens_total"]
        now = dict(running=len(self.engine.running), queue=len(self.engine.waiting),
                   tokens_per_step=tokens / max(steps, 1))
        lines = (f"clover_{name} {value}\n" for name, value in sorted((self.counts | now).items()))
        return PlainTextResponse("".join(lines))


def main(args):
    try:
        listener = socket.create_server((args.host, args.port))
    except OSError as error:
        raise InputError(f"cannot listen on {args.host}, port {args.port}: {error}") from None
    session = Session(args)
    expect(session.group.size == 1, "a server is one process; start it without torchrun")
    context = min(args.context or CONTEXT, session.model.config.block_size)
    app = App(session, session.engine([[0]] * args.batch_size, context - 1))
    server = uvicorn.Server(uvicorn.Config(app.starlette, lifespan="off", log_level="warning",
                                           timeout_graceful_shutdown=PATIENCE))
    server.handle_exit = partial(end, server)
    print("{}: http://{}:{}".format(app.name, *listener.getsockname()), file=sys.stderr, flush=True)
    server.run(sockets=[listener])
    idle = threading.Event()
    app.worker.calls.put(idle.set)
    idle.wait(PATIENCE)


def end(server, number, frame):
    """On a signal: texts end, new requests are refused. On a second one, all ends at once."""
    if server.should_exit:
        os._exit(128 + number)
    server.should_exit = True


if __name__ == "__main__":
    command(partial(main, ARGS))
