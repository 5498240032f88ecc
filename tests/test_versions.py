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
    SMALL_RUN,
    SMALL_UNET,
    compiled,
    unet_forward,
)
from tools.oracles import assert_fast, error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

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
    fresh.model.diffusion_model.train()
    assert_like_eager(models, fresh, SMALL_RUN)


def test_a_dropout_that_drops_is_not_recorded(models, fresh):
    model = fresh.model.diffusion_model.train()
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    dropouts[-1].p = 0.1
    fast, outs = compiled(fresh), []
    for each in (fresh, fast):
        torch.manual_seed(3)
        outs.append([unet_forward(each, 128, 128) for _ in range(3)])
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True)) and not torch.equal(*outs[0][:2])
    assert shapes()[-1]["state"] == "eager" and "random" in shapes()[-1]["reason"]
    model.eval()
    assert error(unet_forward(fast, 128, 128), unet_forward(fresh, 128, 128)) < CLOSE
    assert shapes()[-1]["state"] == "tape"


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
        asked = options.get("patches", {}).get("forward_timestep_embed_patch", ())
        for m in stage:
            handlers = [handler for one, handler in asked if isinstance(m, one)]
            if handlers:
                x = handlers[0](m, x, emb, context, options, output_shape)
            else:
                x = own([m], x, emb, context, options, output_shape)
        return x

    if newer:
        monkeypatch.setattr(openaimodel, "forward_timestep_embed", embed)

    def patched(model):
        clone = model.clone()
        clone.set_model_patch((layer, run), "forward_timestep_embed_patch")
        return [unet_forward(clone, 72, 64) for _ in range(3)], log.copy(), log.clear()

    wanted, places, _ = patched(patcher)
    outs, ours, _ = patched(compiled(patcher))
    assert ours == places and all(error(out, like) < CLOSE for out, like in zip(outs, wanted, strict=True))
    assert_fast()


def test_a_patch_behind_the_middle_block(patcher):
    """Newer ComfyUI calls it, an older one does not: as eager does here."""
    outs, logs = [], []
    for each in (patcher, compiled(patcher)):
        seen, patched = [], each.clone()

        def patch(args, seen=seen):
            seen.append({name: tuple(value.shape) for name, value in args.items() if torch.is_tensor(value)})
            seen.append(args["transformer_options"]["block"])
            return {"h": args["h"] * 1.5}

        patched.set_model_patch(patch, "middle_block_after_patch")
        outs.append([unet_forward(patched, 72, 64) for _ in range(3)])
        logs.append(seen)
    assert all(error(out, wanted) < CLOSE for wanted, out in zip(*outs, strict=True)) and logs[0] == logs[1]
    assert_fast()


def test_a_patch_that_has_joined_the_skip_connection(patcher):
    """Newer ComfyUI then joins nothing; one that cannot fails as it does without us."""

    def join(h, skip, options):
        return torch.cat([h, skip], dim=1), None

    plain, patched = unet_forward(compiled(patcher), 72, 64), compiled(patcher)
    patched.set_model_output_block_patch(join)
    eager = patcher.clone()
    eager.set_model_output_block_patch(join)
    try:
        unet_forward(eager, 72, 64)
    except TypeError as problem:
        with pytest.raises(TypeError, match=str(problem)[:30]):
            unet_forward(patched, 72, 64)
        return
    assert error(unet_forward(patched, 72, 64), plain) < CLOSE
    assert_fast()


def test_patches_of_a_kind_that_nobody_calls(models, patcher):
    """ComfyUI passes over them, and so does the tape."""
    patched, calls = compiled(patcher), []
    patched.set_model_patch(lambda *args: calls.append(args), "patch_of_tomorrow")
    assert error(models.sample(patched, **SMALL_RUN), models.sample(patcher, **SMALL_RUN)) < CLOSE
    assert not calls and not fallbacks()
    assert_fast()


# Memory plans ------------------------------------------------------------------------------------------------------


def test_what_we_allocate_stays_out_of_a_recorded_memory_plan(models, fresh, monkeypatch):
    from anyshape.accel.comfy import compat
    from anyshape.accel.comfy import vae as vae_family
    from anyshape.accel.tape.program import Program

    depth, seen, run = [], [], Program.run

    @contextlib.contextmanager
    def pause_malloc_graph():
        depth.append(1)
        yield
        depth.pop()

    monkeypatch.setattr(compat, "prefetch", types.SimpleNamespace(pause_malloc_graph=pause_malloc_graph))
    monkeypatch.setattr(Program, "run", lambda *args, **kw: seen.append(len(depth)) or run(*args, **kw))
    models.sample(compiled(fresh), **SMALL_RUN)
    fast, _ = vae_family.compile_vae(models.vae(torch.float32, ch=32, num_res_blocks=1))
    unet_calls = len(seen)
    with torch.inference_mode():
        fast.decode(torch.zeros(1, 4, 8, 8))
    assert unet_calls and len(seen) > unet_calls and set(seen) == {1} and not depth


def test_comfyui_begins_no_memory_plan_in_a_run_of_ours(models, fresh, monkeypatch):
    """A model may begin one around all wrappers. The option is the user's again after the run, whatever ends it."""
    from comfy.cli_args import args

    monkeypatch.setattr(args, "disable_comfy_compiler", False, raising=False)
    plain, fast, seen = fresh, compiled(fresh), []

    def look(*_):
        seen.append(args.disable_comfy_compiler)

    def fail(*_):
        raise ValueError("by the sampler")

    models.sample(fast, **SMALL_RUN, callback=look)
    assert seen and all(seen) and args.disable_comfy_compiler is False
    with pytest.raises(ValueError, match="by the sampler"):
        models.sample(fast, **SMALL_RUN, callback=fail)
    assert args.disable_comfy_compiler is False
    seen.clear()
    models.sample(plain, **SMALL_RUN, callback=look)
    assert seen and not any(seen)
    args.disable_comfy_compiler = True  # the user's own choice
    models.sample(fast, **SMALL_RUN, callback=look)
    assert args.disable_comfy_compiler is True


def test_a_graph_that_comfyui_notes_at_a_block_is_no_change_of_the_model(models, fresh, recordings):
    fast, parts = compiled(fresh), list(fresh.model.diffusion_model.modules())
    first = models.sample(fast, **SMALL_RUN)
    parts[5]._comfy_graph = {"graph": object(), "signature": (1, 2)}
    out = models.sample(fast, **SMALL_RUN, callback=lambda *_: setattr(parts[9], "_comfy_graph", {"graph": object()}))
    assert torch.equal(out, first) and torch.equal(models.sample(fast, **SMALL_RUN), first)
    assert len(recordings) == 1 and not fallbacks()
    for part in (parts[5], parts[9]):
        del part._comfy_graph
    assert torch.equal(models.sample(fast, **SMALL_RUN), first) and len(recordings) == 1


# Attention ---------------------------------------------------------------------------------------------------------


class Preference(nn.Module):
    """As newer ComfyUI has it: a layer's file names the attention of that layer."""

    def function(self, q, k, v, heads, **kwargs):
        import comfy.ldm.modules.attention as attention

        return attention.attention_pytorch(q, k, v, heads) * 1.2


@pytest.mark.parametrize("other", [False, True], ids=["torch's attention", "another one"])
def test_an_attention_that_the_model_prefers(models, fresh, monkeypatch, other):
    """It counts if there is no override among the options: so we set none."""
    import comfy.ldm.modules.attention as attention

    own, layers = attention.attention_pytorch, fresh.model.diffusion_model.modules()
    cross = [part for part in layers if isinstance(part, attention.CrossAttention)]
    preference = Preference()

    def chosen(q, k, v, heads, mask=None, transformer_options=None, **kwargs):
        override = (transformer_options or {}).get("optimized_attention_override")
        if override is not None:
            return override(own, q, k, v, heads, transformer_options=transformer_options, **kwargs)
        return preference.function(q, k, v, heads)

    plain = models.sample(fresh, **SMALL_RUN)
    monkeypatch.setattr(attention, "optimized_attention", chosen)
    if not other:
        from anyshape.accel.comfy import recorded_attention

        monkeypatch.setattr(recorded_attention, "OPEN_ATTENTION", {chosen})
    for part in cross:
        part.comfy_attention = preference
    wanted = models.sample(fresh, **SMALL_RUN)
    fast = compiled(fresh)
    assert error(models.sample(fast, **SMALL_RUN), wanted) < CLOSE < error(wanted, plain)
    assert error(models.sample(fast, **SMALL_RUN), wanted) < CLOSE
    assert_fast()


def test_an_attention_that_the_model_prefers_may_work_past_torch(models, fresh, monkeypatch):
    """It is one call on the tape: what it does inside, no recorder hears. Its layers have it back afterwards."""
    import comfy.ldm.modules.attention as attention

    own, inside = attention.attention_pytorch, attention.einsum
    cross = [part for part in fresh.model.diffusion_model.modules() if isinstance(part, attention.CrossAttention)]

    def past_torch(equation, *tensors):
        return torch.from_numpy(inside(equation, *tensors).numpy() * 1.1)

    def chosen(q, k, v, heads, mask=None, transformer_options=None, **kwargs):
        override = (transformer_options or {}).get("optimized_attention_override")
        if override is not None:
            return override(own, q, k, v, heads, transformer_options=transformer_options, **kwargs)
        return preference.function(q, k, v, heads, transformer_options=transformer_options)

    plain = models.sample(fresh, **SMALL_RUN)
    preference = nn.Module()
    preference.function = attention.attention_basic
    monkeypatch.setattr(attention, "optimized_attention", chosen)
    monkeypatch.setattr(attention, "einsum", past_torch)
    for part in cross:
        part.comfy_attention = preference
    wanted = models.sample(fresh, **SMALL_RUN)
    fast = compiled(fresh)
    for _ in range(2):
        assert error(models.sample(fast, **SMALL_RUN), wanted) < CLOSE < error(wanted, plain)
    assert_fast()
    assert not fallbacks() and preference.function is attention.attention_basic
