"""How Skip Blocks forecasts and when: axis, damping and density of its full steps, each measured against the others.

python -m bench.skip_ablation [--prompts 16] [--json FILE]

On the demo model at 256x256 and depth auto, PSNR to the pictures without skipping. *Axis*: what the forecast's line is
drawn over. *Damping*: the share of its slope that is believed. *Density*: the power by which full steps are placed; 1
spaces them evenly, above 1 they are dense early and sparse late. Plain DeepCache is there for scale.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()
embed.bare_demo()

from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
from anyshape.accel.skip.run import AXES  # noqa: E402
from anyshape.accel.skip.settings import SkipSettings  # noqa: E402

from bench import measure  # noqa: E402
from bench.skip_baselines import PlainDeepCache  # noqa: E402
from bench.skip_runs import Demo, quality  # noqa: E402

SIZE = (256, 256)
STEPS = (20, 30)
INTERVALS = (2, 3)
DAMPINGS = (0.5, 0.75, 1.0, 1.25)
DENSITIES = (0.8, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6)
BASE = ("sigma", 1.0, 1.2)  # axis, damping and density where they are not the one that varies


class Try(NamedTuple):
    """One way to forecast and to place the full steps."""

    axis: str
    damping: float
    density: float


def tries() -> list[Try]:
    """Every axis with every damping, then every density; each once."""
    axis, damping, density = BASE
    found = [Try(each, share, density) for each in AXES for share in DAMPINGS]
    found += [Try(axis, damping, power) for power in DENSITIES]
    return list(dict.fromkeys(found))


def measured(demo: Demo, chosen: list[Try]) -> list[dict[str, Any]]:
    """A row for each way, number of steps and interval."""
    rows = []
    for steps in STEPS:
        reference = demo.run(demo.patcher, steps, SIZE)
        for interval in INTERVALS:
            ways: list[tuple[dict[str, Any], SkipSettings]] = [({"method": "plain"}, PlainDeepCache(interval))]
            ways += [({"method": "ours", **one._asdict()}, SkipSettings(interval, **one._asdict())) for one in chosen]
            for names, settings in ways:
                found = quality(demo.run(demo.skipping(settings), steps, SIZE), reference)
                rows.append({"steps": steps, "interval": interval, **names, **found})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Prints the rows and writes the JSON."""
    parser = measure.options(__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    chosen = parser.parse_args()
    with torch.inference_mode():
        demo = Demo(chosen.prompts)
        figures = demo.conditions() | {"width": SIZE[0], "height": SIZE[1], "base": Try(*BASE)._asdict()}
        measure.write(chosen.json, figures | {"rows": measured(demo, tries())})


if __name__ == "__main__":
    main()
