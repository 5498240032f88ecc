"""The demo: the real ComfyUI server, many sizes and batches, beside ComfyUI alone, and proof that nothing recompiles.

    make demo                      or, once that has set up .venv:
    .venv/bin/python demo/run.py [--quick] [--out FOLDER]

Prints one table and writes the pictures, a contact sheet and report.json. The exit code is 1 when a picture differs
from eager by more than the tolerance, when anything recompiles, or when a prompt fails.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent

if __package__ != "anyshape_demo":  # started by its path: the pack's folder leaves sys.path, the demo becomes a package
    sys.path[0] = str(ROOT)
    from tools import embed

    embed.bare_demo()

from anyshape_demo.report import AS_COMFYUI, Difference, Row, contact_sheet, difference, fallbacks, problems, table
from anyshape_demo.workflows import CASES, QUICK, SAMPLER, Case, cache_info, picture

from tools.comfy_server import ComfyServer, PromptError, ServerError, prompt_seconds
from tools.embed import has_cuda
from tools.paths import ProjectError, project_env

# The difference to eager that is allowed. On the CPU all is in float32; on a GPU in half precision, where eight steps
# of sampling can carry a rounding error to the edge of a shape.
ALLOWED_CPU, ALLOWED_CUDA = Difference(4, 0.5), Difference(48, 2.0)

FIRST_SEED, STEADY_SEED = 1, 2


class Progress:
    """A bar over all prompts on a terminal, a line per prompt elsewhere; a long one shows its step or seconds."""

    def __init__(self, total: int) -> None:
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(total=total, unit="prompt", dynamic_ncols=True, disable=not self.terminal)
        self.label, self.start, self.told = "", 0.0, 0.0

    def begin(self, label: str) -> None:
        """A prompt is about to be queued."""
        self.label, self.start = label, time.monotonic()
        self.told = self.start
        self.bar.set_postfix_str(label)

    def message(self, kind: str, data: dict[str, Any]) -> None:
        """Called with each of the server's messages, and with "waiting" every second."""
        now = time.monotonic()
        if kind == "progress":
            self.bar.set_postfix_str(f"{self.label}, step {data['value']}/{data['max']}")
        elif kind == "waiting" and self.terminal:
            self.bar.set_postfix_str(f"{self.label}, {now - self.start:.0f} s")
        elif kind == "waiting" and now - self.told > 15:
            self.told = now
            print(f"  {self.label}: {now - self.start:.0f} s so far", flush=True)

    def end(self) -> None:
        """The prompt has ended."""
        self.bar.update()
        if not self.terminal:
            print(f"  {self.label}: {time.monotonic() - self.start:.1f} s", flush=True)


class Demo:
    """Runs cases on a running server and collects their rows."""

    def __init__(self, server: ComfyServer, cases: tuple[Case, ...]) -> None:
        self.server = server
        self.rows = [Row(case) for case in cases]
        self.progress = Progress(4 * len(cases))

    def run(self) -> list[Row]:
        """Each case in eager, then with our nodes and the same seeds: one by one, as a busy machine slows both."""
        for row in self.rows:
            self._eager(row)
            self._compiled(row)
        self.progress.bar.close()
        return self.rows

    def _eager(self, row: Row) -> None:
        first, _ = self._prompt(row.case, FIRST_SEED, compiled=False)
        steady, row.eager_seconds = self._prompt(row.case, STEADY_SEED, compiled=False)
        row.pictures["eager"] = first + steady

    def _compiled(self, row: Row) -> None:
        before = self.stats()
        first, row.first_seconds = self._prompt(row.case, FIRST_SEED, compiled=True)
        steady, row.seconds = self._prompt(row.case, STEADY_SEED, compiled=True)
        after = self.stats()
        row.pictures["compiled"] = first + steady
        row.difference = difference(row.pictures["compiled"], row.pictures["eager"])
        row.states = states(before, after)
        row.compiled = total(after, "kernels") - total(before, "kernels")
        row.recompiles = total(after, "recompiles") - total(before, "recompiles")

    def _prompt(self, case: Case, seed: int, compiled: bool) -> tuple[list[Image.Image], float]:
        """The pictures of one prompt, and the seconds that it took in the server."""
        self.progress.begin(f"{case.model} {case.name} {'compiled' if compiled else 'eager'}")
        entry = self.server.run(picture(case, seed, compiled), self.progress.message)
        self.progress.end()
        images = [self.server.view(image) for image in entry["outputs"]["save"]["images"]]
        return images, prompt_seconds(entry)

    def stats(self) -> dict[str, Any]:
        """The pack's counters now."""
        return self.server.get("/anyshape/stats").json()


def total(stats: dict[str, Any], counter: str) -> int:
    """A counter summed over all models."""
    return sum(model[counter] for model in stats["models"])


def states(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """How each kind of model ran in between: the state of the shapes that were called, by kind."""
    calls = {key: shape["calls"] for key, _, shape in _shapes(before)}
    ran: dict[str, set[str]] = {}
    for key, kind, shape in _shapes(after):
        if shape["calls"] > calls.get(key, 0):
            ran.setdefault(kind, set()).add(shape["state"])
    return {kind: "+".join(sorted(found)) for kind, found in ran.items()}


def _shapes(stats: dict[str, Any]) -> list[tuple[tuple, str, dict[str, Any]]]:
    return [
        ((number, shape["key"]), model["kind"], shape)
        for number, model in enumerate(stats["models"])
        for shape in model["shapes"]
    ]


def info_node(server: ComfyServer) -> tuple[dict[str, Any], Image.Image]:
    """What the Shape Cache Info node gives in a workflow: its stats and its chart."""
    outputs = server.run(cache_info())["outputs"]
    return json.loads(outputs["stats"]["text"][0]), server.view(outputs["chart"]["images"][0])


def write(out: Path, rows: list[Row], stats: dict[str, Any], chart: Image.Image) -> None:
    """Pictures, contact sheet, chart and report.json."""
    shutil.rmtree(out / "pictures", ignore_errors=True)
    (out / "pictures").mkdir(parents=True)
    for number, row in enumerate(rows, 1):
        for kind, images in row.pictures.items():
            for index, image in enumerate(images):
                size = f"{row.case.model}_{row.case.width}x{row.case.height}"
                image.save(out / "pictures" / f"{number:02}_{size}_b{row.case.batch}_{kind}_{index}.png")
    contact_sheet(rows, has_cuda()).save(out / "contact_sheet.png")
    chart.save(out / "shape_cache.png")
    report = {**stats, "prompts": [row.entry() for row in rows]}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def main_job(server: ComfyServer, cases: tuple[Case, ...], out: Path, allowed: Difference) -> list[str]:
    """Run the cases, print the table, write everything to `out`; returns what is wrong, in plain words."""
    rows = Demo(server, cases).run()
    stats, chart = info_node(server)
    write(out, rows, stats, chart)
    print(f"\n{table(rows, has_cuda())}\n")
    steps = f"{SAMPLER['steps']} steps and decode"
    if has_cuda():
        print(f"Times are seconds per prompt ({steps}): first and later with AnyShape, and with ComfyUI alone.")
    else:
        print(f"{AS_COMFYUI}: on a CPU AnyShape repeats ComfyUI's own operations. The speed is for NVIDIA GPUs.")
    print(f"Differences are steps of 8-bit colour; {allowed} is allowed.")
    if stats["fallbacks"] and has_cuda():
        print(fallbacks(stats))
    return problems(rows, allowed)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Show the pack at work in the real ComfyUI server.")
    parser.add_argument("--quick", action="store_true", help="six small cases instead of all")
    parser.add_argument("--out", type=Path, default=ROOT / "demo" / "out", help="where the pictures and the report go")
    parser.add_argument(
        "--server-argument", action="append", default=[], metavar="ARGUMENT",
        help="one more argument for ComfyUI: --server-argument=--disable-cuda-malloc",
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    """The whole demo; returns the exit code."""
    os.environ.update(project_env())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The demo was stopped."))  # so that the server is stopped too
    options, start = parse(), time.monotonic()
    allowed = ALLOWED_CUDA if has_cuda() else ALLOWED_CPU
    print("Starting the ComfyUI server with the pack and the demo's nodes (10 to 20 s) ...", flush=True)
    try:
        with ComfyServer(arguments=tuple(options.server_argument)) as server:
            wrong = main_job(server, QUICK if options.quick else CASES, options.out, allowed)
    except (PromptError, ServerError, ProjectError) as problem:
        print(f"\nThe demo failed: {problem}", file=sys.stderr)
        return 1
    print(f"Pictures, contact sheet and report.json are in {os.path.relpath(options.out)}.")
    print(f"The whole demo took {time.monotonic() - start:.0f} s.")
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
