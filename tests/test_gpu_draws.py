"""Random draws on a real GPU, with real kernels and graphs: ComfyUI's pictures. The modules of ``tools`` draw more."""

import pytest

from tools import random_blocks, random_changes, random_forwards, random_patches, random_workflows
from tools.idioms import IDIOMS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models", "exact_float32", "no_graphs_left")]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 100090, 100121, 100249, 100266])  # from 100090 on once wrong
def test_patches(number):
    assert list(random_patches.compared(number)) == []


@pytest.mark.parametrize(("kind", "number"), [("models", 0), ("forms", 0), ("skips", 1), ("controls", 20081)])
def test_changes(kind, number):
    assert list(random_changes.compared(number, kind)) == []


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", IDIOMS)
@pytest.mark.parametrize("draws", [random_forwards, random_blocks])
def test_forwards(draws, kind, number):
    assert list(draws.wrong(number, kind)) == []


@pytest.mark.parametrize("number", [0, 30012])  # the second one was once wrong
def test_workflows(number):
    assert list(random_workflows.compared(number)) == []
