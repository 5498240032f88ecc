"""How near the pictures of Skip Blocks come to those without it, and for how much time: a frontier.

python -m bench.skip_quality [--prompts 64] [--steps 30] [--json FILE]

On the demo model, the only trained weights at hand: a small UNet that draws emoji, so what it shows of other models is
the order of the methods at best. Every picture is compared with the one of the same prompt and seed that was sampled in
``--steps`` full steps. The methods: fewer steps, plain DeepCache and EasyCache (``bench.skip_baselines``), and ours.

A row's ``cost`` is in full forwards of the UNet: those in which every block ran, and the share of its FLOPs for those
in which some did. ``seconds``: the sampling of a picture in a batch, without the VAE; the fastest batch.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()
embed.bare_demo()

import argparse  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
from anyshape.accel.skip.settings import SkipSettings  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from bench import measure  # noqa: E402
from bench.skip_baselines import PlainDeepCache, easycache  # noqa: E402
from bench.skip_runs import Demo, Tally  # noqa: E402

SIZE, ODD_SIZE = (256, 256), (200, 264)  # width, height
WHOLE = "every step"
FEWER = (1 / 3, 0.4, 0.5, 0.6, 0.8)  # of the steps
INTERVALS, FEW_INTERVALS = (2, 3, 4, 5), (2, 3)
THRESHOLDS = (0.05, 0.1, 0.2, 0.3)
SHALLOW = "1"  # the second depth; auto is 0 on this model


class Way(NamedTuple):
    """A line of the table: a method at one setting."""

    method: str
    setting: float  # steps, interval or threshold
    patcher: ModelPatcher
    steps: int


def whole(demo: Demo, steps: int) -> Way:
    """What all are compared with."""
    return Way(WHOLE, steps, demo.patcher, steps)


def fewer_steps(demo: Demo, steps: int, shares: tuple[float, ...]) -> Iterator[Way]:
    """The model as it is, in fewer steps."""
    for count in dict.fromkeys(max(1, round(share * steps)) for share in shares):
        yield Way("fewer steps", count, demo.patcher, count)


def skipping(demo: Demo, steps: int, intervals: tuple[int, ...]) -> Iterator[Way]:
    """Plain DeepCache and ours, at one depth."""
    for method, kind in (("DeepCache", PlainDeepCache), ("Skip Blocks", SkipSettings)):
        for interval in intervals:
            settings = kind(interval)
            yield Way(method, interval, demo.skipping(settings), steps)


def deeper(demo: Demo, steps: int) -> Iterator[Way]:
    """Ours with more blocks in a skipped step."""
    for interval in INTERVALS:
        settings = SkipSettings(interval, SHALLOW)
        yield Way(f"Skip Blocks, depth {SHALLOW}", interval, demo.skipping(settings), steps)


def cached(demo: Demo, steps: int) -> Iterator[Way]:
    """EasyCache."""
    for threshold in THRESHOLDS:
        yield Way("EasyCache", threshold, easycache(demo.patcher, threshold), steps)


def ways(demo: Demo, steps: int) -> list[Way]:
    """Every row of the first size."""
    groups = (
        fewer_steps(demo, steps, FEWER),
        skipping(demo, steps, INTERVALS),
        deeper(demo, steps),
        cached(demo, steps),
    )
    return [whole(demo, steps), *(way for group in groups for way in group)]


def few_ways(demo: Demo, steps: int) -> list[Way]:
    """Those of the odd size."""
    return [whole(demo, steps), *fewer_steps(demo, steps, (0.5,)), *skipping(demo, steps, FEW_INTERVALS)]


def row(way: Way, size: tuple[int, int], tally: Tally) -> dict[str, Any]:
    """A setting in the JSON."""
    return {
        "width": size[0],
        "height": size[1],
        "prompts": len(tally.psnr),
        "method": way.method,
        "setting": way.setting,
        "depth": tally.depth,
        "full": round(tally.full, 2),
        "skipped": round(tally.skipped, 2),
        "cost": round(tally.full + tally.skipped * tally.share, 2),
        "seconds": round(min(tally.seconds), 4),
    } | ({} if way.method == WHOLE else tally.quality())


def measured(demo: Demo, chosen: list[Way], size: tuple[int, int]) -> Iterator[list[dict[str, Any]]]:
    """The rows after each batch; the first way gives the pictures that all are compared with.

    Batch by batch, so that each way is timed at several moments and a busy minute of the machine hits all alike.
    """
    tallies = [Tally() for _ in chosen]
    for batch in demo.batches:
        reference = None
        for way, tally in zip(chosen, tallies, strict=True):
            sampled = demo.run(way.patcher, way.steps, size, batch)
            reference = reference or sampled
            tally.add(sampled, reference)
        yield [row(way, size, tally) for way, tally in zip(chosen, tallies, strict=True)]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = measure.options(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def main() -> None:
    """Prints the rows and writes the JSON, after each batch."""
    chosen = arguments()
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    with torch.inference_mode():
        demo = Demo(chosen.prompts)
        demo.warm_up()
        told = demo.conditions() | {"prompts": chosen.prompts, "steps": chosen.steps}
        for size, listed in ((SIZE, ways), (ODD_SIZE, few_ways)):
            for found in measured(demo, listed(demo, chosen.steps), size):
                rows[size] = found
                print(*found, sep="\n", end="\n\n", flush=True)
                measure.write(chosen.json, told | {"rows": [one for done in rows.values() for one in done]})


if __name__ == "__main__":
    main()
