"""Flux.1 on ComfyUI's own model and sampler, on the CPU: eager's image, nothing compiled twice, nothing left."""

import copy

import pytest
import torch

from tools.driving import SMALL_FLUX as SMALL
from tools.driving import compile_with_message, compiled, randn
from tools.oracles import assert_fast, error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3
SIZES = [(128, 128), (200, 264), (264, 200), (296, 232), (960, 720), (728, 720), (64, 64), (16, 24)]
TOKENS = 20


@pytest.fixture(scope="module")
def patcher(models):
    """The shared model, Flux dev in small."""
    return models.flux(torch.float32, **SMALL)


@pytest.fixture
def fresh(models):
    """A model of the test's own."""
    return models.flux(torch.float32, **SMALL)


def inputs(patcher, width, height, rows=1, tokens=TOKENS, seed=0):
    """Random arguments of the diffusion model; sizes in image pixels."""
    config = patcher.model.model_config.unet_config
    return {
        "x": randn(rows, config["in_channels"], height // 8, width // 8, seed=seed),
        "timestep": torch.linspace(0.3, 0.9, rows),
        "context": randn(rows, tokens, config["context_in_dim"], seed=seed + 1),
        "y": randn(rows, config["vec_in_dim"], seed=seed + 2),
        "guidance": torch.full((rows,), 3.5),
    }


def forward(patcher, *args, changes=None, options=None, **kwargs):
    """One call of the diffusion model, as inside a sampling run; ``changes`` to its arguments."""
    own = patcher.model_options["transformer_options"]
    options = {**own, "wrappers": patcher.wrappers, "cond_or_uncond": [0], **(options or {})}
    with torch.inference_mode():
        call = inputs(patcher, *args, **kwargs) | copy.deepcopy(changes or {})
        return patcher.model.diffusion_model(**call, transformer_options=options)


def assert_like_eager(patcher, *args, differs_from=None, **kwargs):
    """Compiled equals eager, in regions; the result, which differs from ``differs_from`` if that is given."""
    wanted = forward(patcher, *args, **kwargs)
    assert error(forward(compiled(patcher), *args, **kwargs), wanted) < CLOSE
    assert differs_from is None or wanted.shape != differs_from.shape or error(wanted, differs_from) > 1e-3
    assert_fast()
    return wanted


# Parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_forward_equals_eager(patcher, rows):
    fast = compiled(patcher)
    for seed, (width, height) in enumerate(SIZES[: 8 if rows == 1 else 4]):
        args = (width, height, rows, TOKENS, seed)
        assert error(forward(fast, *args), forward(patcher, *args)) < CLOSE, (width, height)
    assert_fast()
    assert [(s["width"], s["height"]) for s in shapes()] == SIZES[: 8 if rows == 1 else 4]


def test_image_equals_eager(models, patcher):
    """Through comfy.sample, where an error of one step would grow over the next ones."""
    fast = compiled(patcher)
    for width, height, batch, cfg in [(200, 264, 1, 1.0), (264, 200, 2, 1.0), (136, 128, 1, 3.0)]:
        run = {"width": width, "height": height, "batch": batch, "steps": 4, "cfg": cfg, "tokens": TOKENS}
        assert error(models.sample(fast, **run), models.sample(patcher, **run)) < CLOSE
    assert_fast()
    assert [s["batch"] for s in shapes()] == [1, 2, 1]
    from anyshape.accel import stats

    assert {m["kind"] for m in stats.snapshot()["models"] if m["shapes"]} == {"dit"}


@pytest.mark.parametrize("tokens", [1, 2, 77, 256])
def test_prompt_lengths(patcher, tokens):
    assert_like_eager(patcher, 136, 128, 2, tokens)


@pytest.mark.parametrize("name", ["guidance", "y"])
def test_absent_inputs(patcher, name):
    assert_like_eager(patcher, 136, 128, changes={name: None}, differs_from=forward(patcher, 136, 128))


def test_schnell_and_fill(models):
    """A Flux without guidance, and one with more input channels than output channels."""
    assert_like_eager(models.flux(torch.float32, **SMALL, guidance_embed=False), 136, 128)
    assert_like_eager(models.flux(torch.float32, **SMALL, in_channels=96), 136, 128)


@pytest.mark.parametrize("method", [None, "offset", "index", "uxo"])
@pytest.mark.parametrize("rows", [1, 2])
def test_reference_latents(patcher, method, rows):
    """Kontext: one wide, one high, one of odd sides, placed as each method says."""
    refs = [randn(rows, 16, h, w, seed=h) for h, w in ((10, 17), (18, 8), (7, 9))]
    changes = {"ref_latents": refs} | ({"ref_latents_method": method} if method else {})
    plain = forward(patcher, 136, 128, rows)
    wanted = assert_like_eager(patcher, 136, 128, rows, changes=changes, differs_from=plain)
    others = [m for m in ("offset", "index", "uxo") if m != (method or "offset")]
    for other in others:
        assert error(forward(patcher, 136, 128, rows, changes=changes | {"ref_latents_method": other}), wanted) > 1e-4


def test_what_decides_the_program_is_in_the_key(patcher):
    """Calls whose tensors agree and whose places do not are never one graph."""
    fast, ref = compiled(patcher), {"ref_latents": [randn(1, 16, 8, 8)]}
    for method in ("index", "uxo"):
        forward(fast, 128, 128, changes=ref | {"ref_latents_method": method})
    for scale in (1.0, 2.0):
        forward(fast, 128, 128, options={"rope_options": {"scale_x": scale}})
    forward(fast, 128, 128)
    assert len(shapes()) == 5 and len({s["key"] for s in shapes()}) == 5


def test_rope_options(patcher):
    from anyshape.accel.families.compat import PROCESS_IMG_TAKES_OPTIONS

    rope = {"scale_x": 1.5, "scale_y": 0.5, "shift_t": 1.0, "shift_x": 2.0, "shift_y": 3.0}
    plain = (
        forward(patcher, 136, 128) if PROCESS_IMG_TAKES_OPTIONS else None
    )  # ComfyUI before 0.3.75 has no such options
    assert_like_eager(patcher, 136, 128, options={"rope_options": rope}, differs_from=plain)


def test_attention_mask(patcher):
    """A mask over text and image, as ComfyUI builds it for style models."""
    tokens = TOKENS + 8 * 9
    mask = torch.zeros(1, tokens, tokens)
    mask[:, TOKENS:, :TOKENS] = -2.0
    wanted = forward(patcher, 136, 128)
    assert_like_eager(patcher, 136, 128, changes={"attention_mask": mask}, differs_from=wanted)


# ControlNet -------------------------------------------------------------------------------------------------------


def residuals(kind, rows, tokens=72):
    """What a Flux ControlNet gives: a list a kind of block, shorter than the blocks or with gaps."""
    double = [randn(rows, tokens, 64, seed=i) * 0.3 for i in range(2)]
    single = [randn(rows, tokens, 64, seed=9 + i) * 0.3 for i in range(3)]
    return {
        "input": {"input": double, "middle": [], "output": []},
        "both": {"input": double, "middle": [], "output": single},
        "gaps": {"input": [None, double[1]], "output": [single[0], None, single[2]]},
        "short": {"input": double[:1], "output": [single[0][:, :40]]},
        "empty": {"input": [], "middle": [], "output": []},
    }[kind]


@pytest.mark.parametrize("kind", ["input", "both", "gaps", "short", "empty"])
@pytest.mark.parametrize("rows", [1, 2])
def test_control(patcher, kind, rows):
    plain = forward(patcher, 136, 128, rows)
    differs = None if kind == "empty" else plain
    assert_like_eager(patcher, 136, 128, rows, changes={"control": residuals(kind, rows)}, differs_from=differs)


# Patches of other nodes -------------------------------------------------------------------------------------------


def place(options):
    from anyshape.accel.families.compat import PROCESS_IMG_TAKES_OPTIONS

    if not PROCESS_IMG_TAKES_OPTIONS:  # nor does ComfyUI before 0.3.75 tell patches where they are
        return ()
    return tuple(options[name] for name in ("block_type", "block_index", "total_blocks"))


def replace(kind, index, log):
    """A patch that changes what goes in and what comes out of one block."""

    def patch(args, extra):
        log.append((place(args["transformer_options"]), sorted(args), tuple(args["img"].shape), args["attn_mask"]))
        args["vec"] = args["vec"] * 0.9
        out = extra["original_block"](args)
        assert sorted(out) == (["img", "txt"] if kind == "double" else ["img"])
        out["img"] = out["img"] * 1.1
        return out

    return (f"{kind}_block", index), patch


def post_input(args):
    return args | {"img": args["img"] * 1.1, "txt": args["txt"][:, 1:], "txt_ids": args["txt_ids"][:, 1:]}


def replacing(patcher, places, log):
    patched = patcher.clone()
    for kind, index in places:
        (name, number), patch = replace(kind, index, log)
        patched.set_model_patch_replace(patch, "dit", name, number)
    return patched


PLACES = [("double", 0)], [("double", 1)], [("single", 0)], [("single", 2)], [("double", 0), ("single", 1)]


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_replaced_blocks(models, patcher, places):
    """A patch is called at the same places with the same arguments, and the other blocks stay fast."""
    run = {"width": 136, "height": 128, "steps": 2, "tokens": TOKENS}
    wanted_log, log = [], []
    plain, wanted = models.sample(patcher, **run), models.sample(replacing(patcher, places, wanted_log), **run)
    out = models.sample(replacing(compiled(patcher), places, log), **run)
    assert error(out, wanted) < CLOSE and error(wanted, plain) > 1e-3
    assert log == wanted_log and len(log) == 2 * len(places)
    assert_fast()


def test_one_replaced_block_leaves_the_others_fast(monkeypatch, patcher):
    from anyshape.accel.region_ops import RegionOps

    calls, own = [], RegionOps.linear_gelu
    monkeypatch.setattr(RegionOps, "linear_gelu", lambda *args: calls.append(1) or own(*args))
    forward(replacing(compiled(patcher), [("double", 1)], []), 128, 128)
    assert len(calls) == 2 + 3  # a double block has two streams


def test_post_input_patch(models, patcher):
    run = {"width": 136, "height": 128, "steps": 2, "tokens": TOKENS}
    outs = []
    for each in (patcher, compiled(patcher)):
        patched = each.clone()
        patched.set_model_patch(post_input, "post_input")
        outs.append(models.sample(patched, **run))
    assert error(outs[1], outs[0]) < CLOSE and error(outs[0], models.sample(patcher, **run)) > 1e-3
    assert_fast()


def test_no_places_no_rotation(models, patcher):
    """A patch may take the places away; then the blocks run their own forward."""
    outs = []
    for each in (patcher, compiled(patcher)):
        patched = each.clone()
        patched.set_model_patch(lambda args: args | {"img_ids": None}, "post_input")
        outs.append(forward(patched, 136, 128))
    assert error(outs[1], outs[0]) < CLOSE


def test_patches_that_flux_does_not_call_run_in_eager(models, patcher):
    patched = compiled(patcher)
    patched.set_model_attn1_patch(lambda *args, **options: {})  # newer ComfyUI calls it, older does not
    assert torch.equal(forward(patched, 128, 128), forward(patcher, 128, 128))
    assert "attn1_patch" in shapes()[0]["reason"] and shapes()[0]["state"] == "eager"


def test_attention_override(models, patcher):
    """It sees every attention, with all heads and tokens, as in eager."""
    logs = []
    for each in (patcher, compiled(patcher)):
        patched, log = each.clone(), []

        def override(func, q, k, v, heads, log=log, **kwargs):
            log.append((tuple(q.shape), heads, place(kwargs["transformer_options"]), kwargs["skip_reshape"]))
            return func(q, k, v * 1.2, heads, **kwargs)

        patched.model_options["transformer_options"]["optimized_attention_override"] = override
        logs.append((forward(patched, 136, 128), log))
    assert logs[0][1] == logs[1][1] and len(logs[0][1]) == 5
    assert error(logs[1][0], logs[0][0]) < CLOSE


def test_attention_is_looked_up_at_call_time(monkeypatch, patcher):
    """Packs exchange the function that Flux's module holds."""
    import comfy.ldm.flux.math as flux_math

    fast, calls, own = compiled(patcher), [], flux_math.optimized_attention
    forward(fast, 128, 128)
    monkeypatch.setattr(flux_math, "optimized_attention", lambda *a, **k: calls.append(1) or own(*a, **k))
    forward(fast, 128, 128)
    assert len(calls) == 5


# Hooked and replaced parts ----------------------------------------------------------------------------------------

HOOKED = [
    "double_blocks.0", "double_blocks.1.img_attn.qkv", "double_blocks.0.txt_attn.norm.query_norm",
    "double_blocks.0.img_mlp.1", "double_blocks.1.txt_mod", "single_blocks.1", "single_blocks.0.linear1",
    "single_blocks.2.modulation.lin", "single_blocks.0.pre_norm", "img_in", "txt_in", "time_in", "vector_in.in_layer",
    "guidance_in", "pe_embedder", "final_layer", "final_layer.linear", "final_layer.adaLN_modulation.1",
]  # fmt: skip


def changed(out):
    if isinstance(out, tuple):
        return (changed(out[0]), *out[1:])
    return out * 1.5 if isinstance(out, torch.Tensor) else type(out)(out.shift * 1.5, out.scale, out.gate)


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_takes_effect(patcher, name):
    """Wherever another pack hooks the model, the hook is called as in eager, and its place is in the stats."""
    fast, plain, calls = compiled(patcher), forward(patcher, 128, 128), []
    module = patcher.model.diffusion_model.get_submodule(name)
    handle = module.register_forward_hook(lambda m, args, out: calls.append(1) or changed(out))
    try:
        wanted, wanted_calls = forward(patcher, 128, 128), len(calls)
        out = forward(fast, 128, 128)
    finally:
        handle.remove()
    assert error(wanted, plain) > 1e-4 and error(out, wanted) < CLOSE / 10
    assert len(calls) == 2 * wanted_calls > 0
    assert "hooked" in shapes()[-1]["reason"] and any("hooked" in f["reason"] for f in fallbacks())
    assert error(forward(fast, 128, 128), plain) < CLOSE
    assert shapes()[-1]["reason"] == ""


@pytest.mark.parametrize("name", ["_forward", "forward_orig", "process_img"])
def test_a_replaced_forward_runs_in_eager(models, patcher, name):
    """Packs replace these on one model; PuLID and TeaCache do so with forward_orig."""
    own = getattr(patcher.model.diffusion_model, name)

    def replaced(*args, **kwargs):
        out = own(*args, **kwargs)
        return (out[0] * 1.5, out[1]) if isinstance(out, tuple) else out * 1.5

    def patched(model):
        model = model.clone()
        model.add_object_patch(f"diffusion_model.{name}", replaced)
        return model

    run = {"width": 128, "height": 128, "steps": 1, "tokens": TOKENS}
    wanted = models.sample(patched(patcher), **run)
    assert torch.equal(models.sample(patched(compiled(patcher)), **run), wanted)
    assert any("replaced" in f["reason"] for f in fallbacks())
    models.sample(compiled(patcher), **run)
    assert shapes()[-1]["state"] == "regions" and shapes()[-1]["reason"] == ""


def test_a_class_replaced_for_every_model_runs_in_eager(monkeypatch, patcher):
    from comfy.ldm.flux.layers import SingleStreamBlock

    own = SingleStreamBlock.forward
    monkeypatch.setattr(SingleStreamBlock, "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs) * 1.1)
    assert torch.equal(forward(compiled(patcher), 128, 128), forward(patcher, 128, 128))
    assert "for every model" in shapes()[0]["reason"]


def test_training_runs_in_eager(patcher):
    outs = []
    for each in (patcher, compiled(patcher)):
        call = inputs(each, 128, 128)
        call["x"].requires_grad_(True)
        outs.append(each.model.diffusion_model(**call, transformer_options={"wrappers": each.wrappers}))
    assert torch.equal(*outs) and outs[1].requires_grad and "gradients are on" in shapes()[0]["reason"]


def test_unknown_arguments_run_in_eager(patcher):
    outs = [forward(each, 128, 128, changes={"something_new": 2}) for each in (patcher, compiled(patcher))]
    assert torch.equal(*outs) and "something_new" in shapes()[0]["reason"]


# No recompiles ----------------------------------------------------------------------------------------------------

RUN = {"width": 128, "height": 128, "steps": 1, "tokens": TOKENS}
CHANGES = [
    {"width": 200, "height": 264}, {"width": 264, "height": 200}, {"width": 320}, {"width": 64}, {"width": 136},
    {"width": 64, "height": 64}, {"width": 32, "height": 16}, {"batch": 2, "width": 144}, {"batch": 3, "width": 72},
    {"batch": 4, "width": 72}, {"batch": 5, "width": 80}, {"seed": 1}, {"steps": 2}, {"steps": 2, "sampler": "heun"},
    {"scheduler": "normal"}, {"cfg": 3.5}, {"cfg": 3.5, "batch": 2}, {"tokens": 1}, {"tokens": 77}, {"tokens": 512},
    {"tokens": 33, "batch": 3}, {"tokens": 2, "width": 960, "height": 720},
]  # fmt: skip


@pytest.fixture(scope="module")
def warm(models, patcher):
    """The model after its first prompt at batch 1 and its first above: from here on nothing may compile."""
    fast = compiled(patcher)
    models.sample(fast, **RUN)
    models.sample(fast, **RUN | {"batch": 2})
    return fast


def test_no_change_compiles(models, warm, nothing_compiles):
    assert len(CHANGES) >= 20
    for change in CHANGES:
        models.sample(warm, **RUN | change)
    assert_fast()


def test_no_kind_of_call_compiles(patcher, warm, nothing_compiles):
    """References, masks, residuals, absent inputs: the same graphs."""
    ref = {"ref_latents": [randn(1, 16, 7, 9)]}
    for changes in (ref, ref | {"ref_latents_method": "uxo"}, {"guidance": None}, {"y": None}):
        forward(warm, 136, 128, changes=changes)
    forward(warm, 136, 128, changes={"control": residuals("both", 1)})
    assert_fast()


def test_batch_2_after_batch_1_compiles_nothing(models, nothing_compiles):
    """Not even the first batch above 1."""
    fast = compiled(models.flux(torch.float32, **SMALL | {"hidden_size": 96, "num_heads": 3}))
    for batch in (1, 2, 3):
        models.sample(fast, **RUN | {"batch": batch})


# LoRA, weights ----------------------------------------------------------------------------------------------------


def with_lora(patcher, strength=1.0):
    """ComfyUI's own LoRA loading: rank 4 on layers of both kinds of block."""
    import comfy.sd

    weights, lora = patcher.model.state_dict(), {}
    names = ("double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.2", "single_blocks.1.linear1",
             "single_blocks.2.linear2", "single_blocks.0.modulation.lin")  # fmt: skip
    for name in names:
        out, into = weights[f"diffusion_model.{name}.weight"].shape
        lora[f"diffusion_model.{name}.lora_up.weight"] = randn(out, 4, seed=7)
        lora[f"diffusion_model.{name}.lora_down.weight"] = randn(4, into, seed=8)
    loaded, _ = comfy.sd.load_lora_for_models(patcher, None, lora, strength, 0)
    assert len(loaded.patches) == len(names)
    return loaded


def test_lora_equals_eager(models, patcher, warm, nothing_compiles):
    """On, off and on again, the node before the LoRA and after it."""
    plain = models.sample(patcher, **RUN)
    wanted = models.sample(with_lora(patcher, 0.1), **RUN)
    assert error(wanted, plain) > 1e-2
    assert error(models.sample(with_lora(warm, 0.1), **RUN), wanted) < CLOSE
    assert error(models.sample(warm, **RUN), plain) < CLOSE
    assert error(models.sample(compiled(with_lora(patcher, 0.1)), **RUN), wanted) < CLOSE
    assert_fast()


def test_low_vram_lora_equals_eager(fresh):
    """A partly loaded model: ComfyUI keeps the LoRA beside the weights and applies it at each call."""
    lora = with_lora(fresh, 0.1)
    fast, outs = compiled(lora), []
    plain = forward(fresh, 128, 128)
    for each in (lora, fast):
        each.patch_model(torch.device("cpu"), lowvram_model_memory=1, force_patch_weights=False)
        assert any(getattr(m, "weight_function", None) for m in each.model.modules())
        outs.append(forward(each, 128, 128))
        each.unpatch_model(torch.device("cpu"))
    assert error(outs[0], plain) > 1e-3 and error(outs[1], outs[0]) < CLOSE
    assert error(forward(fast, 128, 128), plain) < CLOSE


def test_manual_cast_equals_eager(models):
    """Weights in bf16, computed in fp32."""
    import comfy.supported_models
    from comfy.model_patcher import ModelPatcher

    settings = comfy.supported_models.Flux(models.FLUX | SMALL)
    settings.set_inference_dtype(torch.bfloat16, torch.float32)
    model = settings.get_model({}, "", device="cpu")
    models.randomise(model)
    patcher = ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))
    run = RUN | {"steps": 2}
    assert error(models.sample(compiled(patcher), **run), models.sample(patcher, **run)) < CLOSE
    assert_fast()


def test_the_shared_model_is_left_as_it_was(models, patcher):
    plain = models.sample(patcher, **RUN)
    weights = {n: (p.data_ptr(), p.stride(), p.clone()) for n, p in patcher.model.named_parameters()}
    attributes = {name: sorted(m.__dict__) for name, m in patcher.model.named_modules()}
    models.sample(compiled(patcher), **RUN)
    assert attributes == {name: sorted(m.__dict__) for name, m in patcher.model.named_modules()}
    for name, p in patcher.model.named_parameters():
        assert (p.data_ptr(), p.stride()) == weights[name][:2] and torch.equal(p, weights[name][2])
    assert not any(patcher.wrappers.values()) and torch.equal(models.sample(patcher, **RUN), plain)


def test_mode_off_is_eager(models, patcher):
    from anyshape.accel import stats

    with stats.expect(calls=0):
        each = compiled(patcher, mode="off")
        assert not any(each.wrappers.values()) and not any(each.callbacks.values())
        assert torch.equal(models.sample(each, **RUN), models.sample(patcher, **RUN))


def test_a_failing_tier_gives_the_eager_image(models, fresh, monkeypatch):
    from anyshape.accel.region_ops import RegionOps

    monkeypatch.setattr(RegionOps, "modulated_norm", lambda self, *args: 1 / 0)
    plain, fast = models.sample(fresh, **RUN | {"steps": 3}), compiled(fresh)
    assert torch.equal(models.sample(fast, **RUN | {"steps": 3}), plain)
    assert "ZeroDivisionError" in fallbacks()[0]["reason"] and shapes()[0]["state"] == "eager"


@pytest.mark.parametrize("change", [{"global_modulation": True}, {"mlp_silu_act": True}, {"axes_dim": [8, 8, 8, 8]}])
def test_flux_2_runs_as_without_us(models, change):
    """The forms of Flux 2, one by one."""
    from comfy.ldm.flux.model import FluxParams

    if not set(change) <= set(FluxParams.__dataclass_fields__):
        pytest.skip("this ComfyUI has no Flux 2")
    patcher = models.flux(torch.float32, **SMALL | change)
    out, message = compile_with_message(patcher)
    assert "form" in message and "Flux.1" in message and "eager" in message
    assert not any(out.wrappers.values())
    assert [f["reason"] for f in fallbacks()] == [message]


# Kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["kernels", "eager"])
@pytest.mark.parametrize("rows", [1, 2])
def test_other_tiers_equal_eager(models, tier, rows):
    """The whole model on Triton's interpreter, and on the operations' plain meaning."""
    assert_tier_equals_eager(operations(tier), models.flux(torch.float32, **SMALL), rows, torch.float32, CLOSE)


def test_kernels_in_half_precision(models):
    """All modulations in one launch, which full precision has not. Triton's interpreter has no bf16."""
    assert_tier_equals_eager(operations("kernels"), models.flux(torch.float16, **SMALL), 2, torch.float16, 5e-3)


def operations(tier):
    from anyshape.accel.ops import FusedOps

    if tier == "eager":
        return FusedOps()
    if torch.cuda.is_available():
        pytest.skip("the GPU's tests run the kernels compiled")
    from anyshape.accel.kernels.triton_ops import TritonOps

    return TritonOps(torch.device("cpu"))


def assert_tier_equals_eager(ops, patcher, rows, dtype, tolerance):
    """The family's forward on these operations, with references and residuals."""
    from anyshape.accel.families import flux

    model = patcher.model.diffusion_model
    call = inputs(patcher, 136, 72, rows, 5)
    call = {name: value if name in ("timestep", "guidance") else value.to(dtype) for name, value in call.items()}
    control = {"input": [randn(rows, 45, 64).to(dtype)], "output": [None, randn(rows, 45, 64, seed=1).to(dtype)]}
    call |= {"ref_latents": [randn(rows, 16, 3, 4, seed=5).to(dtype)]}
    with torch.inference_mode():
        wanted = model._forward(**call, control=copy.deepcopy(control), transformer_options={})
        given = flux.arguments(**call, control=control, transformer_options={})
        out = flux.forward(ops, model, flux.Plan(model), given, given.flat())
    print(ops.name, dtype, error(out, wanted))
    assert error(out, wanted) < tolerance
