"""A server under load, for `python -m bench gpu`: sends prompts at once and times the streams."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from statistics import median


def load(port, prompts, new):
    """Sends all prompts at once, each from a thread. Returns tokens per second; median and worst
    time to the first token and the longest stall between two events of a stream, in ms."""
    complete = partial(stream, port, new)
    complete(prompts[0])  # the first request may compile something
    with ThreadPoolExecutor(len(prompts)) as pool:
        counts, times = zip(*pool.map(complete, prompts))
    seconds = max(own[-1] for own in times) - min(own[0] for own in times)
    first = [own[1] - own[0] for own in times]
    stalls = [b - a for own in times for a, b in zip(own[1:], own[2:])]
    return dict(tokens_per_second=sum(counts) / seconds,
                first_token_ms=1e3 * median(first), worst_first_token_ms=1e3 * max(first),
                longest_stall_ms=1e3 * max(stalls, default=0))


def stream(port, new, prompt):
    """Streams the greedy completion of a prompt (token ids). Returns the number of tokens, and the
    times of the request and of each event."""
    body = json.dumps(dict(prompt=prompt, max_tokens=new, temperature=0, stream=True,
                           stream_options=dict(include_usage=True)))
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        times = [time.perf_counter()]
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if b'"choices": [{' in line:
                times.append(time.perf_counter())
            elif b'"usage"' in line:
                return json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"], times
    raise RuntimeError("the server did not answer; see server.log")
