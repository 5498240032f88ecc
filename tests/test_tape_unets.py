"""ComfyUI's UNets on a tape with all rules: which kernels they need, and what these compute. CPU, interpreted."""

import pytest
import torch

from tools import driving

pytestmark = pytest.mark.usefixtures("pack", "one_thread", "clean_stats")
SIZES = ((64, 64, 2), (104, 72, 1), (64, 96, 3), (264, 136, 2))  # in image pixels, and rows
HALF = torch.float16
NARROW = driving.NARROW_UNET | driving.TINY_UNET


def arguments(patcher, width, height, rows):
    """A UNet's, in half precision."""
    given = driving.unet_inputs(patcher, width, height, rows).items()
    return {name: item if item is None or name == "timesteps" else item.to(HALF) for name, item in given}


def recorded(patcher, *size):
    from tools.recording import recorded

    with torch.inference_mode():
        return recorded(patcher.model.diffusion_model, (), arguments(patcher, *size) | {"transformer_options": {}})


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_every_size_runs_on_the_kernels_of_the_first(models, name):
    patcher, known, calls = models.unet(name, HALF, **driving.SMALL_UNETS[name]), set(), frozenset()
    for size in SIZES:
        call = recorded(patcher, *size)
        sources = {launch.source.text for launch in call.program.launches}
        assert sources and (not known or sources <= known), size
        known |= sources
        calls = calls or call.program.calls
        assert call.program.calls <= calls and calls  # so it may be captured before it runs
        called = [str(step.run) for step in call.program._steps]
        # nothing is turned, and no copy is left but of what is given back
        assert not [step for step in called if "clone" in step or "conv2d.default" in step or "group_norm.def" in step]


def test_a_fused_unet_gives_what_comfyui_gives(models):
    """With every kernel by hand. The others are compared by the check of their first result, below."""
    call = recorded(models.unet("sdxl", HALF, **NARROW, transformer_depth_middle=1), 64, 72, 1)
    out = call.run()
    assert out.stride() == call.out.stride()
    assert (out - call.out).float().norm() / call.out.float().norm() < 5e-3


@pytest.mark.parametrize("kind", ["controlnet", "t2i adapter"])  # all of one kind of list, some of the other
def test_residuals_of_a_controlnet_are_inputs(models, plain_kernels, kind):
    """What ComfyUI adds in place keeps no picture from lying channels last; the caller's lists stay as they are."""
    from tools.recording import recorded as on_a_tape

    # the residuals' shapes are found by a forward in float32
    control = driving.residuals(models.unet("sd15", torch.float32, **NARROW), (2, 4, 8, 9), kind)
    control = {name: [item if item is None else item.half() for item in items] for name, items in control.items()}
    patcher = models.unet("sd15", HALF, **NARROW)
    given = arguments(patcher, 72, 64, 2) | {"transformer_options": {}}
    lengths = {name: len(items) for name, items in control.items()}
    with torch.inference_mode():
        call = on_a_tape(patcher.model.diffusion_model, (), given | {"control": control})
        plain = patcher.model.diffusion_model(**given)
        out = call.run()
    assert {name: len(items) for name, items in control.items()} == lengths
    tensors = [item for items in control.values() for item in items if item is not None]
    assert len(call.inputs) == len([item for item in given.values() if torch.is_tensor(item)]) + len(tensors)
    called = [str(step.run) for step in call.program._steps]
    assert not [step for step in called if "clone" in step or "conv2d.default" in step or "group_norm.def" in step]
    assert (out - call.out).float().norm() / call.out.float().norm() < 5e-3
    assert (out - plain).float().norm() / plain.float().norm() > 1e-2
    tensors[0].mul_(-2)  # it is read at each run
    assert not torch.equal(call.run(), out)


def test_sampling_lays_weights_out_and_back(models, plain_kernels, monkeypatch):
    """Through Compile Model, with the check on: no fallback, no kernel of one size, weights as ComfyUI had them."""
    from anyshape.accel import stats, tape_tier
    from anyshape.accel.tape import kernels

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    monkeypatch.setattr(kernels, "_COMPILED", {})  # whatever other tests have compiled
    patcher = models.unet("sd15", HALF, **NARROW)
    model = driving.compiled(patcher)
    weights = {name: weight for name, weight in patcher.model.named_parameters() if weight.ndim == 4}
    before = {name: (weight.data_ptr(), weight.stride(), weight.clone()) for name, weight in weights.items()}
    seen = []

    def look(apply, given):
        out = apply(given["input"], given["timestep"], **given["c"])
        seen.append([weight.is_contiguous() for weight in weights.values() if weight.shape[2:].numel() > 1])
        return out

    model.set_model_unet_function_wrapper(look)
    for width in (64, 72):
        eager, out = (models.sample(each, width=width, height=64, steps=2, cfg=1.0) for each in (patcher, model))
        assert (out - eager).float().norm() / eager.float().norm() < 5e-3
    assert len(seen) == 4 and not any(any(each) for each in seen)
    for name, weight in weights.items():
        address, stride, value = before[name]
        assert (weight.data_ptr(), weight.stride()) == (address, stride) and torch.equal(weight, value)
    found = stats.snapshot()
    (entry,) = [entry for entry in found["models"] if entry["shapes"]]
    assert [shape["state"] for shape in entry["shapes"]] == ["tape", "tape"] and not found["fallbacks"]
    assert entry["kernels"] > 10 and not entry["recompiles"]
    assert len(entry["inexact"]) == 5


def test_weights_that_a_control_lora_shares_stay_as_they_are(models, plain_kernels, monkeypatch):
    """ComfyUI makes its network of the model's own memory, before the model's first step lays anything out."""
    from anyshape.accel import tape_tier

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    patcher = models.unet("sd15", HALF, **NARROW)
    steer, run = driving.steering(models.control_lora(patcher)), {"width": 64, "height": 64, "steps": 3, "cfg": 1.0}
    eager, out = (models.sample(each, **run, steer=steer) for each in (patcher, driving.compiled(patcher)))
    assert (out - eager).float().norm() / eager.float().norm() < 5e-3
    assert (models.sample(patcher, **run) - eager).float().norm() / eager.float().norm() > 1e-2


def test_the_first_recording_sees_weights_as_comfyui_has_them(models, plain_kernels, monkeypatch):
    """A later size is recorded as they lie for the programs: libraries plan for one layout only."""
    from anyshape.accel import tape_tier, tapes

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    patcher = models.unet("sd15", HALF, **NARROW)
    model, record, seen = driving.compiled(patcher), tapes.Tapes.record, []

    def noted(self, *args):
        convolutions = (weight for weight in patcher.model.parameters() if weight.ndim == 4)
        seen.append(all(weight.is_contiguous() for weight in convolutions))
        return record(self, *args)

    monkeypatch.setattr(tapes.Tapes, "record", noted)

    def twice(apply, given):
        apply(given["input"], given["timestep"], **given["c"])
        half = {name: item[:1] if isinstance(item, torch.Tensor) else item for name, item in given["c"].items()}
        apply(given["input"][:1], given["timestep"][:1], **half)
        return given["input"]

    model.set_model_unet_function_wrapper(twice)
    models.sample(model, width=64, height=64, steps=2)
    assert seen == [True, False]
    assert all(weight.is_contiguous() for weight in patcher.model.parameters() if weight.ndim == 4)


def test_a_controlnet_that_begins_or_ends_in_mid_run_records_nothing_twice(models, monkeypatch):
    from anyshape.accel import stats, tapes

    patcher = models.unet("sd15", torch.float32, **NARROW)
    model, record, recorded = driving.compiled(patcher, mode="exact"), tapes.Tapes.record, []
    monkeypatch.setattr(tapes.Tapes, "record", lambda self, *args: (recorded.append(args[0]), record(self, *args))[1])
    control = driving.residuals(patcher, (2, 4, 8, 8), "controlnet")
    control = {name: [item.contiguous(memory_format=torch.channels_last) for item in control[name]] for name in control}
    louder = {name: [2 * item for item in items] for name, items in control.items()}
    for given in (None, control, None, louder, control, None):
        out = driving.unet_forward(model, 64, 64, control=given)
        emptied = given and {
            name: list(items) for name, items in given.items()
        }  # ComfyUI takes residuals off its lists
        assert torch.equal(out, driving.unet_forward(patcher, 64, 64, control=emptied))
    assert len(recorded) == 2
    (entry,) = [entry for entry in stats.snapshot()["models"] if entry["shapes"]]
    assert {shape["calls"] for shape in entry["shapes"]} == {3}
    assert not [shape for shape in entry["shapes"] if "strides" in shape["key"]]


def test_transformer_blocks_of_all_stages_are_found(models):
    """Stages are of one class, and hardly two are alike; lists of one block count together."""
    from anyshape.accel.tape import blocks

    model = models.unet("sd15", HALF, **NARROW).model.diffusion_model
    kinds = {type(model.get_submodule(path)).__name__ for path in blocks.find(model)}
    wanted = [path for path, part in model.named_modules() if type(part).__name__ == "BasicTransformerBlock"]
    assert sorted(blocks.find(model)) == sorted(wanted) and len(wanted) > 3 and kinds == {"BasicTransformerBlock"}
    found = blocks.find(model, stages=True)
    parts = [path for path, part in model.named_modules() if type(part).__name__ == "ResBlock"]
    assert set(found) >= {*wanted, *parts} and len(parts) > 3
    assert not any(path != other and path.startswith(f"{other}.") for path in found for other in found)


def test_a_block_may_mind_which_one_it_is(models):
    """ComfyUI's own does not, where no patch asks. Then nothing but its weights tells it from another."""
    from anyshape.accel.comfy import taping

    block = models.unet("sd15", HALF, **NARROW).model.diffusion_model.middle_block[1].transformer_blocks[0]
    assert "block_index" in taping._places({}, False, block) and "patches" not in taping._places({}, False, block)
    assert not taping._places({}, True, block)
    assert taping._places({"patches": {}}, False, block)
    assert not taping._places({"patches": {"attn1_patch": [print]}}, False, block)
    assert taping._places({"patches": {"attn1_patch": [print]}}, False, block, uncalled=True)
    assert not taping._places({"patches_replace": {"attn1": {("middle", 0): print}}}, False, block, uncalled=True)
    assert not taping._places({"optimized_attention_override": print}, False, block)
    own = block.ff
    try:
        block.ff = type("Theirs", (type(own),), {"__module__": "custom_nodes.theirs"})(32)
        assert not taping._places({}, False, block)
    finally:
        block.ff = own
