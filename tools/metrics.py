"""The server's statistics in the Prometheus text format."""

from bisect import bisect_left
from collections import Counter
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
        # copies, as the worker's thread goes on counting
        counted = self.statistics
        counted = Statistics(counted.shapes.copy(), counted.guesses.copy())
        drafted = {T: steps for T, (steps, _) in counted.sizes.items() if T > 1}
        positions = Counter()
        for (depth, _), accepted in counted.guesses.items():
            positions[depth - 1] += accepted
        first_tokens = [*accumulate(self.first_tokens)]
        times = dict(_sum=self.first_token_seconds, _count=first_tokens[-1])
        model = f'model_name="{escaped(model_name)}"'
        bounds = zip((*BUCKETS, "+Inf"), first_tokens)
        buckets = {f'_bucket{{le="{bound}",{model}}}': n for bound, n in bounds}
        labelled = lambda values: {f"{suffix}{{{model}}}": n for suffix, n in values.items()}
        vllm = lambda name, kind, value: family(f"vllm:{name}", kind, labelled({"": value}))
        lines = [
            *vllm("num_requests_running", "gauge", running),
            *vllm("num_requests_waiting", "gauge", waiting),
            *vllm("generation_tokens_total", "counter", counted.emitted),
            *family("vllm:time_to_first_token_seconds", "histogram", buckets | labelled(times)),
            *vllm("spec_decode_num_drafts_total", "counter", sum(drafted.values())),
            *vllm("spec_decode_num_draft_tokens_total", "counter",
                  sum((T - 1) * steps for T, steps in drafted.items())),
            *vllm("spec_decode_num_accepted_tokens_total", "counter", positions.total()),
            *family("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
                    {f'{{position="{i}",{model}}}': n for i, n in sorted(positions.items())})]
        return "\n".join(lines) + "\n"


def family(name, kind, samples):
    """The lines of a metric. samples: {what follows its name, such as labels: value}."""
    return [f"# TYPE {name} {kind}", *(f"{name}{rest} {value}" for rest, value in samples.items())]


def escaped(label):
    """The value of a label, for between quotes."""
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
