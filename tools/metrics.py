"""The server's statistics in the Prometheus text format."""

import json
from bisect import bisect_left
from itertools import accumulate

from tools.statistics import Statistics

BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
           10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # vLLM's, of seconds to the first token


class Metrics:
    """What the server has counted since its start."""

    def __init__(self):
        self.statistics = Statistics()  # of all requests
        self.first_tokens = [0] * (len(BUCKETS) + 1)  # requests by their time to the first token
        self.first_token_seconds = 0.0

    def first_token(self, seconds):
        """Counts the time from a request to its first token."""
        self.first_tokens[bisect_left(BUCKETS, seconds)] += 1
        self.first_token_seconds += seconds

    def text(self, model_name, running, waiting):
        """All metrics, by vLLM's names, which dashboards know. running, waiting: numbers of
        sequences."""
        counted = self.statistics
        sizes = counted.sizes.copy()  # as the worker's thread goes on counting
        positions = counted.positions.copy()
        drafted = {T: steps for T, (steps, _) in sizes.items() if T > 1}
        first_tokens = [*accumulate(self.first_tokens)]
        own = f"model_name={json.dumps(model_name, ensure_ascii=False)}"
        bounds = zip((*BUCKETS, "+Inf"), first_tokens)
        seconds = {f'_bucket{{le="{bound}",{own}}}': n for bound, n in bounds} | {
            f"_sum{{{own}}}": self.first_token_seconds, f"_count{{{own}}}": first_tokens[-1]}
        one = lambda value: {f"{{{own}}}": value}
        metrics = [  # name, kind, {what follows the name, such as labels: value}
            ("num_requests_running", "gauge", one(running)),
            ("num_requests_waiting", "gauge", one(waiting)),
            ("generation_tokens_total", "counter", one(sum(n for _, n in sizes.values()))),
            ("time_to_first_token_seconds", "histogram", seconds),
            ("spec_decode_num_drafts_total", "counter", one(sum(drafted.values()))),
            ("spec_decode_num_draft_tokens_total", "counter",
             one(sum((T - 1) * steps for T, steps in drafted.items()))),
            ("spec_decode_num_accepted_tokens_total", "counter", one(positions.total())),
            ("spec_decode_num_accepted_tokens_per_pos_total", "counter",
             {f'{{position="{i}",{own}}}': n for i, n in sorted(positions.items())})]
        lines = []
        for name, kind, samples in metrics:
            lines.append(f"# TYPE vllm:{name} {kind}\n")
            lines += [f"vllm:{name}{rest} {value}\n" for rest, value in samples.items()]
        return "".join(lines)
