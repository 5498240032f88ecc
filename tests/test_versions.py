"""What differs between ComfyUI's versions, on the CPU: each form is met, whichever the ComfyUI of this run has.

ComfyUI itself is the judge wherever it has the thing; where it is too old for it, its own classes are given the form of
the newer ones. `make test COMFYUI_PATH=...` runs all of this on another ComfyUI.
"""

import contextlib
import types

import pytest
import torch
from torch import nn

from tools.driving import (
    SHORT_RUN,
    SMALL_UNET,
    compile_with_message,
    compiled,
    skip_with_message,
    skipping,
    unet_forward,
)
from tools.oracles import assert_fast, counted, error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("stand_in", "clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3


def small_unet(models):
    return models.unet("sd15", torch.float32, **SMALL_UNET)


def assert_like_eager(models, patcher, run):
    """Compiled equals eager, with blocks of ours."""
    assert error(models.sample(compiled(patcher), **run), models.sample(patcher, **run)) < CLOSE
    assert_fast()
    assert not fallbacks()


# A UNet ------------------------------------------------------------------------------------------------------------


def test_a_model_that_was_left_in_training_mode_is_fast(models, fresh):
    """ComfyUI before 0.3.75 samples so, with dropouts of 0."""
    from anyshape.accel.families.unet_plan import Plan

    model = fresh.model.diffusion_model.train()
    assert len(Plan(model).transformer_blocks) == 4 and len(Plan(model).res_blocks) == 8
    assert_like_eager(models, fresh, SHORT_RUN)


def test_a_dropout_that_drops_is_not_ours(fresh):
    from anyshape.accel.families.unet_plan import Plan

    model = fresh.model.diffusion_model
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    dropouts[-1].p = 0.1
    everything = Plan(model.eval())
    fewer = Plan(model.train())
    parts = [len(plan.transformer_blocks) + len(plan.res_blocks) for plan in (everything, fewer)]
    assert parts[1] == parts[0] - 1


@pytest.mark.parametrize("kind", ["ResBlock", "SpatialTransformer", "Upsample", "Downsample", "Conv2d"])
@pytest.mark.parametrize("newer", [False, True])
def test_a_patch_that_runs_a_kind_of_layer(monkeypatch, patcher, kind, newer):
    """Older ComfyUI asks it for layers of unknown kinds only, newer for all: as this one does, and as newer."""
    from comfy.ldm.modules.diffusionmodules import openaimodel

    layer, log, own = getattr(openaimodel, kind, nn.Conv2d), [], openaimodel.forward_timestep_embed

    def run(m, x, emb, context, options, output_shape, *rest):
        log.append((options["block"], options["transformer_index"], output_shape))
        return own([m], x, emb, context, {"block": options["block"]}, output_shape) * 1.1

    def embed(stage, x, emb, context, options, output_shape=None, *rest, **more):
        for m in stage:
            if isinstance(m, layer) and "patches" in options:
                x = run(m, x, emb, context, options, output_shape)
            else:
                x = own([m], x, emb, context, options, output_shape)
        return x

    if newer:
        monkeypatch.setattr(openaimodel, "forward_timestep_embed", embed)

    def patched(model):
        clone = model.clone()
        clone.set_model_patch((layer, run), "forward_timestep_embed_patch")
        return unet_forward(clone, 136, 128), log.copy(), log.clear()

    wanted, places, _ = patched(patcher)
    out, ours, _ = patched(compiled(patcher))
    assert ours == places and error(out, wanted) < CLOSE
    assert_fast()


def test_a_patch_behind_the_middle_block(monkeypatch, fresh):
    """Newer ComfyUI calls it; here the oracle is a hook that does the same."""
    from anyshape.accel.families import compat
    from anyshape.accel.families import unet_forward as family

    monkeypatch.setattr(family, "HAS_MIDDLE_PATCH", True)
    seen, plain, middle = [], unet_forward(fresh, 136, 128), fresh.model.diffusion_model.middle_block

    def patch(args):
        seen.append({name: tuple(value.shape) for name, value in args.items() if torch.is_tensor(value)})
        seen.append(args["transformer_options"]["block"])
        return {"h": args["h"] * 1.5}

    patched = compiled(fresh)
    patched.set_model_patch(patch, "middle_block_after_patch")
    out = unet_forward(patched, 136, 128)
    assert seen[0] == {
        "h": (2, 64, 8, 9),
        "x": (2, 4, 16, 17),
        "emb": (2, 128),
        "context": (2, 77, 64),
        "timesteps": (2,),
    }
    assert seen[1] == ("middle", 0)
    if compat.HAS_MIDDLE_PATCH:
        own = fresh.clone()
        own.set_model_patch(patch, "middle_block_after_patch")
        assert error(out, unet_forward(own, 136, 128)) < CLOSE
    hook = middle[-1].register_forward_hook(lambda module, args, out: out * 1.5)
    wanted = unet_forward(fresh, 136, 128)
    hook.remove()
    assert error(out, wanted) < CLOSE < error(plain, wanted)


def test_an_older_comfyui_calls_nothing_behind_the_middle_block(monkeypatch, patcher):
    from anyshape.accel.families import unet_forward as family

    monkeypatch.setattr(family, "HAS_MIDDLE_PATCH", False)
    patched = compiled(patcher)
    patched.set_model_patch(lambda args: pytest.fail("called"), "middle_block_after_patch")
    assert error(unet_forward(patched, 128, 128), unet_forward(patcher, 128, 128)) < CLOSE


def test_a_patch_that_has_joined_the_skip_connection(patcher):
    """Newer ComfyUI then joins nothing; one that cannot fails in eager, so there is nothing to compare with."""

    def join(h, skip, options):
        return torch.cat([h, skip], dim=1), None

    plain, patched = unet_forward(compiled(patcher), 136, 128), compiled(patcher)
    patched.set_model_output_block_patch(join)
    assert error(unet_forward(patched, 136, 128), plain) < CLOSE
    assert_fast()


def test_patches_of_a_kind_that_we_do_not_know_run_in_eager(models, patcher):
    patched, calls = compiled(patcher), []
    patched.set_model_patch(lambda *args: calls.append(args), "patch_of_tomorrow")
    assert torch.equal(models.sample(patched, **SHORT_RUN), models.sample(patcher, **SHORT_RUN))
    assert "patch_of_tomorrow" in fallbacks()[0]["reason"] and shapes()[0]["state"] == "eager"


# DynamicVRAM -------------------------------------------------------------------------------------------------------


@pytest.fixture
def streamed(models):
    """Makes a patcher of a kind whose weights are streamed, as newer ComfyUI does on NVIDIA cards."""
    from comfy.model_patcher import ModelPatcher

    class Streamed(ModelPatcher):
        """clone's new arguments, and nothing that moves a weight: on a CPU ComfyUI streams none either."""

        loads, reload = 0, None

        def is_dynamic(self):
            return True

        def get_clone_model_override(self):
            return self.model

        def clone(self, disable_dynamic=False, model_override=None):
            if not disable_dynamic:
                return copy_onto(type(self)(self.model, self.load_device, self.offload_device), self)
            if model_override is None:
                if self.reload is None:
                    raise RuntimeError("cached_patcher_init is not initialized.")
                type(self).loads += 1
                model_override = self.reload().model
            static = ModelPatcher(model_override, self.load_device, self.offload_device)
            static.get_clone_model_override = lambda: static.model
            return copy_onto(static, self)

    def copy_onto(new, old):
        new.reload = getattr(old, "reload", None)
        new.patches = {key: list(value) for key, value in old.patches.items()}
        new.model_options = {"transformer_options": dict(old.model_options["transformer_options"])}
        new.wrappers = {kind: {key: list(w) for key, w in keys.items()} for kind, keys in old.wrappers.items()}
        return new

    def make(patcher, reload=None):
        found = Streamed(patcher.model, patcher.load_device, patcher.offload_device)
        found.reload = reload
        return found

    return make


def test_a_streamed_model_is_loaded_once_more_to_stay_in_place(models, streamed):
    source = streamed(small_unet(models), lambda: small_unet(models))
    first = compiled(source)
    assert type(first).__name__ == "ModelPatcher" and first.model is not source.model
    second = compiled(source.clone(), graph_budget_mb=0)
    assert second.model is first.model and type(source).loads == 1  # another mode, or a LoRA before us: no new load
    assert error(models.sample(first, **SHORT_RUN), models.sample(source, **SHORT_RUN)) < CLOSE
    assert_fast()


def test_skip_blocks_stay_in_place_too(models, streamed):
    """By the copy that serves Compile Model; where there is none, nothing is skipped, and the node says why."""
    source, run = streamed(small_unet(models), lambda: small_unet(models)), SHORT_RUN | {"steps": 12}
    skip = skipping(source)
    assert skip.model is compiled(source).model and type(source).loads == 1
    models.sample(skip, **run)
    assert counted() == {"full": 4, "skipped": 8, "resets": {}}
    alone, message = skip_with_message(streamed(small_unet(models)))
    assert message.startswith("no blocks are skipped: its weights are streamed") and not any(alone.wrappers.values())


def test_the_second_copy_goes_with_the_first(models, streamed):
    import gc

    from anyshape.accel.families import compat

    source = streamed(small_unet(models), lambda: small_unet(models))
    compiled(source)
    assert source.model in compat._STATIC
    before = len(compat._STATIC)
    del source
    gc.collect()
    assert len(compat._STATIC) == before - 1


def test_a_streamed_model_that_cannot_be_loaded_again_runs_in_eager(models, streamed):
    source = streamed(small_unet(models))
    out, message = compile_with_message(source)
    assert "--disable-dynamic-vram" in message and "cached_patcher_init" in message
    assert out.model is source.model and [f["reason"] for f in fallbacks()] == [message]
    assert torch.equal(models.sample(out, **SHORT_RUN), models.sample(source, **SHORT_RUN))


def test_off_loads_nothing(models, streamed):
    source = streamed(small_unet(models))
    out, message = compile_with_message(source, mode="off")
    assert message == "" and out.model is source.model


def test_a_streamed_vae(models, streamed):
    from anyshape.accel.families.vae import compile_vae

    def vae():
        return models.vae(torch.float32, ch=32, num_res_blocks=1)

    source = vae()
    source.patcher = streamed(source.patcher, lambda: vae().patcher)
    fast, message = compile_vae(source)
    assert message == "" and fast.patcher.model is not source.patcher.model
    own = fast.first_stage_model.decoder.conv_in.weight.data_ptr()
    assert own == fast.patcher.model.decoder.conv_in.weight.data_ptr()
    latent = torch.randn(1, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert error(fast.decode(latent), source.decode(latent)) < CLOSE
    source.patcher.reload = None
    source.patcher.model = vae().first_stage_model
    again, message = compile_vae(source)
    assert again is source and "DynamicVRAM" in message


def test_a_streamed_layer_keeps_the_model_in_eager(models, fresh):
    """Should a stream begin after all: its pages must be given back after each use, which only its own layers do."""
    fast = compiled(fresh)
    fresh.model.diffusion_model.out[2]._v = ("a page",)
    assert torch.equal(models.sample(fast, **SHORT_RUN), models.sample(fresh, **SHORT_RUN))
    assert "DynamicVRAM" in shapes()[0]["reason"] and shapes()[0]["state"] == "eager"


def test_what_we_allocate_stays_out_of_a_recorded_memory_plan(models, fresh, monkeypatch):
    from anyshape.accel.families import compat
    from anyshape.accel.families import vae as vae_family

    from tools.stand_in import StandIn

    depth, seen, own = [], [], StandIn.group_norm

    @contextlib.contextmanager
    def pause_malloc_graph():
        depth.append(1)
        yield
        depth.pop()

    monkeypatch.setattr(compat, "prefetch", types.SimpleNamespace(pause_malloc_graph=pause_malloc_graph))
    monkeypatch.setattr(StandIn, "group_norm", lambda *args, **kw: seen.append(len(depth)) or own(*args, **kw))
    models.sample(compiled(fresh), **SHORT_RUN)
    fast, _ = vae_family.compile_vae(models.vae(torch.float32, ch=32, num_res_blocks=1))
    unet_calls = len(seen)
    with torch.inference_mode():
        fast.decode(torch.zeros(1, 4, 8, 8))
    assert unet_calls and len(seen) > unet_calls and set(seen) == {1} and not depth
