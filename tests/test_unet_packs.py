"""What other packs do to a UNet that runs compiled, on the CPU: their code runs exactly as in eager."""

import pytest

from tools.driving import SMALL_RUN, compiled, unet_forward
from tools.oracles import FUSED, assert_fast, error, expect, fallbacks, shapes
from tools.patching import PATCHES, attn1, attn2_replace_one

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3, what is measured is 3e-6
PATCHED = SMALL_RUN | {"width": 72, "steps": 2}
BLOCK = "input_blocks.1.1.transformer_blocks.0"


# Patches of other nodes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patches", [PATCHES[start::3] for start in range(3)], ids=["one", "two", "three"])
def test_patch_equals_eager(models, fresh, recordings, patches):
    """Each shows by itself, and sees the same places in the same order, once in each forward.

    What is around them is recorded, and once they are gone the model is as fast as without them.
    """
    fast, plain, own = compiled(fresh), models.sample(fresh, **PATCHED), unet_forward(fresh, 64, 64)
    for patch in patches:
        patched = fresh.clone()
        patch(patched, [])
        assert error(unet_forward(patched, 64, 64), own) > 1e-3
    outs, logs = [], []
    for each in (fresh, fast):
        patched, log = each.clone(), {patch: [] for patch in patches}
        for patch, places in log.items():
            patch(patched, places)
        outs.append([models.sample(patched, **PATCHED | {"seed": seed}) for seed in range(2)])
        logs.append(log)
    assert all(error(out, wanted) < CLOSE / 10 for wanted, out in zip(*outs, strict=True))
    assert logs[0] == logs[1] and min(map(len, logs[0].values())) >= 4
    assert len(recordings) <= 2 and {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()
    for _ in range(2):
        assert error(models.sample(fast, **PATCHED), plain) < CLOSE
    assert_fast()


@pytest.mark.parametrize("version", ["FreeU", "FreeU_V2"])
def test_freeu_node(models, patcher, version):
    from comfy_extras import nodes_freelunch

    (wanted,) = getattr(nodes_freelunch, version)().patch(patcher, 1.3, 1.4, 0.9, 0.2)
    (freeu,) = getattr(nodes_freelunch, version)().patch(compiled(patcher), 1.3, 1.4, 0.9, 0.2)
    assert error(models.sample(freeu, **SMALL_RUN), models.sample(wanted, **SMALL_RUN)) < CLOSE


def test_one_replaced_block_is_one_call_of_a_program(patcher):
    """The patch logs its calls, so it is called in each forward; all else is recorded."""
    from anyshape.accel.comfy.attach import engine_of

    patched, log = compiled(patcher), []
    attn2_replace_one(patched, log)
    for _ in range(3):
        unet_forward(patched, 64, 64)
    takes = engine_of(patched)(patcher.model.diffusion_model)._tape._tapes._takes
    (called,) = [take for group in takes.values() for take in group if take.live and take.used]
    assert len(called.live) == 1 and len(log) == 3
    assert_fast()


def test_a_model_that_was_patched_at_first_recompiles_nothing(models, fresh, monkeypatch):
    """Its first call without the patch compiles the blocks that were patched: it is their first call."""
    from anyshape.accel import maker, stats
    from anyshape.accel.tape.program import Program

    compiled_ = []

    def made(self, tape, fuse, call):
        program = Program(tape, fuse=False)
        program.report.compiled = 3
        compiled_.append(call)
        return program

    monkeypatch.setattr(maker.Maker, "made", made)
    fast = compiled(fresh)
    patched = fast.clone()
    attn1(patched, [])
    models.sample(patched, **SMALL_RUN | {"steps": 2})
    before = len(compiled_)
    with expect(recompiles=0):
        assert error(models.sample(fast, **SMALL_RUN), models.sample(fresh, **SMALL_RUN)) < CLOSE
    assert len(compiled_) == before + 1
    models.sample(fast, **SMALL_RUN | {"width": 72})
    assert stats.snapshot()["models"][-1]["recompiles"] == 3  # another size of it


def test_another_patch_in_the_same_place_is_no_later_size(fusing, models, fresh):
    """It makes other operations, which need other kernels. A further size with a patch that is known compiles none."""
    from anyshape.accel import stats

    louder, waves = compiled(fresh), compiled(fresh)
    louder.set_model_input_block_patch(lambda h, options: h * 1.1)
    waves.set_model_input_block_patch(lambda h, options: h.sin())
    models.sample(louder, **SMALL_RUN)
    before = stats.snapshot()["models"][-1]["kernels"]
    with expect(recompiles=0):
        models.sample(waves, **SMALL_RUN)
    assert stats.snapshot()["models"][-1]["kernels"] > before
    with expect(recompiles=0, kernels=0):
        models.sample(waves, **SMALL_RUN | {"width": 72})
        models.sample(louder, **SMALL_RUN | {"width": 72})


def test_an_error_in_a_patch_is_the_users_to_see(models, patcher):
    """It comes through as in eager, and the model is as fast as before once the patch is gone."""
    fast = compiled(patcher)
    broken = fast.clone()

    def patch(h, options):
        raise ValueError("the patch's own error")

    broken.set_model_input_block_patch(patch)
    with pytest.raises(ValueError, match="the patch's own error"):
        models.sample(broken, **SMALL_RUN)
    assert error(models.sample(fast, **SMALL_RUN), models.sample(patcher, **SMALL_RUN)) < CLOSE
    assert shapes()[-1]["state"] == FUSED


# Wrappers of other packs ------------------------------------------------------------------------------------------


def wrapped(patcher, log):
    """Another pack's wrapper around the diffusion model: it changes the input and the output."""
    from comfy.patcher_extension import WrappersMP

    def wrapper(executor, x, *args, **kwargs):
        log.append(tuple(x.shape))
        return executor(x * 0.9, *args, **kwargs) * 1.1

    patcher = patcher.clone()
    patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", wrapper)
    return patcher


@pytest.mark.parametrize("ours", ["before", "after", "between"])
def test_another_wrapper(models, patcher, ours):

    before, after = ours != "before", ours != "after"
    wanted_log, log = [], []
    wanted = wrapped(patcher, wanted_log)
    wanted = wrapped(wanted, wanted_log) if ours == "between" else wanted
    out = compiled(wrapped(patcher, log) if before else patcher)
    out = wrapped(out, log) if after else out
    with expect(calls=2):
        fast = models.sample(out, **SMALL_RUN | {"steps": 2})
    assert error(fast, models.sample(wanted, **SMALL_RUN | {"steps": 2})) < CLOSE
    assert log == wanted_log and log
    assert error(fast, models.sample(patcher, **SMALL_RUN | {"steps": 2})) > 1e-2
    assert_fast()


@pytest.mark.parametrize("ours", ["before", "after"])
def test_easy_cache_node(models, patcher, ours):
    """ComfyUI's EasyCache skips the same steps with and without us."""
    from comfy_extras.nodes_easycache import EasyCacheNode

    def easy_cache(model):
        return EasyCacheNode.execute(model, 0.5, 0.1, 0.95, False).args[0]

    run = SMALL_RUN | {"steps": 8}
    wanted = models.sample(easy_cache(patcher), **run)
    fast = easy_cache(compiled(patcher)) if ours == "before" else compiled(easy_cache(patcher))
    assert error(models.sample(fast, **run), wanted) < CLOSE
    assert 0 < shapes()[0]["calls"] < 8
    assert_fast()


def test_a_unet_function_wrapper(models, patcher):
    """The older way to wrap a model."""

    def wrap(model):
        model = model.clone()
        model.set_model_unet_function_wrapper(
            lambda apply, call: apply(call["input"], call["timestep"], **call["c"]) * 0.9
        )
        return model

    assert error(models.sample(wrap(compiled(patcher)), **SMALL_RUN), models.sample(wrap(patcher), **SMALL_RUN)) < CLOSE
    assert_fast()


# Hooked and replaced parts ----------------------------------------------------------------------------------------

# A layer of a repeated block, all of it, a layer of another, what gives an embedding: our code looks at every module in
# one way.
HOOKED = [f"{BLOCK}.attn1.to_q", BLOCK, "middle_block.1.proj_out", "time_embed"]


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_takes_effect(patcher, name):
    """Wherever another pack hooks the model, one that counts is called as in eager, and its place is in the stats."""
    fast, plain, calls = compiled(patcher), unet_forward(patcher, 64, 64), []
    unet_forward(fast, 64, 64)
    module = patcher.model.diffusion_model.get_submodule(name)
    handle = module.register_forward_hook(lambda m, args, out: calls.append(1) or out * 1.5)
    try:
        wanted, wanted_calls = unet_forward(patcher, 64, 64), len(calls)
        out = unet_forward(fast, 64, 64)
    finally:
        handle.remove()
    assert error(wanted, plain) > 1e-4 and error(out, wanted) < CLOSE / 10
    assert len(calls) == 2 * wanted_calls > 0
    reason = shapes()[-1]["reason"]
    assert "hooked or replaced a part of the model" in reason and f"({name}._forward_hooks[0] of" in reason
    assert any("hooked" in f["reason"] for f in fallbacks())
    assert error(unet_forward(fast, 64, 64), plain) < CLOSE
    assert shapes()[-1]["reason"] == ""


@pytest.mark.parametrize("name", ["_forward", "out.forward", f"{BLOCK}.ff.forward"])
def test_an_object_patch_takes_effect(models, patcher, name):
    """ModelPatcher.add_object_patch on a method, as packs do that replace a part of the model."""
    owner, _, method = f"diffusion_model.{name}".rpartition(".")
    own = getattr(patcher.model.get_submodule(owner), method)

    def patched(model):
        model = model.clone()
        model.add_object_patch(f"{owner}.{method}", lambda *args, **kwargs: own(*args, **kwargs) * 1.5)
        return model

    plain, wanted = models.sample(patcher, **SMALL_RUN), models.sample(patched(patcher), **SMALL_RUN)
    assert error(wanted, plain) > 1e-4
    assert error(models.sample(patched(compiled(patcher)), **SMALL_RUN), wanted) < CLOSE / 10
    assert_fast()  # its effect is on the tape
    fast = compiled(patcher)
    assert error(models.sample(fast, **SMALL_RUN), plain) < CLOSE
    assert shapes()[-1]["state"] == FUSED and shapes()[-1]["reason"] == ""


@pytest.mark.parametrize("name", [f"{BLOCK}.attn1.to_q", BLOCK, "middle_block.1.proj_out"])
def test_a_hook_without_a_state_is_on_the_tape(patcher, name):
    """Until a number that it reads is another one."""
    scale, fast = [1.5], compiled(patcher)
    module = patcher.model.diffusion_model.get_submodule(name)
    handle = module.register_forward_hook(lambda m, args, out: out * scale[0])
    try:
        for scale[0] in (1.5, 0.5):
            wanted = {size: unet_forward(patcher, *size) for size in ((64, 64), (72, 56))}
            for size, out in [*wanted.items()] * 2:
                assert error(unet_forward(fast, *size), out) < CLOSE / 10
    finally:
        handle.remove()
    assert_fast()
    assert not fallbacks()


# Options that other packs keep -------------------------------------------------------------------------------------


class Kept:
    """Where a pack's wrapper keeps the options of the latest forward, for its other code (as layerdiffuse does)."""

    options = {}
    copies = False  # keeps a copy of them instead
    looks_back = False  # reads those that were there before


def keeping_options(monkeypatch):
    from comfy.ldm.modules.attention import BasicTransformerBlock

    own = BasicTransformerBlock.forward

    def forward(self, x, context, transformer_options):
        if Kept.looks_back:
            x = x * (1 + len(Kept.options.get("cond_or_uncond", ())))
        Kept.options = dict(transformer_options) if Kept.copies else transformer_options
        return own(self, x, context, transformer_options) * (1 + sum(Kept.options["cond_or_uncond"]))

    monkeypatch.setattr(BasicTransformerBlock, "forward", forward)
    monkeypatch.setattr(Kept, "options", {})


def test_options_that_a_pack_keeps_are_there_after_a_replay_too(models, patcher, monkeypatch):
    keeping_options(monkeypatch)
    fast, runs = compiled(patcher), (SMALL_RUN | {"steps": 3}, SMALL_RUN | {"width": 72, "steps": 2})
    for run in (*runs, *runs):
        sigmas = []
        out = models.sample(fast, **run, callback=lambda *args: sigmas.append(float(Kept.options["sigmas"][0])))  # noqa: B023
        assert type(Kept.options) is dict and len(set(sigmas)) == run["steps"]
        assert error(out, models.sample(patcher, **run)) < CLOSE / 10
    assert_fast()
    assert not fallbacks()


@pytest.mark.parametrize("way", ["copies", "looks_back"])
def test_more_than_that_is_left_to_the_pack(models, patcher, monkeypatch, way):
    keeping_options(monkeypatch)
    models.sample(compiled(patcher), **SMALL_RUN | {"steps": 2})  # from then on it is known where they are kept
    assert_fast()
    monkeypatch.setattr(Kept, way, True)
    fast, run = compiled(patcher), SMALL_RUN | {"width": 72, "steps": 3}
    assert error(models.sample(fast, **run), models.sample(patcher, **run)) < CLOSE / 10
    assert shapes()[-1]["state"] == "eager" and "may keep state" in shapes()[-1]["reason"]
