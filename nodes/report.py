"""The stats as text that a person reads."""

from collections import Counter
from typing import Any

from ..accel import wording

MIB = 1 << 20


def report(snapshot: dict[str, Any]) -> str:
    """A few tables in plain text; ``snapshot`` as from ``accel.stats.snapshot()``."""
    # the model that ran last comes first
    ran = sorted(reversed(snapshot["models"]), key=_latest, reverse=True)
    files = wording.files(snapshot)
    shorts = {told["text"]: "; ".join(one["short"] for one in told["said"]) for told in snapshot["reasons"]}
    device = snapshot["device"]
    models = [_model(model, files.get(model["name"], ""), shorts, device) for model in ran if model["shapes"]]
    parts = [
        _gain(snapshot["gain"]),
        *(models or ["Nothing has run through a compile node yet."]),
        _graphs(snapshot["graphs"]),
        _fleet(snapshot["fleet"]),
        _skip(snapshot["skip"], files),
        _fallbacks(snapshot, files),
        _artifacts(snapshot["artifacts"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _latest(model: dict[str, Any]) -> int:
    """The number of the latest prompt that it ran in."""
    return max((s["prompt"] for s in model["shapes"]), default=0)


def _gain(gain: dict[str, float]) -> str:
    if not gain:
        return ""
    saved = gain["saved_seconds"]
    what = f"{saved:.1f} s saved" if saved >= 0 else f"{-saved:.1f} s lost so far"
    line = f"Compared with ComfyUI's own forward, at the sizes where both were measured: {gain['factor']:.2f}x, {what}"
    if "full_steps" not in gain:
        return line
    return (
        f"{line}\n  Skipped steps are compared with full ones of ComfyUI's; full steps alone: {gain['full_steps']:.2f}x"
    )


def _model(model: dict[str, Any], file: str, shorts: dict[str, str], device: str) -> str:
    """A line for each size, with short forms of its reasons; the sentences stand below, each once."""
    what = f"{model['kind']}, {file}" if file else model["kind"]
    head = (
        f"{model['name']} ({what}): {_count(model['shapes'], 'size')}, {model['kernels']} kernels, "
        f"{model['recompiles']} recompiles, {model['compile_seconds']:.1f} s compiling"
    )
    columns = (
        f"{'size':>14} {'batch':>5} {'state':<19} {'calls':>6} {'first s':>8} {'ms':>8} {'eager ms':>8} {'x':>5} "
        f"{'MB':>6}  why"
    )
    texts = dict.fromkeys(text for shape in model["shapes"] for text in _texts(shape) if text in shorts)
    inexact = [f"  less exact than eager: {sentence}" for sentence in model["inexact"]]
    lines = [_shape(shape, shorts, device) for shape in model["shapes"]]
    return "\n".join([head, columns, *lines, *(f"  {text}" for text in texts), *inexact])


def _count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _shape(s: dict[str, Any], shorts: dict[str, str], device: str) -> str:
    state, size = f"{wording.speed(s, device)} ({s['state']})", wording.size(s["width"], s["height"], s["frames"])
    digits = {"first_call_seconds": 2, "median_ms": 1, "eager_ms": 1, "factor": 2}
    first, now, eager, factor = (wording.figure(s[name], many) for name, many in digits.items())
    why = "; ".join(shorts.get(text, text) for text in _texts(s))
    return (
        f"{size:>14} {s['batch']:>5} {state:<19} {s['calls']:>6} {first:>8} "
        f"{now:>8} {eager:>8} {factor:>5} {wording.figure(s['bytes'] / MIB, 0):>6}  {_step(s)}{why}"
    ).rstrip()


def _texts(s: dict[str, Any]) -> list[str]:
    """What is said of a size, in full."""
    return [text for text in (s["reason"], s["note"]) if text]


def _step(s: dict[str, Any]) -> str:
    """Which of Skip Blocks' two kinds of step this line is; "" without that node."""
    return f"{s['step']} steps " if s["step"] else ""


def _graphs(graphs: dict[str, Any]) -> str:
    if not graphs["budget_bytes"]:
        return ""
    return (
        f"CUDA graphs: {graphs['used_bytes'] / MIB:.0f} of {graphs['budget_bytes'] / MIB:.0f} MB, "
        f"{graphs['evictions']} evicted"
    )


def _fleet(shared: dict[str, Any]) -> str:
    if not shared:
        return ""
    return (
        f"Shared kernel cache {shared['address']} ({shared['state']}): {shared['hits']} hits "
        f"({shared['bytes_read'] / MIB:.1f} MB), {shared['misses']} misses, {shared['skipped']} not asked, "
        f"{shared['stored']} stored ({shared['bytes_stored'] / MIB:.1f} MB), {shared['waited_seconds']:.2f} s waited"
    )


def _skip(runs: list[dict[str, Any]], files: dict[str, str]) -> str:
    """Equal runs are one line."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        same = [run[name] for name in ("entry", "model", "full", "skipped", "depth", "resets")]
        alike.setdefault(repr(same), []).append(run)
    return "\n".join(["Skip Blocks, by sampling run:", *(_run(some, files) for some in alike.values())]) if runs else ""


def _run(alike: list[dict[str, Any]], files: dict[str, str]) -> str:
    run, seconds = alike[0], sorted({f"{one['seconds']:.1f}" for one in alike}, key=float)
    name = wording.title(run["entry"] or run["model"], files)
    several = f", {len(alike)} times" if len(alike) > 1 else ""
    held = max(one["bytes"] for one in alike)
    features = f", {held / MIB:.0f} MB of features" if held else ""
    resets = "".join(f"\n    {count} calls in full: {reason}" for reason, count in run["resets"].items())
    return (
        f"- {name}{several}: {run['full']} full and {run['skipped']} skipped evaluations at depth {run['depth']} in "
        f"{' to '.join(dict.fromkeys((seconds[0], seconds[-1])))} s{features}{resets}"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _fallbacks(snapshot: dict[str, Any], files: dict[str, str]) -> str:
    """Lists fallbacks, except those that a table has already named."""
    said = {(model["name"], shape["reason"]) for model in snapshot["models"] for shape in model["shapes"]}
    fallbacks = [f for f in snapshot["fallbacks"] if (f["where"], f["reason"]) not in said]
    lines = [f"- {wording.place(f['where'], snapshot, files)}, {_times(f['count'])}: {f['reason']}" for f in fallbacks]
    return "\n".join(["Not accelerated, because:", *lines]) if lines else ""


def _artifacts(artifacts: dict[str, Any]) -> str:
    where = f"in the folder {artifacts['dir']}" if artifacts["dir"] else "none"
    reasons = Counter(entry["reason"] for entry in artifacts["rejected"])
    lines = [f"- not used, {count} times: {reason}" for reason, count in reasons.items()]
    head = f"Compiled artefacts on disk, {where}: {artifacts['loaded']} loaded, {artifacts['saved']} saved"
    return "\n".join([head, *lines]) if artifacts["dir"] or lines else ""
