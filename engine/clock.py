"""Times on a device's own clock, for which the host does not wait."""

import time

import torch


def timestamp(device):
    """The time on the device's clock at this point of its queue."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start, end):
    """Seconds between two timestamps; waits for the later one."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3
