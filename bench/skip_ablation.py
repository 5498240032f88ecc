"""How Skip Blocks forecasts and when: each of its choices, measured against the others.

python -m bench.skip_ablation [--model unet|transformer] [--prompts 16] [--steps 20,30] [--intervals 2,3,4]
    [--axes step,sigma,log_sigma] [--densities 1.0,1.1,drift] [--depths 0,1,2] [--orders 1,2] [--json FILE]

A list may be none.

On a model of the demo at 256x256, PSNR to the pictures without skipping. *Order*: of the polynomial that is drawn
through the last full steps. *Axis*: what it is drawn over. *Damping*: the share of its slope that is believed.
*Density*: the power by which full steps are placed, both ends among them; 1 spaces them evenly, above 1 they are dense
early and sparse late; none: as Skip Blocks does by itself; drift: where ``bench.skip_drift`` puts as many. *Depth*: how
many blocks at either end run on every step. Plain DeepCache is there for scale.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()
embed.bare_demo()

from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
from anyshape.accel.skip.settings import AUTO, SkipSettings  # noqa: E402

from bench import measure, skip_drift  # noqa: E402
from bench.skip_baselines import AXES, OfOrder, Placed, PlainDeepCache  # noqa: E402
from bench.skip_runs import Demo, Tally  # noqa: E402

SIZE = (256, 256)
STEPS = (20, 30)
INTERVALS = (2, 3, 4)
DAMPINGS = (0.5, 0.75, 1.0, 1.25)
DRIFT = "drift"
NOTHING = "none"  # instead of a list
DENSITIES = (0.8, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, DRIFT)
DEPTHS = ("0", "1", "2")
ORDERS = (1, 2)


class Try(NamedTuple):
    """One way to forecast and to place the full steps."""

    axis: str = "sigma"
    damping: float = 1.0
    density: float | str | None = None  # as it fits the model
    of_order: int = 1
    depth: str = AUTO


BASE = Try()  # what the choices are that do not vary


def tries(
    axes: Sequence[str] = tuple(AXES), densities: Sequence[float | str] = DENSITIES, depths: Sequence[str] = DEPTHS,
    orders: Sequence[int] = ORDERS,
) -> list[Try]:  # fmt: skip
    """Of each order: every axis with every damping, every density, every depth; each once."""
    found = []
    for base in (BASE._replace(of_order=order) for order in orders):
        found += [base, *(base._replace(axis=each, damping=share) for each in axes for share in DAMPINGS)]
        found += [base._replace(density=power) for power in densities]
        found += [base._replace(depth=depth) for depth in depths]
    return list(dict.fromkeys(found))


Make = Callable[[int], SkipSettings]  # the settings at an interval


def ways(chosen: list[Try], by_drift: Callable[[int], frozenset[int]]) -> list[tuple[dict[str, Any], Make]]:
    """(what the row says of it, its settings), plain DeepCache first. by_drift: which steps are full at an interval."""

    def settings(one: Try, interval: int) -> SkipSettings:
        how = {"of_order": one.of_order, "axis": one.axis, "damping": one.damping, "depth": one.depth}
        if one.density == DRIFT:
            return Placed(interval, **how, placed=by_drift(interval))
        return OfOrder(interval, **how, density_of=one.density)

    ours = [({"method": "ours", **one._asdict()}, partial(settings, one)) for one in chosen]
    return [({"method": "plain"}, PlainDeepCache), *ours]


def measured(
    demo: Demo, chosen: list[Try], numbers: Sequence[int] = STEPS, intervals: Sequence[int] = INTERVALS
) -> Iterator[dict[str, Any]]:
    """A row for each number of steps, interval and way."""
    for steps in numbers:
        references = [demo.run(demo.patcher, steps, SIZE, batch) for batch in demo.batches]
        by_drift = _by_drift(demo, steps) if any(one.density == DRIFT for one in chosen) else frozenset
        for interval in intervals:
            for names, settings in ways(chosen, by_drift):
                tally, patcher = Tally(), demo.skipping(settings(interval))
                for batch, reference in zip(demo.batches, references, strict=True):
                    tally.add(demo.run(patcher, steps, SIZE, batch), reference)
                cost = round(tally.full + tally.skipped * tally.share, 2)
                yield {"steps": steps, "interval": interval, **names, "cost": cost, **tally.quality()}


def _by_drift(demo: Demo, steps: int) -> Callable[[int], frozenset[int]]:
    """Which steps are full at an interval, by the features of these prompts."""
    features, sigmas = demo.features(steps, SIZE), demo.sigmas(steps)
    return lambda interval: skip_drift.best(features, sigmas, -(-steps // interval))


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [] if text == NOTHING else [kind(each) for each in text.split(",")]


def main() -> None:
    """Prints the rows and writes the JSON."""
    parser = measure.options(__doc__)
    parser.add_argument("--model", default="unet", choices=["unet", "transformer"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=_listed(int), default=STEPS)
    parser.add_argument("--intervals", type=_listed(int), default=INTERVALS)
    parser.add_argument("--axes", type=_listed(str), default=tuple(AXES))
    density: Callable[[str], float | str] = lambda text: text if text == DRIFT else float(text)  # noqa: E731
    parser.add_argument("--densities", type=_listed(density), default=DENSITIES)
    parser.add_argument("--depths", type=_listed(str), default=DEPTHS)
    parser.add_argument("--orders", type=_listed(int), default=ORDERS)
    chosen = parser.parse_args()
    with torch.inference_mode():
        demo = Demo(chosen.prompts, chosen.model)
        figures = demo.conditions() | {
            "model": chosen.model,
            "prompts": chosen.prompts,
            "width": SIZE[0],
            "height": SIZE[1],
            "base": BASE._asdict(),
        }
        rows: list[dict[str, Any]] = []
        varied = tries(chosen.axes, chosen.densities, chosen.depths, chosen.orders)
        for row in measured(demo, varied, chosen.steps, chosen.intervals):
            rows.append(row)
            print(row, flush=True)
            measure.write(chosen.json, figures | {"rows": rows})


if __name__ == "__main__":
    main()
