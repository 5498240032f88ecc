"""Fixtures of tests about DynamicVRAM, on the page table of ``pages``.

pytest_plugins = ("tools.page_fixtures",)       # in a file of tests
"""

from types import ModuleType

import pytest

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
def load(models: ModuleType, card: pages.Card) -> pages.Loads:
    """A UNet, and what a load of it does."""
    return pages.loaded_unet(models, card)


@pytest.fixture
def bound(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list:
    """One entry for each time that a program takes its weights."""
    from anyshape.accel.tape.program import Program

    return calls_of(monkeypatch, Program, "bind")
