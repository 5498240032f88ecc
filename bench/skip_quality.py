"""How near the pictures of Skip Blocks come to those without it, and for how much time: a frontier.

python -m bench.skip_quality [--prompts 64] [--models unet,transformer] [--samplers euler,dpmpp_2m] [--steps 20,30]
    [--sizes 256x256,200x264] [--json FILE]

On the demo's models, the only trained weights at hand: a small UNet and a small transformer that draw emoji, so what
it shows of other models is the order of the methods at best. Every picture is compared with the one of the same prompt
and seed that was sampled with every step in full. The methods: fewer steps, those of ``bench.skip_baselines``, and
ours.

A row's ``cost`` is in full forwards of the model: those in which every block ran, and the share of its FLOPs for those
in which some did. ``seconds``: the sampling of a picture in a batch, without the VAE; the fastest batch.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()
embed.bare_demo()

import argparse  # noqa: E402
import logging  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from functools import partial  # noqa: E402
from itertools import product  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
from anyshape.accel.skip.settings import SkipSettings  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from bench import measure  # noqa: E402
from bench.skip_baselines import MagCache, PlainDeepCache, TaylorSeer, easycache  # noqa: E402
from bench.skip_runs import Demo, Tally  # noqa: E402
from bench.skip_tables import CACHE, FEWER, MAGNITUDE, OURS, PLAIN, TAYLOR, WHOLE  # noqa: E402

SHARES = (1 / 3, 0.4, 0.5, 0.6, 0.8)  # of the steps
INTERVALS = (2, 3, 4, 5)
MAGNITUDES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
WARM_UP = 10  # steps: with a full and a skipped forward


class Case(NamedTuple):
    """What every method is measured at."""

    sampler: str
    steps: int
    size: tuple[int, int]  # width, height


class Way(NamedTuple):
    """A line of the table: a method at one setting."""

    method: str
    setting: float  # steps, interval or threshold
    patcher: ModelPatcher
    steps: int


def whole(demo: Demo, case: Case) -> Iterator[Way]:
    """What all are compared with."""
    yield Way(WHOLE, case.steps, demo.patcher, case.steps)


def fewer_steps(demo: Demo, case: Case) -> Iterator[Way]:
    """The model as it is, in fewer steps."""
    for count in dict.fromkeys(max(1, round(share * case.steps)) for share in SHARES):
        yield Way(FEWER, count, demo.patcher, count)


def skipping(method: str, kind: type[SkipSettings], demo: Demo, case: Case) -> Iterator[Way]:
    """A method on the machinery of our node."""
    for interval in INTERVALS:
        yield Way(method, interval, demo.skipping(kind(interval)), case.steps)


def by_magnitude(demo: Demo, case: Case) -> Iterator[Way]:
    """MagCache; what it needs to know of the model is measured here."""
    found = tuple(demo.magnitudes(case.steps, case.size, case.sampler))
    for threshold in MAGNITUDES:
        settings = MagCache(2, threshold=threshold, magnitudes=found)
        yield Way(MAGNITUDE, threshold, demo.skipping(settings), case.steps)


def cached(demo: Demo, case: Case) -> Iterator[Way]:
    """EasyCache."""
    for threshold in THRESHOLDS:
        yield Way(CACHE, threshold, easycache(demo.patcher, threshold), case.steps)


METHODS: tuple[Callable[[Demo, Case], Iterator[Way]], ...] = (
    whole,
    fewer_steps,
    partial(skipping, PLAIN, PlainDeepCache),
    partial(skipping, TAYLOR, TaylorSeer),
    by_magnitude,
    partial(skipping, OURS, SkipSettings),
    cached,
)


def ways(demo: Demo, case: Case) -> list[Way]:
    """Every row of a case, what all are compared with first."""
    return [way for method in METHODS for way in method(demo, case)]


def row(demo: Demo, case: Case, way: Way, tally: Tally) -> dict[str, Any]:
    """A setting in the JSON."""
    return {
        "model": demo.architecture,
        "sampler": case.sampler,
        "steps": case.steps,
        "width": case.size[0],
        "height": case.size[1],
        "prompts": len(tally.psnr),
        "method": way.method,
        "setting": way.setting,
        "depth": tally.depth,
        "full": round(tally.full, 2),
        "skipped": round(tally.skipped, 2),
        "cost": round(tally.full + tally.skipped * tally.share, 2),
        "seconds": round(min(tally.seconds), 5),
    } | ({} if way.method == WHOLE else tally.quality())


def measured(demo: Demo, case: Case) -> list[dict[str, Any]]:
    """The rows of a case.

    Batch by batch, so that each way is timed at several moments and a busy minute of the machine hits all alike.
    """
    chosen = ways(demo, case)
    tallies = [Tally() for _ in chosen]
    for batch in demo.batches:
        reference = None
        for way, tally in zip(chosen, tallies, strict=True):
            sampled = demo.run(way.patcher, way.steps, case.size, batch, case.sampler)
            reference = reference or sampled
            tally.add(sampled, reference)
    return [row(demo, case, way, tally) for way, tally in zip(chosen, tallies, strict=True)]


def warm_up(demo: Demo, size: tuple[int, int]) -> None:
    """So that the first setting does not pay for what a size takes once."""
    for patcher in (demo.patcher, demo.skipping(SkipSettings())):
        demo.run(patcher, WARM_UP, size, demo.batches[0])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = measure.options(__doc__)
    listed: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--models", type=listed, default=["unet", "transformer"])
    parser.add_argument("--samplers", type=listed, default=["euler", "dpmpp_2m"])
    parser.add_argument("--steps", type=listed, default=["30", "20"])
    parser.add_argument("--sizes", type=listed, default=["256x256", "200x264"])
    parser.add_argument("--dtype", default="fp32")
    return parser.parse_args()


def main() -> None:
    """Prints the rows and writes the JSON, after each case."""
    chosen = arguments()
    logging.getLogger().setLevel(logging.WARNING)
    sizes = [tuple(map(int, text.split("x"))) for text in chosen.sizes]
    cases = [Case(s, int(n), size) for size, s, n in product(sizes, chosen.samplers, chosen.steps)]
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for architecture in chosen.models:
            demo, warm = Demo(chosen.prompts, architecture, chosen.dtype), set()
            for case in cases:
                if case.size not in warm:
                    warm_up(demo, case.size)
                    warm.add(case.size)
                found = measured(demo, case)
                rows += found
                print(*found, sep="\n", end="\n\n", flush=True)
                measure.write(chosen.json, demo.conditions() | {"prompts": chosen.prompts, "rows": rows})


if __name__ == "__main__":
    main()
