"""python -m tests.load [MODEL]: 200 requests at a server, 16 at a time, a quarter of them cut off by the client, twice;
then those that were not beside generate() on the same prompts; and a first token after a prompt of 200."""

import atexit
import json
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx

from backends.tensor_parallel import Group
from generate import Sampling, generate
from hf.tokenizer import encode_prompt
from tools.flags import parse_serve
from tools.load import load

REQUESTS = 200
WORDS = "the river runs past a mill where nobody works on days like this one".split()


def ask(i, **more):
    pick = random.Random(i)
    body = dict(prompt=" ".join(pick.choices(WORDS, k=pick.choice([5, 20, 60]))), seed=i)
    return body | dict(max_tokens=pick.choice([16, 48, 96]), temperature=pick.choice([0, 0.7, 1]),
                       top_p=pick.choice([1, 0.9])) | more


def send(url, body, cut=False):
    """-> (seconds to the first line, the answer's new tokens); cut: the client goes away then."""
    started = time.perf_counter()
    with httpx.stream("POST", url + "/v1/completions", json=body | dict(stream=cut), timeout=600) as answer:
        line = next(answer.iter_lines())
        return time.perf_counter() - started, 0 if cut else json.loads(line)["usage"]["completion_tokens"]


def at_once(url, bodies, is_cut=lambda i: False):
    """16 at a time -> (tokens, seconds)"""
    started = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda pair: send(url, pair[1], is_cut(pair[0])), enumerate(bodies))
        return sum(tokens for _, tokens in answers), time.perf_counter() - started


def main(model="smollm2"):
    flags = ["--model", model, "--threads", "2", "--port", "0"]
    server = subprocess.Popen([sys.executable, "-m", "tools.serve", *flags], stderr=subprocess.PIPE, text=True)
    atexit.register(server.terminate)
    url = next(line.split()[-1] for line in server.stderr if "http://" in line)
    for words in (1, 190):
        seconds, _ = send(url, ask(0, prompt=" ".join((WORDS * 20)[:words]), max_tokens=1))
    print(f"{seconds:.2f} seconds to the first token after {words} words")
    for _ in range(2):
        tokens, seconds = at_once(url, map(ask, range(REQUESTS)), lambda i: i % 4 == 3)
        pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
        print(f"{tokens} tokens in {seconds:.0f} seconds; {pages * resource.getpagesize() / 1e6:.0f} MB in use")
    bodies = list(map(partial(ask, max_tokens=48), range(REQUESTS)))
    loaded = load(parse_serve(flags), Group())
    prompts = [encode_prompt(loaded.encoding, body["prompt"]) for body in bodies]
    sampling = [Sampling(body["temperature"], top_p=body["top_p"], seed=body["seed"]) for body in bodies]
    for _ in range(2):
        tokens, seconds = at_once(url, bodies)
        out = generate(loaded.model, prompts, 48, loaded.heads, lookup=True, sampling=sampling, stop=loaded.stop,
                       encoding=loaded.encoding)
        print(f"server {tokens / seconds:.1f} tokens per second, generate() {out.tokens_per_second:.1f}")
    print(*[line for line in httpx.get(url + "/metrics").text.splitlines() if "running" in line or "queue" in line])


if __name__ == "__main__":
    main(*sys.argv[1:])
