"""Patches of other nodes on recorded models that are written down, with their state as a guard.

On the CPU; whenever a patch changes its mind, the picture is eager's.
"""

import functools
from dataclasses import dataclass, field

import pytest
import torch

from tools import patching
from tools.driving import compiled
from tools.oracles import error, fallbacks
from tools.patching import CHANGED, CLOSE, takes_of, with_patch

pytestmark = pytest.mark.usefixtures("clean_stats")
# Of two steps: what the first records, the second replays.
assert_equal, run = (functools.partial(each, steps=2) for each in (patching.assert_equal, patching.run))


def scaling(patcher, strength):
    """A patch without a state of its own."""
    patcher.set_model_attn2_output_patch(lambda n, options: n * strength)


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_a_patch_without_state_is_written_down(models, fresh, recordings, mode):
    plain = run(models, fresh)
    patched, fast = (with_patch(each, lambda p: scaling(p, 1.5)) for each in (fresh, compiled(fresh, mode=mode)))
    for seed in range(2):
        wanted = assert_equal(models, patched, fast, seed=seed)
    assert error(wanted, run(models, fresh, seed=1)) > CHANGED and plain.shape == wanted.shape
    assert len(recordings) == 1 and not fallbacks()
    (take,) = takes_of(fast)
    assert not take.live and not take.called and take.used


@pytest.fixture(scope="module")
def scaled(models, patcher):
    """ComfyUI's own picture with a patch of this strength, however a patch comes to it."""
    scaled = functools.cache(lambda strength: run(models, with_patch(patcher, lambda p: scaling(p, strength))))
    assert min(error(scaled(strength), scaled(1.5)) for strength in (0.5, 1.5 * 1.25, 1.5 * 0.8, 3.0)) > CHANGED
    return scaled


class Strength:
    """As packs have it: an object whose numbers are its settings."""

    def __init__(self, value):
        self.value, self.more = value, {"list": [1.0]}

    def __call__(self, n, options):
        return n * self.value * self.more["list"][0]


def changed_value(patch):
    patch.value = 0.5


def changed_item(patch):
    patch.more["list"][0] = 1.25


def changed_list(patch):
    patch.more["list"].insert(0, 0.8)


def changed_class(patch):
    type(patch).__call__ = lambda self, n, options: n * 3.0


@pytest.mark.parametrize(
    ("change", "after"),
    [(changed_value, 0.5), (changed_item, 1.5 * 1.25), (changed_list, 1.5 * 0.8), (changed_class, 3.0)],
)
def test_the_same_object_with_another_setting(models, fresh, recordings, scaled, change, after):
    """Between two pictures."""
    kind = type("Strength", (Strength,), {})
    fast = with_patch(compiled(fresh), lambda p: p.set_model_attn2_output_patch(kind(1.5)))
    for _ in range(2):
        assert error(run(models, fast), scaled(1.5)) < CLOSE
    assert len(recordings) == 1
    # older ComfyUI copies an object with the options, so that each clone has its own
    (patch,) = fast.model_options["transformer_options"]["patches"]["attn2_output_patch"]
    change(patch)
    for _ in range(2):
        assert error(run(models, fast), scaled(after)) < CLOSE
    assert len(recordings) == 2 and not fallbacks()


LOUDNESS = 1.5
TABLE = {"loud": [1.5]}


def helper(n):
    return n * TABLE["loud"][0]


@pytest.mark.parametrize("how", ["a global", "a table", "a default", "a cell", "an attribute", "a partial"])
def test_what_a_function_reads(models, fresh, recordings, scaled, monkeypatch, how):
    cell = [1.5]

    def by_global(n, options):
        return n * LOUDNESS

    def by_table(n, options):
        return helper(n)

    def by_default(n, options, scale=1.5):
        return n * scale

    def by_cell(n, options):
        return n * cell[0]

    def by_attribute(n, options):
        return n * by_attribute.scale

    def by_partial(scale, n, options):
        return n * scale["of"]

    by_attribute.scale, settings = 1.5, {"of": 1.5}
    patch = {
        "a global": by_global, "a table": by_table, "a default": by_default, "a cell": by_cell,
        "an attribute": by_attribute, "a partial": functools.partial(by_partial, settings),
    }[how]  # fmt: skip
    fast = with_patch(compiled(fresh), lambda p: p.set_model_attn2_output_patch(patch))
    assert error(run(models, fast), scaled(1.5)) < CLOSE
    if how == "a partial":  # of which older ComfyUI makes a copy in each clone
        fast.model_options["transformer_options"]["patches"]["attn2_output_patch"][0].args[0]["of"] = 0.5
    monkeypatch.setitem(globals(), "LOUDNESS", 0.5)
    monkeypatch.setitem(TABLE, "loud", [0.5])
    by_default.__defaults__, by_attribute.scale, cell[0] = (0.5,), 0.5, 0.5
    assert error(run(models, fast), scaled(0.5)) < CLOSE
    assert len(recordings) == 2 and not fallbacks()


def test_two_patches_take_turns(models, fresh, recordings):
    """As guidance by a second pass does in each step."""
    patched, fast = {}, compiled(fresh)
    for strength in (1.5, 0.5):
        patched[strength] = [with_patch(e, lambda p, s=strength: scaling(p, s)) for e in (fresh, fast)]
    for strength in (1.5, 0.5, 1.5, 0.5):
        assert_equal(models, *patched[strength])
    assert len(recordings) == 2 and not fallbacks()


def test_a_patch_that_reads_which_rows_are_which(models, fresh):
    """``cond_or_uncond`` may be another order at the same size."""

    def patch(n, options):
        rows = [[1.5] if kind == 0 else [0.5] for kind in options["cond_or_uncond"]]
        return n * torch.tensor(rows, dtype=n.dtype).repeat_interleave(n.shape[0] // len(rows), 0)[:, :, None]

    fast = compiled(fresh)
    for each in (fresh, fast):
        each.set_model_attn2_output_patch(patch)

    def forward(patcher, order):
        from tools.driving import options_of, unet_inputs

        options = options_of(patcher) | {"cond_or_uncond": list(order)}
        with torch.inference_mode():
            return patcher.model.diffusion_model(**unet_inputs(patcher, 128, 64), transformer_options=options)

    outs = {}
    for order in ((1, 0), (0, 1), (1, 0), (0, 1)):
        outs[order] = forward(fresh, order)
        assert error(forward(fast, order), outs[order]) < CLOSE
    assert error(outs[1, 0], outs[0, 1]) > CHANGED
    assert not any(take.live for take in takes_of(fast))


def test_sigma_as_a_tensor_is_an_input(models, fresh, recordings):
    patched, fast = (
        with_patch(e, lambda p: p.set_model_attn2_output_patch(lambda n, o: n / (1 + o["sigmas"][:1, None, None])))
        for e in (fresh, compiled(fresh))
    )
    assert_equal(models, patched, fast)
    assert_equal(models, patched, fast, seed=3)
    assert len(recordings) == 1 and not takes_of(fast)[0].live


def test_what_a_block_notes_for_a_patch_without_a_value_is_no_option_of_the_callers(models, fresh, recordings):
    """``attn_precision`` is None nearly always (PLADIS reads it)."""

    def mean(q, k, v, options):
        assert options.get("attn_precision") is None and "attn_precision" in options
        return v.mean(1, keepdim=True).expand_as(q)

    patched, fast = (
        with_patch(e, lambda p: p.set_model_attn2_replace(mean, "middle", 0)) for e in (fresh, compiled(fresh))
    )
    assert_equal(models, patched, fast)
    assert_equal(models, patched, fast, seed=3)
    assert len(recordings) == 1 and not fallbacks()


@dataclass
class Settings:
    strength: float
    names: list = field(default_factory=lambda: ["a"])


class OfAPart:
    """It holds a part of the model that it is about (LTX's STG does), and settings in a dataclass."""

    def __init__(self, part, settings):
        self.part, self.settings = part, settings

    def __call__(self, n, options):
        return n * self.settings.strength + 0.01 * self.part.weight.mean()


def test_a_patch_that_holds_a_part_of_the_model_and_a_dataclass(models, fresh, recordings):
    part, settings = fresh.model.diffusion_model.out[2], Settings(1.5)
    patch = OfAPart(part, settings)
    patched, fast = (
        with_patch(each, lambda p: p.set_model_attn2_output_patch(patch)) for each in (fresh, compiled(fresh))
    )
    for settings.strength in (1.5, 1.5, 0.5, 1.5):
        assert_equal(models, patched, fast)
    assert len(recordings) == 2 and not fallbacks() and not any(take.live for take in takes_of(fast))
