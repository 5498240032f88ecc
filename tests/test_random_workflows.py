"""Random workflows of ComfyUI's nodes: its pictures, to the bit. ``python -m tools.random_workflows`` draws more."""

import random

import pytest

from tools import architectures, random_rooms, random_workflows
from tools.oracles import fallbacks

pytestmark = pytest.mark.skipif(architectures.is_older(), reason="it has not all of these models")


@pytest.mark.parametrize("number", range(3))
@pytest.mark.usefixtures("models")
def test_pictures_are_comfyuis(number):
    assert list(random_workflows.compared(number)) == []


@pytest.mark.parametrize("number", (2, 6))  # the first one reads a value back, the other does not
@pytest.mark.usefixtures("models", "clean_stats")
def test_pictures_where_weights_do_not_fit(number):
    assert list(random_rooms.compared(number)) == []
    assert any(reason["reason"].startswith("weights streamed") for reason in fallbacks())


def test_workflows_differ_in_everything():
    """Over some draws, and a draw is the same again."""
    drawn = [list(random_workflows.workflows(random.Random(n), "unet", n % 2 > 0)) for n in range(40)]
    assert drawn[7] == list(random_workflows.workflows(random.Random(7), "unet", True))
    assert any(random_workflows.SKIP in flow.nodes for flow in drawn[7])
    usual, flows = random_workflows.Workflow(()), [flow for each in drawn for flow in each]
    assert all(any(getattr(flow, name) != value for flow in flows) for name, value in vars(usual).items())
