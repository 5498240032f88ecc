"""What becomes of each model of the table on a tape: is it recorded, is its program right, which kernels does it need.

Used by the tests of families and by ``tools.compatibility_table``. Needs the pack: ``tools.embed.load_pack()`` first.

    python -m tools.architectures.taped Flux SD3     # JSON, one line per model
"""

import argparse
import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools import architectures, embed
from tools.architectures.table import Architecture, parts_of

VARIANTS = 20  # every batch and number of frames several times, sides with all remainders
COMPARED = (0, 1)  # variants whose unfused program is run
FIRST = 8  # one of these runs fused
MAX_BLOCKS = 600  # of a fused program that Triton's interpreter runs, at some milliseconds a block
# Where a fused program is not run on a CPU: Triton's interpreter takes minutes for a UNet's many groups.
TOO_LONG = ("UNetModel", "UNetModel_", "VideoUNet", "StageB", "StageC")


@dataclass
class Found:
    """One model's record. Errors are relative; None: not measured.

    odd: variants whose result is not of the shape that the table says, or not of numbers near 1.
    """

    name: str
    refusal: str = ""
    operations: int = 0
    kernels: int = 0
    calls: int = 0
    new_kernels: list[int] = field(default_factory=list)  # by variant
    unfused_error: float | None = None
    fused_error: float | None = None
    odd: list[int] = field(default_factory=list)


class Studied:
    """One model of the table, and its recordings."""

    def __init__(self, architecture: Architecture, blocks: int = 0) -> None:
        """blocks: see ``patchers.make``."""
        from anyshape.accel.tape.reuse import Outlines

        from tools.architectures import patchers

        self.architecture, self.outlines = architecture, Outlines()
        self.model = patchers.make(architecture.name, blocks=blocks).model.diffusion_model

    def record(self, k: int, skipping: bool = False, short: bool = False) -> "Recording":
        """Variant ``k``'s forward, recorded the way the product does. skipping: so that its middle may be left out.

        short: without the blocks that are like another one.
        """
        given = self.architecture.inputs(k)
        made = Recording(self.model, *given, outlines=self.outlines, skipping=skipping, short=short)
        return self.record(k, skipping) if short and made.tape is None else made  # void numbers led it astray

    @staticmethod
    def smallest_of(architecture: Architecture) -> int:
        """The variant with the smallest latent, of those with several pictures."""
        draws = [architecture.draw(k) for k in range(FIRST)]
        several = [k for k in range(FIRST) if draws[k].batch > 1] or range(FIRST)
        return min(several, key=lambda k: draws[k].batch * draws[k].frames * draws[k].height * draws[k].width)

    @property
    def is_too_long(self) -> bool:
        """Whether its fused program would run for minutes in Triton's interpreter."""
        return type(self.model).__name__ in TOO_LONG


class Recording:
    """One forward, or another ``way`` of a module: ``out``, its ``tape`` or the ``refusal``, its program's inputs.

    lean: see ``Tape.lean``. copies: blocks that are like an earlier one; left_out: and did not run. short: ``out`` is
    void.
    """

    def __init__(
        self, model: torch.nn.Module, arguments: tuple, named: dict[str, Any], outlines: Any = None,
        skipping: bool = False, way: str = "forward", lean: bool = False, short: bool = False,
    ) -> None:  # fmt: skip
        from anyshape.accel.comfy import recorded_attention, taping
        from anyshape.accel.key import shape_key
        from anyshape.accel.take import Skipping, Taped
        from anyshape.accel.tapes import Tapes

        self._original = getattr(model, way)
        self._given = taping.take(self._original, arguments, named)
        taped = Taped(
            model, lambda options: self._given.call(self._original, options), self._given.options, 0,
            recorded_attention.prepare, lean=lean, places=partial(taping._places, self._given.options, False),
            skipping=Skipping(None, lambda added: None) if skipping else None,
        )  # fmt: skip
        with torch.inference_mode():
            key = shape_key(self._given.tensors, {})
            self.out, take, self.tape = Tapes().record(key, True, taped, self._given.tensors, short=short)
        if self.out is None:  # it was broken off
            self.out = self.eager()
        self.refusal, self._calls = take.reason, take.calls
        self.copies, self.left_out = take.copies, take.left_out
        self.inputs = list(take.inputs(self._given.tensors, self._given.options).values())
        self._model, self._outlines = model, outlines

    def eager(self) -> Any:
        """ComfyUI's own result."""
        with torch.inference_mode():
            return self._given.call(self._original)

    def cut(self, depth: int | None = None) -> Any:
        """The tape in two. Raises ``NotCut``."""
        from anyshape.accel.tape.cut import cut

        given = list(self._given.tensors.values())
        return cut(self.tape, self._calls, depth, len(given[0]), len(given))

    def with_features(self, features: Sequence[Tensor], inputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The inputs of the program of a skipped step. inputs: others than were recorded."""
        inputs, given = self.inputs if inputs is None else inputs, len(self._given.tensors)
        return [*inputs[:given], *features, *inputs[given:]]

    def program(self, fuse: bool, alone: bool = False, tape: Any = None) -> Any:
        """The program of the tape, on the model's weights; a fused one after all rules.

        alone: planned by itself, not from what earlier sizes had in common with it. tape: another one than the whole.
        """
        from anyshape.accel.tape import rules
        from anyshape.accel.tape.program import Program

        tape = self.tape if tape is None else tape
        if fuse:
            rules.apply(tape)
        program = Program(tape, fuse, outlines=None if alone else self._outlines)
        program.bind(self._model)
        return program

    def error(self, program: Any, wanted: Any = None) -> float:
        """How far the program's result is from ``wanted``: relative, of the worst part."""
        with torch.inference_mode():
            return far(program.run(self.inputs), self.out if wanted is None else wanted)


def far(out: Any, wanted: Any) -> float:
    """The relative distance of the worst part; infinity where shapes or dtypes differ, or where one is no number."""
    mine, theirs = parts_of(out), parts_of(wanted)
    same = [(a.shape, a.dtype) for a in mine] == [(b.shape, b.dtype) for b in theirs]
    return max(map(_far, mine, theirs)) if same else float("inf")


def _far(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    found = ((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-9)).item()
    return float("inf") if math.isnan(found) else found  # as max would pass over it


def kernels_of(program: Any) -> set[tuple]:
    """What a program compiles: its kernels' sources and dtypes."""
    return {(launch.source.text, tuple(value.dtype for value in launch.operands)) for launch in program.launches}


def is_usual(parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a model's result has these shapes, and numbers that say something of it."""
    same = [tuple(part.shape) for part in parts] == list(shapes)
    return same and all(part.isfinite().all() and 0.1 < part.std() < 30.0 for part in parts)


def study(architecture: Architecture, variants: int = VARIANTS, run: bool = True) -> Found:
    """Records every variant; compares results of a few (not of fused programs without ``run``)."""
    studied = Studied(architecture)
    small = studied.smallest_of(architecture) if run and not studied.is_too_long else -1
    whole = {*COMPARED, small}  # of the others no result is compared
    odd: list[int] = []

    def recorded() -> Iterator[Recording]:
        for k in range(variants):
            made = studied.record(k, short=k not in whole)
            if k in whole and not is_usual(parts_of(made.out), architecture.output_shapes(k)):
                odd.append(k)
            yield made

    found = found_of(architecture.name, recorded(), COMPARED, small)
    found.odd = odd
    return found


def found_of(name: str, recordings: Iterable[Recording], unfused: Container[int], fused: int) -> Found:
    """What is true of these variants. unfused, fused: whose programs are run."""
    found, known = Found(name), set()
    for k, recording in enumerate(recordings):
        if recording.tape is None:
            found.refusal = recording.refusal
            return found
        if k in unfused:
            program, wanted = recording.program(fuse=False), recording.eager()
            error = max(recording.error(program, wanted), far(recording.out, wanted))
            found.unfused_error = max(error, found.unfused_error or 0.0)
        operations = len(recording.tape.operations)
        program = recording.program(fuse=True)
        new = kernels_of(program) - known
        known |= new
        found.new_kernels.append(len(new))
        if k == 0:
            found.operations, found.kernels, found.calls = operations, program.report.kernels, program.report.calls
        if k == fused and sum(launch.grid[0] for launch in program.launches) <= MAX_BLOCKS:
            found.fused_error = recording.error(program)
    return found


def options_of_study(what: str, variants: int) -> argparse.Namespace:
    """The command's options, once the pack and ComfyUI can be imported."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("names", nargs="*", help="entries of the table; all that this ComfyUI has, without any")
    parser.add_argument("--variants", type=int, default=variants)
    parser.add_argument("--no-run", action="store_true", help="build fused programs, do not run them")
    options = parser.parse_args()
    if not embed.has_cuda():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    embed.hide_repo()
    embed.use_comfyui()
    embed.load_pack()
    torch.set_num_threads(1)
    return options


def main() -> None:
    options = options_of_study(__doc__.splitlines()[0], VARIANTS)
    for entry in architectures.present():
        if options.names and entry.name not in options.names:
            continue
        print(json.dumps(asdict(study(entry, options.variants, not options.no_run))), flush=True)


if __name__ == "__main__":
    main()
