"""Random changes of another pack: ComfyUI's pictures. ``python -m tools.random_changes`` draws more."""

import pytest

from tools import architectures, random_changes

pytestmark = pytest.mark.skipif(architectures.is_older(), reason="it has not all of these models")
DRAWS = 3
ONCE_WRONG = (23, 30, 48, 141, 172)
OTHERS = [(kind, 0) for kind in ("forms", "tensors", "vaes", "controls")] + [("skips", 1)]
OTHERS_ONCE_WRONG = [("controls", 20081), ("skips", 11)]


@pytest.mark.parametrize("number", sorted({*range(DRAWS), *ONCE_WRONG}))
@pytest.mark.usefixtures("models")
def test_pictures_are_comfyuis(number):
    assert list(random_changes.compared(number)) == []


@pytest.mark.parametrize(("kind", "number"), OTHERS + OTHERS_ONCE_WRONG)
@pytest.mark.usefixtures("models")
def test_of_a_vae_of_a_controlnet_and_of_skipped_steps(kind, number):
    assert list(random_changes.compared(number, kind)) == []
