"""Random patches of another pack: ComfyUI's pictures, to the bit. ``python -m tools.random_patches`` draws more."""

import pytest

from tools import architectures, random_patches

pytestmark = pytest.mark.skipif(architectures.is_older(), reason="it has not all of these models")
DRAWS = 6
ONCE_WRONG = (103, 116, 559, 20176, 30151, 70396, 100249, 520077, 561046)


@pytest.mark.parametrize("number", [*range(DRAWS), *ONCE_WRONG])
@pytest.mark.usefixtures("models")
def test_pictures_are_comfyuis(number):
    assert list(random_patches.compared(number)) == []
