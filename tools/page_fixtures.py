"""Fixtures of tests about DynamicVRAM, on the page table of ``pages``.

pytest_plugins = ("tools.page_fixtures",)       # in a file of tests
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tools import pages
from tools.driving import calls_of


@pytest.fixture
def card(pack: ModuleType, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> pages.Card:
    """With room for all; ComfyUI maps weights in. param: ``counts``, if it is not to count."""
    if problem := pages.missing():
        pytest.skip(problem)
    pages.use(monkeypatch)
    return pages.Card(counts=getattr(request, "param", True))


@pytest.fixture
def no_stream(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of programs fetch no weights, as after a failure: where these do not fit, ComfyUI's own forward runs."""
    from anyshape.accel.comfy.sampling_state import SamplingState

    monkeypatch.setattr(SamplingState, "stream", lambda self, *args: None)


@pytest.fixture
def load(models: ModuleType, card: pages.Card) -> pages.Loads:
    """A UNet, and what a load of it does."""
    return pages.loaded_unet(models, card)


@pytest.fixture
def bound(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list:
    """One entry for each time that a program takes its weights."""
    from anyshape.accel.tape.program import Program

    return calls_of(monkeypatch, Program, "bind")


@pytest.fixture
def written_over(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step has fetched is written over when it is done, as the next layers' weights do it on a GPU."""
    pages.write_over(monkeypatch)


@pytest.fixture
def fetched(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[torch.nn.Module]]:
    """The layers of each fetch of a program."""
    from anyshape.accel.tape.fetched import FetchedSteps

    return calls_of(monkeypatch, FetchedSteps, "__call__", lambda steps, values: steps.parts)


@pytest.fixture
def streamed(tiny: Callable, card: pages.Card) -> Callable[..., tuple[Any, pages.Loads]]:
    """(A tiny model by name, what a load of it does), with room for this share of its weights."""

    def make(name: str, share: float = 0.5) -> tuple[Any, pages.Loads]:
        patcher = tiny(name, fresh=True)
        load = pages.Loads(patcher.model.diffusion_model, card)
        card.pages = int(load.pages.count * share)
        load()
        return patcher, load

    return make


@pytest.fixture
def queued(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list:
    """ComfyUI's own prefetch queues work as on a GPU, where the options ask for them: all that were made.

    On a CPU they are off, because there is no stream to copy on.
    """
    import comfy.model_management as mm
    import comfy.model_prefetch

    own = mm.is_device_cpu

    def is_device_cpu(device: torch.device) -> bool:
        return own(device) and sys._getframe(1).f_code.co_name != comfy.model_prefetch.make_prefetch_queue.__name__

    is_device_cpu.__module__ = own.__module__  # as in ``pages.use``
    monkeypatch.setattr(mm, "is_device_cpu", is_device_cpu)
    monkeypatch.setattr(mm, "NUM_STREAMS", 1)
    monkeypatch.setattr(comfy.model_prefetch, "PREFETCH_QUEUES", [])
    return comfy.model_prefetch.PREFETCH_QUEUES
