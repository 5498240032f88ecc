"""What becomes of each VAE of the table on a tape, decoding and encoding: as ``taped`` for models.

    python -m tools.architectures.taped_vaes TAESD Mochi     # JSON, one line for each way of each VAE

On a CPU, torch's convolutions put channels last for some sizes and not for others, which a GPU's do not. So they are
recorded without oneDNN here, or kernels would be counted that only a CPU needs.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from tools.architectures import autoencoders
from tools.architectures.autoencoders import VARIANTS, Autoencoder
from tools.architectures.taped import COMPARED, MAX_BLOCKS, Found, far, kernels_of, options_of_study


class Recording:
    """One decode or encode: ``out``, its ``tape`` or the ``refusal``. lean: see ``Tape.lean``."""

    def __init__(self, model: nn.Module, way: str, arguments: tuple[Tensor, ...], lean: bool = True) -> None:
        from anyshape.accel.families import taping
        from anyshape.accel.key import shape_key
        from anyshape.accel.tapes import Taped, Tapes

        original: Callable[..., Any] = getattr(model, way)
        given = taping.take(original, arguments, {})
        taped = Taped(model, lambda options: given.call(original), given.options, 0, taping._prepare, lean=lean)
        with torch.inference_mode():
            self.out, take, self.tape = Tapes().record(shape_key(given.tensors, {}), True, taped, given.tensors)
        self.refusal, self.inputs, self._model = take.reason, list(given.tensors.values()), model

    def program(self, fuse: bool) -> Any:
        """The program of the tape, on the model's weights."""
        from anyshape.accel.tape.program import Program

        program = Program(self.tape, fuse)
        program.bind(self._model)
        return program


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Convolutions give what lies as their argument does."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def study(entry: Autoencoder, way: str, variants: int = VARIANTS, run: bool = True) -> Found:
    """Records every variant; compares results of a few (not of fused programs without ``run``)."""
    model, found, known = autoencoders.model(entry.name), Found(f"{entry.name}, {way}"), set()
    with as_on_gpu():
        for k in range(variants):
            recording = Recording(model, way, entry.inputs(way, k))
            if recording.tape is None:
                found.refusal = recording.refusal
                return found
            if run and k in COMPARED:
                with torch.inference_mode():
                    wanted = getattr(model, way)(*recording.inputs)
                    again = recording.program(fuse=False).run(recording.inputs)
                found.unfused_error = max(far(again, wanted), far(recording.out, wanted), found.unfused_error or 0.0)
            operations = len(recording.tape.operations)
            program = recording.program(fuse=True)
            new = kernels_of(program) - known
            known |= new
            found.new_kernels.append(len(new))
            if k == 0:
                found.operations, found.kernels, found.calls = operations, program.report.kernels, program.report.calls
            if run and k == 2 and sum(launch.grid[0] for launch in program.launches) <= MAX_BLOCKS:
                with torch.inference_mode():
                    found.fused_error = far(program.run(recording.inputs), recording.out)
    return found


def main() -> None:
    options = options_of_study(__doc__.splitlines()[0], VARIANTS)
    for entry in autoencoders.present():
        if options.names and entry.name not in options.names:
            continue
        for way in entry.ways:
            print(json.dumps(asdict(study(entry, way, options.variants, not options.no_run))), flush=True)


if __name__ == "__main__":
    main()
