"""Where patches are called in each forward: our program, or ComfyUI's own forward where launching is the limit."""

import pytest
import torch

from tools import embed
from tools.driving import compiled
from tools.oracles import fallbacks, shapes
from tools.patching import assert_equal, run, takes_of, with_patch

embed.bare_pack()

from anyshape.accel.tape import cost  # noqa: E402 - the package exists from the line above on

pytestmark = pytest.mark.usefixtures("clean_stats")

H200 = 132 * 2048 * cost.PACE


def count(patcher):
    """A patch that must be called: it counts."""
    calls = []
    patcher.set_model_input_block_patch(lambda h, options: calls.append(1) or h * (1 + len(calls) / 100))


@pytest.mark.parametrize("waits", [True, False])
def test_comfyuis_own_forward_runs_where_the_host_is_the_limit(models, fresh, monkeypatch, waits):
    from anyshape.accel import first_call

    monkeypatch.setattr(first_call, "waits_for_host", lambda tape: waits)
    eager, fast = (with_patch(each, count) for each in (fresh, compiled(fresh, graph_budget_mb=0)))
    for seed in range(3):
        assert_equal(models, eager, fast, seed=seed)
    (take,) = takes_of(fast)
    assert (take.program is None) == waits
    (shape,) = shapes()
    assert shape["state"] == ("eager" if waits else "tape")
    assert ("without a CUDA graph ComfyUI's own forward" in shape["reason"]) == waits == bool(fallbacks())
    assert_equal(models, fresh, compiled(fresh))  # without the patch
    assert shapes()[-1]["state"] == "tape" and shapes()[-1]["reason"] == ""


def test_a_budget_that_is_raised_brings_the_tape_back(models, fresh, monkeypatch):
    from anyshape.accel import first_call

    monkeypatch.setattr(first_call, "waits_for_host", lambda tape: True)
    patched = with_patch(fresh, count)
    for budget, state in ((0, "eager"), (512, "tape"), (0, "eager"), (512, "tape")):  # a CPU has no graph either way
        run(models, compiled(patched, graph_budget_mb=budget))
        assert shapes()[-1]["state"] == state
    (take,) = takes_of(compiled(patched))
    assert take.program is not None


def test_what_keeps_a_card_busy_is_counted(monkeypatch):
    """SDXL's 2,700 operations at 1024x1024 with CFG, and Flux's 1,500: multiplications by parameters and tokens."""
    rtx3060 = 28 * cost.FEWEST * cost.PACE
    for work, operations, on_cards in ((6e12, 2700, [False, True]), (5.5e13, 1500, [True, True])):
        monkeypatch.setattr(cost, "of_all", lambda _, work=work: work)
        assert [cost.keeps_busy(range(operations), rate) for rate in (H200, rtx3060)] == on_cards


def test_the_rate_of_a_card(monkeypatch):
    card = type("Card", (), {"multi_processor_count": 132, "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert cost.rate(torch.device("cuda")) == H200
