"""Writes the figures of bench/results into the READMEs, docs/performance.md and docs/fleet.md, between their markers.

python -m bench.tables [--write]

Without ``--write`` it prints what it would write. Needs neither torch nor ComfyUI.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import figures, fleet_tables, skip_tables, texts, workflow_tables
from bench.markdown import conditions, headed, said, size, table
from tools.paths import ROOT

VERIFY = figures.RESULTS / "verify-sdxl.json"
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


def even(row: dict[str, Any], result: dict[str, Any], name: str) -> str:
    """Break-even of a start: empty if starts were not measured, a dash if it never comes."""
    if not result["starts"] or result["starts"][f"{name}_seconds"] is None:
        return ""
    count = row["break_even_images"][name]
    return "–" if count is None else str(count)


# README -----------------------------------------------------------------------------------------------------------


def readme(words: dict[str, Any], wrap: bool) -> str:
    """The block of a README."""
    unet, vae = figures.load(figures.forward_path("sdxl")), figures.load(figures.RESULTS / "vae.json")
    above = said(words, [words["conditions"].format(**conditions(unet)), words["legend"]], wrap)
    below = said(words, [starts(words, unet), memory(words, unet), vae_sentence(words, vae)], wrap)
    picture = f"![{words['plot']}](docs/images/{figures.mixed_path('sdxl').stem}.png)"
    mixed = said(words, [mixed_sentence(words, figures.load(figures.mixed_path("sdxl")))], wrap)
    restart = said(words, [restart_sentence(words, figures.load(workflow_tables.restart_path("sdxl")))], wrap)
    skip = said(words, [skip_tables.sentence(words)], wrap)
    return "\n\n".join([above, table(words["head"], readme_rows(unet, vae)), below, picture, mixed, restart, skip])


def readme_rows(unet: dict[str, Any], vae: dict[str, Any]) -> list[list[str]]:
    """A line a case of the UNet with the VAE's figures of that size; then the sizes that only the VAE has."""
    decodes = {(row["width"], row["height"], row["images"]): row for row in vae["rows"]}
    lines = [readme_row(row, unet, decodes) for row in unet["rows"]]
    alone = [[size(row), str(row["images"]), "", "", "", "", decode(row)] for row in decodes.values()]
    return lines + alone


def readme_row(row: dict[str, Any], unet: dict[str, Any], decodes: dict[tuple, dict[str, Any]]) -> list[str]:
    """One case; takes its size out of ``decodes``."""
    both = [even(row, unet, "cold"), even(row, unet, "warm")]
    return [
        size(row),
        str(row["images"]),
        str(row["rows"]),
        pair(row["eager_ms"], row["compiled_ms"]),
        two(row["first_call_extra_seconds"]),
        " / ".join(both) if all(both) else "",
        decode(decodes.pop((row["width"], row["height"], row["images"]), None)),
    ]


def decode(row: dict[str, Any] | None) -> str:
    """Milliseconds of a decode, if measured."""
    return pair(row["eager_ms"], row["compiled_ms"]) if row else ""


def starts(words: dict[str, Any], unet: dict[str, Any]) -> str:
    """What the first run of a process costs; nothing if one of the two was not measured."""
    found = unet["starts"]
    if not found or None in (found["cold_seconds"], found["warm_seconds"]):
        return ""
    seconds = {name: f"{found[f'{name}_seconds']:.2f}" for name in ("cold", "warm")}
    return words["starts"].format(size=size(found), **seconds)


def memory(words: dict[str, Any], unet: dict[str, Any]) -> str:
    """Device memory of all graphs together."""
    return words["memory"].format(count=len(unet["rows"]), memory=f"{unet['memory_mib']:,.0f}")


def vae_sentence(words: dict[str, Any], vae: dict[str, Any]) -> str:
    """The VAE's first decode, its encoder and its error, all at its first size."""
    first = vae["rows"][0]
    return words["vae"].format(
        first=f"{first['first_seconds']:.2f}",
        size=size(first),
        encode=pair(first["encode_eager_ms"], first["encode_compiled_ms"]),
        error=scientific(first["error_to_float32"]),
        eager_error=scientific(first["eager_error_to_float32"]),
    )


def restart_sentence(words: dict[str, Any], result: dict[str, Any]) -> str:
    """The first picture of a process, by how it starts."""
    seconds = {start: two(workflow_tables.fastest(runs)["seconds"]) for start, runs in result["starts"].items()}
    return words["restart"].format(size="x".join(map(str, result["size"])), steps=result["steps"], **seconds)


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
    parts.append(vae_part())
    parts += [mixed_part(model) for model in figures.MODELS if figures.mixed_path(model).exists()]
    parts += [verify_part(figures.load(VERIFY))] if VERIFY.exists() else []
    return "\n\n".join([*parts, *skip_tables.parts(), *workflow_tables.parts()])


def forward_part(model: str) -> str:
    """One forward of ``model``."""
    result = figures.load(figures.forward_path(model))
    head = "Size | Images | Rows | Eager, ms | AnyShape, ms | Faster | First call, s | Break-even, cold | warm | Error"
    lines = table(head.split(" | "), [forward_row(row, result) for row in result["rows"]])
    found = f"All {len(result['rows'])} shapes together take {result['memory_mib']:,.0f} MiB above eager."
    note = said(texts.ENGLISH, [starts(texts.ENGLISH, result), found], wrap=True)
    return headed(f"{figures.MODELS[model]}, one forward", result, lines, note)


def forward_row(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """One case."""
    return [
        size(row),
        str(row["images"]),
        str(row["rows"]),
        three(row["eager_ms"]),
        three(row["compiled_ms"]),
        f"{row['eager_ms'] / row['compiled_ms']:.2f}x",
        two(row["first_call_extra_seconds"]),
        even(row, result, "cold"),
        even(row, result, "warm"),
        scientific(figures.error(row)),
    ]


def vae_part() -> str:
    """The VAE."""
    result = figures.load(figures.RESULTS / "vae.json")
    head = "Size | Images | Decode, ms | Encode, ms | First decode, s | Error to float32 | Eager's error to float32"
    return headed("VAE of SDXL in bf16", result, table(head.split(" | "), map(vae_row, result["rows"])))


def vae_row(row: dict[str, Any]) -> list[str]:
    """One size."""
    return [
        size(row),
        str(row["images"]),
        decode(row),
        pair(row["encode_eager_ms"], row["encode_compiled_ms"]),
        two(row["first_seconds"]),
        scientific(row["error_to_float32"]),
        scientific(row["eager_error_to_float32"]),
    ]


def mixed_part(model: str) -> str:
    """The mixed run of ``model``: a line a prompt, a column a run, and the plot."""
    path = figures.mixed_path(model)
    picture = f"![{texts.ENGLISH['plot']}](images/{path.stem}.png)"
    result = figures.load(path)
    title = f"{figures.MODELS[model]}, the mixed run"
    return headed(title, result, picture, "Seconds a prompt, everything included:", mixed_table(result))


def verify_part(result: dict[str, Any]) -> str:
    """The mixed run with and without the check of each new size."""
    title = f"{figures.MODELS[result['model']]}, the mixed run: what verify costs"
    said = "Seconds a prompt, all on one host. *unverified*: `verify` off."
    return headed(title, result, said, mixed_table(result))


def mixed_table(result: dict[str, Any]) -> str:
    """A line a prompt, a column a run, and the sums."""
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
