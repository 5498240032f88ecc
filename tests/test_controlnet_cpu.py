"""ControlNets and T2I-Adapters on ComfyUI's own nodes and sampler, on the CPU: eager's image, nothing compiled twice.

With Compile Model alone, with Compile ControlNet alone, with both, and with Skip Blocks.
"""

import pytest
import torch

from tools.driving import (
    SMALL_RUN,
    SMALL_UNET,
    UNETS,
    compiled,
    compiled_control,
    randn,
    sampled_once,
    skipping,
    steering,
)
from tools.oracles import FUSED, assert_fast, counted, error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; what is measured is 4e-6
FAMILIES = ("sd15", "sdxl")
RUN = {"width": 88, "height": 72, "steps": 4}  # a latent of 11 x 9
FIRST_RUN = {"width": 104, "height": 72, "steps": 2}  # of a compiled model

SHORT = {"steps": 2}  # where every step is like the first: one that is recorded, and one that is replayed

# What is applied (see ``controls``), how, and what is sampled then.
SCENES = {
    "one": (["net"], {}, SHORT),
    "a hint of another size": (["net"], {"width": 200, "height": 96}, SHORT),
    "strength 0": (["net"], {"strength": 0.0}, SHORT),
    "appears in mid-run": (["net"], {"start_percent": 0.4}, {}),
    "ends in mid-run": (["net"], {"end_percent": 0.5}, {}),
    "two of one network": (["net", "net"], {"strength": 0.6}, SHORT),
    "two networks, one T2I-Adapter": (["net", "adapter", "other"], {"strength": 0.4}, SHORT),
    "a T2I-Adapter that ends": (["adapter"], {"end_percent": 0.5}, {}),
    "batch 3, a hint each": (["net"], {"batch": 3}, {"batch": 3, "width": 72, "steps": 2}),
    "without CFG": (["net"], {"end_percent": 0.5}, {"cfg": 1.0}),
    "a long prompt, batch 2": (["net"], {}, {"tokens": 154, "batch": 2, "width": 72, "height": 104, "steps": 2}),
}
# Sampled with each node alone as well: what a node does at the begin and end of a run, and of a control.
IN_EVERY_WAY = ("one", "appears in mid-run", "ends in mid-run", "two networks, one T2I-Adapter")


@pytest.fixture(scope="module")
def unets(models):
    """One of each kind, to which T2I-Adapters fit."""
    return {name: models.unet(name, torch.float32, **config) for name, config in UNETS.items()}


@pytest.fixture(scope="module")
def nets(models):
    """The controls of each family by the names of SCENES."""
    return {
        name: {
            "net": models.controlnet(name, torch.float32, **config),
            "other": models.controlnet(name, torch.float32, **config),
            "adapter": models.t2i_adapter(name, **config),
        }
        for name, config in UNETS.items()
    }


@pytest.fixture(scope="module")
def plain(models, unets):
    """Eager's image without any control."""
    return sampled_once(models, unets)


def as_compiled(nets):
    """The controls of one family, those that can be compiled."""
    return {name: net if name == "adapter" else compiled_control(net) for name, net in nets.items()}


def sampled(models, patcher, nets, scene, **changes):
    """The latent of a scene."""
    names, apply, run = SCENES[scene]
    return models.sample(patcher, **RUN | run | changes, steer=steering(*(nets[name] for name in names), **apply))


@pytest.fixture(scope="module")
def warm(models, unets, nets, counting):
    """By family and way: (the UNet, its controls), after a first prompt at one size. From here on nothing may compile.

    That is after one of each kind that is another forward: without residuals, with those of a ControlNet, of a
    T2I-Adapter and of both, and with what skipped steps need.
    """
    ways = {}
    for name in FAMILIES:
        fast, control = compiled(unets[name]), as_compiled(nets[name])
        for batch in (1, 2):
            models.sample(fast, **FIRST_RUN | {"batch": batch})
        for scene in ("one", "a T2I-Adapter that ends", "two networks, one T2I-Adapter"):
            sampled(models, fast, control, scene, **FIRST_RUN)
        ways[name] = {"model": (fast, nets[name]), "control": (unets[name], control), "both": (fast, control)}
    fast, control = ways["sd15"]["both"]
    sampled(models, skipping(fast), control, "ends in mid-run", **FIRST_RUN | {"steps": 9})
    return ways


# Through the sampler ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", SCENES)
def test_image_equals_eager_and_nothing_compiles(models, unets, nets, plain, warm, scene, nothing_compiles):
    """Each scene after a run without any control, and a run without one after the last of them."""
    name = FAMILIES[list(SCENES).index(scene) % 2]
    run = RUN | SCENES[scene][2]
    wanted, without = sampled(models, unets[name], nets[name], scene), plain(name, run)
    assert (error(wanted, without) > 1e-3) != (scene == "strength 0")
    for way in warm[name] if scene in IN_EVERY_WAY else ("both",):
        patcher, controls = warm[name][way]
        assert error(sampled(models, patcher, controls, scene), wanted) < CLOSE, way
    assert error(models.sample(patcher, **run), without) < CLOSE
    assert_fast()


@pytest.mark.parametrize("scene", ["appears in mid-run", "ends in mid-run"])
def test_a_run_with_and_without_residuals(models, warm, scene, nothing_compiles):
    """What the scenes are about: one run has both kinds of call, and the network itself runs on some steps only."""
    sampled(models, *warm["sd15"]["both"], scene)
    calls = {kind: sum(s["calls"] for s in shapes() if kind in s["key"]) for kind in ("hint", "middle=1", "x[")}
    assert calls["hint"] == calls["middle=1"] == 2 and calls["x["] == 4 + 2


@pytest.mark.parametrize(("name", "rows"), [("sd15", 2), ("sdxl", 1)])
def test_residuals_equal_eager(nets, name, rows):
    """Each for itself, and each in memory of its own: ComfyUI multiplies them in place."""
    net, fast = nets[name]["net"].control_model, compiled_control(nets[name]["net"]).control_model
    sizes = [(88, 104), (168, 72), (64, 64)]
    for seed, (width, height) in enumerate(sizes + sizes[::-1]):  # each is recorded, and then replayed on other input
        call = control_inputs(net, width, height, rows, seed)
        with torch.inference_mode():
            wanted, out = net(**call), fast(**call)
        assert {key: len(each) for key, each in out.items()} == {key: len(each) for key, each in wanted.items()}
        pairs = [pair for key in wanted for pair in zip(out[key], wanted[key], strict=True)]
        assert max(error(*pair) for pair in pairs) < CLOSE, (width, height)
        given = {t.untyped_storage().data_ptr() for t in call.values() if t is not None}
        assert len({t.untyped_storage().data_ptr() for t, _ in pairs} - given) == len(pairs)
    assert_fast()
    assert {s["batch"] for s in shapes()} == {rows}


def control_inputs(net, width, height, rows, seed=0, tokens=77):
    """Random arguments of a ControlNet; sizes in image pixels, one hint for all rows."""
    y = randn(rows, 2816, seed=seed + 2) if net.num_classes else None
    return {
        "x": randn(rows, 4, height // 8, width // 8, seed=seed),
        "hint": randn(1, 3, height, width, seed=seed + 3).abs(),
        "timesteps": torch.full((rows,), 500.0),
        "context": randn(rows, tokens, 64, seed=seed + 1),
        "y": y,
    }


@pytest.fixture(scope="module")
def union(models):
    """(a UNet, a union ControlNet for it): ComfyUI builds those for 320 channels only."""
    tiny = UNETS["sdxl"] | {
        "model_channels": 320, "channel_mult": (1, 1), "num_res_blocks": [1, 1], "transformer_depth": [0, 1],
        "transformer_depth_output": [0, 0, 1, 1], "transformer_depth_middle": 1,
    }  # fmt: skip
    control = models.controlnet("sdxl", torch.float32, **tiny, union_controlnet_num_control_type=6)
    return models.unet("sdxl", torch.float32, **tiny), control


def test_union_controlnets(models, union):
    """Set Union ControlNet Type before our node or after it."""
    patcher, control = union
    eager = set_type(control, "openpose")
    wanted = models.sample(patcher, **SMALL_RUN, steer=steering(eager))
    for fast in (compiled_control(eager), set_type(compiled_control(control), "openpose")):
        assert error(models.sample(patcher, **SMALL_RUN, steer=steering(fast)), wanted) < CLOSE
    other = models.sample(patcher, **SMALL_RUN, steer=steering(set_type(control, "depth")))
    assert error(other, wanted) > 10 * CLOSE
    assert_fast()


def test_a_type_that_the_network_has_not_got(models, union):
    """ComfyUI's own words, and the network stays fast."""
    patcher, control = union
    fast = compiled_control(control)
    with pytest.raises(ValueError, match="out of range"):
        models.sample(patcher, **SMALL_RUN, steer=steering(set_type(fast, "tile")))
    assert "control type" in fallbacks()[0]["reason"]
    models.sample(patcher, **SMALL_RUN, steer=steering(set_type(fast, "depth")))
    assert shapes()[-1]["state"] == FUSED


def set_type(control, kind):
    from comfy_extras.nodes_controlnet import SetUnionControlNetType

    return SetUnionControlNetType.execute(control, kind).args[0]


def test_each_type_has_a_recording(union, recordings):
    """What is no tensor and yet decides the program: one type's may not be replayed for another."""
    net = union[1].control_model
    fast = compiled_control(union[1]).control_model
    for seed, types in enumerate(([], [0], [3], [3], [0], [])):
        call = control_inputs(net, 64, 72, 2, seed) | {"control_type": types}
        with torch.inference_mode():
            wanted, out = net(**call), fast(**call)
        assert error(out["middle"][0], wanted["middle"][0]) < CLOSE
    assert len(recordings) == 3 and len({s["key"] for s in shapes()}) == 3
    assert_fast()


@pytest.fixture
def small_net(models):
    """A ControlNet of the test's own, for the UNet ``patcher``."""
    return models.controlnet("sd15", torch.float32, **SMALL_UNET)


def test_manual_cast(models, patcher):
    """Weights in bf16, computed in fp32."""
    control = models.controlnet("sd15", torch.bfloat16, torch.float32, **SMALL_UNET)
    wanted = models.sample(patcher, **RUN | SHORT, steer=steering(control))
    out = models.sample(patcher, **RUN | SHORT, steer=steering(compiled_control(control)))
    assert error(out, wanted) < CLOSE
    assert_fast()


def test_batch_is_images_a_prompt(models, patcher, small_net):
    """As the user set it, with CFG and without."""
    for cfg in (7.0, 1.0):
        sampled(models, patcher, {"net": compiled_control(small_net)}, "batch 3, a hint each", cfg=cfg)
    assert [(s["width"], s["height"], s["batch"]) for s in shapes()] == [(72, 72, 3)] * 2


def test_a_mask_beside_the_hint(models, patcher):
    """As ControlNets for inpainting have it: ComfyUI adds a channel to the picture."""
    control = models.controlnet("sd15", torch.float32, **SMALL_UNET, hint_channels=4)
    control.concat_mask = True
    wanted = models.sample(patcher, **RUN | SHORT, steer=steering(control))
    out = models.sample(patcher, **RUN | SHORT, steer=steering(compiled_control(control)))
    assert error(out, wanted) < CLOSE and "hint[1x4x72x88]" in shapes()[0]["key"]
    assert_fast()


def test_a_run_records_what_is_new_alone(models, patcher, small_net, recordings):
    """Strength, percentages and another picture are no part of a recording; another size is."""
    fast = {"net": compiled_control(small_net)}
    for scene in ("one", "appears in mid-run", "ends in mid-run", "strength 0", "two of one network"):
        sampled(models, patcher, fast, scene)
    assert len(recordings) == 1
    sampled(models, patcher, fast, "one", width=96)
    assert len(recordings) == 2


# Skip Blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scene", "full"), [("one", 4), ("ends in mid-run", 5), ("appears in mid-run", 5)])
def test_skipped_steps_are_steered(models, unets, nets, warm, scene, full, nothing_compiles):
    """The same run whatever is compiled; where the control begins or ends, one more step is full."""
    unet, (fast, control) = unets["sd15"], warm["sd15"]["both"]
    wanted = sampled(models, skipping(unet), nets["sd15"], scene, steps=10)
    ways = [(fast, control), (unet, control), (fast, nets["sd15"])]
    for patcher, controls in ways if scene == "one" else ways[:1]:
        assert error(sampled(models, skipping(patcher), controls, scene, steps=10), wanted) < 1e-3
        assert (counted()["full"], counted()["skipped"]) == (full, 10 - full)
