"""The schedule, the forecast and the state of a run with skipped steps: pure torch, exact numbers."""

from functools import partial

import pytest
import torch

from tools import embed

embed.bare_pack()

from anyshape.accel.skip import features as runs  # noqa: E402
from anyshape.accel.skip.features import Programs, SkipRun  # noqa: E402
from anyshape.accel.skip.forecast import History  # noqa: E402
from anyshape.accel.skip.schedule import FEW_STEPS, full_steps  # noqa: E402
from anyshape.accel.skip.settings import PRESETS, SkipSettings, with_preset  # noqa: E402
from anyshape.accel.stats import SkipStats  # noqa: E402

# The schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.5, 1.0, 1.2, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 9, 20, 30, 31, 100])
@pytest.mark.parametrize("interval", [1, 2, 3, 5, 20])
def test_one_step_in_interval_is_full(steps, interval, density):
    full = full_steps(range(steps), interval, density)
    assert len(full) == max(min(steps, 2), -(-steps // interval)) and full <= set(range(steps))
    assert {0, steps - 1} <= full


@pytest.mark.parametrize(("steps", "interval"), [(20, 3), (30, 2), (31, 5), (9, 20)])
def test_in_a_row_of_blocks_full_steps_are_even(steps, interval):
    """As many as in a U. The first is full, the last need not be."""
    sigmas = [float(steps - step) for step in range(steps)]
    full = SkipSettings(interval).full_steps(sigmas, 1e9, 0.0, row=True)
    assert full == set(range(0, steps, interval)) and len(full) == -(-steps // interval)
    window = SkipSettings(interval).full_steps(sigmas, steps - 2.0, 0.0, row=True)
    assert window == {0, 1} | set(range(2, steps, interval))


def test_full_steps_are_dense_early():
    full = sorted(full_steps(range(60), 4, 1.6))
    gaps = [b - a for a, b in zip(full, full[1:], strict=False)]
    assert sum(gaps[: len(gaps) // 2]) < sum(gaps[len(gaps) // 2 :]) and gaps[0] < gaps[-1]


def test_outside_the_window_every_step_is_full():
    """OneDiff takes the fast branch there, with a feature of another time or none."""
    sigmas = [float(20 - step) for step in range(20)]
    full = SkipSettings(4).full_steps(sigmas, 15.0, 6.0)
    assert set(range(20)) - full <= set(range(5, 15)) and {0, 1, 4, 5, 14, 15, 19} <= full
    assert len(full) == 10 + 3


def test_a_window_without_a_step_skips_nothing():
    assert SkipSettings(3).full_steps([3.0, 2.0, 1.0] * 5, 0.5, 0.1) == frozenset(range(15))


@pytest.mark.parametrize("steps", [1, 4, FEW_STEPS])
def test_few_steps_are_all_full(steps):
    assert SkipSettings(3).full_steps([1.0] * steps, 1e9, 0.0) == frozenset(range(steps))


def test_presets_take_the_place_of_interval_and_depth():
    chosen = {name: tuple(with_preset(name, 7, "4").values()) for name in PRESETS}
    assert chosen == {"custom": (7, "4"), "safe": (2, "auto"), "balanced": (3, "auto"), "fast": (4, "auto")}
    assert SkipSettings(**with_preset("balanced", 7, "4")) == SkipSettings()
    with pytest.raises(ValueError, match="preset is 'quick'; choose one of custom, safe, balanced, fast"):
        with_preset("quick", 3, "auto")


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"interval": 0}, "interval is 0; give 1"),
        ({"interval": 21}, "interval is 21"),
        ({"depth": "deep"}, "depth is 'deep'; choose auto"),
        ({"depth": "-1"}, "depth is '-1'"),
        ({"start_percent": 0.8, "end_percent": 0.2}, "start_percent is 0.8 and end_percent is 0.2"),
        ({"end_percent": 1.5}, "end_percent is 1.5"),
        ({"forecast": "order2"}, "forecast is 'order2'; choose one of order1, off"),
    ],
)
def test_bad_settings_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        SkipSettings(**wrong)


# The forecast -----------------------------------------------------------------------------------------------------


def history(order, points):
    made = History(order)
    for position, value in points:
        made.add(position, torch.tensor([value], dtype=torch.float64))
    return made


@pytest.mark.parametrize("order, polynomial", [(0, lambda t: 7.0), (1, lambda t: 3.0 * t - 2.0)])
@pytest.mark.parametrize("positions", [(14.6, 9.1, 3.2, 0.4), (0.0, 1.0, 5.0, 5.5), (2.0, -1.0, -1.5, -9.0)])
def test_a_forecast_of_order_p_is_exact_on_polynomials_of_degree_p(order, polynomial, positions):
    made = history(order, [(t, polynomial(t)) for t in positions[:2]])
    for t in positions[2:]:
        assert made.at(t).item() == pytest.approx(polynomial(t), abs=1e-12)


def test_a_feature_of_another_shape_begins_anew():
    """Deep Shrink halves the deep blocks' images for the first part of a run."""
    made = history(1, [(4.0, 0.0), (3.0, 1.0)])
    made.add(2.0, torch.full((2, 2), 8.0))
    assert made.at(1.0).tolist() == [[8.0, 8.0]] * 2


def test_one_feature_is_reused():
    assert history(1, [(4.0, 5.0)]).at(1.0).item() == 5.0


def test_a_second_evaluation_at_a_place_takes_the_firsts_place():
    """Heun evaluates twice at one sigma: no slope may come of it."""
    assert history(1, [(4.0, 0.0), (2.0, 7.0), (2.0, 8.0)]).at(1.0).item() == 12.0


def test_no_more_is_kept_than_the_order_needs():
    points = [(float(10 - t), float(t)) for t in range(6)]
    assert [history(order, points).bytes for order in (0, 1, 2)] == [8, 16, 24]


# The run ----------------------------------------------------------------------------------------------------------


class Net:
    """Doubles its input in full; a skipped call gives the deep feature, which is the input plus one, as it is."""

    def __init__(self, steps=12, full=(0, 4, 8, 11), order=0):
        sigmas = [float(steps - step) for step in range(steps)]
        self.run = SkipRun(sigmas, frozenset(full), depth=0, history=partial(History, order), stats=SkipStats("net"))
        self.ran = []

    def step(self, index):
        self.run.begin_step(index)
        self.run.begin_evaluation()

    def call(self, prompts, *values, size=2):
        x = torch.tensor(values, dtype=torch.float64)[:, None, None, None].expand(-1, 1, size, size)
        out = self.run.call(prompts, x, Programs(lambda: self._full(x), self._skipped))
        return out[:, 0, 0, 0].tolist()

    def _full(self, x):
        self.ran.append("full")
        return x * 2, (x + 1,)

    def _skipped(self, features):
        self.ran.append("skipped")
        return features[0]

    @property
    def resets(self):
        return dict(self.run.stats.resets)


def test_each_prompt_gets_its_own_feature_back():
    net = Net()
    net.step(0)
    assert net.call(["cond", "uncond"], 10, 20) == [20, 40]
    net.step(1)
    assert net.call(["cond", "uncond"], 0, 0) == [11, 21]


def test_prompts_that_are_split_joined_and_reordered():
    """The ports count calls: with two calls a step, cond is always full and uncond lives on cond's feature."""
    net = Net()
    net.step(0)
    assert (net.call(["cond"], 10), net.call(["uncond"], 20)) == ([20], [40])
    net.step(1)
    assert net.call(["uncond", "cond"], 0, 0) == [21, 11]
    net.step(2)
    assert (net.call(["uncond"], 0), net.call(["cond"], 0)) == ([21], [11])
    assert (net.run.stats.full, net.run.stats.skipped, net.resets) == (1, 2, {})


def test_batches_of_several_images_are_cut_by_prompt():
    net = Net()
    net.step(0)
    net.call(["cond", "uncond"], 1, 2, 30, 40)
    net.step(1)
    assert net.call(["uncond", "cond"], 0, 0, 0, 0) == [31, 41, 2, 3]


def test_a_prompt_that_joins_in_mid_run_is_computed():
    net = Net()
    net.step(0)
    net.call(["cond"], 10)
    net.step(1)
    assert net.call(["cond", "regional"], 1, 2) == [2, 4]
    net.step(2)
    assert net.call(["cond", "regional"], 0, 0) == [2, 3]
    assert net.resets == {runs.NEWCOMER: 1}


def test_a_feature_from_before_the_latest_full_step_is_not_used():
    net = Net()
    net.step(0)
    net.call(["cond", "late"], 10, 20)
    net.step(4)  # a full step that "late" has no part in
    net.call(["cond"], 30)
    net.step(5)
    assert net.call(["cond"], 0) == [31]
    assert net.call(["late"], 5) == [10]
    assert net.resets == {runs.NEWCOMER: 1}


def test_another_latent_size_in_mid_run():
    """ComfyUI's EasyCache skips for ever after it, the ports crash."""
    net = Net()
    net.step(0)
    net.call(["cond"], 10)
    net.step(1)
    assert net.call(["cond"], 3, size=5) == [6]
    net.step(2)
    assert net.call(["cond"], 0, size=5) == [4]
    assert net.resets == {runs.NEWCOMER: 1}


def test_a_prompt_that_is_evaluated_twice_a_step_is_never_skipped():
    net = Net()
    for step in range(4):
        net.step(step)
        assert (net.call(["cond"], step), net.call(["cond"], 7 * step)) == ([2 * step], [14 * step])
    assert net.ran == ["full"] * 8 and net.resets == {runs.CALLED_TWICE: 6}


def test_the_same_prompt_twice_in_one_call():
    net = Net()
    for step in range(2):
        net.step(step)
        assert net.call(["cond", "cond"], 1, 2) == [2, 4]
    assert net.resets == {runs.CALLED_TWICE: 1}


def test_a_sampler_that_reports_no_steps():
    net = Net(full=(0, 11))
    for value in range(8):
        net.run.begin_evaluation()
        assert net.call(["cond"], value) == [2 * value]
    assert net.resets == {runs.SILENT_SAMPLER: 8 - runs.MAX_EVALUATIONS}


def test_noise_that_rises_again_begins_anew():
    """A restart: no line is drawn through features of two passes."""
    net = Net(order=1)
    net.run.sigmas = [4.0, 3.0, 2.0, 1.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    for step, value in ((0, 10), (4, 50)):
        net.step(step)
        net.call(["cond"], value)
    net.step(5)
    assert net.call(["cond"], 0) == [51]


def test_rows_that_do_not_divide_by_prompt():
    net = Net()
    for step in range(2):
        net.step(step)
        assert net.call(["cond", "uncond"], 1, 2, 3) == [2, 4, 6] and net.call([], 5) == [10]
    assert net.resets == {runs.UNEVEN: 4}


def test_more_steps_than_were_announced_are_full():
    net = Net()
    net.step(12)
    assert net.call(["cond"], 3) == [6] and net.resets == {}


def test_a_full_pass_without_a_feature_is_followed_by_another():
    """The last resort, ComfyUI's own forward, has none to give."""
    net = Net()
    net._full = lambda x: (x * 2, None)
    for step in range(3):
        net.step(step)
        assert net.call(["cond"], 4) == [8]
    assert net.resets == {runs.NEWCOMER: 2}


def test_what_is_given_out_is_not_what_is_kept():
    """A patch in the tail may write into it, as FreeU does."""
    net = Net()
    net._skipped = lambda features: features[0].mul_(100)
    net.step(0)
    net.call(["cond"], 10)
    for step in (1, 2):
        net.step(step)
        assert net.call(["cond"], 0) == [1100]


def test_closing_forgets_everything():
    net = Net()
    net.step(0)
    net.call(["cond"], 10)
    net.run.identity(net)
    net.run.close()
    assert not net.run._entries and not net.run._kept_alive
    assert net.run.stats.bytes == 4 * 8 and net.run.stats.seconds > 0
