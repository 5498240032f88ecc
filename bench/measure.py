"""Timing by CUDA events, device memory, and the JSON that every benchmark writes.

Where there is no GPU the clock is the processor's and memory reads 0: enough to try a benchmark, not to measure.
"""

import argparse
import datetime
import functools
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def median_ms(fn: Callable[[], Any]) -> float:
    """Median duration of ``fn`` on the device, milliseconds."""
    for _ in range(3):
        fn()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(12)]
    for start, end in pairs:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


class Ticks:
    """Moments on the device's own clock."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Now, in the order of the device's work."""
        if not torch.cuda.is_available():
            return self.marks.append(time.perf_counter() * 1e3)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def intervals_ms(self) -> list[float]:
        """Milliseconds from each mark to the next; starts again."""
        synchronize()
        marks, self.marks = self.marks, []
        return [b - a if isinstance(a, float) else a.elapsed_time(b) for a, b in pairwise(marks)]


def synchronize() -> None:
    """Waits until the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def seconds(into: dict[str, float], name: str) -> Iterator[None]:
    """Wall-clock seconds of the body, device work included, as ``into[name]``."""
    synchronize()
    started = time.perf_counter()
    yield
    synchronize()
    into[name] = round(time.perf_counter() - started, 3)


@contextmanager
def until_called(into: dict[str, float], name: str) -> Iterator[Callable[..., None]]:
    """As ``seconds``, until what it gives is first called, as a sampler does after each step."""
    synchronize()
    started = time.perf_counter()

    def called(*_: Any) -> None:
        if name not in into:
            synchronize()
            into[name] = round(time.perf_counter() - started, 3)

    yield called


def used_mib() -> float:
    """Device memory in use by everyone, MiB."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / (1 << 20)


def settled_mib() -> float:
    """Device memory in use without what the allocator only keeps, MiB; 0 where there is none."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    return used_mib()


def freed_mib() -> float:
    """Device memory that stays in use, MiB, when a model is gone: the rest is the next one's."""
    import comfy.model_management as mm

    settled_mib()
    mm.cleanup_models()
    return settled_mib()


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in float32."""
    out, reference = out.float(), reference.float()
    return ((out - reference).norm() / reference.norm()).item()


def options(description: str) -> argparse.ArgumentParser:
    """A parser with ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures, with machine, versions, date and command")
    return parser


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Writes ``figures`` with the conditions they were measured under; nothing without a path."""
    if path is not None:
        save(path, conditions() | figures)


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Writes ``result`` as it is; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def _program() -> str:
    """How this process was started; a test's has no module of its own."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec else "python"


def _nameless(argument: str) -> str:
    """A path without its folders: they say nothing about the figures."""
    return Path(argument).name if "/" in argument else argument


class Kernels:
    """Counts the Triton kernels of this process: compiled, or found in a cache. Of those compiled side by side the
    seconds add up, but those of helpers, which are not known. Before Triton 3.4 nobody tells, and nothing is counted.
    """

    def __init__(self) -> None:
        self._compiled, self._found, self.seconds = 0, 0, 0.0

    @property
    def compiled(self) -> int:
        """Of this process or of its helpers, whose kernels are then found."""
        return self._compiled + _helped()

    @property
    def found(self) -> int:
        """In a cache, where they were before."""
        return self._found - _helped()

    def listen(self) -> "Kernels":
        """Begins; takes the place of an earlier listener. Returns itself."""
        from triton import knobs

        if hasattr(knobs, "compilation"):
            knobs.compilation.listener = self._heard
        return self

    def _heard(self, times: Any, cache_hit: bool, **kernel: Any) -> None:
        if cache_hit:
            self._found += 1
        else:
            self._compiled += 1
            self.seconds += times.total * 1e-6


def _helped() -> int:
    """Kernels that helpers have compiled for this process."""
    helpers = sys.modules.get("anyshape.accel.kernels.helpers")
    return helpers.HELPERS.compiled if helpers else 0


@functools.cache
def driver() -> str:
    """The version of NVIDIA's driver; "" if nobody says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def conditions() -> dict[str, Any]:
    """Machine, driver, versions, allocator, date and command."""
    import comfyui_version
    import triton

    cuda = torch.cuda.is_available()
    return {
        "machine": f"{torch.cuda.get_device_name() if cuda else 'CPU'}, {platform.machine()}",
        "driver": driver() if cuda else "",
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "comfyui": comfyui_version.__version__,
        },
        "allocator": torch.cuda.get_allocator_backend() if cuda else "native",
        "date": datetime.date.today().isoformat(),
        "command": " ".join([_program(), *map(_nameless, sys.argv[1:])]),
    }
