"""Models of which only a part fits on the card (DynamicVRAM): seconds of a run, ComfyUI alone and compiled.

python -m bench.streamed [--models zimage,flux-fp8] [--share 0.5] [--json FILE]

Runs of 4 steps at 1024x1024, videos at their own size; best and median of ten of ComfyUI's and eleven of ours, the last
six by turns. Each model has a process to itself (``tools.dynamic_cases``). Some are cut to fewer blocks, so that all
weights fit into main memory. A little more than ``share`` fits (``loaded``).
"""

import argparse
import statistics
from typing import Any

from bench import measure
from tools import embed
from tools.dynamic_cases import in_process
from tools.dynamic_vram import RUN

CUT: dict[str, dict[str, Any]] = {"qwen": {"num_layers": 20}, "wan": {"num_layers": 16}}
MODELS = "sdxl,zimage,zimage-int8,flux-fp8,krea-int8,qwen,wan,minimax-int8,ltx2-int8"
VIDEOS = {
    "ltx2": {"width": 768, "height": 512, "frames": 97}, "minimax": {"width": 1280, "height": 704, "frames": 33},
}  # fmt: skip
TURNS = 6  # beyond the first few


def main() -> None:
    """Prints every model as it is measured; writes the JSON."""
    parser: argparse.ArgumentParser = measure.options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", default=MODELS, help="names of bench.zoo")
    parser.add_argument("--share", type=float, default=0.5, help="of the weights that fits")
    chosen, rows = parser.parse_args(), []
    embed.use_comfyui()
    for name in chosen.models.split(","):
        changes = CUT.get(name, {})
        run = VIDEOS.get(name.partition("-")[0], {})
        found = in_process("fit", name=name, share=chosen.share, graphs=0, turns=TURNS, run=run, **changes)
        eager, ours = found["eager_s"][1:], found["s"][1:]  # the first of each pins main memory, and records
        row = {
            "model": name, "changes": changes, "run": RUN | run, "share": chosen.share,
            "size": found["size"], "loaded": found["loaded"],
            "eager_s": min(eager), "s": min(ours), "ratio": round(min(ours) / min(eager), 4),
            "medians": [statistics.median(eager), statistics.median(ours)], "states": found["states"],
            "first_s": [found["eager_s"][0], found["s"][0]], "peak": found["peak"], "error": max(found["errors"]),
        }  # fmt: skip
        rows.append(row)
        print(f"{name}: ComfyUI {row['eager_s']:.3f} s, ours {row['s']:.3f} s ({row['ratio']:.3f}), "
              f"medians {row['medians']}, {row['states']}, error {row['error']:.4f}", flush=True)  # fmt: skip
        measure.write(chosen.json, {"rows": rows})


if __name__ == "__main__":
    main()
