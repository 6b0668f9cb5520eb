"""The thread of tools/serve.py that owns the engine."""

import queue
import threading
import time

from tools.metrics import Metrics
from tools.printer import step_record


class Worker(threading.Thread):
    """Runs the engine's steps, and puts their results into the `events` of jobs."""

    def __init__(self, engine):
        super().__init__(daemon=True)
        self.engine = engine
        self.tree_size = engine.policy.tree_size  # unless drafting is off
        self.jobs = {}  # sequence -> its Job
        self.calls = queue.SimpleQueue()  # functions to run between two steps
        self.metrics = Metrics()

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
                pieces = sequence.pieces[len(sequence.pieces) - len(new.tokens):]
                self.send(job, (sequence.index, new.tokens, pieces, sequence.ended, record,
                                new.logprobs))
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
