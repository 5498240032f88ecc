"""Patches of other nodes on recorded models that are called in each forward, as their state cannot be a guard.

On the CPU; whatever a patch does and whenever it changes its mind, the picture is eager's.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tools.driving import compiled, randn
from tools.oracles import error, fallbacks, shapes
from tools.patching import CHANGED, CLOSE, assert_equal, run, takes_of, with_patch

pytestmark = pytest.mark.usefixtures("clean_stats")


def sigma_of(options):
    return float(options["sigmas"][0])


def test_a_patch_for_some_steps_alone(models, fresh, recordings):
    """It decides by the noise level, read as a number."""

    def patch(h, options):
        return h * 1.3 if sigma_of(options) < 2.0 else h

    patched, fast = (with_patch(e, lambda p: p.set_model_input_block_patch(patch)) for e in (fresh, compiled(fresh)))
    for seed in range(2):
        wanted = assert_equal(models, patched, fast, seed=seed)
    assert error(wanted, run(models, fresh, seed=1)) > CHANGED
    assert len(recordings) == 2 and not fallbacks()
    (take,) = takes_of(fast)
    assert take.live and take.used and "what is between the calls is fast" in take.called
    name = patch.__qualname__.replace(".<locals>.", ".")
    assert f"called {len(take.live)} times ({name})" in take.called


def test_a_patch_that_begins_to_keep_something_is_not_called_twice(pack):
    """From there on what patches gave is kept for a forward in eager, which calls those before it again."""
    from anyshape.accel.tape.this_forward import Forward

    def call(patch, number):
        def perform():
            numbers.append(torch.rand(()))
            kept.update({patch: number} if number else {})
            return SimpleNamespace(apart=lambda: SimpleNamespace(patch=patch))

        return this.call((patch,), patch, perform)

    kept, numbers, this = {}, [], Forward({})
    torch.manual_seed(0)
    this.begin(False, torch.device("cpu"), lambda patch: (patch, kept.get(patch)))
    call("first", 0)
    assert this.broken_off() is None and torch.rand(()) == numbers[0]
    for patch, number in (("second", 1), ("third", 0)):
        call(patch, number)
    (before, begins, after) = this.broken_off()
    assert before == (("first",), None) and (begins[1].patch, after[1].patch) == ("second", "third")
    assert torch.rand(()) == numbers[0]  # of the first one, again
    begins[1].drawn.restore()
    assert torch.rand(()) == numbers[2]  # of the third one


def test_a_step_counter(models, fresh, recordings):
    def patch_of():
        steps = [0]

        def patch(h, options):
            steps[0] += options["block"] == ("input", 0)
            return h * (1 + 0.1 * steps[0])

        return patch

    patched, fast = (
        with_patch(e, lambda p: p.set_model_input_block_patch(patch_of())) for e in (fresh, compiled(fresh))
    )
    assert_equal(models, patched, fast)
    assert_equal(models, patched, fast)
    assert len(recordings) == 2


def test_a_number_that_others_change_between_steps(models, fresh, recordings):
    """No forward changes it, but each finds another one: it is not recorded again for ever."""

    def patched(patcher):
        patcher, scale = patcher.clone(), [1.0]

        def between(apply, args):
            scale[0] += 0.05
            return apply(args["input"], args["timestep"], **args["c"])

        patcher.set_model_unet_function_wrapper(between)
        patcher.set_model_attn2_output_patch(lambda n, options: n * scale[0])
        return patcher

    assert_equal(models, patched(fresh), patched(compiled(fresh)), steps=8)
    assert len(recordings) == 5  # four in vain, and the one with the patch as a call
    assert takes_of(compiled(fresh))[-1].live


def test_random_numbers(models, fresh):
    def patch(n, options):
        return n + 0.1 * torch.randn(n.shape)

    patched, fast = (with_patch(e, lambda p: p.set_model_attn1_output_patch(patch)) for e in (fresh, compiled(fresh)))
    outs, states = [], []
    for each in (patched, fast):
        torch.manual_seed(11)
        outs.append([run(models, each) for _ in range(2)])
        states.append(torch.get_rng_state())
    assert all(error(out, wanted) < CLOSE for wanted, out in zip(*outs, strict=True))
    assert torch.equal(*states) and error(outs[0][0], run(models, fresh)) > CHANGED


class Adapter(nn.Module):
    """As IPAdapter: layers of its own, attention to its own tokens, strength by step."""

    def __init__(self, width):
        super().__init__()
        self.to_k, self.to_v = nn.Linear(16, width, bias=False), nn.Linear(16, width, bias=False)
        for number, weight in enumerate(self.parameters()):
            weight.data = randn(*weight.shape, seed=number) * 0.5


def test_layers_of_a_patch_and_its_own_tokens(models, fresh, recordings):
    width = fresh.model.diffusion_model.input_blocks[1][1].transformer_blocks[0].attn2.to_q.out_features
    adapter, tokens = Adapter(width), randn(1, 4, 16, seed=8)

    def replace(q, k, v, extra_options):
        from comfy.ldm.modules.attention import optimized_attention

        out = optimized_attention(q, k, v, extra_options["n_heads"])
        if sigma_of(extra_options) > 1.0:
            rows = [tokens if kind == 0 else torch.zeros_like(tokens) for kind in extra_options["cond_or_uncond"]]
            own = torch.cat(rows).repeat_interleave(len(q) // len(rows), 0)
            out = out + optimized_attention(q, adapter.to_k(own), adapter.to_v(own), extra_options["n_heads"])
        return out

    patched, fast = (
        with_patch(e, lambda p: p.set_model_attn2_replace(replace, "input", 1)) for e in (fresh, compiled(fresh))
    )
    before = assert_equal(models, patched, fast)
    assert_equal(models, patched, fast, seed=2)
    with torch.no_grad():
        adapter.to_v.weight.mul_(2.0)  # in place: nothing tells us
        tokens.add_(0.5)
    after = assert_equal(models, patched, fast)
    assert error(after, before) > CHANGED and len(recordings) <= 2 and not fallbacks()


def test_a_patch_that_keeps_features_for_the_next_step(models, fresh):
    """What it keeps is its own: a program's memory is used again."""

    def patch_of():
        kept = {}

        def patch(n, options):
            place = options["block"], options["block_index"]
            out = n + 0.3 * kept.get(place, torch.zeros_like(n))
            kept[place] = n
            return out

        return patch

    patched, fast = (
        with_patch(e, lambda p: p.set_model_attn1_output_patch(patch_of())) for e in (fresh, compiled(fresh))
    )
    assert_equal(models, patched, fast)
    assert_equal(models, patched, fast, seed=2)


def test_results_of_several_forms(models, fresh, recordings):
    """It shrinks the picture for some steps: a recording of each form, found again in the next picture."""

    def shrink(h, options):
        return h[..., ::2, ::2] if options["block"][1] == 1 and sigma_of(options) > 2.0 else h

    def grow(h, skip, options):
        if h.shape[-1] != skip.shape[-1] or h.shape[-2] != skip.shape[-2]:
            h = nn.functional.interpolate(h, skip.shape[-2:])
        return h, skip

    def set_patches(patcher):
        patcher.set_model_input_block_patch_after_skip(shrink)
        patcher.set_model_output_block_patch(grow)

    patched, fast = (with_patch(each, set_patches) for each in (fresh, compiled(fresh)))
    for seed in range(2):
        assert_equal(models, patched, fast, seed=seed, steps=6)
    assert len(recordings) == 3 and not fallbacks()


def test_forms_and_a_count(models, fresh, recordings, fusing, block_programs):
    """A forward that is broken off must not call it twice. Then only its blocks are recorded."""

    def set_patches(patcher):
        calls, log = [0], []

        def shrink(h, options):
            calls[0] += 1
            log.append((options["block"], tuple(h.shape)))
            return h[..., ::2, ::2] if options["block"][1] == 1 and calls[0] % 20 > 8 else h * (1 + calls[0] / 100)

        def grow(h, skip, options):
            return (nn.functional.interpolate(h, skip.shape[-2:]) if h.shape[-1] != skip.shape[-1] else h), skip

        patcher.set_model_input_block_patch_after_skip(shrink)
        patcher.set_model_output_block_patch(grow)
        return log

    outs, logs = [], []
    for each in (fresh, compiled(fresh)):
        patched = each.clone()
        logs.append(set_patches(patched))
        outs.append([run(models, patched, seed=seed, steps=6) for seed in range(2)])
    assert all(error(out, wanted) < CLOSE for wanted, out in zip(*outs, strict=True))
    assert logs[0] == logs[1]
    assert len(recordings) <= 4 and any("several shapes or types" in each["reason"] for each in fallbacks())
    assert any("transformer_blocks" in path for path in block_programs) and any(
        path.endswith(".0") for path in block_programs
    )


def test_a_patch_that_writes_options(models, fresh):
    """For a later patch, and for the model: what a tape cannot follow runs in eager."""

    def set_patches(patcher):
        calls = []

        def write(h, options):
            calls.append(1)
            options["mine"] = 1.0 + len(calls) / 50
            return h

        patcher.set_model_input_block_patch(write)
        patcher.set_model_output_block_patch(lambda h, skip, options: (h * options["mine"], skip))

    patched, fast = (with_patch(each, set_patches) for each in (fresh, compiled(fresh)))
    assert_equal(models, patched, fast)
    assert_equal(models, patched, fast, seed=2)


def test_an_error_of_a_patch_at_a_replay(models, fresh):
    """It is the user's to see, and costs nothing later."""
    calls, broken = [], []

    def patch(h, options):
        calls.append(1)
        if broken:
            raise ValueError("the patch's own error")
        return h * 1.1

    patched, fast = (with_patch(e, lambda p: p.set_model_input_block_patch(patch)) for e in (fresh, compiled(fresh)))
    assert_equal(models, patched, fast)
    broken.append(1)
    with pytest.raises(ValueError, match="the patch's own error"):
        run(models, fast)
    broken.clear()
    assert_equal(models, patched, fast)
    assert shapes()[-1]["state"] == "tape"
