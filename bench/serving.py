"""A server under load, for `python -m bench gpu`: runs tools/serve.py, sends prompts in two waves
and times the streams. The clients are a few lines of asyncio, which need little of the CPU."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from statistics import median

from bench import ROOT


@contextlib.contextmanager
def server(log, deadline, *flags):
    """Runs `python -m tools.serve` with these flags, yields its port, and ends it. log: a file for
    its output. Raises RuntimeError if it ends or has not started at the deadline."""
    command = sys.executable, "-m", "tools.serve", "--port", "0", *flags
    with open(log, "a+") as file:
        start = file.tell()
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        try:
            address = None
            while not address:
                if process.poll() is not None or time.perf_counter() > deadline:
                    raise RuntimeError(f"the server did not start in time; see {log.name}")
                time.sleep(0.05)
                file.seek(start)
                address = re.search(r"http://127\.0\.0\.1:(\d+)\n", file.read())
            yield int(address[1])
        finally:
            process.kill()
            process.wait()


async def load(port, prompts, new):
    """Sends half of the prompts at once, and the others when these have their first tokens. Returns
    tokens per second; median and worst time to the first token and the longest stall between two
    events of a stream, in ms."""
    await stream(port, prompts[0], new, asyncio.Event())  # the first request may compile something
    half = len(prompts) // 2
    begun = [asyncio.Event() for _ in prompts]
    start = lambda i: asyncio.create_task(stream(port, prompts[i], new, begun[i]))
    streams = [start(i) for i in range(half)]
    for event in begun[:half]:
        await event.wait()
    streams += [start(i) for i in range(half, len(prompts))]
    counts, times = zip(*await asyncio.gather(*streams))
    seconds = max(own[-1] for own in times) - min(own[0] for own in times)
    first = [own[1] - own[0] for own in times]
    stalls = [b - a for own in times for a, b in zip(own[1:], own[2:])]
    return dict(tokens_per_second=sum(counts) / seconds,
                first_token_ms=1e3 * median(first), worst_first_token_ms=1e3 * max(first),
                longest_stall_ms=1e3 * max(stalls, default=0))


async def stream(port, prompt, new, begun):
    """Streams the greedy completion of a prompt (token ids). Returns the number of tokens, and the
    times of the request and of each event. begun: is set at the first event, or at an error."""
    body = json.dumps(dict(prompt=prompt, max_tokens=new, temperature=0, stream=True,
                           stream_options=dict(include_usage=True)))
    head = (f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        times = [time.perf_counter()]
        writer.write((head + body).encode())
        answer = b""
        async for line in reader:
            answer = line if line.startswith(b"data: {") else answer
            if b'"choices": [{' in line:
                times.append(time.perf_counter())
                begun.set()
        writer.close()
    finally:
        begun.set()
    usage = json.loads(answer.removeprefix(b"data: ") or "{}").get("usage")
    if not usage:
        raise RuntimeError("the server did not answer; see its log")
    return usage["completion_tokens"], times
