"""How much memory a part of a test needs at once, on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that lived at once while ``run`` ran, of those that it made."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = run()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    del out
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
