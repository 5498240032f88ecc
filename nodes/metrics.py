"""The counters in Prometheus' text format 0.0.4, for whoever watches servers.

Names of models, sizes and workflows are in none of them, and no texts: every label has few values, whatever users do.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..accel.totals import Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BY_KIND = {  # of Totals.by_kind
    "first_calls": ("first_calls_total", "First calls of a size, which record and may compile"),
    "first_call_seconds": ("first_call_seconds_total", "Seconds of first calls"),
    "kernels": ("kernels_compiled_total", "Kernels that were generated and compiled"),
    "recompiles": ("recompiles_total", "Kernels compiled after a model's first forward; should stay 0"),
    "compile_seconds": ("compile_seconds_total", "Seconds of compiling"),
}
SHARED = {  # of the stats' fleet, if kernels are shared
    "hits": "Kernels that came from the shared cache",
    "misses": "Kernels that it did not have",
    "stored": "Kernels that were given to it",
    "waited_seconds": "Seconds of waiting for it",
}
Samples = Iterable[tuple[Mapping[str, str], float]]


def exposition(stats: dict[str, Any], totals: Totals, prompts: int, versions: Mapping[str, str]) -> str:
    """The text of one scrape.

    stats: as ``docs/scripts.md`` has them. prompts: how many have called a model. versions: of what, by name.
    """
    graphs, gain, work = stats["graphs"], stats["gain"], stats["preparing"]
    about = {**versions, "torch": stats["torch"], "device": stats["device"]}
    parts = [
        _family("info", "gauge", "Versions and the device; always 1", [(about, 1)]),
        _family("prompts_total", "counter", "Prompts that called a model", [({}, prompts)]),
        _family("calls_total", "counter", "Forwards, by how they ran; step: of Skip Blocks", _calls(totals)),
        *(
            _family(*_counter(*BY_KIND[name]), [({"kind": kind}, value) for kind, value in sorted(values.items())])
            for name, values in totals.by_kind().items()
        ),
        _family(
            "fallbacks_total", "counter", "What ran slower than it might have, by the key of the reason",
            [({"reason": key}, count) for key, count in sorted(totals.fallbacks().items())],
        ),
        _family("sizes", "gauge", "Sizes in the stats, by how they ran last", _sizes(stats["models"])),
        _family("graph_bytes", "gauge", "GPU memory of CUDA graphs", [({}, graphs["used_bytes"])]),
        _family("graph_budget_bytes", "gauge", "GPU memory that they may take", [({}, graphs["budget_bytes"])]),
        _family("graph_evictions_total", "counter", "Graphs that gave way to others", [({}, graphs["evictions"])]),
        _family("preparing_seconds", "gauge", "How long a size has been prepared for; 0 if none is", [
            ({}, work.get("seconds", 0)),
        ]),
        _family("gain_factor", "gauge", "ComfyUI's own time by ours, where both are known", _known(gain, "factor")),
        _family("saved_seconds", "gauge", "What all calls saved; below 0 until the first ones are won back", _known(
            gain, "saved_seconds"
        )),
        _family("artifacts_total", "counter", "Stored kernels, by what became of them", _artifacts(stats["artifacts"])),
        *(
            _family(*_counter(f"shared_cache_{name}_total", text), [({}, stats["fleet"][name])])
            for name, text in SHARED.items() if name in stats["fleet"]
        ),
    ]  # fmt: skip
    return "".join(parts)


def _counter(name: str, text: str) -> tuple[str, str, str]:
    return name, "counter", text


def _calls(totals: Totals) -> Samples:
    names = "kind", "state", "step"
    return [(dict(zip(names, labels, strict=True)), count) for labels, count in sorted(totals.calls().items())]


def _sizes(models: list[dict[str, Any]]) -> Samples:
    found: dict[tuple[str, str], int] = {}
    for model in models:
        for shape in model["shapes"]:
            found[model["kind"], shape["state"]] = found.get((model["kind"], shape["state"]), 0) + 1
    return [({"kind": kind, "state": state}, count) for (kind, state), count in sorted(found.items())]


def _known(values: dict[str, float], name: str) -> Samples:
    """No sample where nothing is known: 0 would be a figure."""
    return [({}, values[name])] if name in values else []


def _artifacts(artifacts: dict[str, Any]) -> Samples:
    counts = {"loaded": artifacts["loaded"], "saved": artifacts["saved"], "rejected": len(artifacts["rejected"])}
    return [({"what": name}, count) for name, count in counts.items()]


def _family(name: str, kind: str, text: str, samples: Samples) -> str:
    """A metric with its samples; "" without any."""
    lines = [f"anyshape_{name}{_labels(labels)} {value!r}" for labels, value in samples]
    head = [f"# HELP anyshape_{name} {text}", f"# TYPE anyshape_{name} {kind}"]
    return "".join(f"{line}\n" for line in [*head, *lines]) if lines else ""


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
