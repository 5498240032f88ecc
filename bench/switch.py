"""Two models by turns, of which one fits at a time (DynamicVRAM): seconds and memory, ComfyUI alone and with AnyShape.

python -m bench.switch [--times N] [--steps N] [--layers N] [--json FILE]

The models are Z-Image's transformer with random weights (``tools.dynamic_cases.switch``); memory is held until one of
them fits beside its images and graphs. Few steps, so that what a switch costs weighs most. Needs an NVIDIA GPU and
comfy-aimdo.
"""

import argparse

from bench import measure
from tools import dynamic_cases, dynamic_vram


def main() -> None:
    """Measures and tells."""
    parser: argparse.ArgumentParser = measure.options(__doc__)
    parser.add_argument("--times", type=int, default=30, help="switches")
    parser.add_argument("--steps", type=int, default=4, help="of each picture")
    parser.add_argument("--layers", type=int, default=12, help="of each model: 5.5 GB with 12")
    chosen = parser.parse_args()
    dynamic_vram.start(store=False)
    found = dynamic_cases.switch(chosen.times, chosen.steps, chosen.layers)
    eager, ours = (peak / dynamic_vram.GIB for peak in found["peak"])
    print(f"{chosen.times} switches: ComfyUI {found['eager_s']:.1f} s, {eager:.2f} GB at most; "
          f"AnyShape {found['s']:.1f} s, {ours:.2f} GB, {found['recorded']} recorded again")  # fmt: skip
    measure.write(chosen.json, found)


if __name__ == "__main__":
    main()
