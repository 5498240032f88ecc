"""Nodes of other packs that run again, change a setting, or ask which other wrappers there are."""

import pytest

from tools.driving import SMALL_RUN, calls_of, compiled, skipping
from tools.oracles import assert_fast, error, fallbacks
from tools.patching import read_back

pytestmark = pytest.mark.usefixtures("clean_stats")
CLOSE = 1e-5
RUN = SMALL_RUN | {"steps": 3}


# Wrappers ----------------------------------------------------------------------------------------------------------


def wrapped(patcher, place, wrapper):
    patcher = patcher.clone()
    patcher.add_wrapper_with_key(place, "a pack", wrapper)
    return patcher


def test_a_pack_that_does_nothing_beside_another_wrapper_of_the_sampler(models, patcher):
    """As Spectrum for MiniMax H3: it is alone there. Where no pack is, conds are copied ahead, and nothing stays."""
    from anyshape.accel.comfy.session import Session
    from comfy.patcher_extension import WrappersMP, get_all_wrappers

    place, met = WrappersMP.SAMPLER_SAMPLE, []

    def alone(executor, guider, *args, **kwargs):
        met.append(len(get_all_wrappers(place, guider.model_options, is_model_options=True)))
        return executor(guider, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        ours = calls_of(patch, Session, "sampler")
        fast = compiled(patcher)
        for model in (wrapped(fast, place, alone), compiled(wrapped(patcher, place, alone))):
            assert error(models.sample(model, **RUN), models.sample(patcher, **RUN)) < CLOSE
        assert met == [1, 1] and not ours
        for turn in range(2):
            models.sample(fast, **RUN)
            models.sample(skipping(patcher), **RUN)  # without Compile Model ComfyUI copies them itself
            assert len(ours) == turn + 1
    assert not fast.wrappers.get(place) and not get_all_wrappers(place, fast.model_options, is_model_options=True)


def test_a_wrapper_that_answers_by_itself_is_no_bypass(models, patcher):
    """A step cache around ours may give what it has kept all along."""
    from anyshape.accel.comfy.entries import passed_by
    from comfy.patcher_extension import WrappersMP

    def keeps(executor, x, *args, **kwargs):
        return x * 0.5

    patched = wrapped(patcher, WrappersMP.DIFFUSION_MODEL, keeps)
    fast = compiled(patched)
    assert error(models.sample(fast, **RUN), models.sample(patched, **RUN)) == 0
    assert passed_by(fast)() == "" and not fallbacks()


# Patches that are made again ---------------------------------------------------------------------------------------


def test_a_patch_around_a_block_is_no_matter_of_the_block(models, fusing, monkeypatch):
    """A node makes it again each time, and some make it again at each call."""
    from anyshape.accel import block_tier

    from tools.architectures import patchers

    patcher = patchers.make("LTXV", blocks=4)
    read_back(patcher.model.diffusion_model)
    recorded = calls_of(monkeypatch, block_tier, "record_block")

    def patched(model, strength):
        def again(apply, args):
            options = args["c"]["transformer_options"]

            def around(given, extra):
                return {"img": extra["original_block"](given)["img"] * strength}

            options["patches_replace"] = {"dit": {("double_block", 1): around}}
            return apply(args["input"], args["timestep"], **args["c"])

        model = model.clone()
        model.set_model_unet_function_wrapper(again)
        return model

    run = {"width": 128, "height": 128, "frames": 9, "steps": 8, "tokens": 24, "cfg": 1.0}
    fast = compiled(patcher)
    for strength in (1.0, 0.5, 2.0):
        wanted = models.sample(patched(patcher, strength), **run)
        assert error(models.sample(patched(fast, strength), **run), wanted) < CLOSE
        assert len(recorded) == 2  # in place, and then on a copy of its input
    assert_fast()


def tiles(size):
    """A patch that is called, and whose results have a form that follows from its setting."""
    calls = []

    def patch(q, context, value, options):
        calls.append(1)
        rows, tokens, width = q.shape
        shape = (rows * size, tokens // size, width)
        return q.reshape(shape), context.repeat(size, 1, 1), value.repeat(size, 1, 1)

    def back(n, options):
        return n.reshape(n.shape[0] // size, n.shape[1] * size, n.shape[2]) * (1 + len(calls) / 1e4)

    return patch, back


def test_a_setting_that_changes_what_a_patch_gives(models, fresh, recordings):
    """The new setting gets a recording to itself, and the old one keeps its own."""

    def patched(model, size):
        model, (patch, back) = model.clone(), tiles(size)
        model.set_model_attn2_patch(patch)
        model.set_model_attn2_output_patch(back)
        return model

    fast = compiled(fresh)
    for size in (1, 1, 2, 2, 1, 2):
        assert error(models.sample(patched(fast, size), **RUN), models.sample(patched(fresh, size), **RUN)) < CLOSE
    assert_fast()
    before = len(recordings)
    for size in (2, 1):
        run = RUN | {"width": 96}
        assert error(models.sample(patched(fast, size), **run), models.sample(patched(fresh, size), **run)) < CLOSE
    assert_fast()
    assert len(recordings) <= before + 2


# Attention of another pack -----------------------------------------------------------------------------------------


def chosen(scale, counts=False):
    """As KJNodes' node for SageAttention makes one, each time that it runs."""
    from comfy.ldm.modules.attention import attention_pytorch

    calls = 0

    def attend(function, q, k, v, heads, *args, **kwargs):
        nonlocal calls
        if counts:
            calls += 1
        return attention_pytorch(q * scale, k, v, heads, *args, **kwargs)

    def plain(function, q, k, v, heads, *args, **kwargs):
        return attention_pytorch(q * scale, k, v, heads, *args, **kwargs)

    return attend if counts else plain


@pytest.mark.parametrize("counts", [False, True], ids=["keeps nothing", "counts"])
def test_an_attention_that_a_node_makes_again(models, fresh, recordings, counts):
    def patched(model, scale):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = chosen(scale, counts)
        return model

    fast = compiled(fresh)
    for scale in (1.1, 1.1, 0.7, 1.1, 0.7):
        assert error(models.sample(patched(fast, scale), **RUN), models.sample(patched(fresh, scale), **RUN)) < CLOSE
    assert len(recordings) == (5 if counts else 2)  # what it keeps may be another's
