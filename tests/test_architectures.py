"""The table of tiny models: each is ComfyUI's own, runs at every size, and every input has a say in its output."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tools import architectures
from tools.architectures import VARIANTS, Architecture

# Of 24 variants, those whose forwards run here: small and large, odd sizes, every batch.
RUN = (0, 5, 10)
ENTRIES = [pytest.param(entry, id=entry.name) for entry in architectures.present()]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sizes(entry: Architecture, k: int) -> list[Any]:
    """The shapes of all tensors that variant ``k`` passes, by name."""
    arguments, named = entry.inputs(k)
    parts = {str(i): value for i, value in enumerate(arguments)} | named
    return sorted((name, tuple(value.shape)) for name, value in parts.items() if isinstance(value, torch.Tensor))


@pytest.mark.usefixtures("comfy")
def test_every_model_of_comfyui_is_in_the_table():
    import comfy.supported_models

    classes = {kind.__name__ for kind in comfy.supported_models.models}
    known = {entry.family_name for entry in architectures.present()}
    assert not classes - known - architectures.SKIPPED.keys()
    assert not known & architectures.SKIPPED.keys() and all(architectures.SKIPPED.values())
    assert known <= classes


@pytest.mark.usefixtures("comfy")
@pytest.mark.parametrize("entry", ENTRIES)
def test_model_runs_at_every_size(entry: Architecture):
    from tools.architectures import patchers

    patcher = patchers.make(entry.name)
    assert patcher.model.model_config.__class__.__name__ == entry.family_name
    with torch.inference_mode():
        for k in RUN:
            arguments, named = entry.inputs(k)
            out = patcher.model.diffusion_model(*arguments, **named)
            assert tuple(out.shape) == entry.output_shape(k)
            assert out.isfinite().all() and 0.1 < out.std() < 10.0
        # As the sampler calls it, in which the time step is a sigma.
        denoised = patchers.apply(patcher, 1, entry.name)
        assert tuple(denoised.shape) == entry.output_shape(1) and denoised.isfinite().all()
        arguments, named = entry.inputs(1)
        first = patcher.model.diffusion_model(*arguments, **named)
        for name in matters(entry):
            changed = change(*entry.inputs(1), name)
            assert not torch.equal(first, patcher.model.diffusion_model(*changed[0], **changed[1])), name


def matters(entry: Architecture) -> list[Any]:
    """Position or name of every tensor of numbers that is passed; a mask of frames is already in the time steps."""
    arguments, named = entry.inputs(1)
    return [*range(len(arguments)), *(name for name in named if floats(named[name]) and name != "denoise_mask")]


def floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def change(arguments: tuple, named: dict, which: Any) -> tuple[tuple, dict]:
    """The arguments with the one that is named changed."""
    generator = torch.Generator().manual_seed(5)
    values = dict(enumerate(arguments)) | named
    values[which] = values[which] + 0.5 * torch.rand(values[which].shape, generator=generator)
    return tuple(values.pop(i) for i in range(len(arguments))), values


@pytest.mark.parametrize("entry", ENTRIES)
def test_variants_differ(entry: Architecture):
    shapes = [sizes(entry, k) for k in range(VARIANTS)]
    assert len({tuple(shape) for shape in shapes}) >= 20
    first, again, other = entry.inputs(0)[0][0], entry.inputs(0)[0][0], entry.inputs(1)[0][0]
    assert torch.equal(first, again) and first.shape != other.shape


@pytest.mark.usefixtures("comfy")
def test_weights_are_the_same_again_for_the_same_seed():
    from tools.architectures import patchers

    a, b, c = (patchers.make("Flux", seed=seed).model.diffusion_model.img_in.weight for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.usefixtures("comfy")
@pytest.mark.parametrize("name, runs", [("Flux", True), ("SD3", False)])
def test_which_forwards_run_wrappers(name: str, runs: bool):
    from tools.architectures import patchers

    assert patchers.runs_wrappers(patchers.make(name), architectures.TABLE[name]) == runs
