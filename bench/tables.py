"""Writes the figures of bench/results into the READMEs, docs/performance.md and docs/fleet.md, between their markers.

python -m bench.tables [--write]

Without ``--write`` it prints what it would write. Needs neither torch nor ComfyUI.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import figures, fleet_tables, skip_tables, texts
from bench.markdown import conditions, headed, said, size, table
from tools.paths import ROOT

BEGIN = "<!-- begin: written by python -m bench.tables --write from bench/results -->"
END = "<!-- end: written by python -m bench.tables -->"


def three(value: float) -> str:
    """Three digits, as many as a timing is worth."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def two(seconds: float) -> str:
    """Two decimals, without a minus before zero."""
    return f"{round(seconds, 2) + 0.0:.2f}"


def pair(eager: float, compiled: float) -> str:
    """Two timings."""
    return f"{three(eager)} → {three(compiled)}"


def scientific(value: float | None) -> str:
    """An error; None if it was not finite."""
    if value is None:
        return "not finite"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"


AMPLIFIED = (
    "Weights are random. Such models amplify rounding, most of all with 8-bit weights: if the latent is off by one "
    "step of its dtype, Krea 2's result in int8 is off by 23 %, in ComfyUI too. First calls of Z-Image, Krea 2 and "
    "Flux with 8-bit weights are from before their blocks counted as alike. In int8, LTX-Video and LTX-2 wait for the "
    "host in eager, and so does Wan at 840x968; on another host eager took 177, 170 and 176 ms (LTX-Video), 687, 748 "
    "and 659 (LTX-2), and 200 (Wan)."
)
STREAMED = (
    "The best of ten runs of ComfyUI and of eleven of AnyShape, the last six by turns. The first size of a process "
    "runs its first step twice. Errors as above. The last command measured SDXL, MiniMax H3 and Z-Image in int8."
)
SIX = ("sdxl", "flux", "zimage", "qwen", "sd35l", "chroma")
SIZES = ("1024x1024", "512x512")


# README -----------------------------------------------------------------------------------------------------------


def readme(words: dict[str, Any], wrap: bool) -> str:
    """The block of a README: six models at two sizes, and the mixed run."""
    results = [figures.load(figures.forward_path(model)) for model in SIX]
    rows = [[figures.MODELS[result["model"]], *map(str, readme_cells(result))] for result in results]
    dates = sorted({result["date"] for result in results})
    where = words["conditions"].format(**conditions(results[0]), dates=words["to"].join([dates[0], *dates[1:][-1:]]))
    legend = said(words, [where, words["legend"]], wrap)
    mixed = said(words, [mixed_sentence(words, figures.load(figures.mixed_path("sdxl")))], wrap)
    picture = f"![{words['plot']}](docs/images/{figures.mixed_path('sdxl').stem}.png)"
    head = [words["model"], *(cell for name in SIZES for cell in (name, words["faster"]))]
    return "\n\n".join([table(head, rows), legend, said(words, [others(words)], wrap), picture, mixed])


def readme_cells(result: dict[str, Any]) -> list[str]:
    """Times and factor at both sizes, of one image as it is sampled: with CFG where the model has it."""
    most = max(row["rows"] for row in result["rows"] if row["images"] == 1)
    cells: list[str] = []
    for name in SIZES:
        (row,) = [r for r in result["rows"] if (size(r), r["images"], r["rows"]) == (name, 1, most)]
        cells += [pair(row["eager_ms"], row["compiled_ms"]), factor(row)]
    return cells


def factor(row: dict[str, Any]) -> str:
    """How many times as fast as eager."""
    return f"{row['eager_ms'] / row['compiled_ms']:.2f}x"


def others(words: dict[str, Any]) -> str:
    """What is no line of the table: a video, SD1.5, the VAE, Skip Blocks."""
    wan, sd15 = (figures.load(figures.forward_path(model))["rows"] for model in ("wan", "sd15"))
    video = next(row for row in wan if row["frames"] > 1)
    alone = (row for row in sd15 if row["images"] == 1)
    large = max(alone, key=lambda row: (row["width"] * row["height"], row["rows"]))
    vaes, of_wan = (figures.load(figures.RESULTS / f"{name}.json") for name in ("vae", "vae-wan"))
    vae, skip = vaes["rows"][0], skip_tables.speeds()[0]
    streamed = {row["model"]: f"{row['eager_s'] / row['s']:.2f}x" for row in figures.load(figures.STREAMED[0])["rows"]}
    return words["others"].format(
        video=size(video), wan=factor(video), sd15=factor(large), sd15_size=size(large), vae=factor(vae),
        wan_vae=factor(of_wan["rows"][0]), size=size(vae), interval=skip["interval"], steps=skip["steps"],
        skip=skip_tables.usual_speedups(), streamed=streamed["flux-fp8"], of_zimage=streamed["zimage"],
    )  # fmt: skip


def mixed_sentence(words: dict[str, Any], result: dict[str, Any]) -> str:
    """The mixed run in a sentence."""
    count = len(result["runs"]["eager"]["cold"]["prompts"])
    found: dict[str, dict[str, str]] = {}
    for how, name, run in figures.runs(result):
        found.setdefault(how, {})[name] = outcome(words, run, count)
    phrases = [phrase(words, words["names"][how], **each) for how, each in found.items()]
    return words["mixed"].format(count=count, steps=result["steps"], runs=words["between"].join(phrases))


def phrase(words: dict[str, Any], name: str, cold: str, warm: str | None = None) -> str:
    """What came of the runs of one way."""
    template = "once" if warm is None else "alike" if warm == cold else "twice"
    return words[template].format(name=name, cold=cold, warm=warm)


def outcome(words: dict[str, Any], run: dict[str, Any], count: int) -> str:
    """The seconds of a run, or how far it came."""
    state = "finished" if run["finished"] else "stopped" if run["exit_code"] is None else "failed"
    facts = {"seconds": three(figures.total(run)), "limit": f"{run['limit_seconds']:g}", "done": len(run["prompts"])}
    return words[state].format(count=count, **facts)


# docs/performance.md ----------------------------------------------------------------------------------------------


def document() -> str:
    """The block of docs/performance.md: every result."""
    parts = [forward_part(model) for model in figures.MODELS if figures.forward_path(model).exists()]
    parts += [dynamic_part(), streamed_part()]
    parts += [vae_part("VAE of SDXL in bf16", "vae"), vae_part("VAE of Wan 2.1 and Qwen-Image in bf16", "vae-wan")]
    parts += [mixed_part(model) for model in figures.MODELS if figures.mixed_path(model).exists()]
    return "\n\n".join([*parts, *skip_tables.parts(), controlnet_part()])


def forward_part(model: str) -> str:
    """One forward of ``model``."""
    result = figures.load(figures.forward_path(model))
    head = "Size | Images | Rows | Eager, ms | AnyShape, ms | Faster | First call, s | Error"
    lines = table(head.split(" | "), map(forward_row, result["rows"]))
    found = f"All {len(result['rows'])} shapes together take {result['memory_mib']:,.0f} MiB more than eager."
    note = said(texts.ENGLISH, [found], wrap=True)
    return headed(f"{figures.MODELS[model]}, one forward", result, lines, note)


def forward_row(row: dict[str, Any]) -> list[str]:
    """One case."""
    return [
        size(row),
        str(row["images"]),
        str(row["rows"]),
        three(row["eager_ms"]),
        three(row["compiled_ms"]),
        factor(row),
        two(row["first_call_extra_seconds"]),
        scientific(row["error"]),
    ]


def dynamic_part() -> str:
    """A newer ComfyUI as people have it, with quantised weights too."""
    results = [figures.load(path) for path in figures.dynamic_paths()]
    head = "Model | Weights | Size | Rows | Eager, ms | AnyShape, ms | Faster | First call, s | Error"
    lines = table(head.split(" | "), [dynamic_row(row, result) for result in results for row in result["rows"]])
    title = f"ComfyUI {results[0]['versions']['comfyui']} with DynamicVRAM, one forward"
    commands = "`, `".join(dict.fromkeys(result["command"] for result in results))
    return headed(title, results[0] | {"command": commands}, lines, said(texts.ENGLISH, [AMPLIFIED], wrap=True))


def dynamic_row(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """One case."""
    model, _, form = result["model"].partition("-")
    first = two(row["first_call_extra_seconds"])
    shown = [size(row), str(row["rows"]), three(row["eager_ms"]), three(row["compiled_ms"]), factor(row), first]
    return [figures.MODELS[model], figures.FORMS.get(form, "bf16"), *shown, scientific(row["error"])]


def streamed_part() -> str:
    """Models of which only a part fits."""
    results = [figures.load(path) for path in figures.STREAMED]
    head = "Model | Weights | Size | GB | Fits, GB | ComfyUI, s | AnyShape, s | Faster | Error"
    newest = {row["model"]: row for result in results for row in result["rows"]}
    lines = table(head.split(" | "), map(streamed_row, newest.values()))
    commands = "`, `".join(dict.fromkeys(result["command"] for result in results))
    title = "Weights that do not all fit (DynamicVRAM), 4 steps"
    return headed(title, results[0] | {"command": commands}, lines, said(texts.ENGLISH, [STREAMED], wrap=True))


def streamed_row(row: dict[str, Any]) -> list[str]:
    """One model."""
    model, _, form = row["model"].partition("-")
    cut = "".join(f", {count} blocks" for count in row["changes"].values())
    sizes = [size(row["run"]), *(f"{amount / 1e9:.1f}" for amount in (row["size"], row["loaded"][0]))]
    times = [f"{row['eager_s']:.3f}", f"{row['s']:.3f}", f"{row['eager_s'] / row['s']:.2f}x"]
    return [figures.MODELS[model] + cut, figures.FORMS.get(form, "bf16"), *sizes, *times, scientific(row["error"])]


def vae_part(title: str, name: str) -> str:
    """A VAE. Peaks of memory are those of a decode."""
    result = figures.load(figures.RESULTS / f"{name}.json")
    head = (
        "Size | Images | Decode, ms | Encode, ms | First decode, s | Peak, MiB | Error to float32 | "
        "Eager's error to float32"
    )
    return headed(title, result, table(head.split(" | "), map(vae_row, result["rows"])))


def vae_row(row: dict[str, Any]) -> list[str]:
    """One size."""
    return [
        size(row),
        str(row["images"]),
        pair(row["eager_ms"], row["compiled_ms"]),
        pair(row["encode_eager_ms"], row["encode_compiled_ms"]),
        two(row["first_seconds"]),
        f"{row['eager_mib']:.0f} → {row['compiled_mib']:.0f}",
        scientific(row["error_to_float32"]),
        scientific(row["eager_error_to_float32"]),
    ]


def controlnet_part() -> str:
    """Milliseconds per step of SDXL with a ControlNet."""
    result = figures.load(figures.RESULTS / "controlnet.json")
    head = ["Size", "Eager, ms", "Compile ControlNet", "Compile Model", "Both", "Faster", "Error of both"]
    return headed("SDXL with a ControlNet, one step", result, table(head, map(controlnet_row, result["rows"])))


def controlnet_row(row: dict[str, Any]) -> list[str]:
    """One size, by what is compiled."""
    times = [f"{row[f'{way}_ms']:.1f}" for way in ("neither", "control", "model", "both")]
    return [size(row), *times, f"{row['neither_ms'] / row['both_ms']:.2f}x", f"{row['both_latent_error']:.1e}"]


def mixed_part(model: str) -> str:
    """The mixed run of ``model``: a line per prompt, a column per run, and the plot."""
    path = figures.mixed_path(model)
    picture = f"![{texts.ENGLISH['plot']}](images/{path.stem}.png)"
    result = figures.load(path)
    title = f"{figures.MODELS[model]}, the mixed run"
    return headed(title, result, picture, "Seconds per prompt, everything included:", mixed_table(result))


def mixed_table(result: dict[str, Any]) -> str:
    """A line per prompt, a column per run, and the sums."""
    every = [(how if how == "eager" else f"{how}, {name}", run) for how, name, run in figures.runs(result)]
    prompts = result["runs"]["eager"]["cold"]["prompts"]
    lines = [[size(p), str(p["images"]), *(at(run, i) for _, run in every)] for i, p in enumerate(prompts)]
    sums = [outcome(texts.ENGLISH, run, len(prompts)) for _, run in every]
    return table(["Size", "Images", *(name for name, _ in every)], [*lines, ["All", "", *sums]])


def at(run: dict[str, Any], index: int) -> str:
    """Seconds of a prompt, if the run came that far."""
    prompts = run["prompts"]
    return f"{prompts[index]['seconds']:.2f}" if index < len(prompts) else ""


# Files ------------------------------------------------------------------------------------------------------------

BLOCKS: dict[Path, Callable[[], str]] = {
    ROOT / "README.md": lambda: readme(texts.ENGLISH, wrap=True),
    ROOT / "README.zh-CN.md": lambda: readme(texts.CHINESE, wrap=False),
    ROOT / "docs" / "performance.md": document,
    ROOT / "docs" / "fleet.md": fleet_tables.document,
}


def rewritten(text: str, block: str) -> str:
    """``text`` with ``block`` between its markers. Raises ValueError if a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the file must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def main() -> None:
    """Prints the blocks, or writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the files in place")
    chosen = parser.parse_args()
    for path, block in BLOCKS.items():
        if chosen.write:
            path.write_text(rewritten(path.read_text(), block()))
        sys.stdout.write(f"{path.relative_to(ROOT)}{' written' if chosen.write else chr(10) + block()}\n")


if __name__ == "__main__":
    main()
