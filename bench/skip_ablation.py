"""How Skip Blocks forecasts and when: each of its choices, measured against the others.

python -m bench.skip_ablation [--model unet|transformer] [--prompts 16] [--json FILE]

On a model of the demo at 256x256, PSNR to the pictures without skipping. *Order*: of the polynomial that is drawn
through the last full steps. *Axis*: what it is drawn over. *Damping*: the share of its slope that is believed.
*Density*: the power by which full steps are placed, both ends among them; 1 spaces them evenly, above 1 they are dense
early and sparse late; none: as Skip Blocks does by itself. *Depth*: how many blocks at either end run on every step.
Plain DeepCache is there for scale.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()
embed.bare_demo()

from collections.abc import Callable, Iterator  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
from anyshape.accel.skip.features import AXES  # noqa: E402
from anyshape.accel.skip.settings import AUTO, SkipSettings  # noqa: E402

from bench import measure  # noqa: E402
from bench.skip_baselines import OfOrder, PlainDeepCache  # noqa: E402
from bench.skip_runs import Demo, Tally  # noqa: E402

SIZE = (256, 256)
STEPS = (20, 30)
INTERVALS = (2, 3, 4)
DAMPINGS = (0.5, 0.75, 1.0, 1.25)
DENSITIES = (None, 0.8, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6)
DEPTHS = (AUTO, "0", "1", "2")


class Try(NamedTuple):
    """One way to forecast and to place the full steps."""

    axis: str = "sigma"
    damping: float = 1.0
    density: float | None = None  # as it fits the model
    of_order: int = 1
    depth: str = AUTO


BASE = Try()  # what the choices are that do not vary


def tries() -> list[Try]:
    """Of both orders: every axis with every damping, every density, every depth; each once."""
    found = []
    for base in (BASE, BASE._replace(of_order=2)):
        found += [base._replace(axis=each, damping=share) for each in AXES for share in DAMPINGS]
        found += [base._replace(density=power) for power in DENSITIES]
        found += [base._replace(depth=depth) for depth in DEPTHS]
    return list(dict.fromkeys(found))


def ways(chosen: list[Try]) -> list[tuple[dict[str, Any], Callable[[int], SkipSettings]]]:
    """(what the row says of it, its settings at an interval), plain DeepCache first."""
    ours = [({"method": "ours", **one._asdict()}, partial(OfOrder, **one._asdict())) for one in chosen]
    return [({"method": "plain"}, PlainDeepCache), *ours]


def measured(demo: Demo, chosen: list[Try]) -> Iterator[dict[str, Any]]:
    """A row for each number of steps, interval and way."""
    for steps in STEPS:
        references = [demo.run(demo.patcher, steps, SIZE, batch) for batch in demo.batches]
        for interval in INTERVALS:
            for names, settings in ways(chosen):
                tally, patcher = Tally(), demo.skipping(settings(interval))
                for batch, reference in zip(demo.batches, references, strict=True):
                    tally.add(demo.run(patcher, steps, SIZE, batch), reference)
                cost = round(tally.full + tally.skipped * tally.share, 2)
                yield {"steps": steps, "interval": interval, **names, "cost": cost, **tally.quality()}


def main() -> None:
    """Prints the rows and writes the JSON."""
    parser = measure.options(__doc__)
    parser.add_argument("--model", default="unet", choices=["unet", "transformer"])
    parser.add_argument("--prompts", type=int, default=16)
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
        for row in measured(demo, tries()):
            rows.append(row)
            print(row, flush=True)
            measure.write(chosen.json, figures | {"rows": rows})


if __name__ == "__main__":
    main()
