"""A server under load, for `python -m bench gpu`: sends prompts in two waves and times the streams,
each in a thread."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from threading import Event


def load(port, prompts, new):
    """Sends half of the prompts at once, and the others when these have their first tokens. Returns
    tokens per second; median and worst time to the first token and the longest stall between two
    events of a stream, in ms."""
    stream(port, prompts[0], new, Event())  # the first request may compile something
    half = len(prompts) // 2
    begun = [Event() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = lambda prompt, event: pool.submit(stream, port, prompt, new, event)
        streams = list(map(start, prompts[:half], begun))
        for event in begun[:half]:
            event.wait()
        streams += map(start, prompts[half:], begun[half:])
    counts, times = zip(*(stream.result() for stream in streams))
    seconds = max(own[-1] for own in times) - min(own[0] for own in times)
    first = [own[1] - own[0] for own in times]
    stalls = [b - a for own in times for a, b in zip(own[1:], own[2:])]
    return dict(tokens_per_second=sum(counts) / seconds,
                first_token_ms=1e3 * median(first), worst_first_token_ms=1e3 * max(first),
                longest_stall_ms=1e3 * max(stalls, default=0))


def stream(port, prompt, new, begun):
    """Streams the greedy completion of a prompt (token ids). Returns the number of tokens, and the
    times of the request and of each event. begun: is set at the first event, or at an error."""
    body = json.dumps(dict(prompt=prompt, max_tokens=new, temperature=0, stream=True,
                           stream_options=dict(include_usage=True)))
    connection = http.client.HTTPConnection("127.0.0.1", port)
    tokens = None
    try:
        times = [time.perf_counter()]
        connection.request("POST", "/v1/completions", body)
        for line in connection.getresponse():
            if b'"choices": [{' in line:
                times.append(time.perf_counter())
                begun.set()
            elif b'"usage"' in line:
                tokens = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
    finally:
        begun.set()
        connection.close()
    if tokens is None:
        raise RuntimeError("the server did not answer; see server.log")
    return tokens, times
