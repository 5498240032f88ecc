"""The table of tiny models: each is ComfyUI's own, runs, and every input has a say in its output.

One variant of each; ``test_tape_families`` runs the others.
"""

from typing import Any

import pytest
import torch

from tools import architectures
from tools.architectures import VARIANTS, Architecture

pytestmark = pytest.mark.usefixtures("one_thread")
ENTRIES = [pytest.param(entry, id=entry.name) for entry in architectures.present()]


def sizes(entry: Architecture, k: int) -> list[Any]:
    """The shapes of all tensors that variant ``k`` passes, by name."""
    arguments, named = entry.inputs(k)
    parts = {str(i): value for i, value in enumerate(arguments)} | named
    return sorted((name, [tuple(part.shape) for part in tensors(parts[name])]) for name in parts)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that an argument is made of: one, several in a list, or none."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.usefixtures("comfy")
def test_every_model_of_comfyui_is_in_the_table():
    import comfy.supported_models

    classes = {kind.__name__ for kind in comfy.supported_models.models}
    known = {entry.family_name for entry in architectures.present()}
    assert not classes - known - architectures.SKIPPED.keys()
    assert not known & architectures.SKIPPED.keys()
    assert known <= classes


@pytest.mark.usefixtures("pack")
@pytest.mark.parametrize("entry", ENTRIES)
def test_model_runs(entry: Architecture):
    """And meets Compile Model as it expects: by one call of its wrapper, or by none."""
    from anyshape.accel.comfy import attach

    from tools.architectures import patchers, taped

    patcher = patchers.make(entry.name)
    assert patcher.model.model_config.__class__.__name__ == entry.family_name
    with torch.inference_mode():
        out = forward(patcher, entry)
        assert taped.is_usual(out, entry.output_shapes(1))
        # As the sampler calls it, in which the time step is a sigma.
        denoised = patchers.apply(patcher, 1, entry.name, {"wrappers": noting(wrapped := [])})
        assert [tuple(part.shape) for part in denoised] == entry.output_shapes(1)
        assert all(part.isfinite().all() for part in denoised)
        assert wrapped == [""] * attach._calls_wrappers(type(patcher.model.diffusion_model))
        for name in matters(entry):
            assert not torch.equal(out[0], forward(patcher, entry, name)[0]), name


def noting(wrapped: list[str]) -> dict[str, dict[str, list]]:
    """Wrappers that note each call of the diffusion model: an argument that keeps it off the tape, or ""."""
    from anyshape.accel.comfy import taping
    from comfy.patcher_extension import WrappersMP

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped.append(taping.take(executor.original, args, kwargs).unknown)
        return executor(*args, **kwargs)

    return {WrappersMP.DIFFUSION_MODEL: {"test": [wrapper]}}


def matters(entry: Architecture) -> list[Any]:
    """Position or name of every argument of numbers; a mask of frames is already in the time steps."""
    arguments, named = entry.inputs(1)
    floats = (name for name in named if any(part.is_floating_point() for part in tensors(named[name])))
    return [*range(len(arguments)), *(name for name in floats if name != "denoise_mask")]


def forward(patcher: Any, entry: Architecture, changed: Any = None) -> list[torch.Tensor]:
    """The parts of what variant 1 gives, with one argument changed if it is named."""
    arguments, named = entry.inputs(1)
    values = dict(enumerate(arguments)) | named
    if changed is not None:
        part = tensors(values[changed])[0]
        part += 0.5 * torch.rand(part.shape, generator=torch.Generator().manual_seed(5)).to(part.dtype)
    arguments = [values.pop(i) for i in range(len(arguments))]
    return architectures.parts_of(patcher.model.diffusion_model(*arguments, **values))


@pytest.mark.parametrize("entry", ENTRIES)
def test_variants_differ(entry: Architecture):
    shapes = [sizes(entry, k) for k in range(VARIANTS)]
    assert len({str(shape) for shape in shapes}) >= 20
    first, again, other = (tensors(entry.inputs(k)[0][0])[-1] for k in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first.flatten()[:5], other.flatten()[:5])


@pytest.mark.usefixtures("comfy")
def test_weights_are_the_same_again_for_the_same_seed():
    from tools.architectures import patchers

    a, b, c = (patchers.make("Flux", seed=seed).model.diffusion_model.img_in.weight for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
