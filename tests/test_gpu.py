"""The engine on a real GPU: parity at every size, replays, nothing compiled later, and weights that move.

Its memory is in ``test_gpu_memory``.
"""

import os

import pytest
import torch

from tools.driving import compiled
from tools.on_gpu import forward, small
from tools.oracles import FUSED, error, expect, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left", "exact_float32")]

TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2.5e-2, torch.float32: 1e-4}
DEMO = [(256, 256), (200, 264), (320, 192), (192, 320), (264, 200), (384, 192), (296, 232), (384, 384), (192, 384),
        (328, 248)]  # fmt: skip
ODD = [(960, 720), (728, 720), (544, 408), (512, 512)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "rows"), [("sd15", 2), ("sdxl", 2), ("flux", 1), ("flux", 2)])
def test_parity_and_replay(models, name, rows, dtype):
    """First call (kernels), second and third (graph) on other input, all equal to eager."""
    patcher = small(models, name, dtype)
    fast = compiled(patcher)
    seed = int.from_bytes(os.urandom(3), "little")
    for width, height in ODD:
        for call in range(3):
            args = (width, height, rows, 77, seed + call)
            assert error(forward(fast, *args), forward(patcher, *args)) < TOLERANCE[dtype], args
    assert {s["state"] for s in shapes()} == {"graph"}
    assert all(s["replays"] == 2 for s in shapes())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_full_size_sdxl(models, dtype):
    patcher = models.unet("sdxl", dtype)
    fast = compiled(patcher)
    for width, height in ODD + [(1024, 1024)] + DEMO:
        for call in range(2):
            out, expected = forward(fast, width, height, seed=call), forward(patcher, width, height, seed=call)
            print(dtype, width, height, error(out, expected))
            assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_demo_model(demo_pack, name):
    """The trained model at every size of the demo, on fresh noise."""
    from anyshape_demo import model

    patcher, _, text = model.load(name)
    prompt = model.encode(text, "rocket")[0][0].cuda().to(model.DTYPES[name])
    fast = compiled(patcher)
    seed = int.from_bytes(os.urandom(3), "little")
    for index, (width, height) in enumerate(DEMO):
        args = (width, height, 2, 77, seed + index)
        out, expected = (forward(p, *args, context=prompt.expand(2, -1, -1)) for p in (fast, patcher))
        assert error(out, expected) < TOLERANCE[model.DTYPES[name]], args


def test_kernels_that_only_some_sizes_choose_are_compiled_by_the_first(models, monkeypatch):
    from anyshape.accel import kernels
    from anyshape.accel.kernels import launch, linear_geglu, triton_ops

    kernels.load.cache_clear()
    for kernel in triton_ops.KERNELS:  # what other tests have compiled
        kernel.device_caches.clear()
    launch._VARIANTS.clear()
    patcher = small(models, "sd15")
    fast, turn = compiled(patcher), []
    monkeypatch.setattr(linear_geglu, "is_faster", lambda *sizes: bool(turn))
    forward(fast, 512, 512, tokens=308)
    turn.append("the product")
    with expect(recompiles=0, fallbacks=0):
        for width, height in ODD:
            assert error(forward(fast, width, height), forward(patcher, width, height)) < TOLERANCE[torch.float16]


def test_nothing_compiles_after_the_first_call(models):

    fast = compiled(small(models, "sdxl"))
    forward(fast, 512, 512)
    with expect(recompiles=0, fallbacks=0):
        for index, (width, height) in enumerate(ODD + [(520, 776), (256, 1000), (64, 64), (1024, 1024)]):
            forward(fast, width, height, rows=1 + index % 4, tokens=77 * (1 + index % 3), seed=index)


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_mixed_sampling_run(models, mode):
    """Through comfy.sample: other sizes, batches, prompts' lengths, CFG off; the picture of eager, nothing compiled."""

    patcher = small(models, "sd15")
    fast = compiled(patcher, mode=mode)
    models.sample(fast, 512, 512, steps=2)
    runs = [(512, 768, 1, 7.0, 77), (544, 408, 2, 7.0, 154), (728, 720, 1, 1.0, 77), (512, 512, 4, 3.0, 231)]
    with expect(recompiles=0, fallbacks=0):
        outs = [models.sample(fast, w, h, b, steps=4, cfg=cfg, tokens=tokens) for w, h, b, cfg, tokens in runs]
    for out, (w, h, b, cfg, tokens) in zip(outs, runs, strict=True):
        assert error(out, models.sample(patcher, w, h, b, steps=4, cfg=cfg, tokens=tokens)) < 1e-2


def test_weights_are_left_as_they_were(models):
    patcher = small(models, "sd15")
    state = {name: (p.data_ptr(), p.stride(), p.clone()) for name, p in patcher.model.named_parameters()}
    models.sample(compiled(patcher), 512, 512, steps=2)
    for name, p in patcher.model.named_parameters():
        pointer, stride, value = state[name]
        assert (p.data_ptr(), p.stride()) == (pointer, stride)
        assert torch.equal(p, value)


LORA = {  # the layers, the strength, and how far the result may be from eager's: with it, it is further from without
    "sd15": (("middle_block.1.transformer_blocks.0.attn2.to_k", "input_blocks.1.0.in_layers.2"), 0.3, 1e-2),
    "flux": (("double_blocks.0.img_mod.lin", "double_blocks.1.txt_attn.qkv", "single_blocks.0.linear1"), 0.02, 2.5e-2),
}


@pytest.mark.parametrize(("name", "dtype"), [("sd15", torch.float16), ("flux", torch.bfloat16)])
def test_lora_on_and_off(models, name, dtype):
    """Through comfy.sample; a graph captured with other weights is never replayed."""
    layers, strength, close = LORA[name]
    patcher = small(models, name, dtype)
    fast = compiled(patcher)
    models.sample(fast, 512, 512, steps=2)
    weights = patcher.model.state_dict()
    changed = fast.clone()
    keys = [f"diffusion_model.{layer}.weight" for layer in layers]
    changed.add_patches({key: (torch.randn_like(weights[key]),) for key in keys}, strength)
    eager = patcher.clone()
    eager.patches, eager.patches_uuid = changed.patches, changed.patches_uuid
    with expect(recompiles=0, fallbacks=0):
        plain, with_lora, again = (models.sample(p, 544, 408, steps=3) for p in (fast, changed, fast))
    assert error(with_lora, models.sample(eager, 544, 408, steps=3)) < close
    assert error(plain, models.sample(patcher, 544, 408, steps=3)) < close
    assert error(again, plain) < 1e-3 < close < error(with_lora, plain)


def test_a_lora_of_a_hook(models):
    """Another pack's, with its weights in a closure: the graph reads them where they lie."""
    patcher = small(models, "sd15")
    layers = [part for part in patcher.model.diffusion_model.modules() if isinstance(part, torch.nn.Linear)][-6:]
    for layer in layers:
        down, up = (0.05 * torch.randn(4, layer.out_features, device="cuda", dtype=torch.float16) for _ in range(2))
        layer.register_forward_hook(lambda layer, args, out, down=down, up=up: out + out @ down.T @ up)
    plain, fast, pictures = small(models, "sd15"), compiled(patcher), []
    plain.model.load_state_dict(patcher.model.state_dict())
    for amount in (1.0, 3.0):
        for layer in layers:
            next(iter(layer._forward_hooks.values())).__defaults__[1].mul_(amount)
        pictures += [models.sample(fast, 512, 512, steps=3)]
        assert error(pictures[-1], models.sample(patcher, 512, 512, steps=3)) < 1e-2
    assert error(*pictures) > 2e-2 < error(pictures[0], models.sample(plain, 512, 512, steps=3))
    assert [shape["state"] for shape in shapes()] == ["graph"] and shapes()[0]["replays"] == 5


@pytest.mark.parametrize("busy", [True, False])
def test_patches_without_a_graph(models, monkeypatch, busy):
    """A small model leaves the card waiting for the host, so ComfyUI's own forward runs. busy: as if it did not."""
    from anyshape.accel import first_call
    from anyshape.accel.reasons import say
    from anyshape.accel.take_graphs import NO_GRAPHS

    if busy:
        monkeypatch.setattr(first_call, "waits_for_host", lambda tape: False)
    patcher = small(models, "sd15")
    calls = []

    def scale(h, options):
        calls.append(options["block"])
        return h * 1.5

    def patched(patcher):
        patcher = patcher.clone()
        patcher.set_model_input_block_patch(scale)
        return patcher

    wanted = models.sample(patched(patcher), 512, 512, steps=3)
    without = (FUSED, NO_GRAPHS) if busy else ("eager", say("patches_slower", why=NO_GRAPHS))
    for budget, expected in ((0, without), (512, ("graph", "")), (0, without)):
        calls.clear()
        out = models.sample(patched(compiled(patcher, graph_budget_mb=budget)), 512, 512, steps=3)
        assert len(calls) == 3 * 12 and error(out, wanted) < 1e-2
        assert (shapes()[-1]["state"], shapes()[-1]["reason"]) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_vae(models, dtype):
    import comfy.model_management as mm
    from anyshape.accel.comfy.vae import compile_vae

    vae = models.vae(dtype, ch=64)
    fast, message = compile_vae(vae)
    assert message == ""
    mm.load_models_gpu([vae.patcher])
    strides = [p.stride() for p in vae.first_stage_model.parameters()]
    with torch.inference_mode():
        for width, height, batch in [(512, 512, 1), (544, 408, 2), (728, 720, 1), (256, 256, 4)]:
            z = torch.randn(batch, 4, height // 8, width // 8)
            image, expected = fast.decode(z), vae.decode(z)
            assert error(image, expected) < TOLERANCE[dtype]
            assert error(fast.encode(expected), vae.encode(expected)) < TOLERANCE[dtype]
    assert strides == [p.stride() for p in vae.first_stage_model.parameters()]
    assert {s["state"] for s in shapes()} == {FUSED}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flux_of_full_width(models, dtype):
    """Every layer in its full size, a few blocks of each kind."""
    patcher = models.flux(dtype, depth=2, depth_single_blocks=4)
    fast = compiled(patcher)
    for width, height in ODD + [(1024, 1024)]:
        for call in range(2):
            args = (width, height, 1, 512, call)
            out, expected = forward(fast, *args), forward(patcher, *args)
            print(dtype, width, height, error(out, expected))
            assert error(out, expected) < TOLERANCE[dtype]


def test_flux_compiles_nothing_after_the_first_call(models):
    """1 to 4 images, other sizes and token counts."""

    fast = compiled(small(models, "flux", torch.bfloat16))
    forward(fast, 512, 512, 1, 512)
    with expect(recompiles=0, fallbacks=0):
        for index, (width, height) in enumerate(ODD + [(520, 776), (256, 1000), (64, 64), (16, 24), (1024, 1024)]):
            forward(fast, width, height, rows=1 + index % 4, tokens=(512, 77, 1, 333)[index % 3], seed=index)


def test_flux_references_have_graphs_of_their_own(models):
    """The same tensors placed by another method are another program."""
    patcher = small(models, "flux", torch.bfloat16)
    fast = compiled(patcher)
    refs = [torch.randn(1, 16, h, w, device="cuda").bfloat16() for h, w in ((33, 18), (20, 41))]
    for method in ("offset", "index", "uxo", "offset", "uxo"):
        more = {"ref_latents": refs, "ref_latents_method": method}
        assert error(forward(fast, 544, 408, 1, **more), forward(patcher, 544, 408, 1, **more)) < 2.5e-2
    assert [s["replays"] for s in shapes()] == [1, 0, 1]
