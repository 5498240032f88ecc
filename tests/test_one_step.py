"""Runs of one step: a size is recorded when it comes again, for one step saves less than a recording takes."""

import pytest
import torch

from tools.driving import FLUX_RUN, SMALL_FLUX, compiled
from tools.oracles import error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

ONE = FLUX_RUN | {"steps": 1}
OTHER = ONE | {"width": 160}


@pytest.fixture
def patcher(models):
    return models.flux(torch.float32, **SMALL_FLUX)


def test_a_size_is_recorded_when_it_comes_again(models, patcher, recordings):
    fast, wanted = compiled(patcher), {}
    for run, count in ((ONE, 0), (OTHER, 0), (ONE, 1), (ONE, 1), (OTHER, 2)):
        key = run["width"]
        wanted[key] = wanted[key] if key in wanted else models.sample(patcher, **run)
        assert error(models.sample(fast, **run), wanted[key]) == 0.0
        assert len(recordings) == count
        (shape,) = [shape for shape in shapes() if shape["width"] == key]
        assert shape["state"] == ("tape" if count and run is not OTHER or count == 2 else "eager")
    (told,) = fallbacks()
    assert "when this size comes again" in told["reason"] and told["count"] == 2


def test_several_steps_at_the_first_size(models, patcher, recordings):
    fast = compiled(patcher)
    models.sample(fast, **ONE | {"steps": 2})
    models.sample(fast, **ONE)
    assert len(recordings) == 1 and fallbacks() == []
