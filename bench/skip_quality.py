"""How near the pictures of Skip Blocks come to those without it, and for how much time: a frontier.

python -m bench.skip_quality [--prompts 64] [--steps 30] [--json FILE]

On the demo model, the only trained weights at hand: a small UNet that draws emoji, so what it shows of other models is
the order of the methods at best. Every picture is compared with the one of the same prompt and seed that was sampled in
``--steps`` full steps. The methods: fewer steps, plain DeepCache and EasyCache (``bench.skip_baselines``), and ours.

A row's ``cost`` is in full forwards of the UNet: those in which every block ran, and the share of its FLOPs for those
in which some did. ``seconds``: the sampling of a picture in a batch, without the VAE; the median of the batches.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()
embed.bare_demo()

from collections.abc import Iterator  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
from anyshape.accel.skip.settings import SkipSettings  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from bench import measure  # noqa: E402
from bench.skip_baselines import PlainDeepCache, easycache  # noqa: E402
from bench.skip_runs import Demo, Sampled, quality  # noqa: E402

SIZE, ODD_SIZE = (256, 256), (200, 264)  # width, height
FEWER = (1 / 3, 0.4, 13 / 30, 0.5, 17 / 30, 0.6, 2 / 3, 0.8)  # of the steps
INTERVALS = (2, 3, 4, 5)
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3)
SHALLOW = "1"  # the second depth; auto is 0 on this model


class Way(NamedTuple):
    """A line of the table: a method at one setting."""

    method: str
    setting: float  # steps, interval or threshold
    patcher: ModelPatcher
    steps: int
    skips: SkipSettings | None = None


def fewer_steps(demo: Demo, steps: int, shares: tuple[float, ...]) -> Iterator[Way]:
    """The model as it is, in fewer steps."""
    for count in dict.fromkeys(max(1, round(share * steps)) for share in shares):
        yield Way("fewer steps", count, demo.patcher, count)


def skipping(demo: Demo, steps: int, intervals: tuple[int, ...]) -> Iterator[Way]:
    """Plain DeepCache and ours, at one depth."""
    for method, kind in (("DeepCache", PlainDeepCache), ("Skip Blocks", SkipSettings)):
        for interval in intervals:
            settings = kind(interval)
            yield Way(method, interval, demo.skipping(settings), steps, settings)


def deeper(demo: Demo, steps: int) -> Iterator[Way]:
    """Ours with more blocks in a skipped step."""
    for interval in INTERVALS:
        settings = SkipSettings(interval, SHALLOW)
        yield Way(f"Skip Blocks, depth {SHALLOW}", interval, demo.skipping(settings), steps, settings)


def cached(demo: Demo, steps: int) -> Iterator[Way]:
    """EasyCache."""
    for threshold in THRESHOLDS:
        yield Way("EasyCache", threshold, easycache(demo.patcher, threshold), steps)


def ways(demo: Demo, steps: int) -> Iterator[tuple[tuple[int, int], Way]]:
    """(size, way) of every row; the odd size has a few only."""
    for way in (*fewer_steps(demo, steps, FEWER), *skipping(demo, steps, INTERVALS), *deeper(demo, steps)):
        yield SIZE, way
    for way in cached(demo, steps):
        yield SIZE, way
    for way in (*fewer_steps(demo, steps, (0.5,)), *skipping(demo, steps, (2, 3))):
        yield ODD_SIZE, way


def row(demo: Demo, way: Way, size: tuple[int, int], sampled: Sampled) -> dict[str, Any]:
    """What a row says besides how near the pictures come."""
    share = demo.share(way.skips, size) if way.skips else 0.0
    return {
        "width": size[0],
        "height": size[1],
        "method": way.method,
        "setting": way.setting,
        "depth": demo.depth(way.skips, size) if way.skips else None,
        "full": round(sampled.full, 2),
        "skipped": round(sampled.skipped, 2),
        "cost": round(sampled.full + sampled.skipped * share, 2),
        "seconds": round(sampled.seconds, 4),
    }


def measured(demo: Demo, steps: int) -> Iterator[dict[str, Any]]:
    """The rows, those of a size after that of every step in full."""
    references: dict[tuple[int, int], Sampled] = {}
    for size, way in ways(demo, steps):
        if size not in references:
            references[size] = demo.run(demo.patcher, steps, size)
            yield row(demo, Way("every step", steps, demo.patcher, steps), size, references[size])
        sampled = demo.run(way.patcher, way.steps, size)
        yield row(demo, way, size, sampled) | quality(sampled, references[size])


def main() -> None:
    """Prints the rows and writes the JSON after each, so that what is measured is kept."""
    parser = measure.options(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        demo = Demo(chosen.prompts)
        demo.warm_up()
        for found in measured(demo, chosen.steps):
            rows.append(found)
            print(found, flush=True)
            measure.write(chosen.json, demo.conditions() | {"steps": chosen.steps, "rows": rows})


if __name__ == "__main__":
    main()
