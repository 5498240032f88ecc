"""What becomes of each VAE of the table on a tape, decoding and encoding: as ``taped`` for models.

    python -m tools.architectures.taped_vaes TAESD Mochi     # JSON, one line for each way of each VAE

On a CPU, torch's convolutions put channels last for some sizes and not for others, which a GPU's do not. So they are
recorded without oneDNN here, or kernels would be counted that only a CPU needs.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tools.architectures import autoencoders
from tools.architectures.autoencoders import VARIANTS, Autoencoder
from tools.architectures.taped import Found, Recording, found_of, options_of_study

COMPARED, FUSED = 1, 2  # the variants whose unfused and whose fused program are run


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Convolutions give what lies as their argument does."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@lru_cache(maxsize=1)
def _model(name: str) -> nn.Module:
    """For all that is studied of one VAE, one way after the other."""
    return autoencoders.model(name)


def recording(model: nn.Module, way: str, arguments: tuple[Tensor, ...], outlines: Any = None) -> Recording:
    """One decode or encode, on a lean tape. outlines: of earlier ones of this way."""
    return Recording(model, arguments, {}, outlines=outlines, way=way, lean=True)


def study(entry: Autoencoder, way: str, variants: int = VARIANTS, run: bool = True) -> Found:
    """Records every variant; compares results of a few, if they are to be run."""
    from anyshape.accel.tape.reuse import Outlines

    model, outlines = _model(entry.name), Outlines()
    recorded = (recording(model, way, entry.inputs(way, k), outlines) for k in range(variants))
    with as_on_gpu():
        return found_of(f"{entry.name}, {way}", recorded, (COMPARED,) if run else (), FUSED if run else -1)


def main() -> None:
    options = options_of_study(__doc__.splitlines()[0], VARIANTS)
    for entry in autoencoders.present():
        if options.names and entry.name not in options.names:
            continue
        for way in entry.ways:
            print(json.dumps(asdict(study(entry, way, options.variants, not options.no_run))), flush=True)


if __name__ == "__main__":
    main()
