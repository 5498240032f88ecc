"""A model of which only a part is on the card (ComfyUI without DynamicVRAM): seconds of a run, eager and compiled.

python -m bench.low_vram [--shares 0.3,0.7] [--streams 2,0] [--calls 4,20] [--json FILE]

The model is a Flux.1 of 4 GB at 1024x1024; eager and ours take turns, each case in a process of its own
(``tools.low_vram_cases``). calls: of the model in a sampling run. streams: on which ComfyUI fetches weights
ahead. whole: what is not on the card are whole blocks; else ComfyUI's own choice, the smallest layers of all blocks.
"""

import argparse
import itertools

from bench import measure
from tools import embed
from tools.low_vram_cases import in_process

LONG = 8  # calls in a run; of longer runs fewer are made


def main() -> None:
    """Prints every case as it is measured; writes the JSON."""
    parser: argparse.ArgumentParser = measure.options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shares", default="0.3,0.7", help="of the weights on the card")
    parser.add_argument("--streams", default="2,0", help="numbers of streams")
    parser.add_argument("--calls", default="4,20", help="numbers of calls per run")
    chosen, rows = parser.parse_args(), []
    embed.use_comfyui()
    shares = map(float, chosen.shares.split(","))
    streams, calls = (map(int, text.split(",")) for text in (chosen.streams, chosen.calls))
    for share, count, length, whole in itertools.product(shares, streams, calls, (True, False)):
        options = {"share": share, "streams": count, "calls": length, "whole": whole}
        found = in_process(repeat=3 if length > LONG else 5, **options)
        rows.append(options | found | {"ratio": round(found["s"] / found["eager_s"], 4)})
        print(f"{options}: eager {found['eager_s']:.3f} s, ours {found['s']:.3f} s ({rows[-1]['ratio']:.3f}), "
              f"{found['programs']} blocks on programs", flush=True)  # fmt: skip
        measure.write(chosen.json, {"rows": rows})


if __name__ == "__main__":
    main()
